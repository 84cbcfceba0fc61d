/* build/step FILE.cfg [section.key=value ...]: one rank's training step (forward, backward, norm, clip, AdamW) by
 * part, and the share that it reaches of the machine's own sgemm rate.
 *
 *     fraction_of_sgemm = FLOPs of the step / step time / best sgemm rate
 *
 * FLOPs are gpt2_flops_per_token; time is the whole step's. The sgemm rate is that of plain calls of the BLAS in use,
 * by all threads, over the shapes of this model's own matmuls: per shape the median of rounds that alternate with the
 * steps, then the best of all shapes and of two ways to cut a product among the threads. Tokens and initial
 * parameters are random. */
#include "base/clock.h"
#include "base/machine.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/report.h"
#include "model/gpt2.h"
#include "model/ops_timed.h"
#include "optim/adamw.h"
#include "run/settings.h"

#include <cblas.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { ROUNDS_MAX = 100, ARGS_MAX = 64, SHAPES_MAX = 15 };

/* ---- parts of a step ---- */

typedef enum Part {
    EMBEDDING,
    LAYERNORM,
    LINEAR_FORWARD,
    LINEAR_BACKWARD,
    ATTENTION_FORWARD,
    ATTENTION_BACKWARD,
    HEAD,
    NORM,
    ADAMW,
    STEP,
    PARTS
} Part;

static const char *const part_names[PARTS] = {
    "embedding",          "layernorm", "linear forward", "linear backward", "attention forward",
    "attention backward", "head",      "gradient norm",  "adamw",           "whole step"};

static Part part_of(const char *op) {
    static const struct {
        const char *op;
        Part part;
    } parts[] = {{"layernorm_forward", LAYERNORM},
                 {"layernorm_backward", LAYERNORM},
                 {"linear_forward", LINEAR_FORWARD},
                 {"linear_backward", LINEAR_BACKWARD},
                 {"attention_forward", ATTENTION_FORWARD},
                 {"attention_backward", ATTENTION_BACKWARD},
                 {"head_backward", HEAD}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(op, parts[i].op) == 0)
            return parts[i].part;
    return EMBEDDING;
}

/* An OpTookFn: `parts` is f64[PARTS], seconds of the present step. */
static void took(void *parts, const OpCall *call, double start_s, double end_s) {
    ((double *)parts)[part_of(call->op)] += end_s - start_s;
}

/* FLOPs of a part in one step, as gpt2_flops_per_token counts them; 0 where time goes into memory traffic. */
static double part_flops(Part part, const Gpt2Config *config, int B, int T) {
    double tokens = (double)B * T, C = config->channels, attention = 2.0 * config->layers * T * C * tokens;
    double linear = 2.0 * config->layers * 12 * C * C * tokens;
    switch (part) {
    case LINEAR_FORWARD: return linear;
    case LINEAR_BACKWARD: return 2 * linear;
    case ATTENTION_FORWARD: return attention;
    case ATTENTION_BACKWARD: return 2 * attention;
    case HEAD: return 6.0 * config->vocab * C * tokens;
    case STEP: return gpt2_flops_per_token(config, T) * tokens;
    default: return 0;
    }
}

/* ---- the BLAS's own rate ---- */

/* out[m][n] = a b over k, as BLAS gets it. */
typedef struct Shape {
    char name[32];
    CBLAS_TRANSPOSE ta, tb;
    int m, n, k;
    double by_rows_s[ROUNDS_MAX], by_columns_s[ROUNDS_MAX];
} Shape;

typedef struct Sgemm {
    Shape shapes[SHAPES_MAX];
    int count, threads;
    float *a, *b, *out; /* as large as the largest operand */
    size_t elems;
} Sgemm;

