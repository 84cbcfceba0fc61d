/* The collectives on the loop transport: all of them on every shape of a world, in private and in shared memory. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/loop_world.h"

#include "comm/collective/topology.h"
#include "comm/transport/vector.h"

#include <assert.h>

/* ---- sums ---- */

static Arena arena_of(const World *world, Transport *transport, float *memory) {
    return (Arena){{transport, in_order, transport->ranks, transport->rank}, &world->expected, memory};
}

/* user: whether the memory is shared. */
static Status all_collectives(const World *world, Transport *transport) {
    bool shared = *(const bool *)world->user;
    float *memory = arena_memory(transport, world->expected.elems, shared);
    EXPECT(memory);
    Arena arena = arena_of(world, transport, memory);
    Status status = case_all_collectives(&arena);
    arena_release(transport, memory, shared);
    return status;
}

static void test_private_memory(void **state) {
    (void)state;
    bool shared = false;
    run_places(all_collectives, &shared, CASE_ELEMS);
}

static void test_shared_memory(void **state) {
    (void)state;
    bool shared = true;
    run_places(all_collectives, &shared, CASE_ELEMS);
}

/* Large enough for several segments in every phase: exact sums, promised orders, replicas. */
static Status large_case(const Arena *arena, int which) {
    TRY(case_exact_size(arena, which, CASE_LARGE));
    TRY(case_replicas(arena, case_collectives[which].name, CASE_LARGE));
    TRY(case_random_size(arena, which, CASE_LARGE));
    return case_replicas(arena, case_collectives[which].name, CASE_LARGE);
}

static Status large(const World *world, Transport *transport) {
    bool shared = *(const bool *)world->user;
    float *memory = arena_memory(transport, world->expected.elems, shared);
    EXPECT(memory);
    Arena arena = arena_of(world, transport, memory);
    Status status = OK;
    for (int which = 0; which < CASE_COLLECTIVES && status == OK; which++)
        if (case_runs(&arena.group, case_collective(which)))
            status = large_case(&arena, which);
    arena_release(transport, memory, shared);
    return status;
}

static void test_large(void **state) {
    (void)state;
    static const char *const names[] = {"1 node of 2",  "1 node of 4", "3 nodes of 1",  "2 nodes of 2",
                                        "3 nodes of 2", "1 and 4",     "2 and 3, mixed",
#ifndef FEWER_CASES
                                        "2 nodes of 4", "1 node of 9"
#endif
    };
    for (int shared = 0; shared < 2; shared++)
        for (size_t i = 0; i < sizeof names / sizeof *names; i++)
            assert_ok(run_world(place_named(names[i]), large, &(bool){shared}, NULL, CASE_LARGE));
}

/* Links that are slow in different ways let messages of different phases overtake each other. */
static void test_slow_links(void **state) {
    (void)state;
    static const char *const names[] = {"2 nodes of 2", "3 and 2", "1 and 4"};
    const LoopLinks links[] = {{300, 5, 0, 0}, {5, 300, 4, 2}};
    for (int shared = 0; shared < 2; shared++)
        for (int i = 0; i < 2; i++)
            for (int name = 0; name < 3; name++)
                assert_ok(run_world(place_named(names[name]), large, &(bool){shared}, &links[i], CASE_LARGE));
}

/* Groups that are not the whole world, out of order, two at a time. */
static Status subgroups(const World *world, Transport *transport) {
    static const int first[] = {2, 0}, second[] = {3, 1, 4}, place[] = {1, 1, 0, 0, 2}; /* of each rank in its group */
    bool shared = *(const bool *)world->user, in_first = transport->rank == 0 || transport->rank == 2;
    float *memory = arena_memory(transport, CASE_ELEMS, shared);
    Expected expected;
    EXPECT(memory);
    Group group = in_first ? (Group){transport, first, 2, place[transport->rank]}
                           : (Group){transport, second, 3, place[transport->rank]};
    expected_create(&expected, group.members, group.size, transport->node, CASE_ELEMS);
    Arena arena = {group, &expected, memory};
    Status status = case_all_collectives(&arena);
    if (status == OK)
        status = transport_barrier(transport);
    arena_release(transport, memory, shared);
    expected_destroy(&expected);
    return status;
}

