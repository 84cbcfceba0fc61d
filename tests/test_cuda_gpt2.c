/* The model as a whole on the CUDA device: what must not change the result, in f32 and bf16. Its gradients are held
 * against float64 references by build/golden and test_cuda_ops. Skipped where there is no GPU. */
#include "base/random.h"
#include "model/gpt2.h"
#include "tests/check.h"
#include "tests/model_device.h"

#include <pthread.h>
#include <string.h>

static const Gpt2Config small = {
    .layers = 3, .heads = 2, .channels = 24, .context = 20, .vocab = 61, .vocab_padded = 128};

enum { B = 4, T = 13, ROWS = B * T, LONG_B = 10, LONG_ROWS = LONG_B * T, F32 = 1 + CUDA_F32, BF16 = 1 + CUDA_BF16 };

typedef struct Fixture {
    ParamTable table;
    float *params, *grads; /* on the host */
    ModelDevice device;
    Ops ops; /* of the device */
    Gpt2 *model;
    int tokens[LONG_ROWS], targets[LONG_ROWS];
    double loss;
} Fixture;

/* head_logits 0: the device's. */
static void set_up_head(Fixture *fixture, int dtype, int recompute, int max_B, size_t head_logits) {
    const char *why;
    if (gpu_count(&why) == 0)
        skip();
    *fixture = (Fixture){0};
    gpt2_param_table(&small, false, &fixture->table);
    size_t elems = (size_t)fixture->table.elems;
    fixture->params = malloc(elems * sizeof(float));
    fixture->grads = malloc(elems * sizeof(float));
    memset(fixture->grads, 0xff, elems * sizeof(float)); /* NaN */
    gpt2_init_random(&small, &fixture->table, 11, fixture->params);
    for (size_t i = 0; i < elems; i++) /* so that biases and gains count, and logits differ */
        fixture->params[i] += 0.1f * (float)(random_uniform(3, 0, i) - 0.5);
    for (int i = 0; i < LONG_ROWS; i++) {
        fixture->tokens[i] = (int)(random_bits(5, 0, (uint64_t)i) % (uint64_t)small.vocab);
        fixture->targets[i] = (int)(random_bits(5, 1, (uint64_t)i) % (uint64_t)small.vocab);
    }
    assert_ok(model_device_open(&fixture->device, dtype, fixture->params, fixture->grads, fixture->table.elems));
    Gpt2Options options = {.max_B = max_B, .max_T = T, .train = true, .recompute = recompute};
    fixture->ops = *fixture->device.ops;
    fixture->ops.head_logits = head_logits ? head_logits : fixture->ops.head_logits;
    assert_ok(gpt2_create(&fixture->model, &small, &fixture->table, fixture->device.params, fixture->device.grads,
                          &options, &fixture->ops, fixture->device.memory));
}

static void set_up(Fixture *fixture, int dtype, int recompute, int max_B) {
    set_up_head(fixture, dtype, recompute, max_B, 0);
}

static void tear_down(Fixture *fixture) {
    gpt2_destroy(fixture->model);
    model_device_close(&fixture->device);
    free(fixture->params);
    free(fixture->grads);
    param_table_free(&fixture->table);
}

/* One step on sequences first..first+count-1. */
static double run_some(Fixture *fixture, int first, int count, float loss_scale, bool accumulate) {
    gpt2_forward(fixture->model, fixture->tokens + first * T, count, T);
    double loss = gpt2_backward(fixture->model, fixture->targets + first * T, loss_scale, accumulate, NULL, NULL);
    model_device_fetch(&fixture->device);
    return loss;
}

static void run(Fixture *fixture) { fixture->loss = run_some(fixture, 0, B, 1, false); }

static void assert_same_step(const Fixture *a, const Fixture *b) {
    assert_true(a->loss == b->loss);
    assert_memory_equal(a->grads, b->grads, (size_t)a->table.elems * sizeof(float));
}

