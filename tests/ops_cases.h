/* Every operation of model/ops.h against the obvious loops in float64, on any device: on shapes that fit no vector and
 * no tile and on some that do, overwriting and accumulating. Outputs start as NaN, so what is not written fails;
 * operations whose sums could depend on timing run twice and must give the same bits. */
#ifndef TESTS_OPS_CASES_H
#define TESTS_OPS_CASES_H

#include "tests/ops_device.h"

/* ---- embedding ---- */

static void embedding_case(const OpsDevice *device, int B, int T, int C, int V, bool accumulate) {
    int maxT = T + 3, rows = B * T;
    size_t elems = (size_t)(rows * C), positions = (size_t)(maxT * C), table = (size_t)(V * C);
    Case c = case_begin(device, rows, T, C, 1);
    Array wte = weights(&c, table, 1, 1), wpe = weights(&c, positions, 2, 1), dx = acts(&c, elems, 3, 1);
    Array x = empty(&c, elems, true), dwte = drawn(&c, table, 4, 1, false);
    Array dwpe = before(&c, positions, accumulate, false);
    Reference x_ref = reference(&c, elems, NULL), dwte_ref = reference(&c, table, &dwte);
    Reference dwpe_ref = reference(&c, positions, accumulate ? &dwpe : NULL);
    int *tokens = host_bytes(&c, (size_t)rows * sizeof *tokens);
    for (int row = 0; row < rows; row++) {
        tokens[row] = (int)(random_bits(7, 5, (uint64_t)row) % (uint64_t)V);
        for (int i = 0; i < C; i++) {
            x_ref.value[row * C + i] = (double)wte.host[tokens[row] * C + i] + (double)wpe.host[row % T * C + i];
            dwte_ref.value[tokens[row] * C + i] += (double)dx.host[row * C + i];
            dwpe_ref.value[row % T * C + i] += (double)dx.host[row * C + i];
        }
    }
    int *device_tokens = integers(&c, tokens, (size_t)rows);
    c.ops->embedding_forward(&c.context, x.device, device_tokens, wte.device, wpe.device, B, T, C);
    check(&c, "x", &x, &x_ref);
    c.ops->embedding_backward(&c.context, dwte.device, dwpe.device, dx.device, device_tokens, B, T, C, maxT,
                              accumulate);
    check(&c, "dwte", &dwte, &dwte_ref);
    check(&c, "dwpe", &dwpe, &dwpe_ref);
    case_end(&c);
}

static void check_embedding(const OpsDevice *device) {
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        embedding_case(device, 1, 1, 5, 7, accumulate);
        embedding_case(device, 2, 5, 12, 7, accumulate);
        embedding_case(device, 1, 33, 50, 7, accumulate);
        embedding_case(device, 3, 700, 4, 70001, accumulate); /* tokens of three bytes */
        embedding_case(device, 2, 3, 16, 5, accumulate);
    }
}

/* Sums are taken in the order of positions: 1 + 2^-24 + 2^-24 is 1 in f32, the other way round more. */
static void check_embedding_order(const OpsDevice *device) {
    enum { ROWS = 3, C = 4 };
    Case c = case_begin(device, ROWS, ROWS, C, 1);
    Array dx = acts(&c, ROWS * C, 1, 1), dwte = empty(&c, C, false), dwpe = empty(&c, ROWS * C, false);
    for (int i = 0; i < ROWS * C; i++)
        dx.host[i] = i < C ? 1 : 0x1p-24f;
    give(&c, &dx);
    memset(dwte.host, 0, C * sizeof(float));
    give(&c, &dwte);
    const int tokens[ROWS] = {0};
    c.ops->embedding_backward(&c.context, dwte.device, dwpe.device, dx.device, integers(&c, tokens, ROWS), 1, ROWS, C,
                              ROWS, false);
    take(&c, &dwte);
    for (int i = 0; i < C; i++)
        assert_true(dwte.host[i] == 1);
    case_end(&c);
}

/* ---- LayerNorm ---- */

