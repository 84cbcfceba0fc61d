/* The loop transport: messages, shared memory, the model of links, injected faults. The cases of transport_cases.h run
 * on processes too, in test_transport_mpi.c. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/transport_cases.h"

#include "base/clock.h"
#include "comm/transport/loop_faults.h"
#include "comm/transport/transport_loop.h"

#include <pthread.h>

/* ---- ranks as threads ---- */

enum { RANKS_MAX = 9 };

typedef struct World {
    double timeout_s;
    LoopLinks links;
    const char *faults;
} World;

typedef struct RankRun {
    LoopWorld *world;
    TransportCase *run;
    void *user;
    int rank;
    Status status;
    char line[256];
    pthread_t thread;
} RankRun;

static void *rank_thread(void *argument) {
    RankRun *self = argument;
    self->status = self->run(loop_transport(self->world, self->rank), self->user);
    snprintf(self->line, sizeof self->line, "%s", self->status == OK ? "" : error_line());
    loop_leave(self->world, self->rank, self->status);
    return NULL;
}

/* Each rank's status and line in ran[rank]; returns the world's. */
static Status run_ranks(const World *world, int ranks, TransportCase *run, void *user, RankRun *ran) {
    LoopWorld *loop;
    bool all_left;
    assert_ok(loop_create(&loop, ranks, world->timeout_s > 0 ? world->timeout_s : 60));
    assert_ok(loop_set_links(loop, &world->links));
    assert_ok(loop_set_faults(loop, world->faults ? world->faults : ""));
    for (int rank = 0; rank < ranks; rank++) {
        ran[rank] = (RankRun){.world = loop, .run = run, .user = user, .rank = rank};
        assert_int_equal(pthread_create(&ran[rank].thread, NULL, rank_thread, &ran[rank]), 0);
    }
    Status status = loop_wait(loop, 60, &all_left);
    for (int rank = 0; rank < ranks; rank++)
        pthread_join(ran[rank].thread, NULL);
    loop_destroy(loop);
    return status;
}

static void run_well(const World *world, int ranks, TransportCase *run, void *user) {
    RankRun ran[RANKS_MAX];
    assert_ok(run_ranks(world, ranks, run, user, ran));
}

#define assert_line(line, text)                                        \
    do {                                                               \
        if (!strstr((line), (text)))                                   \
            fail_msg("expected '%s' in the line '%s'", (text), (line)); \
    } while (0)

/* ---- messages ---- */

static const World plain;

static void test_streams(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 5; ranks++)
        run_well(&plain, ranks, case_streams, NULL);
}

static void test_polled(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        run_well(&plain, ranks, case_polled, NULL);
}

static void test_pool(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++)
        run_well(&plain, ranks, case_pool, NULL);
}

/* One thread at a time uses a transport, but not always the same one. */
typedef struct Helper {
    Transport *transport;
    Status status;
} Helper;

static void *help(void *argument) {
    Helper *self = argument;
    self->status = case_streams(self->transport, NULL);
    return NULL;
}

static Status hand_over(Transport *transport, void *user) {
    Helper helper = {transport, OK};
    for (int round = 0; round < 3; round++) {
        pthread_t thread;
        EXPECT(pthread_create(&thread, NULL, help, &helper) == 0);
        pthread_join(thread, NULL);
        TRY(helper.status);
        TRY(case_pool(transport, user));
    }
    return OK;
}

static void test_thread_changes(void **state) {
    (void)state;
    run_well(&plain, 2, hand_over, NULL);
}

static void test_share(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        run_well(&plain, ranks, case_share, NULL);
}

static void test_nodes(void **state) {
    (void)state;
    run_well(&plain, 1, case_nodes, NULL);
    run_well(&plain, 4, case_nodes, NULL);
    run_well(&(World){.links = {5, 50, 10, 1}}, 3, case_nodes, NULL);
}

/* ---- what does not match ---- */

static void check_swap(CaseSwap swap, const char *text) {
    RankRun ran[2];
    assert_int_equal(run_ranks(&plain, 2, case_swap, &swap, ran), text ? FAULT : OK);
    if (text)
        assert_line(error_line(), text);
}

