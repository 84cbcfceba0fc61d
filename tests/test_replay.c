/* Profiles, the watch on a device, the replay device, and the bound that overlap is held against. Times are checked
 * from below only: a busy machine may make anything slower. */
#define _XOPEN_SOURCE 700
#include "base/clock.h"
#include "base/memory.h"
#include "base/profile.h"
#include "comm/bound.h"
#include "model/ops_replay.h"
#include "model/ops_timed.h"
#include "tests/check.h"

#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const Gpt2Config small = {
    .layers = 3, .heads = 2, .channels = 24, .context = 20, .vocab = 61, .vocab_padded = 128};

enum { B = 2, T = 13, ROWS = B * T, GRADIENTS_MAX = 64, OPS_MAX = 256 };

/* ---- fixtures ---- */

typedef struct Folder {
    char path[64], file[80];
} Folder;

static void make_folder(Folder *folder) {
    strcpy(folder->path, "/tmp/test_replay_XXXXXX");
    assert_non_null(mkdtemp(folder->path));
    snprintf(folder->file, sizeof folder->file, "%s/profile", folder->path);
}

static void remove_folder(Folder *folder) {
    unlink(folder->file);
    assert_int_equal(rmdir(folder->path), 0);
}

static void write_file(const Folder *folder, const char *text) {
    FILE *file = fopen(folder->file, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

/* What a run did, operation by operation and gradient by gradient. */
typedef struct Trace {
    OpCall calls[OPS_MAX];
    int gradients_at[OPS_MAX]; /* announced before that call */
    double ready_s[GRADIENTS_MAX];
    int call_count, gradient_count;
} Trace;

static void took(void *user, const OpCall *call, double start_s, double end_s) {
    Trace *trace = user;
    assert_true(trace->call_count < OPS_MAX && end_s >= start_s);
    trace->gradients_at[trace->call_count] = trace->gradient_count;
    trace->calls[trace->call_count++] = *call;
}

static void ready(void *user, int gradient) {
    Trace *trace = user;
    assert_int_equal(gradient, trace->gradient_count);
    trace->ready_s[trace->gradient_count++] = clock_s();
}

typedef struct Rank {
    ParamTable table;
    float *params, *grads;
    Replay *replay;
    TimedOps timed;
    Gpt2 *model;
    Trace trace;
    int tokens[ROWS];
} Rank;

/* replay_config NULL: the cpu device. */
static void set_up(Rank *rank, const ReplayConfig *replay_config, int number, int recompute) {
    *rank = (Rank){0};
    omp_set_num_threads(1);
    Gpt2Options options = {.max_B = B, .max_T = T, .train = true, .recompute = recompute};
    gpt2_param_table(&small, false, &rank->table);
    size_t bytes = (size_t)rank->table.elems * sizeof(float);
    rank->params = malloc(bytes);
    rank->grads = malloc(bytes);
    memset(rank->grads, 0xff, bytes); /* NaN */
    const Ops *ops = &ops_cpu;
    if (replay_config) {
        assert_ok(replay_create(&rank->replay, replay_config, &small, &options, number, 7));
        ops = replay_ops(rank->replay);
        memset(rank->params, 0xff, bytes);
    } else {
        gpt2_init_random(&small, &rank->table, 1, rank->params);
    }
    timed_ops_init(&rank->timed, ops, took, &rank->trace);
    assert_ok(gpt2_create(&rank->model, &small, &rank->table, rank->params, rank->grads, &options, &rank->timed.ops,
                          replay_config ? &replay_memory : &host_memory));
}

static void tear_down(Rank *rank) {
    gpt2_destroy(rank->model);
    replay_destroy(rank->replay);
    free(rank->params);
    free(rank->grads);
    param_table_free(&rank->table);
}

static double micro_step(Rank *rank, bool accumulate) {
    rank->trace.call_count = rank->trace.gradient_count = 0;
    gpt2_forward(rank->model, rank->tokens, B, T);
    return gpt2_backward(rank->model, rank->tokens, 1, accumulate, ready, &rank->trace);
}

static const ReplayConfig quick = {.forward_ms = 0.001, .backward_ms = 0.001};

/* ---- profiles ---- */

static void test_profile_means(void **state) {
    (void)state;
    Profile profile = {0};
    profile_add(&profile, "linear_forward", 3, 8, 32, 100, 7);
    profile_add(&profile, "linear_forward", 4, 8, 32, 100, 9);
    profile_clear(&profile);
    profile_add(&profile, "linear_forward", 3, 8, 32, 100, 1);
    profile_add(&profile, "linear_forward", 3, 8, 24, 100, 50);
    profile_add(&profile, "linear_forward", 3, 8, 32, 50, 2);
    profile_add(&profile, "linear_backward", 3, 8, 32, 100, 70);
    const ProfileEntry *entry = profile_find(&profile, "linear_forward", 3, 8, 32);
    assert_non_null(entry);
    assert_int_equal(entry->calls, 2);
    assert_close(entry->ms, 1.5, 1e-12);
    assert_close(entry->rows, 75, 1e-12);
    assert_int_equal(profile_find(&profile, "linear_forward", 4, 8, 32)->calls, 0);
    assert_null(profile_find(&profile, "linear_forward", 3, 32, 8));
    assert_null(profile_find(&profile, "linear", 3, 8, 32));
    profile_free(&profile);
    assert_null(profile_find(&profile, "linear_forward", 3, 8, 32));
}

static void test_profile_round_trip(void **state) {
    (void)state;
    Folder folder;
    Profile written = {0}, read = {0};
    make_folder(&folder);
    for (int layer = -1; layer < 100; layer++)
        for (int i = 0; i < 1 + layer % 3; i++)
            profile_add(&written, i ? "attention_forward" : "head_backward", layer, 1024, 50257, 512,
                        0.25 * layer + i + 1);
    profile_add(&written, "forgotten", 0, 1, 1, 1, 1);
    written.entries[written.count - 1].calls = 0;
    assert_ok(profile_write(&written, folder.file));
    assert_ok(profile_read(&read, folder.file));
    assert_int_equal(read.count, written.count - 1);
    for (int i = 0; i < read.count; i++) {
        const ProfileEntry *a = &written.entries[i], *b = &read.entries[i];
        assert_string_equal(a->op, b->op);
        assert_true(a->layer == b->layer && a->in == b->in && a->out == b->out && a->calls == b->calls);
        assert_close(b->rows, a->rows, 0.05);
        assert_close(b->ms, a->ms, 1e-5);
    }
    profile_free(&written);
    profile_free(&read);
    remove_folder(&folder);
}

static void test_profile_refusals(void **state) {
    (void)state;
    static const struct {
        const char *text, *line;
    } cases[] = {
        {"# only a comment\n\n", ": no operation"},
        {"# x\n0 linear_forward 8 8 10 1\n", ":2: expected 'layer operation in out rows calls ms'"},
        {"0 linear_forward 8 8 10 1 2.5 3\n", ":1: expected 'layer"},
        {"0 linear_forward 8 8 10 1x 2.5\n", ":1: expected 'layer"},
        {"zero linear_forward 8 8 10 1 2.5\n", ":1: expected 'layer"},
        {"0 linear_forward 8 8 10 1 2.5\n-2 linear_forward 8 8 10 1 2.5\n", ":2: expected a layer from -1 on"},
        {"0 linear_forward 0 8 10 1 2.5\n", ":1: expected a layer from -1 on and widths"},
        {"0 linear_forward 8 8 0 1 2.5\n", ":1: expected a layer"},
        {"0 linear_forward 8 8 nan 1 2.5\n", ":1: expected a layer"},
        {"0 linear_forward 8 8 10 0 2.5\n", ":1: expected a layer"},
        {"0 linear_forward 8 8 10 1 -2.5\n", ":1: expected milliseconds"},
        {"0 linear_forward 8 8 10 1 nan\n", ":1: expected milliseconds"},
        {"0 linear_forward 8 8 10 1 inf\n", ":1: expected milliseconds"},
        {"0 a 8 8 10 1 2.5\n0 b 8 8 10 1 2.5\n0 a 8 8 10 1 2.5", ":3: a 8 8 of layer 0 stands here a second time"},
    };
    Folder folder;
    Profile profile = {0};
    make_folder(&folder);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(&folder, cases[i].text);
        assert_refused(profile_read(&profile, folder.file), cases[i].line);
        assert_non_null(strstr(error_line(), folder.file));
        assert_int_equal(profile.count, 0);
    }
    char long_line[400];
    memset(long_line, 'x', sizeof long_line);
    long_line[sizeof long_line - 1] = 0;
    write_file(&folder, long_line);
    assert_refused(profile_read(&profile, folder.file), ":1: expected at most 255 characters");
    unlink(folder.file);
    assert_refused(profile_read(&profile, folder.file), folder.file);
    write_file(&folder, "0 a 8 8 10 1 2.5 # the last line may lack its end");
    assert_ok(profile_read(&profile, folder.file));
    profile_free(&profile);
    remove_folder(&folder);
}

/* ---- the watch ---- */

/* The watched model computes what the model alone computes. */
static void test_watched_bits(void **state) {
    (void)state;
    Rank watched;
    Gpt2 *plain;
    set_up(&watched, NULL, 0, RECOMPUTE_NO);
    float *grads = malloc((size_t)watched.table.elems * sizeof(float));
    Gpt2Options options = {.max_B = B, .max_T = T, .train = true};
    assert_ok(gpt2_create(&plain, &small, &watched.table, watched.params, grads, &options, &ops_cpu, &host_memory));
    double loss = micro_step(&watched, false);
    gpt2_forward(plain, watched.tokens, B, T);
    assert_true(gpt2_backward(plain, watched.tokens, 1, false, NULL, NULL) == loss);
    assert_memory_equal(grads, watched.grads, (size_t)watched.table.elems * sizeof(float));
    assert_true(gpt2_loss(watched.model, watched.tokens) == gpt2_loss(plain, watched.tokens));
    gpt2_destroy(plain);
    free(grads);
    tear_down(&watched);
}

static int count_calls(const Trace *trace, const char *op, int layer) {
    int count = 0;
    for (int i = 0; i < trace->call_count; i++)
        count += trace->calls[i].layer == layer && strcmp(trace->calls[i].op, op) == 0;
    return count;
}

static void test_watch_names_layers(void **state) {
    (void)state;
    for (int recompute = RECOMPUTE_NO; recompute <= RECOMPUTE_LAYERS; recompute++) {
        Rank rank;
        set_up(&rank, NULL, 0, recompute);
        micro_step(&rank, false);
        for (int layer = 0; layer < small.layers; layer++) {
            bool last = layer == small.layers - 1, apart = recompute == RECOMPUTE_GELU || recompute == RECOMPUTE_NORMS;
            int forwards = recompute == RECOMPUTE_LAYERS && !last ? 2 : 1;
            int norms = recompute == RECOMPUTE_NORMS ? 2 : forwards, gelus = !apart ? 0 : last ? 1 : 2;
            assert_int_equal(count_calls(&rank.trace, "linear_forward", layer), 4 * forwards);
            assert_int_equal(count_calls(&rank.trace, "attention_forward", layer), forwards);
            assert_int_equal(count_calls(&rank.trace, "layernorm_forward", layer), 2 * norms);
            assert_int_equal(count_calls(&rank.trace, "gelu_forward", layer), gelus);
            assert_int_equal(count_calls(&rank.trace, "linear_backward", layer), 4);
            assert_int_equal(count_calls(&rank.trace, "attention_backward", layer), 1);
            assert_int_equal(count_calls(&rank.trace, "layernorm_backward", layer), 2);
        }
        static const char *const outside[] = {"embedding_forward", "layernorm_forward", "head_backward",
                                              "layernorm_backward", "embedding_backward"};
        for (int i = 0; i < 5; i++)
            assert_int_equal(count_calls(&rank.trace, outside[i], -1), 1);
        tear_down(&rank);
    }
}

/* ---- the replay device ---- */

/* Same operations, layers, widths, and same moments of announcement. */
static void test_replay_order(void **state) {
    (void)state;
    for (int recompute = RECOMPUTE_NO; recompute <= RECOMPUTE_LAYERS; recompute++) {
        Rank cpu, replayed;
        set_up(&cpu, NULL, 0, recompute);
        set_up(&replayed, &quick, 0, recompute);
        micro_step(&cpu, false);
        micro_step(&replayed, false);
        assert_int_equal(cpu.trace.call_count, replayed.trace.call_count);
        assert_int_equal(cpu.trace.gradient_count, cpu.table.gradient_count);
        assert_int_equal(replayed.trace.gradient_count, cpu.table.gradient_count);
        for (int i = 0; i < cpu.trace.call_count; i++) {
            const OpCall *a = &cpu.trace.calls[i], *b = &replayed.trace.calls[i];
            assert_string_equal(a->op, b->op);
            assert_true(a->layer == b->layer && a->rows == b->rows && a->in == b->in && a->out == b->out);
            assert_int_equal(cpu.trace.gradients_at[i], replayed.trace.gradients_at[i]);
        }
        tear_down(&cpu);
        tear_down(&replayed);
    }
}

static double deviation(const float *values, int64_t count) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < count; i++)
        sum += (double)values[i], squares += (double)values[i] * (double)values[i];
    return sqrt(squares / (double)count - sum / (double)count * sum / (double)count);
}

