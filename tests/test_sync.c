/* The sync engine on the loop transport: the cut into buckets, and what comm.md's trap table asks of an engine. Each
 * test names its trap. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"

#include "comm/bucket.h"
#include "tests/sync_world.h"

#include <pthread.h>

/* ---- the cut ---- */

/* Like GPT-2's: a group outside the layers, `layers` layers of three tensors, two tensors behind them. */
static void make_table(ParamTable *table, int layers, int64_t width) {
    *table = (ParamTable){0};
    param_add(table, "lnfw", -1, 1, width);
    for (int layer = layers - 1; layer >= 0; layer--) {
        param_add(table, "fc", layer, 4, width);
        param_add(table, "proj", layer, 3, width);
        param_add(table, "b", layer, 1, width + 1);
    }
    param_add(table, "wpe", -1, 2, width);
    param_add(table, "wte", -1, 13, width);
}

static void check_cut(const ParamTable *table, int64_t bucket_bytes) {
    int count;
    Bucket *buckets = bucket_cut(table, bucket_bytes, &count);
    assert_non_null(buckets);
    int64_t offset = 0, max = bucket_bytes / 4;
    for (int b = 0; b < count; b++) {
        assert_true(buckets[b].offset == offset && buckets[b].elems > 0);
        offset += buckets[b].elems;
        const Gradient *first = &table->gradients[buckets[b].first_gradient];
        const Gradient *last = &table->gradients[buckets[b].last_gradient];
        assert_true(first->offset <= buckets[b].offset && first->offset + first->elems > buckets[b].offset);
        assert_true(last->offset < offset && last->offset + last->elems >= offset);
        assert_true(buckets[b].elems <= max || buckets[b].elems <= max + 9 * 1001); /* the layer that filled it */
    }
    assert_true(offset == table->elems);
    assert_int_equal(buckets[count - 1].last_gradient, table->gradient_count - 1);
    assert_true(buckets[count - 1].offset >= table->gradients[table->gradient_count - 1].offset); /* the last leaves alone */
    free(buckets);
}

static void test_cut(void **state) {
    (void)state;
    ParamTable table;
    make_table(&table, 3, 1000);
    const int64_t sizes[] = {4, 40, 4000, 4004, 32004, 32008, 64000, 100000, 1 << 20, (int64_t)1 << 40};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_cut(&table, sizes[i]);
    int count;
    free(bucket_cut(&table, 4, &count));
    assert_int_equal(count, table.elems);
    free(bucket_cut(&table, (int64_t)1 << 40, &count));
    assert_int_equal(count, 2);
    Bucket *buckets = bucket_cut(&table, 28000, &count); /* 7000: lnfw | 3 x (fc proj, b) | wpe | wte in three slices, */
    assert_int_equal(count, 1 + 3 * 2 + 1 + 3);
    for (int b = count - 2; b < count; b++)
        assert_int_equal(buckets[b].offset % 4096, 0); /* where blocks of compressors begin */
    free(buckets);
    buckets = bucket_cut(&table, 32004, &count); /* a layer is 8001 values: each is a bucket, none is cut */
    assert_int_equal(buckets[0].elems, 1000 + 8001);
    assert_int_equal(buckets[1].elems, 8001);
    free(buckets);
    param_table_free(&table);
}

/* ---- runs ---- */

enum { STEPS = 4, LAYERS = 3, WIDTH = 1000 };

typedef struct Case {
    CommConfig config;
    uint64_t order_seed; /* of the order of marks */
    int skip_gradient, skip_rank; /* not marked; -1: all are */
    int two_threads;
    float *result; /* [STEPS][elems] of rank 0, for the caller */
} Case;

