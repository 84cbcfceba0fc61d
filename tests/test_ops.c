/* Every operation of the cpu device against the obvious loops in float64, on shapes that fit no vector and no tile,
 * with 1, 2 and 3 threads, overwriting and accumulating. Outputs and scratch start as NaN, so what is not written or
 * read too early fails; every operation runs twice and must give the same bits. */
#include "base/memory.h"
#include "base/random.h"
#include "model/ops.h"
#include "tests/check.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS_MAX = 3 };

/* ---- tools ---- */

static float *poisoned(size_t count) {
    float *values = malloc((count ? count : 1) * sizeof *values);
    assert_non_null(values);
    memset(values, 0xff, count * sizeof *values);
    return values;
}

/* Uniform in [-range, range), another array for another stream. */
static float *drawn(size_t count, uint64_t stream, float range) {
    float *values = poisoned(count);
    for (size_t i = 0; i < count; i++)
        values[i] = range * (float)(2 * random_uniform(7, stream, i) - 1);
    return values;
}

static float *copy_of(const float *values, size_t count) {
    float *copy = poisoned(count);
    memcpy(copy, values, count * sizeof *copy);
    return copy;
}

/* What an output holds before the call: numbers to add to, or NaN. */
static float *before(size_t count, bool accumulate) { return accumulate ? drawn(count, 99, 1) : poisoned(count); }

static double *zeros(size_t count) {
    double *values = calloc(count ? count : 1, sizeof *values);
    assert_non_null(values);
    return values;
}

/* f64 start of a reference: the old contents under accumulation. */
static double *reference_start(size_t count, bool accumulate) {
    double *values = zeros(count);
    float *old = before(count, accumulate);
    for (size_t i = 0; i < count && accumulate; i++)
        values[i] = (double)old[i];
    free(old);
    return values;
}

static void check_within(double bound, const char *what, const float *actual, const double *expected, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!(fabs((double)actual[i] - expected[i]) <= bound * (1 + fabs(expected[i]))))
            fail_msg("%s[%zu]: expected %.9g, found %.9g", what, i, expected[i], (double)actual[i]);
}

static void check(const char *what, const float *actual, const double *expected, size_t count) {
    check_within(1e-5, what, actual, expected, count);
}

static void check_same_bits(const char *what, const float *a, const float *b, size_t count) {
    if (memcmp(a, b, count * sizeof *a) != 0)
        fail_msg("%s: two runs differ", what);
}

static OpsContext context_create(int threads, int rows, int T, int C, int NH) {
    omp_set_num_threads(threads);
    OpsLimits limits = {.rows = rows, .T = T, .C = C, .NH = NH};
    OpsContext context = {0};
    ops_cpu.prepare(&context, &limits);
    assert_int_equal(context.threads, threads);
    context.scratch = memory_alloc(&host_memory, context.scratch_bytes);
    memset(context.scratch, 0xff, context.scratch_bytes);
    return context;
}

static void context_destroy(OpsContext *context) { memory_free(&host_memory, context->scratch); }

/* ---- embedding ---- */

static void embedding_case(int B, int T, int C, int threads, bool accumulate) {
    enum { V = 7 };
    int maxT = T + 3, rows = B * T;
    size_t elems = (size_t)(rows * C), positions = (size_t)(maxT * C);
    float *wte = drawn((size_t)(V * C), 1, 1), *wpe = drawn(positions, 2, 1), *dx = drawn(elems, 3, 1);
    float *x = poisoned(elems), *dwte = drawn((size_t)(V * C), 4, 1), *dwpe = before(positions, accumulate);
    double *x_ref = zeros(elems), *dwte_ref = zeros((size_t)(V * C));
    double *dwpe_ref = reference_start(positions, accumulate);
    int tokens[64];
    for (int i = 0; i < V * C; i++)
        dwte_ref[i] = (double)dwte[i];
    for (int row = 0; row < rows; row++) {
        tokens[row] = (int)(random_bits(7, 5, (uint64_t)row) % V);
        for (int c = 0; c < C; c++) {
            x_ref[row * C + c] = (double)wte[tokens[row] * C + c] + (double)wpe[row % T * C + c];
            dwte_ref[tokens[row] * C + c] += (double)dx[row * C + c];
            dwpe_ref[row % T * C + c] += (double)dx[row * C + c];
        }
    }
    OpsContext context = context_create(threads, rows, T, C, 1);
    ops_cpu.embedding_forward(&context, x, tokens, wte, wpe, B, T, C);
    check("x", x, x_ref, elems);
    ops_cpu.embedding_backward(&context, dwte, dwpe, dx, tokens, B, T, C, maxT, accumulate);
    check("dwte", dwte, dwte_ref, (size_t)(V * C));
    check("dwpe", dwpe, dwpe_ref, positions);
    context_destroy(&context);
    free(wte), free(wpe), free(dx), free(x), free(dwte), free(dwpe), free(x_ref), free(dwte_ref), free(dwpe_ref);
}

