/* The optimizer's passes on a GPU: the CPU's bits, and stochastic rounding against a reference written here. */
#include "tests/check.h"

#include "base/random.h"
#include "optim/optim_cuda.h"
#include "tests/gpu_arrays.h"

#include <stdlib.h>
#include <string.h>

enum { RANKS = 4, SEED = 77, STEPS = 3 };

static const OptimConfig gpt2_optim = {.lr = 6e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};

/* ---- tables, shards, values ---- */

/* Matrices and 1-D tensors in turn. Odd sizes, and sizes that leave runs on multiples of 4, larger than a block of
 * threads updates. */
static ParamTable make_table(bool odd) {
    ParamTable table = {0};
    param_add(&table, "lnfw", -1, 1, odd ? 7 : 8);
    param_add(&table, "fcw", 0, 31, odd ? 13 : 12);
    param_add(&table, "fcb", 0, 1, odd ? 1 : 4);
    param_add(&table, "qkvw", 0, 97, odd ? 101 : 100);
    param_add(&table, "qkvb", 0, 1, odd ? 31 : 32);
    param_add(&table, "wpe", -1, odd ? 5 : 6, odd ? 3 : 2);
    param_add(&table, "wte", -1, 1213, odd ? 7 : 8);
    return table;
}

/* Runs of a few elements each, hundreds in one block of threads. */
static ParamTable make_crumbs(void) {
    ParamTable table = {0};
    for (int i = 0; i < 700; i++)
        param_add(&table, "fcw", i, 1 + i % 2, 1 + i % 5 + i % 100 / 99 * 5000);
    return table;
}

typedef struct Shards {
    Shard of[RANKS];
    Slice *slices[RANKS];
} Shards;

/* Deals stretches of the array to the ranks, some empty: of random length, or whole units of the norm. */
static Shards deal(const ParamTable *table, const NormPlan *plan, uint64_t seed) {
    Shards shards;
    for (int rank = 0; rank < RANKS; rank++) {
        shards.slices[rank] = calloc((size_t)table->elems + 1, 2 * sizeof(Slice));
        shards.of[rank] = (Shard){shards.slices[rank], 0};
    }
    int64_t unit = 0;
    for (int64_t at = 0, end; at < table->elems; at = end) {
        uint64_t bits = random_bits(seed, 1, (uint64_t)at);
        end = plan ? plan->starts[++unit] : at + 1 + (int64_t)(bits >> 32) % 3000;
        end = end < table->elems ? end : table->elems;
        Shard *shard = &shards.of[bits % RANKS];
        if (bits >> 16 & 1)
            shards.slices[bits % RANKS][shard->count++] = (Slice){at, 0};
        shards.slices[bits % RANKS][shard->count++] = (Slice){at, end - at};
    }
    return shards;
}

static void undeal(Shards *shards) {
    for (int rank = 0; rank < RANKS; rank++)
        free(shards->slices[rank]);
}

static float *take_random(int64_t elems, uint64_t stream, double scale) {
    float *array = malloc(((size_t)elems + 1) * sizeof *array);
    assert_non_null(array);
    for (int64_t i = 0; i < elems; i++)
        array[i] = (float)(scale * random_normal(1, stream, (uint64_t)i));
    return array;
}

/* Magnitudes from denormals to 1e15, zeros among them: nothing of theirs becomes NaN. */
static float *take_gradient(int64_t elems, uint64_t stream) {
    float *grads = take_random(elems, stream, 1);
    for (int64_t i = 0; i < elems; i++) {
        uint64_t bits = random_bits(2, stream, (uint64_t)i);
        grads[i] *= bits & 64 ? 1e-3f : powf(10, (float)(bits % 54) - 39);
        grads[i] = bits % 17 ? grads[i] : 0;
    }
    return grads;
}

/* ---- AdamW beside the CPU's ---- */

/* One rank's optimizer on both devices. What its shard does not hold is NaN, on the device 0xff. */
typedef struct Twin {
    const Shard *shard;
    int64_t elems; /* of the flat arrays */
    AdamW cpu, gpu;
    float *params, *grads;               /* the host's */
    float *device_params, *device_grads; /* shifted from what was allocated by `shift` elements */
    uint16_t *device_weights;
    int shift;
    CudaOptim *optim;
    Gpu *card;
} Twin;