/* By the name of a collective, or auto. */
static CommConfig plain(const char *algorithm, int64_t bucket_bytes, bool overlap) {
    CommConfig config = {.bucket_bytes = bucket_bytes, .overlap = overlap, .timeout_s = 30};
    config.leader = strcmp(algorithm, "leader") == 0;
    algorithm = config.leader ? "hierarchical" : algorithm;
    for (int i = 0; i < comm_option_count; i++)
        if (strcmp(comm_options[i].key, "algorithm") == 0)
            while (strcmp(option_choice(comm_options[i].choices, config.algorithm), algorithm) != 0)
                config.algorithm++;
    return config;
}

enum { BAD_ELEM = 1500 }; /* the place of Inf in the tests that want one */
static int bad_rank = -1, bad_step = -1; /* set while no rank runs */
static int64_t width = WIDTH;            /* likewise: of the table */

static float value_of(int rank, int step, int64_t i) {
    if (rank == bad_rank && step == bad_step && i == BAD_ELEM)
        return INFINITY;
    return (float)random_normal((uint64_t)rank + 1, (uint64_t)step, (uint64_t)i);
}

typedef struct Marks {
    Sync *sync;
    const ParamTable *table;
    float *grads;
    int rank, step;
    const int *order;
    int begin, end, stride, skip;
} Marks;

/* Like a backward: each gradient is written, then marked. Until then it holds NaN. */
static void *mark(void *argument) {
    const Marks *marks = argument;
    for (int i = marks->begin; i < marks->end; i += marks->stride) {
        const Gradient *gradient = &marks->table->gradients[marks->order[i]];
        for (int64_t k = gradient->offset; k < gradient->offset + gradient->elems; k++)
            marks->grads[k] = value_of(marks->rank, marks->step, k);
        if (marks->order[i] != marks->skip)
            sync_mark_ready(marks->sync, marks->order[i]);
    }
    return NULL;
}

static void shuffle(int *order, int count, uint64_t seed) {
    for (int i = 0; i < count; i++)
        order[i] = i;
    for (int i = count - 1; seed && i > 0; i--) {
        int j = (int)(random_bits(seed, 7, (uint64_t)i) % (uint64_t)(i + 1)), other = order[i];
        order[i] = order[j];
        order[j] = other;
    }
}

static void mark_all(const Case *test, Marks marks) {
    int order[64], count = marks.table->gradient_count;
    assert(count <= 64);
    shuffle(order, count, test->order_seed ? test->order_seed + (uint64_t)marks.rank : 0);
    marks.order = order;
    marks.end = count;
    marks.stride = test->two_threads ? 2 : 1;
    marks.skip = marks.rank == test->skip_rank ? test->skip_gradient : -1;
    Marks odd = marks;
    odd.begin = 1;
    pthread_t other;
    if (test->two_threads)
        pthread_create(&other, NULL, mark, &odd);
    mark(&marks);
    if (test->two_threads)
        pthread_join(other, NULL);
}

static Status step(Sync *sync, const Case *test, const ParamTable *table, float *grads, int rank, int number) {
    memset(grads, 0xff, (size_t)table->elems * sizeof(float));
    sync_begin(sync);
    mark_all(test, (Marks){.sync = sync, .table = table, .grads = grads, .rank = rank, .step = number});
    return sync_wait(sync);
}

static Status run_steps(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    Case *test = user;
    size_t bytes = (size_t)table->elems * sizeof(float);
    for (int number = 0; number < STEPS; number++) {
        TRY(step(sync, test, table, grads, comm_rank(comm), number));
        TRY(comm_verify(comm, grads, bytes, "gradients"));
        if (comm_rank(comm) == 0)
            memcpy(test->result + number * table->elems, grads, bytes);
    }
    return OK;
}

static Status run_rank(Comm *comm, void *user) {
    Case *test = user;
    ParamTable table;
    make_table(&table, LAYERS, width);
    return with_sync(comm, &test->config, &table, run_steps, test);
}

static int64_t table_elems(void) {
    ParamTable table;
    make_table(&table, LAYERS, width);
    int64_t elems = table.elems;
    param_table_free(&table);
    return elems;
}