static void test_subgroups(void **state) {
    (void)state;
    for (int shared = 0; shared < 2; shared++)
        for (int i = 0; i < PLACES; i++)
            if (places[i].ranks == 5 && run_world(&places[i], subgroups, &(bool){shared}, NULL, 1) != OK)
                fail_msg("%s: %s", places[i].name, error_line());
}

/* ---- bytes, against the table of collective.h ---- */

/* Divides evenly among 1 to 4 ranks and nodes, and their halves; more than one segment. */
enum { BYTES_ELEMS = 48 * 4096 };

/* What this rank should send inside its node and to others. */
typedef struct Sent {
    int64_t inside, between;
} Sent;

static int64_t node_size(const Place *place, int rank) {
    int64_t size = 0;
    for (int other = 0; other < place->ranks; other++)
        size += place->node[other] == place->node[rank];
    return size;
}

static int local_rank(const Place *place, int rank) {
    int before = 0;
    for (int other = 0; other < rank; other++)
        before += place->node[other] == place->node[rank];
    return before;
}

static void add_sent(Sent *sent, const Place *place, int rank, int peer, int64_t bytes) {
    *(place->node[rank] == place->node[peer] ? &sent->inside : &sent->between) += bytes;
}

static Sent sent_naive(const Place *place, int rank, int64_t S) {
    Sent sent = {0, 0};
    for (int peer = 1; peer < place->ranks; peer++)
        if (rank == 0)
            add_sent(&sent, place, 0, peer, S);
    if (rank > 0)
        add_sent(&sent, place, rank, 0, S);
    return sent;
}

static Sent sent_ring(const Place *place, int rank, int64_t S) {
    Sent sent = {0, 0};
    int N = place->ranks;
    if (N > 1)
        add_sent(&sent, place, rank, (rank + 1) % N, 2 * (N - 1) * S / N);
    return sent;
}

/* Of 1, 2, 3, 4, 5 ranks. */
static Sent sent_tree(const Place *place, int rank, int64_t S) {
    Sent sent = {0, 0};
    int N = place->ranks, steps = N >= 4 ? 2 : N >= 2 ? 1 : 0, folded = N - (1 << steps);
    if (rank < 2 * folded)
        add_sent(&sent, place, rank, rank % 2 ? rank - 1 : rank + 1, S);
    if (rank < 2 * folded && rank % 2 == 0)
        return sent;
    int position = rank < 2 * folded ? rank / 2 : rank - folded;
    for (int step = 0; step < steps; step++) {
        int other = position ^ 1 << step, peer = other < folded ? 2 * other + 1 : other + folded;
        add_sent(&sent, place, rank, peer, 2 * (S >> (step + 1)));
    }
    return sent;
}

static Sent sent_reduce_scatter(const Place *place, int rank, int64_t S) {
    Sent sent = {0, 0};
    for (int peer = 0; peer < place->ranks; peer++)
        if (peer != rank)
            add_sent(&sent, place, rank, peer, 2 * S / place->ranks + 4);
    return sent;
}

static Sent sent_columns(const Place *place, int rank, int64_t S, int64_t columns) {
    int64_t local = node_size(place, rank), place_here = local_rank(place, rank), m = count_nodes(place), most = 0;
    bool owner = place_here < columns;
    for (int other = 0; other < place->ranks; other++)
        most = node_size(place, other) > most ? node_size(place, other) : most;
    Sent sent = {(columns - owner) * (S / columns + 4) + owner * (local - 1) * (S / columns),
                 owner * 2 * (m - 1) * (S / columns) / m};
    if (most == 1)
        sent.between += (m - 1) * 4; /* the only stage carries the scales */
    return sent;
}

