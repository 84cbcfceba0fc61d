/* Kernels of the optimizer. Compiled with -fmad=false: their bits are the CPU's, from the same functions
 * (optim/passes.h) or in the same order. Both are bound by memory. */
#ifndef OPTIM_OPTIM_KERNELS_CUH
#define OPTIM_OPTIM_KERNELS_CUH

#include "base/cuda.cuh"

extern "C" {
#include "optim/passes.h"
}

/* ---- AdamW ---- */

constexpr int ADAMW_THREADS = 256, ADAMW_CHUNK = 4096; /* elements of the moments that a block updates */

typedef struct AdamWArrays {
    float *params;
    float *m, *v;
    const float *grads;
    uint16_t *weights; /* bf16, or NULL */
    uint64_t seed;
    int64_t step;
} AdamWArrays;

/* The run that holds place `at` of the moments. */
static __device__ int find_run(const AdamWRun *runs, int count, int64_t at) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (runs[middle].at <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* The weights of four parameters at a multiple of 4. */
static __device__ ushort4 round_four(float4 p, uint64_t seed, int64_t step, int64_t place) {
    uint64_t noise = rounding_noise(seed, step, place / 4);
    return {round_stochastic(p.x, noise), round_stochastic(p.y, noise >> 16), round_stochastic(p.z, noise >> 32),
            round_stochastic(p.w, noise >> 48)};
}

static __device__ uint16_t round_one(float p, uint64_t seed, int64_t step, int64_t place) {
    return round_stochastic(p, rounding_noise(seed, step, place / 4) >> place % 4 * 16);
}

static __device__ void update_one(const AdamWArrays &a, AdamWConstants k, float decay, int64_t at, int64_t place) {
    float p = a.params[place], m = a.m[at], v = a.v[at];
    adamw_element(k, decay, &p, &m, &v, a.grads[place]);
    a.params[place] = p, a.m[at] = m, a.v[at] = v;
    if (a.weights)
        a.weights[place] = round_one(p, a.seed, a.step, place);
}

/* Four at once: at and place are multiples of 4. */
static __device__ void update_four(const AdamWArrays &a, AdamWConstants k, float decay, int64_t at, int64_t place) {
    float4 p = *(float4 *)(a.params + place), m = *(float4 *)(a.m + at), v = *(float4 *)(a.v + at);
    float4 g = *(const float4 *)(a.grads + place);
    adamw_element(k, decay, &p.x, &m.x, &v.x, g.x);
    adamw_element(k, decay, &p.y, &m.y, &v.y, g.y);
    adamw_element(k, decay, &p.z, &m.z, &v.z, g.z);
    adamw_element(k, decay, &p.w, &m.w, &v.w, g.w);
    *(float4 *)(a.params + place) = p, *(float4 *)(a.m + at) = m, *(float4 *)(a.v + at) = v;
    if (a.weights)
        *(ushort4 *)(a.weights + place) = round_four(p, a.seed, a.step, place);
}

/* One update of the whole shard.
 *
 *   Launch  ADAMW_THREADS threads a block, a block for every ADAMW_CHUNK places of the moments
 *   Bytes   28 an element (params, m, v read and written, grads read), 30 with weights
 *   Bound   memory: four 16-byte loads of each thread are under way at a time
 *
 * `aligned`: all arrays begin on 16 bytes, so that whole groups of four places are moved at once in runs whose places
 * in the flat arrays and in the moments differ by a multiple of 4. Others, and the ends of runs, go one by one. */
static __global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_kernel(AdamWConstants k, const AdamWRun *runs, int run_count, int64_t elems, float *params, float *m,
                 float *v, const float *grads, uint16_t *weights, uint64_t seed, int64_t step, bool aligned) {
    const AdamWArrays arrays = {params, m, v, grads, weights, seed, step};
    int64_t first = (int64_t)blockIdx.x * ADAMW_CHUNK;
    int64_t last = first + ADAMW_CHUNK < elems ? first + ADAMW_CHUNK : elems;
    for (int r = find_run(runs, run_count, first); r < run_count && runs[r].at < last; r++) {
        const AdamWRun run = runs[r];
        int64_t begin = run.at > first ? run.at : first, end = run.at + run.elems < last ? run.at + run.elems : last;
        int64_t shift = run.start - run.at;
        float decay = run.decay ? k.decay : 0;
        for (int64_t group = begin / 4 + threadIdx.x; group * 4 < end; group += ADAMW_THREADS) {
            int64_t low = group * 4 > begin ? group * 4 : begin, high = group * 4 + 4 < end ? group * 4 + 4 : end;
            if (aligned && shift % 4 == 0 && high - low == 4)
                update_four(arrays, k, decay, low, low + shift);
            else
                for (int64_t at = low; at < high; at++)
                    update_one(arrays, k, decay, at, at + shift);
        }
    }
}

/* weights[start .. end - 1] of the parameters at the same places.
 *
 *   Launch  ADAMW_THREADS threads a block, a thread for every group of four places
 *   Bytes   6 an element
 *   Bound   memory
 *
 * `aligned`: both arrays begin on 16 bytes. */
static __global__ void __launch_bounds__(ADAMW_THREADS)
    round_weights_kernel(uint16_t *weights, const float *params, int64_t start, int64_t end, uint64_t seed,
                         int64_t step, bool aligned) {
    int64_t group = start / 4 + (int64_t)blockIdx.x * ADAMW_THREADS + threadIdx.x;
    int64_t low = group * 4 > start ? group * 4 : start, high = group * 4 + 4 < end ? group * 4 + 4 : end;
    if (aligned && high - low == 4)
        *(ushort4 *)(weights + low) = round_four(*(const float4 *)(params + low), seed, step, low);
    else
        for (int64_t place = low; place < high; place++)
            weights[place] = round_one(params[place], seed, step, place);
}

/* ---- the norm ---- */

constexpr int NORM_THREADS = 256, NORM_UNITS = NORM_THREADS / NORM_LANES; /* units of a block */

/* sums[i] = the sum of the squares of unit i, for i < count; unit i is elements starts[i] .. starts[i + 1] - 1.
 *
 *   Launch  NORM_THREADS threads a block, a block for NORM_UNITS units: a thread for each partial sum of a unit
 *   Bytes   4 an element, read
 *   Bound   memory; a thread adds in order, one number after another, and loads ahead of that */
static __global__ void __launch_bounds__(NORM_THREADS)
    norm_kernel(double *sums, const float *grads, const int64_t *starts, int64_t count) {
    int64_t unit = (int64_t)blockIdx.x * NORM_UNITS + threadIdx.x / NORM_LANES;
    int lane = threadIdx.x % NORM_LANES;
    if (unit >= count)
        return;
    unsigned mask = ((1u << NORM_LANES) - 1) << (threadIdx.x % 32 - lane);
    double sum = 0;
    int64_t end = starts[unit + 1];
#pragma unroll 8
    for (int64_t i = starts[unit] + lane; i < end; i += NORM_LANES)
        sum += (double)grads[i] * (double)grads[i];
    for (int lanes = NORM_LANES / 2; lanes > 0; lanes /= 2)
        sum += __shfl_down_sync(mask, sum, lanes, NORM_LANES);
    if (lane == 0)
        sums[unit] = sum;
}

#endif
