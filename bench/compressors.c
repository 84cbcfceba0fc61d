/* build/compressors: what each compressor costs, saves and loses, on one core.
 *
 *     GB/s      f32 bytes of the values, of encoding with error feedback (residual in place), of adding the decoded
 *               values to a sum, and of memcpy; medians of interleaved turns, in pieces of 4,096 values as the
 *               collectives take them, over arrays larger than the caches
 *     ratio     f32 bytes over wire bytes
 *     NMSE      |x - C(x)|^2 / |x|^2, in f64, without error feedback
 *     energy    |C(x)|^2 / |x|^2
 *
 * Data: Gaussian, Student's t with three degrees of freedom, a file of f32, or the gradients of a run: --config trains
 * its model here, on one rank, and takes the matrices' gradients (whole blocks of 4,096 values of each) at the steps
 * asked for, before the clip. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "base/input.h"
#include "base/machine.h"
#include "base/memory.h"
#include "base/random.h"
#include "base/report.h"
#include "comm/compress/codec.h"
#include "data/loader.h"
#include "model/ops_cpu.h"
#include "optim/adamw.h"
#include "run/settings.h"

#include <math.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS_MAX = 64, ITERS_MAX = 100, PIECE = 4096, COLUMNS = 9, STUDENT_DEGREES = 3 };

typedef struct BenchOptions {
    int64_t mib, iters;
    char gradients[OPTION_TEXT], config[OPTION_TEXT], steps[OPTION_TEXT];
    bool json;
} BenchOptions;

typedef struct Contender {
    const char *name;
    const Compressor *compressor;
    CompressorOptions options;
    double encode_s[ITERS_MAX], decode_s[ITERS_MAX], memcpy_s[ITERS_MAX];
} Contender;

typedef struct Bench {
    const BenchOptions *options;
    int64_t elems; /* a multiple of PIECE */
    float *values, *residual, *sum;
    uint8_t *wire;
    Report report;
} Bench;

/* ---- measuring ---- */

static void encode_all(const Bench *bench, const Contender *contender, float *residual) {
    uint8_t *wire = bench->wire;
    for (int64_t i = 0; i < bench->elems; i += PIECE) {
        float *piece_residual = residual ? residual + i : NULL;
        contender->compressor->encode(&contender->options, i, PIECE, bench->values + i, 1, piece_residual,
                                      piece_residual, wire);
        wire += contender->compressor->wire_bytes(&contender->options, i, PIECE);
    }
}

static void add_all(const Bench *bench, const Contender *contender) {
    const uint8_t *wire = bench->wire;
    for (int64_t i = 0; i < bench->elems; i += PIECE) {
        contender->compressor->decode_add(&contender->options, i, PIECE, wire, bench->sum + i);
        wire += contender->compressor->wire_bytes(&contender->options, i, PIECE);
    }
}

/* One turn; the first ones' times go into a slot that is overwritten. */
static void take_turn(const Bench *bench, Contender *contender, int slot) {
    double start_s = clock_s();
    memcpy(bench->sum, bench->values, (size_t)bench->elems * sizeof(float));
    double copied_s = clock_s();
    encode_all(bench, contender, bench->residual);
    double encoded_s = clock_s();
    add_all(bench, contender);
    contender->memcpy_s[slot] = copied_s - start_s;
    contender->encode_s[slot] = encoded_s - copied_s;
    contender->decode_s[slot] = clock_s() - encoded_s;
}

typedef struct Quality {
    double nmse, energy;
} Quality;

