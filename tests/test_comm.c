/* comm on the loop transport: ranks as threads. The same cases run on processes in test_comm_mpi.c. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/comm_cases.h"

#include "comm/nodes.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

static const CommConfig config = {.timeout_s = 60, .bucket_bytes = 20000};

static Status run(int ranks, RankMain *rank_main, void *user) {
    LoopConfig loop = {.ranks = ranks};
    return comm_run(&config, &loop, OK, rank_main, user);
}

/* ---- what works ---- */

static void test_scalars(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 9; ranks++)
        assert_ok(run(ranks, case_scalars, NULL));
}

/* Behind the k-th barrier everybody has come to it k times. user: how often any rank came to one. */
static Status barriers(Comm *comm, void *user) {
    atomic_int *arrivals = user;
    for (int round = 1; round <= 5; round++) {
        case_delay(comm_rank(comm), 200 + (uint64_t)round);
        atomic_fetch_add(arrivals, 1);
        TRY(comm_barrier(comm));
        EXPECT(atomic_load(arrivals) >= round * comm_ranks(comm));
    }
    return OK;
}

static void test_barrier(void **state) {
    (void)state;
    for (int ranks = 1; ranks <= 9; ranks++) {
        atomic_int arrivals = 0;
        assert_ok(run(ranks, barriers, &arrivals));
    }
}

static Status two_nodes(Comm *comm, void *user) {
    (void)user;
    const int nodes[] = {7, 3, 7, 3, 3}, local[] = {0, 0, 1, 1, 2};
    int rank = comm_rank(comm);
    EXPECT(comm_nodes(comm) == 1 && comm_local_rank(comm) == rank && comm_local_ranks(comm) == 5);
    memcpy(comm->transport->node, nodes, sizeof nodes);
    Comm *seen;
    TRY(comm_create(&seen, comm->transport));
    EXPECT(comm_nodes(seen) == 2 && comm_node(seen) == (nodes[rank] == 3) && comm_local_rank(seen) == local[rank] &&
           comm_local_ranks(seen) == (nodes[rank] == 7 ? 2 : 3));
    EXPECT(comm_host(seen) == comm_node(seen) && comm_host_ranks(seen) == comm_local_ranks(seen));
    comm_destroy(seen);
    return OK;
}

static void test_nodes(void **state) {
    (void)state;
    assert_ok(run(5, two_nodes, NULL));
}

/* As each rank sees them: "0 0 0 1 1". */
static Status placed(Comm *comm, void *user) {
    char text[64] = "";
    int first[8] = {0}, rank = comm_rank(comm);
    size_t used = 0;
    for (int other = 0; other < comm_ranks(comm); other++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%d", other ? " " : "",
                                 comm->transport->node[other]);
    EXPECT(strcmp(text, user) == 0);
    for (int other = comm_ranks(comm) - 1; other >= 0; other--)
        first[comm->transport->node[other]] = other;
    EXPECT(comm_node(comm) == comm->transport->node[rank] && comm_local_rank(comm) == rank - first[comm_node(comm)]);
    EXPECT(comm_host(comm) == 0 && comm_host_rank(comm) == rank && comm_host_ranks(comm) == comm_ranks(comm));
    return OK;
}

static Status place(int ranks, const char *ranks_per_node, const char *expected) {
    CommConfig mine = config;
    snprintf(mine.ranks_per_node, sizeof mine.ranks_per_node, "%s", ranks_per_node);
    return comm_run(&mine, &(LoopConfig){.ranks = ranks}, OK, placed, (char *)(uintptr_t)expected);
}

