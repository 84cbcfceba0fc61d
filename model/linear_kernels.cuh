/* Kernels of linear layers, for what their products leave over. All are bound by memory and read and write each
 * element once. */
#ifndef MODEL_LINEAR_KERNELS_CUH
#define MODEL_LINEAR_KERNELS_CUH

#include "model/pack_kernels.cuh"

/* y += bias where there is one, act = GELU(y) where that is wanted.
 * Block: a row. Bytes: 2 to 3 elements for each of y. */
template <class A, int N>
__global__ void __launch_bounds__(256) finish_linear_kernel(A *y, A *act, const A *bias, int OC) {
    int64_t row = (int64_t)blockIdx.x * OC;
    for (int o = (int)threadIdx.x * N; o < OC; o += (int)blockDim.x * N) {
        Floats<N> values = load<A, N>(y + row + o);
        if (bias) {
            Floats<N> more = load<A, N>(bias + o);
            for (int i = 0; i < N; i++)
                values.at[i] += more.at[i];
            store<A, N>(y + row + o, values);
        }
        if (!act)
            continue;
        for (int i = 0; i < N; i++)
            values.at[i] = gelu(values.at[i]);
        store<A, N>(act + row + o, values);
    }
}

/* dx *= GELU'(pre).   Thread: N elements. Bytes: 3 elements each. */
template <class A, int N>
__global__ void __launch_bounds__(256) slope_kernel(A *dx, const A *pre, int64_t elems) {
    int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    if (at >= elems)
        return;
    Floats<N> values = load<A, N>(dx + at), before = load<A, N>(pre + at);
    for (int i = 0; i < N; i++)
        values.at[i] *= gelu_slope(before.at[i]);
    store<A, N>(dx + at, values);
}

enum { COLUMN_LINES = 8 }; /* rows at a time: blockDim.y of the kernel below */

/* partial[part][o] = sum of dy[row][o] over the part's rows: each thread every eighth row, then these eight in order.
 * Grid: (columns / 32N, parts), block (32, 8). Bytes: dy once. */
template <class A, int N>
__global__ void __launch_bounds__(WARP * COLUMN_LINES) column_sums_kernel(float *partial, const A *dy, int rows, int OC,
                                                                         int rows_each) {
    __shared__ float lines[COLUMN_LINES][WARP * N];
    int x = (int)threadIdx.x, y = (int)threadIdx.y, o = ((int)blockIdx.x * WARP + x) * N;
    int64_t first = (int64_t)blockIdx.y * rows_each;
    int64_t end = first + rows_each < rows ? first + rows_each : rows;
    Floats<N> sum = {};
    if (o < OC)
        for (int64_t row = first + y; row < end; row += COLUMN_LINES) {
            Floats<N> values = load<A, N>(dy + row * OC + o);
            for (int i = 0; i < N; i++)
                sum.at[i] += values.at[i];
        }
    for (int i = 0; i < N; i++)
        lines[y][i * WARP + x] = sum.at[i]; /* lanes side by side: no two in one bank */
    __syncthreads();
    for (int i = y; i < N && o < OC; i += COLUMN_LINES) {
        float total = 0;
        for (int line = 0; line < COLUMN_LINES; line++)
            total += lines[line][i * WARP + x];
        partial[(int64_t)blockIdx.y * OC + o + i] = total;
    }
}

enum { PART_LINES = 32 };

/* Block (32, 32): 32 columns; each thread every 32nd part, then these 32 in order. */
static __global__ void __launch_bounds__(WARP * PART_LINES)
    sum_parts_kernel(float *first, float *second, int split, const float *partial, int parts, int width,
                     bool accumulate) {
    __shared__ float lines[PART_LINES][WARP];
    int x = (int)threadIdx.x, y = (int)threadIdx.y, c = (int)blockIdx.x * WARP + x;
    float sum = 0;
    if (c < width)
        for (int part = y; part < parts; part += PART_LINES)
            sum += partial[(int64_t)part * width + c];
    lines[y][x] = sum;
    __syncthreads();
    if (y > 0 || c >= width)
        return;
    float *out = c < split ? first + c : second + (c - split);
    float total = accumulate ? *out : 0;
    for (int line = 0; line < PART_LINES; line++)
        total += lines[line][x];
    *out = total;
}

#endif