static void test_replay_gradients(void **state) {
    (void)state;
    Rank rank, twin, other;
    set_up(&rank, &quick, 0, RECOMPUTE_NO);
    set_up(&twin, &quick, 0, RECOMPUTE_NO);
    set_up(&other, &quick, 1, RECOMPUTE_NO);
    size_t bytes = (size_t)rank.table.elems * sizeof(float);
    float *first = malloc(bytes);
    micro_step(&rank, false);
    memcpy(first, rank.grads, bytes);
    micro_step(&twin, false);
    micro_step(&other, false);
    assert_memory_equal(rank.grads, twin.grads, bytes);

    int64_t zeros = 0, equal = 0;
    for (int64_t i = 0; i < rank.table.elems; i++) {
        assert_true(fabsf(first[i]) < 1e-3f); /* NaN fails */
        zeros += first[i] == 0;
        equal += first[i] == other.grads[i];
    }
    const Param *wte = param_find(&rank.table, "wte", -1), *wpe = param_find(&rank.table, "wpe", -1);
    const Param *fcw = param_find(&rank.table, "fcw", 1);
    int64_t padding = (small.vocab_padded - small.vocab + small.context - T) * small.channels;
    assert_in_range(zeros, padding, padding + 5);
    assert_in_range(equal, padding, padding + 5);
    for (int64_t i = small.vocab * small.channels; i < wte->elems; i++)
        assert_true(first[wte->offset + i] == 0);
    for (int64_t i = T * small.channels; i < wpe->elems; i++)
        assert_true(first[wpe->offset + i] == 0);
    assert_close(deviation(first + fcw->offset, fcw->elems), 1e-4, 5e-6);

    /* Later steps, with accumulation and without, leave what is there. */
    rank.grads[wte->offset] = 5;
    first[wte->offset] = 5;
    for (int step = 0; step < 4; step++)
        assert_true(isnan(micro_step(&rank, step % 2)));
    assert_memory_equal(rank.grads, first, bytes);
    free(first);
    tear_down(&rank);
    tear_down(&twin);
    tear_down(&other);
}

