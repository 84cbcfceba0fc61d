/* Attention by cuDNN against float64, on a card or, in emulated builds, by a stand-in that computes the graphs as they
 * are written. */
#include "base/random.h"
#include "comm/compress/bf16.h"
#include "model/attention_cudnn.h"
#include "model/ops_cuda.h"
#include "tests/check.h"

#include <stdlib.h>
#include <string.h>

/* ---- the reference ---- */

typedef struct Case {
    int B, T, C, NH, HS;
    uint16_t *qkv, *dy, *y, *dqkv; /* bf16 */
    float *lse;
    double *y_ref, *y_bound, *lse_ref, *dqkv_ref, *dqkv_bound;
} Case;

static void *zeros(size_t count, size_t size) {
    void *values = calloc(count, size);
    assert_non_null(values);
    return values;
}

static uint16_t *drawn(size_t count, uint64_t stream) {
    uint16_t *values = zeros(count, sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = bf16_from_float((float)random_normal(7, stream, i));
    return values;
}

static Case case_create(int B, int T, int NH, int HS) {
    Case c = {.B = B, .T = T, .C = NH * HS, .NH = NH, .HS = HS};
    size_t elems = (size_t)(B * T * c.C), rows = (size_t)(B * NH * T);
    c.qkv = drawn(3 * elems, 1), c.dy = drawn(elems, 2);
    c.y = zeros(elems, sizeof *c.y), c.dqkv = zeros(3 * elems, sizeof *c.dqkv);
    c.lse = zeros(rows, sizeof *c.lse), c.lse_ref = zeros(rows, sizeof *c.lse_ref);
    c.y_ref = zeros(elems, sizeof *c.y_ref), c.y_bound = zeros(elems, sizeof *c.y_bound);
    c.dqkv_ref = zeros(3 * elems, sizeof *c.dqkv_ref), c.dqkv_bound = zeros(3 * elems, sizeof *c.dqkv_bound);
    return c;
}

static void case_destroy(Case *c) {
    free(c->qkv), free(c->dy), free(c->y), free(c->dqkv), free(c->lse);
    free(c->y_ref), free(c->y_bound), free(c->lse_ref), free(c->dqkv_ref), free(c->dqkv_bound);
}

static double value(const uint16_t *values, int i) { return (double)bf16_to_float(values[i]); }

/* Where element d of q, k or v (part 0, 1, 2) of a head lies. */
static int in_qkv(const Case *c, int b, int t, int part, int head, int d) {
    return ((b * c->T + t) * 3 + part) * c->C + head * c->HS + d;
}
static int in_y(const Case *c, int b, int t, int head, int d) { return (b * c->T + t) * c->C + head * c->HS + d; }

static double dot_qk(const Case *c, int b, int t, int s, int head) {
    double sum = 0;
    for (int d = 0; d < c->HS; d++)
        sum += value(c->qkv, in_qkv(c, b, t, 0, head, d)) * value(c->qkv, in_qkv(c, b, s, 1, head, d));
    return sum / sqrt(c->HS);
}

/* p[0..t] = softmax of query t; returns log sum exp. */
static double softmax_row(const Case *c, int b, int t, int head, double *p) {
    double max = -INFINITY, sum = 0;
    for (int s = 0; s <= t; s++)
        max = fmax(max, p[s] = dot_qk(c, b, t, s, head));
    for (int s = 0; s <= t; s++)
        sum += p[s] = exp(p[s] - max);
    for (int s = 0; s <= t; s++)
        p[s] /= sum;
    return max + log(sum);
}

/* Adds a term to a sum, and its size to the sum's bound. */
static void add(double *sums, double *sizes, int at, double term) {
    sums[at] += term;
    sizes[at] += fabs(term);
}

static void forward_row(Case *c, int b, int t, int head, double *p) {
    c->lse_ref[(b * c->NH + head) * c->T + t] = softmax_row(c, b, t, head, p);
    for (int s = 0; s <= t; s++)
        for (int d = 0; d < c->HS; d++)
            add(c->y_ref, c->y_bound, in_y(c, b, t, head, d), p[s] * value(c->qkv, in_qkv(c, b, s, 2, head, d)));
}

/* Sums of HS terms in f32 are off by up to 2^-17 of their terms' sizes at HS 128; bounds are in units of 2^-8. */
static const double F32_SUM = 0x1p-9;

/* From the y that backward is given, bf16. */
static void backward_row(Case *c, int b, int t, int head, double *p) {
    double row_sum = 0, row_size = 0, scale = 1 / sqrt(c->HS);
    softmax_row(c, b, t, head, p);
    for (int d = 0; d < c->HS; d++)
        add(&row_sum, &row_size, 0, value(c->dy, in_y(c, b, t, head, d)) * value(c->y, in_y(c, b, t, head, d)));
    for (int s = 0; s <= t; s++) {
        double dp = 0, size = row_size;
        for (int d = 0; d < c->HS; d++) {
            double dy = value(c->dy, in_y(c, b, t, head, d)), term = dy * value(c->qkv, in_qkv(c, b, s, 2, head, d));
            add(&dp, &size, 0, term);
            add(c->dqkv_ref, c->dqkv_bound, in_qkv(c, b, s, 2, head, d), p[s] * dy);
        }
        double ds = p[s] * (dp - row_sum) * scale, cancelled = p[s] * size * scale * F32_SUM;
        for (int d = 0; d < c->HS; d++) {
            int q = in_qkv(c, b, t, 0, head, d), k = in_qkv(c, b, s, 1, head, d);
            add(c->dqkv_ref, c->dqkv_bound, q, ds * value(c->qkv, k));
            add(c->dqkv_ref, c->dqkv_bound, k, ds * value(c->qkv, q));
            c->dqkv_bound[q] += cancelled * fabs(value(c->qkv, k));
            c->dqkv_bound[k] += cancelled * fabs(value(c->qkv, q));
        }
    }
}

static void each_row(Case *c, void (*row)(Case *, int, int, int, double *)) {
    double *p = zeros((size_t)c->T, sizeof *p);
    for (int i = 0; i < c->B * c->NH * c->T; i++)
        row(c, i / (c->NH * c->T), i % c->T, i / c->T % c->NH, p);
    free(p);
}

/* bf16 has 8 bits, so rounding is off by at most 2^-9: once each factor P or dS of a product's terms, once the result.
 * Twice that leaves room for the kernel's exp. */
static void check(const char *what, const uint16_t *actual, const double *expected, const double *sizes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double found = value(actual, (int)i), bound = (sizes[i] + fabs(expected[i])) / 256;
        if (!(fabs(found - expected[i]) <= bound))
            fail_msg("%s[%zu]: expected %.6g +- %.2g, found %.6g", what, i, expected[i], bound, found);
    }
}