static void test_labels_differ(void **state) {
    (void)state;
    const MessageLabel label = {300, 2, 1};
    check_swap((CaseSwap){{label, label}, {4, 4}}, NULL);
    check_swap((CaseSwap){{label, {301, 2, 1}}, {4, 4}}, "sent step 30");
    check_swap((CaseSwap){{label, {300, 3, 1}}, {4, 4}}, "step 300 bucket 2 compressor 1");
    check_swap((CaseSwap){{label, {300, 3, 1}}, {4, 4}}, "step 300 bucket 3 compressor 1");
    check_swap((CaseSwap){{label, {300, 2, 0}}, {4, 4}}, "step 300 bucket 2 compressor 0");
    check_swap((CaseSwap){{label, {300, -1, 1}}, {4, 4}}, "step 300 bucket -1 compressor 1");
}

/* Rank 0 sends the first number of bytes, rank 1 expects the second. */
static Status send_one(Transport *transport, void *user) {
    const size_t *bytes = user;
    static char out[2000], in[2000];
    transport_group_begin(transport);
    if (transport->rank == 0)
        transport_send(transport, 1, out, bytes[0]);
    else
        transport_recv(transport, 0, in, bytes[1]);
    return transport_group_end(transport);
}

static void test_sizes_differ(void **state) {
    (void)state;
    RankRun ran[2];
    size_t sizes[][2] = {{1000, 2000}, {2000, 1000}, {0, 1}, {1, 0}};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(run_ranks(&plain, 2, send_one, sizes[i], ran), FAULT);
        assert_line(error_line(), "bytes where rank 1 expected");
    }
    check_swap((CaseSwap){.bytes = {100000, 300000}}, "sent ");
    check_swap((CaseSwap){.bytes = {0, 1}}, "bytes where rank ");
}

/* ---- failures ---- */

/* Rank 1 never answers. */
static Status wait_for_one(Transport *transport, void *user) {
    (void)user;
    int word = 0;
    if (transport->rank == 1) { /* outlives the others' patience */
        struct timespec nap = {0, 300000000};
        nanosleep(&nap, NULL);
        return OK;
    }
    transport_group_begin(transport);
    transport_recv(transport, transport->rank == 0 ? 1 : 0, &word, sizeof word);
    Ticket ticket = transport_group_start(transport);
    bool complete;
    TRY(transport_group_test(transport, ticket, &complete));
    EXPECT(!complete);
    EXPECT(transport_group_wait(transport, ticket) == FAULT);
    EXPECT(transport_group_wait(transport, ticket) == FAULT);
    EXPECT(transport_group_test(transport, ticket, &complete) == FAULT);
    return transport_barrier(transport);
}

static void test_timeout(void **state) {
    (void)state;
    RankRun ran[3];
    assert_int_equal(run_ranks(&(World){.timeout_s = 0.1}, 3, wait_for_one, NULL, ran), FAULT);
    assert_line(error_line(), "no answer from rank 1 for 0.1 s");
}

static void test_blame(void **state) {
    (void)state;
    int node[] = {0, 0, 0, 5};
    Transport self = {.ranks = 4, .timeout_s = 2, .node = node};
    transport_timed_out(&self, 1, (const int[]){1, 2, 3, -1});
    assert_line(error_line(), "no answer from rank 3 for 2 s (comm.timeout_s), node 5");
    self.label = (MessageLabel){.step = 12, .bucket = 3};
    transport_timed_out(&self, 1, (const int[]){1, 2, 0, -1}); /* in a circle: nobody else is known to be to blame */
    assert_line(error_line(), "no answer from rank 1 for 2 s (comm.timeout_s): bucket 3 of step 12 waits");
}