/* With accumulation from the very first step on: written by the micro-step that would overwrite. */
static void test_replay_accumulation(void **state) {
    (void)state;
    Rank once, accumulated;
    set_up(&once, &quick, 0, RECOMPUTE_NO);
    set_up(&accumulated, &quick, 0, RECOMPUTE_NO);
    micro_step(&once, false);
    micro_step(&accumulated, true);
    for (int64_t i = 0; i < once.table.elems; i++)
        assert_true(isnan(accumulated.grads[i]));
    for (int micro = 0; micro < 3; micro++)
        micro_step(&accumulated, micro > 0);
    assert_memory_equal(once.grads, accumulated.grads, (size_t)once.table.elems * sizeof(float));
    tear_down(&once);
    tear_down(&accumulated);
}

/* What milliseconds are spread over, from the ready times: head first, layers alike, nothing before its time. */
static void test_replay_time_from_ms(void **state) {
    (void)state;
    const ReplayConfig config = {.forward_ms = 20, .backward_ms = 40};
    Rank rank;
    set_up(&rank, &config, 0, RECOMPUTE_NO);
    for (int step = 0; step < 2; step++) {
        double start_s = clock_s();
        gpt2_forward(rank.model, rank.tokens, B, T);
        assert_true(clock_s() - start_s >= 20e-3 - 1e-6);
        rank.trace.call_count = rank.trace.gradient_count = 0;
        gpt2_backward(rank.model, rank.tokens, 1, false, ready, &rank.trace);
        double C = small.channels, layer = 4 * 12 * C * C + 4.0 * T * C, head = 6.0 * small.vocab * C;
        double total = head + small.layers * layer;
        for (int g = 0; g < rank.trace.gradient_count; g++) {
            int done = g / 5; /* lnf, then five per layer */
            double part = g == rank.trace.gradient_count - 1 ? 1 : (head + (done > 3 ? 3 : done) * layer) / total;
            assert_true(rank.trace.ready_s[g] - start_s >= 20e-3 + 40e-3 * part - 1e-6);
        }
    }
    tear_down(&rank);
}