/* ---- on the device ---- */

typedef struct Arrays {
    Gpu *gpu;
    void *qkv, *dy, *y, *dqkv, *lse, *workspace;
} Arrays;

static void *to_device(Gpu *gpu, const void *host, size_t bytes) {
    void *device = memory_alloc(gpu_memory(gpu), bytes);
    assert_non_null(device);
    gpu_copy_in(gpu, device, host, bytes);
    return device;
}

static void run_forward(CudnnAttention *attention, Arrays *a, Case *c) {
    size_t elems = (size_t)(c->B * c->T * c->C), rows = (size_t)(c->B * c->NH * c->T);
    cudnn_attention_forward(attention, a->y, a->lse, a->qkv, a->workspace, c->B, c->T, c->C, c->NH);
    gpu_copy_out(a->gpu, c->y, a->y, elems * 2, NULL, NULL, 0);
    gpu_copy_out(a->gpu, c->lse, a->lse, rows * sizeof(float), NULL, NULL, 0);
    assert_ok(gpu_finish(a->gpu));
}

static void run_backward(CudnnAttention *attention, Arrays *a, Case *c) {
    cudnn_attention_backward(attention, a->dqkv, a->dy, a->y, a->qkv, a->lse, a->workspace, c->B, c->T, c->C, c->NH);
    gpu_copy_out(a->gpu, c->dqkv, a->dqkv, 3 * (size_t)(c->B * c->T * c->C) * 2, NULL, NULL, 0);
    assert_ok(gpu_finish(a->gpu));
}

/* What forward and backward left. */
static void run_copies(const Arrays *a, Case *c) {
    size_t elems = (size_t)(c->B * c->T * c->C);
    gpu_copy_out(a->gpu, c->y, a->y, elems * 2, NULL, NULL, 0);
    gpu_copy_out(a->gpu, c->dqkv, a->dqkv, 3 * elems * 2, NULL, NULL, 0);
    assert_ok(gpu_finish(a->gpu));
}