static void test_ranks_per_node(void **state) {
    (void)state;
    assert_ok(place(3, "", "0 0 0"));
    assert_ok(place(3, "0", "0 0 0"));
    assert_ok(place(5, "2", "0 0 1 1 2"));
    assert_ok(place(5, "3,2", "0 0 0 1 1"));
    assert_ok(place(5, "1,4", "0 1 1 1 1"));
    assert_ok(place(6, "1,2,3", "0 1 1 2 2 2"));
    assert_refused(place(4, "3,2", ""), "comm.ranks_per_node = 3,2: expected 4 in all, the number of ranks, found 5");
    assert_refused(place(6, "3,2", ""), "found 5");
    static const char *const wrong[] = {"3,", ",3", "3,0", "3,,2", "-1", "2x", "2 ", "9999999999,1", "x"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_refused(place(5, wrong[i], ""), "comm.ranks_per_node: expected a number or a list of them");
}

static void test_nodes_split(void **state) {
    (void)state;
    const struct {
        int node[6], domain[6], expected[6];
    } known[] = {{{0, 0, 0, 0, 0, 0}, {0, 0, 0, 1, 1, 1}, {0, 0, 0, 3, 3, 3}},
                 {{0, 0, 0, 0, 0, 0}, {2, 2, 2, 2, 2, 2}, {0, 0, 0, 0, 0, 0}},
                 {{0, 0, 0, 3, 3, 3}, {0, 0, 1, 0, 1, 1}, {0, 0, 2, 3, 4, 4}}, /* equal domains of other nodes */
                 {{7, 7, 7, 7, 7, 7}, {-1, 1, -1, 0, 1, 0}, {0, 1, 0, 3, 1, 3}},
                 {{2, 1, 0, 2, 1, 0}, {0, 0, 0, 0, 0, 0}, {0, 1, 2, 0, 1, 2}}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        int node[6];
        memcpy(node, known[i].node, sizeof node);
        nodes_split(&(Transport){.ranks = 6, .node = node}, known[i].domain);
        assert_memory_equal(node, known[i].expected, sizeof node);
    }
}

/* ---- sync ---- */

static void test_sync(void **state) {
    (void)state;
    const int algorithms[] = {0, 1, 4}; /* auto, naive, ring */
    for (int i = 0; i < 3; i++)
        for (int ranks = 1; ranks <= 5; ranks++) {
            CommConfig mine = {.algorithm = algorithms[i], .bucket_bytes = 20000, .overlap = i % 2};
            assert_ok(run(ranks, case_sync, &mine));
        }
}

/* Trap: two communicators used in different orders (nccl#195, #592). All that a rank sends leaves from one ordered queue;
 * a rank whose calls come in another order is told so, by the labels, where it would hang or take one for the other. */
static Status other_order(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    double sum = 1;
    for (int turn = 0; turn < 2; turn++)
        TRY((turn == 0) == (comm_rank(comm) == 1) ? comm_reduce(comm, &sum, 1, COMM_SUM)
                                                  : case_sync_steps(comm, sync, table, grads, user));
    return OK;
}

/* user is a SyncBody *. */
static Status sync_rank(Comm *comm, void *user) {
    ParamTable table;
    case_table(&table);
    return with_sync(comm, &config, &table, *(SyncBody **)user, NULL);
}

static void test_other_order(void **state) {
    (void)state;
    assert_int_equal(run(3, sync_rank, &(SyncBody *){other_order}), FAULT);
    if (!strstr(error_line(), " sent ") || !strstr(error_line(), "expected"))
        fail_msg("found '%s'", error_line());
}

/* Every gradient marked by one of two threads. */
static void *mark_odd(void *sync) {
    sync_mark_ready(sync, 1);
    sync_mark_ready(sync, 3);
    return NULL;
}

static Status two_markers(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    (void)comm, (void)grads, (void)user;
    EXPECT(table->gradient_count == 4);
    pthread_t other;
    sync_begin(sync);
    EXPECT(pthread_create(&other, NULL, mark_odd, sync) == 0);
    sync_mark_ready(sync, 2);
    sync_mark_ready(sync, 0);
    pthread_join(other, NULL);
    return sync_wait(sync);
}

static void test_two_threads_mark(void **state) {
    (void)state;
    assert_ok(run(3, sync_rank, &(SyncBody *){two_markers}));
}

static void test_native_refused_on_loop(void **state) {
    (void)state;
    CommConfig native = {.algorithm = 2, .bucket_bytes = 20000};
    assert_refused(run(2, case_sync, &native), "comm.algorithm = native: the loop transport has no all-reduce");
}

static void test_every_choice_is_a_collective(void **state) {
    (void)state;
    CommConfig filled;
    ConfigSection section = {"comm", comm_options, comm_option_count, &filled};
    Config *parsed = config_create(&section, 1);
    assert_int_equal(filled.transport, 0);
    assert_int_equal(filled.algorithm, 0);
    assert_true(filled.timeout_s > 0 && filled.verify_every == 0);
    for (int i = 0; i < CASE_COLLECTIVES; i++) {
        char assignment[64];
        if (strcmp(case_collectives[i].name, "leader") == 0) /* comm.leader chooses it */
            continue;
        snprintf(assignment, sizeof assignment, "comm.algorithm=%s", case_collectives[i].name);
        assert_ok(config_assign(parsed, assignment));
        const Collective *collective = case_collective(i);
        assert_non_null(collective);
        assert_string_equal(collective->name, option_choice(comm_algorithms, filled.algorithm));
    }
    config_destroy(parsed);
}

/* ---- what fails ---- */

static void test_verify(void **state) {
    (void)state;
    assert_ok(run(3, case_verify, NULL));
    assert_ok(run(4, case_verify, NULL));
}

static void test_agree(void **state) {
    (void)state;
    assert_ok(run(1, case_agree, NULL));
    assert_ok(run(4, case_agree, NULL));
}

static Status agreed_failure(Comm *comm, void *user) {
    (void)user;
    return comm_agree(comm, comm_rank(comm) == 1 ? bad_input("x.cfg:3: no such file") : OK);
}

static void test_agreed_failure_is_everybodys(void **state) {
    (void)state;
    assert_int_equal(run(3, agreed_failure, NULL), BAD_INPUT);
    assert_string_equal(error_line(), "rank 1: x.cfg:3: no such file");
}

/* What each rank saw. */
typedef struct Seen {
    Status status[8];
    char line[8][128];
} Seen;

static Status see(Seen *seen, int rank, Status status) {
    seen->status[rank] = status;
    snprintf(seen->line[rank], sizeof seen->line[rank], "%s", error_line());
    return status;
}

static Status allreduce_forever(Comm *comm, int rounds) {
    float data[1000] = {0}, scratch[1000];
    for (int round = 0; round != rounds; round++)
        TRY(collective_ring.allreduce(&comm->world, &(Payload){.data = data, .elems = 1000, .scale = 1, .scratch = scratch}));
    return OK;
}

static Status one_fails(Comm *comm, void *user) {
    if (comm_rank(comm) == 2) {
        TRY(allreduce_forever(comm, 5));
        return see(user, 2, fault("disk full"));
    }
    return see(user, comm_rank(comm), allreduce_forever(comm, -1));
}

static void test_failing_rank_ends_all(void **state) {
    (void)state;
    Seen seen = {0};
    assert_int_equal(run(5, one_fails, &seen), FAULT);
    assert_string_equal(error_line(), "rank 2: disk full");
    for (int rank = 0; rank < 5; rank++) {
        assert_int_equal(seen.status[rank], FAULT);
        assert_string_equal(seen.line[rank], rank == 2 ? "disk full" : "rank 2: disk full");
    }
}

static Status one_ends_early(Comm *comm, void *user) {
    if (comm_rank(comm) == 1)
        return OK;
    return see(user, comm_rank(comm), comm_barrier(comm));
}

static void test_rank_that_ended_is_named(void **state) {
    (void)state;
    Seen seen = {0};
    assert_int_equal(run(2, one_ends_early, &seen), FAULT);
    assert_string_equal(error_line(), "rank 0: rank 1 ended while rank 0 waited for it");
}

/* user: how many milliseconds the others wait; rank 1 comes after 200. */
static Status one_is_late(Comm *comm, void *user) {
    struct timespec pause = {0, 200000000};
    comm->transport->timeout_s = 1e-3 * *(const int *)user;
    if (comm_rank(comm) == 1)
        nanosleep(&pause, NULL);
    return comm_barrier(comm);
}

static void test_timeout_names_the_late_rank(void **state) {
    (void)state;
    int impatient_ms = 20, patient_ms = 20000;
    assert_int_equal(run(2, one_is_late, &impatient_ms), FAULT);
    assert_string_equal(error_line(), "rank 0: no answer from rank 1 for 0.02 s (comm.timeout_s)");
    assert_ok(run(2, one_is_late, &patient_ms));
}

/* The last of a chain in which each waits for the one before loses patience first, and yet names the first. */
static Status chain(Comm *comm, void *user) {
    (void)user;
    int rank = comm_rank(comm), ranks = comm_ranks(comm);
    char byte = 0;
    struct timespec pause = {0, 200000000};
    comm->transport->timeout_s = rank == ranks - 1 ? 0.1 : 60;
    if (rank == 0)
        nanosleep(&pause, NULL);
    transport_group_begin(comm->transport);
    if (rank > 0)
        transport_recv(comm->transport, rank - 1, &byte, 1);
    TRY(transport_group_end(comm->transport));
    transport_group_begin(comm->transport);
    if (rank < ranks - 1)
        transport_send(comm->transport, rank + 1, &byte, 1);
    return transport_group_end(comm->transport);
}

static void test_timeout_follows_the_chain(void **state) {
    (void)state;
    assert_int_equal(run(4, chain, NULL), FAULT);
    assert_string_equal(error_line(), "rank 3: no answer from rank 0 for 0.1 s (comm.timeout_s)");
}

/* Two sizes in one message: an error, not a wrong tail. */
static Status sizes_differ(Comm *comm, void *user) {
    (void)user;
    char data[100] = {0};
    transport_group_begin(comm->transport);
    if (comm_rank(comm) == 0)
        transport_send(comm->transport, 1, data, 100);
    else
        transport_recv(comm->transport, 0, data, 60);
    return transport_group_end(comm->transport);
}

static void test_sizes_differ(void **state) {
    (void)state;
    assert_int_equal(run(2, sizes_differ, NULL), FAULT);
    assert_string_equal(error_line(), "rank 1: rank 0 sent 100 bytes where rank 1 expected 60");
}

/* A rank that never comes back cannot be ended; the process is, with the line of the one that noticed. */
static Status one_is_stuck(Comm *comm, void *user) {
    (void)user;
    comm->transport->timeout_s = 0.1;
    if (comm_rank(comm) == 1)
        for (;;)
            pause();
    return comm_barrier(comm);
}

static void test_stuck_rank_ends_the_process(void **state) {
    (void)state;
    int channel[2];
    char line[256] = "";
    assert_int_equal(pipe(channel), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(channel[1], STDERR_FILENO);
        close(channel[0]);
        close(channel[1]);
        CommConfig impatient = {.timeout_s = 1}; /* and that long it waits for the threads */
        LoopConfig loop = {.ranks = 2};
        comm_run(&impatient, &loop, OK, one_is_stuck, NULL);
        _exit(99);
    }
    close(channel[1]);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(read(channel[0], line, sizeof line - 1) > 0);
    close(channel[0]);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == FAULT);
    assert_non_null(strstr(line, "rank 0: no answer from rank 1 for 0.1 s"));
}

