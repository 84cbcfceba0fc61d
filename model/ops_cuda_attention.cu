/* Causal attention on the cuda device: our own path, which takes every shape. ops_cuda_cudnn.cu puts cuDNN's before it;
 * both leave the same lse.
 *
 * Scores are held for a tile only: some heads of one sequence, SCORE_QUERIES queries, and the keys up to the last of
 * these. So memory is SCORE_BYTES, or one head's tile where that is more, whatever B and NH; and of the masked half
 * only what lies in the tiles on the diagonal is computed.
 *
 *     forward    S = q k^T / sqrt(HS)  |  P = softmax(S), over S  |  y = P v
 *     backward   S again, dP = dy v^T  |  P = exp(S - lse), dS = P (dP - sum of dy y) / sqrt(HS), over S and dP
 *                                      |  dv += P^T dy,  dk += dS^T q,  dq = dS k
 *
 * Products are cuBLASLt's, batched over heads, with scores, dk and dv in f32; P and dS are activations. Tiles run from
 * the last queries to the first: the first to run sees all keys and overwrites dk and dv, the others add. */
#include "model/ops_cuda_attention.cuh"
#include "model/ops_cuda_internal.cuh"

#include <math.h>

/* One call, and how it is cut. */
typedef struct Attention {
    CudaOps *ops;
    int T, C, NH, HS;
    int heads;      /* at a time */
    int64_t stride; /* of a row of scores */
    float scale;    /* 1 / sqrt(HS) */
    float *scores, *dscores = NULL; /* [heads][SCORE_QUERIES][stride] */
    float *dk = NULL, *dv = NULL;   /* [heads][T][HS] */
} Attention;

/* Of one head. */
static size_t head_elems(int T, int HS) {
    return 2 * (size_t)score_tile_queries(T) * (size_t)score_stride(T) + 2 * (size_t)T * (size_t)HS;
}

size_t attention_cuda_scratch_bytes(const OpsLimits *limits) {
    size_t head = head_elems(limits->T, limits->C / limits->NH) * sizeof(float), all = head * (size_t)limits->NH;
    size_t most = head > (size_t)SCORE_BYTES ? head : (size_t)SCORE_BYTES;
    return all < most ? all : most;
}

static Attention attention_of(OpsContext *context, int T, int C, int NH) {
    int HS = C / NH;
    size_t queries = (size_t)score_tile_queries(T), stride = (size_t)score_stride(T);
    size_t fit = SCORE_BYTES / (head_elems(T, HS) * sizeof(float));
    size_t heads = fit < 1 ? 1 : fit < (size_t)NH ? fit : (size_t)NH;
    Attention a = {.ops = cuda_of(context),
                   .T = T,
                   .C = C,
                   .NH = NH,
                   .HS = HS,
                   .heads = (int)heads,
                   .stride = (int64_t)stride,
                   .scale = 1.0f / sqrtf((float)HS),
                   .scores = (float *)context->scratch};
    a.dscores = a.scores + heads * queries * stride;
    a.dk = a.dscores + heads * queries * stride;
    a.dv = a.dk + heads * (size_t)T * (size_t)HS;
    assert((size_t)((char *)(a.dv + heads * (size_t)T * (size_t)HS) - (char *)context->scratch) <=
           context->scratch_bytes);
    return a;
}

/* The tile of queries [first, first + SCORE_QUERIES) and heads [head, head + a->heads), both cut at their ends. */
static ScoreTile tile_at(const Attention *a, int head, int first) {
    int queries = score_tile_queries(a->T);
    return {.head = head,
            .heads = a->NH - head < a->heads ? a->NH - head : a->heads,
            .first = first,
            .queries = a->T - first < queries ? a->T - first : queries,
            .stride = a->stride};
}

/* scores (or dscores) = scale * left right^T; left and right hold a head's channels in rows. */
static void score_product(const Attention *a, const ScoreTile *tile, float *out, Operand queries, Operand keys,
                          float scale) {
    Product p = {.out = out,
                 .out_stride = tile->stride,
                 .out_batch = tile->queries * tile->stride,
                 .out_f32 = true,
                 .rows = tile->queries,
                 .columns = tile->first + tile->queries,
                 .depth = a->HS,
                 .batch = tile->heads,
                 .left = queries,
                 .right = keys,
                 .scale = scale};
    product(a->ops, &p);
}

/* P or dS, that is where the scores in f32 were. */
template <class A> static Operand row_operand(const float *scores, const ScoreTile *tile) {
    int64_t stride = tile->stride * (int64_t)(sizeof(float) / sizeof(A));
    return plain(scores, stride, tile->queries * stride);
}

/* out [queries][HS per head, `stride` apart] = P or dS times the keys' rows. */
template <class A>
static void query_product(const Attention *a, const ScoreTile *tile, A *out, int64_t stride, const float *scores,
                          Operand keys) {
    Product p = {.out = out,
                 .out_stride = stride,
                 .out_batch = a->HS,
                 .rows = tile->queries,
                 .columns = a->HS,
                 .depth = tile->first + tile->queries,
                 .batch = tile->heads,
                 .left = row_operand<A>(scores, tile),
                 .right = keys};
    product(a->ops, &p);
}