static void add_shape(Sgemm *sgemm, const char *layer, const char *kind, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m,
                      int n, int k) {
    Shape *shape = &sgemm->shapes[sgemm->count++];
    snprintf(shape->name, sizeof shape->name, "%s %s", layer, kind);
    shape->ta = ta;
    shape->tb = tb;
    shape->m = m;
    shape->n = n;
    shape->k = k;
    size_t sizes[] = {(size_t)m * (size_t)k, (size_t)k * (size_t)n, (size_t)m * (size_t)n};
    for (int i = 0; i < 3; i++)
        sgemm->elems = sizes[i] > sgemm->elems ? sizes[i] : sgemm->elems;
}

static void add_layer(Sgemm *sgemm, const char *name, int rows, int in, int out) {
    add_shape(sgemm, name, "forward", CblasNoTrans, CblasTrans, rows, out, in);
    add_shape(sgemm, name, "dx", CblasNoTrans, CblasNoTrans, rows, in, out);
    add_shape(sgemm, name, "dw", CblasTrans, CblasNoTrans, out, in, rows);
}

/* Shapes, and with them the size of the operands. */
static void sgemm_plan(Sgemm *sgemm, const Gpt2Config *config, int rows) {
    int C = config->channels, head_rows = rows < 512 ? rows : 512;
    *sgemm = (Sgemm){.threads = omp_get_max_threads()};
    add_layer(sgemm, "qkv", rows, C, 3 * C);
    add_layer(sgemm, "attproj", rows, C, C);
    add_layer(sgemm, "fc", rows, C, 4 * C);
    add_layer(sgemm, "fcproj", rows, 4 * C, C);
    add_layer(sgemm, "head", head_rows, C, config->vocab_padded);
}

static Status sgemm_create(Sgemm *sgemm) {
    sgemm->a = memory_alloc(&host_memory, sgemm->elems * sizeof(float));
    sgemm->b = memory_alloc(&host_memory, sgemm->elems * sizeof(float));
    sgemm->out = memory_alloc(&host_memory, sgemm->elems * sizeof(float));
    if (!sgemm->a || !sgemm->b || !sgemm->out)
        return fault("no memory for the sgemm measurement");
    for (size_t i = 0; i < sgemm->elems; i++) {
        sgemm->a[i] = (float)(i * 7919 % 1000) / 1000 - 0.5f;
        sgemm->b[i] = (float)(i * 104729 % 1000) / 1000 - 0.5f;
    }
    return OK;
}

static void sgemm_destroy(Sgemm *sgemm) {
    memory_free(&host_memory, sgemm->a);
    memory_free(&host_memory, sgemm->b);
    memory_free(&host_memory, sgemm->out);
}

/* Thread `index`'s share, a range of rows or of columns of the result. */
static void sgemm_share(const Sgemm *sgemm, const Shape *shape, bool by_rows, int index, int threads) {
    int total = by_rows ? shape->m : shape->n, units = (total + 15) / 16;
    int begin = units * index / threads * 16, end = units * (index + 1) / threads * 16;
    end = end < total ? end : total;
    if (begin >= end)
        return;
    int m = by_rows ? end - begin : shape->m, n = by_rows ? shape->n : end - begin;
    int lda = shape->ta == CblasTrans ? shape->m : shape->k, ldb = shape->tb == CblasTrans ? shape->k : shape->n;
    size_t row = by_rows ? (size_t)begin : 0, column = by_rows ? 0 : (size_t)begin;
    const float *a = sgemm->a + row * (shape->ta == CblasTrans ? 1 : (size_t)lda);
    const float *b = sgemm->b + column * (shape->tb == CblasTrans ? (size_t)ldb : 1);
    cblas_sgemm(CblasRowMajor, shape->ta, shape->tb, m, n, shape->k, 1, a, lda, b, ldb, 0,
                sgemm->out + row * (size_t)shape->n + column, shape->n);
}

static double sgemm_time_s(const Sgemm *sgemm, const Shape *shape, bool by_rows) {
    double start_s = clock_s();
#pragma omp parallel num_threads(sgemm->threads)
    sgemm_share(sgemm, shape, by_rows, omp_get_thread_num(), omp_get_num_threads());
    return clock_s() - start_s;
}