typedef struct LayerNormRef {
    Reference y, dx, dw, db;
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
            ref->y.value[row * C + c] = normal * (double)w[c] + (double)b[c];
            ref->dw.value[c] += (double)din[c] * normal;
            ref->db.value[c] += (double)din[c];
            sum += g / C;
            product += g * normal / C;
        }
        for (int c = 0; c < C; c++) {
            double normal = ((double)in[c] - mean) * rstd;
            ref->dx.value[row * C + c] += rstd * ((double)din[c] * (double)w[c] - sum - normal * product);
        }
    }
}

static void layernorm_case(const OpsDevice *device, int rows, int C, bool residual, bool accumulate) {
    size_t elems = (size_t)(rows * C), width = (size_t)C;
    Case c = case_begin(device, rows, rows, C, 1);
    Array x = acts(&c, elems, 1, 2), w = weights(&c, width, 2, 1), b = weights(&c, width, 3, 1);
    Array dy = acts(&c, elems, 4, 1), y = empty(&c, elems, true);
    Array mean = empty(&c, (size_t)rows, false), rstd = empty(&c, (size_t)rows, false);
    Array old_dx = before(&c, elems, residual, true), old = before(&c, width, accumulate, false), first_dw = {0};
    LayerNormRef ref = {reference(&c, elems, NULL), reference(&c, elems, residual ? &old_dx : NULL),
                        reference(&c, width, accumulate ? &old : NULL), reference(&c, width, accumulate ? &old : NULL)};
    layernorm_reference(&ref, x.host, w.host, b.host, dy.host, rows, C);
    c.ops->layernorm_forward(&c.context, y.device, mean.device, rstd.device, x.device, w.device, b.device, rows, C);
    check(&c, "y", &y, &ref.y);
    for (int run = 0; run < 2; run++) {
        Array dx = before(&c, elems, residual, true);
        Array dw = before(&c, width, accumulate, false), db = before(&c, width, accumulate, false);
        c.ops->layernorm_backward(&c.context, dx.device, dw.device, db.device, dy.device, x.device, mean.device,
                                  rstd.device, w.device, rows, C, residual, accumulate);
        check(&c, "dx", &dx, &ref.dx);
        check(&c, "dw", &dw, &ref.dw);
        check(&c, "db", &db, &ref.db);
        if (run == 0)
            first_dw = dw;
        check_same_bits("dw", &dw, &first_dw);
    }
    case_end(&c);
}

static void check_layernorm(const OpsDevice *device) {
    for (int flags = 0; flags < 4; flags++) {
        layernorm_case(device, 1, 5, flags & 1, flags & 2);
        layernorm_case(device, 33, 20, flags & 1, flags & 2);
        layernorm_case(device, 67, 100, flags & 1, flags & 2);
        layernorm_case(device, 9, 320, flags & 1, flags & 2);
    }
}

/* About as wide as what a device keeps on the chip: the widest, all of its shared memory, which is too much; more. */
static void check_layernorm_wide(const OpsDevice *device) {
    layernorm_case(device, 3, 6016, true, true);
    layernorm_case(device, 3, 6144, true, true);
    layernorm_case(device, 3, 6160, true, true);
}

/* A constant row has variance 0: eps keeps the result finite. A NaN makes its row NaN, and no other. */
static void check_layernorm_rows(const OpsDevice *device) {
    enum { ROWS = 3, C = 20 };
    Case c = case_begin(device, ROWS, ROWS, C, 1);
    float ones[C], halves[C];
    Array x = acts(&c, ROWS * C, 1, 1), y = empty(&c, ROWS * C, true);
    for (int i = 0; i < C; i++)
        x.host[i] = 3, ones[i] = 1, halves[i] = 0.5f;
    x.host[C + 7] = NAN;
    give(&c, &x);
    Array w = weights_of(&c, ones, C), b = weights_of(&c, halves, C);
    Array mean = empty(&c, ROWS, false), rstd = empty(&c, ROWS, false);
    c.ops->layernorm_forward(&c.context, y.device, mean.device, rstd.device, x.device, w.device, b.device, ROWS, C);
    take(&c, &y);
    for (int i = 0; i < C; i++) {
        assert_close((double)y.host[i], 0.5, 1e-6);
        assert_true(isnan(y.host[C + i]) && !isnan(y.host[2 * C + i]));
    }
    case_end(&c);
}

