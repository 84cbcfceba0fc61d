/* The cpu device: the table, the embedding and what is too small for a file of its own. */
#include "model/ops_cpu.h"

#include <cblas.h>
#include <omp.h>
#include <pthread.h>
#include <string.h>

/* The BLAS is always called from inside our own OpenMP regions, each thread for a part of its own. Its own threads
 * would only compete with them, whichever variant of the library (serial, pthread, openmp) is linked. */
static void single_threaded_blas(void) {
    int threads = omp_get_max_threads();
    openblas_set_num_threads(1);
    omp_set_num_threads(threads); /* the openmp variant passes the number on to OpenMP */
}

/* Debian's serial build of OpenBLAS is not safe when two threads call it at once: wrong results, no error. */
static Status available(void) {
    if (openblas_get_parallel() == OPENBLAS_SEQUENTIAL)
        return fault("cpu: this OpenBLAS is built without threads and cannot be called from several; "
                     "select another one (libopenblas0-pthread or libopenblas0-openmp)");
    return OK;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static void prepare(OpsContext *context, const OpsLimits *limits) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, single_threaded_blas);
    context->threads = omp_get_max_threads();
    size_t bytes = attention_cpu_scratch_bytes(limits, context->threads);
    bytes = larger(bytes, layernorm_cpu_scratch_bytes(limits));
    context->scratch_bytes = larger(bytes, head_cpu_scratch_bytes(limits));
}

static void copy(OpsContext *context, void *to, const void *from, size_t bytes) {
    (void)context;
    memcpy(to, from, bytes);
}

static void read_acts(OpsContext *context, float *host, const Act *device, size_t elems) {
    copy(context, host, device, elems * sizeof *host);
}

static void clear(OpsContext *context, void *device, size_t bytes) {
    enum { PIECE = 64 << 10 };
    size_t pieces = (bytes + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(context->threads) schedule(static)
    for (size_t i = 0; i < pieces; i++)
        memset((char *)device + i * PIECE, 0, i + 1 < pieces ? PIECE : bytes - i * PIECE);
}

static void embedding_forward(OpsContext *context, float *x, const int *tokens, const float *wte, const float *wpe,
                              int B, int T, int C) {
#pragma omp parallel for num_threads(context->threads) schedule(static)
    for (int row = 0; row < B * T; row++) {
        const float *token = wte + (size_t)tokens[row] * (size_t)C;
        const float *position = wpe + (size_t)(row % T) * (size_t)C;
        float *out = x + (size_t)row * (size_t)C;
        for (int c = 0; c < C; c++)
            out[c] = token[c] + position[c];
    }
}

/* A thread owns a slice of the channels in every row of both tables, so rows may repeat and the order of the sums is
 * that of the positions. */
static void embedding_backward(OpsContext *context, float *dwte, float *dwpe, const float *dx, const int *tokens, int B,
                               int T, int C, int maxT, bool accumulate) {
#pragma omp parallel num_threads(context->threads)
    {
        Range channels = range_part(C, 16, omp_get_thread_num(), omp_get_num_threads());
        int first = channels.begin;
        size_t width = (size_t)(channels.end - first);
        if (!accumulate && width > 0)
            for (int t = 0; t < maxT; t++)
                memset(dwpe + (size_t)t * (size_t)C + first, 0, width * sizeof(float));
        for (int row = 0; row < B * T; row++) {
            const float *in = dx + (size_t)row * (size_t)C + first;
            float *token = dwte + (size_t)tokens[row] * (size_t)C + first;
            float *position = dwpe + (size_t)(row % T) * (size_t)C + first;
            for (size_t c = 0; c < width; c++) {
                token[c] += in[c];
                position[c] += in[c];
            }
        }
    }
}

static double mean(OpsContext *context, const float *values, int count) {
    (void)context;
    double sum = 0;
    for (int i = 0; i < count; i++)
        sum += (double)values[i];
    return sum / count;
}

const Ops ops_cpu = {
    .name = "cpu",
    .act_bytes = sizeof(float),
    .head_logits = 26 << 20, /* 104 MiB: 512 rows at GPT-2's vocabulary, from where on BLAS runs at full rate */
    .available = available,
    .prepare = prepare,
    .upload = copy,
    .download = copy,
    .read = read_acts,
    .clear = clear,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
    .layernorm_forward = layernorm_forward_cpu,
    .layernorm_backward = layernorm_backward_cpu,
    .linear_forward = linear_forward_cpu,
    .gelu_forward = gelu_forward_cpu,
    .linear_backward = linear_backward_cpu,
    .attention_forward = attention_forward_cpu,
    .attention_backward = attention_backward_cpu,
    .attention_cached = attention_cached_cpu,
    .head_loss = head_loss_cpu,
    .head_backward = head_backward_cpu,
    .mean = mean,
};
