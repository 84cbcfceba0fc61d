/* Attention with a cache of keys and values on the cuda device, for generation: few queries, and another number of
 * keys each time, for which a product of cuBLASLt would have to be chosen anew. So the products are kernels of our
 * own; memory of the cache, read once, sets the pace. Tiles are those of ops_cuda_attention.cu. */
#include "model/ops_cuda_attention.cuh"
#include "model/ops_cuda_internal.cuh"

#include <math.h>

/* y and qkv from the tile's first query on. */
template <class A>
static void cached_tile(CudaOps *ops, const ScoreTile *tile, A *y, float *scores, const A *cache, const A *qkv, int C,
                        int HS) {
    unsigned rows = (unsigned)(tile->heads * tile->queries);
    dim3 score_grid(rows, (unsigned)blocks_of(tile->first + tile->queries, SCORE_WARPS * SCORE_KEYS));
    dim3 output_grid(rows, (unsigned)blocks_of(HS, WARP));
    LAUNCH((cached_scores_kernel<A>), score_grid, WARP * SCORE_WARPS, 0, ops->stream, scores, qkv, cache, *tile, C, HS,
           1.0f / sqrtf((float)HS));
    LAUNCH((softmax_rows_kernel<A>), row_blocks(tile), WARP * ROW_WARPS, 0, ops->stream, scores, (float *)NULL, *tile,
           0);
    LAUNCH((cached_output_kernel<A>), output_grid, dim3(WARP, OUTPUT_LINES), 0, ops->stream, y, scores, cache, *tile, C,
           HS);
    CHECK_LAUNCH(ops);
}

template <class A>
static void attention_cached(OpsContext *context, Act *y, Act *cache, const Act *qkv, int first, int count, int C,
                             int NH) {
    enum { THREADS = 256 };
    CudaOps *ops = cuda_of(context);
    int T = first + count, queries = score_tile_queries(T);
    int64_t stride = score_stride(T);
    size_t fit = context->scratch_bytes / ((size_t)queries * (size_t)stride * sizeof(float));
    int heads = fit < (size_t)NH ? (int)fit : NH;
    LAUNCH((cache_kernel<A>), (unsigned)count, THREADS, 0, ops->stream, (A *)cache, (const A *)qkv, first, C);
    for (int head = 0; head < NH; head += heads)
        for (int row = 0; row < count; row += queries) {
            ScoreTile tile = {.head = head,
                              .heads = NH - head < heads ? NH - head : heads,
                              .first = first + row,
                              .queries = count - row < queries ? count - row : queries,
                              .stride = stride};
            cached_tile(ops, &tile, (A *)y + (int64_t)row * C, (float *)context->scratch, (const A *)cache,
                        (const A *)qkv + (int64_t)row * 3 * C, C, C / NH);
        }
}

void attention_cached_cuda_slots(Ops *table, CudaDtype dtype) {
    table->attention_cached = dtype == CUDA_BF16 ? attention_cached<bf16> : attention_cached<float>;
}