static Sent sent_hierarchical(const Place *place, int rank, int64_t S) {
    int64_t columns = place->ranks;
    for (int other = 0; other < place->ranks; other++)
        columns = node_size(place, other) < columns ? node_size(place, other) : columns;
    return sent_columns(place, rank, S, columns);
}

static Sent sent_leader(const Place *place, int rank, int64_t S) { return sent_columns(place, rank, S, 1); }

/* user: whether the memory is shared. What goes through shared memory counts like messages. */
static Status count_bytes(const World *world, Transport *transport) {
    static Sent (*const formulas[CASE_COLLECTIVES])(const Place *, int, int64_t) = {
        sent_naive, NULL, NULL, sent_ring, sent_tree, sent_reduce_scatter, sent_hierarchical, sent_leader};
    bool shared = *(const bool *)world->user;
    float *memory = arena_memory(transport, BYTES_ELEMS, shared);
    EXPECT(memory);
    Arena arena = arena_of(world, transport, memory);
    for (int which = 0; which < CASE_COLLECTIVES; which++) {
        if (!formulas[which])
            continue;
        Sent expected = formulas[which](world->place, transport->rank, BYTES_ELEMS * (int64_t)sizeof(float));
        arena_fill(&arena, BYTES_ELEMS, case_integer);
        int64_t inside = transport->bytes_intra, between = transport->bytes_inter;
        TRY(case_allreduce(&arena.group, case_collective(which), arena_data(&arena), BYTES_ELEMS, 1));
        inside = transport->bytes_intra - inside;
        between = transport->bytes_inter - between;
        if (inside != expected.inside || between != expected.between)
            return fault("%s: rank %d sent %lld bytes inside and %lld between nodes, expected %lld and %lld",
                         case_collectives[which].name, transport->rank, (long long)inside, (long long)between,
                         (long long)expected.inside, (long long)expected.between);
    }
    arena_release(transport, memory, shared);
    return OK;
}

static void test_bytes(void **state) {
    (void)state;
    for (int shared = 0; shared < 2; shared++)
        for (int i = 0; i < PLACES; i++) {
            const Place *place = &places[i];
            int nodes = count_nodes(place);
            if ((place->ranks <= 4 || (place->ranks <= 6 && 6 % nodes == 0)) && place->ranks != 5 &&
                run_world(place, count_bytes, &(bool){shared}, NULL, 1) != OK)
                fail_msg("%s, %s memory: %s", place->name, shared ? "shared" : "private", error_line());
        }
}

/* ---- pure functions ---- */

/* Groups for what needs no messages. */
static Group still_group(Transport *transport, const Place *place, int self) {
    *transport = (Transport){.vector = &vector_host, .rank = self, .ranks = place->ranks, .node = (int *)place->node};
    return (Group){transport, in_order, place->ranks, self};
}

static void test_topology(void **state) {
    (void)state;
    const struct {
        const char *place;
        Topology topology;
    } known[] = {{"1 node of 1", {1, 1, 1}},  {"1 node of 9", {1, 9, 9}},      {"9 nodes of 1", {9, 1, 1}},
                 {"3 nodes of 2", {3, 2, 2}}, {"3 and 2", {2, 2, 3}},          {"1, 2 and 4", {3, 1, 4}},
                 {"1 and 4", {2, 1, 4}},      {"3, 3 and 3, mixed", {3, 3, 3}}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        Transport transport;
        Group group = still_group(&transport, place_named(known[i].place), 0);
        Topology topology = topology_of(&group);
        assert_int_equal(topology.nodes, known[i].topology.nodes);
        assert_int_equal(topology.smallest, known[i].topology.smallest);
        assert_int_equal(topology.largest, known[i].topology.largest);
    }
}