static Case new_case(CommConfig config) {
    return (Case){.config = config, .skip_rank = -1, .skip_gradient = -1,
                  .result = calloc((size_t)(STEPS * table_elems()), sizeof(float))};
}

static Status run(Case *test, int ranks, const char *faults) {
    LoopConfig loop = {.ranks = ranks};
    snprintf(loop.faults, sizeof loop.faults, "%s", faults);
    return comm_run(&test->config, &loop, OK, run_rank, test);
}

static void assert_same(const Case *a, const Case *b) {
    assert_memory_equal(a->result, b->result, (size_t)(STEPS * table_elems()) * sizeof(float));
}

static void check_mean(const Case *test, int ranks) {
    int64_t elems = table_elems();
    for (int number = 0; number < STEPS; number++)
        for (int64_t i = 0; i < elems; i++) {
            double sum = 0;
            for (int rank = 0; rank < ranks; rank++)
                sum += value_of(rank, number, i);
            assert_close(test->result[number * elems + i], sum / ranks, 1e-5);
        }
}

static const char *const algorithms[] = {"naive", "ring", "tree", "reduce_scatter", "hierarchical", "leader", "auto"};
enum { ALGORITHMS = sizeof algorithms / sizeof *algorithms };

/* Those whose sums' order does not depend on the cut. */
static const char *const ordered[] = {"naive", "tree", "reduce_scatter", "hierarchical", "leader"};
enum { ORDERED = sizeof ordered / sizeof *ordered };

/* Trap: bucket sent in ready order, ranks differ. Trap: compressor/buffer views go stale after some steps (4 steps). */
static void test_any_ready_order(void **state) {
    (void)state;
    for (int a = 0; a < ALGORITHMS; a++) {
        Case plan_order = new_case(plain(algorithms[a], 20000, true)), shuffled = plan_order;
        shuffled.result = calloc((size_t)(STEPS * table_elems()), sizeof(float));
        shuffled.order_seed = 5;
        assert_ok(run(&plan_order, 4, ""));
        assert_ok(run(&shuffled, 4, ""));
        check_mean(&plan_order, 4);
        assert_same(&plan_order, &shuffled);
        free(plan_order.result);
        free(shuffled.result);
    }
}

/* Trap: buffer overwritten while in flight, and the fix that removes overlap: delays in the comm threads of one rank
 * after the other, at points that each fault of the text draws anew; overlap on = off. */
static void test_overlap_and_delays_change_no_bits(void **state) {
    (void)state;
    static const char *const delays[] = {"delay:rank=1,ms=1,every=5", "delay:rank=2,ms=1,every=7;delay:ms=1,every=19",
                                         "delay:rank=3,ms=2,every=11;delay:rank=0,ms=1,every=4"};
    for (int a = 0; a < ALGORITHMS; a++) {
        Case off = new_case(plain(algorithms[a], 20000, false)), on = new_case(plain(algorithms[a], 20000, true));
        strcpy(off.config.ranks_per_node, "2");
        strcpy(on.config.ranks_per_node, "2");
        assert_ok(run(&off, 4, ""));
        for (int i = 0; i < 3; i++) {
            memset(on.result, 0, (size_t)(STEPS * table_elems()) * sizeof(float));
            assert_ok(run(&on, 4, delays[i]));
            assert_same(&off, &on);
        }
        free(off.result);
        free(on.result);
    }
}

/* Of one algorithm, on nodes of two ranks: buckets of the first size and of all others give the same bits. */
static void check_sizes(const char *algorithm, int ranks, const int64_t *sizes, int count) {
    Case reference = new_case(plain(algorithm, sizes[0], true));
    strcpy(reference.config.ranks_per_node, "2");
    assert_ok(run(&reference, ranks, ""));
    for (int i = 1; i < count; i++) {
        Case other = new_case(plain(algorithm, sizes[i], true));
        strcpy(other.config.ranks_per_node, "2");
        assert_ok(run(&other, ranks, ""));
        assert_same(&reference, &other);
        free(other.result);
    }
    free(reference.result);
}

