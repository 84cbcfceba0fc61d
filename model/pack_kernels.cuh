/* What kernels share: elements in packs of up to 16 bytes and as f32, sums over warps and blocks, GELU. */
#ifndef MODEL_PACK_KERNELS_CUH
#define MODEL_PACK_KERNELS_CUH

#include "base/cuda.cuh"

#include <float.h>
#include <stdint.h>

constexpr int WARP = 32;
static const unsigned whole_warp = 0xffffffffu;

/* ---- elements ---- */

__device__ inline float value_of(float x) { return x; }
__device__ inline float value_of(bf16 x) { return __bfloat162float(x); }

template <class A> __device__ inline A rounded(float x);
template <> __device__ inline float rounded<float>(float x) { return x; }
template <> __device__ inline bf16 rounded<bf16>(float x) { return __float2bfloat16(x); }

/* N elements side by side; one access of memory where they are 16 bytes or fewer. */
template <class A, int N> struct alignas(sizeof(A) * N < 16 ? sizeof(A) * N : 16) Pack {
    A at[N];
};

template <int N> struct Floats {
    float at[N];
};

template <class A, int N> __device__ inline Floats<N> load(const A *from) {
    Pack<A, N> pack = *reinterpret_cast<const Pack<A, N> *>(from);
    Floats<N> values;
    for (int i = 0; i < N; i++)
        values.at[i] = value_of(pack.at[i]);
    return values;
}

template <class A, int N> __device__ inline void store(A *to, const Floats<N> &values) {
    Pack<A, N> pack;
    for (int i = 0; i < N; i++)
        pack.at[i] = rounded<A>(values.at[i]);
    *reinterpret_cast<Pack<A, N> *>(to) = pack;
}

/* ---- sums ---- */

__device__ inline float larger(float a, float b) { return a > b ? a : b; }

/* The same on every lane; a fixed tree. */
__device__ inline float warp_sum(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(whole_warp, x, offset);
    return x;
}

__device__ inline float warp_max(float x) {
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x = larger(x, __shfl_xor_sync(whole_warp, x, offset));
    return x;
}

/* The same on every thread of a one-dimensional block of whole warps, all of which call. */
__device__ inline float block_sum(float x) {
    __shared__ float sums[WARP];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads(); /* the last call's sums have been read */
    if (lane == 0)
        sums[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? sums[lane] : 0);
}

__device__ inline float block_max(float x) {
    __shared__ float largest[WARP];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0)
        largest[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? largest[lane] : -FLT_MAX);
}

/* ---- softmax ---- */

/* The maximum so far, and the sum of exp(x - max). A NaN leaves the maximum alone and makes the sum NaN. Starts at
 * -FLT_MAX rather than -inf, so that two empty ones can be put together. */
typedef struct SoftmaxSum {
    float max, sum;
} SoftmaxSum;

/* With the first `count` of N values more. */
template <int N> __device__ inline void softmax_add(SoftmaxSum *sofar, const Floats<N> &values, int count) {
    float max = sofar->max, sum = 0;
    for (int i = 0; i < N; i++)
        max = i < count ? larger(values.at[i], max) : max;
    for (int i = 0; i < N; i++)
        sum += i < count ? expf(values.at[i] - max) : 0;
    sofar->sum = sofar->sum * expf(sofar->max - max) + sum;
    sofar->max = max;
}

/* Of the whole warp, on every lane. */
__device__ inline SoftmaxSum softmax_warp(SoftmaxSum own) {
    float max = warp_max(own.max);
    return {max, warp_sum(own.sum * expf(own.max - max))};
}

/* Of the whole block, on every thread. */
__device__ inline SoftmaxSum softmax_block(SoftmaxSum own) {
    float max = block_max(own.max);
    return {max, block_sum(own.sum * expf(own.max - max))};
}

/* ---- GELU, tanh form: x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3) ---- */

__device__ inline float gelu_sigmoid(float x) {
    const float two_root = 1.5957691216f; /* 2 sqrt(2/pi) */
    return 1.0f / (1.0f + expf(-two_root * (x + 0.044715f * x * x * x)));
}

__device__ inline float gelu(float x) { return x * gelu_sigmoid(x); }

__device__ inline float gelu_slope(float x) {
    const float two_root = 1.5957691216f;
    float s = gelu_sigmoid(x);
    return s + x * s * (1.0f - s) * two_root * (1.0f + 3.0f * 0.044715f * x * x);
}

#endif
