/* build/gpu_rates FILE.cfg [section.key=value ...]: what a GPU reaches on the parts that a training step of FILE.cfg's
 * model is made of, each alone, at train.batch and train.seq_len. Needs a build with CUDA.
 *
 *     copy        GB/s moved in copying within its memory, read and written: what compressors are held against
 *     matmul      TFLOP/s of y = x w^T, per type, over the model's own shapes and a large square one
 *     attention   TFLOP/s of causal attention in bf16, masked half not counted, backward as two forwards: our own path,
 *                 and cuDNN's with sums to dq in any order and in a fixed one
 *     encode, decode_add   GB/s moved by each compressor, with error feedback: all that its kernel reads and writes
 *     best        per type the best matmul: what a step's MFU is held against
 *     model       MFLOP per token of a whole training step, as gpt2_flops_per_token counts
 *
 * A time is that of many calls in a row, which the host waits for only at the end; median of rounds. */
#include "base/clock.h"
#include "base/gpu.h"
#include "base/random.h"
#include "base/report.h"
#include "comm/compress/bf16.h"
#include "comm/compress/compress_cuda.h"
#include "model/attention_cudnn.h"
#include "model/ops_cuda.h"
#include "run/settings.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ARGS_MAX = 64, ROUNDS_MAX = 25, COLUMNS = 6, DTYPES = 3 };

static const char *const dtype_names[DTYPES] = {"f32", "tf32", "bf16"};

typedef struct RatesOptions {
    int64_t square, copy_mib, round_ms, rounds;
    bool json, card;
} RatesOptions;

typedef struct Bench {
    const RatesOptions *options;
    const Gpt2Config *model;
    int B, T;
    Gpu *gpu;
    Report report;
    Status status; /* the first fault of the device */
} Bench;

/* ---- time ---- */

typedef void WorkFn(void *user); /* enqueues one call */

