/* comm on the mpi transport. tests/test_comm_mpi.sh starts this under mpirun, once for each thing that can happen:
 *
 *   test_comm_mpi                   the cases of comm_cases.h. Without mpirun they run on three threads
 *   test_comm_mpi config RANK       RANK cannot read its config
 *   test_comm_mpi loop              asks for threads although processes were started
 *   test_comm_mpi agree RANK        RANK finds bad input, all agree on it
 *   test_comm_mpi fail RANK         RANK fails while the others wait for it
 *   test_comm_mpi sizes RANK        RANK sends less than the next rank expects
 *   test_comm_mpi stuck RANK        RANK never comes back; the others wait 1 s for it
 *   test_comm_mpi stuck_mpi RANK    the same within MPI's own all-reduce
 *   test_comm_mpi wait              one rank is 2 s late; what the others use of a core within MPI's all-reduces
 *   test_comm_mpi forever DIR       all-reduces until killed; leaves each rank's process id in DIR/RANK.pid */
#define _POSIX_C_SOURCE 200809L
#include "tests/comm_cases.h"

#include <unistd.h>

/* Every collective, on private memory and on memory that the node shares. */
static Status collective_cases(Comm *comm, const Expected *expected) {
    for (int shared = 0; shared < 2; shared++) {
        float *memory = arena_memory(comm->transport, expected->elems, shared);
        EXPECT(memory);
        Arena arena = {comm->world, expected, memory};
        TRY(case_all_collectives(&arena));
        arena_release(comm->transport, memory, shared);
    }
    return OK;
}

/* As found, and as if two ranks in a row shared a node: 2 + 1 or 2 x 2. */
static Status collectives(Comm *comm) {
    int found[CASE_RANKS_MAX];
    memcpy(found, comm->transport->node, (size_t)comm_ranks(comm) * sizeof(int));
    for (int ranks_per_node = 0; ranks_per_node <= 2; ranks_per_node += 2) {
        Expected expected;
        transport_set_nodes(comm->transport, ranks_per_node);
        expected_create(&expected, comm->world.members, comm->world.size, comm->transport->node, CASE_ELEMS);
        TRY(collective_cases(comm, &expected));
        expected_destroy(&expected);
    }
    memcpy(comm->transport->node, found, (size_t)comm_ranks(comm) * sizeof(int));
    return OK;
}

