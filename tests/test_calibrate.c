/* Calibration of links, the rings that it and the link benchmark use, and the benchmark's exact data. Nothing here
 * depends on how fast this machine is: a modelled link can only be slower than its model. */
#include "tests/check.h"

#include "base/machine.h"
#include "bench/exact.h"
#include "comm/calibrate.h"
#include "comm/internal.h"

#include <stdlib.h>
#include <string.h>

#define EXPECT(condition)                                                       \
    do {                                                                        \
        if (!(condition))                                                       \
            return fault("%s:%d: expected %s", __FILE__, __LINE__, #condition); \
    } while (0)

enum { RANKS_MAX = 9, LARGE_BYTES = 1 << 30 };

static Status run(LoopConfig loop, RankMain *rank_main, void *user) {
    CommConfig config = {.transport = 0, .timeout_s = 60};
    return comm_run(&config, &loop, OK, rank_main, user);
}

/* ---- rings ---- */

typedef struct Shape {
    int ranks, nodes, lanes; /* lanes: between nodes, as link_ring should say */
    bool shared;             /* some node has two ranks */
    int node[RANKS_MAX];
} Shape;

static const Shape shapes[] = {
    {1, 1, 0, false, {0}},
    {2, 1, 0, true, {0, 0}},
    {3, 1, 0, true, {5, 5, 5}},
    {3, 3, 1, false, {2, 0, 1}},
    {4, 2, 2, true, {0, 0, 1, 1}},
    {4, 2, 2, true, {0, 1, 0, 1}},
    {5, 2, 2, true, {7, 3, 7, 3, 3}},
    {5, 2, 1, true, {0, 1, 1, 1, 1}},
    {6, 3, 2, true, {0, 0, 1, 1, 2, 2}},
    {8, 2, 4, true, {0, 0, 0, 0, 1, 1, 1, 1}},
    {9, 3, 1, true, {0, 1, 1, 1, 1, 1, 2, 2, 2}},
};

/* All ranks' links of one class: from is to's inverse, and every rank that takes part comes back to itself after
 * `length` steps (0: any). */
static Status check_rings(const LinkRing *rings, int ranks, int members, int length) {
    int taking_part = 0;
    for (int rank = 0; rank < ranks; rank++) {
        EXPECT((rings[rank].to < 0) == (rings[rank].from < 0) && rings[rank].lanes == rings[0].lanes);
        if (rings[rank].to < 0)
            continue;
        taking_part++;
        EXPECT(rings[rings[rank].to].from == rank);
        int steps = 1, at = rings[rank].to;
        for (; at != rank && steps <= ranks; at = rings[at].to)
            steps++;
        EXPECT(at == rank && (length == 0 || steps == length));
    }
    EXPECT(taking_part == members);
    return OK;
}

static Status ring_shapes(Comm *comm, void *user) {
    const Shape *shape = user;
    Transport *transport = comm->transport;
    LinkRing mine[LINK_CLASSES], all[RANKS_MAX * LINK_CLASSES], inside[RANKS_MAX], between[RANKS_MAX];
    memcpy(transport->node, shape->node, (size_t)shape->ranks * sizeof(int));
    for (LinkClass class = INSIDE; class < LINK_CLASSES; class++)
        mine[class] = link_ring(transport, class);
    TRY(comm_gather(comm, mine, all, sizeof mine));
    int with_company = 0;
    for (int rank = 0; rank < shape->ranks; rank++) {
        inside[rank] = all[rank * LINK_CLASSES + INSIDE];
        between[rank] = all[rank * LINK_CLASSES + BETWEEN];
        int same = 0;
        for (int other = 0; other < shape->ranks; other++)
            same += shape->node[other] == shape->node[rank];
        with_company += same > 1;
        EXPECT(inside[rank].to < 0 || shape->node[inside[rank].to] == shape->node[rank]);
        EXPECT(between[rank].to < 0 || shape->node[between[rank].to] != shape->node[rank]);
    }
    EXPECT(inside[0].lanes == shape->shared && between[0].lanes == shape->lanes);
    TRY(check_rings(inside, shape->ranks, with_company, 0));
    return check_rings(between, shape->ranks, shape->lanes * shape->nodes, shape->nodes);
}

static void test_rings(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        assert_ok(run((LoopConfig){.ranks = shapes[i].ranks}, ring_shapes, (void *)&shapes[i]));
}

static Status shift_shapes(Comm *comm, void *user) {
    const Shape *shape = user;
    memcpy(comm->transport->node, shape->node, (size_t)shape->ranks * sizeof(int));
    for (LinkClass class = INSIDE; class < LINK_CLASSES; class++) {
        LinkRing ring = link_ring(comm->transport, class);
        int out[3] = {comm_rank(comm), 1, 2}, in[3] = {-1, 0, 0};
        TRY(link_shift(comm->transport, &ring, out, in, sizeof out));
        EXPECT(in[0] == ring.from && in[2] == (ring.from < 0 ? 0 : 2));
    }
    return OK;
}

static void test_shift(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        assert_ok(run((LoopConfig){.ranks = shapes[i].ranks}, shift_shapes, (void *)&shapes[i]));
}

/* ---- calibration ---- */

static Status calibrate_alike(Comm *comm, const Codec *codec, int64_t array_bytes, LinkCosts *costs) {
    memset(costs, 0, sizeof *costs);
    TRY(calibrate(comm->transport, codec, array_bytes, costs));
    EXPECT(costs->add_s_per_byte > 0 && costs->cores > 0);
    EXPECT((costs->copy_s_per_byte > 0) == (link_ring(comm->transport, INSIDE).lanes > 0));
    return comm_verify(comm, costs, sizeof *costs, "costs");
}

static Status one_node(Comm *comm, void *user) {
    (void)user;
    LinkCosts costs;
    for (int64_t array_bytes = 0; array_bytes <= 1000000; array_bytes += 333331)
        TRY(calibrate_alike(comm, NULL, array_bytes, &costs));
    EXPECT(costs.wire_ratio == 1 && costs.encode_s_per_byte == 0 && costs.decode_add_s_per_byte == 0);
    EXPECT(costs.cores == machine_cores() && !costs.every_hop);
    bool several = comm_ranks(comm) > 1;
    EXPECT((costs.latency_s[INSIDE] > 0) == several && (costs.s_per_byte[INSIDE] > 0) == several);
    EXPECT(costs.latency_s[BETWEEN] == 0 && costs.s_per_byte[BETWEEN] == 0);
    return OK;
}

static void test_one_node(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++)
        assert_ok(run((LoopConfig){.ranks = ranks}, one_node, NULL));
}