/* ---- linear ---- */

static const double root = 0.79788456080286536; /* sqrt(2/pi) */

static double gelu_reference(double x) { return 0.5 * x * (1 + tanh(root * (x + 0.044715 * x * x * x))); }

static double gelu_slope_reference(double x) {
    double u = root * (x + 0.044715 * x * x * x), t = tanh(u);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x);
}

enum { BIAS = 1, WITH_RESIDUAL = 2, WITH_GELU = 4, ACCUMULATE = 8 };

/* One output of x w^T + bias + add. A device may store it before the bias is added; its GELU is at most 1.13 times as
 * wrong as it is. */
static void linear_element(Reference *y, Reference *act, size_t at, double product, double factors, double bias,
                           double add) {
    double sum = product + bias + add;
    y->value[at] = sum;
    y->rounding[at] = fabs(product + add);
    y->factors[at] = factors;
    act->value[at] = gelu_reference(sum);
    act->rounding[at] = 1.13 * (fabs(sum) + fabs(product + add));
    act->factors[at] = 1.13 * factors;
}

/* As part of the product, and again from what the product left: with f32 the same bits. */
static void check_gelu(Case *c, const Array *y, Array *act, const Reference *act_ref, int rows, int OC) {
    Array again = empty(c, (size_t)(rows * OC), true);
    check(c, "gelu(y)", act, act_ref);
    c->ops->gelu_forward(&c->context, again.device, y->device, rows, OC);
    check(c, "gelu(y) again", &again, act_ref);
    if (c->device->act_error == 0)
        assert_memory_equal(again.host, act->host, (size_t)(rows * OC) * sizeof(float));
}

static void linear_forward_case(const OpsDevice *device, int rows, int C, int OC, int flags) {
    size_t elems = (size_t)(rows * OC);
    Case c = case_begin(device, rows, rows, C, 1);
    Array x = acts(&c, (size_t)(rows * C), 1, 1), w = weights(&c, (size_t)(OC * C), 2, 1);
    Array b = weights(&c, (size_t)OC, 3, 1), add = acts(&c, elems, 4, 1);
    Array y = empty(&c, elems, true), act = empty(&c, elems, true);
    Reference y_ref = reference(&c, elems, NULL), act_ref = reference(&c, elems, NULL);
    for (int row = 0; row < rows; row++)
        for (int o = 0; o < OC; o++) {
            size_t at = (size_t)(row * OC + o);
            double sum = 0, factors = 0;
            for (int i = 0; i < C; i++) {
                double term = (double)x.host[row * C + i] * (double)w.host[o * C + i];
                sum += term;
                factors += fabs(term);
            }
            linear_element(&y_ref, &act_ref, at, sum, factors, flags & BIAS ? (double)b.host[o] : 0,
                           flags & WITH_RESIDUAL ? (double)add.host[at] : 0);
        }
    c.ops->linear_forward(&c.context, y.device, flags & WITH_GELU ? act.device : NULL, x.device, w.device,
                          flags & BIAS ? b.device : NULL, flags & WITH_RESIDUAL ? add.device : NULL, rows, C, OC);
    check(&c, "y", &y, &y_ref);
    if (flags & WITH_GELU)
        check_gelu(&c, &y, &act, &act_ref, rows, OC);
    case_end(&c);
}

static void check_linear_forward(const OpsDevice *device) {
    for (int flags = 0; flags < 8; flags++) {
        linear_forward_case(device, 1, 5, 7, flags);
        linear_forward_case(device, 5, 12, 36, flags);
        linear_forward_case(device, 16, 32, 64, flags);
        linear_forward_case(device, 33, 50, 131, flags);
        linear_forward_case(device, 2, 64, 1003, flags);
    }
}

typedef struct LinearRef {
    Reference dx, dw, db;
} LinearRef;

