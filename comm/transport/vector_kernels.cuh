/* The vector operations of collectives on a GPU: element by element, a product rounded before it is added, so the CPU's
 * bits. Each reads and writes every element once: the rate of memory. 256 threads, four elements each. */
#ifndef COMM_TRANSPORT_VECTOR_KERNELS_CUH
#define COMM_TRANSPORT_VECTOR_KERNELS_CUH

#include "base/cuda.cuh"

#include <cstdint>

enum { VECTOR_THREADS = 256, VECTOR_ELEMS = 4 };

static inline unsigned vector_blocks(int64_t elems) {
    return (unsigned)((elems + VECTOR_THREADS * VECTOR_ELEMS - 1) / (VECTOR_THREADS * VECTOR_ELEMS));
}

struct Scale { /* a = s a */
    float s;
    __device__ float operator()(float a, float) const { return __fmul_rn(s, a); }
};
struct Add { /* a = a + b */
    __device__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};
struct ScaleAdd { /* a = b + s a */
    float s;
    __device__ float operator()(float a, float b) const { return __fadd_rn(b, __fmul_rn(s, a)); }
};
struct SetScaled { /* a = s b */
    float s;
    __device__ float operator()(float, float b) const { return __fmul_rn(s, b); }
};
struct AddScaled { /* a = a + s b */
    float s;
    __device__ float operator()(float a, float b) const { return __fadd_rn(a, __fmul_rn(s, b)); }
};

/* a[i] = f(a[i], b[i]); b may be a. Parts of the flat gradient begin anywhere, so elements go one by one, neighbours side
 * by side. */
template <class F> __global__ void __launch_bounds__(VECTOR_THREADS) vector_kernel(F f, float *a, const float *b, int64_t elems) {
    int64_t first = (int64_t)blockIdx.x * VECTOR_THREADS * VECTOR_ELEMS + threadIdx.x;
    for (int i = 0; i < VECTOR_ELEMS; i++) {
        int64_t at = first + (int64_t)i * VECTOR_THREADS;
        if (at < elems)
            a[at] = f(a[at], b[at]);
    }
}

#endif
