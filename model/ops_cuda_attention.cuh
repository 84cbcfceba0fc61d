/* How attention's own path cuts its scores, plain and with a cache. */
#ifndef MODEL_OPS_CUDA_ATTENTION_CUH
#define MODEL_OPS_CUDA_ATTENTION_CUH

#include <stdint.h>

enum {
    SCORE_BYTES = 64 << 20, /* of scores and sums at a time, about an H100's L2; one head may need more */
    SCORE_QUERIES = 512     /* in a tile */
};

static inline int score_tile_queries(int T) { return T < SCORE_QUERIES ? T : (int)SCORE_QUERIES; }

/* Floats from row to row: T, so that rows are 16-byte aligned as activations too. */
static inline int64_t score_stride(int T) { return ((int64_t)T + 7) / 8 * 8; }

#endif