/* Trap: bucket size changes the result. Promised for all but ring, native: their sums' order depends on the cut.
 * Trap: one-tensor bucket takes another path (horovod#358): the first size makes buckets of lnfw, wpe and wte alone. */
static void test_bucket_size_changes_no_bits(void **state) {
    (void)state;
    const int64_t sizes[] = {WIDTH * sizeof(float), 4096, 30000, 1 << 20, (int64_t)1 << 40};
    for (int a = 0; a < ORDERED; a++)
        check_sizes(ordered[a], 5, sizes, 5);
}

/* The same down to buckets of one element, of a smaller table on fewer ranks. */
static void test_buckets_of_one_element(void **state) {
    (void)state;
    const int64_t sizes[] = {(int64_t)1 << 40, 4};
    width = 20;
    for (int a = 0; a < ORDERED; a++)
        check_sizes(ordered[a], 3, sizes, 2);
    width = WIDTH;
}

/* Trap: waits for one of two producers. */
static void test_two_threads_mark(void **state) {
    (void)state;
    Case one = new_case(plain("ring", 20000, true)), two = new_case(plain("ring", 20000, true));
    two.two_threads = 1;
    two.order_seed = 9;
    assert_ok(run(&one, 3, ""));
    assert_ok(run(&two, 3, ""));
    assert_same(&one, &two);
    free(one.result);
    free(two.result);
}

/* ---- one reduction per step ---- */

/* A bucket is cut evenly by 2 nodes of 2 ranks, between blocks of compressors, and large enough for a tree to halve. */
enum { EVEN_BUCKETS = 4, EVEN_ELEMS = 12 * 4096 };

/* Bytes of the gradient, and of what int8 makes of it: 4 more for 256 values. */
enum { S = EVEN_BUCKETS * EVEN_ELEMS * 4, C = S / 4 / 256 * 260 };

/* What all 4 ranks together send in a step but the first, and their messages with a scale, of each bucket. */
typedef struct Reduction {
    const char *algorithm, *more;
    bool sharded;
    int64_t inside, between, inside_scales, between_scales;
} Reduction;

typedef struct ReductionRun {
    const Reduction *reduction;
    CommConfig config;
} ReductionRun;

static const Reduction reductions[] = {
    {"naive", "", false, 2 * S, 4 * S, 0, 0},
    {"ring", "", false, 3 * S, 3 * S, 0, 0},
    {"tree", "", false, 4 * S, 2 * S, 0, 0},
    {"reduce_scatter", "", false, 2 * S, 4 * S, 4, 8},
    {"hierarchical", "", false, 4 * S, 2 * S, 4, 0},
    {"hierarchical", "comm.leader=yes", false, 4 * S, 2 * S, 2, 0},
    {"reduce_scatter", "comm.compress=int8", false, 2 * C, 4 * C, 0, 0}, /* codes are of scaled values */
    {"hierarchical", "comm.compress=int8", false, 4 * S, 2 * C, 4, 0},
    {"hierarchical", "comm.compress=int8 comm.compress_scope=all", false, 4 * C, 2 * C, 0, 0},
    {"hierarchical", "comm.compress=int8 comm.leader=yes", false, 4 * S, 2 * C, 2, 0},
    {"reduce_scatter", "", true, 2 * S, 4 * S, 4, 8},
    {"hierarchical", "", true, 4 * S, 2 * S, 4, 0},
    {"reduce_scatter", "comm.compress=int8", true, C + S, 2 * C + 2 * S, 0, 0},
    {"hierarchical", "comm.compress=int8", true, 4 * S, C + S, 4, 0}, /* what is gathered are parameters, in f32 */
};

static float even_value(int rank, int step, int64_t i) { return (float)(4 * rank + step + (int)(i % 8)); }