/* A rank that waits 2 s for another one computes for less than 5 % of them. */
static Status leaves_the_core(Comm *comm, const Collective *collective) {
    float value = 1, scratch;
    struct timespec late = {2, 0}, before, after;
    TRY(transport_barrier(comm->transport));
    if (comm_rank(comm) == 0)
        nanosleep(&late, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    TRY(collective->allreduce(&comm->world, &(Payload){.data = &value, .elems = 1, .scale = 1, .scratch = &scratch}));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    double used_s = (double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec);
    EXPECT(value == (float)comm_ranks(comm));
    return used_s < 0.05 * 2 ? OK : fault("%s used a core for %g s while it waited", collective->name, used_s);
}

static Status wait_in_mpi(Comm *comm, void *user) {
    (void)user;
    TRY(leaves_the_core(comm, &collective_native));
    return leaves_the_core(comm, &collective_iallreduce);
}

static Status all_cases(Comm *comm, void *user) {
    (void)user;
    TRY(collectives(comm));
    TRY(case_scalars(comm, NULL));
    TRY(case_verify(comm, NULL));
    TRY(case_agree(comm, NULL));
    for (int algorithm = 0; algorithm <= 7; algorithm++) {
        CommConfig config = {.algorithm = algorithm, .bucket_bytes = 20000, .overlap = true};
        const Collective *named = collective_find(option_choice(comm_algorithms, algorithm));
        if (!named || case_runs(&comm->world, named)) /* NULL: auto */
            TRY(case_sync(comm, &config));
    }
    if (comm_rank(comm) == 0)
        printf("%d ranks on %s: all cases passed\n", comm_ranks(comm), comm_transport_name(comm));
    return OK;
}

static Status rounds_of(Comm *comm, const Collective *collective, int rounds) {
    enum { ELEMS = 100000 };
    float *data = calloc(ELEMS, sizeof(float)), *scratch = calloc(ELEMS, sizeof(float));
    Status status = OK;
    for (int round = 0; round != rounds && status == OK; round++)
        status = collective->allreduce(
            &comm->world, &(Payload){.data = data, .elems = ELEMS, .scale = 1, .scratch = scratch});
    free(data);
    free(scratch);
    return status;
}

static Status allreduce_rounds(Comm *comm, int rounds) { return rounds_of(comm, &collective_ring, rounds); }

/* ---- failures. user: the mode's argument ---- */

static bool chosen(Comm *comm, void *user) { return comm_rank(comm) == atoi(user); }

static Status agree(Comm *comm, void *user) {
    return comm_agree(comm, chosen(comm, user) ? bad_input("shard.bin: token 50257 at 12") : OK);
}

static Status fail(Comm *comm, void *user) {
    TRY(allreduce_rounds(comm, 10));
    return chosen(comm, user) ? fault("disk full") : allreduce_rounds(comm, -1);
}

static Status sizes(Comm *comm, void *user) {
    static char data[300000];
    int rank = comm_rank(comm), ranks = comm_ranks(comm);
    transport_group_begin(comm->transport);
    transport_send(comm->transport, (rank + 1) % ranks, data, chosen(comm, user) ? 200000 : 300000);
    transport_recv(comm->transport, (rank + ranks - 1) % ranks, data, 300000);
    return transport_group_end(comm->transport);
}

static Status stuck(Comm *comm, void *user) {
    while (chosen(comm, user))
        pause();
    return allreduce_rounds(comm, -1);
}

static Status stuck_mpi(Comm *comm, void *user) {
    TRY(rounds_of(comm, &collective_iallreduce, 10));
    while (chosen(comm, user))
        pause();
    return rounds_of(comm, &collective_iallreduce, -1);
}

static Status forever(Comm *comm, void *user) {
    char path[512];
    TRY(allreduce_rounds(comm, 10));
    snprintf(path, sizeof path, "%s/%d.pid", (const char *)user, comm_rank(comm));
    FILE *file = fopen(path, "w");
    if (!file)
        return fault("%s: cannot write", path);
    fprintf(file, "%d\n", (int)getpid());
    fclose(file);
    return allreduce_rounds(comm, -1);
}

/* Before comm_run nobody knows its rank but by the launcher's word. */
static Status read_config(const char *mode, const char *rank) {
    const char *own = getenv("OMPI_COMM_WORLD_RANK");
    return strcmp(mode, "config") == 0 && own && strcmp(own, rank) == 0 ? bad_input("x.cfg:3: comm.ranks: no such key")
                                                                        : OK;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        RankMain *rank_main;
    } modes[] = {{"cases", all_cases}, {"config", all_cases}, {"loop", all_cases}, {"agree", agree},
                 {"fail", fail},       {"sizes", sizes},      {"stuck", stuck},    {"stuck_mpi", stuck_mpi},
                 {"forever", forever}, {"wait", wait_in_mpi}};
    Status status = comm_start(&argc, &argv);
    const char *mode = argc > 1 ? argv[1] : "cases";
    char *argument = argc > 2 ? argv[2] : NULL;
    CommConfig config = {.timeout_s = strncmp(mode, "stuck", 5) == 0 ? 1 : 60,
                         .transport = strcmp(mode, "loop") == 0 ? 2 : 0};
    LoopConfig loop = {.ranks = 3};
    RankMain *rank_main = NULL;
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (strcmp(modes[i].name, mode) == 0)
            rank_main = modes[i].rank_main;
    if (!rank_main)
        status = bad_input("no mode is called '%s'", mode);
    if (status == OK)
        status = read_config(mode, argument);
    status = comm_run(&config, &loop, status, rank_main, argument);
    return comm_finish("test_comm_mpi", status);
}