static void linear_backward_reference(LinearRef *ref, const float *dy, const float *x, const float *w, const float *pre,
                                      int rows, int C, int OC) {
    for (int row = 0; row < rows; row++)
        for (int o = 0; o < OC; o++) {
            double gradient = (double)dy[row * OC + o];
            ref->db.value[o] += gradient;
            for (int c = 0; c < C; c++) {
                double input = gradient * (double)w[o * C + c], weight = gradient * (double)x[row * C + c];
                ref->dx.value[row * C + c] += input;
                ref->dx.factors[row * C + c] += fabs(input);
                ref->dw.value[o * C + c] += weight;
                ref->dw.factors[o * C + c] += fabs(weight);
            }
        }
    for (int i = 0; pre && i < rows * C; i++) { /* dx may be stored before it is multiplied by the slope */
        double slope = gelu_slope_reference((double)pre[i]);
        ref->dx.value[i] *= slope;
        ref->dx.factors[i] *= fabs(slope);
        ref->dx.rounding[i] = fabs(ref->dx.value[i]);
    }
}

static void linear_backward_case(const OpsDevice *device, int rows, int C, int OC, int flags) {
    size_t in = (size_t)(rows * C), out = (size_t)(rows * OC), table = (size_t)(OC * C), width = (size_t)OC;
    bool accumulate = flags & ACCUMULATE;
    Case c = case_begin(device, rows, rows, C, 1);
    Array x = acts(&c, in, 1, 1), w = weights(&c, table, 2, 1), dy = acts(&c, out, 3, 1), pre = acts(&c, in, 4, 3);
    Array old_dw = before(&c, table, accumulate, false), old_db = before(&c, width, accumulate, false);
    LinearRef ref = {reference(&c, in, NULL), reference(&c, table, accumulate ? &old_dw : NULL),
                     reference(&c, width, accumulate ? &old_db : NULL)};
    linear_backward_reference(&ref, dy.host, x.host, w.host, flags & WITH_GELU ? pre.host : NULL, rows, C, OC);
    Array first = {0}, first_db = {0};
    for (int run = 0; run < 2; run++) {
        Array dx = empty(&c, in, true);
        Array dw = before(&c, table, accumulate, false), db = before(&c, width, accumulate, false);
        LinearGrads grads = {.dx = dx.device,
                             .dw = dw.device,
                             .db = flags & BIAS ? db.device : NULL,
                             .gelu = flags & WITH_GELU ? pre.device : NULL,
                             .accumulate = accumulate};
        c.ops->linear_backward(&c.context, &grads, dy.device, x.device, w.device, rows, C, OC);
        check(&c, "dx", &dx, &ref.dx);
        check(&c, "dw", &dw, &ref.dw);
        if (flags & BIAS)
            check(&c, "db", &db, &ref.db);
        if (run == 0)
            first = dx, first_db = db;
        check_same_bits("dx", &dx, &first);
        check_same_bits("db", &db, &first_db);
    }
    case_end(&c);
}

static void check_linear_backward(const OpsDevice *device) {
    for (int choice = 0; choice < 8; choice++) {
        int flags = (choice & 1 ? BIAS : 0) | (choice & 2 ? WITH_GELU : 0) | (choice & 4 ? ACCUMULATE : 0);
        linear_backward_case(device, 1, 5, 7, flags);
        linear_backward_case(device, 5, 36, 12, flags);
        linear_backward_case(device, 70, 32, 64, flags);
        linear_backward_case(device, 33, 131, 50, flags);
    }
}

