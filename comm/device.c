/* Gradients on GPUs: whether NCCL can carry them, decided alike on all ranks before any of them asks it. */
#include "comm/compress/compress_cuda.h"
#include "comm/internal.h"

#include <string.h>

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
    if (comm->machine_ranks > gpu_count(&why))
        return "NCCL needs a GPU for each rank of a node";
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