static Arrays arrays_create(Gpu *gpu, const Case *c, size_t workspace_bytes) {
    size_t elems = (size_t)(c->B * c->T * c->C), rows = (size_t)(c->B * c->NH * c->T);
    return (Arrays){.gpu = gpu,
                    .qkv = to_device(gpu, c->qkv, 3 * elems * 2),
                    .dy = to_device(gpu, c->dy, elems * 2),
                    .y = to_device(gpu, c->y, elems * 2),
                    .dqkv = to_device(gpu, c->dqkv, 3 * elems * 2),
                    .lse = to_device(gpu, c->lse, rows * sizeof(float)),
                    .workspace = memory_alloc(gpu_memory(gpu), workspace_bytes)};
}

static void arrays_destroy(Arrays *a) {
    void *all[] = {a->qkv, a->dy, a->y, a->dqkv, a->lse, a->workspace};
    for (int i = 0; i < 6; i++)
        memory_free(gpu_memory(a->gpu), all[i]);
}

static void one_case(Gpu *gpu, CudnnAttention *attention, bool deterministic, int B, int T, int NH, int HS) {
    Case c = case_create(B, T, NH, HS);
    size_t elems = (size_t)(B * T * c.C);
    const char *why;
    if (!cudnn_attention_prepare(attention, B, T, c.C, NH, &why))
        fail_msg("B %d, T %d, NH %d, head size %d: %s", B, T, NH, HS, why);
    Arrays a = arrays_create(gpu, &c, cudnn_attention_workspace_bytes(attention, B, T, c.C, NH));
    run_forward(attention, &a, &c);
    each_row(&c, forward_row);
    check("y", c.y, c.y_ref, c.y_bound, elems);
    for (int i = 0; i < B * NH * T; i++)
        assert_close((double)c.lse[i], c.lse_ref[i], 1e-4 * (1 + fabs(c.lse_ref[i])));
    run_backward(attention, &a, &c);
    each_row(&c, backward_row);
    check("dqkv", c.dqkv, c.dqkv_ref, c.dqkv_bound, 3 * elems);

    uint16_t *first = c.dqkv;
    c.dqkv = zeros(3 * elems, sizeof *first);
    run_backward(attention, &a, &c);
    if (deterministic)
        assert_memory_equal(first, c.dqkv, 3 * elems * sizeof *first);
    free(first);
    arrays_destroy(&a);
    case_destroy(&c);
}

static Gpu *gpu_or_skip(void) {
    const char *why;
    Gpu *gpu;
    if (gpu_count(&why) == 0) {
        print_message("skipped: no GPU: %s\n", why);
        skip();
    }
    assert_ok(gpu_open(&gpu, 0));
    return gpu;
}

static void test_results(void **state) {
    (void)state;
    Gpu *gpu = gpu_or_skip();
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        CudnnAttention *attention;
        assert_ok(cudnn_attention_create(&attention, gpu, deterministic));
        one_case(gpu, attention, deterministic, 2, 65, 3, 16);
        one_case(gpu, attention, deterministic, 1, 128, 2, 64);
        one_case(gpu, attention, deterministic, 2, 37, 1, 80);
        one_case(gpu, attention, deterministic, 1, 40, 2, 128);
        cudnn_attention_destroy(attention);
    }
    gpu_close(gpu);
}

static void test_shapes(void **state) {
    (void)state;
    Gpu *gpu = gpu_or_skip();
    CudnnAttention *attention;
    const char *why, *again;
    assert_ok(cudnn_attention_create(&attention, gpu, false));
    assert_false(cudnn_attention_prepare(attention, 1, 16, 20, 1, &why));
    assert_non_null(strstr(why, "no engine for this shape"));
    assert_false(cudnn_attention_prepare(attention, 1, 16, 20, 1, &again)); /* remembered */
    assert_ptr_equal(why, again);
    for (int i = 1; i < CUDNN_SHAPES_MAX; i++)
        assert_true(cudnn_attention_prepare(attention, i, 16, 64, 1, &why));
    assert_false(cudnn_attention_prepare(attention, CUDNN_SHAPES_MAX, 16, 64, 1, &why));
    assert_true(cudnn_attention_prepare(attention, 1, 16, 64, 1, &why));
    cudnn_attention_destroy(attention);
    cudnn_attention_destroy(NULL);
    gpu_close(gpu);
}

