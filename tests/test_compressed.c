/* All-reduce with a codec: every collective that compresses, every compressor, both scopes, on every shape of a world.
 *
 * Blocks sit at global offsets and each value is quantised at known points only, so what must come out can be computed
 * here without any message, over the whole array at once: the bits must be those, on every rank, however the
 * collective cuts the array into parts, segments and messages. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/loop_world.h"

#include "comm/compress/codec.h"

#include <assert.h>

static const struct Coder {
    const char *name;
    double density;
    bool bf16_values;
} coders[] = {{"bf16", 0, false}, {"int8", 0, false}, {"int4", 0, false}, {"topk", 0.01, false}, {"topk", 0.1, true}};
enum { CODERS = sizeof coders / sizeof *coders, PADDING = 777, ROUNDS = 3 };

/* Matrices and 1-D groups at odd places; `elems` values from PADDING on are reduced. */
static void make_table(ParamTable *table, int64_t elems) {
    *table = (ParamTable){0};
    param_add(table, "lnfw", -1, 1, PADDING / 2);
    param_add(table, "fcw", 1, 2, (elems + PADDING) / 4 + 1);
    param_add(table, "fcb", 1, 1, 1500);
    param_add(table, "small", 0, 2, 300);
    param_add(table, "wte", -1, 2, elems + PADDING);
}

static Status make_codec(Codec **codec, const ParamTable *table, const struct Coder *coder, bool every_hop,
                         bool error_feedback) {
    CompressorOptions options = {coder->density, coder->bf16_values};
    return codec_create(codec, table, compressor_find(coder->name), &options, every_hop, error_feedback);
}

/* ---- what must come out ---- */

/* One quantisation with a residual, over all values at once. */
typedef struct Quantiser {
    Codec *codec;
    CodecHop hop;
    char *wire;
} Quantiser;

static void quantise(const Quantiser *quantiser, const float *values, float scale, int64_t elems, float *out) {
    int messages = quantiser->codec->compressor->by_message ? 2 : 1;
    for (int i = 0; i < messages; i++) {
        int64_t start = chunk_start(PADDING, elems, messages, i), stop = chunk_start(PADDING, elems, messages, i + 1);
        codec_encode(quantiser->codec, quantiser->hop, PADDING + start, stop - start, values + start, scale,
                     quantiser->wire);
        codec_decode(quantiser->codec, PADDING + start, stop - start, quantiser->wire, out + start);
    }
}

/* The codecs of an imagined run in which nothing is cut: one per rank, one per node, one for the result. */
typedef struct Oracle {
    const Place *place;
    const char *collective;
    bool every_hop;
    int64_t elems;
    Codec *of_rank[CASE_RANKS_MAX], *of_node[CASE_RANKS_MAX], *of_result;
    float *term, *node_sum, *sum;
    char *wire;
} Oracle;

static int nodes_of(const Place *place, int *node_of_rank, int *sizes) {
    int nodes = 0;
    for (int rank = 0; rank < place->ranks; rank++) {
        int before = 0;
        while (before < rank && place->node[before] != place->node[rank])
            before++;
        node_of_rank[rank] = before < rank ? node_of_rank[before] : nodes++;
        sizes[node_of_rank[rank]] = before < rank ? sizes[node_of_rank[rank]] + 1 : 1;
    }
    return nodes;
}

static void add_term(float *sum, const float *term, int64_t elems, bool first) {
    for (int64_t i = 0; i < elems; i++)
        sum[i] = first ? term[i] : sum[i] + term[i];
}

/* A rank's scaled values, quantised or not. */
static void rank_term(Oracle *self, int rank, int round, bool coded) {
    float scale = case_scale(rank), *values = malloc((size_t)self->elems * sizeof(float));
    for (int64_t i = 0; i < self->elems; i++)
        values[i] = case_random_value(rank, i + 1000003 * round);
    if (coded)
        quantise(&(Quantiser){self->of_rank[rank], HOP_FIRST, self->wire}, values, scale, self->elems, self->term);
    else
        for (int64_t i = 0; i < self->elems; i++)
            self->term[i] = scale * values[i];
    free(values);
}