/* GELU and its slope over their whole range, seen through a linear layer of width 1: x and dy pass unchanged. */
static void check_gelu_range(const OpsDevice *device) {
    enum { ROWS = 2000 };
    Case c = case_begin(device, ROWS, ROWS, 1, 1);
    Array x = acts(&c, ROWS, 1, 1), one = acts(&c, ROWS, 1, 1), dw = empty(&c, 1, false);
    Array y = empty(&c, ROWS, true), act = empty(&c, ROWS, true), dx = empty(&c, ROWS, true);
    for (int i = 0; i < ROWS; i++)
        x.host[i] = 0.01f * (float)(i - ROWS / 2), one.host[i] = 1;
    x.host[0] = -1e4f, x.host[1] = 1e4f, x.host[2] = NAN;
    give(&c, &x), give(&c, &one);
    const float unit = 1;
    Array w = weights_of(&c, &unit, 1);
    c.ops->linear_forward(&c.context, y.device, act.device, x.device, w.device, NULL, NULL, ROWS, 1, 1);
    LinearGrads grads = {.dx = dx.device, .dw = dw.device, .gelu = x.device};
    c.ops->linear_backward(&c.context, &grads, one.device, act.device, w.device, ROWS, 1, 1);
    take(&c, &act), take(&c, &dx);
    assert_true(isnan(act.host[2]) && isnan(dx.host[2]));
    for (int i = 0; i < ROWS; i++)
        if (i != 2) {
            double exact = gelu_reference((double)x.host[i]), slope = gelu_slope_reference((double)x.host[i]);
            double error = device->act_error;
            assert_close((double)act.host[i], exact, 4e-7 * fmax(fabs(exact), 1) + error * fabs(exact));
            assert_close((double)dx.host[i], i < 2 ? (double)i : slope, 2e-6 + error * fabs(slope));
        }
    case_end(&c);
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

/* y of one query, from P that may have been rounded. */
static void attention_output(const Attention *a, int b, int head, int t, const double *p, Reference *y) {
    int HS = a->C / a->NH, at = (b * a->T + t) * a->C + head * HS;
    for (int s = 0; s <= t; s++)
        for (int d = 0; d < HS; d++) {
            double term = p[s] * qkv_at(a, b, s, 2, head, d);
            y->value[at + d] += term;
            y->rounding[at + d] += fabs(term);
        }
}

typedef struct AttentionRef {
    Reference y, lse, dqkv;
    double *p; /* [T] */
} AttentionRef;

/* y, lse, dqkv of one query. P and dS may be rounded before they are multiplied, and the sum of dy y is taken over what
 * is stored of y. */
static void attention_query(const Attention *a, int b, int head, int t, const float *dy, AttentionRef *ref) {
    int HS = a->C / a->NH, C = a->C, at = (b * a->T + t) * C + head * HS;
    double product = 0, product_rounding = 0, *p = ref->p;
    ref->lse.value[(b * a->NH + head) * a->T + t] = attention_row(a, b, head, t, p);
    attention_output(a, b, head, t, p, &ref->y);
    for (int d = 0; d < HS; d++) {
        product += (double)dy[at + d] * ref->y.value[at + d];
        product_rounding += fabs((double)dy[at + d]) * (fabs(ref->y.value[at + d]) + ref->y.rounding[at + d]);
    }
    int query = ((b * a->T + t) * 3) * C + head * HS;
    for (int s = 0; s <= t; s++) {
        int key = ((b * a->T + s) * 3 + 1) * C + head * HS, value = key + C;
        double dp = 0;
        for (int d = 0; d < HS; d++)
            dp += (double)dy[at + d] * qkv_at(a, b, s, 2, head, d);
        double ds = p[s] * (dp - product) / sqrt(HS), ds_rounding = fabs(ds) + p[s] * product_rounding / sqrt(HS);
        for (int d = 0; d < HS; d++) {
            double q = qkv_at(a, b, t, 0, head, d), k = qkv_at(a, b, s, 1, head, d), out = (double)dy[at + d];
            ref->dqkv.value[query + d] += ds * k;
            ref->dqkv.value[key + d] += ds * q;
            ref->dqkv.value[value + d] += p[s] * out;
            ref->dqkv.rounding[query + d] += ds_rounding * fabs(k);
            ref->dqkv.rounding[key + d] += ds_rounding * fabs(q);
            ref->dqkv.rounding[value + d] += p[s] * fabs(out);
        }
    }
}

static void attention_case(const OpsDevice *device, int B, int T, int NH, int HS, float range, double exact) {
    int C = NH * HS;
    size_t elems = (size_t)(B * T * C), rows = (size_t)(B * NH * T);
    Case c = case_begin(device, B * T, T, C, NH);
    Array qkv = acts(&c, 3 * elems, 1, range), dy = acts(&c, elems, 2, 1), first = {0};
    Attention a = {B, T, C, NH, qkv.host};
    AttentionRef ref = {reference(&c, elems, NULL), reference(&c, rows, NULL), reference(&c, 3 * elems, NULL),
                        zeros(&c, (size_t)T)};
    for (int task = 0; task < B * NH * T; task++)
        attention_query(&a, task / (NH * T), task / T % NH, task % T, dy.host, &ref);
    for (int run = 0; run < 2; run++) {
        Array y = empty(&c, elems, true), lse = empty(&c, rows, false), dqkv = empty(&c, 3 * elems, true);
        c.ops->attention_forward(&c.context, y.device, lse.device, qkv.device, B, T, C, NH);
        check_within(&c, exact, "y", &y, &ref.y);
        check_within(&c, exact, "lse", &lse, &ref.lse);
        c.ops->attention_backward(&c.context, dqkv.device, dy.device, y.device, qkv.device, lse.device, B, T, C, NH);
        check_within(&c, exact, "dqkv", &dqkv, &ref.dqkv);
        if (run == 0)
            first = dqkv;
        check_same_bits("dqkv", &dqkv, &first);
    }
    case_end(&c);
}

static void check_attention(const OpsDevice *device) {
    static const int lengths[] = {1, 5, 33, 64, 130}, sizes[] = {1, 12, 20, 64, 80};
    for (int length = 0; length < 5; length++)
        for (int size = 0; size < 5; size++)
            attention_case(device, 2, lengths[length], 3, sizes[size], 1, 1e-5);
}

/* More queries than any tile has. */
static void check_attention_long(const OpsDevice *device) { attention_case(device, 1, 1100, 2, 4, 1, 1e-5); }

/* Scores of some hundreds: exp without the maximum subtracted would overflow. Their rounding in f32, 64 products of
 * up to 144 each, is what the bound allows for. */
static void check_attention_large_scores(const OpsDevice *device) { attention_case(device, 1, 40, 1, 64, 12, 5e-4); }

/* Positions arrive in several calls; each call's result is that of causal attention over all of them. */
static void cached_case(const OpsDevice *device, int T, int NH, int HS, const int *counts) {
    int C = NH * HS;
    size_t elems = (size_t)(T * C);
    Case c = case_begin(device, T, T, C, NH);
    Array qkv = acts(&c, 3 * elems, 1, 1), cache = empty(&c, 2 * elems, true), y = empty(&c, elems, true);
    Attention a = {1, T, C, NH, qkv.host};
    Reference y_ref = reference(&c, elems, NULL);
    double *p = zeros(&c, (size_t)T);
    for (int task = 0; task < NH * T; task++) {
        attention_row(&a, 0, task / T, task % T, p);
        attention_output(&a, 0, task / T, task % T, p, &y_ref);
    }
    for (int first = 0, call = 0; first < T; first += counts[call++])
        c.ops->attention_cached(&c.context, act_at(c.ops, y.device, (size_t)(first * C)), cache.device,
                                act_at(c.ops, qkv.device, (size_t)(3 * first * C)), first, counts[call], C, NH);
    check(&c, "y", &y, &y_ref);
    case_end(&c);
}

static void check_attention_cached(const OpsDevice *device) {
    cached_case(device, 5, 2, 12, (const int[]){1, 1, 1, 1, 1});
    cached_case(device, 33, 3, 20, (const int[]){30, 1, 2});
    cached_case(device, 70, 2, 64, (const int[]){1, 68, 1});
}

static void check_attention_cached_long(const OpsDevice *device) {
    cached_case(device, 530, 1, 4, (const int[]){529, 1});
}

/* A NaN in a query's channels makes that query's output NaN, and no earlier one's; in a value, none before it. */
static void check_attention_nan(const OpsDevice *device) {
    enum { T = 9, NH = 2, HS = 4, C = NH * HS, WHERE = 5 };
    Case c = case_begin(device, T, T, C, NH);
    Array qkv = acts(&c, T * 3 * C, 1, 1), y = empty(&c, T * C, true), lse = empty(&c, NH * T, false);
    Array dy = acts(&c, T * C, 2, 1), dqkv = empty(&c, T * 3 * C, true);
    qkv.host[WHERE * 3 * C + 1] = NAN; /* q of head 0 */
    give(&c, &qkv);
    c.ops->attention_forward(&c.context, y.device, lse.device, qkv.device, 1, T, C, NH);
    c.ops->attention_backward(&c.context, dqkv.device, dy.device, y.device, qkv.device, lse.device, 1, T, C, NH);
    take(&c, &y), take(&c, &dqkv);
    for (int t = 0; t < T; t++) {
        assert_true(isnan(y.host[t * C]) == (t == WHERE));
        assert_true(!isnan(y.host[t * C + HS]));
    }
    assert_true(isnan(dqkv.host[WHERE * 3 * C]) && isnan(dqkv.host[C]));
    case_end(&c);
}

/* ---- head ---- */

typedef struct Head {
    int rows, C, V, Vp;
    Array x, wte;
    int *targets;
} Head;

static Head head_create(Case *c, int rows, int C, int V, int Vp) {
    Head head = {.rows = rows, .C = C, .V = V, .Vp = Vp, .x = acts(c, (size_t)(rows * C), 1, 1)};
    float *wte = host_bytes(c, (size_t)(Vp * C) * sizeof *wte);
    for (int i = 0; i < Vp * C; i++)
        wte[i] = i < V * C ? draw(2, (size_t)i, 1) : 5; /* the padding must not count, whatever it is */
    head.wte = weights_of(c, wte, (size_t)(Vp * C));
    head.targets = host_bytes(c, (size_t)rows * sizeof(int));
    for (int row = 0; row < rows; row++)
        head.targets[row] = (int)(random_bits(7, 3, (uint64_t)row) % (uint64_t)V);
    head.targets[0] = V - 1; /* the last real token */
    return head;
}

typedef struct HeadRef {
    Reference losses, dx, dwte;
    double *logits; /* [V] */
} HeadRef;

/* Loss of one row and its share of the gradients of scale * sum(losses). Logits may be rounded, and so may their
 * gradients. */
static void head_row(const Head *head, int row, double scale, HeadRef *ref) {
    int C = head->C, target = head->targets[row];
    const float *x = head->x.host + row * C, *wte = head->wte.host;
    double *logits = ref->logits, max = -INFINITY, sum = 0, size = 0;
    for (int v = 0; v < head->V; v++) {
        logits[v] = 0;
        for (int c = 0; c < C; c++)
            logits[v] += (double)x[c] * (double)wte[v * C + c];
        max = fmax(max, logits[v]);
    }
    for (int v = 0; v < head->V; v++)
        sum += exp(logits[v] - max);
    for (int v = 0; v < head->V; v++)
        size += exp(logits[v] - max) / sum * fabs(logits[v]);
    ref->losses.value[row] = max + log(sum) - logits[target];
    ref->losses.rounding[row] = size + fabs(logits[target]);
    for (int v = 0; v < head->V; v++) {
        double p = exp(logits[v] - max) / sum, gradient = scale * (p - (v == target));
        double rounding = fabs(gradient) + scale * p * (fabs(logits[v]) + size);
        for (int c = 0; c < C; c++) {
            ref->dx.value[row * C + c] += gradient * (double)wte[v * C + c];
            ref->dx.rounding[row * C + c] += rounding * fabs((double)wte[v * C + c]);
            ref->dwte.value[v * C + c] += gradient * (double)x[c];
            ref->dwte.rounding[v * C + c] += rounding * fabs((double)x[c]);
        }
    }
}

static void head_case(const OpsDevice *device, int rows, int C, int V, int Vp, bool accumulate) {
    const float scale = 0.37f;
    Case c = case_begin(device, rows, rows, C, 1);
    Head head = head_create(&c, rows, C, V, Vp);
    size_t in = (size_t)(rows * C), table = (size_t)(Vp * C);
    Array old = before(&c, table, accumulate, false), first = {0};
    HeadRef ref = {reference(&c, (size_t)rows, NULL), reference(&c, in, NULL),
                   reference(&c, table, accumulate ? &old : NULL), zeros(&c, (size_t)V)};
    for (int row = 0; row < rows; row++)
        head_row(&head, row, (double)scale, &ref);
    const int *targets = integers(&c, head.targets, (size_t)rows);
    Array losses = empty(&c, (size_t)rows, false), logits = empty(&c, (size_t)(rows * Vp), true);
    c.ops->head_loss(&c.context, losses.device, logits.device, head.x.device, head.wte.device, targets, rows, C, V, Vp);
    check(&c, "losses, forward only", &losses, &ref.losses);
    for (int run = 0; run < 2; run++) {
        Array dx = empty(&c, in, true), dwte = before(&c, table, accumulate, false);
        losses = empty(&c, (size_t)rows, false);
        c.ops->head_backward(&c.context, losses.device, logits.device, dx.device, dwte.device, head.x.device,
                             head.wte.device, targets, rows, C, V, Vp, scale, accumulate);
        check(&c, "losses", &losses, &ref.losses);
        check(&c, "dx", &dx, &ref.dx);
        check(&c, "dwte", &dwte, &ref.dwte);
        for (int i = V * C; i < Vp * C && !accumulate; i++)
            assert_true(dwte.host[i] == 0);
        if (run == 0)
            first = dwte;
        check_same_bits("dwte", &dwte, &first);
    }
    case_end(&c);
}

static void check_head(const OpsDevice *device) {
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        head_case(device, 1, 5, 3, 3, accumulate);
        head_case(device, 5, 12, 97, 128, accumulate);
        head_case(device, 33, 20, 257, 384, accumulate);
        head_case(device, 3, 50, 5003, 5120, accumulate);
        head_case(device, 2, 4, 1001, 1001, accumulate);
    }
}