/* Rank 0 gives up with groups under way and frees what they would send and receive. */
static Status give_up(Transport *transport, void *user) {
    struct timespec pause = {0, *(const long *)user};
    enum { ELEMS = 1 << 20 };
    int rank = transport->rank;
    char *out = calloc(ELEMS, 1), *in = calloc(ELEMS, 1);
    Ticket ticket = 0;
    for (int group = 0; group < 8; group++) {
        transport_group_begin(transport);
        transport_send(transport, 1 - rank, out, ELEMS);
        transport_recv(transport, 1 - rank, in, ELEMS);
        ticket = transport_group_start(transport);
    }
    if (rank == 0)
        nanosleep(&pause, NULL);
    Status status = rank == 0 ? fault("disk full") : transport_group_wait(transport, ticket);
    char line[64];
    snprintf(line, sizeof line, "%s", error_line());
    transport_abandon(transport);
    EXPECT(transport_group_wait(transport, 0) == FAULT);
    free(out);
    free(in);
    return error_restore(status, line);
}

static void test_abandon(void **state) {
    (void)state;
    RankRun ran[2];
    for (long pause_ns = 0; pause_ns < 1000000; pause_ns += 50000) { /* at any point of the other's copying */
        assert_int_equal(run_ranks(&plain, 2, give_up, &pause_ns, ran), FAULT);
        assert_line(error_line(), "disk full");
        assert_line(ran[1].line, "disk full");
    }
}

/* ---- the model of links, by its own clock ---- */

static void check_arrival(LinkModel *model, const int *node, int from, int to, double now_s, double expected_s) {
    assert_close(link_model_send(model, node, from, to, 1000000, now_s), expected_s, 1e-9);
}

/* 1 MB takes 1 ms between nodes and 0.1 ms inside. Two nodes of two ranks. */
static void test_link_model(void **state) {
    (void)state;
    const int node[] = {0, 0, 1, 1};
    LinkModel *model = link_model_create(&(LoopLinks){10, 50, 10, 1}, 4);
    assert_non_null(model);
    check_arrival(model, node, 0, 2, 0, 1.05e-3);
    check_arrival(model, node, 1, 3, 0, 2.05e-3);       /* the same NIC out */
    check_arrival(model, node, 2, 0, 0, 1.05e-3);       /* full duplex */
    check_arrival(model, node, 0, 1, 0, 0.11e-3);       /* a link of its own */
    check_arrival(model, node, 0, 1, 0, 0.21e-3);       /* taken */
    check_arrival(model, node, 1, 0, 0, 0.11e-3);       /* another rank's */
    check_arrival(model, node, 0, 2, 5e-3, 6.05e-3);    /* free again */
    assert_close(link_model_send(model, node, 0, 2, 0, 5e-3), 5.05e-3, 1e-9); /* nothing takes no time */
    link_model_destroy(model);
}

/* The ranks of a node share its NIC, out and in. */
static void test_link_of_a_node(void **state) {
    (void)state;
    LinkModel *model = link_model_create(&(LoopLinks){0, 0, 0, 1}, 4);
    const int two_send[] = {0, 0, 1, 2}, two_receive[] = {0, 1, 2, 2};
    check_arrival(model, two_send, 0, 2, 0, 1e-3);
    check_arrival(model, two_send, 1, 3, 0, 2e-3);
    check_arrival(model, two_receive, 0, 2, 1, 1 + 1e-3);
    check_arrival(model, two_receive, 1, 3, 1, 1 + 2e-3);
    link_model_destroy(model);
}

/* Three nodes of one rank: two send to the third, whose NIC takes one after the other. */
static void test_link_incast(void **state) {
    (void)state;
    const int node[] = {0, 1, 2};
    LinkModel *model = link_model_create(&(LoopLinks){0, 0, 0, 1}, 3);
    check_arrival(model, node, 0, 2, 0, 1e-3);
    check_arrival(model, node, 1, 2, 0, 2e-3);
    check_arrival(model, node, 0, 1, 0, 2e-3); /* leaves behind the first */
    check_arrival(model, node, 2, 1, 0, 1e-3); /* into the gap before it */
    check_arrival(model, node, 2, 1, 0, 3e-3);
    for (int i = 0; i < 1000; i++)
        check_arrival(model, node, 0, 2, 1 + 3e-3 * i, 1 + 3e-3 * i + 1e-3);
    for (int i = 999; i >= 0; i--) /* more gaps than a link remembers: late, but never at the same time */
        assert_true(link_model_send(model, node, 0, 2, 1000000, 100) >= 100 + 1e-3 * (1000 - i) - 1e-9);
    link_model_destroy(model);
}

