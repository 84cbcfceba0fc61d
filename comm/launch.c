/* How a program becomes ranks.
 *
 *   mpirun started it:  main() of each process  ->  comm_run  ->  rank_main, here
 *   otherwise:          main()                  ->  comm_run  ->  loop.ranks threads, each runs rank_main
 *
 * How a failure ends all ranks. When all of them know it (comm_agree, comm_verify), each returns it, rank 0 prints the
 * line, and all leave in good order. When one rank alone knows it: a thread tells the others through the loop
 * transport, which wakes them; a process prints its line in comm_finish and has the launcher end the others. A process
 * that can tell nobody, because it was killed, is missed by its neighbours (comm/transport/watch.h). */
#define _GNU_SOURCE
#include "comm/internal.h"
#include "comm/transport/transport_loop.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Processes of one group may come up and read their files minutes apart. */
enum { START_TIMEOUT_S = 300 };

/* How long the other threads may take to notice that a rank has failed. */
#define GRACE_S 5.0

enum { TRANSPORT_AUTO, TRANSPORT_MPI, TRANSPORT_LOOP }; /* order of the choices of [comm] transport */

/* Process-wide, main thread only: every process returns the same outcome from comm_run. For use under a launcher. */
static bool outcome_shared_by_processes;

/* ---- one rank ---- */

/* A failure that only this rank knows gets its name, unless it is alone. */
static Status run_rank(Comm *comm, RankMain *rank_main, void *user) {
    Status status = rank_main(comm, user);
    if (status == OK || comm_outcome_shared(comm) || comm_ranks(comm) == 1)
        return status;
    char line[1024];
    snprintf(line, sizeof line, "rank %d: %s", comm_rank(comm), error_line());
    return error_restore(status, line);
}

/* ---- ranks as threads ---- */

typedef struct RankThread {
    LoopWorld *world;
    const CommConfig *config;
    int rank;
    RankMain *rank_main;
    void *user;
    pthread_t thread;
} RankThread;

static void *rank_thread(void *argument) {
    RankThread *self = argument;
    Comm *comm;
    Status status = comm_create(&comm, loop_transport(self->world, self->rank));
    if (status == OK)
        status = comm_set_nodes(comm, self->config);
    if (status == OK)
        status = run_rank(comm, self->rank_main, self->user);
    comm_destroy(comm);
    loop_leave(self->world, self->rank, status);
    return NULL;
}

/* Returns how many were started; the others are told that it failed. */
static int start_threads(RankThread *threads, int ranks) {
    for (int rank = 0; rank < ranks; rank++) {
        int code = pthread_create(&threads[rank].thread, NULL, rank_thread, &threads[rank]);
        if (code == 0)
            continue;
        Status status = fault("cannot start a thread for rank %d of %d: %s", rank, ranks, strerror(code));
        for (int missing = rank; missing < ranks; missing++)
            loop_leave(threads[rank].world, missing, status);
        return rank;
    }
    return ranks;
}

/* A thread cannot be ended from outside. When one does not come back after a failure, the process ends here. */
static Status wait_for_threads(LoopWorld *world, double timeout_s) {
    bool all_left;
    Status status = loop_wait(world, timeout_s < GRACE_S ? timeout_s : GRACE_S, &all_left);
    if (!all_left)
        _exit(error_exit_code(program_invocation_short_name, status));
    return status;
}

static Status run_threads(LoopWorld *world, int ranks, const CommConfig *config, RankMain *rank_main, void *user) {
    double timeout_s = (double)config->timeout_s;
    RankThread *threads = calloc((size_t)ranks, sizeof *threads);
    if (!threads)
        return fault("no memory for %d ranks", ranks);
    for (int rank = 0; rank < ranks; rank++)
        threads[rank] = (RankThread){.world = world, .config = config, .rank = rank, .rank_main = rank_main,
                                     .user = user};
    if (ranks == 1) { /* no need to leave the main thread */
        rank_thread(&threads[0]);
        free(threads);
        return wait_for_threads(world, timeout_s);
    }
    int started = start_threads(threads, ranks);
    Status status = wait_for_threads(world, timeout_s);
    for (int rank = 0; rank < started; rank++)
        pthread_join(threads[rank].thread, NULL);
    free(threads);
    return status;
}

static Status run_loop(const CommConfig *config, const LoopConfig *loop, RankMain *rank_main, void *user) {
    LoopWorld *world;
    Status status = loop_create(&world, (int)loop->ranks, (double)config->timeout_s);
    if (status == OK) {
        const LoopLinks links = {loop->latency_inside_us, loop->latency_between_us, loop->gb_per_s_inside,
                                 loop->gb_per_s_between};
        status = loop_set_links(world, &links);
    }
    if (status == OK)
        status = loop_set_faults(world, loop->faults);
    if (status == OK)
        status = run_threads(world, (int)loop->ranks, config, rank_main, user);
    loop_destroy(world);
    return status;
}

/* ---- ranks as processes ---- */