static void test_embedding(void **state) {
    (void)state;
    for (int threads = 1; threads <= THREADS_MAX; threads++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            embedding_case(1, 1, 5, threads, accumulate);
            embedding_case(2, 5, 12, threads, accumulate);
            embedding_case(1, 33, 50, threads, accumulate);
        }
}

/* ---- LayerNorm ---- */

typedef struct LayerNormRef {
    double *y, *dx, *dw, *db;
} LayerNormRef;

static void layernorm_reference(LayerNormRef *ref, const float *x, const float *w, const float *b, const float *dy,
                                int rows, int C) {
    for (int row = 0; row < rows; row++) {
        const float *in = x + row * C, *din = dy + row * C;
        double mean = 0, variance = 0, sum = 0, product = 0;
        for (int c = 0; c < C; c++)
            mean += (double)in[c] / C;
        for (int c = 0; c < C; c++)
            variance += ((double)in[c] - mean) * ((double)in[c] - mean) / C;
        double rstd = 1 / sqrt(variance + 1e-5);
        for (int c = 0; c < C; c++) {
            double normal = ((double)in[c] - mean) * rstd, g = (double)din[c] * (double)w[c];
            ref->y[row * C + c] = normal * (double)w[c] + (double)b[c];
            ref->dw[c] += (double)din[c] * normal;
            ref->db[c] += (double)din[c];
            sum += g / C;
            product += g * normal / C;
        }
        for (int c = 0; c < C; c++) {
            double normal = ((double)in[c] - mean) * rstd;
            ref->dx[row * C + c] += rstd * ((double)din[c] * (double)w[c] - sum - normal * product);
        }
    }
}

static void layernorm_case(int rows, int C, int threads, bool residual, bool accumulate) {
    size_t elems = (size_t)(rows * C), width = (size_t)C;
    float *x = drawn(elems, 1, 2), *w = drawn(width, 2, 1), *b = drawn(width, 3, 1), *dy = drawn(elems, 4, 1);
    float *y = poisoned(elems), *mean = poisoned((size_t)rows), *rstd = poisoned((size_t)rows);
    LayerNormRef ref = {zeros(elems), reference_start(elems, residual), reference_start(width, accumulate),
                        reference_start(width, accumulate)};
    layernorm_reference(&ref, x, w, b, dy, rows, C);
    OpsContext context = context_create(threads, rows, rows, C, 1);
    ops_cpu.layernorm_forward(&context, y, mean, rstd, x, w, b, rows, C);
    check("y", y, ref.y, elems);
    float *first_dw = NULL;
    for (int run = 0; run < 2; run++) {
        float *dx = before(elems, residual), *dw = before(width, accumulate), *db = before(width, accumulate);
        ops_cpu.layernorm_backward(&context, dx, dw, db, dy, x, mean, rstd, w, rows, C, residual, accumulate);
        check("dx", dx, ref.dx, elems);
        check("dw", dw, ref.dw, width);
        check("db", db, ref.db, width);
        if (run == 0)
            first_dw = copy_of(dw, width);
        check_same_bits("dw", dw, first_dw, width);
        free(dx), free(dw), free(db);
    }
    context_destroy(&context);
    free(x), free(w), free(b), free(dy), free(y), free(mean), free(rstd), free(first_dw);
    free(ref.y), free(ref.dx), free(ref.dw), free(ref.db);
}

