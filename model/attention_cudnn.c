/* Attention as graphs of cuDNN's operations. Plain C, and no CUDA header: the graphs are cuDNN's, the formulas are
 *
 *   forward     S = Q K^T / sqrt(HS), masked;  m = max of a row;  E = exp(S - m);  y = (E / sum E) V;
 *               lse = m + log(sum E)
 *   backward    S again;  P = exp(S - lse);  D = rowsum(dy y);  dP = dy V^T;  dS = P (dP - D) / sqrt(HS);
 *               dV = P^T dy;  dK = dS^T Q;  dQ = dS K
 *
 * cuDNN knows these graphs by the form of their softmax and has a kernel for each that keeps S, P and dS on the chip, a
 * tile at a time: memory traffic is that of qkv, y, lse and their gradients. The same softmax written otherwise is
 * refused; what stands around it is taken as it is, so tests compute the graphs as written.
 *
 * q, k, v are read where they lie, side by side in rows of 3C, and their gradients are written likewise; K^T and V^T
 * are k and v with strides swapped. Arrays that a pass needs for itself lie at the start of the workspace:
 *
 *   backward                  D f32[B][NH][T], dQ f32[B][NH][T][HS] (tiles of keys add to it, in any order), cuDNN's
 *   backward, deterministic   D f32[B][NH][T], cuDNN's (dS, so that dQ is one product of its own)
 *
 * Every shape has its own graphs. A step allocates nothing here; see cudnn_graph_execute for what cuDNN does. */
#include "model/attention_cudnn.h"

#include "model/cudnn_graph.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Places among a graph's pointers. */
enum { Q, K, V, Y, LSE, DY, DQ, DK, DV, ROW_SUM, DQ_SUM, SCALE, MINUS_INFINITY, ONE, NAMES };

typedef struct Shape {
    int64_t B, NH, T, HS;
} Shape;

typedef struct Plans {
    Shape shape;
    CudnnGraph *forward, *backward;
    const char *why; /* not supported: why; else NULL */
    float scale;     /* 1 / sqrt(HS) */
} Plans;

struct CudnnAttention {
    Cudnn *cudnn;
    bool deterministic;
    int count;
    Plans plans[CUDNN_SHAPES_MAX];
};

/* ---- layouts ---- */

/* A head's slice of rows of `row` elements. */
static CudnnLayout heads(const Shape *s, int64_t row) {
    return (CudnnLayout){TYPE_BF16, {s->B, s->NH, s->T, s->HS}, {s->T * row, s->HS, row, 1}};
}

static CudnnLayout transposed(CudnnLayout x) {
    int64_t dim = x.dims[2], stride = x.strides[2];
    x.dims[2] = x.dims[3], x.strides[2] = x.strides[3];
    x.dims[3] = dim, x.strides[3] = stride;
    return x;
}

static CudnnLayout packed(CudnnType type, const Shape *s, int64_t columns) {
    return (CudnnLayout){type, {s->B, s->NH, s->T, columns}, {s->NH * s->T * columns, s->T * columns, columns, 1}};
}

static CudnnLayout in_qkv(const Shape *s) { return heads(s, 3 * s->NH * s->HS); }
static CudnnLayout in_y(const Shape *s) { return heads(s, s->NH * s->HS); }
static CudnnLayout scores(CudnnType type, const Shape *s) { return packed(type, s, s->T); }
static CudnnLayout per_row(const Shape *s) { return packed(TYPE_F32, s, 1); }

/* ---- the formulas ---- */

/* A product, quotient, ... that has the shape of the scores, and functions of them. */
static CudnnTensor each(CudnnGraph *g, const Shape *s, CudnnBinary operation, CudnnTensor a, CudnnTensor b) {
    return cudnn_binary(g, operation, a, b, cudnn_between(g, scores(TYPE_F32, s)));
}

static CudnnTensor exponentials(CudnnGraph *g, const Shape *s, CudnnTensor x) {
    return cudnn_unary(g, UNARY_EXP, x, cudnn_between(g, scores(TYPE_F32, s)));
}

