/* Causal attention on the cpu, a (sequence, head) per task. No (T,T) array is held: for each tile of TILE queries the
 * scores against all earlier keys, [TILE][T], stay in the thread's cache.
 *
 *   forward    S = Q K^T / sqrt(HS),  P = softmax(S),  y = P V;  kept for backward: lse = log sum exp of each row of S
 *   backward   S again, P = exp(S - lse),  dP = dy V^T,  dS = P (dP - rowsum(dy y)),
 *              dV += P^T dy,  dK += dS^T Q / sqrt(HS),  dQ = dS K / sqrt(HS)
 *
 * All products are sums of micro-kernels of MR x NC outputs held in registers. Its left operand is read element by
 * element (so a transpose costs nothing), its right one comes in panels [k][NC], into which each task copies its
 * head's slices of qkv once: those lie 3C floats apart, which is unkind to caches. Every product stops at the
 * diagonal, to within MR rows and NC columns, so the masked half is not computed. FLOPs: T^2 HS forward per factor 2,
 * 2.5 times that backward. */
#include "model/ops_cpu.h"

#include <assert.h>
#include <omp.h>

#if defined(__AVX512F__)
enum { LANES = 16, MR = 8 };
#else
enum { LANES = 8, MR = 4 };
#endif
enum { NC = 2 * LANES, TILE = 64 }; /* TILE is a multiple of MR and NC */

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), may_alias));

static size_t round_up(size_t count, size_t to) { return (count + to - 1) / to * to; }

/* c[MR][NC] (+)= a b over k terms.   a(r, i) = a[r * row + i * step], b panel [k][NC], rows of c `ldc` apart. */
static inline __attribute__((always_inline)) void micro(float *c, size_t ldc, const float *a, size_t row, size_t step,
                                                        const float *b, int k, bool add) {
    Vector sum[MR][2];
    for (int r = 0; r < MR; r++) {
        const Vector *old = (const Vector *)(c + (size_t)r * ldc);
        sum[r][0] = add ? old[0] : (Vector){0};
        sum[r][1] = add ? old[1] : (Vector){0};
    }
    for (int i = 0; i < k; i++, a += step, b += NC) {
        Vector left = ((const Vector *)b)[0], right = ((const Vector *)b)[1];
        for (int r = 0; r < MR; r++) {
            sum[r][0] += a[(size_t)r * row] * left;
            sum[r][1] += a[(size_t)r * row] * right;
        }
    }
    for (int r = 0; r < MR; r++) {
        Vector *out = (Vector *)(c + (size_t)r * ldc);
        out[0] = sum[r][0];
        out[1] = sum[r][1];
    }
}

/* Sizes of one call, and where a thread's arrays begin in its scratch. T is padded to TILE, the head size to NC;
 * padding is zero in what is read as right operand. */
typedef struct Shape {
    int T, C, NH, HS;
    size_t width, length; /* padded head size and T */
    size_t stride;        /* of a row of scores: length and a little, lest rows collide in L1 */
    float scale;          /* 1 / sqrt(HS) */
} Shape;

static Shape shape_of(int T, int C, int NH) {
    Shape shape = {.T = T, .C = C, .NH = NH, .HS = C / NH, .length = round_up((size_t)T, TILE)};
    shape.width = round_up((size_t)shape.HS, NC);
    shape.stride = shape.length + LANES;
    shape.scale = 1.0f / sqrtf((float)shape.HS);
    return shape;
}

/* A thread's scratch, carved by one function for both passes. */
typedef struct Scratch {
    float *keys_t, *values_t;     /* panels over positions: [length/NC][HS][NC] */
    float *keys, *values;         /* panels over the head's channels: [width/NC][length][NC] */
    float *dkeys, *dvalues;       /* [length][width] */
    float *queries, *dout, *rows; /* [TILE][width]: queries (scaled) and dy as left operands; y or dq */
    float *query_panels, *dout_panels; /* [width/NC][TILE][NC] */
    float *scores, *dscores;      /* [TILE][stride] */
} Scratch;

static size_t scratch_elems(const Shape *shape) {
    return 5 * shape->length * shape->width + 5 * TILE * shape->width + 2 * TILE * shape->stride;
}

static float *carve(float **at, size_t count) {
    float *here = *at;
    *at += count;
    return here;
}

