/* Error feedback in the sync, on ranks as threads: what comm.md's trap table asks of a compressed sync. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/sync_world.h"

#ifdef FEWER_CASES /* as in collective_cases.h */
enum { ROUNDS_MAX = 15, EVERY = 3 };
#else
enum { ROUNDS_MAX = 50, EVERY = 1 };
#endif

typedef struct Case {
    const char *settings;
    const char *replans[2]; /* before every `replan_every`-th round, in turn; NULL: none */
    int replan_every;
    int rounds;
    int skip_round; /* one with a NaN on one rank, which is not committed; -1: none */
    int omit_round; /* one that never happens; -1: none */
    int resume;     /* steps before */
    /* what rank 0 saw */
    float *results;  /* f32[rounds][elems], without the skipped one */
    double *residual; /* f64[elems]: all arrays, added */
    double error;
} Case;

static const char *const compressed[] = {
    "comm.compress=bf16",
    "comm.compress=int8",
    "comm.compress=int4",
    "comm.compress=topk comm.topk_density=0.1",
    "comm.compress=topk comm.topk_density=0.02 comm.topk_values=bf16",
    "comm.compress=int8 comm.compress_scope=all",
    "comm.compress=int4 comm.algorithm=reduce_scatter",
    "comm.compress=int8 comm.leader=yes",
    "comm.compress=int8_tensor",
    "comm.compress=int8_tensor comm.compress_scope=all",
};
enum { COMPRESSED = sizeof compressed / sizeof *compressed, BY_BLOCK = COMPRESSED - 2 }; /* the first ones */

static int64_t table_elems(void) {
    ParamTable table;
    sync_table_make(&table);
    int64_t elems = table.elems;
    param_table_free(&table);
    return elems;
}

static Status add_residuals(Comm *comm, Sync *sync, int64_t elems, double *sums) {
    float *array = malloc((size_t)elems * sizeof *array);
    Status status = OK;
    for (int i = 0; i < sync_residuals(sync) && status == OK; i++) {
        status = sync_residual_fetch(sync, i, array);
        for (int64_t k = 0; comm_rank(comm) == 0 && k < elems; k++)
            sums[k] += array[k];
    }
    free(array);
    return status;
}

static Status replan(Sync *sync, const Case *test, int round) {
    if (!test->replan_every || round % test->replan_every != 0 || round == 0)
        return OK;
    CommConfig config = {0};
    LoopConfig loop = {0};
    char text[512];
    snprintf(text, sizeof text, "%s %s", test->settings, test->replans[round / test->replan_every % 2]);
    sync_settings(text, &config, &loop);
    return sync_replan(sync, &config);
}

static Status run_rounds(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    Case *test = user;
    size_t bytes = (size_t)table->elems * sizeof(float);
    float *out = test->results;
    sync_resume(sync, test->resume);
    for (int round = 0; round < test->rounds; round++) {
        bool skip = round == test->skip_round;
        if (round == test->omit_round)
            continue;
        TRY(replan(sync, test, round));
        TRY(sync_random_step(sync, table, grads, comm_rank(comm), round, skip ? NAN : 0));
        TRY(comm_verify(comm, grads, bytes, "gradients"));
        if (skip) {
            bool seen = false; /* by some value of its block */
            for (int64_t i = 0; i < table->elems; i++)
                seen |= isnan(grads[i]);
            if (!seen)
                return fault("rank %d does not see the NaN", comm_rank(comm));
            continue;
        }
        sync_commit(sync);
        if (comm_rank(comm) == 0) {
            memcpy(out, grads, bytes);
            out += table->elems;
        }
    }
    double error = sync_stats(sync).compress_error; /* a sample of what each rank encodes */
    TRY(comm_reduce(comm, &error, 1, COMM_MAX));
    if (comm_rank(comm) == 0)
        test->error = error;
    return add_residuals(comm, sync, table->elems, test->residual);
}

static Status run_rank(Comm *comm, void *user) {
    Case *test = user;
    CommConfig config = {0};
    LoopConfig loop = {0};
    ParamTable table;
    sync_settings(test->settings, &config, &loop);
    sync_table_make(&table);
    return with_sync(comm, &config, &table, run_rounds, test);
}

