#include "base/cuda.cuh"

#include "tests/cuda/sample_kernels.h"

#include <string.h>

/* ---- without a fault: a block's elements in reverse, and sums ---- */

static __global__ void reverse(float *out, const float *in) {
    __shared__ float block[SAMPLE_THREADS];
    int i = threadIdx.x, first = blockIdx.x * SAMPLE_THREADS;
    block[i] = in[first + i];
    __syncthreads();
    out[first + i] = block[SAMPLE_THREADS - 1 - i];
}

static __global__ void block_sum(float *out, const float *in) {
    DYN_SHARED(float, warps);
    int i = blockIdx.x * SAMPLE_THREADS + threadIdx.x, lane = threadIdx.x % warpSize;
    float sum = in[i];
    for (int lanes = warpSize / 2; lanes > 0; lanes /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (lane == 0)
        warps[threadIdx.x / warpSize] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < SAMPLE_THREADS / warpSize; w++)
        sum += warps[w];
    out[i] = sum;
}

/* Each primitive once; the sum of what they should give is known. */
static __global__ void primitives(float *out, const float *in) {
    int lane = threadIdx.x % warpSize, i = blockIdx.x * SAMPLE_THREADS + threadIdx.x;
    unsigned all = 0xffffffffu;
    bool ok = __ballot_sync(all, lane & 1) == 0xaaaaaaaau;
    ok = ok && __any_sync(all, lane == 7) && !__all_sync(all, lane == 7) && __all_sync(all, lane < 32);
    ok = ok && __shfl_sync(all, lane, 5) == 5 && __shfl_sync(all, lane, 1, 8) == (lane & ~7) + 1;
    ok = ok && __shfl_down_sync(all, lane, 3) == (lane < 29 ? lane + 3 : lane);
    ok = ok && __shfl_up_sync(all, lane, 3) == (lane < 3 ? lane : lane - 3);
    ok = ok && __shfl_xor_sync(all, (double)lane, 16) == (double)(lane ^ 16);
    if (lane < 8) {
        ok = ok && __shfl_xor_sync(0xffu, lane, 1) == (lane ^ 1);
        __syncwarp(0xffu);
    }
    ok = ok && __syncthreads_count(lane == 0) == SAMPLE_THREADS / warpSize;
    ok = ok && __syncthreads_or(threadIdx.x == 17) && !__syncthreads_and(threadIdx.x == 17) && __syncthreads_and(1);
    __shared__ unsigned counter, largest, smallest, bits;
    __shared__ unsigned long long swapped;
    if (threadIdx.x == 0) {
        counter = largest = bits = 0;
        smallest = ~0u;
        swapped = 0;
    }
    __syncthreads();
    atomicAdd(&counter, 2);
    atomicMax(&largest, threadIdx.x);
    atomicMin(&smallest, threadIdx.x + 3);
    atomicOr(&bits, 1u << lane);
    atomicCAS(&swapped, 0ull, 1ull + threadIdx.x);
    __syncthreads();
    ok = ok && counter == 2 * SAMPLE_THREADS && largest == SAMPLE_THREADS - 1 && smallest == 3 && bits == all;
    ok = ok && swapped >= 1 && swapped <= SAMPLE_THREADS;
    out[i] = ok ? in[i] : -1;
}

/* ---- with one ---- */

static __global__ void missing_barrier(float *out, const float *in) {
    __shared__ float block[SAMPLE_THREADS];
    int i = threadIdx.x, first = blockIdx.x * SAMPLE_THREADS;
    block[i] = in[first + i];
    out[first + i] = block[SAMPLE_THREADS - 1 - i];
}

/* Each lane takes it for granted that the lane before it in the warp is just as far: right where lanes run in order. */
static __global__ void lockstep(float *out, const float *in) {
    __shared__ float block[SAMPLE_THREADS];
    int i = threadIdx.x, first = blockIdx.x * SAMPLE_THREADS;
    block[i] = in[first + i];
    out[first + i] = i % warpSize ? block[i - 1] : block[i];
}

static __global__ void unwritten_static(float *out, const float *) {
    __shared__ float block[SAMPLE_THREADS];
    if (threadIdx.x != 5)
        block[threadIdx.x] = 1;
    __syncthreads();
    out[blockIdx.x * SAMPLE_THREADS + threadIdx.x] = block[threadIdx.x];
}