/* The calling thread's scratch. */
static Scratch scratch_carve(const Shape *shape, const OpsContext *context) {
    float *base = (float *)context->scratch + (size_t)omp_get_thread_num() * scratch_elems(shape), *at = base;
    size_t head = shape->width * shape->length, tile = TILE * shape->width;
    Scratch scratch;
    scratch.keys_t = carve(&at, head);
    scratch.values_t = carve(&at, head);
    scratch.keys = carve(&at, head);
    scratch.values = scratch.values_t; /* forward and backward use one of the two */
    scratch.dkeys = carve(&at, head);
    scratch.dvalues = carve(&at, head);
    scratch.queries = carve(&at, tile);
    scratch.dout = carve(&at, tile);
    scratch.rows = carve(&at, tile);
    scratch.query_panels = carve(&at, tile);
    scratch.dout_panels = carve(&at, tile);
    scratch.scores = carve(&at, TILE * shape->stride);
    scratch.dscores = carve(&at, TILE * shape->stride);
    assert(at == base + scratch_elems(shape));
    return scratch;
}

size_t attention_cpu_scratch_bytes(const OpsLimits *limits, int threads) {
    Shape shape = shape_of(limits->T, limits->C, limits->NH);
    return (size_t)threads * scratch_elems(&shape) * sizeof(float);
}

/* A row of a head's slice, a few rows before it is needed: rows lie too far apart for the hardware to guess. */
static inline void fetch_row(const float *in, size_t stride, size_t t, size_t count, const Shape *shape) {
    enum { AHEAD = 8, LINE = 16 };
    if (t + AHEAD < count)
        for (int d = 0; d < shape->HS; d += LINE)
            __builtin_prefetch(in + (t + AHEAD) * stride + (size_t)d);
}

/* Transposed copy of a head's slice, in [T][stride], to panels over positions; positions from T on are zero. */
static void pack_positions(float *panels, const float *in, size_t stride, const Shape *shape) {
    size_t depth = (size_t)shape->HS, T = (size_t)shape->T;
    for (size_t t = 0; t < T; t++) {
        float *out = panels + t / NC * NC * depth + t % NC;
        fetch_row(in, stride, t, T, shape);
        for (size_t d = 0; d < depth; d++)
            out[d * NC] = in[t * stride + d];
    }
    for (size_t t = T; t < shape->length; t++)
        for (size_t d = 0; d < depth; d++)
            panels[t / NC * NC * depth + t % NC + d * NC] = 0;
}

/* Copy of `count` rows of a head's slice to panels over channels of `length` rows each; the rest is zero. */
static void pack_channels(float *panels, size_t length, const float *in, size_t stride, size_t count, float scale,
                          const Shape *shape) {
    size_t HS = (size_t)shape->HS;
    for (size_t t = 0; t < count; t++) {
        fetch_row(in, stride, t, count, shape);
        for (size_t d = 0; d < shape->width; d += NC) {
            float *out = panels + d * length + t * NC;
            size_t real = HS - d < NC ? HS - d : NC;
            for (size_t i = 0; i < real; i++)
                out[i] = in[t * stride + d + i] * scale;
            for (size_t i = real; i < NC; i++)
                out[i] = 0;
        }
    }
    for (size_t d = 0; d < shape->width && count < length; d += NC)
        memset(panels + d * length + count * NC, 0, (length - count) * NC * sizeof(float));
}

/* Copy of `count` rows of a head's slice to [TILE][width]; missing rows are zero. */
static void pack_rows(float *out, const float *in, size_t stride, size_t count, float scale, const Shape *shape) {
    for (size_t t = 0; t < count; t++) {
        fetch_row(in, stride, t, count, shape);
        for (size_t d = 0; d < (size_t)shape->HS; d++)
            out[t * shape->width + d] = in[t * stride + d] * scale;
    }
    memset(out + count * shape->width, 0, (TILE - count) * shape->width * sizeof(float));
}

/* Keys that the MR rows from `row` of the tile at `first` may see, rounded up to whole micro-kernels. */
static size_t visible(int first, int row) { return round_up((size_t)(first + row + MR), NC); }

/* scores = rows times the transposed panels, up to the diagonal. */
static void score_product(float *scores, const float *rows, const float *panels, int first, const Shape *shape) {
    for (int row = 0; row < TILE; row += MR)
        for (size_t key = 0; key < visible(first, row); key += NC)
            micro(scores + (size_t)row * shape->stride + key, shape->stride, rows + (size_t)row * shape->width,
                  shape->width, 1, panels + key * (size_t)shape->HS, shape->HS, false);
}

/* rows [TILE][width] = scores times panels over channels, up to the diagonal. */
static void row_product(float *rows, const float *scores, const float *panels, int first, const Shape *shape) {
    for (size_t d = 0; d < shape->width; d += NC)
        for (int row = 0; row < TILE; row += MR)
            micro(rows + (size_t)row * shape->width + d, shape->width, scores + (size_t)row * shape->stride,
                  shape->stride, 1, panels + d * shape->length, first + row + MR, false);
}

