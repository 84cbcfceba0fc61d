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

/* ---- rows of a matrix: a block per row, the rate of memory for rows of some hundred channels ---- */

enum { ROW_THREADS = 128 };

/* The matrix' rows become, or grow by, values f32[][channels]. Places differ, so no two blocks write to one row. */
template <bool ADD>
__global__ void __launch_bounds__(ROW_THREADS) rows_kernel(const int *places, int channels, float *matrix, const float *values) {
    float *row = matrix + (int64_t)places[blockIdx.x] * channels;
    const float *from = values + (int64_t)blockIdx.x * channels;
    for (int c = (int)threadIdx.x; c < channels; c += ROW_THREADS)
        row[c] = ADD ? __fadd_rn(row[c], from[c]) : from[c];
}

/* Each thread looks its element up among the slices (start, elems; rising, disjoint): log2 of their number more reads. */
__global__ void __launch_bounds__(ROW_THREADS) take_rows_kernel(const int *places, int channels, int64_t offset, const float *matrix,
                                 const int64_t *slices, int slice_count, float *values) {
    int64_t at = (int64_t)places[blockIdx.x] * channels;
    for (int c = (int)threadIdx.x; c < channels; c += ROW_THREADS) {
        int64_t place = offset + at + c;
        int low = 0, high = slice_count; /* the first slice that ends behind place */
        while (low < high) {
            int middle = (low + high) / 2;
            if (slices[2 * middle] + slices[2 * middle + 1] <= place)
                low = middle + 1;
            else
                high = middle;
        }
        bool ours = low < slice_count && slices[2 * low] <= place;
        values[(int64_t)blockIdx.x * channels + c] = ours ? matrix[at + c] : -0.0f;
    }
}

#endif
