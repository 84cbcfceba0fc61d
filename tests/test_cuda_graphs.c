/* A layer's pass launched whole, as a CUDA graph, gives the bits of its operations one by one, whatever comes between:
 * other shapes, micro-steps that accumulate, new parameters, another model. Skipped where there is no GPU. */
#include "base/random.h"
#include "model/gpt2.h"
#include "tests/check.h"
#include "tests/model_device.h"

#include <string.h>

static const Gpt2Config small = {
    .layers = 2, .heads = 2, .channels = 8, .context = 8, .vocab = 29, .vocab_padded = 32};

enum { B = 3, T = 4, ROWS = B * T, CALLS_MAX = 64, F32 = 1 + CUDA_F32, BF16 = 1 + CUDA_BF16 };

/* A call of gpt2_forward and of gpt2_backward, or of gpt2_loss. */
typedef struct Call {
    int B, T;
    bool train, accumulate;
} Call;

/* As a step of two micro-steps, validation and a last batch that is smaller come; with and without
 * `accumulate` at the same shape, and two shapes of as many rows. */
static const Call step[] = {{3, 4, true, false}, {3, 4, true, true}, {3, 4, false, false},
                            {2, 3, true, true},  {3, 2, true, false}, {1, 1, false, false}};

typedef struct Run {
    Gpt2 *model;
    float *grads; /* on the device */
    float *host_grads;
    int calls[CALLS_MAX], count; /* of ready, and of need, by gradient */
} Run;

typedef struct Fixture {
    ParamTable table;
    float *params, *grads;
    ModelDevice device;
} Fixture;

static void note(void *user, int gradient) {
    Run *run = user;
    assert_true(run->count < CALLS_MAX);
    run->calls[run->count++] = gradient;
}

static void set_up(Fixture *f, int dtype, bool graphs) {
    const char *why;
    if (gpu_count(&why) == 0)
        skip();
    *f = (Fixture){0};
    gpt2_param_table(&small, false, &f->table);
    size_t elems = (size_t)f->table.elems;
    f->params = malloc(elems * sizeof(float));
    f->grads = malloc(elems * sizeof(float));
    gpt2_init_random(&small, &f->table, 11, f->params);
    assert_ok(model_device_open(&f->device, dtype, f->params, f->grads, f->table.elems));
    if (graphs)
        assert_ok(cuda_ops_use_graphs(f->device.cuda));
}

static void tear_down(Fixture *f) {
    model_device_close(&f->device);
    free(f->params);
    free(f->grads);
    param_table_free(&f->table);
}

static void begin(Run *run, Fixture *f, int recompute, int max_B) {
    size_t bytes = (size_t)f->table.elems * sizeof(float);
    *run = (Run){.grads = memory_alloc(f->device.memory, bytes), .host_grads = calloc(1, bytes)};
    Gpt2Options options = {.max_B = max_B, .max_T = T, .train = true, .recompute = recompute};
    assert_ok(gpt2_create(&run->model, &small, &f->table, f->device.params, run->grads, &options, f->device.ops,
                          f->device.memory));
    gpt2_on_need(run->model, note, run);
}

static void end(Run *run, Fixture *f) {
    gpt2_destroy(run->model);
    memory_free(f->device.memory, run->grads);
    free(run->host_grads);
}

static double make(Run *run, Fixture *f, const Call *call, uint64_t seed) {
    int tokens[ROWS], targets[ROWS];
    for (int i = 0; i < ROWS; i++) {
        tokens[i] = (int)(random_bits(seed, 0, (uint64_t)i) % (uint64_t)small.vocab);
        targets[i] = (int)(random_bits(seed, 1, (uint64_t)i) % (uint64_t)small.vocab);
    }
    run->count = 0;
    gpt2_forward(run->model, tokens, call->B, call->T);
    double loss = call->train ? gpt2_backward(run->model, targets, 0.5f, call->accumulate, note, run)
                              : gpt2_loss(run->model, targets);
    f->device.ops->download(&f->device.context, run->host_grads, run->grads, (size_t)f->table.elems * sizeof(float));
    return loss;
}

/* Both, at the same call: losses, gradients, and who was asked and told what. */
static void make_both(Run *plain, Fixture *p, Run *graphs, Fixture *g, const Call *call, uint64_t seed) {
    double loss = make(plain, p, call, seed);
    assert_true(loss > 0 && make(graphs, g, call, seed) == loss);
    assert_memory_equal(graphs->host_grads, plain->host_grads, (size_t)p->table.elems * sizeof(float));
    assert_int_equal(graphs->count, plain->count);
    assert_memory_equal(graphs->calls, plain->calls, sizeof plain->calls);
}

static void change_params(Fixture *f, uint64_t round) {
    for (int64_t i = 0; i < f->table.elems; i++)
        f->params[i] += 0.02f * (float)(random_uniform(3, round, (uint64_t)i) - 0.5);
    model_device_give(&f->device);
}

static void steps_case(int dtype, int recompute) {
    Fixture p, g;
    Run plain, graphs;
    set_up(&p, dtype, false), set_up(&g, dtype, true);
    begin(&plain, &p, recompute, B), begin(&graphs, &g, recompute, B);
    for (uint64_t round = 0; round < 3; round++) {
        for (size_t i = 0; i < sizeof step / sizeof *step; i++)
            make_both(&plain, &p, &graphs, &g, &step[i], 10 * round + i);
        change_params(&p, round), change_params(&g, round);
    }
    assert_ok(gpu_finish(g.device.gpu));
    end(&plain, &p), end(&graphs, &g);
    tear_down(&p), tear_down(&g);
}

static void test_f32(void **state) {
    (void)state;
    steps_case(F32, RECOMPUTE_NO);
    steps_case(F32, RECOMPUTE_NORMS);
    steps_case(F32, RECOMPUTE_LAYERS);
}

static void test_bf16(void **state) {
    (void)state;
    steps_case(BF16, RECOMPUTE_NO);
    steps_case(BF16, RECOMPUTE_GELU);
}

/* Two models take turns on one device; then one ends, and another one begins, most likely where that was. */
static void test_several_models(void **state) {
    (void)state;
    Fixture p, g;
    Run plain[2], graphs[2];
    const Call call = {2, 3, true, false};
    set_up(&p, F32, false), set_up(&g, F32, true);
    for (int i = 0; i < 2; i++)
        begin(&plain[i], &p, RECOMPUTE_NO, 2 + i), begin(&graphs[i], &g, RECOMPUTE_NO, 2 + i);
    for (uint64_t round = 0; round < 3; round++)
        for (int i = 0; i < 2; i++)
            make_both(&plain[i], &p, &graphs[i], &g, &call, round);
    end(&graphs[1], &g);
    begin(&graphs[1], &g, RECOMPUTE_LAYERS, B);
    for (uint64_t round = 0; round < 3; round++)
        for (int i = 0; i < 2; i++)
            make_both(&plain[i], &p, &graphs[i], &g, &call, round);
    for (int i = 0; i < 2; i++)
        end(&plain[i], &p), end(&graphs[i], &g);
    tear_down(&p), tear_down(&g);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_f32), cmocka_unit_test(test_bf16),
                                          cmocka_unit_test(test_several_models)};

CHECK_MAIN(tests)
