/* ZeRO-1 and the split embedding in the sync, on ranks as threads. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/sync_world.h"

#include "comm/collective/collective.h"
#include "optim/adamw.h"

#include <time.h>

enum { STEPS = 3, VOCAB = 211, WIDTH = 130, TOKENS = 24 };

/* ---- shards ---- */

typedef struct ShardCase {
    CommConfig config;
    bool sharded;
    float *result;       /* f32[STEPS][elems]: each rank writes what it owns; without shards, rank 0 all */
    int64_t owned[16];   /* values */
    size_t moments[16];  /* bytes */
    int buckets;
    double bytes[STEPS]; /* sent by all ranks */
} ShardCase;

static float param_value(int step, int64_t i) { return (float)(step + 1) * 0.5f + (float)i; }

/* Updates what the rank owns, and only that. */
static void update(const Shard *shard, float *params, int step) {
    for (int s = 0; s < shard->count; s++)
        for (int64_t i = shard->slices[s].start; i < shard->slices[s].start + shard->slices[s].elems; i++)
            params[i] = param_value(step, i);
}

/* Forward needs parameters in any order; each gradient's are whole once sync_need returns. */
static Status read_params(Sync *sync, const ParamTable *table, const float *params, int rank, int step) {
    sync_forward_begin(sync, NULL, 0);
    for (int k = 0; k < table->gradient_count; k++) {
        int g = (k * 5 + rank + step) % table->gradient_count;
        const Gradient *gradient = &table->gradients[g];
        sync_need(sync, g);
        for (int64_t i = gradient->offset; i < gradient->offset + gradient->elems; i++)
            if (step > 0 && params[i] != param_value(step - 1, i))
                return fault("rank %d, step %d: parameter %lld is %g", rank, step, (long long)i, (double)params[i]);
    }
    return sync_forward_end(sync);
}

static Status shard_step(Comm *comm, Sync *sync, ShardCase *test, const ParamTable *table, float *grads, float *params,
                         int step) {
    int rank = comm_rank(comm);
    const Shard whole = {&(Slice){0, table->elems}, rank == 0}, *mine = test->sharded ? sync_shard(sync, rank) : &whole;
    TRY(read_params(sync, table, params, rank, test->sharded ? step : 0));
    sync_begin(sync);
    for (int g = 0; g < table->gradient_count; g++) {
        const Gradient *gradient = &table->gradients[g];
        for (int64_t i = gradient->offset; i < gradient->offset + gradient->elems; i++)
            grads[i] = sync_value(rank, step, i);
        sync_mark_ready(sync, g);
    }
    TRY(sync_wait(sync));
    SyncStats stats = sync_stats(sync);
    double bytes = (double)(stats.bytes_intra + stats.bytes_inter);
    TRY(comm_reduce(comm, &bytes, 1, COMM_SUM));
    if (rank == 0)
        test->bytes[step] = bytes;
    for (int s = 0; s < mine->count; s++)
        memcpy(test->result + step * table->elems + mine->slices[s].start, grads + mine->slices[s].start,
               (size_t)mine->slices[s].elems * sizeof(float));
    if (test->sharded) {
        struct timespec pause = {0, 1000000 * ((rank + step) % 3)};
        nanosleep(&pause, NULL); /* others may gather already, but not write here */
        memset(params, 0xFF, (size_t)table->elems * sizeof(float)); /* what is not gathered is NaN */
        update(mine, params, step);
    }
    sync_commit(sync);
    return OK;
}