static void need(void *replay, int gradient) {
    double since_s = clock_s();
    if (gradient == 0)
        nanosleep(&(struct timespec){0, 15000000}, NULL);
    replay_waited(replay, since_s);
}

/* Waiting for parameters hides nothing of what comes behind, neither of the same pass nor of the next one. */
static void test_replay_waits(void **state) {
    (void)state;
    const ReplayConfig config = {.forward_ms = 20, .backward_ms = 10};
    Rank rank;
    set_up(&rank, &config, 0, RECOMPUTE_NO);
    gpt2_on_need(rank.model, need, rank.replay); /* of the last LayerNorm: forward has nothing left to do */
    double start_s = clock_s();
    micro_step(&rank, false);
    assert_true(clock_s() - start_s >= 45e-3 - 1e-6);
    tear_down(&rank);
}

/* A shorter micro-step behind a whole one. */
static void test_replay_time_by_rows(void **state) {
    (void)state;
    const ReplayConfig config = {.forward_ms = 30};
    Rank rank;
    set_up(&rank, &config, 0, RECOMPUTE_NO);
    double start_s = clock_s();
    gpt2_forward(rank.model, rank.tokens, B, T);
    gpt2_forward(rank.model, rank.tokens, B / 2, T);
    assert_true(clock_s() - start_s >= 45e-3 - 1e-6);
    tear_down(&rank);
}