typedef struct Model {
    int ranks, ranks_per_node; /* two nodes */
    double latency_s, s_per_byte;
} Model;

static Status two_nodes(Comm *comm, void *user) {
    const Model *model = user;
    bool shared = model->ranks_per_node > 1;
    LinkCosts costs;
    transport_set_nodes(comm->transport, model->ranks_per_node);
    TRY(comm_set_nodes(comm, &(CommConfig){.ranks_per_node = "0"})); /* counts anew */
    EXPECT(comm_nodes(comm) == 2);
    TRY(calibrate_alike(comm, NULL, LARGE_BYTES, &costs));
    EXPECT(costs.cores == machine_cores() / 2.0); /* threads of one machine stand for both nodes */
    EXPECT((costs.latency_s[INSIDE] > 0) == shared && (costs.s_per_byte[INSIDE] > 0) == shared);
    EXPECT(costs.latency_s[BETWEEN] > 0 && costs.s_per_byte[BETWEEN] > 0);
    EXPECT(costs.latency_s[BETWEEN] >= model->latency_s);
    /* half a step at most counts as latency, and half at most is taken away for a slow first one */
    EXPECT(costs.s_per_byte[BETWEEN] >= 0.24 * model->s_per_byte);
    return OK;
}

/* The rate is a node's, however many ranks share it. */
static void test_two_nodes(void **state) {
    (void)state;
    Model models[] = {{2, 1, 2e-3, 0}, {5, 3, 1e-3, 0}, {2, 1, 0, 2e-8}, {8, 4, 0, 1e-8}};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        LoopConfig loop = {.ranks = models[i].ranks, .latency_between_us = 1e6 * models[i].latency_s};
        if (models[i].s_per_byte > 0)
            loop.gb_per_s_between = 1e-9 / models[i].s_per_byte;
        assert_ok(run(loop, two_nodes, &models[i]));
    }
}

typedef struct Coder {
    const char *name;
    bool every_hop, error_feedback;
    double wire_ratio;
} Coder;