static CudnnTensor matrix(CudnnGraph *g, const Shape *s, CudnnTensor a, CudnnTensor b) {
    return cudnn_matmul(g, a, b, cudnn_between(g, scores(TYPE_F32, s)));
}

static CudnnTensor row_of(CudnnGraph *g, const Shape *s, CudnnReduction operation, CudnnTensor x) {
    return cudnn_reduce(g, operation, x, cudnn_between(g, per_row(s)));
}

/* Rounded to bf16 on the way, as an operand of a product. */
static CudnnTensor transpose(CudnnGraph *g, const Shape *s, CudnnTensor x) {
    return cudnn_reshape(g, x, cudnn_between(g, transposed(scores(TYPE_BF16, s))));
}

/* -infinity where the key comes after the query. */
static CudnnTensor causal(CudnnGraph *g, const Shape *s, CudnnTensor x) {
    CudnnTensor query = cudnn_index(g, x, 2, cudnn_between(g, scores(TYPE_I32, s)));
    CudnnTensor key = cudnn_index(g, x, 3, cudnn_between(g, scores(TYPE_I32, s)));
    CudnnTensor seen = cudnn_binary(g, BINARY_GE, query, key, cudnn_between(g, scores(TYPE_BOOL, s)));
    return cudnn_select(g, seen, x, cudnn_scalar(g, MINUS_INFINITY), cudnn_between(g, scores(TYPE_F32, s)));
}

static void write_forward(CudnnGraph *g, const Shape *s) {
    CudnnTensor q = cudnn_array(g, Q, in_qkv(s)), k_t = cudnn_array(g, K, transposed(in_qkv(s)));
    CudnnTensor v = cudnn_array(g, V, in_qkv(s)), scale = cudnn_scalar(g, SCALE);

    CudnnTensor masked = causal(g, s, each(g, s, BINARY_MUL, matrix(g, s, q, k_t), scale));
    CudnnTensor max = row_of(g, s, REDUCTION_MAX, masked);
    CudnnTensor e = exponentials(g, s, each(g, s, BINARY_SUB, masked, max));
    CudnnTensor sum = row_of(g, s, REDUCTION_SUM, e);
    CudnnTensor log_sum = cudnn_unary(g, UNARY_LOG, sum, cudnn_between(g, per_row(s)));
    cudnn_binary(g, BINARY_ADD, max, log_sum, cudnn_array(g, LSE, per_row(s)));
    CudnnTensor p = cudnn_binary(g, BINARY_DIV, e, sum, cudnn_between(g, scores(TYPE_BF16, s)));
    cudnn_matmul(g, p, v, cudnn_array(g, Y, in_y(s)));
}

/* D = rowsum(dy y), in memory: another part of the kernel reads it. */
static CudnnTensor row_sums(CudnnGraph *g, const Shape *s, CudnnTensor dy) {
    CudnnTensor y = cudnn_array(g, Y, in_y(s)), one = cudnn_scalar(g, ONE);
    CudnnTensor product = cudnn_binary(g, BINARY_MUL, dy, y, cudnn_between(g, packed(TYPE_F32, s, s->HS)));
    CudnnTensor sum = row_of(g, s, REDUCTION_SUM, product);
    return cudnn_binary(g, BINARY_MUL, sum, one, cudnn_array(g, ROW_SUM, per_row(s)));
}

/* dQ = dS K */
static void write_dq(CudnnGraph *g, const Shape *s, CudnnTensor ds, CudnnTensor k_t, bool deterministic) {
    CudnnTensor k = cudnn_reshape(g, k_t, cudnn_between(g, in_qkv(s))), dq = cudnn_array(g, DQ, in_qkv(s));
    if (deterministic)
        cudnn_matmul(g, ds, k, dq);
    else
        cudnn_unary(g, UNARY_COPY, cudnn_matmul(g, ds, k, cudnn_array(g, DQ_SUM, packed(TYPE_F32, s, s->HS))), dq);
}

