#include "base/cuda.cuh"

extern "C" {
#include "base/gpu_lane.h"
}

#include <cstdlib>

struct GpuLane {
    Gpu *gpu;
    cudaStream_t stream;
    cudaEvent_t marks[GPU_LANE_MARKS];
};

Status gpu_lane_create(GpuLane **result, Gpu *gpu) {
    GpuLane *lane = *result = (GpuLane *)calloc(1, sizeof *lane);
    if (!lane)
        return fault("no memory for a lane of the GPU");
    lane->gpu = gpu;
    cudaError_t error = cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking);
    for (int i = 0; i < GPU_LANE_MARKS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&lane->marks[i], cudaEventDisableTiming);
    return error == cudaSuccess ? OK : fault("the GPU gives no lane: %s", cudaGetErrorString(error));
}

void gpu_lane_destroy(GpuLane *lane) {
    if (!lane)
        return;
    if (lane->stream) {
        cudaStreamSynchronize(lane->stream);
        cudaStreamDestroy(lane->stream);
    }
    for (int i = 0; i < GPU_LANE_MARKS; i++)
        if (lane->marks[i])
            cudaEventDestroy(lane->marks[i]);
    free(lane);
}

void *gpu_lane_stream(const GpuLane *lane) { return lane->stream; }

void gpu_lane_mark(GpuLane *lane, int mark) {
    CHECK_CUDA(lane->gpu, cudaEventRecord(lane->marks[mark % GPU_LANE_MARKS], (cudaStream_t)gpu_stream(lane->gpu)));
}

void gpu_lane_follow(GpuLane *lane, int mark) {
    CHECK_CUDA(lane->gpu, cudaStreamWaitEvent(lane->stream, lane->marks[mark % GPU_LANE_MARKS], 0));
}

typedef struct Call {
    Gpu *gpu;
    GpuDoneFn *fn;
    void *user;
    int argument;
} Call;

static void CUDART_CB run_call(void *argument) {
    Call *call = (Call *)argument;
    gpu_call_back(call->gpu, call->fn, call->user, call->argument);
    free(call);
}

void gpu_lane_call(GpuLane *lane, GpuDoneFn *fn, void *user, int argument) {
    Call *call = (Call *)malloc(sizeof *call);
    if (!call) {
        gpu_fault(lane->gpu, "a call in a lane", "no memory");
        return;
    }
    *call = (Call){lane->gpu, fn, user, argument};
    cudaError_t error = cudaLaunchHostFunc(lane->stream, run_call, call);
    if (error == cudaSuccess)
        return;
    free(call);
    gpu_fault(lane->gpu, "cudaLaunchHostFunc", cudaGetErrorString(error));
}

Status gpu_lane_test(GpuLane *lane, bool *empty) {
    cudaError_t error = cudaStreamQuery(lane->stream);
    *empty = error == cudaSuccess;
    if (error == cudaSuccess || error == cudaErrorNotReady)
        return OK;
    gpu_fault(lane->gpu, "cudaStreamQuery", cudaGetErrorString(error));
    return gpu_finish(lane->gpu);
}