/* Scratch is bounded: what a large array needs, a larger one needs too, and the same on every rank. */
static void test_scratch_is_bounded(void **state) {
    (void)state;
    for (int i = 0; i < PLACES; i++)
        for (int which = 0; which < CASE_COLLECTIVES; which++) {
            Transport transport;
            Group group = still_group(&transport, &places[i], 0);
            int64_t at_64m = case_collective(which)->scratch_elems(&group, 64 << 20, NULL);
            assert_true(at_64m <= (int64_t)4 << 20);
            assert_true(case_collective(which)->scratch_elems(&group, (int64_t)1 << 40, NULL) == at_64m);
            assert_true(case_collective(which)->scratch_elems(&group, 0, NULL) >= 0);
            for (int self = 1; self < group.size; self++) {
                group = still_group(&transport, &places[i], self);
                assert_true(case_collective(which)->scratch_elems(&group, 64 << 20, NULL) == at_64m);
            }
        }
}

static double predict_s(const char *name, const Place *place, int64_t elems, const LinkCosts *costs) {
    Transport transport;
    Group group = still_group(&transport, place, 0);
    return collective_find(name)->predict_s(&group, elems, costs);
}

/* By hand: S = 2^26 bytes, 2 nodes of 4. */
static void test_predictions(void **state) {
    (void)state;
    enum { ELEMS = 1 << 24 };
    const double S = 4.0 * ELEMS, a_i = 1e-6, a_e = 5e-5, b_i = 2e-10, b_e = 1e-9, g = 1e-10;
    const LinkCosts costs = {.latency_s = {a_i, a_e}, .s_per_byte = {b_i, b_e}, .add_s_per_byte = g, .wire_ratio = 1};
    const Place *place = place_named("2 nodes of 4");
    double shifts = 7 * (a_e + S / 8 * b_e), adds = 7 * S / 8 * g; /* a chunk of 8 MiB in 32 segments */
    assert_close(predict_s("ring", place, ELEMS, &costs) / (2 * shifts + adds / (7 * 32)), 1, 1e-9);
    double steps = 2 * (a_e + 2 * S * b_e); /* a sum of 8 costs 4 g for each value of a part */
    double flat = predict_s("reduce_scatter", place, ELEMS, &costs);
    assert_true(flat > steps && flat < steps + S / 2 * g / 8);
    assert_close(predict_s("naive", place, ELEMS, &costs) / (2 * 256 * a_e + 8 * S * b_e + 7 * S * g), 1, 1e-9);
    assert_close(predict_s("tree", place, ELEMS, &costs) /
                     (2 * (a_i + S / 2 * b_i) + 2 * (a_i + S / 4 * b_i) + 2 * (a_e + S / 2 * b_e) + 7 * S / 8 * g),
                 1, 1e-9);
    assert_close(predict_s("tree", place, 100, &costs) / (2 * (a_i + 400 * b_i) + a_e + 1600 * b_e + 3 * 400 * g), 1,
                 1e-9);
    double inside = S / 2 * g + 3 * S / 4 * 2 * b_i + S / 8 * g, between = S * b_e;
    double hierarchical = predict_s("hierarchical", place, ELEMS, &costs);
    assert_true(hierarchical > between + 2 * (a_i + a_e) && hierarchical < between + 2 * (a_i + a_e) + inside / 8);
    assert_true(predict_s("leader", place, ELEMS, &costs) > 1.4 * hierarchical);
    LinkCosts shared = costs;
    shared.copy_s_per_byte = 1.5e-10;
    assert_close(predict_s("reduce_scatter", place_named("1 node of 8"), ELEMS, &shared) /
                     (2 * a_i + S / 2 * 2.5e-10),
                 1, 1e-9);
    for (int i = 0; i < PLACES; i++)
        for (int which = 0; which < CASE_COLLECTIVES; which++) {
            const char *name = case_collectives[which].name;
            double none_s = predict_s(name, &places[i], 0, &costs), some_s = predict_s(name, &places[i], 1000, &costs);
            double many_s = predict_s(name, &places[i], ELEMS, &costs);
            if (collective_find(name)->timed && places[i].ranks > 1)
                assert_true(isnan(none_s) && isnan(some_s) && isnan(many_s));
            else
                assert_true(places[i].ranks == 1 ? many_s == 0 : none_s >= 0 && none_s < some_s && some_s < many_s);
        }
}

