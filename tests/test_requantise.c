/* The ring that quantises at each hop: replicas, values that survive any number of quantisations, there and in all
 * other collectives that compress, and the growth of its error with the ranks beside that of the all-to-all, which has
 * none. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/loop_world.h"
#include "tests/sync_world.h"

#include "comm/compress/codec.h"

static const struct Coder {
    const char *name;
    double density;
    bool bf16_values;
} coders[] = {{"bf16", 0, false}, {"int8", 0, false}, {"int4", 0, false}, {"topk", 0.1, false}, {"topk", 0.1, true}};
enum { CODERS = sizeof coders / sizeof *coders, PADDING = 778, SMALL = 5000 };

/* What every rank of a world reduces: `elems` values from PADDING on. */
typedef struct Run {
    const char *collective;
    const struct Coder *coder; /* NULL: no codec */
    bool between;              /* compresses between nodes only */
    int64_t elems;
    float scale;
    float (*value)(const struct Coder *coder, int rank, int64_t i);
    float *results; /* f32[ranks][elems] */
} Run;

/* Matrices and 1-D groups; few values lie in one matrix. All sizes are even. */
static void make_table(ParamTable *table, int64_t elems) {
    *table = (ParamTable){0};
    if (elems >= SMALL) {
        param_add(table, "lnfw", -1, 1, PADDING / 2 + 1);
        param_add(table, "fcw", 1, 2, (elems + PADDING) / 4 + 1);
        param_add(table, "fcb", 1, 1, 1500);
        param_add(table, "small", 0, 2, 300);
    }
    param_add(table, "wte", -1, 2, elems + PADDING);
}

static Status make_codec(Codec **codec, const struct Coder *coder, int64_t elems, bool every_hop) {
    ParamTable table;
    CompressorOptions options = {coder->density, coder->bf16_values};
    make_table(&table, elems);
    Status status = codec_create(codec, &table, compressor_find(coder->name), &options, every_hop, false);
    param_table_free(&table);
    return status;
}

static Status reduce(const Run *run, Transport *transport, Codec *codec, float *data) {
    Group group = {transport, in_order, transport->ranks, transport->rank};
    const Collective *collective = collective_find(run->collective);
    int64_t scratch_elems = collective->scratch_elems(&group, run->elems, codec);
    float *scratch = case_floats(scratch_elems);
    case_delay(transport->rank, (uint64_t)run->elems);
    Status status = collective->allreduce(
        &group, &(Payload){.data = data, .elems = run->elems, .scale = run->scale, .scratch = scratch,
                           .offset = PADDING, .codec = codec});
    if (status == OK && !(case_guard_intact(data, run->elems) && case_guard_intact(scratch, scratch_elems)))
        status = fault("wrote behind its arrays");
    if (status != OK)
        case_abandon(transport, status);
    free(scratch);
    return status;
}

static Status run_rank(const World *world, Transport *transport) {
    const Run *run = world->user;
    Codec *codec = NULL;
    if (run->coder)
        TRY(make_codec(&codec, run->coder, run->elems, !run->between));
    float *data = case_floats(run->elems);
    for (int64_t i = 0; i < run->elems; i++)
        data[i] = run->value(run->coder, transport->rank, i);
    Status status = reduce(run, transport, codec, data);
    memcpy(run->results + transport->rank * run->elems, data, (size_t)run->elems * sizeof(float));
    free(data);
    codec_destroy(codec);
    return status;
}

/* Fails unless all ranks have the same bits. */
static void run_replicas(const Place *place, Run *run) {
    const char *name = run->coder ? run->coder->name : "f32";
    run->results = malloc((size_t)(place->ranks * run->elems + 1) * sizeof(float));
    if (run_world(place, run_rank, run, NULL, 1) != OK)
        fail_msg("%s, %s, %lld values: %s", place->name, name, (long long)run->elems, error_line());
    for (int rank = 1; rank < place->ranks; rank++)
        if (memcmp(run->results, run->results + rank * run->elems, (size_t)run->elems * sizeof(float)) != 0)
            fail_msg("%s, %s, %lld values: rank %d has other bits than rank 0", place->name, name,
                     (long long)run->elems, rank);
}

static const int64_t sizes[] = {70001, 1, 2, 257, 4096, 4097, 20011, 0, 31, 300007};
enum { SIZES = sizeof sizes / sizeof *sizes };

/* ---- values that the format holds exactly ---- */

/* Rank r sends (r + 1) times it, so whatever of it was added up is a multiple of it. Every part of a block begins at an
 * even offset, where the largest code is: then the scale is that multiple. topk: one value in 20 is not 0. */
static int pattern(const struct Coder *coder, int64_t i) {
    const bool topk = strcmp(coder->name, "topk") == 0;
    const int most = topk || strcmp(coder->name, "bf16") == 0 ? 1 : strcmp(coder->name, "int8") == 0 ? 127 : 7;
    int64_t offset = PADDING + i;
    uint64_t bits = random_bits(3, 0, (uint64_t)offset);
    if (topk && offset % 20 != 0)
        return 0;
    if (offset % 2 == 0)
        return bits % 2 ? most : -most;
    return (int)(bits % (uint64_t)(2 * most + 1)) - most;
}