static void only_shard(const Shard *shard, float *to, const float *from, int64_t elems) {
    memset(to, 0xff, (size_t)elems * sizeof *to);
    const Slice all = {0, elems};
    const Shard everything = {&all, 1};
    shard = shard ? shard : &everything;
    for (int i = 0; i < shard->count; i++)
        memcpy(to + shard->slices[i].start, from + shard->slices[i].start,
               (size_t)shard->slices[i].elems * sizeof *to);
}

static void twin_create(Twin *twin, Gpu *card, const ParamTable *table, const Shard *shard, int shift) {
    size_t bytes = (size_t)(table->elems + shift) * sizeof(float);
    *twin = (Twin){.shard = shard, .elems = table->elems, .shift = shift, .card = card};
    twin->params = malloc(bytes);
    twin->grads = malloc(bytes);
    float *start = take_random(table->elems, 0, 0.1);
    only_shard(shard, twin->params, start, table->elems);
    free(start);
    memset(twin->grads, 0xff, bytes);
    twin->device_params = (float *)gpu_take(card, twin->grads, bytes) + shift;
    twin->device_grads = (float *)gpu_take(card, twin->grads, bytes) + shift;
    twin->device_weights = (uint16_t *)gpu_take(card, twin->grads, bytes / 2) + shift;
    to_device(card, twin->device_params, twin->params, (size_t)table->elems * sizeof(float));
    assert_ok(cuda_optim_create(&twin->optim, card, twin->device_weights, SEED));
    assert_ok(adamw_create(&twin->cpu, table, shard, &host_memory, &optim_cpu));
    assert_ok(adamw_create(&twin->gpu, table, shard, gpu_memory(card), cuda_optim(twin->optim)));
}

static void twin_destroy(Twin *twin) {
    adamw_destroy(&twin->cpu);
    adamw_destroy(&twin->gpu);
    cuda_optim_destroy(twin->optim);
    gpu_give(twin->card, twin->device_params - twin->shift);
    gpu_give(twin->card, twin->device_grads - twin->shift);
    gpu_give(twin->card, twin->device_weights - twin->shift);
    free(twin->params), free(twin->grads);
}

static void twin_update(Twin *twin, const OptimConfig *config, double lr, const float *grads) {
    only_shard(twin->shard, twin->grads, grads, twin->elems);
    to_device(twin->card, twin->device_grads, twin->grads, (size_t)twin->elems * sizeof(float));
    adamw_update(&twin->cpu, config, lr, 0.7, twin->params, twin->grads);
    adamw_update(&twin->gpu, config, lr, 0.7, twin->device_params, twin->device_grads);
}

static void check_same_bits(const Twin *twin, const char *what, const float *device, const float *expected,
                            int64_t elems) {
    float *found = malloc(((size_t)elems + 1) * sizeof *found);
    to_host(twin->card, found, device, (size_t)elems * sizeof *found);
    for (int64_t i = 0; i < elems; i++)
        if (as_bits(found[i]) != as_bits(expected[i]))
            fail_msg("%s[%lld] is %a, expected %a", what, (long long)i, (double)found[i], (double)expected[i]);
    free(found);
}

/* bf16 of p from the definition: the neighbour below in magnitude, or the one above, with a chance of what p has beyond
 * the lower one. */
static uint16_t naive_rounding(float p, int64_t step, int64_t place) {
    if (isnan(p))
        return 0x7fc0;
    uint32_t below = as_bits(p) >> 16, beyond = as_bits(p) & 0xffff;
    uint64_t draws = random_bits(SEED, (uint64_t)((1 << 30) + step), (uint64_t)(place / 4));
    uint32_t draw = (uint32_t)(draws >> (place % 4 * 16)) & 0xffff;
    return (uint16_t)(below + (draw + beyond >= 65536));
}

/* Weights of the shard are the parameters rounded, others are as they were. */
static void check_weights(const Twin *twin) {
    size_t count = (size_t)twin->elems;
    uint16_t *weights = malloc((count + 1) * sizeof *weights);
    float *params = malloc((count + 1) * sizeof *params), *kept = malloc((count + 1) * sizeof *kept);
    to_host(twin->card, weights, twin->device_weights, count * sizeof *weights);
    to_host(twin->card, params, twin->device_params, count * sizeof *params);
    memset(params + count, 0, sizeof *params);
    only_shard(twin->shard, kept, params, twin->elems);
    for (int64_t i = 0; i < twin->elems; i++) {
        uint16_t expected = as_bits(kept[i]) == 0xffffffff ? 0xffff : naive_rounding(params[i], twin->gpu.step, i);
        if (weights[i] != expected)
            fail_msg("weight %lld of %a is 0x%04x, expected 0x%04x", (long long)i, (double)params[i], weights[i],
                     expected);
    }
    free(weights), free(params), free(kept);
}