/* The codec's residuals and its statistics are as before. */
static Status one_codec(Comm *comm, void *user) {
    const Coder *coder = user;
    ParamTable table = {0};
    CompressorOptions options = {.density = 0.01};
    Codec *codec;
    LinkCosts costs;
    TRY(codec_create(&codec, &table, compressor_find(coder->name), &options, coder->every_hop, coder->error_feedback));
    Codec before = *codec;
    Status status = calibrate_alike(comm, codec, LARGE_BYTES, &costs);
    bool same = memcmp(&before, codec, sizeof before) == 0;
    codec_destroy(codec);
    TRY(status);
    EXPECT(same && costs.every_hop == coder->every_hop);
    EXPECT(costs.encode_s_per_byte > 0 && costs.decode_add_s_per_byte > 0);
    EXPECT(costs.wire_ratio > 0.999 * coder->wire_ratio && costs.wire_ratio < 1.001 * coder->wire_ratio);
    return OK;
}

static void test_codec(void **state) {
    (void)state;
    Coder coders[] = {{"bf16", false, true, 0.5},
                      {"int8", true, true, (4 + 256) / 1024.0},
                      {"int4", false, false, (4 + 64) / 512.0},
                      {"topk", false, true, (62 + 4 * 41) / 16384.0}}; /* 41 of 4096 kept: 12 bits and f32 each */
    for (size_t i = 0; i < sizeof coders / sizeof *coders; i++)
        assert_ok(run((LoopConfig){.ranks = 2}, one_codec, &coders[i]));
}

/* ---- a collective that is timed ---- */

enum { TIMED_ELEMS = 100000, TIMED_ARRAY_ELEMS = 250000 };

/* What a collective was asked for. */
typedef struct Asked {
    int calls;
    int64_t largest;
    bool outside;
} Asked;

static Asked asked[RANKS_MAX]; /* each rank its own */
static float *arrays[RANKS_MAX];

static Status counting_allreduce(const Group *group, const Payload *payload) {
    Asked *mine = &asked[group->self];
    float *array = arrays[group->self];
    mine->calls++;
    mine->largest = payload->elems > mine->largest ? payload->elems : mine->largest;
    mine->outside |= payload->data < array || payload->data + payload->elems > array + TIMED_ARRAY_ELEMS;
    return collective_naive.allreduce(group, payload);
}

static Status time_counting(Comm *comm, void *user) {
    int64_t elems = *(int64_t *)user;
    int self = comm_rank(comm);
    Collective counting = {.name = "counting", .allreduce = counting_allreduce};
    LinkCosts costs = {0};
    float *scratch = calloc(TIMED_ARRAY_ELEMS, sizeof *scratch);
    asked[self] = (Asked){0};
    arrays[self] = calloc(TIMED_ARRAY_ELEMS, sizeof(float));
    Payload array = {.data = arrays[self], .elems = TIMED_ARRAY_ELEMS, .scale = 1, .scratch = scratch};
    Status status = calibrate_collective(&comm->world, &counting, &array, elems, &costs);
    free(arrays[self]);
    free(scratch);
    TRY(status);
    TRY(comm_verify(comm, &costs, sizeof costs, "costs"));
    TRY(comm_verify(comm, &asked[self].calls, sizeof(int), "calls"));
    EXPECT(!asked[self].outside && costs.timed_count > 0 && asked[self].calls > costs.timed_count);
    for (int i = 0; i < costs.timed_count; i++) {
        EXPECT(costs.timed_s[i] > 0);
        EXPECT(i == 0 || (int64_t)(costs.timed_bytes[i] / sizeof(float)) / 2 ==
                             (int64_t)(costs.timed_bytes[i - 1] / sizeof(float)));
    }
    EXPECT(asked[self].largest * sizeof(float) == costs.timed_bytes[costs.timed_count - 1]);
    return asked[self].largest <= elems ? OK : fault("more than was asked for");
}

