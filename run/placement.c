#include "run/placement.h"

#include "base/machine.h"
#include "base/memory.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

typedef struct Place {
    int host;
    char cores[60]; /* the binding as text: equal where ranks may run on the same cores */
} Place;

/* Ranks of this host with the calling rank's binding, itself included. */
static Status count_sharing(Comm *comm, const Place *mine, int *sharing) {
    Place *all = calloc((size_t)comm_ranks(comm), sizeof *all);
    Status status = all ? comm_gather(comm, mine, all, sizeof *mine) : fault("out of memory");
    for (int r = 0; status == OK && r < comm_ranks(comm); r++)
        *sharing += all[r].host == mine->host && strcmp(all[r].cores, mine->cores) == 0;
    free(all);
    return status;
}

Status placement_threads(Comm *comm, int threads, Log *log) {
    Place mine = {.host = comm_host(comm)};
    int sharing = 0, cores = machine_cores();
    machine_binding(mine.cores, sizeof mine.cores);
    TRY(count_sharing(comm, &mine, &sharing));
    bool automatic = threads == 0;
    if (automatic)
        threads = cores / sharing > 1 ? cores / sharing : 1;
    omp_set_num_threads(threads);
    if (!log)
        return OK;
    static const char *const units[] = {"node", "NUMA domain", "PCIe group"}; /* in the order of CommNodes */
    const char *unit = units[comm_nodes_are(comm)];
    int ranks = comm_ranks(comm), nodes = comm_nodes(comm), usable = cores * (comm_host_ranks(comm) / sharing);
    log_fact(log, "ranks", "%d on %d %s%s over %s, %d thread%s each, rank 0 on core%s %s", ranks, nodes,
             unit, nodes > 1 ? "s" : "", comm_transport_name(comm), threads, threads > 1 ? "s" : "",
             cores > 1 ? "s" : "", mine.cores);
    if (threads * sharing > cores)
        log_warning(log, "%d threads share %d core%s of this machine", threads * sharing, cores, cores > 1 ? "s" : "");
    if (automatic && usable < machine_all_cores())
        log_warning(log, "the ranks of this machine are bound to %d of its %d cores; mpirun --bind-to none frees them",
                    usable, machine_all_cores());
    return OK;
}

Status placement_memory(Comm *comm, double bytes_per_rank, const char *advice) {
    int ranks = comm_host_ranks(comm);
    double needed = bytes_per_rank * ranks, available = (double)machine_memory_available();
    if (needed > available)
        return bad_input("the run needs %s of memory for %d rank%s on this machine, %s are free; %s",
                         bytes_text(needed).text, ranks, ranks > 1 ? "s" : "", bytes_text(available).text, advice);
    return OK;
}