static void write_backward(CudnnGraph *g, const Shape *s, bool deterministic) {
    CudnnTensor q = cudnn_array(g, Q, in_qkv(s)), k_t = cudnn_array(g, K, transposed(in_qkv(s)));
    CudnnTensor v_t = cudnn_array(g, V, transposed(in_qkv(s))), lse = cudnn_array(g, LSE, per_row(s));
    CudnnTensor dy = cudnn_array(g, DY, in_y(s)), scale = cudnn_scalar(g, SCALE), d = row_sums(g, s, dy);

    CudnnTensor scaled = each(g, s, BINARY_MUL, matrix(g, s, q, k_t), scale);
    CudnnTensor p = exponentials(g, s, causal(g, s, each(g, s, BINARY_SUB, scaled, lse)));
    cudnn_matmul(g, transpose(g, s, p), dy, cudnn_array(g, DV, in_qkv(s)));

    CudnnTensor dp = each(g, s, BINARY_SUB, matrix(g, s, dy, v_t), d);
    CudnnTensor ds = each(g, s, BINARY_MUL, each(g, s, BINARY_MUL, dp, p), scale);
    cudnn_matmul(g, transpose(g, s, ds), q, cudnn_array(g, DK, in_qkv(s)));
    write_dq(g, s, ds, k_t, deterministic);
}

static CudnnGraph *write_pass(const Shape *s, CudnnPass pass) {
    CudnnGraph *g = cudnn_graph_create();
    if (g && pass == CUDNN_FORWARD)
        write_forward(g, s);
    else if (g)
        write_backward(g, s, pass == CUDNN_BACKWARD_DETERMINISTIC);
    return g;
}

/* ---- plans ---- */

static Shape shape_of(int B, int T, int C, int NH) {
    assert(B > 0 && T > 0 && NH > 0 && C % NH == 0);
    return (Shape){.B = B, .NH = NH, .T = T, .HS = C / NH};
}

static const Plans *find(const CudnnAttention *attention, const Shape *shape) {
    for (int i = 0; i < attention->count; i++)
        if (memcmp(&attention->plans[i].shape, shape, sizeof *shape) == 0)
            return &attention->plans[i];
    return NULL;
}

/* NULL, or why not. */
static const char *compile(CudnnGraph *graph, Cudnn *cudnn) {
    if (!graph)
        return "no memory";
    return cudnn_graph_compile(graph, cudnn) ? NULL : cudnn_graph_why(graph);
}

static const Plans *build(CudnnAttention *attention, const Shape *shape) {
    Plans *plans = &attention->plans[attention->count++];
    CudnnPass backward = attention->deterministic ? CUDNN_BACKWARD_DETERMINISTIC : CUDNN_BACKWARD;
    *plans = (Plans){.shape = *shape, .scale = 1 / sqrtf((float)shape->HS)};
    plans->forward = write_pass(shape, CUDNN_FORWARD);
    plans->why = compile(plans->forward, attention->cudnn);
    if (plans->why)
        return plans;
    plans->backward = write_pass(shape, backward);
    plans->why = compile(plans->backward, attention->cudnn);
    return plans;
}

Status cudnn_attention_create(CudnnAttention **attention, Gpu *gpu, bool deterministic) {
    *attention = calloc(1, sizeof **attention);
    if (!*attention)
        return fault("no memory for attention by cuDNN");
    (*attention)->deterministic = deterministic;
    return cudnn_open(&(*attention)->cudnn, gpu);
}

void cudnn_attention_destroy(CudnnAttention *attention) {
    if (!attention)
        return;
    for (int i = 0; i < attention->count; i++) {
        cudnn_graph_destroy(attention->plans[i].forward);
        cudnn_graph_destroy(attention->plans[i].backward);
    }
    cudnn_close(attention->cudnn);
    free(attention);
}