/* Logits of +-1e4 neither overflow nor vanish; a NaN anywhere in a row makes its loss NaN, and no other. */
static void check_head_extremes(const OpsDevice *device) {
    enum { ROWS = 3, C = 2, V = 4 };
    const float x[ROWS * C] = {1, 0, 0, 1, NAN, 0};
    float wte[V * C] = {1e4f, 0, 0, 0, -1e4f, 0, 0, 1};
    int targets[ROWS] = {2, 3, 0};
    Case c = case_begin(device, ROWS, ROWS, C, 1);
    Array inputs = acts(&c, ROWS * C, 1, 1), logits = empty(&c, ROWS * V, true), losses = empty(&c, ROWS, false);
    memcpy(inputs.host, x, sizeof x);
    give(&c, &inputs);
    Array table = weights_of(&c, wte, V * C);
    c.ops->head_loss(&c.context, losses.device, logits.device, inputs.device, table.device,
                     integers(&c, targets, ROWS), ROWS, C, V, V);
    take(&c, &losses);
    assert_close((double)losses.host[0], 2e4, 1e-2 + device->act_error * 2e4);
    assert_close((double)losses.host[1], log(3 + exp(1)) - 1, 1e-6);
    assert_true(isnan(losses.host[2]));
    targets[0] = 3;
    wte[2 * C] = NAN; /* a logit that is neither the first, the largest nor the target */
    table = weights_of(&c, wte, V * C);
    c.ops->head_loss(&c.context, losses.device, logits.device, inputs.device, table.device,
                     integers(&c, targets, ROWS), 1, C, V, V);
    take(&c, &losses);
    assert_true(isnan(losses.host[0]));
    case_end(&c);
}

static void check_mean(const OpsDevice *device) {
    enum { COUNT = 1001 };
    Case c = case_begin(device, 1, 1, 1, 1);
    Array values = empty(&c, COUNT, false);
    for (int i = 0; i < COUNT; i++)
        values.host[i] = (float)i; /* exact in f64 */
    give(&c, &values);
    assert_true(c.ops->mean(&c.context, values.device, COUNT) == 500);
    values.host[7] = NAN;
    give(&c, &values);
    assert_true(isnan(c.ops->mean(&c.context, values.device, COUNT)));
    c.ops->clear(&c.context, values.device, COUNT * sizeof(float));
    take(&c, &values);
    for (int i = 0; i < COUNT; i++)
        assert_true(values.host[i] == 0);
    case_end(&c);
}

#endif
