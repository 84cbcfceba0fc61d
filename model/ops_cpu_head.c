/* The head on the cpu: logits, softmax, loss and gradients of a chunk of positions, in few passes over the logits,
 * which are too large for any cache.
 *
 *   z = x wte^T;   per row  e = exp(z - max z), sum = sum of e, loss = log sum - (z[target] - max z)
 *   dz = scale (e / sum - onehot) = s e'   with  s = scale / sum,  e' = e - sum * onehot
 *   dwte = dz^T x = e'^T (s x),   dx = dz wte = s (e' wte)
 *
 * So dz is never stored: e' replaces z in the one pass that exponentiates, and s scales x and dx, which are narrow.
 * Until it receives its own value, dx holds s x. Each row of z is read for its maximum and again right after, from
 * L2. */
#include "model/ops_cpu.h"

#include <omp.h>

size_t head_cpu_scratch_bytes(const OpsLimits *limits) { return (size_t)limits->rows * sizeof(float); }

typedef struct Row {
    float sum;  /* of e over the V real tokens: at least 1, or NaN */
    float loss;
} Row;

/* Replaces a row of logits by e. */
static Row exponentiate(float *logits, int target, int V) {
    float wanted = logits[target], max = row_max(logits, (size_t)V), sum = 0;
    for (int v = 0; v < V; v++) {
        logits[v] = fast_exp(logits[v] - max);
        sum += logits[v];
    }
    return (Row){.sum = sum, .loss = logf(sum) - (wanted - max)};
}

static void scale_row(float *out, const float *in, float scale, int C) {
    for (int c = 0; c < C; c++)
        out[c] = in[c] * scale;
}

void head_loss_cpu(OpsContext *context, float *losses, float *logits, const float *x, const float *wte,
                   const int *targets, int rows, int C, int V, int Vp) {
    linear_forward_cpu(context, logits, NULL, x, wte, NULL, NULL, rows, C, Vp);
#pragma omp parallel for num_threads(context->threads) schedule(static)
    for (int row = 0; row < rows; row++)
        losses[row] = exponentiate(logits + (size_t)row * (size_t)Vp, targets[row], V).loss;
}

void head_backward_cpu(OpsContext *context, float *losses, float *logits, float *dx, float *dwte, const float *x,
                       const float *wte, const int *targets, int rows, int C, int V, int Vp, float scale,
                       bool accumulate) {
    float *scales = context->scratch; /* [rows]: s */
    size_t width = (size_t)C;
#pragma omp parallel num_threads(context->threads)
    {
        int index = omp_get_thread_num(), parts = omp_get_num_threads();
        matmul_tile(tile_of(rows, Vp, index, parts), logits, Vp, plain(x, C), transposed(wte, C), C, false);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++) {
            float *out = logits + (size_t)row * (size_t)Vp;
            Row result = exponentiate(out, targets[row], V);
            out[targets[row]] -= result.sum;
            memset(out + V, 0, (size_t)(Vp - V) * sizeof(float));
            losses[row] = result.loss;
            scales[row] = scale / result.sum;
            scale_row(dx + (size_t)row * width, x + (size_t)row * width, scales[row], C);
        }
        matmul_tile(tile_of(Vp, C, index, parts), dwte, C, transposed(logits, Vp), plain(dx, C), rows, accumulate);
#pragma omp barrier
        matmul_tile(tile_of(rows, C, index, parts), dx, C, plain(logits, Vp), plain(wte, C), Vp, false);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int row = 0; row < rows; row++)
            scale_row(dx + (size_t)row * width, dx + (size_t)row * width, scales[row], C);
    }
}