bool cudnn_attention_prepare(CudnnAttention *attention, int B, int T, int C, int NH, const char **why) {
    Shape shape = shape_of(B, T, C, NH);
    const Plans *plans = find(attention, &shape);
    *why = "more shapes than are kept";
    if (!plans && attention->count == CUDNN_SHAPES_MAX)
        return false;
    if (!plans)
        plans = build(attention, &shape);
    *why = plans->why;
    return !plans->why;
}

int cudnn_attention_engines(const char *properties, CudnnPass pass, int B, int T, int C, int NH, char *why,
                            size_t why_bytes) {
    Shape shape = shape_of(B, T, C, NH);
    CudnnGraph *graph = write_pass(&shape, pass);
    int count = graph ? cudnn_graph_engines(graph, properties) : 0;
    snprintf(why, why_bytes, "%s", graph ? cudnn_graph_why(graph) : "no memory");
    cudnn_graph_destroy(graph);
    return count;
}

/* ---- use ---- */

static size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }
static size_t row_sum_bytes(const Shape *s) { return round_up((size_t)(s->B * s->NH * s->T) * sizeof(float)); }
static size_t dq_sum_bytes(const Shape *s, bool deterministic) {
    return deterministic ? 0 : round_up((size_t)(s->B * s->NH * s->T * s->HS) * sizeof(float));
}

size_t cudnn_attention_workspace_bytes(const CudnnAttention *attention, int B, int T, int C, int NH) {
    Shape shape = shape_of(B, T, C, NH);
    const Plans *plans = find(attention, &shape);
    assert(plans && !plans->why);
    size_t forward = cudnn_graph_workspace_bytes(plans->forward);
    size_t backward = row_sum_bytes(&shape) + dq_sum_bytes(&shape, attention->deterministic) +
                      cudnn_graph_workspace_bytes(plans->backward);
    return forward > backward ? forward : backward;
}

/* q, k and v lie side by side in each row of qkv, whose elements are bf16. */
static void point_into(void **pointers, int first, const void *qkv, int C) {
    for (int i = 0; i < 3; i++)
        pointers[first + i] = (char *)qkv + (size_t)i * (size_t)C * 2;
}

static void set_scalars(void **pointers, const Plans *plans) {
    static const float minus_infinity = -INFINITY, one = 1;
    pointers[SCALE] = (void *)&plans->scale;
    pointers[MINUS_INFINITY] = (void *)&minus_infinity;
    pointers[ONE] = (void *)&one;
}

void cudnn_attention_forward(CudnnAttention *attention, void *y, float *lse, const void *qkv, void *workspace, int B,
                             int T, int C, int NH) {
    Shape shape = shape_of(B, T, C, NH);
    const Plans *plans = find(attention, &shape);
    assert(plans && !plans->why);
    void *pointers[NAMES] = {[Y] = y, [LSE] = lse};
    point_into(pointers, Q, qkv, C);
    set_scalars(pointers, plans);
    cudnn_graph_execute(plans->forward, attention->cudnn, pointers, NAMES, workspace);
}

void cudnn_attention_backward(CudnnAttention *attention, void *dqkv, const void *dy, const void *y, const void *qkv,
                              const float *lse, void *workspace, int B, int T, int C, int NH) {
    Shape shape = shape_of(B, T, C, NH);
    const Plans *plans = find(attention, &shape);
    assert(plans && !plans->why);
    char *row_sum = workspace, *dq_sum = row_sum + row_sum_bytes(&shape);
    char *rest = dq_sum + dq_sum_bytes(&shape, attention->deterministic);
    void *pointers[NAMES] = {[Y] = (void *)y, [LSE] = (void *)lse, [DY] = (void *)dy, [ROW_SUM] = row_sum,
                             [DQ_SUM] = dq_sum};
    point_into(pointers, Q, qkv, C);
    point_into(pointers, DQ, dqkv, C);
    set_scalars(pointers, plans);
    cudnn_graph_execute(plans->backward, attention->cudnn, pointers, NAMES, rest);
}
