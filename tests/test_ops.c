/* The cpu device: all of tests/ops_cases.h with 1, 2 and 3 threads. */
#include "tests/ops_cases.h"

enum { THREADS_MAX = 3, WEIGHTS = 1 << 19 };

static void on_cpu(void (*check_op)(const OpsDevice *device)) {
    for (int threads = 1; threads <= THREADS_MAX; threads++) {
        OpsDevice device = {.ops = &ops_cpu, .memory = &host_memory, .threads = threads, .weight_elems = WEIGHTS};
        device.weights = memory_alloc(&host_memory, WEIGHTS * sizeof(float));
        assert_non_null(device.weights);
        check_op(&device);
        memory_free(&host_memory, device.weights);
    }
}

#define ON_CPU(op)                         \
    static void test_##op(void **state) {  \
        (void)state;                       \
        on_cpu(check_##op);                \
    }

ON_CPU(embedding)
ON_CPU(embedding_order)
ON_CPU(layernorm)
ON_CPU(layernorm_wide)
ON_CPU(layernorm_rows)
ON_CPU(linear_forward)
ON_CPU(linear_backward)
ON_CPU(gelu_range)
ON_CPU(attention)
ON_CPU(attention_long)
ON_CPU(attention_large_scores)
ON_CPU(attention_cached)
ON_CPU(attention_cached_long)
ON_CPU(attention_nan)
ON_CPU(head)
ON_CPU(head_extremes)
ON_CPU(mean)

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_embedding),       cmocka_unit_test(test_embedding_order),
    cmocka_unit_test(test_layernorm),       cmocka_unit_test(test_layernorm_wide),
    cmocka_unit_test(test_layernorm_rows),  cmocka_unit_test(test_linear_forward),
    cmocka_unit_test(test_linear_backward), cmocka_unit_test(test_gelu_range),
    cmocka_unit_test(test_attention),       cmocka_unit_test(test_attention_long),
    cmocka_unit_test(test_attention_large_scores),
    cmocka_unit_test(test_attention_cached),
    cmocka_unit_test(test_attention_cached_long),
    cmocka_unit_test(test_attention_nan),
    cmocka_unit_test(test_head),            cmocka_unit_test(test_head_extremes),
    cmocka_unit_test(test_mean),
};

CHECK_MAIN(tests)