static Quality find_quality(const Bench *bench, const Contender *contender) {
    double noise = 0, kept = 0, signal = 0;
    encode_all(bench, contender, NULL);
    memset(bench->sum, 0, (size_t)bench->elems * sizeof(float));
    add_all(bench, contender);
    for (int64_t i = 0; i < bench->elems; i++) {
        double value = bench->values[i], decoded = bench->sum[i];
        noise += (value - decoded) * (value - decoded);
        kept += decoded * decoded;
        signal += value * value;
    }
    return (Quality){.nmse = noise / signal, .energy = kept / signal};
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

static void report_contender(Bench *bench, Contender *contender, const char *data) {
    int iters = (int)bench->options->iters;
    double bytes = (double)bench->elems * sizeof(float), gb = 1e-9 * bytes;
    double wire_bytes = (double)contender->compressor->wire_bytes(&contender->options, 0, bench->elems);
    Quality quality = find_quality(bench, contender);
    const ReportValue row[COLUMNS] = {
        {.text = contender->name},
        {.text = data},
        {.number = gb / median(contender->encode_s, iters)},
        {.number = gb / median(contender->decode_s, iters)},
        {.number = gb / median(contender->memcpy_s, iters)},
        {.number = bytes / wire_bytes},
        {.number = quality.nmse},
        {.number = quality.energy},
        {.number = (double)bench->options->mib}};
    report_row(&bench->report, row);
}

/* Of what bench->values holds. */
static void measure(Bench *bench, const char *data) {
    static Contender contenders[] = {
        {.name = "none", .compressor = &compressor_none},
        {.name = "bf16", .compressor = &compressor_bf16},
        {.name = "int8", .compressor = &compressor_int8},
        {.name = "int4", .compressor = &compressor_int4},
        {.name = "topk 1 %", .compressor = &compressor_topk, .options = {.density = 0.01}},
        {.name = "topk 1 % bf16", .compressor = &compressor_topk, .options = {.density = 0.01, .bf16_values = true}},
        {.name = "topk 10 %", .compressor = &compressor_topk, .options = {.density = 0.1}}};
    enum { COUNT = sizeof contenders / sizeof *contenders };
    for (int iter = -1; iter < bench->options->iters; iter++)
        for (int i = 0; i < COUNT; i++) {
            memset(bench->residual, 0, (size_t)bench->elems * sizeof(float));
            take_turn(bench, &contenders[i], iter < 0 ? 0 : iter);
        }
    for (int i = 0; i < COUNT; i++)
        report_contender(bench, &contenders[i], data);
}

/* ---- drawn data and files ---- */

static void fill_gaussian(float *values, int64_t elems) {
    for (int64_t i = 0; i < elems; i++)
        values[i] = (float)random_normal(1, 0, (uint64_t)i);
}

static void fill_student(float *values, int64_t elems) {
    for (int64_t i = 0; i < elems; i++) {
        double squares = 0;
        for (uint64_t j = 1; j <= STUDENT_DEGREES; j++)
            squares += pow(random_normal(1, j, (uint64_t)i), 2);
        values[i] = (float)(random_normal(1, 0, (uint64_t)i) / sqrt(squares / STUDENT_DEGREES));
    }
}

/* The first `count` values, over and over. */
static void repeat(Bench *bench, int64_t count) {
    for (int64_t i = count; i < bench->elems; i++)
        bench->values[i] = bench->values[i - count];
}

static Status measure_file(Bench *bench, const char *path) {
    InputFile input = {0};
    TRY(input_open(&input, path));
    int64_t count = input.size / (int64_t)sizeof(float) / PIECE * PIECE;
    count = count < bench->elems ? count : bench->elems;
    Status status = count > 0 ? input_read(&input, bench->values, (size_t)count * sizeof(float))
                              : bad_input("%s: expected at least %d values of f32", path, PIECE);
    input_close(&input);
    TRY(status);
    repeat(bench, count);
    measure(bench, path);
    return OK;
}

/* ---- gradients of a run ---- */

typedef struct Trainer {
    Gpt2Config config;
    ParamTable table;
    float *params, *grads;
    Gpt2 *model;
    AdamW adamw;
    Loader *loader;
    int *inputs, *targets;
    int64_t micro_steps;
} Trainer;

static Status trainer_create(Trainer *t, const Settings *s) {
    TRY(settings_model(s, &t->config));
    TRY(settings_micro_steps(s, 1, &t->micro_steps));
    LoaderOptions data = {.glob = s->data.train, .seq_len = (int)s->train.seq_len, .vocab = t->config.vocab,
                          .shuffle = s->data.shuffle, .seed = (uint64_t)s->run.seed, .hint = "make data"};
    Gpt2Options options = {.max_B = (int)s->train.batch, .max_T = (int)s->train.seq_len, .train = true};
    size_t tokens = (size_t)(s->train.batch * s->train.seq_len);
    TRY(loader_open(&t->loader, &data));
    gpt2_param_table(&t->config, false, &t->table);
    t->params = memory_alloc(&host_memory, (size_t)t->table.elems * sizeof(float));
    t->grads = memory_alloc(&host_memory, (size_t)t->table.elems * sizeof(float));
    t->inputs = malloc(tokens * sizeof(int));
    t->targets = malloc(tokens * sizeof(int));
    if (!t->params || !t->grads || !t->inputs || !t->targets)
        return fault("no memory for %lld parameters", (long long)t->table.elems);
    gpt2_init_random(&t->config, &t->table, (uint64_t)s->run.seed, t->params);
    TRY(adamw_create(&t->adamw, &t->table, NULL, &host_memory, &optim_cpu));
    return gpt2_create(&t->model, &t->config, &t->table, t->params, t->grads, &options, &ops_cpu, &host_memory);
}

static void trainer_destroy(Trainer *t) {
    gpt2_destroy(t->model);
    adamw_destroy(&t->adamw);
    free(t->targets);
    free(t->inputs);
    memory_free(&host_memory, t->grads);
    memory_free(&host_memory, t->params);
    param_table_free(&t->table);
    loader_close(t->loader);
}

static Status compute_gradient(Trainer *t, const Settings *s, int64_t step) {
    int batch = (int)s->train.batch, seq_len = (int)s->train.seq_len;
    for (int64_t micro = 0; micro < t->micro_steps; micro++) {
        TRY(loader_read(t->loader, (step * t->micro_steps + micro) * batch, batch, t->inputs, t->targets));
        gpt2_forward(t->model, t->inputs, batch, seq_len);
        gpt2_backward(t->model, t->targets, 1.0f / (float)t->micro_steps, micro > 0, NULL, NULL);
    }
    return OK;
}

static Status take_gradient(Bench *bench, const Trainer *t) {
    int64_t count = 0;
    for (int g = 0; g < t->table.gradient_count; g++) {
        const Gradient *gradient = &t->table.gradients[g];
        int64_t whole = gradient->dense ? 0 : gradient->elems / PIECE * PIECE;
        whole = whole < bench->elems - count ? whole : bench->elems - count;
        memcpy(bench->values + count, t->grads + gradient->offset, (size_t)whole * sizeof(float));
        count += whole;
    }
    if (count == 0)
        return bad_input("the model has no matrix of %d values", PIECE);
    repeat(bench, count);
    return OK;
}

static void pin(const cpu_set_t *cores) { sched_setaffinity(0, sizeof *cores, cores); }

/* Trains on all cores, measures on one. */
static Status measure_run(Bench *bench, Trainer *t, const Settings *s, const cpu_set_t *all, const cpu_set_t *one) {
    const char *rest = bench->options->steps;
    for (int64_t step = 0, wanted; *rest; step++) {
        char *end;
        wanted = strtoll(rest, &end, 10);
        TRY(compute_gradient(t, s, step));
        if (step + 1 == wanted) {
            char name[64];
            snprintf(name, sizeof name, "step %lld", (long long)wanted);
            TRY(take_gradient(bench, t));
            pin(one);
            measure(bench, name);
            pin(all);
            rest = *end ? end + 1 : end;
        }
        adamw_update(&t->adamw, &s->optim, learning_rate(&s->optim, step, s->train.steps),
                     clip_scale(grad_norm(&t->table, t->grads), s->optim.grad_clip), t->params, t->grads);
    }
    return OK;
}

static Status read_config(Settings *settings, const char *file, const char **words, int count) {
    char *argv[WORDS_MAX + 2] = {(char *)(intptr_t)"compressors", (char *)(intptr_t)file};
    for (int i = 0; i < count; i++)
        argv[i + 2] = (char *)(intptr_t)words[i];
    return settings_read(settings, count + 2, argv);
}

static Status measure_config(Bench *bench, const Settings *settings, const cpu_set_t *all, const cpu_set_t *one) {
    Trainer trainer = {0};
    Status status = trainer_create(&trainer, settings);
    if (status == OK)
        status = measure_run(bench, &trainer, settings, all, one);
    trainer_destroy(&trainer);
    return status;
}

/* ---- the program's face ---- */

static const ReportColumn columns[COLUMNS] = {
    {"compressor", "compressor", "%-14s"},
    {"data", "data", "%-10s"},
    {"encode_gb_per_s", "encode (GB/s)", "%.2f"},
    {"decode_add_gb_per_s", "decode-add (GB/s)", "%.2f"},
    {"memcpy_gb_per_s", "memcpy (GB/s)", "%.2f"},
    {"ratio", "ratio", "%.2f"},
    {"nmse", "NMSE", "%.2e"},
    {"energy", "energy", "%.4f"},
    {"mib", "MiB", "%.0f"}};

static const Option table[] = {
    {.key = "mib", .type = OPTION_INT, .offset = offsetof(BenchOptions, mib), .initial = "64", .min = 1, .max = 65536,
     .help = "size of the f32 array in MiB"},
    {.key = "iters", .type = OPTION_INT, .offset = offsetof(BenchOptions, iters), .initial = "7", .min = 1,
     .max = ITERS_MAX, .help = "measured turns of each compressor"},
    {.key = "gradients", .type = OPTION_STRING, .offset = offsetof(BenchOptions, gradients), .initial = "",
     .help = "a file of raw f32 to measure on, too"},
    {.key = "config", .type = OPTION_STRING, .offset = offsetof(BenchOptions, config), .initial = "",
     .help = "trains this run's model on one rank and measures its gradients, too"},
    {.key = "steps", .type = OPTION_STRING, .offset = offsetof(BenchOptions, steps), .initial = "1,100,1000",
     .help = "of --config: the steps whose gradients are measured, rising"},
    {.key = "json", .type = OPTION_BOOL, .offset = offsetof(BenchOptions, json), .initial = "no",
     .help = "one JSON object per row; the header goes to stderr"}};

static Status bench_create(Bench *bench) {
    size_t bytes = (size_t)bench->options->mib << 20;
    bench->elems = (int64_t)(bytes / sizeof(float));
    bench->values = memory_alloc(&host_memory, bytes);
    bench->residual = memory_alloc(&host_memory, bytes);
    bench->sum = memory_alloc(&host_memory, bytes);
    bench->wire = memory_alloc(&host_memory, bytes);
    bench->report = (Report){.out = stdout, .json = bench->options->json, .columns = columns, .count = COLUMNS};
    bool complete = bench->values && bench->residual && bench->sum && bench->wire;
    return complete ? OK : fault("no memory for four arrays of %lld MiB", (long long)bench->options->mib);
}

static void bench_destroy(Bench *bench) {
    memory_free(&host_memory, bench->wire);
    memory_free(&host_memory, bench->sum);
    memory_free(&host_memory, bench->residual);
    memory_free(&host_memory, bench->values);
}

static Status check_steps(const char *text) {
    int64_t before = 0;
    for (const char *at = text;; at++) {
        char *end;
        int64_t step = strtoll(at, &end, 10);
        if (end == at || step <= before || (*end && *end != ','))
            return bad_input("--steps: expected rising numbers, separated by commas, found '%s'", text);
        if (!*end)
            return OK;
        before = step;
        at = end;
    }
}

static Status bench_run(Bench *bench, const Settings *settings) {
    cpu_set_t all, one;
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    TRY(check_steps(bench->options->steps));
    TRY(bench_create(bench));
    fprintf(bench->options->json ? stderr : stdout, "# %s, core %d; arrays of %lld MiB; median of %lld turns\n",
            machine_cpu(), sched_getcpu(), (long long)bench->options->mib, (long long)bench->options->iters);
    pin(&one);
    fill_gaussian(bench->values, bench->elems);
    measure(bench, "gaussian");
    fill_student(bench->values, bench->elems);
    measure(bench, "student_t3");
    if (bench->options->gradients[0])
        TRY(measure_file(bench, bench->options->gradients));
    pin(&all);
    return bench->options->config[0] ? measure_config(bench, settings, &all, &one) : OK;
}

int main(int argc, char **argv) {
    BenchOptions options;
    Bench bench = {.options = &options};
    const char *words[WORDS_MAX];
    int count = 0;
    Status status = args_parse("compressors [options] [section.key=value ...]\n"
                               "Measures the compressors on one core: speed, ratio, error. Keys are those of --config.",
                               table, sizeof table / sizeof *table, &options, argc, argv, words, WORDS_MAX, &count);
    if (status == OK && count > 0 && !options.config[0])
        status = strchr(words[0], '=') ? bad_input("command line: %s: needs --config", words[0])
                                       : bad_input("command line: expected section.key=value, found '%s'", words[0]);
    Settings settings = {0};
    if (status == OK && options.config[0])
        status = read_config(&settings, options.config, words, count);
    if (status == OK)
        status = bench_run(&bench, &settings);
    settings_free(&settings);
    bench_destroy(&bench);
    return error_exit_code("compressors", status);
}