static void test_link_gaps(void **state) {
    (void)state;
    const int node[] = {0, 1, 2};
    LinkModel *model = link_model_create(&(LoopLinks){0, 0, 0, 1}, 3);
    double last_s = 0;
    for (int i = 0; i < 200; i++) /* node 1 is named late, while 0 -> 2 is taken far ahead: 0.5 ms pieces with gaps */
        last_s = link_model_send(model, node, i % 2 ? 1 : 0, 2, 500000, 0);
    assert_close(last_s, 200 * 0.5e-3, 1e-9);
    link_model_destroy(model);
}

static void test_link_without_limits(void **state) {
    (void)state;
    const int node[] = {0, 0};
    LinkModel *model = link_model_create(&(LoopLinks){.latency_inside_us = 7}, 2);
    for (int i = 0; i < 3; i++)
        check_arrival(model, node, 0, 1, 1, 1 + 7e-6);
    link_model_destroy(model);
}

/* Nothing arrives before latency + bytes / rate, whatever waits: compared with the clock from below only. */
static Status timed_ring(Transport *transport, void *user) {
    (void)user;
    enum { BYTES = 1000000 };
    static char out[BYTES];
    int rank = transport->rank, ranks = transport->ranks;
    char *in = malloc(BYTES);
    transport_set_nodes(transport, 1);
    for (int round = 0; round < 3; round++) {
        TRY(transport_barrier(transport));
        double start_s = clock_s();
        transport_group_begin(transport);
        transport_recv(transport, (rank + ranks - 1) % ranks, in, BYTES);
        Ticket ticket = transport_group_start(transport);
        transport_group_begin(transport);
        transport_send(transport, (rank + 1) % ranks, out, BYTES);
        TRY(transport_group_end(transport)); /* needs the next rank's progress in its own wait */
        EXPECT(clock_s() - start_s >= 4.99e-3);
        TRY(transport_group_wait(transport, ticket));
    }
    free(in);
    return OK;
}

/* As on any transport that has no buffers: a rank that waits for its send goes on receiving. */
static void test_arrival_times(void **state) {
    (void)state;
    run_well(&(World){.links = {.latency_between_us = 3000, .gb_per_s_between = 0.5}}, 3, timed_ring, NULL);
}

static void test_streams_on_slow_links(void **state) {
    (void)state;
    run_well(&(World){.links = {20, 20, 5, 5}}, 3, case_streams, NULL);
    run_well(&(World){.links = {20, 20, 5, 5}}, 2, case_polled, NULL);
}

/* A message that is on its way for longer than the timeout is no lost rank. */
static Status swap_two(Transport *transport, void *user) {
    (void)user;
    int out = transport->rank, in = -1;
    transport_group_begin(transport);
    transport_send(transport, 1 - transport->rank, &out, sizeof out);
    transport_recv(transport, 1 - transport->rank, &in, sizeof in);
    TRY(transport_group_end(transport));
    EXPECT(in == 1 - transport->rank);
    return OK;
}

static void test_slow_is_not_lost(void **state) {
    (void)state;
    run_well(&(World){.timeout_s = 0.05, .links = {.latency_inside_us = 200000}}, 2, swap_two, NULL);
}

static void test_hopeless_links_are_refused(void **state) {
    (void)state;
    LoopWorld *loop;
    assert_ok(loop_create(&loop, 2, 60));
    assert_refused(loop_set_links(loop, &(LoopLinks){.gb_per_s_between = 1e-300}),
                   "loop.gb_per_s_between: expected 0 or at least 1e-06, found 1e-300");
    assert_refused(loop_set_links(loop, &(LoopLinks){.gb_per_s_inside = 9e-7}), "loop.gb_per_s_inside: expected 0 or");
    assert_ok(loop_set_links(loop, &(LoopLinks){.gb_per_s_inside = 1e-6}));
    loop_destroy(loop);
}

/* ---- injected faults ---- */

