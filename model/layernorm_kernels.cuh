/* Kernels of LayerNorm. Both are bound by memory: a row is read again after its sums, but from L1. */
#ifndef MODEL_LAYERNORM_KERNELS_CUH
#define MODEL_LAYERNORM_KERNELS_CUH

#include "model/pack_kernels.cuh"

enum { NORM_WARPS = 4 };

/* Warp: a row. Bytes: x and y once. */
template <class A, int N>
__global__ void __launch_bounds__(WARP * NORM_WARPS)
    layernorm_forward_kernel(A *y, float *mean, float *rstd, const A *x, const A *w, const A *b, int rows, int C) {
    const float epsilon = 1e-5f;
    int lane = (int)threadIdx.x % WARP;
    int64_t row = (int64_t)blockIdx.x * NORM_WARPS + threadIdx.x / WARP;
    if (row >= rows)
        return;
    float sum = 0, square = 0;
    for (int c = lane * N; c < C; c += WARP * N) {
        Floats<N> in = load<A, N>(x + row * C + c);
        for (int i = 0; i < N; i++)
            sum += in.at[i];
    }
    float middle = warp_sum(sum) / (float)C;
    for (int c = lane * N; c < C; c += WARP * N) {
        Floats<N> in = load<A, N>(x + row * C + c);
        for (int i = 0; i < N; i++)
            square += (in.at[i] - middle) * (in.at[i] - middle);
    }
    float scale = rsqrtf(warp_sum(square) / (float)C + epsilon);
    for (int c = lane * N; c < C; c += WARP * N) {
        Floats<N> out = load<A, N>(x + row * C + c), gain = load<A, N>(w + c), bias = load<A, N>(b + c);
        for (int i = 0; i < N; i++)
            out.at[i] = (out.at[i] - middle) * scale * gain.at[i] + bias.at[i];
        store<A, N>(y + row * C + c, out);
    }
    if (lane == 0) {
        mean[row] = middle;
        rstd[row] = scale;
    }
}

/* Columns c.. of one row: adds dy xhat and dy to the column sums, g and g xhat to those of the row. */
template <class A, int N>
__device__ inline void layernorm_sums(float *dw, float *db, float *sum, float *product, const A *dy, const A *x,
                                      const A *w, float mean, float rstd, int c) {
    Floats<N> in = load<A, N>(x + c), grad = load<A, N>(dy + c), gain = load<A, N>(w + c);
    Floats<N> dw_sum = load<float, N>(dw + c), db_sum = load<float, N>(db + c);
    for (int i = 0; i < N; i++) {
        float normal = (in.at[i] - mean) * rstd, g = grad.at[i] * gain.at[i];
        *sum += g;
        *product += g * normal;
        dw_sum.at[i] += grad.at[i] * normal;
        db_sum.at[i] += grad.at[i];
    }
    store<float, N>(dw + c, dw_sum);
    store<float, N>(db + c, db_sum);
}

/* Columns c.. of one row: dx from the row's means of g and g xhat. */
template <class A, int N>
__device__ inline void layernorm_dx(A *dx, const A *dy, const A *x, const A *w, float mean, float rstd, float sum,
                                    float product, int c, bool residual) {
    Floats<N> in = load<A, N>(x + c), grad = load<A, N>(dy + c), gain = load<A, N>(w + c), out = {};
    if (residual)
        out = load<A, N>(dx + c);
    for (int i = 0; i < N; i++) {
        float normal = (in.at[i] - mean) * rstd;
        out.at[i] += rstd * (grad.at[i] * gain.at[i] - sum - normal * product);
    }
    store<A, N>(dx + c, out);
}

/* dx of the part's rows, one row after the other, and partial [parts][2C]: dw and db over these rows. A thread has the
 * same columns in every row, so their sums are its own; they lie in shared memory, or, with shared false because C is
 * too large for it, in partial itself.
 * Grid: parts; block: threads for the columns, up to 256; shared: 2C floats. Bytes: dy and x once, dx once or twice. */
template <class A, int N>
__global__ void __launch_bounds__(256)
    layernorm_backward_kernel(A *dx, float *partial, const A *dy, const A *x, const float *mean, const float *rstd,
                              const A *w, int rows, int C, int rows_each, bool residual, bool shared) {
    DYN_SHARED(float, columns);
    float *out = partial + (int64_t)blockIdx.x * 2 * C, *dw = shared ? columns : out, *db = dw + C;
    int start = (int)threadIdx.x * N, step = (int)blockDim.x * N;
    for (int c = start; c < C; c += step) {
        store<float, N>(dw + c, {});
        store<float, N>(db + c, {});
    }
    int64_t first = (int64_t)blockIdx.x * rows_each;
    int64_t end = first + rows_each < rows ? first + rows_each : rows;
    for (int64_t row = first; row < end; row++) {
        float sum = 0, product = 0, middle = mean[row], scale = rstd[row];
        for (int c = start; c < C; c += step)
            layernorm_sums<A, N>(dw, db, &sum, &product, dy + row * C, x + row * C, w, middle, scale, c);
        sum = block_sum(sum) / (float)C;
        product = block_sum(product) / (float)C;
        for (int c = start; c < C; c += step)
            layernorm_dx<A, N>(dx + row * C, dy + row * C, x + row * C, w, middle, scale, sum, product, c, residual);
    }
    for (int c = start; c < C && shared; c += step) {
        store<float, N>(out + c, load<float, N>(dw + c));
        store<float, N>(out + C + c, load<float, N>(db + c));
    }
}

#endif