static Status run_shard_rank(Comm *comm, void *user) {
    ShardCase *test = user;
    ParamTable table;
    sync_table_make(&table);
    size_t bytes = (size_t)table.elems * sizeof(float);
    float *grads = memory_alloc(comm_memory(comm), bytes), *params = memory_alloc(comm_memory(comm), bytes);
    SyncSetup setup = {.table = &table, .grads = grads, .sharded = test->sharded, .params = params};
    Sync *sync = NULL;
    Status status = sync_create(&sync, comm, &test->config, &setup);
    bool tells = status == OK && test->sharded && comm_rank(comm) == 0;
    for (int rank = 0; tells && rank < comm_ranks(comm); rank++) {
        test->owned[rank] = shard_elems(sync_shard(sync, rank));
        test->moments[rank] = adamw_bytes(&table, sync_shard(sync, rank));
        test->buckets = sync_bucket_count(sync);
    }
    for (int step = 0; step < STEPS && status == OK; step++)
        status = shard_step(comm, sync, test, &table, grads, params, step);
    if (status == OK)
        status = sync_gather_params(sync);
    for (int64_t i = 0; status == OK && test->sharded && i < table.elems; i++)
        if (params[i] != param_value(STEPS - 1, i))
            status = fault("rank %d: parameter %lld was not gathered", comm_rank(comm), (long long)i);
    sync_destroy(sync);
    memory_free(comm_memory(comm), params);
    memory_free(comm_memory(comm), grads);
    param_table_free(&table);
    return status;
}

static ShardCase shard_case(const char *settings, bool sharded, int64_t elems) {
    ShardCase test = {.sharded = sharded, .result = malloc((size_t)(STEPS * elems) * sizeof(float))};
    LoopConfig loop = {0};
    sync_settings(settings, &test.config, &loop);
    memset(test.result, 0xFF, (size_t)(STEPS * elems) * sizeof(float));
    Status status = comm_run(&test.config, &loop, OK, run_shard_rank, &test);
    if (status != OK)
        fail_msg("%s: %s", settings, error_line());
    return test;
}

/* Each rank's shard holds the bits of the whole mean; together they are the gradient, once; parameters become whole
 * under forward; the bytes of both halves are those of one all-reduce. Any world size (1 to 5), odd sizes. */
static void test_shards(void **state) {
    (void)state;
    static const char *const shapes[] = {"loop.ranks=1", "loop.ranks=2", "loop.ranks=3", "loop.ranks=5",
                                         "loop.ranks=4 comm.ranks_per_node=2", "loop.ranks=6 comm.ranks_per_node=3",
                                         "loop.ranks=3 comm.ranks_per_node=1", "loop.ranks=5 comm.ranks_per_node=3"};
    static const char *const plans[] = {"comm.algorithm=reduce_scatter comm.bucket_bytes=16K",
                                        "comm.algorithm=hierarchical comm.bucket_bytes=100K",
                                        "comm.algorithm=hierarchical comm.bucket_bytes=1G comm.overlap=no"};
    ParamTable table;
    sync_table_make(&table);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t p = 0; p < sizeof plans / sizeof *plans; p++) {
            char settings[256];
            snprintf(settings, sizeof settings, "%s %s", shapes[s], plans[p]);
            ShardCase whole = shard_case(settings, false, table.elems), parts = shard_case(settings, true, table.elems);
            assert_memory_equal(whole.result, parts.result, (size_t)(STEPS * table.elems) * sizeof(float));
            int64_t sum = 0;
            for (int rank = 0; rank < 16; rank++)
                sum += parts.owned[rank];
            assert_true(sum == table.elems);
            assert_true(parts.bytes[0] < whole.bytes[0] || whole.bytes[0] == 0); /* nothing to gather yet */
            assert_true(parts.bytes[1] == whole.bytes[1] && parts.bytes[2] == whole.bytes[2]);
            free(whole.result);
            free(parts.result);
        }
    param_table_free(&table);
}

/* Each rank sends the parts of its gradient that others own, then its own part of the parameters to each other rank:
 * 2 (N - 1) / N * 4 * elems bytes a rank, as f32; and to each other rank its scale, f32, once a bucket. A rank's two
 * moments are 1/N of all, but for a bucket's parts, which end on whole blocks, and the optimizer's list of runs. */