static void test_fault_texts(void **state) {
    (void)state;
    LoopFaults faults;
    assert_ok(loop_faults_parse(&faults, ""));
    assert_int_equal(faults.count, 0);
    assert_ok(loop_faults_parse(&faults, "delay:rank=1,ms=2.5,every=3;drop:rank=2,message=17;die:rank=0,message=40;"
                                         "nan:rank=3,step=5"));
    assert_int_equal(faults.count, 4);
    assert_true(loop_faults_nan(&faults, 3, 5) && !loop_faults_nan(&faults, 3, 4) && !loop_faults_nan(&faults, 2, 5));
    assert_true(loop_faults_fate(&faults, 2, 17).drop && !loop_faults_fate(&faults, 2, 16).drop);
    assert_true(loop_faults_fate(&faults, 0, 40).die && !loop_faults_fate(&faults, 1, 40).die);
    int delayed = 0;
    for (int message = 1; message <= 3000; message++) {
        LoopFate fate = loop_faults_fate(&faults, 1, message);
        delayed += fate.delay_s > 0;
        assert_true(fate.delay_s == 0 || fate.delay_s == 2.5e-3);
        assert_true(loop_faults_fate(&faults, 0, message).delay_s == 0);
    }
    assert_true(delayed > 800 && delayed < 1200); /* 1000 and some 26 more or less */
    assert_refused(loop_faults_parse(&faults, "explode:rank=1"),
                   "loop.faults: expected delay, drop, die or nan, found 'explode'");
    assert_refused(loop_faults_parse(&faults, "drop:rank=1"), "'drop:rank=1' needs rank and message");
    assert_refused(loop_faults_parse(&faults, "delay:rank=1;die:rank=0,message=1"), "'delay:rank=1' needs ms");
    assert_refused(loop_faults_parse(&faults, "nan:rank=1"), "'nan:rank=1' needs rank and step");
    assert_refused(loop_faults_parse(&faults, "nan:rank=1,message=3"), "nan has no key 'message'");
    assert_refused(loop_faults_parse(&faults, "drop:rank=1,step=3"), "drop has no key 'step'");
    assert_refused(loop_faults_parse(&faults, "drop:rank=1,ms=3"), "drop has no key 'ms'");
    assert_refused(loop_faults_parse(&faults, "die:rank=x,message=1"), "expected key=number, found 'rank=x'");
    assert_refused(loop_faults_parse(&faults, "die:rank=1,message=2x"), "expected key=number, found 'message=2x'");
    assert_refused(loop_faults_parse(&faults, "delay:ms=5,every=0"), "needs");
    assert_refused(loop_faults_parse(&faults, "nan:rank=3,step=1.5"), "expected a whole number, found 'step=1.5'");
    assert_refused(loop_faults_parse(&faults, "die:rank=0.5,message=1"), "expected a whole number, found 'rank=0.5'");
    assert_refused(loop_faults_parse(&faults, ";"), "found ''");
}

static void test_delays_change_nothing(void **state) {
    (void)state;
    run_well(&(World){.faults = "delay:ms=1,every=4;delay:rank=1,ms=3,every=9"}, 3, case_streams, NULL);
}

/* The fourth message of rank 1 goes to rank 2. Everybody sends to its next rank, over and over. */
static Status ring_rounds(Transport *transport, void *user) {
    int rank = transport->rank, ranks = transport->ranks, rounds = *(const int *)user;
    for (int round = 0; round < rounds; round++) {
        int out = 100 * round + rank, in = -1;
        transport_group_begin(transport);
        transport_send(transport, (rank + 1) % ranks, &out, sizeof out);
        transport_recv(transport, (rank + ranks - 1) % ranks, &in, sizeof in);
        TRY(transport_group_end(transport));
        EXPECT(in == 100 * round + (rank + ranks - 1) % ranks);
    }
    return OK;
}