static void check_twin(Gpu *card, const ParamTable *table, const Shard *shard, int shift) {
    Twin twin;
    twin_create(&twin, card, table, shard, shift);
    for (int step = 0; step < STEPS; step++) {
        float *grads = take_gradient(table->elems, 10 + (uint64_t)step);
        twin_update(&twin, &gpt2_optim, 1e-3 * step, grads);
        free(grads);
        check_same_bits(&twin, "params", twin.device_params, twin.params, table->elems);
        check_same_bits(&twin, "m", twin.gpu.m, twin.cpu.m, twin.cpu.elems);
        check_same_bits(&twin, "v", twin.gpu.v, twin.cpu.v, twin.cpu.elems);
        check_weights(&twin);
    }
    assert_int_equal(twin.gpu.step, STEPS);
    twin_destroy(&twin);
}

static void test_update_of_everything(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    ParamTable tables[] = {make_table(true), make_table(false), make_crumbs()};
    for (int i = 0; i < 3; i++) {
        check_twin(card, &tables[i], NULL, 0);
        check_twin(card, &tables[i], NULL, 1);
        param_table_free(&tables[i]);
    }
    gpu_close(card);
}

static void test_update_of_shards(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    ParamTable tables[] = {make_table(true), make_table(false), make_crumbs()};
    for (int i = 0; i < 3; i++) {
        Shards shards = deal(&tables[i], NULL, (uint64_t)i);
        for (int rank = 0; rank < RANKS; rank++)
            check_twin(card, &tables[i], &shards.of[rank], 0);
        check_twin(card, &tables[i], &(Shard){NULL, 0}, 0);
        undeal(&shards);
        param_table_free(&tables[i]);
    }
    gpu_close(card);
}

/* Parameters that another rank updated have the weights that it has, whatever slices they come in. */
static void test_weights_of_arrivals(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    ParamTable table = make_table(true);
    Shards shards = deal(&table, NULL, 7);
    for (int rank = 0; rank < RANKS; rank++) {
        const Shard *shard = &shards.of[rank];
        Twin twin;
        twin_create(&twin, card, &table, shard, rank % 2);
        twin.gpu.step = 3;
        for (int i = 0; i < shard->count; i++)
            adamw_params_arrived(&twin.gpu, twin.device_params, shard->slices[i]);
        check_weights(&twin);
        adamw_params_arrived(&twin.cpu, twin.params, (Slice){0, table.elems}); /* keeps nothing beside them */
        twin_destroy(&twin);
    }
    undeal(&shards);
    param_table_free(&table);
    gpu_close(card);
}

static void test_update_of_odd_sizes(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 1023, 1024, 4095, 4096, 4097, 8192};
    Gpu *card = open_gpu();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        ParamTable table = {0};
        param_add(&table, "fcw", 0, 1, sizes[i]);
        check_twin(card, &table, NULL, 0);
        param_table_free(&table);
    }
    gpu_close(card);
}

/* Without a copy of the weights nothing else changes. */
static void test_update_without_weights(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    ParamTable table = make_table(false);
    Twin twin;
    twin_create(&twin, card, &table, NULL, 0);
    CudaOptim *plain;
    assert_ok(cuda_optim_create(&plain, card, NULL, SEED));
    twin.gpu.ops = cuda_optim(plain);
    float *grads = take_gradient(table.elems, 10);
    twin_update(&twin, &gpt2_optim, 1e-3, grads);
    check_same_bits(&twin, "params", twin.device_params, twin.params, table.elems);
    uint16_t weight;
    to_host(card, &weight, twin.device_weights, sizeof weight);
    assert_int_equal(weight, 0xffff);
    free(grads);
    cuda_optim_destroy(plain);
    twin_destroy(&twin);
    param_table_free(&table);
    gpu_close(card);
}

/* ---- stochastic rounding ---- */

enum { DRAWS = 4096 * 5, DRAW_STEPS = 5 };