/* A profile as a real run records it, but of micro-steps half as long, replayed. */
static void test_replay_profile(void **state) {
    (void)state;
    Folder folder;
    Rank real, replayed;
    Profile profile = {0};
    make_folder(&folder);
    set_up(&real, NULL, 0, RECOMPUTE_NO);
    timed_ops_init(&real.timed, &ops_cpu, timed_ops_profile, &profile);
    for (int step = 0; step < 2; step++)
        micro_step(&real, false);
    double total_ms = 0;
    for (int i = 0; i < profile.count; i++) {
        ProfileEntry *entry = &profile.entries[i];
        assert_true(entry->calls == 2 || (entry->calls == 4 && strncmp(entry->op, "layernorm", 9) == 0));
        assert_true(entry->ms > 0);
        assert_close(entry->rows, ROWS, 0);
        entry->ms = 0.4 + 0.1 * (i % 3); /* known, and long enough to be seen */
        entry->rows = ROWS / 2;
        total_ms += 2 * entry->ms * (double)entry->calls / 2;
    }
    assert_ok(profile_write(&profile, folder.file));
    ReplayConfig config = {0};
    snprintf(config.profile, sizeof config.profile, "%s", folder.file);
    set_up(&replayed, &config, 0, RECOMPUTE_NO);
    micro_step(&replayed, false);
    double start_s = clock_s();
    micro_step(&replayed, false);
    assert_true(clock_s() - start_s >= 1e-3 * total_ms - 1e-6);
    profile_free(&profile);
    tear_down(&real);
    tear_down(&replayed);
    remove_folder(&folder);
}

