/* Gradients on GPUs: whose GPUs share a PCIe switch, and whether NCCL can carry gradients, decided alike on all ranks
 * before any of them asks it. */
#include "comm/compress/compress_cuda.h"
#include "comm/internal.h"
#include "comm/nodes.h"

#include "base/machine.h"

#include <stdlib.h>
#include <string.h>

/* ---- comm.group = pcie ---- */

enum { BRIDGES = 12 };

/* What a rank's GPU lies below, nearest first. */
typedef struct PciePath {
    int count, bridges[BRIDGES];
} PciePath;

static Status find_path(PciePath *path, const Gpu *gpu) {
    *path = (PciePath){0};
    if (!gpu)
        return bad_input("comm.group = pcie: the model does not run on a GPU");
    path->count = machine_pcie_bridges(gpu_pci(gpu), path->bridges, BRIDGES);
    return path->count >= 0 ? OK : bad_input("comm.group = pcie: hwloc does not see the GPU at %s; comm.group = node "
                                             "or numa does without", gpu_pci(gpu));
}

static int place_in(const PciePath *path, int bridge) {
    for (int i = 0; i < path->count; i++)
        if (path->bridges[i] == bridge)
            return i;
    return -1;
}

/* The nearest bridge that a rank's GPU has in common with another one of its node, as a number of its own: who is the
 * first that lies below it, and how far. Alone: one that nobody else has. */
static int domain_of(const Transport *transport, const PciePath *paths, int rank) {
    for (int i = 0; i < paths[rank].count; i++) {
        int first = -1, below = 0;
        for (int other = 0; other < transport->ranks; other++) {
            int place = place_in(&paths[other], paths[rank].bridges[i]);
            if (place < 0 || transport->node[other] != transport->node[rank])
                continue;
            first = first < 0 ? other * BRIDGES + place : first;
            below++;
        }
        if (below > 1)
            return first;
    }
    return transport->ranks * BRIDGES + rank;
}

static Status split_by_pcie(Comm *comm, const Gpu *gpu) {
    int ranks = comm_ranks(comm), *domains = calloc((size_t)ranks, sizeof *domains);
    PciePath mine, *paths = calloc((size_t)ranks, sizeof *paths);
    Status status = domains && paths ? comm_agree(comm, find_path(&mine, gpu)) : fault("no memory for %d ranks", ranks);
    if (status == OK)
        status = comm_gather(comm, &mine, paths, sizeof mine);
    for (int rank = 0; status == OK && rank < ranks; rank++)
        domains[rank] = domain_of(comm->transport, paths, rank);
    if (status == OK)
        nodes_split(comm->transport, domains);
    comm_count_nodes(comm);
    free(domains);
    free(paths);
    return status;
}

/* ---- NCCL ---- */

static bool chosen(const CommConfig *config, const char *name) {
    return strcmp(option_choice(comm_transports, config->transport), name) == 0;
}

/* NULL: nothing stands in the way. */
static const char *obstacle(const Comm *comm, const CommConfig *config, const Gpu *gpu) {
    const char *why;
    if (!gpu)
        return "the model does not run on a GPU";
    if (!device_transport())
        return "this build has no NCCL";
    if (comm->host_ranks > gpu_count(&why) && !getenv("NCCL_HOSTID")) /* by which ranks become hosts (bench/own_host) */
        return "NCCL needs a GPU for each rank of a host";
    if (!cuda_compressor(compressor_find(option_choice(comm_compressors, config->compress))))
        return "that compressor runs on the host only";
    return NULL;
}

static Status open_job(void *argument) {
    Comm *comm = argument;
    gpu_use(comm->gpu);
    return device_transport()->create(&comm->device, comm->transport, comm->gpu);
}

Status comm_use_gpu(Comm *comm, const CommConfig *config, Gpu *gpu) {
    if (comm->nodes_are == COMM_NODES_PCIE)
        TRY(split_by_pcie(comm, gpu));
    bool asked = chosen(config, "nccl");
    if (comm_ranks(comm) == 1 || !(asked || (gpu && chosen(config, "auto"))))
        return OK;
    const char *why = obstacle(comm, config, gpu);
    double blocked = why != NULL;
    TRY(comm_reduce(comm, &blocked, 1, COMM_MAX));
    if (blocked > 0) {
        comm->gpu_note = why ? why : "NCCL is not possible on another rank";
        return comm_agree(comm, asked ? fault("comm.transport = nccl: %s", comm->gpu_note) : OK);
    }
    comm->gpu = gpu;
    TRY(comm_agree(comm, engine_call(comm->engine, open_job, comm))); /* the lowest rank that failed says why */
    comm->world.transport = comm->device;
    comm->scratch_memory = gpu_memory(gpu);
    return OK;
}

void comm_leave_gpu(Comm *comm) {
    if (comm->device)
        device_transport()->destroy(comm->device);
    comm->device = NULL;
    comm->world.transport = comm->transport;
    comm->scratch_memory = &host_memory;
}

bool comm_on_gpu(const Comm *comm) { return comm->device != NULL; }
const char *comm_gpu_note(const Comm *comm) { return comm->gpu_note ? comm->gpu_note : ""; }