static Status reduce_once(Comm *comm, Sync *sync, const Reduction *test, const ParamTable *table, float *grads,
                          int number) {
    bool exact = !test->sharded && !strstr(test->more, "int8");
    sync_forward_begin(sync, NULL, 0);
    TRY(sync_forward_end(sync));
    sync_begin(sync);
    for (int64_t i = 0; i < table->elems; i++)
        grads[i] = even_value(comm_rank(comm), number, i);
    sync_mark_ready(sync, 0);
    TRY(sync_wait(sync));
    for (int64_t i = 0; exact && i < table->elems; i++)
        if (grads[i] != even_value(0, number, i) + 6)
            return fault("step %d: mean %lld is %g", number, (long long)i, (double)grads[i]);
    sync_commit(sync);
    double sent[] = {(double)sync_stats(sync).bytes_intra, (double)sync_stats(sync).bytes_inter};
    TRY(comm_reduce(comm, sent, 2, COMM_SUM));
    double inside = (double)(test->inside + 4 * EVEN_BUCKETS * test->inside_scales);
    double between = (double)(test->between + 4 * EVEN_BUCKETS * test->between_scales);
    if (number == 0 && test->sharded) /* nothing to gather yet */
        return sent[0] < inside && sent[1] < between ? OK : fault("step 0: %g and %g bytes", sent[0], sent[1]);
    return sent[0] == inside && sent[1] == between
               ? OK
               : fault("step %d: %g bytes inside and %g between nodes, expected %g and %g", number, sent[0], sent[1],
                       inside, between);
}

static Status reducing_rank(Comm *comm, void *user) {
    const ReductionRun *run = user;
    const Reduction *test = run->reduction;
    ParamTable table = {0};
    param_add(&table, "wte", -1, EVEN_BUCKETS * EVEN_ELEMS, 1);
    size_t bytes = (size_t)table.elems * sizeof(float);
    float *grads = memory_alloc(comm_memory(comm), bytes), *params = memory_alloc(comm_memory(comm), bytes);
    Sync *sync = NULL;
    SyncSetup setup = {.table = &table, .grads = grads, .sharded = test->sharded, .params = params};
    Status status = sync_create(&sync, comm, &run->config, &setup);
    if (status == OK && sync_bucket_count(sync) != EVEN_BUCKETS)
        status = fault("%d buckets", sync_bucket_count(sync));
    for (int number = 0; number < STEPS && status == OK; number++)
        status = reduce_once(comm, sync, test, &table, grads, number);
    sync_destroy(sync);
    memory_free(comm_memory(comm), params);
    memory_free(comm_memory(comm), grads);
    param_table_free(&table);
    return status;
}

/* Trap: reduced twice (Megatron#775); a stale buffer (Megatron#4609). The bytes of a step are those of one reduction
 * per bucket, in every mode. */
static void test_one_reduction_per_step(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof reductions / sizeof *reductions; i++)
        for (int overlap = 0; overlap < 2; overlap++) {
            ReductionRun test = {.reduction = &reductions[i]};
            LoopConfig loop;
            char settings[256];
            snprintf(settings, sizeof settings,
                     "loop.ranks=4 comm.ranks_per_node=2 comm.algorithm=%s comm.overlap=%s comm.warmup_steps=0 "
                     "comm.bucket_bytes=%d %s", reductions[i].algorithm, overlap ? "yes" : "no", EVEN_ELEMS * 4,
                     reductions[i].more);
            sync_settings(settings, &test.config, &loop);
            if (comm_run(&test.config, &loop, OK, reducing_rank, &test) != OK)
                fail_msg("%s, sharded %d: %s", settings, reductions[i].sharded, error_line());
        }
}