/* Leaves the result in sum. */
static void oracle_round(Oracle *self, int round) {
    int node_of_rank[CASE_RANKS_MAX], sizes[CASE_RANKS_MAX], ranks = self->place->ranks;
    int nodes = nodes_of(self->place, node_of_rank, sizes), largest = 1;
    for (int node = 0; node < nodes; node++)
        largest = sizes[node] > largest ? sizes[node] : largest;
    bool flat = strcmp(self->collective, "reduce_scatter") == 0 || nodes == 1 || largest == 1;
    bool coded_result = ranks > 1 && (nodes > 1 || self->every_hop);
    bool coded_first = ranks > 1 && (self->every_hop || (flat && nodes > 1));
    if (flat) {
        for (int rank = 0; rank < ranks; rank++) {
            rank_term(self, rank, round, coded_first);
            add_term(self->sum, self->term, self->elems, rank == 0);
        }
    } else {
        for (int node = 0; node < nodes; node++) {
            bool first = true;
            for (int rank = 0; rank < ranks; rank++)
                if (node_of_rank[rank] == node) {
                    rank_term(self, rank, round, coded_first);
                    add_term(self->node_sum, self->term, self->elems, first);
                    first = false;
                }
            quantise(&(Quantiser){self->of_node[node], HOP_SECOND, self->wire}, self->node_sum, 1, self->elems,
                     self->term);
            add_term(self->sum, self->term, self->elems, node == 0);
        }
    }
    if (coded_result)
        quantise(&(Quantiser){self->of_result, HOP_RESULT, self->wire}, self->sum, 1, self->elems, self->sum);
}

static void oracle_each(Oracle *self, void (*body)(Codec *codec)) {
    for (int i = 0; i < self->place->ranks; i++) {
        body(self->of_rank[i]);
        body(self->of_node[i]);
    }
    body(self->of_result);
}

static void oracle_create(Oracle *self, const ParamTable *table, const struct Coder *coder) {
    size_t bytes = (size_t)(self->elems + 1) * sizeof(float);
    for (int i = 0; i < self->place->ranks; i++) {
        assert_ok(make_codec(&self->of_rank[i], table, coder, false, true));
        assert_ok(make_codec(&self->of_node[i], table, coder, false, true));
    }
    assert_ok(make_codec(&self->of_result, table, coder, false, true));
    self->term = malloc(bytes);
    self->node_sum = malloc(bytes);
    self->sum = malloc(bytes);
    self->wire = malloc(codec_wire_bytes_max(self->of_result, self->elems));
}

static void oracle_destroy(Oracle *self) {
    oracle_each(self, codec_destroy);
    free(self->term);
    free(self->node_sum);
    free(self->sum);
    free(self->wire);
}

/* ---- runs ---- */

typedef struct Run {
    const char *collective;
    const struct Coder *coder;
    bool every_hop, shared;
    int64_t elems;
    const ParamTable *table;
    const float *expected; /* f32[ROUNDS][elems] */
} Run;

static Status one_round(const Run *run, const Group *group, Codec *codec, float *data, float *scratch, int round) {
    int rank = group->members[group->self];
    for (int64_t i = 0; i < run->elems; i++)
        data[i] = case_random_value(rank, i + 1000003 * round);
    case_delay(rank, (uint64_t)round);
    Payload payload = {.data = data, .elems = run->elems, .scale = case_scale(rank), .scratch = scratch,
                       .offset = PADDING, .codec = codec};
    TRY(collective_find(run->collective)->allreduce(group, &payload));
    codec_commit(codec);
    const float *expected = run->expected + round * run->elems;
    for (int64_t i = 0; i < run->elems; i++)
        if (memcmp(&data[i], &expected[i], sizeof(float)) != 0)
            return fault("round %d: value %lld is %.9g, expected %.9g", round, (long long)i, (double)data[i],
                         (double)expected[i]);
    return case_guard_intact(data, run->elems) ? OK : fault("wrote behind its array");
}