static Status run_process(Comm *comm, const CommConfig *config, RankMain *rank_main, void *user) {
    comm->transport->timeout_s = (double)config->timeout_s;
    TRY(comm_agree(comm, comm_set_nodes(comm, config)));
    TRY(run_rank(comm, rank_main, user));
    return comm_barrier(comm); /* a rank that is done waits here, at less cost than MPI_Finalize's waiting */
}

static Status check_transport(const CommConfig *config, int ranks) {
    if (config->transport == TRANSPORT_LOOP && ranks > 1)
        return bad_input("comm.transport = loop: ranks would be threads of one process, but %d processes were started",
                         ranks);
    return OK;
}

static Status run_processes(Transport *transport, const CommConfig *config, const LoopConfig *loop, Status status,
                            RankMain *rank_main, void *user) {
    Comm *comm;
    Status created = comm_create(&comm, transport);
    if (created == OK)
        created = comm_agree(comm, status == OK ? check_transport(config, transport->ranks) : status);
    if (created == OK)
        created = config->transport == TRANSPORT_LOOP ? run_loop(config, loop, rank_main, user)
                                                      : run_process(comm, config, rank_main, user);
    outcome_shared_by_processes = created == OK || transport->ranks == 1 || (comm && comm_outcome_shared(comm));
    comm_destroy(comm);
    return created;
}

/* ---- the program's face ---- */

/* Processes that a launcher started, as it says in the environment: 0 without one, -1 when it does not say. */
static int launched_processes(void) {
    const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}, *const ranks[] = {"PMI_RANK", "PMIX_RANK"};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (getenv(sizes[i]))
            return atoi(getenv(sizes[i]));
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
        if (getenv(ranks[i]))
            return -1;
    return 0;
}

static const ProcessTransport *started_processes(void) {
    const ProcessTransport *processes = process_transport();
    return processes && processes->started() ? processes : NULL;
}

/* A signal handler: MPI's start cannot be left in any other way. */
static void start_timed_out(int number) {
    static const char line[] = ": MPI did not start: a rank has been stopped, hangs, or cannot be reached\n";
    const char *name = program_invocation_short_name;
    (void)number;
    if (write(STDERR_FILENO, name, strlen(name)) < 0 || write(STDERR_FILENO, line, sizeof line - 1) < 0)
        _exit(FAULT); /* there is nobody to tell */
    _exit(FAULT);
}

/* MPI waits for ever for a rank that does not come. The lowest one that did speaks, a second before the next would. */
static Status start_processes(const ProcessTransport *processes, int *argc, char ***argv) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    signal(SIGALRM, start_timed_out);
    alarm(START_TIMEOUT_S + (unsigned)atoi(rank ? rank : "0"));
    Status status = processes->start(argc, argv);
    alarm(0);
    signal(SIGALRM, SIG_DFL);
    return status;
}

Status comm_start(int *argc, char ***argv) {
    const ProcessTransport *processes = process_transport();
    return processes && launched_processes() != 0 ? start_processes(processes, argc, argv) : OK;
}

static Status run_alone(const CommConfig *config, const LoopConfig *loop, Status status, RankMain *rank_main,
                        void *user) {
    TRY(status);
    int processes = launched_processes();
    if (!process_transport() && processes != 0 && processes != 1)
        return bad_input("mpirun or srun started several of this program, which was built without MPI (make MPI=0)");
    const char *tasks = getenv("SLURM_STEP_NUM_TASKS"); /* srun's, who tells of them only those who can ask for them */
    if (processes == 0 && tasks && atoi(tasks) > 1 && config->transport == TRANSPORT_AUTO)
        return bad_input("srun started %s of this program, each of them alone: srun --mpi=pmix makes them ranks of one "
                         "run, comm.transport=loop means it so", tasks);
    if (config->transport == TRANSPORT_MPI)
        return bad_input("comm.transport = mpi: %s", process_transport() ? "start the program with mpirun or srun"
                                                                         : "the program was built without MPI (MPI=0)");
    return run_loop(config, loop, rank_main, user);
}

Status comm_run(const CommConfig *config, const LoopConfig *loop, Status status, RankMain *rank_main, void *user) {
    const ProcessTransport *processes = started_processes();
    if (!processes)
        return run_alone(config, loop, status, rank_main, user);
    char line[1024];
    snprintf(line, sizeof line, "%s", error_line());
    Transport *transport;
    Status outcome = processes->create(&transport, START_TIMEOUT_S);
    if (outcome == OK) {
        error_restore(status, line);
        outcome = run_processes(transport, config, loop, status, rank_main, user);
    }
    processes->destroy(transport);
    return outcome;
}

int comm_finish(const char *program, Status status) {
    const ProcessTransport *processes = started_processes();
    if (!processes)
        return error_exit_code(program, status);
    bool shared = status == OK || outcome_shared_by_processes;
    int code = !shared || processes->rank() == 0 ? error_exit_code(program, status) : (int)status;
    if (!shared)
        processes->abort(code);
    processes->stop();
    return code;
}