static void run_case(Case *test) {
    CommConfig config = {0};
    LoopConfig loop = {0};
    sync_settings(test->settings, &config, &loop);
    test->results = calloc((size_t)(test->rounds * table_elems()), sizeof(float));
    test->residual = calloc((size_t)table_elems(), sizeof(double));
    Status status = comm_run(&config, &loop, OK, run_rank, test);
    if (status != OK)
        fail_msg("%s: %s", test->settings, error_line());
}

static void free_case(Case *test) {
    free(test->results);
    free(test->residual);
}

static Case case_of(char *settings, size_t size, const char *shape, const char *compress, int rounds) {
    snprintf(settings, size, "%s comm.algorithm=hierarchical comm.bucket_bytes=40K %s", shape, compress);
    return (Case){.settings = settings, .rounds = rounds, .skip_round = -1, .omit_round = -1};
}

static const char shape_2x2[] = "loop.ranks=4 comm.ranks_per_node=2";
static const char shape_2x3[] = "loop.ranks=6 comm.ranks_per_node=3";

/* The largest |sum of results + residual - sum of means|, and the largest that f32 rounding explains. */
static void telescope(const Case *test, int ranks, double *worst, double *allowed) {
    int64_t elems = table_elems();
    *worst = 0;
    for (int64_t i = 0; i < elems; i++) {
        double sent = test->residual[i], given = 0;
        for (int round = 0; round < test->rounds; round++) {
            sent += test->results[round * elems + i];
            for (int rank = 0; rank < ranks; rank++)
                given += (double)sync_value(rank, round, i) / ranks;
        }
        double off = fabs(sent - given);
        *worst = off > *worst || isnan(off) ? off : *worst;
    }
    /* per round: each rank's product, the sums over ranks and nodes, and a subtraction and an addition of each of three
     * residuals; top-k's residuals grow to tens */
    *allowed = test->rounds * (2 * ranks + 8) * 0x1p-24 * 40;
}

/* "Residual keyed by bucket lost on rebuild" (pytorch#48867, #51427), "compressor returns a new buffer" (#43307): 50
 * rounds, with other buckets every 7. */
static void test_telescope(void **state) {
    (void)state;
    for (int c = 0; c < COMPRESSED; c++) {
        char settings[256];
        double worst, allowed;
        Case test = case_of(settings, sizeof settings, shape_2x3, compressed[c], ROUNDS_MAX);
        test.replans[0] = "comm.bucket_bytes=150K";
        test.replans[1] = "comm.bucket_bytes=18000";
        test.replan_every = 7;
        run_case(&test);
        telescope(&test, 6, &worst, &allowed);
        if (!(worst <= allowed))
            fail_msg("%s: off by %g, f32 rounding explains %g", test.settings, worst, allowed);
        if (!(test.error > 0 && test.error < 1))
            fail_msg("%s: relative RMS error %g", test.settings, test.error);
        free_case(&test);
    }
}

static void test_telescope_fails_without_feedback(void **state) {
    (void)state;
    for (int c = 0; c < COMPRESSED; c++) {
        char settings[256], compress[128];
        double worst, allowed;
        snprintf(compress, sizeof compress, "%s comm.error_feedback=no", compressed[c]);
        Case test = case_of(settings, sizeof settings, shape_2x2, compress, 20);
        run_case(&test);
        telescope(&test, 4, &worst, &allowed);
        assert_true(worst > 4 * allowed);
        free_case(&test);
    }
}

static void assert_same_bits(const Case *a, int from_a, const Case *b, int from_b, int rounds) {
    int64_t elems = table_elems();
    for (int64_t i = 0; i < rounds * elems; i++)
        if (memcmp(&a->results[from_a * elems + i], &b->results[from_b * elems + i], sizeof(float)) != 0)
            fail_msg("%s\nagainst %s: round %d, value %d: %.9g and %.9g", a->settings, b->settings, (int)(i / elems),
                     (int)(i % elems), (double)a->results[from_a * elems + i], (double)b->results[from_b * elems + i]);
}

