/* The cuda device: all of tests/ops_cases.h in f32 and bf16, products in tf32, and what only this device promises. In
 * builds that run kernels on the CPU, once with a block's threads in order, once in random order and with streams that
 * run behind. Skipped where there is no GPU. */
#include "tests/ops_cases.h"

#include "model/ops_cuda.h"

/* tests/cuda/stand_ins.h; only in builds that run kernels on the CPU. */
void emulator_seed(uint64_t seed) __attribute__((weak));
void cudart_late(bool late) __attribute__((weak));
void cudart_fail(const char *function, int call, int error) __attribute__((weak));
size_t cudart_memory_used(void) __attribute__((weak));

enum { WEIGHTS = 1 << 19, SEED = 7 };

/* Half a unit in the last of bf16's 8 bits, and of tf32's 11. */
static const double bf16_error = 0x1p-8, tf32_error = 0x1p-11;

static void refresh(const OpsDevice *device) { cuda_ops_round_weights(device->user, 0, WEIGHTS); }

typedef struct Card {
    Gpu *gpu;
    CudaOps *ops;
    OpsDevice device;
} Card;

static void card_open(Card *card, CudaDtype dtype) {
    const char *why;
    if (gpu_count(&why) == 0)
        skip();
    assert_ok(gpu_open(&card->gpu, 0));
    const Allocator *memory = gpu_memory(card->gpu);
    float *weights = memory_alloc(memory, WEIGHTS * sizeof *weights);
    assert_non_null(weights);
    assert_ok(cuda_ops_create(&card->ops, card->gpu, dtype, weights, WEIGHTS));
    assert_true((cuda_ops_weights(card->ops) != NULL) == (dtype == CUDA_BF16));
    card->device = (OpsDevice){.ops = cuda_ops(card->ops),
                               .memory = memory,
                               .weights = weights,
                               .weight_elems = WEIGHTS,
                               .refresh = refresh,
                               .user = card->ops,
                               .act_error = dtype == CUDA_BF16 ? bf16_error : 0,
                               .factor_error = dtype == CUDA_TF32 ? tf32_error : 0};
}

static void card_free(Card *card) {
    cuda_ops_destroy(card->ops);
    memory_free(card->device.memory, card->device.weights);
    gpu_close(card->gpu);
}

static void card_close(Card *card) {
    assert_ok(gpu_finish(card->gpu));
    card_free(card);
}

typedef void CheckOp(const OpsDevice *device);

static void on_card_once(CudaDtype dtype, CheckOp *check_op, uint64_t seed) {
    Card card;
    if (emulator_seed) {
        emulator_seed(seed);
        cudart_late(seed > 0);
    }
    card_open(&card, dtype);
    check_op(&card.device);
    card_close(&card);
}

static void on_card(CudaDtype dtype, CheckOp *check_op) {
    on_card_once(dtype, check_op, 0);
    if (emulator_seed)
        on_card_once(dtype, check_op, SEED);
}

#define ON_CARD(op)                                \
    static void test_##op##_f32(void **state) {    \
        (void)state;                               \
        on_card(CUDA_F32, check_##op);             \
    }                                              \
    static void test_##op##_bf16(void **state) {   \
        (void)state;                               \
        on_card(CUDA_BF16, check_##op);            \
    }

ON_CARD(embedding)
ON_CARD(embedding_order)
ON_CARD(layernorm)
ON_CARD(layernorm_wide)
ON_CARD(layernorm_rows)
ON_CARD(linear_forward)
ON_CARD(linear_backward)
ON_CARD(gelu_range)
ON_CARD(attention)
ON_CARD(attention_long)
ON_CARD(attention_large_scores)
ON_CARD(attention_cached)
ON_CARD(attention_nan)
ON_CARD(head)
ON_CARD(head_extremes)
ON_CARD(mean)

static void test_attention_cached_long(void **state) {
    (void)state;
    on_card_once(CUDA_F32, check_attention_cached_long, 0);
    on_card_once(CUDA_BF16, check_attention_cached_long, SEED);
}