static double half_s(const char *name, const Place *place, const LinkCosts *costs, bool gather) {
    Transport transport;
    Group group = still_group(&transport, place, 0);
    return collective_find(name)->predict_half_s(&group, 1 << 24, costs, gather);
}

/* By hand: S = 2^26 bytes. The halves of an all-reduce are its messages one way, its sums, and its copies of sums. */
static void test_predicted_halves(void **state) {
    (void)state;
    const double S = 4.0 * (1 << 24), a_i = 1e-6, a_e = 5e-5, b_i = 2e-10, b_e = 1e-9, g = 1e-10, c = 1.5e-10;
    const double r = 0.25, q = 5e-10, d = 2e-10;
    LinkCosts costs = {.latency_s = {a_i, a_e}, .s_per_byte = {b_i, b_e}, .add_s_per_byte = g, .copy_s_per_byte = c,
                       .wire_ratio = 1};
    const char *both[] = {"reduce_scatter", "hierarchical"};
    for (int i = 0; i < 2; i++) { /* 8 ranks on shared memory: 8 arrays of S / 8 each are read, or written */
        assert_close(half_s(both[i], place_named("1 node of 8"), &costs, false) / (2 * a_i + S / 2 * g), 1, 1e-9);
        assert_close(half_s(both[i], place_named("1 node of 8"), &costs, true) / (2 * a_i + S / 2 * c), 1, 1e-9);
    }
    /* 4 nodes of 1: 3/4 of S each way; a sum of 4 takes 2 g per value of a part, behind the NIC but for a segment */
    for (int i = 0; i < 2; i++) {
        double network = a_e + 3 * S / 4 * b_e, sum_s = half_s(both[i], place_named("4 nodes of 1"), &costs, false);
        assert_true(sum_s > network && sum_s < network + S / 2 * g / 8);
        assert_close(half_s(both[i], place_named("4 nodes of 1"), &costs, true) / network, 1, 1e-9);
    }
    /* 2 nodes of 4, nothing shared: inside 3/4 of S each way, between half of it, by all 4 together */
    costs.copy_s_per_byte = 0;
    double inside = 3 * S / 4 * b_i, between = S / 2 * b_e, latency = a_i + a_e;
    double gather_s = half_s("hierarchical", place_named("2 nodes of 4"), &costs, true);
    assert_true(gather_s > latency + between && gather_s < latency + between + inside / 8);
    assert_close(half_s("reduce_scatter", place_named("2 nodes of 4"), &costs, true) / (a_e + 2 * S * b_e), 1, 1e-9);
    /* a codec: gradients stop at the owner of the sum, who codes no result; parameters are not coded */
    costs.wire_ratio = r, costs.encode_s_per_byte = q, costs.decode_add_s_per_byte = d;
    assert_true(half_s("hierarchical", place_named("2 nodes of 4"), &costs, true) == gather_s);
    costs.every_hop = true;
    assert_true(half_s("hierarchical", place_named("2 nodes of 4"), &costs, true) == gather_s);
    costs.s_per_byte[1] = 0;
    for (int i = 0; i < 2; i++)
        assert_close(half_s(both[i], place_named("4 nodes of 1"), &costs, false) / (a_e + S * q + S * d), 1, 1e-9);
    double coded_inside = S * q + S * d + 3 * S / 4 * r * b_i, column = S / 4 * q + S / 4 * d;
    assert_close(half_s("hierarchical", place_named("2 nodes of 4"), &costs, false) /
                     (latency + coded_inside + column),
                 1, 1e-9);
    assert_true(half_s("hierarchical", place_named("1 node of 1"), &costs, true) == 0);
    assert_true(half_s("reduce_scatter", place_named("1 node of 1"), &costs, false) == 0);
}