/* Of `calls` in a row, until the device is done. */
static double calls_s(Bench *bench, WorkFn *work, void *user, int64_t calls) {
    double start_s = clock_s();
    for (int64_t i = 0; i < calls; i++)
        work(user);
    Status status = gpu_finish(bench->gpu);
    bench->status = bench->status == OK ? status : bench->status;
    return clock_s() - start_s;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds of one call. */
static double time_s(Bench *bench, WorkFn *work, void *user) {
    double least_s = 1e-3 * (double)bench->options->round_ms, rounds_s[ROUNDS_MAX];
    int64_t calls = 1;
    calls_s(bench, work, user, 1);
    for (double used_s; bench->status == OK && (used_s = calls_s(bench, work, user, calls)) < least_s;)
        calls *= used_s < least_s / 8 ? 8 : 2;
    for (int round = 0; round < bench->options->rounds; round++)
        rounds_s[round] = calls_s(bench, work, user, calls) / (double)calls;
    qsort(rounds_s, (size_t)bench->options->rounds, sizeof *rounds_s, compare_doubles);
    return rounds_s[bench->options->rounds / 2];
}

/* ---- rows ---- */

static const ReportColumn columns[COLUMNS] = {
    {"part", "part", "%-10s"}, {"type", "type", "%-19s"}, {"what", "what", "%-27s"},
    {"us", "us", "%10.1f"},    {"rate", "rate", "%.1f"},  {"unit", "unit", "%-8s"},
};

/* us may be NAN. Nothing is shown once something has failed. */
static void put_row(Bench *bench, const char *part, const char *type, const char *what, double us, double rate,
                    const char *unit) {
    const ReportValue values[COLUMNS] = {{.text = part}, {.text = type},   {.text = what},
                                         {.number = us}, {.number = rate}, {.text = unit}};
    if (bench->status == OK)
        report_row(&bench->report, values);
}

/* Of calls of `flops` each. Returns the rate. */
static double flops_row(Bench *bench, const char *part, const char *type, const char *what, double seconds,
                        double flops) {
    put_row(bench, part, type, what, 1e6 * seconds, 1e-12 * flops / seconds, "TFLOP/s");
    return 1e-12 * flops / seconds;
}

static void bytes_row(Bench *bench, const char *part, const char *type, const char *what, double seconds,
                      size_t bytes) {
    put_row(bench, part, type, what, 1e6 * seconds, 1e-9 * (double)bytes / seconds, "GB/s");
}

static void *device_memory(Bench *bench, size_t bytes) {
    void *memory = memory_alloc(gpu_memory(bench->gpu), bytes);
    if (!memory && bench->status == OK)
        bench->status = fault("no memory on the GPU for %zu MiB", bytes >> 20);
    return memory;
}

static void device_free(Bench *bench, void *memory) { memory_free(gpu_memory(bench->gpu), memory); }

/* Numbers drawn from N(0, 1), a million of them over and over: a card takes less power, and less time, for zeros. */
static void *device_numbers(Bench *bench, size_t elems, bool bf16) {
    enum { DRAWN = 1 << 20 };
    size_t size = bf16 ? sizeof(uint16_t) : sizeof(float);
    char *memory = device_memory(bench, elems * size), *host = malloc(DRAWN * size);
    for (size_t i = 0; host && i < DRAWN && i < elems; i++) {
        float value = (float)random_normal(1, 0, i);
        uint16_t half = bf16_from_float(value);
        memcpy(host + i * size, bf16 ? (void *)&half : (void *)&value, size);
    }
    for (size_t done = 0; host && memory && done < elems; done += DRAWN)
        gpu_copy_in(bench->gpu, memory + done * size, host, (elems - done < DRAWN ? elems - done : DRAWN) * size);
    if (gpu_finish(bench->gpu) != OK || !host)
        bench->status = host ? FAULT : fault("no memory for a million numbers");
    free(host);
    return memory;
}

/* ---- copying ---- */

typedef struct Copy {
    Gpu *gpu;
    void *to, *from;
    size_t bytes;
} Copy;

static void copy_work(void *user) {
    Copy *copy = user;
    gpu_copy(copy->gpu, copy->to, copy->from, copy->bytes);
}

static void measure_copy(Bench *bench) {
    Copy copy = {.gpu = bench->gpu, .bytes = (size_t)bench->options->copy_mib << 20};
    char what[32];
    snprintf(what, sizeof what, "%lld MiB", (long long)bench->options->copy_mib);
    copy.from = device_numbers(bench, copy.bytes / sizeof(float), false);
    copy.to = device_memory(bench, copy.bytes);
    if (bench->status == OK)
        bytes_row(bench, "copy", "", what, time_s(bench, copy_work, &copy), 2 * copy.bytes);
    device_free(bench, copy.from);
    device_free(bench, copy.to);
}

/* ---- products ---- */

typedef struct Linear {
    const char *name;
    int rows, in, out;
    const Ops *ops;
    OpsContext *context;
    float *w;
    void *x, *y;
} Linear;

static void linear_work(void *user) {
    Linear *l = user;
    l->ops->linear_forward(l->context, l->y, NULL, l->x, l->w, NULL, NULL, l->rows, l->in, l->out);
}

/* The model's linear layers, its head over all rows, and the square. */
enum { LINEARS = 6 };
static void linears(const Bench *bench, Linear *all) {
    int C = bench->model->channels, rows = bench->B * bench->T, n = (int)bench->options->square;
    const Linear list[LINEARS] = {{.name = "qkv", .rows = rows, .in = C, .out = 3 * C},
                                  {.name = "attproj", .rows = rows, .in = C, .out = C},
                                  {.name = "fc", .rows = rows, .in = C, .out = 4 * C},
                                  {.name = "fcproj", .rows = rows, .in = 4 * C, .out = C},
                                  {.name = "head", .rows = rows, .in = C, .out = bench->model->vocab_padded},
                                  {.name = "square", .rows = n, .in = n, .out = n}};
    memcpy(all, list, sizeof list);
}

static double measure_linear(Bench *bench, Linear *linear, const char *type) {
    char what[64];
    snprintf(what, sizeof what, "%s %d x %d x %d", linear->name, linear->rows, linear->in, linear->out);
    double flops = 2.0 * linear->rows * linear->in * linear->out;
    return flops_row(bench, "matmul", type, what, time_s(bench, linear_work, linear), flops);
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* What one type's operations need: their table, scratch, and operands as large as the largest of all shapes. */
typedef struct Device {
    CudaOps *cuda;
    const Ops *ops;
    OpsContext context;
    float *w;
    void *x, *y;
} Device;

static void device_destroy(Bench *bench, Device *device) {
    cuda_ops_destroy(device->cuda);
    device_free(bench, device->context.scratch);
    device_free(bench, device->w);
    device_free(bench, device->x);
    device_free(bench, device->y);
}

static void device_create(Bench *bench, Device *device, CudaDtype dtype, const Linear *all) {
    size_t w = 0, x = 0, y = 0;
    for (int i = 0; i < LINEARS; i++) {
        w = larger(w, (size_t)all[i].in * (size_t)all[i].out);
        x = larger(x, (size_t)all[i].rows * (size_t)all[i].in);
        y = larger(y, (size_t)all[i].rows * (size_t)all[i].out);
    }
    *device = (Device){.w = device_numbers(bench, w, false), .x = device_numbers(bench, x, dtype == CUDA_BF16)};
    device->y = device_memory(bench, y * (dtype == CUDA_BF16 ? 2 : 4));
    if (bench->status == OK)
        bench->status = cuda_ops_create(&device->cuda, bench->gpu, dtype, device->w, (int64_t)w);
    if (bench->status != OK)
        return;
    device->ops = cuda_ops(device->cuda);
    device->context.state = device->ops->state;
    OpsLimits limits = {bench->B * bench->T, bench->T, bench->model->channels, bench->model->heads};
    device->ops->prepare(&device->context, &limits);
    device->context.scratch = device_memory(bench, device->context.scratch_bytes);
}

static double measure_products(Bench *bench, Device *device, Linear *all, const char *type) {
    double best = 0;
    for (int i = 0; i < LINEARS && bench->status == OK; i++) {
        Linear linear = all[i];
        linear.ops = device->ops, linear.context = &device->context;
        linear.w = device->w, linear.x = device->x, linear.y = device->y;
        best = fmax(best, measure_linear(bench, &linear, type));
    }
    return best;
}

/* ---- attention, bf16 ---- */

typedef struct Attention {
    Device *device;
    CudnnAttention *cudnn; /* NULL: our own path */
    void *qkv, *dqkv, *y, *dy, *workspace;
    float *lse;
    int B, T, C, NH;
} Attention;

static void forward_work(void *user) {
    Attention *a = user;
    a->device->ops->attention_forward(&a->device->context, a->y, a->lse, a->qkv, a->B, a->T, a->C, a->NH);
}

static void backward_work(void *user) {
    Attention *a = user;
    a->device->ops->attention_backward(&a->device->context, a->dqkv, a->dy, a->y, a->qkv, a->lse, a->B, a->T, a->C,
                                       a->NH);
}

static void attention_rows(Bench *bench, Attention *a, const char *type, WorkFn *forward, WorkFn *backward) {
    double flops = 2.0 * a->B * a->T * a->T * a->C;
    char what[64];
    snprintf(what, sizeof what, "forward B%d T%d HS%d", a->B, a->T, a->C / a->NH);
    flops_row(bench, "attention", type, what, time_s(bench, forward, a), flops);
    snprintf(what, sizeof what, "backward B%d T%d HS%d", a->B, a->T, a->C / a->NH);
    flops_row(bench, "attention", type, what, time_s(bench, backward, a), 2 * flops);
}

#ifdef HAVE_CUDNN
static void cudnn_forward_work(void *user) {
    Attention *a = user;
    cudnn_attention_forward(a->cudnn, a->y, a->lse, a->qkv, a->workspace, a->B, a->T, a->C, a->NH);
}

static void cudnn_backward_work(void *user) {
    Attention *a = user;
    cudnn_attention_backward(a->cudnn, a->dqkv, a->dy, a->y, a->qkv, a->lse, a->workspace, a->B, a->T, a->C, a->NH);
}

/* Where cuDNN cannot be had there is no row, but a line. */
static void measure_cudnn(Bench *bench, Attention *a, bool deterministic) {
    const char *why = "", *type = deterministic ? "cuDNN deterministic" : "cuDNN";
    bool usable = cudnn_attention_create(&a->cudnn, bench->gpu, deterministic) == OK;
    if (usable && cudnn_attention_prepare(a->cudnn, a->B, a->T, a->C, a->NH, &why)) {
        a->workspace = device_memory(bench, cudnn_attention_workspace_bytes(a->cudnn, a->B, a->T, a->C, a->NH));
        if (bench->status == OK)
            attention_rows(bench, a, type, cudnn_forward_work, cudnn_backward_work);
        device_free(bench, a->workspace);
    } else {
        fprintf(stderr, "gpu_rates: %s: %s\n", type, usable ? why : error_line());
    }
    cudnn_attention_destroy(a->cudnn);
    a->cudnn = NULL;
}
#endif

static void measure_attention(Bench *bench, Device *device) {
    int C = bench->model->channels;
    size_t elems = (size_t)bench->B * (size_t)bench->T * (size_t)C;
    Attention a = {.device = device, .B = bench->B, .T = bench->T, .C = C, .NH = bench->model->heads};
    a.qkv = device_numbers(bench, 3 * elems, true);
    a.dy = device_numbers(bench, elems, true);
    a.dqkv = device_memory(bench, 3 * elems * 2);
    a.y = device_memory(bench, elems * 2);
    a.lse = device_memory(bench, (size_t)a.B * (size_t)a.NH * (size_t)a.T * sizeof(float));
    if (bench->status == OK)
        attention_rows(bench, &a, "own", forward_work, backward_work);
#ifdef HAVE_CUDNN
    for (int deterministic = 0; deterministic < 2 && bench->status == OK; deterministic++)
        measure_cudnn(bench, &a, deterministic);
#endif
    void *all[] = {a.qkv, a.dy, a.dqkv, a.y, a.lse};
    for (int i = 0; i < 5; i++)
        device_free(bench, all[i]);
}

/* ---- compressors ---- */

typedef struct Code {
    Gpu *gpu;
    const CudaCompressor *cuda;
    const CompressorOptions *options;
    int64_t elems;
    float *values, *residual, *sum;
    void *wire;
} Code;

static void encode_work(void *user) {
    Code *c = user;
    c->cuda->encode(c->gpu, gpu_stream(c->gpu), c->options, 0, c->elems, c->values, 1, c->residual, c->residual,
                    c->wire);
}

static void decode_add_work(void *user) {
    Code *c = user;
    c->cuda->decode_add(c->gpu, gpu_stream(c->gpu), c->options, 0, c->elems, c->wire, c->sum);
}

/* Share of the sum that decode_add reads and writes: memory moves 32 bytes at once, of which topk needs those that hold
 * a value that was kept. */
static double touched(const CompressorOptions *options) {
    return options->density > 0 ? 1 - pow(1 - options->density, 32.0 / sizeof(float)) : 1;
}

/* Encoding reads values and residuals, writes residuals and the wire. */
static void compressor_rows(Bench *bench, Code *code) {
    static const struct {
        const char *name;
        const Compressor *compressor;
        CompressorOptions options;
    } contenders[] = {{"bf16", &compressor_bf16, {0, false}},
                      {"int8", &compressor_int8, {0, false}},
                      {"int4", &compressor_int4, {0, false}},
                      {"topk 1 %", &compressor_topk, {0.01, false}},
                      {"topk 10 %", &compressor_topk, {0.1, false}}};
    size_t bytes = (size_t)code->elems * sizeof(float), wire;
    char what[32];
    snprintf(what, sizeof what, "%lld MiB", (long long)bench->options->copy_mib);
    for (size_t i = 0; i < sizeof contenders / sizeof *contenders && bench->status == OK; i++) {
        code->cuda = cuda_compressor(contenders[i].compressor);
        code->options = &contenders[i].options;
        if (!code->cuda)
            continue;
        wire = code->cuda->compressor->wire_bytes(code->options, 0, code->elems);
        bytes_row(bench, "encode", contenders[i].name, what, time_s(bench, encode_work, code), 3 * bytes + wire);
        bytes_row(bench, "decode_add", contenders[i].name, what, time_s(bench, decode_add_work, code),
                  (size_t)(2 * (double)bytes * touched(code->options)) + wire);
    }
}

/* No wire is longer than what it encodes. */
static void measure_compressors(Bench *bench) {
    size_t bytes = (size_t)bench->options->copy_mib << 20;
    Code code = {.gpu = bench->gpu, .elems = (int64_t)(bytes / sizeof(float))};
    code.values = device_numbers(bench, (size_t)code.elems, false);
    code.residual = device_memory(bench, bytes);
    code.sum = device_memory(bench, bytes);
    code.wire = device_memory(bench, bytes);
    if (bench->status == OK)
        compressor_rows(bench, &code);
    void *all[] = {code.values, code.residual, code.sum, code.wire};
    for (int i = 0; i < 4; i++)
        device_free(bench, all[i]);
}

/* ---- the program ---- */

static void measure(Bench *bench) {
    double best[DTYPES] = {0};
    Linear all[LINEARS];
    linears(bench, all);
    measure_copy(bench);
    for (int dtype = 0; dtype < DTYPES && bench->status == OK; dtype++) {
        Device device;
        device_create(bench, &device, (CudaDtype)dtype, all);
        best[dtype] = measure_products(bench, &device, all, dtype_names[dtype]);
        if (dtype == CUDA_BF16 && bench->status == OK)
            measure_attention(bench, &device);
        device_destroy(bench, &device);
    }
    measure_compressors(bench);
    for (int dtype = 0; dtype < DTYPES; dtype++)
        put_row(bench, "best", dtype_names[dtype], "matmul", NAN, best[dtype], "TFLOP/s");
    put_row(bench, "model", "", "a step, per token", NAN, 1e-6 * gpt2_flops_per_token(bench->model, bench->T), "MFLOP");
}

static Status open_card(Gpu **gpu) {
    const char *why;
    return gpu_count(&why) > 0 ? gpu_open(gpu, 0) : fault("no GPU was found: %s", why);
}

static Status show_card(void) {
    Gpu *gpu = NULL;
    Status status = open_card(&gpu);
    if (status == OK)
        puts(gpu_name(gpu));
    gpu_close(gpu);
    return status;
}

static Status run(int argc, char **argv, const RatesOptions *options) {
    Settings settings;
    Gpt2Config config;
    Bench bench = {.options = options, .model = &config};
    bench.report = (Report){.out = stdout, .json = options->json, .columns = columns, .count = COLUMNS};
    Status status = settings_read(&settings, argc, argv);
    if (status == OK)
        status = settings_model(&settings, &config);
    bench.B = (int)settings.train.batch, bench.T = (int)settings.train.seq_len;
    if (status == OK)
        status = open_card(&bench.gpu);
    if (status == OK) {
        fprintf(stderr, "# %s\n", gpu_name(bench.gpu));
        measure(&bench);
        status = bench.status;
    }
    gpu_close(bench.gpu);
    settings_free(&settings);
    return status;
}

int main(int argc, char **argv) {
    static const Option table[] = {
        {.key = "square", .type = OPTION_INT, .offset = offsetof(RatesOptions, square), .initial = "8192", .min = 8,
         .max = 32768, .help = "rows and columns of the square matmul"},
        {.key = "copy_mib", .type = OPTION_INT, .offset = offsetof(RatesOptions, copy_mib), .initial = "1024",
         .min = 1, .max = 65536, .help = "size of what is copied, in MiB"},
        {.key = "round_ms", .type = OPTION_INT, .offset = offsetof(RatesOptions, round_ms), .initial = "30", .min = 0,
         .max = 10000, .help = "least time of a round"},
        {.key = "rounds", .type = OPTION_INT, .offset = offsetof(RatesOptions, rounds), .initial = "5", .min = 1,
         .max = ROUNDS_MAX, .help = "rounds of each measurement; medians are shown"},
        {.key = "json", .type = OPTION_BOOL, .offset = offsetof(RatesOptions, json), .initial = "no",
         .help = "one JSON object per row"},
        {.key = "card", .type = OPTION_BOOL, .offset = offsetof(RatesOptions, card), .initial = "no",
         .help = "say which card it is, and stop"},
    };
    RatesOptions options;
    const char *words[ARGS_MAX];
    char *arguments[ARGS_MAX + 1] = {"gpu_rates"};
    int count;
    Status status = args_parse("gpu_rates [options] FILE.cfg [section.key=value ...]\n"
                               "What a GPU reaches on the parts of a training step of the model in FILE.cfg.",
                               table, 6, &options, argc, argv, words, ARGS_MAX, &count);
    for (int i = 0; status == OK && i < count; i++)
        arguments[i + 1] = (char *)(intptr_t)words[i];
    if (status == OK)
        status = options.card ? show_card() : run(count + 1, arguments, &options);
    return error_exit_code("gpu_rates", status);
}