static void test_bytes_and_memory(void **state) {
    (void)state;
    ParamTable table;
    sync_table_make(&table);
    for (int ranks = 1; ranks <= 5; ranks++)
        for (int plan = 0; plan < 4; plan++) {
            char settings[256];
            snprintf(settings, sizeof settings, "loop.ranks=%d comm.ranks_per_node=%d comm.bucket_bytes=%s "
                     "comm.algorithm=reduce_scatter", ranks, plan % 2, plan < 2 ? "1G" : "64K");
            ShardCase test = shard_case(settings, true, table.elems);
            for (int step = 1; step < STEPS; step++) /* the first one has nothing to gather */
                assert_close(test.bytes[step], ranks * (2.0 * (ranks - 1) / ranks * 4 * (double)table.elems) +
                                                   4.0 * ranks * (ranks - 1) * test.buckets, 0.5);
            for (int rank = 0; rank < ranks; rank++) {
                assert_close((double)test.owned[rank], (double)table.elems / ranks, test.buckets * CHUNK_ALIGN_ELEMS);
                assert_in_range(test.moments[rank], 8 * test.owned[rank], 8 * test.owned[rank] + 4096);
            }
            free(test.result);
        }
    param_table_free(&table);
}

static void assert_refused_shards(const char *settings, const char *line) {
    ShardCase test = {.sharded = true};
    LoopConfig loop = {0};
    sync_settings(settings, &test.config, &loop);
    assert_refused(comm_run(&test.config, &loop, OK, run_shard_rank, &test), line);
}

static void test_refused(void **state) {
    (void)state;
    assert_refused_shards("loop.ranks=2 comm.algorithm=ring comm.bucket_bytes=1M", "optim.zero = 1");
    assert_refused_shards("loop.ranks=2 comm.leader=yes comm.bucket_bytes=1M", "optim.zero = 1");
    assert_refused_shards("loop.ranks=2 comm.bucket_bytes=4K", "comm.bucket_bytes");
}

/* ---- the prediction of a step ---- */

typedef struct PredictedCase {
    CommConfig config;
    BucketStats buckets[64];
    int count;
    SyncPrediction prediction;
} PredictedCase;

static Status predicted_step(Sync *sync, const ParamTable *table) {
    const struct timespec pause = {0, 500000};
    sync_forward_begin(sync, NULL, 0);
    for (int g = table->gradient_count - 1; g >= 0; g--) { /* as forward goes through the model */
        sync_need(sync, g);
        nanosleep(&pause, NULL);
    }
    TRY(sync_forward_end(sync));
    sync_begin(sync);
    for (int g = 0; g < table->gradient_count; g++) {
        nanosleep(&pause, NULL);
        sync_mark_ready(sync, g);
    }
    TRY(sync_wait(sync));
    sync_commit(sync);
    return OK;
}

static Status run_predicted_rank(Comm *comm, void *user) {
    PredictedCase *test = user;
    ParamTable table;
    sync_table_make(&table);
    size_t bytes = (size_t)table.elems * sizeof(float);
    float *grads = memory_alloc(comm_memory(comm), bytes), *params = memory_alloc(comm_memory(comm), bytes);
    memset(grads, 0, bytes);
    memset(params, 0, bytes);
    SyncSetup setup = {.table = &table, .grads = grads, .sharded = true, .params = params};
    Sync *sync = NULL;
    Status status = sync_create(&sync, comm, &test->config, &setup);
    for (int step = 0; step < STEPS && status == OK; step++)
        status = predicted_step(sync, &table);
    if (status == OK && comm_rank(comm) == 0) {
        test->count = sync_bucket_count(sync);
        for (int b = 0; b < test->count; b++)
            test->buckets[b] = sync_bucket_mean(sync, b);
        test->prediction = sync_predict(sync);
    }
    sync_destroy(sync);
    memory_free(comm_memory(comm), params);
    memory_free(comm_memory(comm), grads);
    param_table_free(&table);
    return status;
}

/* From the table of buckets, in another way than bound.c's: forward waits as long as the latest bucket is late, and
 * backward's last bucket is late by all that had to follow some bucket when that was ready. */