static void test_layernorm(void **state) {
    (void)state;
    for (int threads = 1; threads <= THREADS_MAX; threads++)
        for (int flags = 0; flags < 4; flags++) {
            layernorm_case(1, 5, threads, flags & 1, flags & 2);
            layernorm_case(33, 20, threads, flags & 1, flags & 2);
            layernorm_case(67, 100, threads, flags & 1, flags & 2);
        }
}

/* A constant row has variance 0: eps keeps the result finite. */
static void test_layernorm_constant_row(void **state) {
    (void)state;
    enum { C = 20 };
    float x[C], w[C], b[C], y[C], mean[1], rstd[1];
    for (int c = 0; c < C; c++)
        x[c] = 3, w[c] = 1, b[c] = 0.5f;
    OpsContext context = context_create(1, 1, 1, C, 1);
    ops_cpu.layernorm_forward(&context, y, mean, rstd, x, w, b, 1, C);
    for (int c = 0; c < C; c++)
        assert_close((double)y[c], 0.5, 1e-6);
    context_destroy(&context);
}

/* ---- linear ---- */

static const double root = 0.79788456080286536; /* sqrt(2/pi) */

static double gelu_reference(double x) { return 0.5 * x * (1 + tanh(root * (x + 0.044715 * x * x * x))); }