/* sums [heads][T][HS] (+)= (P or dS)^T times the queries' rows. */
template <class A>
static void key_product(const Attention *a, const ScoreTile *tile, float *sums, const float *scores, Operand queries) {
    Operand rows = row_operand<A>(scores, tile);
    rows.transposed = true;
    Product p = {.out = sums,
                 .out_stride = a->HS,
                 .out_batch = (int64_t)a->T * a->HS,
                 .out_f32 = true,
                 .rows = tile->first + tile->queries,
                 .columns = a->HS,
                 .depth = tile->queries,
                 .batch = tile->heads,
                 .left = rows,
                 .right = queries,
                 .add = tile->first + tile->queries < a->T ? sums : NULL};
    product(a->ops, &p);
}

/* ---- forward ---- */

template <class A>
static void forward_tile(const Attention *a, const ScoreTile *tile, A *y, float *lse, const A *qkv) {
    int64_t C = a->C, channel = (int64_t)tile->head * a->HS;
    const A *q = qkv + tile->first * 3 * C + channel, *k = qkv + C + channel, *v = k + C;
    score_product(a, tile, a->scores, plain(q, 3 * C, a->HS), transposed(k, 3 * C, a->HS), a->scale);
    LAUNCH((softmax_rows_kernel<A>), row_blocks(tile), WARP * ROW_WARPS, 0, a->ops->stream, a->scores, lse,
           *tile, a->T);
    CHECK_LAUNCH(a->ops);
    query_product(a, tile, y + tile->first * C + channel, C, a->scores, plain(v, 3 * C, a->HS));
}

template <class A>
static void attention_forward(OpsContext *context, Act *y, float *lse, const Act *qkv, int B, int T, int C, int NH) {
    Attention a = attention_of(context, T, C, NH);
    for (int64_t b = 0; b < B; b++)
        for (int head = 0; head < NH; head += a.heads)
            for (int first = 0; first < T; first += score_tile_queries(T)) {
                ScoreTile tile = tile_at(&a, head, first);
                forward_tile(&a, &tile, (A *)y + b * T * C, lse + b * NH * T, (const A *)qkv + b * T * 3 * C);
            }
}

/* ---- backward ---- */

/* The arrays of one sequence. */
template <class A> struct Sequence {
    A *dqkv;
    const A *dy, *y, *qkv;
    const float *lse;
};

template <class A> static void backward_tile(const Attention *a, const ScoreTile *tile, const Sequence<A> *s) {
    int64_t C = a->C, HS = a->HS, channel = tile->head * HS, at = tile->first * C + channel;
    const A *q = s->qkv + tile->first * 3 * C + channel, *k = s->qkv + C + channel, *v = k + C;
    score_product(a, tile, a->scores, plain(q, 3 * C, HS), transposed(k, 3 * C, HS), a->scale);
    score_product(a, tile, a->dscores, plain(s->dy + at, C, HS), transposed(v, 3 * C, HS), 1);
    LAUNCH((softmax_rows_backward_kernel<A>), row_blocks(tile), WARP * ROW_WARPS, 0, a->ops->stream, a->scores,
           a->dscores, s->lse, s->dy, s->y, *tile, a->T, a->C, a->HS, a->scale);
    CHECK_LAUNCH(a->ops);
    key_product<A>(a, tile, a->dv, a->scores, plain(s->dy + at, C, HS));
    key_product<A>(a, tile, a->dk, a->dscores, plain(q, 3 * C, HS));
    query_product(a, tile, s->dqkv + tile->first * 3 * C + channel, 3 * C, a->dscores, plain(k, 3 * C, HS));
}

/* All tiles of some heads of one sequence. */
template <class A> static void backward_heads(const Attention *a, int head, const Sequence<A> *s) {
    int queries = score_tile_queries(a->T);
    ScoreTile tile;
    for (int first = (a->T - 1) / queries * queries; first >= 0; first -= queries) {
        tile = tile_at(a, head, first);
        backward_tile(a, &tile, s);
    }
    enum { THREADS = 256 };
    int64_t elems = (int64_t)a->T * tile.heads * a->HS;
    LAUNCH((store_keys_kernel<A>), (unsigned)blocks_of(elems, THREADS), THREADS, 0, a->ops->stream, s->dqkv, a->dk,
           a->dv, tile, a->T, a->C, a->HS);
    CHECK_LAUNCH(a->ops);
}

template <class A>
static void attention_backward(OpsContext *context, Act *dqkv, const Act *dy, const Act *y, const Act *qkv,
                               const float *lse, int B, int T, int C, int NH) {
    Attention a = attention_of(context, T, C, NH);
    for (int64_t b = 0; b < B; b++) {
        int64_t at = b * T * C;
        Sequence<A> s = {(A *)dqkv + 3 * at, (const A *)dy + at, (const A *)y + at, (const A *)qkv + 3 * at,
                         lse + b * NH * T};
        for (int head = 0; head < NH; head += a.heads)
            backward_heads(&a, head, &s);
    }
}

template <class A> static void fill(Ops *table) {
    table->attention_forward = attention_forward<A>;
    table->attention_backward = attention_backward<A>;
}

void attention_cuda_slots(Ops *table, CudaDtype dtype) { dtype == CUDA_BF16 ? fill<bf16>(table) : fill<float>(table); }