static void test_predicted_step(void **state) {
    (void)state;
    for (int overlap = 0; overlap < 2; overlap++) {
        PredictedCase test = {0};
        LoopConfig loop = {0};
        sync_settings(overlap ? "loop.ranks=4 comm.ranks_per_node=2 loop.gb_per_s_between=0.05 comm.bucket_bytes=32K "
                                "comm.calibrate=yes"
                              : "loop.ranks=3 loop.latency_inside_us=100 comm.bucket_bytes=32K comm.calibrate=yes "
                                "comm.overlap=no",
                      &test.config, &loop);
        assert_ok(comm_run(&test.config, &loop, OK, run_predicted_rank, &test));
        assert_in_range(test.count, 5, 63);
        double arrived_ms = 0, late_ms = 0, reduced_ms = 0, end_ms = 0;
        for (int b = test.count - 1; b >= 0; b--) {
            const BucketStats *bucket = &test.buckets[b];
            assert_true(bucket->gather_predicted_ms > 0 && bucket->gather_ms > 0 && bucket->needed_ms >= 0);
            arrived_ms += bucket->gather_predicted_ms;
            late_ms = fmax(late_ms, arrived_ms - bucket->needed_ms);
            reduced_ms += bucket->predicted_ms;
            end_ms = fmax(end_ms, bucket->ready_ms + reduced_ms);
        }
        assert_true(test.buckets[0].needed_ms >= test.buckets[test.count - 1].needed_ms + 4); /* behind 8 pauses */
        assert_close(test.prediction.gather_exposed_ms, late_ms, 1e-9);
        assert_true(test.prediction.compute_ms >= test.buckets[0].needed_ms + test.buckets[test.count - 1].ready_ms);
        if (!overlap)
            assert_close(test.prediction.reduce_exposed_ms, reduced_ms, 1e-9);
        else /* sync_wait is called once the last one is ready */
            assert_true(test.prediction.reduce_exposed_ms <= end_ms - test.buckets[test.count - 1].ready_ms + 1e-9 &&
                        test.prediction.reduce_exposed_ms >= 0);
    }
}

/* ---- the split embedding ---- */

typedef struct EmbeddingCase {
    CommConfig config;
    bool split, sharded;
    int ids;             /* tokens are below that */
    float *result;       /* f32[STEPS][elems] */
    int64_t last_elems;  /* of the last bucket, in the last step */
    int rows_used[STEPS];
} EmbeddingCase;

static void embedding_table(ParamTable *table) {
    *table = (ParamTable){0};
    param_add(table, "wte", -1, VOCAB, WIDTH);
    param_add(table, "lnfw", -1, 1, WIDTH);
    param_add(table, "fcw", 0, 61, WIDTH);
    param_add(table, "fcb", 0, 1, 190);
    param_add(table, "wpe", -1, 40, WIDTH);
}

static int token_of(const EmbeddingCase *test, int rank, int step, int i) {
    return (int)(random_bits(9, (uint64_t)(rank * 100 + step), (uint64_t)i) % (uint64_t)test->ids);
}

static float lookup_value(int rank, int step, int i, int c) { return sync_value(rank + 50, step, i * WIDTH + c); }

/* Like a backward: the head's gradient of wte first, then the others, then the lookup's, into its rows or on top. */
static void embedding_backward(const EmbeddingCase *test, Sync *sync, const ParamTable *table, float *grads, int rank,
                               int step) {
    SyncLookup lookup = sync_lookup(sync);
    for (int g = 0; g < table->gradient_count; g++) {
        const Gradient *gradient = &table->gradients[g];
        for (int64_t i = gradient->offset; i < gradient->offset + gradient->elems; i++)
            grads[i] = sync_value(rank, step, i);
        if (g > 0 || lookup.rows)
            sync_mark_ready(sync, g);
    }
    for (int i = 0; i < TOKENS && lookup.rows; i++)
        memset(lookup.rows + lookup.slot_of_token[token_of(test, rank, step, i)] * WIDTH, 0, WIDTH * sizeof(float));
    for (int i = 0; i < TOKENS; i++) {
        int token = token_of(test, rank, step, i);
        float *row = lookup.rows ? lookup.rows + lookup.slot_of_token[token] * WIDTH : grads + token * WIDTH;
        for (int c = 0; c < WIDTH; c++)
            row[c] += lookup_value(rank, step, i, c);
    }
    if (!lookup.rows)
        sync_mark_ready(sync, 0);
}