/* sums [length][width] += scores^T times panels [TILE][NC], up to the diagonal. */
static void key_product(float *sums, const float *scores, const float *panels, int first, int count,
                        const Shape *shape) {
    for (size_t d = 0; d < shape->width; d += NC)
        for (int key = 0; key < first + count; key += MR) {
            int row = key > first ? key - first : 0; /* earlier queries do not see it */
            micro(sums + (size_t)key * shape->width + d, shape->width,
                  scores + (size_t)row * shape->stride + (size_t)key, 1, shape->stride,
                  panels + d * TILE + (size_t)row * NC, count - row, true);
        }
}

/* In place exp(scores - max) of a row's n visible keys, zero up to `end`; returns max + log sum in *lse. */
static float softmax_row(float *scores, size_t n, size_t end, float *lse) {
    float max = row_max(scores, n), sum = 0;
    for (size_t i = 0; i < n; i++) {
        scores[i] = fast_exp(scores[i] - max);
        sum += scores[i];
    }
    memset(scores + n, 0, (end - n) * sizeof(float));
    *lse = max + logf(sum);
    return 1.0f / sum;
}

static void forward_head(float *y, float *lse, const float *qkv, const Shape *shape, const Scratch *scratch) {
    size_t stride = 3 * (size_t)shape->C, C = (size_t)shape->C;
    pack_positions(scratch->keys_t, qkv + C, stride, shape);
    pack_channels(scratch->values, shape->length, qkv + 2 * C, stride, (size_t)shape->T, 1, shape);
    for (int first = 0; first < shape->T; first += TILE) {
        int count = shape->T - first < TILE ? shape->T - first : TILE;
        float inverse[TILE];
        pack_rows(scratch->queries, qkv + (size_t)first * stride, stride, (size_t)count, shape->scale, shape);
        score_product(scratch->scores, scratch->queries, scratch->keys_t, first, shape);
        for (int row = 0; row < count; row++)
            inverse[row] = softmax_row(scratch->scores + (size_t)row * shape->stride, (size_t)(first + row + 1),
                                       visible(first, row / MR * MR), &lse[first + row]);
        row_product(scratch->rows, scratch->scores, scratch->values, first, shape);
        for (int row = 0; row < count; row++)
            for (int d = 0; d < shape->HS; d++)
                y[(size_t)(first + row) * C + (size_t)d] =
                    scratch->rows[(size_t)row * shape->width + (size_t)d] * inverse[row];
    }
}

void attention_forward_cpu(OpsContext *context, float *y, float *lse, const float *qkv, int B, int T, int C, int NH) {
    Shape shape = shape_of(T, C, NH);
#pragma omp parallel num_threads(context->threads)
    {
        Scratch scratch = scratch_carve(&shape, context);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < B * NH; task++) {
            size_t sequence = (size_t)(task / NH) * (size_t)T, column = (size_t)(task % NH) * (size_t)shape.HS;
            forward_head(y + sequence * (size_t)C + column, lse + (size_t)task * (size_t)T,
                         qkv + sequence * 3 * (size_t)C + column, &shape, &scratch);
        }
    }
}

/* In place scores -> P and dscores = dP -> dS for a row's n visible keys, zero up to `end`. */
static void softmax_backward_row(float *restrict scores, float *restrict dscores, size_t n, size_t end, float lse,
                                 float product) {
    for (size_t i = 0; i < n; i++) {
        float p = fast_exp(scores[i] - lse);
        scores[i] = p;
        dscores[i] = p * (dscores[i] - product);
    }
    memset(scores + n, 0, (end - n) * sizeof(float));
    memset(dscores + n, 0, (end - n) * sizeof(float));
}

