/* The optimizer's passes on a GPU. Everything stands in the computing stream. An update is one kernel, whatever the
 * number of runs; the norm is one for each slice of the shard, and waits, since the host needs the sums.
 *
 * The plan of the norm keeps two arrays on the device: where units start, and room for their sums. */
#include "optim/optim_kernels.cuh"

extern "C" {
#include "optim/optim_cuda.h"
}

#include <assert.h>
#include <stdlib.h>

struct CudaOptim {
    OptimOps ops;
    Gpu *gpu;
    uint16_t *weights; /* bf16, borrowed; NULL: none */
    uint64_t seed;
};

typedef struct CudaNorm {
    int64_t *starts; /* [units + 1] */
    double *sums;    /* [units] */
} CudaNorm;

static cudaStream_t stream_of(const CudaOptim *optim) { return (cudaStream_t)gpu_stream(optim->gpu); }

static void upload(void *state, void *device, const void *host, size_t bytes) {
    const CudaOptim *optim = (const CudaOptim *)state;
    CHECK_CUDA(optim->gpu, cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_of(optim)));
    CHECK_CUDA(optim->gpu, cudaStreamSynchronize(stream_of(optim)));
}

/* ---- AdamW ---- */

static bool on_16_bytes(const void *pointer) { return (uintptr_t)pointer % 16 == 0; }

static void update(void *state, const AdamW *adamw, AdamWConstants k, float *params, const float *grads) {
    const CudaOptim *optim = (const CudaOptim *)state;
    if (adamw->elems == 0)
        return;
    bool aligned = on_16_bytes(params) && on_16_bytes(grads) && on_16_bytes(optim->weights);
    assert(on_16_bytes(adamw->m) && on_16_bytes(adamw->v));
    unsigned blocks = (unsigned)((adamw->elems + ADAMW_CHUNK - 1) / ADAMW_CHUNK);
    LAUNCH(adamw_kernel, blocks, ADAMW_THREADS, 0, stream_of(optim), k, adamw->runs, adamw->run_count, adamw->elems,
           params, adamw->m, adamw->v, grads, optim->weights, optim->seed, adamw->step, aligned);
    CHECK_CUDA(optim->gpu, cudaGetLastError());
}

static void arrived(void *state, int64_t step, const float *params, Slice slice) {
    const CudaOptim *optim = (const CudaOptim *)state;
    if (!optim->weights)
        return;
    int64_t end = slice.start + slice.elems, groups = (end + 3) / 4 - slice.start / 4;
    bool aligned = on_16_bytes(params) && on_16_bytes(optim->weights);
    unsigned blocks = (unsigned)((groups + ADAMW_THREADS - 1) / ADAMW_THREADS);
    LAUNCH(round_weights_kernel, blocks, ADAMW_THREADS, 0, stream_of(optim), optim->weights, params, slice.start, end,
           optim->seed, step, aligned);
    CHECK_CUDA(optim->gpu, cudaGetLastError());
}

/* ---- the norm ---- */

static void norm_destroy(void *state, NormPlan *plan) {
    const CudaOptim *optim = (const CudaOptim *)state;
    CudaNorm *norm = (CudaNorm *)plan->device;
    if (norm) {
        memory_free(gpu_memory(optim->gpu), norm->starts);
        memory_free(gpu_memory(optim->gpu), norm->sums);
    }
    free(norm);
}

static size_t start_bytes_of(int64_t units) { return ((size_t)units + 1) * sizeof(int64_t); }
static size_t sum_bytes_of(int64_t units) { return ((size_t)units + 1) * sizeof(double); }
static size_t norm_bytes(int64_t units) { return start_bytes_of(units) + sum_bytes_of(units); }

static Status norm_create(void *state, NormPlan *plan) {
    const CudaOptim *optim = (const CudaOptim *)state;
    size_t start_bytes = start_bytes_of(plan->units);
    CudaNorm *norm = (CudaNorm *)calloc(1, sizeof *norm);
    plan->device = norm;
    if (norm) {
        norm->starts = (int64_t *)memory_alloc(gpu_memory(optim->gpu), start_bytes);
        norm->sums = (double *)memory_alloc(gpu_memory(optim->gpu), sum_bytes_of(plan->units));
    }
    if (!norm || !norm->starts || !norm->sums)
        return fault("out of memory on the GPU: the gradient norm has %lld units", (long long)plan->units);
    upload(state, norm->starts, plan->starts, start_bytes);
    return OK;
}

static void norm_partial(void *state, const NormPlan *plan, const float *grads, const Shard *shard, double *partial) {
    const CudaOptim *optim = (const CudaOptim *)state;
    const CudaNorm *norm = (const CudaNorm *)plan->device;
    int64_t done = 0;
    for (int i = 0; i < shard->count; i++) {
        NormUnits units = norm_slice_units(plan, shard->slices[i]);
        unsigned blocks = (unsigned)((units.count + NORM_UNITS - 1) / NORM_UNITS);
        if (blocks > 0)
            LAUNCH(norm_kernel, blocks, NORM_THREADS, 0, stream_of(optim), norm->sums + done, grads,
                   norm->starts + units.first, units.count);
        done += units.count;
    }
    CHECK_CUDA(optim->gpu, cudaGetLastError());
    CHECK_CUDA(optim->gpu, cudaMemcpyAsync(partial, norm->sums, (size_t)done * sizeof(double), cudaMemcpyDeviceToHost,
                                           stream_of(optim)));
    CHECK_CUDA(optim->gpu, cudaStreamSynchronize(stream_of(optim)));
}

/* ---- create and destroy ---- */

Status cuda_optim_create(CudaOptim **optim, Gpu *gpu, void *weights, uint64_t seed) {
    *optim = (CudaOptim *)calloc(1, sizeof **optim);
    if (!*optim)
        return fault("no memory for the optimizer's device");
    **optim = CudaOptim{
        .ops = {.name = "cuda",
                .state = *optim,
                .upload = upload,
                .norm_bytes = norm_bytes,
                .norm_create = norm_create,
                .norm_destroy = norm_destroy,
                .norm_partial = norm_partial,
                .update = update,
                .arrived = arrived},
        .gpu = gpu,
        .weights = (uint16_t *)weights,
        .seed = seed,
    };
    return OK;
}

void cuda_optim_set_weights(CudaOptim *optim, void *weights) { optim->weights = (uint16_t *)weights; }

void cuda_optim_destroy(CudaOptim *optim) { free(optim); }

const OptimOps *cuda_optim(CudaOptim *optim) { return &optim->ops; }