/* More bytes at once, and in two calls, than uploads are staged in. The host's array may change at once. */
static void check_upload(const OpsDevice *device) {
    enum { COUNT = 3 << 20, PIECES = 2 };
    Case c = case_begin(device, 1, 1, 1, 1);
    float *values = host_bytes(&c, COUNT * sizeof *values), *copies[PIECES];
    for (int piece = 0; piece < PIECES; piece++) {
        copies[piece] = device_bytes(&c, COUNT * sizeof(float));
        for (int i = 0; i < COUNT; i++)
            values[i] = (float)(i + piece);
        c.ops->upload(&c.context, copies[piece], values, COUNT * sizeof(float));
    }
    for (int piece = 0; piece < PIECES; piece++) {
        c.ops->download(&c.context, values, copies[piece], COUNT * sizeof(float));
        for (int i = 0; i < COUNT; i++)
            if (!(values[i] == (float)(i + piece)))
                fail_msg("piece %d, element %d: found %g", piece, i, (double)values[i]);
    }
    case_end(&c);
}

static void test_upload(void **state) {
    (void)state;
    on_card(CUDA_F32, check_upload);
}

static void test_linear_tf32(void **state) {
    (void)state;
    on_card(CUDA_TF32, check_linear_forward);
    on_card(CUDA_TF32, check_linear_backward);
}

/* ---- faults ---- */

/* The Gpu's memory and cuBLASLt can be refused: one line, and nothing is kept. */
static void refused_case(Gpu *gpu, const float *weights, const char *function, int call, const char *line) {
    CudaOps *ops;
    size_t used = cudart_memory_used();
    cudart_fail(function, call, 2);
    assert_int_equal(cuda_ops_create(&ops, gpu, CUDA_BF16, weights, WEIGHTS), FAULT);
    cudart_fail(NULL, 0, 0);
    assert_null(ops);
    assert_non_null(strstr(error_line(), line));
    assert_int_equal(cudart_memory_used(), used);
}

static void test_refused(void **state) {
    (void)state;
    if (!cudart_fail)
        skip();
    Card card;
    card_open(&card, CUDA_F32);
    refused_case(card.gpu, card.device.weights, "cudaMalloc", 1, "no memory on the GPU for 524288 weights in bf16");
    refused_case(card.gpu, card.device.weights, "cudaMalloc", 2, "no memory on the GPU for a workspace");
    refused_case(card.gpu, card.device.weights, "cublasLtCreate", 1, "cuBLASLt: cannot be used");
    card_close(&card);
}

/* What fails in a step is told at its end. */
static void failing_case(const char *function, const char *line) {
    Card card;
    enum { ROWS = 4, C = 8 };
    card_open(&card, CUDA_F32);
    Case c = case_begin(&card.device, ROWS, ROWS, C, 1);
    Array x = acts(&c, ROWS * C, 1, 1), w = weights(&c, C * C, 2, 1);
    Array y = empty(&c, ROWS * C, true), act = empty(&c, ROWS * C, true);
    cudart_fail(function, 1, 1);
    c.ops->linear_forward(&c.context, y.device, act.device, x.device, w.device, NULL, NULL, ROWS, C, C);
    cudart_fail(NULL, 0, 0);
    assert_int_equal(gpu_finish(card.gpu), FAULT);
    assert_non_null(strstr(error_line(), line));
    case_end(&c);
    card_free(&card);
}

static void test_failing(void **state) {
    (void)state;
    if (!cudart_fail)
        skip();
    failing_case("cublasLtMatmulAlgoGetHeuristic", "a product of matrices: ");
    failing_case("cublasLtMatmul", "a product of matrices: ");
    failing_case("cudaLaunchKernel", "finish_linear: ");
}

#define BOTH(op) cmocka_unit_test(test_##op##_f32), cmocka_unit_test(test_##op##_bf16)

static const struct CMUnitTest tests[] = {
    BOTH(embedding),
    BOTH(embedding_order),
    BOTH(layernorm),
    BOTH(layernorm_wide),
    BOTH(layernorm_rows),
    BOTH(linear_forward),
    BOTH(linear_backward),
    cmocka_unit_test(test_linear_tf32),
    BOTH(gelu_range),
    BOTH(attention),
    BOTH(attention_long),
    BOTH(attention_large_scores),
    BOTH(attention_cached),
    cmocka_unit_test(test_attention_cached_long),
    BOTH(attention_nan),
    BOTH(head),
    BOTH(head_extremes),
    BOTH(mean),
    cmocka_unit_test(test_upload),
    cmocka_unit_test(test_refused),
    cmocka_unit_test(test_failing),
};

CHECK_MAIN(tests)