/* "Bucket size changes the result" (DeepSpeed#6351, rocm-systems#11661): from one block up it does not; nor does
 * "re-plan mid-run" touch a single bit; nor overlap, with a delay in the comm thread (DeepSpeed#5545, #7371). */
static void test_plan_does_not_matter(void **state) {
    (void)state;
    static const char *const variants[] = {"comm.bucket_bytes=16K", "comm.bucket_bytes=100K", "comm.bucket_bytes=1G",
                                           "comm.overlap=no", "loop.latency_between_us=300"};
    for (int c = 0; c < BY_BLOCK; c += EVERY) {
        char settings[256], other_settings[400];
        Case plain = case_of(settings, sizeof settings, shape_2x3, compressed[c], 5);
        run_case(&plain);
        for (int v = 0; v < 6; v++) {
            Case other = plain;
            snprintf(other_settings, sizeof other_settings, "%s %s", settings, v < 5 ? variants[v] : "");
            other.settings = other_settings;
            other.replan_every = v < 5 ? 0 : 2;
            other.replans[0] = "comm.bucket_bytes=70K";
            other.replans[1] = "comm.bucket_bytes=20K";
            run_case(&other);
            assert_same_bits(&plain, 0, &other, 0, 5);
            free_case(&other);
        }
        free_case(&plain);
    }
}

/* "Inf on one rank loops forever" (DeepSpeed#753): every rank sees it, and a step that is not committed leaves no
 * trace: what follows has the bits of a run without it. */
static void test_skipped_step(void **state) {
    (void)state;
    for (int c = 0; c < COMPRESSED; c++) {
        char settings[256];
        Case with = case_of(settings, sizeof settings, shape_2x2, compressed[c], 5), without = with;
        with.skip_round = 2;
        without.omit_round = 2;
        run_case(&with);
        run_case(&without);
        assert_same_bits(&with, 0, &without, 0, 4);
        assert_memory_equal(with.residual, without.residual, (size_t)table_elems() * sizeof(double));
        free_case(&with);
        free_case(&without);
    }
}

/* Dense until warmup_steps are over, also those of a run that is resumed. */
static void test_warmup(void **state) {
    (void)state;
    char settings[256], dense_settings[256], compress[128];
    snprintf(compress, sizeof compress, "%s comm.warmup_steps=3", compressed[3]);
    Case warm = case_of(settings, sizeof settings, shape_2x2, compress, 5);
    Case dense = case_of(dense_settings, sizeof dense_settings, shape_2x2, "", 5);
    int64_t elems = table_elems();
    run_case(&warm);
    run_case(&dense);
    assert_same_bits(&warm, 0, &dense, 0, 3);
    assert_memory_not_equal(warm.results + 3 * elems, dense.results + 3 * elems, (size_t)elems * sizeof(float));
    free_case(&warm);
    warm.resume = 2;
    run_case(&warm);
    assert_same_bits(&warm, 0, &dense, 0, 1);
    assert_memory_not_equal(warm.results + elems, dense.results + elems, (size_t)elems * sizeof(float));
    free_case(&warm);
    free_case(&dense);
}

static void assert_refused_settings(const char *text, const char *line) {
    CommConfig config = {0};
    LoopConfig loop = {0};
    sync_settings(text, &config, &loop);
    Case test = {.settings = text, .rounds = 1, .skip_round = -1, .omit_round = -1};
    assert_refused(comm_run(&config, &loop, OK, run_rank, &test), line);
}

static void test_refused(void **state) {
    (void)state;
    assert_refused_settings("loop.ranks=2 comm.compress=int8 comm.algorithm=ring",
                            "needs comm.algorithm = reduce_scatter");
    assert_refused_settings("loop.ranks=2 comm.compress=topk comm.algorithm=tree", "comm.compress = topk");
    assert_refused_settings("loop.ranks=2 comm.compress=int8 comm.requantise=ring", "comm.requantise = ring");
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_telescope),    cmocka_unit_test(test_telescope_fails_without_feedback),
    cmocka_unit_test(test_plan_does_not_matter), cmocka_unit_test(test_skipped_step),
    cmocka_unit_test(test_warmup),       cmocka_unit_test(test_refused),
};

CHECK_MAIN(tests)