/* Of sharded parameters the rows that are looked up come first, then the rest; all whole at the end of forward. */
static Status embedding_forward(Sync *sync, const ParamTable *table, const float *params, const int *tokens, int step) {
    sync_forward_begin(sync, tokens, TOKENS);
    sync_need(sync, 0);
    for (int64_t i = 0; i < TOKENS * WIDTH && step > 0; i++) {
        int64_t place = tokens[i / WIDTH] * WIDTH + i % WIDTH;
        if (params[place] != param_value(step - 1, place))
            return fault("step %d: parameter %lld of a row is %g", step, (long long)place, (double)params[place]);
    }
    for (int g = 1; g < table->gradient_count; g++)
        sync_need(sync, g);
    TRY(sync_forward_end(sync));
    for (int64_t i = 0; i < table->elems && step > 0; i++)
        if (params[i] != param_value(step - 1, i))
            return fault("step %d: parameter %lld is %g", step, (long long)i, (double)params[i]);
    return OK;
}

static Status embedding_step(Comm *comm, Sync *sync, EmbeddingCase *test, const ParamTable *table, float *grads,
                             float *params, int step) {
    int rank = comm_rank(comm), tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++)
        tokens[i] = token_of(test, rank, step, i);
    TRY(embedding_forward(sync, table, params, tokens, test->sharded ? step : 0));
    SyncLookup lookup = sync_lookup(sync);
    for (int64_t i = 0; lookup.rows && i < VOCAB; i++) /* stale rows of earlier steps must not count */
        if (lookup.slot_of_token[i] >= 0)
            memset(lookup.rows + lookup.slot_of_token[i] * WIDTH, 0, WIDTH * sizeof(float));
    sync_begin(sync);
    embedding_backward(test, sync, table, grads, rank, step);
    TRY(sync_wait(sync));
    if (rank == 0)
        test->rows_used[step] = lookup.rows != NULL;
    bool head_last = true; /* its buckets leave when they can be ready: behind all others if the lookup adds to them */
    for (int b = 0; b < sync_bucket_count(sync) - 1; b++)
        head_last &= sync_bucket(sync, b).start_ms <= sync_bucket(sync, 0).start_ms;
    if (test->split && head_last != !lookup.rows)
        return fault("the head's buckets left %s", head_last ? "last" : "first");
    double rows_ready_ms = sync_bucket(sync, sync_bucket_count(sync) - 1).ready_ms;
    for (int g = 0; lookup.rows && g < table->gradient_count; g++)
        if (!(sync_ready_ms(sync, g) <= rows_ready_ms))
            return fault("the lookup's rows were ready before gradient %d", g);
    for (int b = 0; lookup.rows && !test->config.overlap && b < sync_bucket_count(sync); b++)
        if (!(rows_ready_ms <= sync_bucket(sync, b).start_ms))
            return fault("bucket %d left before the lookup's rows were ready", b);
    const Shard whole = {&(Slice){0, table->elems}, rank == 0}, *mine = test->sharded ? sync_shard(sync, rank) : &whole;
    for (int s = 0; s < mine->count; s++)
        memcpy(test->result + step * table->elems + mine->slices[s].start, grads + mine->slices[s].start,
               (size_t)mine->slices[s].elems * sizeof(float));
    if (test->sharded) {
        memset(params, 0xFF, (size_t)table->elems * sizeof(float)); /* what is not gathered is NaN */
        TRY(comm_barrier(comm));
        update(mine, params, step);
    }
    sync_commit(sync);
    if (rank == 0)
        test->last_elems = sync_bucket(sync, sync_bucket_count(sync) - 1).elems;
    return test->sharded ? OK : comm_verify(comm, grads, (size_t)table->elems * sizeof(float), "gradients");
}

