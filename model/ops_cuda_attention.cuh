/* How attention's own path cuts its scores, plain and with a cache. */
#ifndef MODEL_OPS_CUDA_ATTENTION_CUH
#define MODEL_OPS_CUDA_ATTENTION_CUH

#include "model/attention_kernels.cuh"

#include <stdint.h>

enum {
    SCORE_BYTES = 64 << 20, /* of scores and sums at a time, about an H100's L2; one head may need more */
    SCORE_QUERIES = 512     /* in a tile */
};

static inline int score_tile_queries(int T) { return T < SCORE_QUERIES ? T : (int)SCORE_QUERIES; }

/* Of a kernel whose warps take a row each. */
static inline unsigned row_blocks(const ScoreTile *tile) {
    int64_t rows = (int64_t)tile->heads * tile->queries;
    return (unsigned)((rows + ROW_WARPS - 1) / ROW_WARPS);
}

/* Floats from row to row: T, so that rows are 16-byte aligned as activations too. */
static inline int64_t score_stride(int T) { return ((int64_t)T + 7) / 8 * 8; }

#endif