static float pattern_of_rank(const struct Coder *coder, int rank, int64_t i) {
    return (float)((rank + 1) * pattern(coder, i));
}

static void check_exact(const Place *place, Run *run) {
    run_replicas(place, run);
    for (int64_t i = 0; i < run->elems; i++) {
        float expected = 0.25f * (float)(place->ranks * (place->ranks + 1) * pattern(run->coder, i));
        if (run->results[i] != expected)
            fail_msg("%s, %s, %s, %s, %lld values: value %lld is %g, expected %g", run->collective, place->name,
                     run->coder->name, run->between ? "between nodes" : "every hop", (long long)run->elems,
                     (long long)i, (double)run->results[i], (double)expected);
    }
    free(run->results);
}

static void test_exact(void **state) {
    (void)state;
    for (int turn = 0; turn < PLACES * CODERS; turn++)
        check_exact(&places[turn / CODERS], &(Run){"ring_requantise", &coders[turn % CODERS], false,
                                                   sizes[turn % (SIZES - 1)], 0.5f, pattern_of_rank, NULL});
}

static void test_exact_elsewhere(void **state) {
    (void)state;
    static const char *const compressing[] = {"reduce_scatter", "hierarchical", "leader"};
    for (int turn = 0; turn < PLACES * CODERS; turn++)
        for (int how = 0; how < 6; how++)
            check_exact(&places[turn / CODERS], &(Run){compressing[how % 3], &coders[turn % CODERS], how / 3,
                                                       sizes[(turn + how) % (SIZES - 1)], 0.5f, pattern_of_rank, NULL});
}

/* ---- any values ---- */

static float random_value(const struct Coder *coder, int rank, int64_t i) {
    (void)coder;
    return case_random_value(rank, i);
}

/* Several rounds of chunks too. */
static void test_replicas(void **state) {
    (void)state;
    for (int turn = 0; turn < PLACES * CODERS; turn++) {
        Run run = {"ring_requantise", &coders[turn % CODERS], false, sizes[turn % SIZES], 0.3f, random_value, NULL};
        run_replicas(&places[turn / CODERS], &run);
        free(run.results);
    }
    for (int c = 0; c < CODERS; c++) {
        Run run = {"ring_requantise", &coders[c], false, 600011, 0.3f, random_value, NULL};
        run_replicas(place_named("1 node of 3"), &run);
        free(run.results);
    }
}

static void test_without_codec_it_is_ring(void **state) {
    (void)state;
    Run ring = {"ring", NULL, false, 70001, 0.3f, random_value, NULL}, other = ring;
    other.collective = "ring_requantise";
    run_replicas(place_named("2 and 3, mixed"), &ring);
    run_replicas(place_named("2 and 3, mixed"), &other);
    assert_memory_equal(ring.results, other.results, (size_t)ring.elems * sizeof(float));
    free(ring.results);
    free(other.results);
}

/* ---- how the error grows ---- */

enum { GAUSSIAN_ELEMS = 100000 };

static float gaussian(const struct Coder *coder, int rank, int64_t i) {
    (void)coder;
    return (float)random_normal(17, (uint64_t)rank, (uint64_t)i);
}

/* Root of the mean square of what is off, over that of what is right. */
static double relative_error(const float *values, const double *right, int64_t elems) {
    double off = 0, all = 0;
    for (int64_t i = 0; i < elems; i++) {
        off += (values[i] - right[i]) * (values[i] - right[i]);
        all += right[i] * right[i];
    }
    return sqrt(off / all);
}

static double error_of(const char *collective, int ranks) {
    Place place = {.name = "error", .ranks = ranks};
    Run run = {collective, &coders[1], false, GAUSSIAN_ELEMS, 1 / (float)ranks, gaussian, NULL};
    double *right = calloc(GAUSSIAN_ELEMS, sizeof *right);
    for (int rank = 0; rank < ranks; rank++)
        for (int64_t i = 0; i < GAUSSIAN_ELEMS; i++)
            right[i] += (double)gaussian(NULL, rank, i) / ranks;
    run_replicas(&place, &run);
    double error = relative_error(run.results, right, GAUSSIAN_ELEMS);
    free(run.results);
    free(right);
    return error;
}

/* Of one quantisation. */
static double error_of_codec(void) {
    Codec *codec;
    assert_ok(make_codec(&codec, &coders[1], GAUSSIAN_ELEMS, true));
    float *values = malloc(GAUSSIAN_ELEMS * sizeof *values), *decoded = malloc(GAUSSIAN_ELEMS * sizeof *decoded);
    double *right = malloc(GAUSSIAN_ELEMS * sizeof *right);
    char *wire = malloc(codec_wire_bytes_max(codec, GAUSSIAN_ELEMS));
    for (int64_t i = 0; i < GAUSSIAN_ELEMS; i++)
        right[i] = values[i] = gaussian(NULL, 99, i);
    codec_encode(codec, HOP_FIRST, PADDING, GAUSSIAN_ELEMS, values, 1, wire);
    codec_decode(codec, PADDING, GAUSSIAN_ELEMS, wire, decoded);
    double error = relative_error(decoded, right, GAUSSIAN_ELEMS);
    free(wire);
    free(right);
    free(decoded);
    free(values);
    codec_destroy(codec);
    return error;
}

