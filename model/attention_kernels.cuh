/* Kernels of attention's own path; see ops_cuda_attention.cu. A row of scores lies in `stride` floats, a multiple of 8,
 * and gives way to a row of activations that begins where it began. A warp takes a row, PIECE elements per lane. */
#ifndef MODEL_ATTENTION_KERNELS_CUH
#define MODEL_ATTENTION_KERNELS_CUH

#include "model/pack_kernels.cuh"

enum { PIECE = 4, WARP_PIECE = WARP * PIECE, ROW_WARPS = 4, SCORE_WARPS = 4, SCORE_KEYS = 8, OUTPUT_LINES = 8 };

/* A tile of scores: `heads` heads from `head` on of one sequence, `queries` queries from `first` on, each against the
 * keys up to the tile's last query. */
typedef struct ScoreTile {
    int head, heads, first, queries;
    int64_t stride; /* of a row, in floats */
} ScoreTile;

/* A row of scores as its warp sees it. */
typedef struct ScoreRow {
    int64_t index; /* in the tile */
    int head, query, keys, visible;
} ScoreRow;

/* False: there is none for this warp. */
__device__ inline bool row_of_warp(ScoreRow *row, const ScoreTile &tile) {
    row->index = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
    row->head = tile.head + (int)(row->index / tile.queries);
    row->query = tile.first + (int)(row->index % tile.queries);
    row->keys = tile.first + tile.queries;
    row->visible = row->query + 1;
    return row->index < (int64_t)tile.heads * tile.queries;
}

/* Softmax of each row over the keys up to its query, 0 for the others; lse, of the sequence, [NH][T].
 * A row of P is written over the row of scores it comes from: what a lane writes lies where it or, before the last
 * barrier, another one has read.
 * Warp: a row. Bytes: scores twice (once from memory), P once. */
template <class A>
__global__ void __launch_bounds__(WARP * ROW_WARPS)
    softmax_rows_kernel(float *scores, float *lse, ScoreTile tile, int T) {
    int lane = (int)threadIdx.x % WARP;
    ScoreRow at;
    if (!row_of_warp(&at, tile))
        return;
    float *row = scores + at.index * tile.stride;
    SoftmaxSum sofar = {-FLT_MAX, 0};
    for (int key = lane * PIECE; key < at.visible; key += WARP_PIECE)
        softmax_add<PIECE>(&sofar, load<float, PIECE>(row + key), at.visible - key);
    sofar = softmax_warp(sofar);
    if (lse && lane == 0)
        lse[(int64_t)at.head * T + at.query] = sofar.max + logf(sofar.sum);
    float each = 1 / sofar.sum;
    for (int start = 0; start < at.keys; start += WARP_PIECE) {
        int key = start + lane * PIECE;
        Floats<PIECE> p = {};
        if (key < at.visible)
            p = load<float, PIECE>(row + key);
        __syncwarp();
        for (int i = 0; i < PIECE; i++)
            p.at[i] = key + i < at.visible ? expf(p.at[i] - sofar.max) * each : 0;
        if (key < at.keys)
            store<A, PIECE>((A *)row + key, p);
    }
}

/* The dot product of two heads' channels, by a warp. */
template <class A> __device__ inline float head_dot(const A *a, const A *b, int HS) {
    float sum = 0;
    for (int d = (int)threadIdx.x % WARP; d < HS; d += WARP)
        sum += value_of(a[d]) * value_of(b[d]);
    return warp_sum(sum);
}

/* Scores become P = exp(S - lse), and dP becomes dS = scale P (dP - sum of dy y); dy and y of the sequence, [T][C].
 * Warp: a row. Bytes: scores and dP once, P and dS once. */