static void sgemm_round(Sgemm *sgemm, int round) {
    for (int i = 0; i < sgemm->count; i++) {
        sgemm->shapes[i].by_rows_s[round] = sgemm_time_s(sgemm, &sgemm->shapes[i], true);
        sgemm->shapes[i].by_columns_s[round] = sgemm_time_s(sgemm, &sgemm->shapes[i], false);
    }
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts values. */
static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* GFLOP/s of the better cut, from the medians. */
static double shape_rate(Shape *shape, int rounds) {
    double rows_s = median(shape->by_rows_s, rounds), columns_s = median(shape->by_columns_s, rounds);
    return 2e-9 * shape->m * shape->n * shape->k / (rows_s < columns_s ? rows_s : columns_s);
}

/* ---- the step ---- */

typedef struct Trainer {
    ParamTable table;
    float *params, *grads;
    Gpt2 *model;
    TimedOps timed;
    double part_s[PARTS]; /* of the present step */
    AdamW adamw;
    OptimConfig optim;
    int *tokens, *targets;
    int B, T;
} Trainer;

static Status trainer_create(Trainer *trainer, const Gpt2Config *config, const Gpt2Options *options,
                             const OptimConfig *optim) {
    *trainer = (Trainer){.optim = *optim, .B = options->max_B, .T = options->max_T};
    timed_ops_init(&trainer->timed, &ops_cpu, took, trainer->part_s);
    size_t rows = (size_t)options->max_B * (size_t)options->max_T;
    gpt2_param_table(config, false, &trainer->table);
    trainer->params = memory_alloc(&host_memory, (size_t)trainer->table.elems * sizeof(float));
    trainer->grads = memory_alloc(&host_memory, (size_t)trainer->table.elems * sizeof(float));
    trainer->tokens = malloc(rows * sizeof(int));
    trainer->targets = malloc(rows * sizeof(int));
    if (!trainer->params || !trainer->grads || !trainer->tokens || !trainer->targets)
        return fault("no memory for %lld parameters", (long long)trainer->table.elems);
    gpt2_init_random(config, &trainer->table, 1, trainer->params);
    for (size_t i = 0; i < rows; i++) {
        trainer->tokens[i] = (int)(random_bits(1, 100, i) % (uint64_t)config->vocab);
        trainer->targets[i] = (int)(random_bits(1, 101, i) % (uint64_t)config->vocab);
    }
    TRY(adamw_create(&trainer->adamw, &trainer->table, NULL, &host_memory, &optim_cpu));
    return gpt2_create(&trainer->model, config, &trainer->table, trainer->params, trainer->grads, options,
                       &trainer->timed.ops, &host_memory);
}

static void trainer_destroy(Trainer *trainer) {
    gpt2_destroy(trainer->model);
    adamw_destroy(&trainer->adamw);
    free(trainer->tokens);
    free(trainer->targets);
    memory_free(&host_memory, trainer->grads);
    memory_free(&host_memory, trainer->params);
    param_table_free(&trainer->table);
}

/* Fills trainer->part_s. */
static void train_step(Trainer *trainer) {
    memset(trainer->part_s, 0, sizeof trainer->part_s);
    double start_s = clock_s();
    gpt2_forward(trainer->model, trainer->tokens, trainer->B, trainer->T);
    gpt2_backward(trainer->model, trainer->targets, 1, false, NULL, NULL);
    double backward_s = clock_s();
    double scale = clip_scale(grad_norm(&trainer->table, trainer->grads), trainer->optim.grad_clip);
    double norm_s = clock_s();
    adamw_update(&trainer->adamw, &trainer->optim, trainer->optim.lr, scale, trainer->params, trainer->grads);
    double end_s = clock_s();
    trainer->part_s[NORM] = norm_s - backward_s;
    trainer->part_s[ADAMW] = end_s - norm_s;
    trainer->part_s[STEP] = end_s - start_s;
}

typedef struct StepOptions {
    int64_t batch, seq_len, steps;
    bool json;
} StepOptions;

typedef struct Results {
    double part_s[PARTS][ROUNDS_MAX];
    int64_t peak_rss_bytes; /* of the steps alone, before the sgemm measurement took memory */
} Results;

/* Steps and sgemm rounds take turns, so that both see the same machine. */
static Status measure(Trainer *trainer, Sgemm *sgemm, int rounds, Results *results) {
    train_step(trainer); /* touches all memory, wakes the threads */
    results->peak_rss_bytes = machine_peak_rss();
    TRY(sgemm_create(sgemm));
    for (int round = 0; round < rounds; round++) {
        sgemm_round(sgemm, round);
        train_step(trainer);
        for (int part = 0; part < PARTS; part++)
            results->part_s[part][round] = trainer->part_s[part];
    }
    return OK;
}

static void report_parts(Results *results, const Gpt2Config *config, const StepOptions *options) {
    static const ReportColumn columns[] = {
        {"part", "part", "%-18s"},
        {"ms", "ms", "%.1f"},
        {"share", "share", "%.3f"},
        {"gflop_per_s", "GFLOP/s", "%.1f"}};
    Report report = {.out = stdout, .json = options->json, .columns = columns, .count = 4};
    int rounds = (int)options->steps;
    double step_s = median(results->part_s[STEP], rounds);
    for (Part part = 0; part < PARTS; part++) {
        double seconds = median(results->part_s[part], rounds);
        double flops = part_flops(part, config, (int)options->batch, (int)options->seq_len);
        const ReportValue row[] = {{.text = part_names[part]},
                                   {.number = 1e3 * seconds},
                                   {.number = seconds / step_s},
                                   {.number = flops > 0 ? 1e-9 * flops / seconds : NAN}};
        report_row(&report, row);
    }
}

/* Returns the best rate, GFLOP/s. */
static double report_sgemm(Sgemm *sgemm, const StepOptions *options) {
    static const ReportColumn columns[] = {{"sgemm", "sgemm", "%-18s"},
                                           {"m", "m", "%.0f"},
                                           {"n", "n", "%.0f"},
                                           {"k", "k", "%.0f"},
                                           {"gflop_per_s", "GFLOP/s", "%.1f"}};
    Report report = {.out = stdout, .json = options->json, .columns = columns, .count = 5};
    double best = 0;
    for (int i = 0; i < sgemm->count; i++) {
        Shape *shape = &sgemm->shapes[i];
        double rate = shape_rate(shape, (int)options->steps);
        best = rate > best ? rate : best;
        const ReportValue row[] = {{.text = shape->name},
                                   {.number = shape->m},
                                   {.number = shape->n},
                                   {.number = shape->k},
                                   {.number = rate}};
        report_row(&report, row);
    }
    return best;
}

static void report_summary(Results *results, double best, const Gpt2Config *config, const StepOptions *options) {
    static const ReportColumn columns[] = {{"batch", "batch", "%.0f"},
                                           {"seq_len", "seq_len", "%.0f"},
                                           {"threads", "threads", "%.0f"},
                                           {"step_ms", "step (ms)", "%.1f"},
                                           {"tokens_per_s", "tokens/s", "%.1f"},
                                           {"gflop_per_s", "GFLOP/s", "%.1f"},
                                           {"sgemm_gflop_per_s", "sgemm", "%.1f"},
                                           {"fraction_of_sgemm", "fraction", "%.3f"},
                                           {"peak_rss_bytes", "peak RSS (bytes)", "%.0f"}};
    Report report = {.out = stdout, .json = options->json, .columns = columns, .count = 9};
    double step_s = median(results->part_s[STEP], (int)options->steps);
    double tokens = (double)(options->batch * options->seq_len);
    double rate = 1e-9 * part_flops(STEP, config, (int)options->batch, (int)options->seq_len) / step_s;
    const ReportValue row[] = {{.number = (double)options->batch},
                               {.number = (double)options->seq_len},
                               {.number = omp_get_max_threads()},
                               {.number = 1e3 * step_s},
                               {.number = tokens / step_s},
                               {.number = rate},
                               {.number = best},
                               {.number = rate / best},
                               {.number = (double)results->peak_rss_bytes}};
    report_row(&report, row);
}

static Status check_memory(const Gpt2Config *config, const Gpt2Options *options, const Sgemm *sgemm) {
    ParamTable table = {0};
    gpt2_param_table(config, false, &table);
    double need_bytes = sizeof(float) * (4.0 * (double)table.elems + 3.0 * (double)sgemm->elems) +
                        (double)gpt2_activation_bytes(config, options, &ops_cpu);
    double free_bytes = (double)machine_memory_available();
    param_table_free(&table);
    return need_bytes <= free_bytes ? OK : bad_input("the step takes %.2f GB of memory, %.2f GB are free",
                                                     1e-9 * need_bytes, 1e-9 * free_bytes);
}

static Status step_bench(const Gpt2Config *config, const Gpt2Options *model_options, const OptimConfig *optim,
                         const StepOptions *options) {
    static Results results;
    static Sgemm sgemm;
    Trainer trainer = {0};
    sgemm_plan(&sgemm, config, model_options->max_B * model_options->max_T);
    Status status = check_memory(config, model_options, &sgemm);
    if (status == OK)
        status = trainer_create(&trainer, config, model_options, optim);
    if (status == OK)
        status = measure(&trainer, &sgemm, (int)options->steps, &results);
    if (status == OK) {
        report_parts(&results, config, options);
        if (!options->json)
            putchar('\n');
        double best = report_sgemm(&sgemm, options);
        if (!options->json)
            putchar('\n');
        report_summary(&results, best, config, options);
    }
    sgemm_destroy(&sgemm);
    trainer_destroy(&trainer);
    return status;
}

static Status run(int argc, char **argv, const StepOptions *options) {
    Settings settings;
    Gpt2Config config;
    Status status = settings_read(&settings, argc, argv);
    if (status == OK)
        status = settings_model(&settings, &config);
    if (status == OK && options->seq_len > config.context)
        status = bad_input("--seq_len: expected at most the model's context, %d, found %lld", config.context,
                           (long long)options->seq_len);
    if (status == OK && options->batch * options->seq_len > INT32_MAX)
        status = bad_input("--batch: expected at most %d tokens per step, found %lld", INT32_MAX,
                           (long long)(options->batch * options->seq_len));
    if (status == OK) {
        if (settings.run.threads > 0)
            omp_set_num_threads((int)settings.run.threads);
        Gpt2Options model_options = {.max_B = (int)options->batch,
                                     .max_T = (int)options->seq_len,
                                     .train = true,
                                     .recompute = settings.train.recompute};
        status = step_bench(&config, &model_options, &settings.optim, options);
    }
    settings_free(&settings);
    return status;
}

int main(int argc, char **argv) {
    static const Option table[] = {
        {.key = "batch", .type = OPTION_INT, .offset = offsetof(StepOptions, batch), .initial = "4", .min = 1,
         .max = 65536, .help = "sequences"},
        {.key = "seq_len", .type = OPTION_INT, .offset = offsetof(StepOptions, seq_len), .initial = "256", .min = 1,
         .max = 1048576, .help = "tokens per sequence"},
        {.key = "steps", .type = OPTION_INT, .offset = offsetof(StepOptions, steps), .initial = "5", .min = 1,
         .max = ROUNDS_MAX, .help = "measured steps, after one to warm up; medians are shown"},
        {.key = "json", .type = OPTION_BOOL, .offset = offsetof(StepOptions, json), .initial = "no",
         .help = "one JSON object per row"},
    };
    StepOptions options;
    const char *words[ARGS_MAX];
    char *arguments[ARGS_MAX + 1] = {"step"};
    int count;
    Status status = args_parse("step [options] FILE.cfg [section.key=value ...]\n"
                               "Times one rank's training step of the model in FILE.cfg, by part, against sgemm.",
                               table, 4, &options, argc, argv, words, ARGS_MAX, &count);
    for (int i = 0; status == OK && i < count; i++)
        arguments[i + 1] = (char *)words[i];
    if (status == OK)
        status = run(count + 1, arguments, &options);
    return error_exit_code("step", status);
}