static void test_drop(void **state) {
    (void)state;
    int rounds = 10;
    RankRun ran[3];
    assert_int_equal(
        run_ranks(&(World){.timeout_s = 0.1, .faults = "drop:rank=1,message=4"}, 3, ring_rounds, &rounds, ran), FAULT);
    assert_line(error_line(), "no answer from rank ");
    rounds = 1;
    World last = {.timeout_s = 0.1, .faults = "drop:rank=1,message=1"};
    assert_int_equal(run_ranks(&last, 3, ring_rounds, &rounds, ran), FAULT);
    assert_line(ran[2].line, "rank 1 ended while rank 2 waited for it");
    assert_int_equal(run_ranks(&(World){.faults = "drop:rank=1,message=2"}, 3, ring_rounds, &rounds, ran), OK);
}

/* The receiver of the lost message is the first to run out of patience. */
static Status one_way(Transport *transport, void *user) {
    (void)user;
    int word = 0;
    if (transport->rank == 0) {
        transport_group_begin(transport);
        transport_send(transport, 1, &word, sizeof word);
        TRY(transport_group_end(transport));
        return wait_for_one(transport, NULL);
    }
    transport->timeout_s = 0.05;
    transport_group_begin(transport);
    transport_recv(transport, 0, &word, sizeof word);
    return transport_group_end(transport);
}

static void test_drop_names_the_sender(void **state) {
    (void)state;
    RankRun ran[2];
    World world = {.timeout_s = 10, .faults = "drop:rank=0,message=1"};
    assert_int_equal(run_ranks(&world, 2, one_way, NULL, ran), FAULT);
    assert_line(ran[1].line, "no answer from rank 0 for 0.05 s");
}

static void test_die(void **state) {
    (void)state;
    int rounds = 10;
    RankRun ran[3];
    World world = {.faults = "die:rank=1,message=7"};
    assert_int_equal(run_ranks(&world, 3, ring_rounds, &rounds, ran), FAULT);
    assert_line(error_line(), "rank 1 ended while rank ");
    assert_int_equal(ran[1].status, FAULT);
    world.faults = "die:rank=2,message=1";
    assert_int_equal(run_ranks(&world, 3, ring_rounds, &rounds, ran), FAULT);
    assert_line(error_line(), "rank 2 ended while rank ");
}

static Status send_last(Transport *transport, void *user) {
    (void)user;
    int word = 0;
    if (transport->rank > 0)
        return OK;
    transport_group_begin(transport);
    transport_send(transport, 1, &word, sizeof word);
    return transport_group_end(transport);
}

static void test_die_unmissed(void **state) {
    (void)state;
    RankRun ran[2];
    assert_int_equal(run_ranks(&(World){.faults = "die:rank=0,message=1"}, 2, send_last, NULL, ran), FAULT);
    assert_line(error_line(), "rank 0 was killed");
}

/* The bar: a waiting comm thread uses less than 5 % of a core. */
static void test_waiting_leaves_the_core(void **state) {
    (void)state;
    run_well(&plain, 2, case_wait, NULL);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_streams),
    cmocka_unit_test(test_polled),
    cmocka_unit_test(test_pool),
    cmocka_unit_test(test_thread_changes),
    cmocka_unit_test(test_share),
    cmocka_unit_test(test_nodes),
    cmocka_unit_test(test_labels_differ),
    cmocka_unit_test(test_sizes_differ),
    cmocka_unit_test(test_timeout),
    cmocka_unit_test(test_blame),
    cmocka_unit_test(test_abandon),
    cmocka_unit_test(test_link_model),
    cmocka_unit_test(test_link_of_a_node),
    cmocka_unit_test(test_link_incast),
    cmocka_unit_test(test_link_gaps),
    cmocka_unit_test(test_link_without_limits),
    cmocka_unit_test(test_arrival_times),
    cmocka_unit_test(test_streams_on_slow_links),
    cmocka_unit_test(test_slow_is_not_lost),
    cmocka_unit_test(test_hopeless_links_are_refused),
    cmocka_unit_test(test_fault_texts),
    cmocka_unit_test(test_delays_change_nothing),
    cmocka_unit_test(test_drop),
    cmocka_unit_test(test_drop_names_the_sender),
    cmocka_unit_test(test_die),
    cmocka_unit_test(test_die_unmissed),
    cmocka_unit_test(test_waiting_leaves_the_core),
};

CHECK_MAIN(tests)