/* Of a collective that was timed: lines through the nearest sizes. */
static void test_predicted_from_times(void **state) {
    (void)state;
    LinkCosts costs = {.timed_count = 1, .timed_bytes = {4000, 8000, 16000, 32000}, .timed_s = {1, 2, 6, 5}};
    const struct {
        int count;
        int64_t elems;
        double expected_s;
    } cases[] = {{1, 0, 1},    {1, 5000, 1},    {2, 0, 1},     {2, 1000, 1},  {2, 1500, 1.5}, {2, 2000, 2},
                 {2, 3000, 3}, {3, 1500, 1.5},  {3, 3000, 4},  {3, 4000, 6},  {3, 6000, 10},
                 {4, 4000, 6}, {4, 6000, 5.5},  {4, 8000, 5},  {4, 80000, 5}}; /* but never less for ever more */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        costs.timed_count = cases[i].count;
        for (int which = 0; which < 2; which++)
            assert_close(predict_s(which ? "native" : "iallreduce", place_named("2 nodes of 4"), cases[i].elems, &costs),
                         cases[i].expected_s, 1e-12);
    }
    assert_true(predict_s("native", place_named("1 node of 1"), 1000, &costs) == 0);
}

/* More ranks on a node than cores: their work takes turns, the last one's in part alone; one rank's does not. */
static void test_predicted_cores(void **state) {
    (void)state;
    enum { ELEMS = 1 << 24 };
    const double S = 4.0 * ELEMS;
    const Place *place = place_named("1 node of 8");
    LinkCosts costs = {.latency_s = {1e-6, 0}, .s_per_byte = {2e-10, 0}, .add_s_per_byte = 1e-10,
                       .copy_s_per_byte = 1.5e-10, .wire_ratio = 1};
    const double work = S / 2 * 2.5e-10;
    const char *both[] = {"reduce_scatter", "hierarchical"};
    for (int cores = 1; cores <= 16; cores *= 2)
        for (int i = 0; i < 2; i++) {
            costs.cores = cores;
            double expected = 2e-6 + work * (cores < 8 ? 8.0 / cores + 1 - 1.0 / cores : 1);
            assert_close(predict_s(both[i], place, ELEMS, &costs) / expected, 1, 1e-9);
            assert_close(predict_s("leader", place, ELEMS, &costs) / (2e-6 + 8 * work), 1, 1e-9);
        }
    double enough = predict_s("ring", place, ELEMS, &costs);
    costs.cores = 2;
    assert_close(predict_s("ring", place, ELEMS, &costs) - enough, 3.5 * 7 * S / 8 * 1e-10, 1e-12);
}