static void test_replay_refusals(void **state) {
    (void)state;
    Folder folder;
    Replay *replay;
    Rank real;
    Profile profile = {0};
    const Gpt2Options options = {.max_B = B, .max_T = T, .train = true};
    ReplayConfig config = {0};
    make_folder(&folder);
    assert_refused(replay_create(&replay, &config, &small, &options, 0, 1), "replay.backward_ms");
    assert_null(replay);
    set_up(&real, NULL, 0, RECOMPUTE_NO);
    timed_ops_init(&real.timed, &ops_cpu, timed_ops_profile, &profile);
    micro_step(&real, false);
    assert_ok(profile_write(&profile, folder.file));

    snprintf(config.profile, sizeof config.profile, "%s", folder.file);
    config.backward_ms = 1;
    assert_refused(replay_create(&replay, &config, &small, &options, 0, 1), "found both");
    config.backward_ms = 0;
    Gpt2Config other = small;
    other.layers = 4;
    assert_refused(replay_create(&replay, &config, &other, &options, 0, 1), "of layer 3");
    assert_non_null(strstr(error_line(), folder.file));
    other = small;
    other.vocab = 60;
    assert_refused(replay_create(&replay, &config, &other, &options, 0, 1), "no head_backward 24 60 of layer -1");
    Gpt2Options shorter = options;
    shorter.max_T = 12;
    assert_refused(replay_create(&replay, &config, &small, &shorter, 0, 1), "no attention_forward 12 24 of layer 0");
    assert_ok(replay_create(&replay, &config, &small, &options, 0, 1));
    replay_destroy(replay);
    replay_destroy(NULL);
    profile_free(&profile);
    tear_down(&real);
    remove_folder(&folder);
}

/* A model far larger than memory: its activations are address space only. */
static void test_replay_memory_untouched(void **state) {
    (void)state;
    struct rusage before, after;
    Gpt2Config config = small;
    config.context = 1 << 16;
    const Gpt2Options options = {.max_B = 1 << 8, .max_T = 1 << 16, .train = true};
    ParamTable table = {0};
    Replay *replay;
    Gpt2 *model;
    gpt2_param_table(&config, false, &table);
    float *grads = calloc((size_t)table.elems, sizeof(float));
    assert_ok(replay_create(&replay, &quick, &config, &options, 0, 1));
    getrusage(RUSAGE_SELF, &before);
    assert_ok(gpt2_create(&model, &config, &table, grads, grads, &options, replay_ops(replay), &replay_memory));
    gpt2_forward(model, NULL, 1 << 8, 1 << 16);
    assert_true(isnan(gpt2_loss(model, NULL)));
    gpt2_backward(model, NULL, 1, false, NULL, NULL);
    getrusage(RUSAGE_SELF, &after);
    assert_true(after.ru_maxrss - before.ru_maxrss < 64 << 10); /* KiB; activations are 120 GB */
    gpt2_destroy(model);
    replay_destroy(replay);
    memory_free(&replay_memory, NULL);
    free(grads);
    param_table_free(&table);
}

static void test_replay_memory_refuses(void **state) {
    (void)state;
    char *memory = memory_alloc(&replay_memory, 1 << 20);
    assert_non_null(memory);
    assert_int_equal((uintptr_t)memory % 64, 0);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile char *)memory = 1;
        _exit(0);
    }
    int status = 0;
    assert_true(child > 0 && waitpid(child, &status, 0) == child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    memory_free(&replay_memory, memory);
    assert_null(memory_alloc(&replay_memory, SIZE_MAX));
}

/* Ranks that are threads do not disturb each other. */
static void *run_rank(void *rank) {
    for (int step = 0; step < 3; step++)
        micro_step(rank, false);
    return NULL;
}

static void test_replay_threads(void **state) {
    (void)state;
    enum { RANKS = 4 };
    static Rank ranks[RANKS], alone[RANKS];
    pthread_t threads[RANKS];
    for (int i = 0; i < RANKS; i++) {
        set_up(&ranks[i], &quick, i, RECOMPUTE_NO);
        set_up(&alone[i], &quick, i, RECOMPUTE_NO);
        run_rank(&alone[i]);
    }
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_rank, &ranks[i]), 0);
    for (int i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < RANKS; i++) {
        assert_memory_equal(ranks[i].grads, alone[i].grads, (size_t)ranks[i].table.elems * sizeof(float));
        tear_down(&ranks[i]);
        tear_down(&alone[i]);
    }
}

/* ---- the bound ---- */