static double gelu_slope_reference(double x) {
    double u = root * (x + 0.044715 * x * x * x), t = tanh(u);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

static void linear_forward_case(int rows, int C, int OC, int threads, bool bias, bool residual, bool with_gelu) {
    size_t elems = (size_t)(rows * OC);
    float *x = drawn((size_t)(rows * C), 1, 1), *w = drawn((size_t)(OC * C), 2, 1), *b = drawn((size_t)OC, 3, 1);
    float *add = drawn(elems, 4, 1), *y = poisoned(elems), *act = poisoned(elems);
    double *y_ref = zeros(elems), *act_ref = zeros(elems);
    for (int row = 0; row < rows; row++)
        for (int o = 0; o < OC; o++) {
            double sum = (bias ? (double)b[o] : 0) + (residual ? (double)add[row * OC + o] : 0);
            for (int c = 0; c < C; c++)
                sum += (double)x[row * C + c] * (double)w[o * C + c];
            y_ref[row * OC + o] = sum;
            act_ref[row * OC + o] = gelu_reference(sum);
        }
    OpsContext context = context_create(threads, rows, rows, C, 1);
    ops_cpu.linear_forward(&context, y, with_gelu ? act : NULL, x, w, bias ? b : NULL, residual ? add : NULL, rows, C,
                           OC);
    check("y", y, y_ref, elems);
    if (with_gelu)
        check("gelu(y)", act, act_ref, elems);
    context_destroy(&context);
    free(x), free(w), free(b), free(add), free(y), free(act), free(y_ref), free(act_ref);
}

static void test_linear_forward(void **state) {
    (void)state;
    for (int threads = 1; threads <= THREADS_MAX; threads++)
        for (int flags = 0; flags < 8; flags++) {
            linear_forward_case(1, 5, 7, threads, flags & 1, flags & 2, flags & 4);
            linear_forward_case(5, 12, 36, threads, flags & 1, flags & 2, flags & 4);
            linear_forward_case(33, 50, 131, threads, flags & 1, flags & 2, flags & 4);
            linear_forward_case(2, 64, 1003, threads, flags & 1, flags & 2, flags & 4);
        }
}

typedef struct LinearRef {
    double *dx, *dw, *db;
} LinearRef;

static void linear_backward_reference(LinearRef *ref, const float *dy, const float *x, const float *w, const float *pre,
                                      int rows, int C, int OC) {
    for (int row = 0; row < rows; row++)
        for (int o = 0; o < OC; o++) {
            double gradient = (double)dy[row * OC + o];
            ref->db[o] += gradient;
            for (int c = 0; c < C; c++) {
                ref->dx[row * C + c] += gradient * (double)w[o * C + c];
                ref->dw[o * C + c] += gradient * (double)x[row * C + c];
            }
        }
    for (int i = 0; pre && i < rows * C; i++)
        ref->dx[i] *= gelu_slope_reference((double)pre[i]);
}

static void linear_backward_case(int rows, int C, int OC, int threads, bool bias, bool with_gelu, bool accumulate) {
    size_t in = (size_t)(rows * C), out = (size_t)(rows * OC), weights = (size_t)(OC * C), width = (size_t)OC;
    float *x = drawn(in, 1, 1), *w = drawn(weights, 2, 1), *dy = drawn(out, 3, 1), *pre = drawn(in, 4, 3);
    LinearRef ref = {zeros(in), reference_start(weights, accumulate), reference_start(width, accumulate)};
    linear_backward_reference(&ref, dy, x, w, with_gelu ? pre : NULL, rows, C, OC);
    OpsContext context = context_create(threads, rows, rows, C, 1);
    float *first = NULL;
    for (int run = 0; run < 2; run++) {
        float *dx = poisoned(in), *dw = before(weights, accumulate), *db = before(width, accumulate);
        LinearGrads grads = {
            .dx = dx, .dw = dw, .db = bias ? db : NULL, .gelu = with_gelu ? pre : NULL, .accumulate = accumulate};
        ops_cpu.linear_backward(&context, &grads, dy, x, w, rows, C, OC);
        check("dx", dx, ref.dx, in);
        check("dw", dw, ref.dw, weights);
        if (bias)
            check("db", db, ref.db, width);
        if (run == 0)
            first = copy_of(dx, in);
        check_same_bits("dx", dx, first, in);
        free(dx), free(dw), free(db);
    }
    context_destroy(&context);
    free(x), free(w), free(dy), free(pre), free(first), free(ref.dx), free(ref.dw), free(ref.db);
}

static void test_linear_backward(void **state) {
    (void)state;
    for (int threads = 1; threads <= THREADS_MAX; threads++)
        for (int flags = 0; flags < 8; flags++) {
            linear_backward_case(1, 5, 7, threads, flags & 1, flags & 2, flags & 4);
            linear_backward_case(5, 36, 12, threads, flags & 1, flags & 2, flags & 4);
            linear_backward_case(33, 131, 50, threads, flags & 1, flags & 2, flags & 4);
        }
}

/* GELU and its slope over their whole range, seen through a linear layer of width 1: x and dy pass unchanged. */
static void test_gelu_range(void **state) {
    (void)state;
    enum { ROWS = 2000 };
    static float x[ROWS], y[ROWS], act[ROWS], one[ROWS], dx[ROWS];
    float w[1] = {1}, dw[1];
    for (int i = 0; i < ROWS; i++)
        x[i] = 0.01f * (float)(i - ROWS / 2), one[i] = 1;
    x[0] = -1e4f, x[1] = 1e4f, x[2] = NAN;
    OpsContext context = context_create(2, ROWS, ROWS, 1, 1);
    ops_cpu.linear_forward(&context, y, act, x, w, NULL, NULL, ROWS, 1, 1);
    LinearGrads grads = {.dx = dx, .dw = dw, .gelu = x};
    ops_cpu.linear_backward(&context, &grads, one, act, w, ROWS, 1, 1);
    assert_true(isnan(act[2]) && isnan(dx[2]));
    for (int i = 0; i < ROWS; i++)
        if (i != 2) {
            double exact = gelu_reference((double)x[i]), slope = gelu_slope_reference((double)x[i]);
            assert_close((double)act[i], exact, 4e-7 * fmax(fabs(exact), 1));
            assert_close((double)dx[i], i < 2 ? (double)i : slope, 2e-6);
        }
    context_destroy(&context);
}

/* ---- attention ---- */

typedef struct Attention {
    int B, T, C, NH;
    const float *qkv;
} Attention;

static double qkv_at(const Attention *a, int b, int t, int which, int head, int d) {
    int HS = a->C / a->NH;
    return (double)a->qkv[((b * a->T + t) * 3 + which) * a->C + head * HS + d];
}

/* p[0..t] = softmax of query t; returns log sum exp. */
static double attention_row(const Attention *a, int b, int head, int t, double *p) {
    int HS = a->C / a->NH;
    double max = -INFINITY, sum = 0;
    for (int s = 0; s <= t; s++) {
        p[s] = 0;
        for (int d = 0; d < HS; d++)
            p[s] += qkv_at(a, b, t, 0, head, d) * qkv_at(a, b, s, 1, head, d) / sqrt(HS);
        max = fmax(max, p[s]);
    }
    for (int s = 0; s <= t; s++)
        sum += p[s] = exp(p[s] - max);
    for (int s = 0; s <= t; s++)
        p[s] /= sum;
    return max + log(sum);
}

/* y, lse, dqkv of one query. */
static void attention_query(const Attention *a, int b, int head, int t, const float *dy, double *y, double *lse,
                            double *dqkv, double *p, double *dp) {
    int HS = a->C / a->NH, C = a->C, at = (b * a->T + t) * C + head * HS;
    double product = 0;
    lse[(b * a->NH + head) * a->T + t] = attention_row(a, b, head, t, p);
    for (int s = 0; s <= t; s++) {
        dp[s] = 0;
        for (int d = 0; d < HS; d++) {
            y[at + d] += p[s] * qkv_at(a, b, s, 2, head, d);
            dp[s] += (double)dy[at + d] * qkv_at(a, b, s, 2, head, d);
            dqkv[((b * a->T + s) * 3 + 2) * C + head * HS + d] += p[s] * (double)dy[at + d];
        }
        product += p[s] * dp[s];
    }
    for (int s = 0; s <= t; s++)
        for (int d = 0; d < HS; d++) {
            double ds = p[s] * (dp[s] - product) / sqrt(HS);
            dqkv[((b * a->T + t) * 3 + 0) * C + head * HS + d] += ds * qkv_at(a, b, s, 1, head, d);
            dqkv[((b * a->T + s) * 3 + 1) * C + head * HS + d] += ds * qkv_at(a, b, t, 0, head, d);
        }
}

static void attention_case(int B, int T, int NH, int HS, int threads, float range, double bound) {
    int C = NH * HS;
    size_t elems = (size_t)(B * T * C), rows = (size_t)(B * NH * T);
    float *qkv = drawn(3 * elems, 1, range), *dy = drawn(elems, 2, 1);
    Attention a = {B, T, C, NH, qkv};
    double *y_ref = zeros(elems), *lse_ref = zeros(rows), *dqkv_ref = zeros(3 * elems), *p = zeros((size_t)T),
           *dp = zeros((size_t)T);
    for (int task = 0; task < B * NH * T; task++)
        attention_query(&a, task / (NH * T), task / T % NH, task % T, dy, y_ref, lse_ref, dqkv_ref, p, dp);
    OpsContext context = context_create(threads, B * T, T, C, NH);
    float *first = NULL;
    for (int run = 0; run < 2; run++) {
        float *y = poisoned(elems), *lse = poisoned(rows), *dqkv = poisoned(3 * elems);
        ops_cpu.attention_forward(&context, y, lse, qkv, B, T, C, NH);
        check_within(bound, "y", y, y_ref, elems);
        check_within(bound, "lse", lse, lse_ref, rows);
        ops_cpu.attention_backward(&context, dqkv, dy, y, qkv, lse, B, T, C, NH);
        check_within(bound, "dqkv", dqkv, dqkv_ref, 3 * elems);
        if (run == 0)
            first = copy_of(dqkv, 3 * elems);
        check_same_bits("dqkv", dqkv, first, 3 * elems);
        free(y), free(lse), free(dqkv);
    }
    context_destroy(&context);
    free(qkv), free(dy), free(first), free(y_ref), free(lse_ref), free(dqkv_ref), free(p), free(dp);
}

static void test_attention(void **state) {
    (void)state;
    static const int lengths[] = {1, 5, 33, 64, 130}, sizes[] = {1, 12, 20, 64, 80};
    for (int threads = 1; threads <= THREADS_MAX; threads++)
        for (int length = 0; length < 5; length++)
            for (int size = 0; size < 5; size++)
                attention_case(2, lengths[length], 3, sizes[size], threads, 1, 1e-5);
}

/* Scores of some hundreds: exp without the maximum subtracted would overflow. Their rounding in f32, 64 products of
 * up to 144 each, is what the bound allows for. */
static void test_attention_large_scores(void **state) {
    (void)state;
    attention_case(1, 40, 1, 64, 1, 12, 5e-4);
}

/* Positions arrive in several calls; each call's result is that of causal attention over all of them. */
static void cached_case(int T, int NH, int HS, int threads, const int *counts) {
    int C = NH * HS;
    size_t elems = (size_t)(T * C);
    float *qkv = drawn(3 * elems, 1, 1), *cache = poisoned(2 * elems), *y = poisoned(elems);
    Attention a = {1, T, C, NH, qkv};
    double *y_ref = zeros(elems), *p = zeros((size_t)T);
    for (int task = 0; task < NH * T; task++) {
        int head = task / T, t = task % T;
        attention_row(&a, 0, head, t, p);
        for (int s = 0; s <= t; s++)
            for (int d = 0; d < HS; d++)
                y_ref[t * C + head * HS + d] += p[s] * qkv_at(&a, 0, s, 2, head, d);
    }
    OpsContext context = context_create(threads, T, T, C, NH);
    for (int first = 0, call = 0; first < T; first += counts[call++])
        ops_cpu.attention_cached(&context, y + first * C, cache, qkv + 3 * first * C, first, counts[call], C, NH);
    check("y", y, y_ref, elems);
    context_destroy(&context);
    free(qkv), free(cache), free(y), free(y_ref), free(p);
}

static void test_attention_cached(void **state) {
    (void)state;
    for (int threads = 1; threads <= THREADS_MAX; threads++) {
        cached_case(5, 2, 12, threads, (const int[]){1, 1, 1, 1, 1});
        cached_case(33, 3, 20, threads, (const int[]){30, 1, 2});
        cached_case(70, 2, 64, threads, (const int[]){1, 68, 1});
    }
}

/* ---- head ---- */

typedef struct Head {
    int rows, C, V, Vp;
    float *x, *wte;
    int targets[64];
} Head;

static Head head_create(int rows, int C, int V, int Vp) {
    Head head = {.rows = rows, .C = C, .V = V, .Vp = Vp};
    head.x = drawn((size_t)(rows * C), 1, 1);
    head.wte = drawn((size_t)(Vp * C), 2, 1);
    for (int i = V * C; i < Vp * C; i++)
        head.wte[i] = 5; /* must not count, whatever it is */
    for (int row = 0; row < rows; row++)
        head.targets[row] = (int)(random_bits(7, 3, (uint64_t)row) % (uint64_t)V);
    head.targets[0] = V - 1; /* the last real token */
    return head;
}

static void head_destroy(Head *head) { free(head->x), free(head->wte); }

/* Loss of one row and its share of the gradients of scale * sum(losses). */
static double head_row(const Head *head, int row, double scale, double *dx, double *dwte) {
    int C = head->C;
    const float *x = head->x + row * C, *wte = head->wte;
    double *logits = zeros((size_t)head->V), max = -INFINITY, sum = 0;
    for (int v = 0; v < head->V; v++) {
        for (int c = 0; c < C; c++)
            logits[v] += (double)x[c] * (double)wte[v * C + c];
        max = fmax(max, logits[v]);
    }
    for (int v = 0; v < head->V; v++)
        sum += exp(logits[v] - max);
    double loss = max + log(sum) - logits[head->targets[row]];
    for (int v = 0; v < head->V; v++) {
        double gradient = scale * (exp(logits[v] - max) / sum - (v == head->targets[row]));
        for (int c = 0; c < C; c++) {
            dx[row * C + c] += gradient * (double)wte[v * C + c];
            dwte[v * C + c] += gradient * (double)x[c];
        }
    }
    free(logits);
    return loss;
}

static void head_case(int rows, int C, int V, int Vp, int threads, bool accumulate) {
    const float scale = 0.37f;
    Head head = head_create(rows, C, V, Vp);
    size_t in = (size_t)(rows * C), weights = (size_t)(Vp * C);
    double *losses_ref = zeros((size_t)rows), *dx_ref = zeros(in), *dwte_ref = reference_start(weights, accumulate);
    for (int row = 0; row < rows; row++)
        losses_ref[row] = head_row(&head, row, (double)scale, dx_ref, dwte_ref);
    OpsContext context = context_create(threads, rows, rows, C, 1);
    float *losses = poisoned((size_t)rows), *logits = poisoned((size_t)(rows * Vp)), *first = NULL;
    ops_cpu.head_loss(&context, losses, logits, head.x, head.wte, head.targets, rows, C, V, Vp);
    check("losses, forward only", losses, losses_ref, (size_t)rows);
    for (int run = 0; run < 2; run++) {
        float *dx = poisoned(in), *dwte = before(weights, accumulate);
        memset(losses, 0xff, (size_t)rows * sizeof *losses);
        ops_cpu.head_backward(&context, losses, logits, dx, dwte, head.x, head.wte, head.targets, rows, C, V, Vp, scale,
                              accumulate);
        check("losses", losses, losses_ref, (size_t)rows);
        check("dx", dx, dx_ref, in);
        check("dwte", dwte, dwte_ref, weights);
        for (int i = V * C; i < Vp * C && !accumulate; i++)
            assert_true(dwte[i] == 0);
        if (run == 0)
            first = copy_of(dwte, weights);
        check_same_bits("dwte", dwte, first, weights);
        free(dx), free(dwte);
    }
    context_destroy(&context);
    free(losses), free(logits), free(first), free(losses_ref), free(dx_ref), free(dwte_ref);
    head_destroy(&head);
}

static void test_head(void **state) {
    (void)state;
    for (int threads = 1; threads <= THREADS_MAX; threads++)
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            head_case(1, 5, 3, 3, threads, accumulate);
            head_case(5, 12, 97, 128, threads, accumulate);
            head_case(33, 20, 257, 384, threads, accumulate);
            head_case(3, 50, 5003, 5120, threads, accumulate);
        }
}