/* Rounds DRAWS elements of that value in DRAW_STEPS updates that change no parameter; weights [DRAW_STEPS][DRAWS]. */
static void draw(Gpu *card, float value, uint16_t *weights) {
    ParamTable table = {0};
    param_add(&table, "fcw", 0, 1, DRAWS);
    Twin twin;
    twin_create(&twin, card, &table, NULL, 0);
    float *values = malloc(DRAWS * sizeof *values), *zeros = calloc(DRAWS, sizeof *zeros);
    for (int i = 0; i < DRAWS; i++)
        values[i] = value;
    to_device(card, twin.device_params, values, DRAWS * sizeof *values);
    for (int step = 0; step < DRAW_STEPS; step++) {
        twin_update(&twin, &gpt2_optim, 0, zeros);
        to_host(card, weights + step * DRAWS, twin.device_weights, DRAWS * sizeof *weights);
    }
    free(values), free(zeros);
    twin_destroy(&twin);
    param_table_free(&table);
}

/* The value above comes as often as its chance says, within 5 standard deviations; and neighbours, and the same place
 * in successive steps, come together as often as independent ones would. */
static void check_chance(const uint16_t *weights, float value) {
    double chance = (as_bits(value) & 0xffff) / 65536.0, draws = (double)DRAWS * DRAW_STEPS, ups = 0;
    double together[5] = {0}; /* with the next 1..4, and with the next step's */
    for (int i = 0; i < DRAWS * DRAW_STEPS; i++) {
        int up = weights[i] - (int)(as_bits(value) >> 16);
        assert_true(up == 0 || up == 1);
        ups += up;
        for (int j = 0; j < 5; j++) {
            int other = i + (j < 4 ? j + 1 : DRAWS);
            if (other < DRAWS * DRAW_STEPS)
                together[j] += (up - chance) * (weights[other] - (int)(as_bits(value) >> 16) - chance);
        }
    }
    double variance = chance * (1 - chance);
    assert_close(ups / draws, chance, 5 * sqrt(variance / draws));
    for (int j = 0; j < 5; j++)
        assert_close(together[j] / draws, 0, 5 * variance / sqrt(draws));
}

static void test_rounding_is_unbiased(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    uint16_t *weights = malloc(sizeof *weights * DRAWS * DRAW_STEPS);
    /* thirds and near-certainties of either sign, at a power of two, denormals, what bf16 holds, what may become Inf */
    const uint32_t values[] = {0x3f805555, 0xbf80aaaa, 0x3f7fffff, 0xbfff8000, 0x3f800010,
                               0x00014000, 0x80000001, 0x40490000, 0x80000000, 0x7f7f8000};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        draw(card, as_float(values[i]), weights);
        check_chance(weights, as_float(values[i]));
    }
    free(weights);
    gpu_close(card);
}

/* What a card's arithmetic makes has all bits set, and would carry into the sign. */
static void test_rounding_of_nan(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    uint16_t *weights = malloc(sizeof *weights * DRAWS * DRAW_STEPS);
    const uint32_t values[] = {0x7fffffff, 0xffffffff, 0x7fc00000};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        draw(card, as_float(values[i]), weights);
        for (int j = 0; j < DRAWS * DRAW_STEPS; j++)
            assert_int_equal(weights[j], 0x7fc0);
    }
    free(weights);
    gpu_close(card);
}

/* ---- the norm ---- */

static void check_partials(Gpu *card, const NormPlan *cpu, const NormPlan *gpu, const float *grads,
                           const float *device_grads, const Shard *shard) {
    int64_t units = shard ? norm_shard_units(cpu, shard) : cpu->units;
    size_t bytes = ((size_t)units + 1) * sizeof(double);
    double *expected = malloc(bytes), *found = malloc(bytes);
    found[units] = 12345;
    norm_partial(cpu, grads, shard, expected);
    norm_partial(gpu, device_grads, shard, found);
    assert_ok(gpu_finish(card));
    for (int64_t i = 0; i < units; i++)
        if (memcmp(&found[i], &expected[i], sizeof *found) != 0 && !(isnan(found[i]) && isnan(expected[i])))
            fail_msg("sum %lld is %a, expected %a", (long long)i, found[i], expected[i]);
    assert_close(found[units], 12345, 0);
    free(expected), free(found);
}

static void check_norm(Gpu *card, const ParamTable *table, uint64_t seed) {
    NormPlan cpu, gpu;
    CudaOptim *optim;
    assert_ok(cuda_optim_create(&optim, card, NULL, SEED));
    assert_ok(norm_plan_create(&cpu, table, &optim_cpu));
    assert_ok(norm_plan_create(&gpu, table, cuda_optim(optim)));
    float *grads = take_gradient(table->elems, seed);
    if (seed % 2) {
        grads[table->elems / 2] = INFINITY;
        grads[table->elems - 1] = NAN;
    }
    float *device_grads = gpu_take(card, grads, (size_t)table->elems * sizeof *grads);
    Shards shards = deal(table, &cpu, seed);
    check_partials(card, &cpu, &gpu, grads, device_grads, NULL);
    for (int rank = 0; rank < RANKS; rank++)
        check_partials(card, &cpu, &gpu, grads, device_grads, &shards.of[rank]);
    undeal(&shards);
    gpu_give(card, device_grads);
    free(grads);
    norm_plan_destroy(&cpu);
    norm_plan_destroy(&gpu);
    norm_plan_destroy(&gpu);
    cuda_optim_destroy(optim);
}