static Status run_embedding_rank(Comm *comm, void *user) {
    EmbeddingCase *test = user;
    ParamTable table;
    embedding_table(&table);
    size_t bytes = (size_t)table.elems * sizeof(float);
    float *grads = memory_alloc(comm_memory(comm), bytes), *params = memory_alloc(comm_memory(comm), bytes);
    SyncSetup setup = {.table = &table, .grads = grads, .sharded = test->sharded, .params = params};
    if (test->split) {
        setup.vocab = VOCAB;
        setup.channels = WIDTH;
        setup.tokens = TOKENS;
    }
    Sync *sync = NULL;
    Status status = sync_create(&sync, comm, &test->config, &setup);
    for (int step = 0; step < STEPS && status == OK; step++)
        status = embedding_step(comm, sync, test, &table, grads, params, step);
    sync_destroy(sync);
    memory_free(comm_memory(comm), params);
    memory_free(comm_memory(comm), grads);
    param_table_free(&table);
    return status;
}

static void check_embedding(const EmbeddingCase *test, int ranks) {
    ParamTable table;
    embedding_table(&table);
    double *expected = malloc((size_t)table.elems * sizeof *expected);
    for (int step = 0; step < STEPS; step++) {
        for (int64_t i = 0; i < table.elems; i++) {
            expected[i] = 0;
            for (int rank = 0; rank < ranks; rank++)
                expected[i] += (double)sync_value(rank, step, i) / ranks;
        }
        for (int rank = 0; rank < ranks; rank++)
            for (int i = 0; i < TOKENS; i++)
                for (int c = 0; c < WIDTH; c++)
                    expected[token_of(test, rank, step, i) * WIDTH + c] += (double)lookup_value(rank, step, i, c) / ranks;
        for (int64_t i = 0; i < table.elems; i++)
            assert_close(test->result[step * table.elems + i], expected[i], 60 * 0x1p-24 * 10);
    }
    free(expected);
    param_table_free(&table);
}

/* Few ids: rows of their own. Many: the dense gradient, on every rank alike. Both: the same sum to f32 rounding. */
static void test_split_embedding(void **state) {
    (void)state;
    static const struct {
        const char *settings;
        int ranks, ids, rows;
    } cases[] = {
        {"loop.ranks=2", 2, 40, 1},
        {"loop.ranks=4 comm.ranks_per_node=2", 4, 40, 1},
        {"loop.ranks=4 comm.ranks_per_node=2 comm.bucket_bytes=20K", 4, 211, 1},
        {"loop.ranks=6 comm.ranks_per_node=3", 6, 211, 0},
        {"loop.ranks=3 comm.algorithm=ring comm.overlap=no", 3, 30, 1},
        {"loop.ranks=5 comm.algorithm=tree", 5, 1, 1},
    };
    ParamTable table;
    embedding_table(&table);
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        for (int variant = 0; variant < 3; variant++) { /* plain, split, split and sharded */
            EmbeddingCase test = {.split = variant > 0, .sharded = variant > 1, .ids = cases[k].ids};
            LoopConfig loop = {0};
            char settings[256];
            snprintf(settings, sizeof settings, "comm.bucket_bytes=1M %s %s", cases[k].settings,
                     variant > 1 ? "comm.algorithm=hierarchical" : "");
            sync_settings(settings, &test.config, &loop);
            test.result = malloc((size_t)(STEPS * table.elems) * sizeof(float));
            Status status = comm_run(&test.config, &loop, OK, run_embedding_rank, &test);
            if (status != OK)
                fail_msg("%s: %s", settings, error_line());
            check_embedding(&test, cases[k].ranks);
            assert_int_equal(test.rows_used[STEPS - 1], variant > 0 && cases[k].rows);
            if (test.rows_used[STEPS - 1])
                assert_true(test.last_elems > 0 && test.last_elems <= cases[k].ids * WIDTH);
            free(test.result);
        }
    param_table_free(&table);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_shards), cmocka_unit_test(test_bytes_and_memory),
                                          cmocka_unit_test(test_refused), cmocka_unit_test(test_predicted_step),
                                          cmocka_unit_test(test_split_embedding)};

CHECK_MAIN(tests)