static float dot(const float *a, const float *b, int count) {
    float sum = 0;
    for (int i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

static void backward_tile(float *dqkv, const float *dy, const float *y, const float *qkv, const float *lse, int first,
                          const Shape *shape, const Scratch *scratch) {
    size_t C = (size_t)shape->C, stride = 3 * C;
    int count = shape->T - first < TILE ? shape->T - first : TILE;
    size_t rows = (size_t)count;
    const float *queries = qkv + (size_t)first * stride, *dout = dy + (size_t)first * C;
    pack_rows(scratch->queries, queries, stride, rows, shape->scale, shape);
    pack_rows(scratch->dout, dout, C, rows, 1, shape);
    pack_channels(scratch->query_panels, TILE, queries, stride, rows, shape->scale, shape);
    pack_channels(scratch->dout_panels, TILE, dout, C, rows, 1, shape);
    score_product(scratch->scores, scratch->queries, scratch->keys_t, first, shape);
    score_product(scratch->dscores, scratch->dout, scratch->values_t, first, shape);
    for (int row = 0; row < count; row++) {
        size_t at = (size_t)(first + row) * C;
        softmax_backward_row(scratch->scores + (size_t)row * shape->stride,
                             scratch->dscores + (size_t)row * shape->stride, (size_t)(first + row + 1),
                             visible(first, row / MR * MR), lse[first + row], dot(dy + at, y + at, shape->HS));
    }
    key_product(scratch->dvalues, scratch->scores, scratch->dout_panels, first, count, shape);
    key_product(scratch->dkeys, scratch->dscores, scratch->query_panels, first, count, shape);
    row_product(scratch->rows, scratch->dscores, scratch->keys, first, shape);
    for (int row = 0; row < count; row++)
        for (int d = 0; d < shape->HS; d++)
            dqkv[(size_t)(first + row) * stride + (size_t)d] =
                scratch->rows[(size_t)row * shape->width + (size_t)d] * shape->scale;
}

static void backward_head(float *dqkv, const float *dy, const float *y, const float *qkv, const float *lse,
                          const Shape *shape, const Scratch *scratch) {
    size_t C = (size_t)shape->C, stride = 3 * C, head = shape->length * shape->width;
    pack_positions(scratch->keys_t, qkv + C, stride, shape);
    pack_positions(scratch->values_t, qkv + 2 * C, stride, shape);
    pack_channels(scratch->keys, shape->length, qkv + C, stride, (size_t)shape->T, 1, shape);
    memset(scratch->dkeys, 0, head * sizeof(float));
    memset(scratch->dvalues, 0, head * sizeof(float));
    for (int first = 0; first < shape->T; first += TILE)
        backward_tile(dqkv, dy, y, qkv, lse, first, shape, scratch);
    for (size_t t = 0; t < (size_t)shape->T; t++)
        for (size_t d = 0; d < (size_t)shape->HS; d++) {
            dqkv[t * stride + C + d] = scratch->dkeys[t * shape->width + d];
            dqkv[t * stride + 2 * C + d] = scratch->dvalues[t * shape->width + d];
        }
}

void attention_backward_cpu(OpsContext *context, float *dqkv, const float *dy, const float *y, const float *qkv,
                            const float *lse, int B, int T, int C, int NH) {
    Shape shape = shape_of(T, C, NH);
#pragma omp parallel num_threads(context->threads)
    {
        Scratch scratch = scratch_carve(&shape, context);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < B * NH; task++) {
            size_t sequence = (size_t)(task / NH) * (size_t)T, column = (size_t)(task % NH) * (size_t)shape.HS;
            backward_head(dqkv + sequence * 3 * (size_t)C + column, dy + sequence * (size_t)C + column,
                          y + sequence * (size_t)C + column, qkv + sequence * 3 * (size_t)C + column,
                          lse + (size_t)task * (size_t)T, &shape, &scratch);
        }
    }
}

/* y = softmax(q K^T / sqrt(HS)) V for one query and one head over n cached positions, rows of cache 2C apart. */
static void cached_row(float *y, const float *q, const float *cache, int n, float *scores, const Shape *shape) {
    size_t C = (size_t)shape->C;
    for (int t = 0; t < n; t++)
        scores[t] = dot(q, cache + (size_t)t * 2 * C, shape->HS) * shape->scale;
    float lse, inverse = softmax_row(scores, (size_t)n, (size_t)n, &lse);
    for (int d = 0; d < shape->HS; d++)
        y[d] = 0;
    for (int t = 0; t < n; t++)
        for (int d = 0; d < shape->HS; d++)
            y[d] += scores[t] * cache[(size_t)t * 2 * C + C + (size_t)d];
    for (int d = 0; d < shape->HS; d++)
        y[d] *= inverse;
}

void attention_cached_cpu(OpsContext *context, float *y, float *cache, const float *qkv, int first, int count, int C,
                          int NH) {
    Shape shape = shape_of(first + count, C, NH);
    size_t width = (size_t)C, HS = (size_t)shape.HS;
    for (size_t row = 0; row < (size_t)count; row++)
        memcpy(cache + ((size_t)first + row) * 2 * width, qkv + row * 3 * width + width, 2 * width * sizeof(float));
#pragma omp parallel num_threads(context->threads)
    {
        float *scores = (float *)context->scratch + (size_t)omp_get_thread_num() * shape.length;
#pragma omp for schedule(static) collapse(2)
        for (int row = 0; row < count; row++)
            for (int head = 0; head < NH; head++)
                cached_row(y + (size_t)row * width + (size_t)head * HS,
                           qkv + (size_t)row * 3 * width + (size_t)head * HS, cache + (size_t)head * HS,
                           first + row + 1, scores, &shape);
    }
}