static void test_norm(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    for (uint64_t seed = 0; seed < 3; seed++) {
        ParamTable tables[] = {make_table(true), make_table(false), make_crumbs()};
        for (int i = 0; i < 3; i++) {
            check_norm(card, &tables[i], seed);
            param_table_free(&tables[i]);
        }
    }
    gpu_close(card);
}

static void test_norm_of_nothing(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    CudaOptim *optim;
    NormPlan plan;
    const ParamTable empty = {0};
    assert_ok(cuda_optim_create(&optim, card, NULL, SEED));
    assert_ok(norm_plan_create(&plan, &empty, cuda_optim(optim)));
    norm_partial(&plan, NULL, NULL, NULL);
    assert_ok(gpu_finish(card));
    assert_close(norm_total(&plan, NULL), 0, 0);
    norm_plan_destroy(&plan);
    cuda_optim_destroy(optim);
    cuda_optim_destroy(NULL);
    gpu_close(card);
}

/* ---- faults ---- */

static void test_lack_of_memory(void **state) {
    (void)state;
    Gpu *card = open_gpu();
    ParamTable table = make_table(true);
    CudaOptim *optim;
    AdamW adamw;
    NormPlan plan;
    assert_ok(cuda_optim_create(&optim, card, NULL, SEED));
    for (int call = 1; call <= 3; call++) {
        fail_call("cudaMalloc", call, CUDA_OUT_OF_MEMORY);
        assert_int_equal(adamw_create(&adamw, &table, NULL, gpu_memory(card), cuda_optim(optim)), FAULT);
        assert_non_null(strstr(error_line(), "out of memory"));
        fail_call(NULL, 0, 0);
        adamw_destroy(&adamw);
    }
    for (int call = 1; call <= 2; call++) {
        fail_call("cudaMalloc", call, CUDA_OUT_OF_MEMORY);
        assert_int_equal(norm_plan_create(&plan, &table, cuda_optim(optim)), FAULT);
        assert_non_null(strstr(error_line(), "out of memory"));
        fail_call(NULL, 0, 0);
        norm_plan_destroy(&plan);
    }
    cuda_optim_destroy(optim);
    param_table_free(&table);
    gpu_close(card);
}

/* A kernel that cannot run does not pass unseen. */
static void test_failed_launch(void **state) {
    (void)state;
    ParamTable table = make_table(true);
    for (int norm = 0; norm < 2; norm++) {
        Gpu *card = open_gpu();
        Twin twin;
        twin_create(&twin, card, &table, NULL, 0);
        NormPlan plan;
        assert_ok(norm_plan_create(&plan, &table, cuda_optim(twin.optim)));
        double *sums = calloc((size_t)plan.units, sizeof *sums);
        fail_call("cudaLaunchKernel", 1, CUDA_LAUNCH_FAILED);
        if (norm)
            norm_partial(&plan, twin.device_grads, NULL, sums);
        else
            adamw_update(&twin.gpu, &gpt2_optim, 1e-3, 1, twin.device_params, twin.device_grads);
        assert_int_equal(gpu_finish(card), FAULT);
        fail_call(NULL, 0, 0);
        free(sums);
        norm_plan_destroy(&plan);
        twin_destroy(&twin);
        gpu_close(card);
    }
    param_table_free(&table);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_update_of_everything),
    cmocka_unit_test(test_update_of_shards),
    cmocka_unit_test(test_weights_of_arrivals),
    cmocka_unit_test(test_update_of_odd_sizes),
    cmocka_unit_test(test_update_without_weights),
    cmocka_unit_test(test_rounding_is_unbiased),
    cmocka_unit_test(test_rounding_of_nan),
    cmocka_unit_test(test_norm),
    cmocka_unit_test(test_norm_of_nothing),
    cmocka_unit_test(test_lack_of_memory),
    cmocka_unit_test(test_failed_launch),
};

CHECK_MAIN(tests)