/* Logits of +-1e4 neither overflow nor vanish; a NaN anywhere in a row makes its loss NaN, and no other. */
static void test_head_extremes(void **state) {
    (void)state;
    enum { ROWS = 3, C = 2, V = 4 };
    float x[ROWS * C] = {1, 0, 0, 1, NAN, 0}, wte[V * C] = {1e4f, 0, 0, 0, -1e4f, 0, 0, 1};
    float losses[ROWS], logits[ROWS * V];
    int targets[ROWS] = {2, 3, 0};
    OpsContext context = context_create(1, ROWS, ROWS, C, 1);
    ops_cpu.head_loss(&context, losses, logits, x, wte, targets, ROWS, C, V, V);
    assert_close((double)losses[0], 2e4, 1e-2);
    assert_close((double)losses[1], log(3 + exp(1)) - 1, 1e-6);
    assert_true(isnan(losses[2]));
    targets[0] = 3;
    wte[2 * C] = NAN; /* a logit that is neither the first, the largest nor the target */
    ops_cpu.head_loss(&context, losses, logits, x, wte, targets, 1, C, V, V);
    assert_true(isnan(losses[0]));
    context_destroy(&context);
}

static void test_mean(void **state) {
    (void)state;
    enum { COUNT = 1001 };
    float values[COUNT];
    for (int i = 0; i < COUNT; i++)
        values[i] = (float)i; /* exact in f64 */
    OpsContext context = context_create(2, 1, 1, 1, 1);
    assert_true(ops_cpu.mean(&context, values, COUNT) == 500);
    values[7] = NAN;
    assert_true(isnan(ops_cpu.mean(&context, values, COUNT)));
    context_destroy(&context);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_embedding),       cmocka_unit_test(test_layernorm),
    cmocka_unit_test(test_layernorm_constant_row),
    cmocka_unit_test(test_linear_forward),  cmocka_unit_test(test_linear_backward),
    cmocka_unit_test(test_gelu_range),      cmocka_unit_test(test_attention),
    cmocka_unit_test(test_attention_large_scores),
    cmocka_unit_test(test_attention_cached), cmocka_unit_test(test_head),
    cmocka_unit_test(test_head_extremes),   cmocka_unit_test(test_mean),
};

CHECK_MAIN(tests)