/* Sizes double; on a link of 0.5 MB/s they end before the time does. */
static void test_timed(void **state) {
    (void)state;
    int64_t sizes[] = {1, 1023, 5000, TIMED_ELEMS, TIMED_ARRAY_ELEMS};
    for (int ranks = 2; ranks <= 3; ranks++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            assert_ok(run((LoopConfig){.ranks = ranks}, time_counting, &sizes[i]));
    assert_ok(run((LoopConfig){.ranks = 2, .gb_per_s_inside = 5e-4}, time_counting, &sizes[3]));
    assert_true(asked[0].largest < TIMED_ELEMS);
}

static void test_text(void **state) {
    (void)state;
    char text[256];
    LinkCosts costs = {.latency_s = {1.5e-6, 5e-5}, .s_per_byte = {2e-10, 8e-9}, .add_s_per_byte = 1e-10,
                       .copy_s_per_byte = 2.5e-10};
    calibrate_text(&costs, text, sizeof text);
    assert_string_equal(text, "inside a node 1.5 us, 5 GB/s; between nodes 50.0 us, 0.125 GB/s; "
                              "add 10 GB/s, copy 4 GB/s");
    costs.encode_s_per_byte = 1e-9;
    costs.decode_add_s_per_byte = 2e-10;
    costs.s_per_byte[INSIDE] = costs.s_per_byte[BETWEEN] = 0;
    calibrate_text(&costs, text, sizeof text);
    assert_string_equal(text, "add 10 GB/s, copy 4 GB/s, encode 1 GB/s, decode 5 GB/s");
    costs.encode_s_per_byte = costs.decode_add_s_per_byte = 0;
    calibrate_text(&costs, text, sizeof text);
    calibrate_text(&costs, text, sizeof text);
    assert_string_equal(text, "add 10 GB/s, copy 4 GB/s");
    costs.copy_s_per_byte = 0;
    calibrate_text(&costs, text, sizeof text);
    assert_string_equal(text, "add 10 GB/s");
    for (size_t size = 1; size < sizeof text; size++) {
        memset(text, 'x', sizeof text);
        calibrate_text(&costs, text, size);
        assert_true(memchr(text, 0, size) && (size == sizeof text - 1 || text[size] == 'x'));
    }
}

/* ---- the benchmark's data: what all-reduces could get wrong is found ---- */

enum { ELEMS = 10007, RANKS = 4 };

static void exact_sum(float *sum, int count, const int *ranks) {
    float part[ELEMS];
    memset(sum, 0, ELEMS * sizeof *sum);
    for (int r = 0; r < count; r++) {
        exact_fill(part, ELEMS, ranks[r]);
        for (int i = 0; i < ELEMS; i++)
            sum[i] += part[i];
    }
}

static void test_exact_finds_every_fault(void **state) {
    (void)state;
    static float sum[ELEMS + 1];
    exact_sum(sum, RANKS, (const int[]){0, 1, 2, 3});
    assert_int_equal(exact_wrong(sum, ELEMS, 0, RANKS), 0);
    const int missing[][RANKS] = {{0, 1, 2, 2}, {0, 2, 2, 2}, {1, 1, 2, 3}, {0, 0, 3, 3}};
    for (int i = 0; i < 4; i++) {
        exact_sum(sum, RANKS, missing[i]);
        assert_int_equal(exact_wrong(sum, ELEMS, 0, RANKS), ELEMS);
    }
    for (int rank = 0; rank < RANKS; rank++) { /* not reduced */
        exact_fill(sum, ELEMS, rank);
        assert_int_equal(exact_wrong(sum, ELEMS, 0, RANKS), ELEMS);
        assert_int_equal(exact_wrong(sum, ELEMS, rank, rank + 1), 0);
    }
    exact_sum(sum, RANKS, (const int[]){3, 2, 1, 0});
    memmove(sum + 1, sum, ELEMS * sizeof *sum); /* in the wrong place: the few places that look alike aside */
    assert_true(exact_wrong(sum, ELEMS, 0, RANKS) > ELEMS * 9 / 10);
}

static void test_exact_counts_single_elements(void **state) {
    (void)state;
    static float sum[ELEMS];
    exact_sum(sum, RANKS, (const int[]){0, 1, 2, 3});
    sum[0] = NAN;
    sum[4096] += 1;
    memset(&sum[ELEMS - 1], 0xFF, sizeof *sum);
    assert_int_equal(exact_wrong(sum, ELEMS, 0, RANKS), 3);
    assert_int_equal(exact_wrong(sum, 0, 0, RANKS), 0);
}

/* Sums over the largest world that is allowed are still exact. */
static void test_exact_holds_for_many_ranks(void **state) {
    (void)state;
    int64_t shares = 0;
    float sum = 0;
    for (int rank = 0; rank < EXACT_RANKS_MAX; rank++) {
        shares += (int64_t)exact_share(rank) + 63;
        sum += exact_share(rank) + 63;
    }
    assert_true(shares < 1 << 24);
    assert_true((int64_t)sum == shares);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_rings),
    cmocka_unit_test(test_shift),
    cmocka_unit_test(test_one_node),
    cmocka_unit_test(test_two_nodes),
    cmocka_unit_test(test_codec),
    cmocka_unit_test(test_timed),
    cmocka_unit_test(test_text),
    cmocka_unit_test(test_exact_finds_every_fault),
    cmocka_unit_test(test_exact_counts_single_elements),
    cmocka_unit_test(test_exact_holds_for_many_ranks),
};

CHECK_MAIN(tests)