/* Trap: Inf on one rank. All ranks see it in that step, and only in that step. */
static void test_inf_reaches_all_and_goes(void **state) {
    (void)state;
    for (int a = 0; a < ALGORITHMS; a++) {
        Case test = new_case(plain(algorithms[a], 20000, true));
        bad_rank = 2;
        bad_step = 1;
        assert_ok(run(&test, 4, ""));
        int64_t elems = table_elems();
        for (int number = 0; number < STEPS; number++) {
            bool finite = true;
            for (int64_t i = 0; i < elems; i++)
                finite &= isfinite(test.result[number * elems + i]) != 0;
            assert_int_equal(finite, number != 1);
        }
        bad_rank = bad_step = -1;
        free(test.result);
    }
}

/* Trap: parameter without gradient: a clear error, no hang. */
static void test_missing_gradient_is_named(void **state) {
    (void)state;
    for (int overlap = 0; overlap < 2; overlap++)
        for (int ranks = 1; ranks <= 3; ranks += 2) {
            Case test = new_case(plain("ring", 20000, overlap));
            test.skip_rank = ranks - 1;
            test.skip_gradient = 5;
            assert_int_equal(run(&test, ranks, ""), FAULT);
            if (!strstr(error_line(), "proj, layer 1"))
                fail_msg("found '%s'", error_line());
            free(test.result);
        }
}

/* Trap: sizes differ between ranks, silent wrong tail: plans are compared first. */
static Status different_plans(Comm *comm, void *user) {
    Case *test = user;
    Case mine = *test;
    mine.config.bucket_bytes = comm_rank(comm) == 1 ? 8000 : 20000;
    return run_rank(comm, &mine);
}

static void test_different_plans_are_refused(void **state) {
    (void)state;
    Case test = new_case(plain("ring", 20000, true));
    LoopConfig loop = {.ranks = 3};
    assert_int_equal(comm_run(&test.config, &loop, OK, different_plans, &test), FAULT);
    assert_non_null(strstr(error_line(), "plan of gradient synchronisation: rank 1"));
    free(test.result);
}

/* As many values in as many buckets, but rank 1 cuts them elsewhere. */
static Status swapped_layers(Comm *comm, void *user) {
    int swapped = comm_rank(comm) == 1;
    ParamTable table = {0};
    Sync *sync = NULL;
    param_add(&table, "h.1", 1, swapped ? 5000 : 3000, 1);
    param_add(&table, "h.0", 0, swapped ? 3000 : 5000, 1);
    Status status = sync_create(&sync, comm, user, &(SyncSetup){.table = &table});
    sync_destroy(sync);
    param_table_free(&table);
    return status;
}

static void test_other_cuts_are_refused(void **state) {
    (void)state;
    CommConfig config = plain("ring", 20000, true);
    assert_int_equal(comm_run(&config, &(LoopConfig){.ranks = 3}, OK, swapped_layers, &config), FAULT);
    assert_non_null(strstr(error_line(), "plan of gradient synchronisation: rank 1"));
}

/* Trap: arrival-order sums differ from run to run. Trap: local size odd, unequal nodes. */
static void test_two_runs_same_bits_on_odd_shapes(void **state) {
    (void)state;
    for (int a = 0; a < ALGORITHMS; a++)
        for (int ranks = 5; ranks <= 7; ranks += 2) {
            Case first = new_case(plain(algorithms[a], 20000, true)), second = new_case(plain(algorithms[a], 20000, true));
            strcpy(first.config.ranks_per_node, ranks == 5 ? "1,4" : "3");
            strcpy(second.config.ranks_per_node, first.config.ranks_per_node);
            assert_ok(run(&first, ranks, ""));
            assert_ok(run(&second, ranks, "delay:rank=2,ms=1,every=7"));
            check_mean(&first, ranks);
            assert_same(&first, &second);
            free(first.result);
            free(second.result);
        }
}