static __global__ void unwritten_dynamic(float *out, const float *) {
    DYN_SHARED(float, block);
    if (threadIdx.x != 5)
        block[threadIdx.x] = 1;
    __syncthreads();
    out[blockIdx.x * SAMPLE_THREADS + threadIdx.x] = block[threadIdx.x];
}

static __global__ void divergent(float *out, const float *in) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        out[threadIdx.x] = __shfl_sync(0xffffffffu, in[threadIdx.x], threadIdx.x == 40 ? 0 : 1);
    if (threadIdx.x >= 64)
        __syncthreads();
}

static __global__ void barrier_in_warp(float *out, const float *in) {
    if (threadIdx.x % 2)
        __syncthreads();
    out[threadIdx.x] = __shfl_sync(0xffffffffu, in[threadIdx.x], 0);
}

static __global__ void dishonest_mask(float *out, const float *in) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_sync(0xffffffffu, in[threadIdx.x], 0);
}

static __global__ void outside_mask(float *out, const float *in) {
    out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], 0);
}

static __global__ void reads_outside_mask(float *out, const float *in) {
    if (threadIdx.x < 16)
        out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], 20);
}

static __global__ void beyond_global(float *out, const float *in) {
    int i = blockIdx.x * SAMPLE_THREADS + threadIdx.x;
    out[i + 1] = in[i];
}

static __global__ void beyond_dynamic(float *out, const float *in) {
    DYN_SHARED(float, block);
    block[threadIdx.x + 1] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = block[threadIdx.x];
}

/* ---- running them ---- */

static int launch(const char *name, float *out, const float *in, const float *host) {
    const size_t bytes = SAMPLE_THREADS * sizeof(float);
#define TRY_KERNEL(kernel, shared_bytes)                                                \
    if (strcmp(name, #kernel) == 0) {                                                   \
        LAUNCH(kernel, SAMPLE_BLOCKS, SAMPLE_THREADS, shared_bytes, nullptr, out, in);  \
        return 1;                                                                       \
    }
    TRY_KERNEL(reverse, 0)
    TRY_KERNEL(block_sum, bytes / 32)
    TRY_KERNEL(primitives, 0)
    TRY_KERNEL(missing_barrier, 0)
    TRY_KERNEL(lockstep, 0)
    TRY_KERNEL(unwritten_static, 0)
    TRY_KERNEL(unwritten_dynamic, bytes)
    TRY_KERNEL(divergent, 0)
    TRY_KERNEL(barrier_in_warp, 0)
    TRY_KERNEL(dishonest_mask, 0)
    TRY_KERNEL(outside_mask, 0)
    TRY_KERNEL(reads_outside_mask, 0)
    TRY_KERNEL(beyond_global, 0)
    TRY_KERNEL(beyond_dynamic, bytes)
    if (strcmp(name, "large_block") == 0)
        LAUNCH(reverse, 1, 1025, 0, nullptr, out, in);
    else if (strcmp(name, "large_shared") == 0)
        LAUNCH(block_sum, 1, SAMPLE_THREADS, 64 << 10, nullptr, out, in);
    else if (strcmp(name, "host_pointer") == 0)
        LAUNCH(reverse, SAMPLE_BLOCKS, SAMPLE_THREADS, 0, nullptr, out, host);
    else
        return 0;
    return 1;
}

int sample_kernel_run(const char *name, float *out, const float *in) {
    const size_t bytes = SAMPLE_ELEMS * sizeof(float);
    float *device_out, *device_in;
    cudaMalloc((void **)&device_out, bytes);
    cudaMalloc((void **)&device_in, bytes);
    cudaMemcpy(device_in, in, bytes, cudaMemcpyHostToDevice);
    int known = launch(name, device_out, device_in, in);
    cudaMemcpy(out, device_out, bytes, cudaMemcpyDeviceToHost);
    cudaFree(device_in);
    cudaFree(device_out);
    return known;
}

void sample_kernel_reverse(void *stream, float *out, const float *in) {
    LAUNCH(reverse, SAMPLE_BLOCKS, SAMPLE_THREADS, 0, (cudaStream_t)stream, out, in);
}