/* |a - b| <= bound |b|, as golden.c derives it; with f32 1e-5. */
static void assert_near(const Fixture *fixture, const float *a, const float *b, int64_t elems) {
    double error = 0, size = 0, e = fixture->device.error;
    for (int64_t i = 0; i < elems; i++) {
        error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    double bound = e > 0 ? e * sqrt(32.0 * small.layers / 3) : 1e-5;
    if (!(sqrt(error) <= bound * sqrt(size)))
        fail_msg("relative error %.3g, bound %.3g", sqrt(error / size), bound);
}

/* Twice on one model, on two models, and with activations computed again. In f32 GELU again has the bits of GELU as
 * part of the product; in bf16 its argument is rounded first, in forward and backward alike. */
static void same_bits_case(int dtype) {
    Fixture plain, gelu, norms, layers;
    set_up(&plain, dtype, RECOMPUTE_NO, B);
    set_up(&gelu, dtype, RECOMPUTE_GELU, B);
    set_up(&norms, dtype, RECOMPUTE_NORMS, B);
    set_up(&layers, dtype, RECOMPUTE_LAYERS, B);
    run(&plain), run(&gelu), run(&norms), run(&layers);
    assert_same_step(&plain, &layers);
    assert_same_step(&gelu, &norms);
    assert_near(&plain, gelu.grads, plain.grads, plain.table.elems);
    if (dtype != BF16)
        assert_same_step(&plain, &gelu);
    run(&plain), run(&norms);
    assert_same_step(&plain, &layers);
    assert_same_step(&gelu, &norms);
    tear_down(&plain), tear_down(&gelu), tear_down(&norms), tear_down(&layers);
}

/* Two micro-steps of B/2, each scaled by a half, are one step of B. */
static void accumulation_case(int dtype) {
    Fixture whole, parts;
    set_up(&whole, dtype, RECOMPUTE_NO, B);
    set_up(&parts, dtype, RECOMPUTE_NO, B / 2);
    run(&whole);
    double loss = run_some(&parts, 0, B / 2, 0.5f, false) / 2;
    loss += run_some(&parts, B / 2, B / 2, 0.5f, true) / 2;
    assert_close(loss, whole.loss, whole.device.error + 1e-5);
    assert_near(&whole, parts.grads, whole.grads, whole.table.elems);
    tear_down(&whole), tear_down(&parts);
}

/* The head in chunks of 64, 64 and 2 positions, against all 130 at once. */
static void head_case(int dtype) {
    Fixture whole, parts;
    static float expected[LONG_ROWS * 61], logits[LONG_ROWS * 61];
    set_up(&whole, dtype, RECOMPUTE_NO, LONG_B);
    set_up_head(&parts, dtype, RECOMPUTE_NO, LONG_B, 1);
    double loss = run_some(&whole, 0, LONG_B, 1, false);
    assert_close(run_some(&parts, 0, LONG_B, 1, false), loss, 1e-6);
    assert_near(&whole, parts.grads, whole.grads, whole.table.elems);
    assert_close(gpt2_loss(parts.model, parts.targets), loss, 1e-6);
    gpt2_logits(whole.model, 0, LONG_ROWS, expected);
    gpt2_logits(parts.model, 0, LONG_ROWS, logits);
    assert_near(&whole, logits, expected, LONG_ROWS * small.vocab);
    tear_down(&whole), tear_down(&parts);
}

/* At GPT-2's vocabulary logits take memory up to 4,096 positions, and no more from there on. */
static void head_memory_case(int dtype) {
    Fixture fixture;
    const Gpt2Config gpt2 = {
        .layers = 1, .heads = 1, .channels = 1, .context = 1024, .vocab = 50257, .vocab_padded = 50304};
    size_t bytes[4];
    set_up(&fixture, dtype, RECOMPUTE_NO, B);
    for (int i = 0; i < 4; i++) {
        Gpt2Options options = {.max_B = 1 + i, .max_T = 2048, .train = true};
        bytes[i] = gpt2_activation_bytes(&gpt2, &options, &fixture.ops);
    }
    size_t logits = (size_t)2048 * 50304 * fixture.ops.act_bytes;
    assert_true(bytes[1] - bytes[0] >= logits);
    assert_true(bytes[2] - bytes[1] < logits / 100);
    assert_true(bytes[3] - bytes[2] < logits / 100);
    tear_down(&fixture);
}

/* Logits from a cache that is fed in pieces, against those of one forward pass. */
static void cache_case(int dtype) {
    static const int pieces[] = {7, 1, 4, 1};
    Fixture fixture;
    Gpt2Cache *cache;
    float logits[61];
    set_up(&fixture, dtype, RECOMPUTE_NO, B);
    gpt2_forward(fixture.model, fixture.tokens, 1, T);
    assert_ok(gpt2_cache_create(&cache, &small, &fixture.table, fixture.device.params, fixture.device.ops,
                                fixture.device.memory));
    for (int done = 0, i = 0; done < T; i++) {
        const float *last = gpt2_cache_append(cache, fixture.tokens + done, pieces[i]);
        done += pieces[i];
        gpt2_logits(fixture.model, done - 1, 1, logits);
        assert_near(&fixture, last, logits, small.vocab);
    }
    gpt2_cache_destroy(cache);
    tear_down(&fixture);
}

static void *rank_main(void *fixture) {
    for (int step = 0; step < 3; step++)
        run(fixture);
    return NULL;
}

/* Ranks that are threads, each with a Gpu and operations of its own, do not disturb each other. */
static void ranks_case(int dtype) {
    Fixture alone, ranks[2];
    pthread_t threads[2];
    set_up(&alone, dtype, RECOMPUTE_NO, B);
    run(&alone);
    for (int i = 0; i < 2; i++)
        set_up(&ranks[i], dtype, RECOMPUTE_NO, B);
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++) {
        assert_same_step(&ranks[i], &alone);
        tear_down(&ranks[i]);
    }
    tear_down(&alone);
}

#define IN_BOTH(what)                              \
    static void test_##what##_f32(void **state) {  \
        (void)state;                               \
        what##_case(F32);                          \
    }                                              \
    static void test_##what##_bf16(void **state) { \
        (void)state;                               \
        what##_case(BF16);                         \
    }

IN_BOTH(same_bits)
IN_BOTH(accumulation)
IN_BOTH(cache)
IN_BOTH(head)
IN_BOTH(head_memory)
IN_BOTH(ranks)

#define BOTH(what) cmocka_unit_test(test_##what##_f32), cmocka_unit_test(test_##what##_bf16)

static const struct CMUnitTest tests[] = {BOTH(same_bits), BOTH(accumulation), BOTH(cache),
                                          BOTH(head),      BOTH(head_memory),  BOTH(ranks)};

CHECK_MAIN(tests)