/* With q the relative error of one quantisation: all-to-all quantises N terms and their sum, so sqrt(2) q whatever N.
 * The ring quantises the sums of 1, 2, ..., N - 1 terms and of all N: together q^2 N (N + 1) / 2 of a term's energy
 * against N, so sqrt((N + 1) / 2) q. */
static void test_error_grows_with_the_ranks(void **state) {
    (void)state;
    double q = error_of_codec();
    assert_close(q, 0.007, 0.0005);
    print_message("int8, Gaussian, one quantisation: %.5f\n", q);
    double all_to_all_2 = 0, ring_2 = 0;
    for (int ranks = 2; ranks <= 16; ranks *= 2) {
        double all_to_all = error_of("reduce_scatter", ranks), ring = error_of("ring_requantise", ranks);
        double growth = sqrt((ranks + 1) / 2.0);
        print_message("%2d ranks: all-to-all %.5f, formula %.5f; ring %.5f, formula %.5f\n", ranks, all_to_all,
                      sqrt(2) * q, ring, growth * q);
        assert_close(all_to_all, sqrt(2) * q, 0.05 * sqrt(2) * q);
        assert_close(ring, growth * q, 0.05 * growth * q);
        all_to_all_2 = ranks == 2 ? all_to_all : all_to_all_2;
        ring_2 = ranks == 2 ? ring : ring_2;
        assert_close(all_to_all / all_to_all_2, 1, 0.05);
        assert_true(ranks == 2 ? ring < all_to_all : ring > 1.1 * all_to_all);
        assert_true(ring / ring_2 >= 0.75 * sqrt(ranks / 2.0) && ring / ring_2 <= sqrt(ranks / 2.0));
    }
}

/* ---- in the sync ---- */

enum { STEPS = 5 };

static Status check_step(Comm *comm, const ParamTable *table, const float *grads, int step) {
    double *mean = calloc((size_t)table->elems, sizeof *mean);
    for (int64_t i = 0; i < table->elems; i++)
        for (int rank = 0; rank < comm_ranks(comm); rank++)
            mean[i] += (double)sync_value(rank, step, i) / comm_ranks(comm);
    double error = relative_error(grads, mean, table->elems);
    free(mean);
    if (!(error > 0.005 && error < 0.02))
        return fault("step %d: relative error %g", step, error);
    return comm_verify(comm, grads, (size_t)table->elems * sizeof(float), "gradients");
}

/* Other buckets half-way. */
static Status sync_steps(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    CommConfig *config = user;
    if (!strstr(sync_plan(sync), "int8 at each hop,") || sync_residuals(sync) != 0)
        return fault("unexpected plan: %s, %d residuals", sync_plan(sync), sync_residuals(sync));
    for (int step = 0; step < STEPS; step++) {
        config->bucket_bytes = step == 3 ? 90000 : config->bucket_bytes;
        TRY(step == 3 ? sync_replan(sync, config) : OK);
        TRY(sync_random_step(sync, table, grads, comm_rank(comm), step, 0));
        TRY(check_step(comm, table, grads, step));
        sync_commit(sync);
    }
    return OK;
}

/* Feeds nothing back, whatever comm.error_feedback says. */
static Status sync_rank(Comm *comm, void *user) {
    CommConfig config = {0};
    LoopConfig loop = {0};
    ParamTable table;
    sync_settings(user, &config, &loop);
    sync_table_make(&table);
    return with_sync(comm, &config, &table, sync_steps, &config);
}

static void test_sync(void **state) {
    (void)state;
    static const char *const shapes[] = {"loop.ranks=2", "loop.ranks=3 comm.ranks_per_node=1", "loop.ranks=5",
                                         "loop.ranks=6 comm.ranks_per_node=3"};
    for (int s = 0; s < 4; s++) {
        char settings[256];
        CommConfig config = {0};
        LoopConfig loop = {0};
        snprintf(settings, sizeof settings, "%s comm.algorithm=ring comm.compress=int8 comm.requantise=ring "
                 "comm.bucket_bytes=40K", shapes[s]);
        sync_settings(settings, &config, &loop);
        if (comm_run(&config, &loop, OK, sync_rank, settings) != OK)
            fail_msg("%s: %s", settings, error_line());
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_exact),
    cmocka_unit_test(test_exact_elsewhere),
    cmocka_unit_test(test_replicas),
    cmocka_unit_test(test_without_codec_it_is_ring),
    cmocka_unit_test(test_error_grows_with_the_ranks),
    cmocka_unit_test(test_sync),
};

CHECK_MAIN(tests)