/* 4 nodes of one rank, each with all of S to code: encodes S (1 + 1/4), decodes 4 own parts, its result, 3 others'. */
static void test_predicted_codec(void **state) {
    (void)state;
    enum { ELEMS = 1 << 24 };
    const double S = 4.0 * ELEMS, a = 5e-5, b = 8e-9, r = 0.25, q = 5e-10, d = 2e-10;
    LinkCosts costs = {.latency_s = {1e-6, a}, .s_per_byte = {2e-10, b}, .add_s_per_byte = 1e-10, .wire_ratio = r,
                       .encode_s_per_byte = q, .decode_add_s_per_byte = d};
    const double network = 2 * 3 * S / 4 * r * b, work = S * 5 / 4 * q + 2 * S * d;
    const char *coded[] = {"reduce_scatter", "hierarchical", "leader"};
    for (int i = 0; i < 3; i++) {
        double time_s = predict_s(coded[i], place_named("4 nodes of 1"), ELEMS, &costs);
        assert_true(time_s > 2 * a + network && time_s < 2 * a + network + work / 4);
        costs.s_per_byte[1] = b / 1000; /* the codec is what takes time */
        time_s = predict_s(coded[i], place_named("4 nodes of 1"), ELEMS, &costs);
        assert_true(time_s > 2 * a + work && time_s < 2 * a + work + network / 1000);
        costs.s_per_byte[1] = b;
    }
    /* hierarchical codes a shard, and inside the node only where told to */
    double scoped = predict_s("hierarchical", place_named("2 nodes of 4"), ELEMS, &costs);
    assert_true(scoped > S * r * b && scoped < 1.2 * S * r * b + S * 1.5 * 2e-10);
    costs.every_hop = true;
    costs.s_per_byte[1] = 0;
    double everywhere = predict_s("hierarchical", place_named("2 nodes of 4"), ELEMS, &costs);
    double inside = S * q + (S + 3 * S / 4) * d + 2 * 3 * S / 4 * r * 2e-10;
    double between = S / 4 * (1.5 * q + 2 * d);
    assert_close(everywhere / (2 * (1e-6 + a) + inside + between), 1, 1e-9);
}

static void test_chunks(void **state) {
    (void)state;
    const int64_t sizes[] = {0, 1, 4095, 4096, 4097, 100000, 124475904, (int64_t)1 << 40};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (int parts = 1; parts <= 9; parts++) {
            assert_true(chunk_start(0, sizes[s], parts, 0) == 0);
            assert_true(chunk_start(0, sizes[s], parts, parts) == sizes[s]);
            for (int i = 0; i < parts; i++) {
                int64_t start = chunk_start(0, sizes[s], parts, i), end = chunk_start(0, sizes[s], parts, i + 1);
                assert_true(start <= end && (start % CHUNK_ALIGN_ELEMS == 0 || start == sizes[s]));
                assert_true(end - start <=
                            (sizes[s] / CHUNK_ALIGN_ELEMS + 1) / parts * CHUNK_ALIGN_ELEMS + CHUNK_ALIGN_ELEMS);
            }
        }
}

static void test_names(void **state) {
    (void)state;
    for (int which = 0; which < CASE_COLLECTIVES; which++)
        assert_string_equal(case_collective(which)->name, case_collectives[which].name);
    assert_null(collective_find("auto"));
    assert_null(collective_find(""));
}

static Status native_is_refused(const World *world, Transport *transport) {
    (void)world;
    Group group = {transport, in_order, transport->ranks, transport->rank};
    EXPECT(collective_native.check(&group) == BAD_INPUT);
    EXPECT(strstr(error_line(), "comm.algorithm = native: the loop transport has no all-reduce"));
    EXPECT(collective_iallreduce.check(&group) == BAD_INPUT);
    EXPECT(strstr(error_line(), "comm.algorithm = iallreduce: the loop transport has no all-reduce"));
    return OK;
}

static void test_native_is_refused(void **state) {
    (void)state;
    assert_ok(run_world(place_named("1 node of 2"), native_is_refused, NULL, NULL, 1));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_private_memory), cmocka_unit_test(test_shared_memory),
    cmocka_unit_test(test_large),      cmocka_unit_test(test_slow_links),
    cmocka_unit_test(test_subgroups),      cmocka_unit_test(test_bytes),
    cmocka_unit_test(test_predicted_cores), cmocka_unit_test(test_predicted_codec),
    cmocka_unit_test(test_predicted_from_times), cmocka_unit_test(test_predicted_halves),
    cmocka_unit_test(test_topology),       cmocka_unit_test(test_scratch_is_bounded),
    cmocka_unit_test(test_predictions),    cmocka_unit_test(test_chunks),
    cmocka_unit_test(test_names),          cmocka_unit_test(test_native_is_refused),
};

CHECK_MAIN(tests)