/* Trap: peers hang when one dies (horovod#3494): who waits in vain says for whom, on which node, in which bucket. */
static void test_lost_messages_name_rank_node_and_bucket(void **state) {
    (void)state;
    Case test = new_case(plain("ring", 20000, true));
    strcpy(test.config.ranks_per_node, "1");
    test.config.timeout_s = 1;
    assert_int_equal(run(&test, 2, "drop:rank=1,message=12"), FAULT);
    const char *line = error_line(); /* whichever of the two waited first */
    if (!strstr(line, "rank 0: no answer from rank 1 for 1 s (comm.timeout_s), node 1: bucket ") &&
        !strstr(line, "rank 1: no answer from rank 0 for 1 s (comm.timeout_s), node 0: bucket "))
        fail_msg("found '%s'", line);
    free(test.result);
}

/* ---- after a fault ---- */

/* One step over a large array, after which its memory goes. */
static Status large_step(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    (void)comm, (void)table, (void)grads, (void)user;
    sync_begin(sync);
    sync_mark_ready(sync, 0);
    return sync_wait(sync);
}

static Status large_rank(Comm *comm, void *user) {
    ParamTable table = {0};
    param_add(&table, "wte", -1, 1 << 20, 1);
    return with_sync(comm, user, &table, large_step, NULL);
}

/* A rank dies in mid-bucket: while the survivors free their memory, others may still add from it. Under ASan. */
static void test_memory_goes_after_a_fault(void **state) {
    (void)state;
    static const char *const names[] = {"reduce_scatter", "hierarchical", "ring"};
    for (int i = 0; i < 3; i++)
        for (int message = 1; message <= 20; message++) {
            CommConfig config = plain(names[i], 1 << 30, true);
            LoopConfig loop = {.ranks = 4};
            snprintf(loop.faults, sizeof loop.faults, "die:rank=3,message=%d", message);
            Status status = comm_run(&config, &loop, OK, large_rank, &config);
            assert_true(status == FAULT || message > 10);
            assert_true(status == OK || strstr(error_line(), "rank 3"));
        }
}

/* Rank 1 gives up in the middle of backward, after user's number of marks. */
static Status leave_backward(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    (void)grads;
    sync_begin(sync);
    for (int g = 0; g < (comm_rank(comm) == 1 ? *(const int *)user : table->gradient_count); g++)
        sync_mark_ready(sync, g);
    return comm_rank(comm) == 1 ? fault("disk full") : sync_wait(sync);
}

static Status leaving_rank(Comm *comm, void *user) {
    CommConfig config = plain("reduce_scatter", 20000, true);
    ParamTable table;
    make_table(&table, LAYERS, width);
    return with_sync(comm, &config, &table, leave_backward, user);
}

static void test_a_rank_leaves_backward(void **state) {
    (void)state;
    for (int marks = 0; marks < 8; marks++) {
        CommConfig config = plain("auto", 20000, true);
        assert_int_equal(comm_run(&config, &(LoopConfig){.ranks = 3}, OK, leaving_rank, &marks), FAULT);
        assert_string_equal(error_line(), "rank 1: disk full");
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_a_rank_leaves_backward),
    cmocka_unit_test(test_memory_goes_after_a_fault),
    cmocka_unit_test(test_lost_messages_name_rank_node_and_bucket),
    cmocka_unit_test(test_cut),
    cmocka_unit_test(test_any_ready_order),
    cmocka_unit_test(test_overlap_and_delays_change_no_bits),
    cmocka_unit_test(test_bucket_size_changes_no_bits),
    cmocka_unit_test(test_buckets_of_one_element),
    cmocka_unit_test(test_two_threads_mark),
    cmocka_unit_test(test_one_reduction_per_step),
    cmocka_unit_test(test_inf_reaches_all_and_goes),
    cmocka_unit_test(test_missing_gradient_is_named),
    cmocka_unit_test(test_different_plans_are_refused),
    cmocka_unit_test(test_other_cuts_are_refused),
    cmocka_unit_test(test_two_runs_same_bits_on_odd_shapes),
};
CHECK_MAIN(tests)
