/* Kernels of ops_cuda.cu: the weights' copy, and the sum of the losses. */
#ifndef MODEL_OPS_CUDA_KERNELS_CUH
#define MODEL_OPS_CUDA_KERNELS_CUH

#include "model/pack_kernels.cuh"

enum { ROUND_PACK = 8, SUM_THREADS = 512 };

/* out = in rounded to nearest.   Thread: N elements, the last one those that are left. Bytes: 6 for each element. */
template <int N> __global__ void __launch_bounds__(256) round_kernel(bf16 *out, const float *in, int64_t elems) {
    int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (at + N <= elems)
        store<bf16, N>(out + at, load<float, N>(in + at));
    else
        for (int64_t i = at; i < elems; i++)
            out[i] = rounded<bf16>(in[i]);
}

/* *sum = values[0] + ... in f64: of each thread's values, side by side, in order, then over the threads in order. */
static __global__ void __launch_bounds__(SUM_THREADS) sum_kernel(double *sum, const float *values, int count) {
    __shared__ double sums[SUM_THREADS];
    int each = (count + SUM_THREADS - 1) / SUM_THREADS, first = (int)threadIdx.x * each;
    int end = count - first < each ? count : first + each;
    double own = 0;
    for (int i = first; i < end; i++)
        own += (double)values[i];
    sums[threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.x > 0)
        return;
    for (int i = 1; i < SUM_THREADS; i++)
        own += sums[i];
    *sum = own;
}

#endif