static Status run_rank(const World *world, Transport *transport) {
    const Run *run = world->user;
    Codec *codec = NULL;
    Group group = {transport, in_order, transport->ranks, transport->rank};
    size_t bytes = (size_t)(run->elems + CASE_GUARD) * sizeof(float);
    TRY(make_codec(&codec, run->table, run->coder, run->every_hop, true));
    int64_t scratch_elems = collective_find(run->collective)->scratch_elems(&group, run->elems, codec);
    float *scratch = case_floats(scratch_elems);
    float *data = run->shared ? transport_share(transport, bytes) : malloc(bytes);
    memset(data + run->elems, 0xFF, CASE_GUARD * sizeof(float));
    Status status = OK;
    for (int round = 0; round < ROUNDS && status == OK; round++)
        status = one_round(run, &group, codec, data, scratch, round);
    if (status == OK && !case_guard_intact(scratch, scratch_elems))
        status = fault("wrote behind its scratch");
    if (status != OK)
        case_abandon(transport, status);
    arena_release(transport, data, run->shared);
    free(scratch);
    codec_destroy(codec);
    return status;
}

static void check_run(const Place *place, Run *run) {
    ParamTable table;
    make_table(&table, run->elems);
    Oracle oracle = {.place = place, .collective = run->collective, .every_hop = run->every_hop, .elems = run->elems};
    float *expected = malloc((size_t)(ROUNDS * run->elems + 1) * sizeof(float));
    oracle_create(&oracle, &table, run->coder);
    for (int round = 0; round < ROUNDS; round++) {
        oracle_round(&oracle, round);
        memcpy(expected + round * run->elems, oracle.sum, (size_t)run->elems * sizeof(float));
        oracle_each(&oracle, codec_commit);
    }
    oracle_destroy(&oracle);
    run->table = &table;
    run->expected = expected;
    if (run_world(place, run_rank, run, NULL, 1) != OK)
        fail_msg("%s, %s %g, %s, %s memory, %s, %lld values: %s", run->collective, run->coder->name,
                 run->coder->density, run->every_hop ? "every hop" : "between nodes",
                 run->shared ? "shared" : "private", place->name, (long long)run->elems, error_line());
    free(expected);
    param_table_free(&table);
}

static const char *const compressing[] = {"reduce_scatter", "hierarchical", "leader"};

/* Sizes not divisible by anything (DeepSpeed PR#5056), odd local sizes and unequal nodes (horovod#1913), more than
 * 65,536 values (byteps PR#299). Each shape meets every collective, compressor and scope; sizes take turns. */
static void test_every_shape(void **state) {
    (void)state;
    const int64_t sizes[] = {70001, 0, 1, 255, 257, 4095, 4097, 31, 20011, 65537};
    int turn = 0;
    for (int p = 0; p < PLACES; p++)
        for (int c = 0; c < CODERS; c++)
            for (int a = 0; a < 3; a++)
                for (int every_hop = 0; every_hop < 2; every_hop++, turn++) {
                    Run run = {compressing[a], &coders[c], every_hop, turn % 2, 0, NULL, NULL};
                    run.elems = turn % 7 == 0 ? sizes[0] : sizes[turn % 10];
                    check_run(&places[p], &run);
                }
}

static void test_large(void **state) {
    (void)state;
    for (int c = 0; c < CODERS; c++)
        for (int a = 0; a < 3; a++)
            check_run(place_named("3 and 2"), &(Run){compressing[a], &coders[c], c % 2, a % 2, 600011, NULL, NULL});
}

/* int8_tensor: each message has one scale per tensor. Two ranks in one segment, so the messages are the two chunks. */
static void test_one_scale_per_message(void **state) {
    (void)state;
    static const struct Coder tensor = {"int8_tensor", 0, false};
    for (int a = 0; a < 3; a++) {
        Run run = {compressing[a], &tensor, true, a % 2, 20011, NULL, NULL};
        check_run(place_named("2 nodes of 1"), &run);
        run.every_hop = false;
        check_run(place_named("2 nodes of 1"), &run);
    }
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_shape), cmocka_unit_test(test_large),
                                          cmocka_unit_test(test_one_scale_per_message)};

CHECK_MAIN(tests)