template <class A>
__global__ void __launch_bounds__(WARP * ROW_WARPS)
    softmax_rows_backward_kernel(float *scores, float *dscores, const float *lse, const A *dy, const A *y,
                                 ScoreTile tile, int T, int C, int HS, float scale) {
    ScoreRow at;
    if (!row_of_warp(&at, tile))
        return;
    float *row = scores + at.index * tile.stride, *drow = dscores + at.index * tile.stride;
    int64_t channel = (int64_t)at.query * C + (int64_t)at.head * HS;
    float product = head_dot(dy + channel, y + channel, HS), norm = lse[(int64_t)at.head * T + at.query];
    for (int start = 0; start < at.keys; start += WARP_PIECE) {
        int key = start + (int)threadIdx.x % WARP * PIECE;
        Floats<PIECE> p = {}, ds = {};
        if (key < at.visible) {
            p = load<float, PIECE>(row + key);
            ds = load<float, PIECE>(drow + key);
        }
        __syncwarp();
        for (int i = 0; i < PIECE; i++) {
            p.at[i] = key + i < at.visible ? expf(p.at[i] - norm) : 0;
            ds.at[i] = key + i < at.visible ? scale * p.at[i] * (ds.at[i] - product) : 0;
        }
        if (key < at.keys) {
            store<A, PIECE>((A *)row + key, p);
            store<A, PIECE>((A *)drow + key, ds);
        }
    }
}

/* dk and dv f32[heads][T][HS] into dqkv of the sequence, [T][3C].   Thread: a channel of a position and head. */
template <class A>
__global__ void __launch_bounds__(256)
    store_keys_kernel(A *dqkv, const float *dk, const float *dv, ScoreTile tile, int T, int C, int HS) {
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, width = (int64_t)tile.heads * HS;
    if (at >= T * width)
        return;
    int64_t t = at / width, channel = at % width, from = (channel / HS * T + t) * HS + channel % HS;
    A *out = dqkv + t * 3 * C + C + (int64_t)tile.head * HS + channel;
    out[0] = rounded<A>(dk[from]);
    out[C] = rounded<A>(dv[from]);
}

/* ---- with a cache: keys and values of one sequence, [maxT][2C] ---- */

/* Keys and values of qkv [count][3C] into the cache from position `first` on.   Block: a position. */
template <class A> __global__ void __launch_bounds__(256) cache_kernel(A *cache, const A *qkv, int first, int C) {
    int64_t row = blockIdx.x;
    for (int c = (int)threadIdx.x; c < 2 * C; c += (int)blockDim.x)
        cache[(first + row) * 2 * C + c] = qkv[row * 3 * C + C + c];
}

/* scores[head][query][key] = scale q k. q [queries][3C], from the tile's first on. Grid: (rows of scores, keys / 32);
 * warp: SCORE_KEYS keys. */
template <class A>
__global__ void __launch_bounds__(WARP * SCORE_WARPS)
    cached_scores_kernel(float *scores, const A *q, const A *cache, ScoreTile tile, int C, int HS, float scale) {
    int lane = (int)threadIdx.x % WARP;
    int64_t index = blockIdx.x, query = index % tile.queries, channel = (tile.head + index / tile.queries) * HS;
    int64_t first = ((int64_t)blockIdx.y * SCORE_WARPS + threadIdx.x / WARP) * SCORE_KEYS;
    for (int64_t key = first; key < first + SCORE_KEYS && key <= tile.first + query; key++) {
        float sum = 0;
        for (int d = lane; d < HS; d += WARP)
            sum += value_of(q[query * 3 * C + channel + d]) * value_of(cache[key * 2 * C + channel + d]);
        sum = warp_sum(sum);
        if (lane == 0)
            scores[index * tile.stride + key] = scale * sum;
    }
}

/* y [queries][C] = P v. Grid: (rows of scores, channels / 32), block (32, 8): a channel of the head; each thread every
 * eighth key, then these eight in order. */
template <class A>
__global__ void __launch_bounds__(WARP * OUTPUT_LINES)
    cached_output_kernel(A *y, const float *scores, const A *cache, ScoreTile tile, int C, int HS) {
    __shared__ float lines[OUTPUT_LINES][WARP];
    int x = (int)threadIdx.x, line = (int)threadIdx.y, d = (int)blockIdx.y * WARP + x;
    int64_t index = blockIdx.x, query = index % tile.queries, channel = (tile.head + index / tile.queries) * HS + d;
    const A *p = (const A *)(scores + index * tile.stride);
    float sum = 0;
    for (int64_t key = line; key <= tile.first + query && d < HS; key += OUTPUT_LINES)
        sum += value_of(p[key]) * value_of(cache[key * 2 * C + C + channel]);
    lines[line][x] = sum;
    __syncthreads();
    if (line > 0 || d >= HS)
        return;
    sum = 0;
    for (int i = 0; i < OUTPUT_LINES; i++)
        sum += lines[i][x];
    y[query * C + channel] = rounded<A>(sum);
}

#endif
