/* The mpi transport by itself. tests/test_transport_mpi.sh starts this under mpirun:
 *
 *   test_transport_mpi              the cases of transport_cases.h
 *   test_transport_mpi labels       two ranks at different buckets
 *   test_transport_mpi sizes        two ranks that disagree on a message's size, on one node
 *   test_transport_mpi longer       likewise, on two nodes, and the sender has more
 *   test_transport_mpi private 0|1  four ranks on two nodes; rank 1 can make no file (0) or open none (1)
 *   test_transport_mpi hold DIR     shares 64 MiB, leaves each rank's id in DIR/RANK.pid and waits to be killed
 *   test_transport_mpi wait         two ranks; shows what share of a core one uses while it waits 2 s: at most 5 % */
#define _GNU_SOURCE
#include "tests/transport_cases.h"

#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static Status all_cases(Transport *transport, void *user) {
    TransportCase *const cases[] = {case_streams, case_polled, case_pool, case_share, case_nodes};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        TRY(cases[i](transport, user));
    TRY(transport_barrier(transport));
    if (transport->rank == 0)
        printf("%d ranks on %s: all cases passed\n", transport->ranks, transport->ops->name);
    return OK;
}

static Status labels(Transport *transport, void *user) {
    (void)user;
    return case_swap(transport, &(CaseSwap){{{300, 2, 1}, {301, -1, 0}}, {4, 4}});
}

static Status sizes(Transport *transport, void *user) {
    (void)user;
    return case_swap(transport, &(CaseSwap){.bytes = {200000, 300000}});
}

static Status longer(Transport *transport, void *user) {
    (void)user;
    transport_set_nodes(transport, 1);
    return case_swap(transport, &(CaseSwap){.bytes = {120000, 80000}});
}

/* As many files as are open now, and `more`. */
static void limit_files(rlim_t more) {
    struct rlimit limit;
    int next = dup(0);
    close(next);
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = (rlim_t)next + more;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static Status private_memory(Transport *transport, void *user) {
    int rank = transport->rank, other = rank ^ 1;
    struct rlimit before;
    getrlimit(RLIMIT_NOFILE, &before);
    transport_set_nodes(transport, 2);
    TRY(transport_barrier(transport));
    if (rank == 1)
        limit_files((rlim_t)atoi(user));
    char *memory = transport_share(transport, 1 << 20);
    setrlimit(RLIMIT_NOFILE, &before);
    EXPECT(memory && memory[0] == 0 && memory[(1 << 20) - 1] == 0);
    EXPECT((transport_peer_ptr(transport, memory, other) == NULL) == (rank < 2));
    EXPECT(transport_peer_ptr(transport, memory, rank) == memory);
    transport_unshare(transport, memory);
    TRY(case_share(transport, NULL)); /* the next one is shared again */
    TRY(transport_barrier(transport));
    if (rank == 0)
        printf("private memory: passed\n");
    return OK;
}

static Status hold(Transport *transport, void *user) {
    char path[512];
    char *memory = transport_share(transport, 64 << 20);
    EXPECT(memory && transport_peer_ptr(transport, memory, 1 - transport->rank));
    TRY(transport_barrier(transport));
    snprintf(path, sizeof path, "%s/%d.pid", (const char *)user, transport->rank);
    FILE *file = fopen(path, "w");
    EXPECT(file);
    fprintf(file, "%d\n", (int)getpid());
    fclose(file);
    for (;;)
        TRY(transport_barrier(transport));
}

static TransportCase *find_mode(const char *name) {
    static const struct {
        const char *name;
        TransportCase *run;
    } modes[] = {{"cases", all_cases}, {"labels", labels},           {"sizes", sizes},
                 {"longer", longer},   {"private", private_memory}, {"hold", hold},
                 {"wait", case_wait}};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (strcmp(modes[i].name, name) == 0)
            return modes[i].run;
    return NULL;
}

int main(int argc, char **argv) {
    const ProcessTransport *processes = process_transport();
    if (!processes || !getenv("OMPI_COMM_WORLD_SIZE")) {
        printf("skipped: test_transport_mpi.sh starts it under mpirun\n");
        return 0;
    }
    Transport *transport = NULL;
    Status status = processes->start(&argc, &argv);
    TransportCase *run = find_mode(argc > 1 ? argv[1] : "cases");
    if (status == OK)
        status = processes->create(&transport, 30);
    if (status == OK)
        status = run ? run(transport, argc > 2 ? argv[2] : NULL) : bad_input("no mode is called '%s'", argv[1]);
    int code = error_exit_code("test_transport_mpi", status);
    if (code != 0)
        processes->abort(code);
    processes->destroy(transport);
    processes->stop();
    return code;
}