/* Runs the table's attention; returns the bits of dqkv, to be freed. */
static uint16_t *by_table(const Ops *ops, OpsContext *context, const Arrays *a, const Case *c, int B) {
    uint16_t *dqkv = zeros(3 * (size_t)(c->B * c->T * c->C), sizeof *dqkv);
    ops->attention_forward(context, a->y, a->lse, a->qkv, B, c->T, c->C, c->NH);
    ops->attention_backward(context, a->dqkv, a->dy, a->y, a->qkv, a->lse, B, c->T, c->C, c->NH);
    gpu_copy_out(a->gpu, dqkv, a->dqkv, 3 * (size_t)(B * c->T * c->C) * 2, NULL, NULL, 0);
    assert_ok(gpu_finish(a->gpu));
    return dqkv;
}

static void assert_table(const Ops *ops, OpsContext *context, const Arrays *a, const Case *c, int B, bool same,
                         const uint16_t *expected) {
    uint16_t *found = by_table(ops, context, a, c, B);
    assert_true((memcmp(found, expected, 3 * (size_t)(B * c->T * c->C) * sizeof *found) == 0) == same);
    free(found);
}

/* In the cuda device's table cuDNN takes the prepared shape and leaves others to our own path. */
static void test_table(void **state) {
    (void)state;
    Gpu *gpu = gpu_or_skip();
    Case c = case_create(2, 65, 3, 16);
    Arrays a = arrays_create(gpu, &c, 256);
    CudaOps *cuda;
    const char *why;
    assert_ok(cuda_ops_create(&cuda, gpu, CUDA_BF16, a.lse, 16));
    const Ops *ops = cuda_ops(cuda);
    OpsContext context = {.state = ops->state};
    OpsLimits limits = {c.B * c.T, c.T, c.C, c.NH};
    ops->prepare(&context, &limits);
    context.scratch = memory_alloc(gpu_memory(gpu), context.scratch_bytes);
    uint16_t *own_two = by_table(ops, &context, &a, &c, 2), *own_one = by_table(ops, &context, &a, &c, 1);
    assert_true(cuda_ops_use_cudnn(cuda, true, c.B, c.T, c.C, c.NH, &why));
    assert_table(ops, &context, &a, &c, 1, true, own_one);
    assert_table(ops, &context, &a, &c, 2, false, own_two);
    each_row(&c, forward_row);
    run_copies(&a, &c);
    check("y", c.y, c.y_ref, c.y_bound, (size_t)(c.B * c.T * c.C));
    each_row(&c, backward_row);
    check("dqkv", c.dqkv, c.dqkv_ref, c.dqkv_bound, 3 * (size_t)(c.B * c.T * c.C));
    free(own_one), free(own_two);
    memory_free(gpu_memory(gpu), context.scratch);
    cuda_ops_destroy(cuda);
    arrays_destroy(&a);
    case_destroy(&c);
    gpu_close(gpu);
}

static void test_table_refuses(void **state) {
    (void)state;
    Gpu *gpu = gpu_or_skip();
    float *params = memory_alloc(gpu_memory(gpu), 64);
    static const struct {
        CudaDtype dtype;
        int HS;
        const char *why;
    } cases[] = {{CUDA_F32, 64, "bf16 only"}, {CUDA_BF16, 20, "no engine for this shape"}};
    for (int i = 0; i < 2; i++) {
        CudaOps *cuda;
        const char *why = "";
        assert_ok(cuda_ops_create(&cuda, gpu, cases[i].dtype, params, 16));
        const Ops own = *cuda_ops(cuda);
        assert_false(cuda_ops_use_cudnn(cuda, false, 1, 16, 2 * cases[i].HS, 2, &why));
        assert_non_null(strstr(why, cases[i].why));
        assert_true(cuda_ops(cuda)->attention_forward == own.attention_forward);
        cuda_ops_destroy(cuda);
    }
    memory_free(gpu_memory(gpu), params);
    gpu_close(gpu);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_results), cmocka_unit_test(test_shapes),
                                          cmocka_unit_test(test_table), cmocka_unit_test(test_table_refuses)};

CHECK_MAIN(tests)