static void test_bound_by_hand(void **state) {
    (void)state;
    /* ready 10 20 30, 5 each: always free in time; the last one's 5 are exposed */
    BoundBucket hidden[] = {{10, 5, 0}, {20, 5, 0}, {30, 5, 0}};
    assert_close(bound_exposed_ms(hidden, 3, 30), 5, 0);
    assert_close(hidden[0].finish_ms, 15, 0);
    assert_close(hidden[2].finish_ms, 35, 0);
    /* the link is the limit: from 10 on it is busy for 60 */
    BoundBucket busy[] = {{10, 20, 0}, {20, 20, 0}, {30, 20, 0}};
    assert_close(bound_exposed_ms(busy, 3, 30), 40, 0);
    assert_close(busy[1].finish_ms, 50, 0);
    /* a gap: 10..30, then 50..60 */
    BoundBucket gap[] = {{10, 20, 0}, {50, 10, 0}};
    assert_close(bound_exposed_ms(gap, 2, 50), 10, 0);
    /* order is that of the plan: the first one ready late holds up the others */
    BoundBucket late[] = {{40, 1, 0}, {5, 10, 0}};
    assert_close(bound_exposed_ms(late, 2, 40), 11, 0);
    /* all ready at the end: nothing is hidden */
    BoundBucket blocking[] = {{40, 7, 0}, {40, 11, 0}, {40, 3, 0}};
    assert_close(bound_exposed_ms(blocking, 3, 40), 21, 0);
    /* all of it hidden, and nothing to do */
    assert_close(bound_exposed_ms(hidden, 3, 100), 0, 0);
    assert_close(bound_exposed_ms(NULL, 0, 40), 0, 0);
}

/* Parameters of 10, 20, 5 and 30 ms, one after the other. */
static void test_bound_gather(void **state) {
    (void)state;
    /* forward needs nothing before it is there: at 10, 30, 35, 65 */
    BoundArrival hidden[] = {{10, 10, 0}, {31, 20, 0}, {35, 5, 0}, {65, 30, 0}};
    assert_close(bound_gather_ms(hidden, 4), 0, 0);
    assert_close(hidden[1].finish_ms, 30, 0);
    assert_close(hidden[3].finish_ms, 65, 0);
    /* all at once: it stands still until the last one is there */
    BoundArrival blocking[] = {{0, 10, 0}, {0, 20, 0}, {0, 5, 0}, {0, 30, 0}};
    assert_close(bound_gather_ms(blocking, 4), 65, 0);
    /* waits 0..10, works until 18, waits until 30, works until 38 (the third is long there) and 40, waits until 65 */
    BoundArrival mixed[] = {{0, 10, 0}, {8, 20, 0}, {16, 5, 0}, {18, 30, 0}};
    assert_close(bound_gather_ms(mixed, 4), 10 + 12 + 25, 0);
    assert_close(bound_gather_ms(NULL, 0), 0, 0);
}

static void test_bound_links(void **state) {
    (void)state;
    /* 2 x 4 ranks: each direction of a node's link */
    assert_close(bound_link_load("ring", 8, 2).bytes, 1.75, 1e-12);
    assert_close(bound_link_load("ring", 8, 2).hops, 14, 0);
    assert_close(bound_link_load("hierarchical", 8, 2).bytes, 1, 1e-12);
    assert_close(bound_link_load("hierarchical", 8, 2).hops, 2, 0);
    assert_close(bound_link_load("reduce_scatter", 8, 2).bytes, 4, 1e-12);
    /* one rank per node: all the same */
    assert_close(bound_link_load("ring", 4, 4).bytes, 1.5, 1e-12);
    assert_close(bound_link_load("hierarchical", 4, 4).bytes, 1.5, 1e-12);
    assert_close(bound_link_load("reduce_scatter", 4, 4).bytes, 1.5, 1e-12);
    assert_close(bound_link_load("native", 8, 2).bytes, 0, 0);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_profile_means),
    cmocka_unit_test(test_profile_round_trip),
    cmocka_unit_test(test_profile_refusals),
    cmocka_unit_test(test_watched_bits),
    cmocka_unit_test(test_watch_names_layers),
    cmocka_unit_test(test_replay_order),
    cmocka_unit_test(test_replay_gradients),
    cmocka_unit_test(test_replay_accumulation),
    cmocka_unit_test(test_replay_time_from_ms),
    cmocka_unit_test(test_replay_waits),
    cmocka_unit_test(test_replay_time_by_rows),
    cmocka_unit_test(test_replay_profile),
    cmocka_unit_test(test_replay_refusals),
    cmocka_unit_test(test_replay_memory_untouched),
    cmocka_unit_test(test_replay_memory_refuses),
    cmocka_unit_test(test_replay_threads),
    cmocka_unit_test(test_bound_by_hand),
    cmocka_unit_test(test_bound_gather),
    cmocka_unit_test(test_bound_links),
};

CHECK_MAIN(tests)