static Status not_run(Comm *comm, void *user) {
    (void)comm;
    *(bool *)user = true;
    return OK;
}

static void test_start_failures(void **state) {
    (void)state;
    bool ran = false;
    CommConfig mpi = {.transport = 1, .timeout_s = 1};
    LoopConfig loop = {.ranks = 2};
    assert_refused(comm_run(&mpi, &loop, OK, not_run, &ran), "comm.transport = mpi: ");
    assert_refused(comm_run(&config, &loop, bad_input("no config"), not_run, &ran), "no config");
    assert_false(ran);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_scalars),
    cmocka_unit_test(test_barrier),
    cmocka_unit_test(test_nodes),
    cmocka_unit_test(test_ranks_per_node),
    cmocka_unit_test(test_nodes_split),
    cmocka_unit_test(test_sync),
    cmocka_unit_test(test_other_order),
    cmocka_unit_test(test_two_threads_mark),
    cmocka_unit_test(test_native_refused_on_loop),
    cmocka_unit_test(test_every_choice_is_a_collective),
    cmocka_unit_test(test_verify),
    cmocka_unit_test(test_agree),
    cmocka_unit_test(test_agreed_failure_is_everybodys),
    cmocka_unit_test(test_failing_rank_ends_all),
    cmocka_unit_test(test_rank_that_ended_is_named),
    cmocka_unit_test(test_timeout_names_the_late_rank),
    cmocka_unit_test(test_timeout_follows_the_chain),
    cmocka_unit_test(test_sizes_differ),
    cmocka_unit_test(test_stuck_rank_ends_the_process),
    cmocka_unit_test(test_start_failures),
};

CHECK_MAIN(tests)
