/* AdamW, norm and schedules against float64 references and tables worked out by hand. */
#include "optim/adamw.h"

#include "base/random.h"
#include "tests/check.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

static const OptimConfig gpt2_optim = {.lr = 6e-4, .min_lr_ratio = 0.1, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8,
                                       .weight_decay = 0.1, .grad_clip = 1};

/* Matrices and 1-D tensors in turn, with odd sizes, so that runs of equal decay begin and end inside blocks and
 * vectors. */
static ParamTable odd_table(void) {
    ParamTable table = {0};
    param_add(&table, "lnfw", -1, 1, 7);
    param_add(&table, "lnfb", -1, 1, 7);
    param_add(&table, "fcw", 0, 31, 13);
    param_add(&table, "qkvw", 0, 97, 101);
    param_add(&table, "fcb", 0, 1, 31);
    param_add(&table, "wpe", -1, 5, 3);
    param_add(&table, "wte", -1, 1213, 7);
    return table;
}

static float *random_array(int64_t elems, uint64_t stream, double scale) {
    float *array = malloc((size_t)elems * sizeof *array);
    assert_non_null(array);
    for (int64_t i = 0; i < elems; i++)
        array[i] = (float)(scale * random_normal(1, stream, (uint64_t)i));
    return array;
}

/* One element in float64, straight from the paper. */
typedef struct Reference {
    double p, m, v;
} Reference;

static void reference_update(Reference *r, double g, const OptimConfig *config, double lr, bool decay, int t) {
    r->m = config->beta1 * r->m + (1 - config->beta1) * g;
    r->v = config->beta2 * r->v + (1 - config->beta2) * g * g;
    double mhat = r->m / (1 - pow(config->beta1, t)), vhat = r->v / (1 - pow(config->beta2, t));
    r->p -= lr * (mhat / (sqrt(vhat) + config->eps) + (decay ? config->weight_decay * r->p : 0));
}

static void check_against_reference(const OptimConfig *config, double grad_scale) {
    ParamTable table = odd_table();
    AdamW adamw;
    assert_ok(adamw_create(&adamw, &table, NULL, &host_memory, &optim_cpu));
    float *params = random_array(table.elems, 0, 0.1);
    Reference *references = calloc((size_t)table.elems, sizeof *references);
    assert_non_null(references);
    for (int64_t i = 0; i < table.elems; i++)
        references[i].p = params[i];
    for (int t = 1; t <= 20; t++) {
        double lr = 1e-3 * t;
        float *grads = random_array(table.elems, (uint64_t)t, t % 3 ? 1e-3 : 10);
        grads[t] = 0;
        for (int n = 0; n < table.param_count; n++) {
            const Param *param = &table.params[n];
            for (int64_t i = param->offset; i < param->offset + param->elems; i++)
                reference_update(&references[i], grad_scale * (double)grads[i], config, lr, param->rows > 1, t);
        }
        adamw_update(&adamw, config, lr, grad_scale, params, grads);
        free(grads);
    }
    assert_int_equal(adamw.step, 20);
    for (int64_t i = 0; i < table.elems; i++) {
        const Reference *r = &references[i];
        assert_close(adamw.m[i], r->m, 2e-6 * fabs(r->m) + 1e-6 * grad_scale);
        assert_close(adamw.v[i], r->v, 3e-6 * r->v + 1e-30);
        assert_close(params[i], r->p, 1e-6 + 1e-6 * fabs(r->p)); /* 20 steps of at most 0.02, rounded to f32 each */
    }
    free(references);
    free(params);
    adamw_destroy(&adamw);
    param_table_free(&table);
}

static void adamw_matches_float64(void **state) {
    (void)state;
    check_against_reference(&gpt2_optim, 1);
    check_against_reference(&gpt2_optim, 0.37);
    OptimConfig other = gpt2_optim;
    other.beta1 = 0;
    other.beta2 = 0.999;
    other.weight_decay = 0;
    other.eps = 1e-3;
    check_against_reference(&other, 0.01);
}

/* Moments that have arrived at a constant gradient stay there to the bit, with any betas. */
static void adamw_moments_of_a_constant_gradient_stand_still(void **state) {
    (void)state;
    ParamTable table = {0};
    param_add(&table, "fcb", 0, 1, 5);
    AdamW adamw;
    assert_ok(adamw_create(&adamw, &table, NULL, &host_memory, &optim_cpu));
    OptimConfig config = gpt2_optim;
    config.beta2 = 0.999;
    float params[5] = {0}, grads[5] = {1, -2, 0.5f, 0x1p-13f, 0}, squares[5];
    for (int i = 0; i < 5; i++) {
        adamw.m[i] = grads[i];
        adamw.v[i] = squares[i] = grads[i] * grads[i];
    }
    for (int step = 0; step < 100; step++)
        adamw_update(&adamw, &config, 1e-3, 1, params, grads);
    assert_memory_equal(adamw.m, grads, sizeof grads);
    assert_memory_equal(adamw.v, squares, sizeof squares);
    adamw_destroy(&adamw);
    param_table_free(&table);
}

/* Padded rows have zero gradients and zero weights; they stay exactly zero. */
static void adamw_leaves_zeros_alone(void **state) {
    (void)state;
    ParamTable table = odd_table();
    AdamW adamw;
    assert_ok(adamw_create(&adamw, &table, NULL, &host_memory, &optim_cpu));
    float *zeros = calloc((size_t)table.elems, sizeof *zeros), *params = calloc((size_t)table.elems, sizeof *params);
    for (int step = 0; step < 3; step++)
        adamw_update(&adamw, &gpt2_optim, 1e-3, 1, params, zeros);
    assert_memory_equal(params, zeros, (size_t)table.elems * sizeof *params);
    free(zeros);
    free(params);
    adamw_destroy(&adamw);
    param_table_free(&table);
}

static void adamw_bits_do_not_depend_on_threads(void **state) {
    (void)state;
    ParamTable table = odd_table();
    size_t bytes = (size_t)table.elems * sizeof(float);
    float *first = NULL;
    int before = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        AdamW adamw;
        assert_ok(adamw_create(&adamw, &table, NULL, &host_memory, &optim_cpu));
        float *params = random_array(table.elems, 0, 0.1), *grads = random_array(table.elems, 1, 1);
        for (int step = 0; step < 3; step++)
            adamw_update(&adamw, &gpt2_optim, 1e-3, 0.7, params, grads);
        free(grads);
        adamw_destroy(&adamw);
        if (first) {
            assert_memory_equal(params, first, bytes);
            free(params);
        } else {
            first = params;
        }
    }
    omp_set_num_threads(before);
    free(first);
    param_table_free(&table);
}

/* An element's result must not depend on where it stands: all elements get the same input, so all must have the same
 * bits. */
static void adamw_bits_do_not_depend_on_position(void **state) {
    (void)state;
    ParamTable table = {0};
    param_add(&table, "fcw", 0, 3, 1391);
    AdamW adamw;
    assert_ok(adamw_create(&adamw, &table, NULL, &host_memory, &optim_cpu));
    float params[3 * 1391], grads[3 * 1391];
    for (int i = 0; i < 3 * 1391; i++)
        params[i] = 0.123f, grads[i] = 0.0317f;
    for (int step = 0; step < 5; step++)
        adamw_update(&adamw, &gpt2_optim, 1e-3, 0.9, params, grads);
    for (int i = 1; i < 3 * 1391; i++)
        assert_memory_equal(&params[i], &params[0], sizeof(float));
    adamw_destroy(&adamw);
    param_table_free(&table);
}

static void *no_memory(void *context, size_t bytes) {
    int *left = context;
    return (*left)-- > 0 ? host_memory.alloc(NULL, bytes) : NULL;
}

static void adamw_reports_lack_of_memory(void **state) {
    (void)state;
    ParamTable table = odd_table();
    for (int left = 0; left < 3; left++) {
        int allocations = left;
        Allocator memory = {no_memory, host_memory.free, &allocations};
        AdamW adamw;
        assert_int_equal(adamw_create(&adamw, &table, NULL, &memory, &optim_cpu), FAULT);
        assert_non_null(strstr(error_line(), "out of memory"));
        adamw_destroy(&adamw);
    }
    param_table_free(&table);
}

/* One gradient of that size; grad_norm looks at nothing else in a table. */
static double norm_of(const float *grads, int64_t elems) {
    Gradient whole = {.elems = elems};
    const ParamTable table = {.gradients = &whole, .gradient_count = 1, .elems = elems};
    return grad_norm(&table, grads);
}

static double naive_norm(const float *grads, int64_t elems) {
    double sum = 0;
    for (int64_t i = 0; i < elems; i++)
        sum += (double)grads[i] * grads[i];
    return sqrt(sum);
}

static void norm_matches_float64_on_odd_sizes(void **state) {
    (void)state;
    static const int64_t sizes[] = {0, 1, 2, 15, 16, 17, 4095, 4096, 4097, 8192, 12289, 100003};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        float *grads = random_array(sizes[i] + 1, i, 3);
        double expected = naive_norm(grads, sizes[i]);
        assert_close(norm_of(grads, sizes[i]), expected, 1e-12 * expected);
        free(grads);
    }
    float extremes[3] = {3e38f, 0, -3e38f}; /* squares overflow f32, not f64 */
    assert_close(norm_of(extremes, 3), sqrt(2.0) * 3e38f, 1e27);
}

/* More than one round of blocks, and bits equal for any number of threads. */
static void norm_bits_do_not_depend_on_threads(void **state) {
    (void)state;
    int64_t elems = 2048 * 4096 + 5 * 4096 + 77;
    float *grads = malloc((size_t)elems * sizeof *grads);
    assert_non_null(grads);
    for (int64_t i = 0; i < elems; i++)
        grads[i] = (float)((double)(random_bits(3, 0, (uint64_t)i) >> 40) * 0x1p-24 - 0.5);
    double expected = naive_norm(grads, elems), first = 0;
    int before = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        double norm = norm_of(grads, elems);
        assert_close(norm, expected, 1e-10 * expected); /* naive_norm adds 8 M numbers one by one */
        if (threads == 1)
            first = norm;
        assert_memory_equal(&norm, &first, sizeof norm);
    }
    omp_set_num_threads(before);
    free(grads);
}

/* The order that the header promises, written down plainly: sums over units, added in order. */
static double plain_unit_sum(const float *grads, int64_t elems) {
    double lanes[16] = {0};
    for (int64_t i = 0; i < elems; i++)
        lanes[i % 16] += (double)grads[i] * grads[i];
    for (int half = 8; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

static bool is_bound(const ParamTable *table, int64_t at) {
    for (int i = 0; i < table->gradient_count; i++)
        if (table->gradients[i].offset == at)
            return true;
    return at % 4096 == 0 || at == table->elems;
}

static int64_t end_of_unit(const ParamTable *table, int64_t start) {
    int64_t end = start + 1;
    while (!is_bound(table, end))
        end++;
    return end;
}

static void norm_is_a_sum_over_units(void **state) {
    (void)state;
    ParamTable table = odd_table();
    for (uint64_t round = 0; round < 10; round++) { /* several, since the root can hide a difference in the last bit */
        float *grads = random_array(table.elems, 9 + round, 1);
        double sum = 0;
        for (int64_t at = 0, end; at < table.elems; at = end) {
            end = end_of_unit(&table, at);
            sum += plain_unit_sum(grads + at, end - at);
        }
        double norm = grad_norm(&table, grads), plain = sqrt(sum);
        assert_memory_equal(&norm, &plain, sizeof norm);
        free(grads);
    }
    param_table_free(&table);
}

/* ---- in shards ---- */

enum { RANKS_MAX = 5 };

typedef struct Partition {
    Shard shards[RANKS_MAX];
    Slice *slices[RANKS_MAX];
} Partition;

static void append(Shard *shard, Slice *slices, int64_t start, int64_t end, bool join) {
    Slice *last = shard->count ? &slices[shard->count - 1] : NULL;
    if (join && last && last->start + last->elems == start)
        last->elems += end - start;
    else
        slices[shard->count++] = (Slice){start, end - start};
}

/* Deals the pieces of the array to the ranks as they come: whole units, or of random length. Neighbours of one rank
 * are joined, or not; now and then somebody gets an empty slice. */
static void deal(Partition *partition, const ParamTable *table, int ranks, bool units, uint64_t seed) {
    for (int rank = 0; rank < ranks; rank++) {
        partition->slices[rank] = malloc((size_t)(table->elems + 1) * 2 * sizeof(Slice));
        partition->shards[rank] = (Shard){partition->slices[rank], 0};
    }
    uint64_t draw = 0;
    for (int64_t at = 0, end; at < table->elems; at = end) {
        uint64_t bits = random_bits(seed, 1, draw++);
        end = units ? end_of_unit(table, at) : at + 1 + (int64_t)(bits >> 40) % 700;
        end = end < table->elems ? end : table->elems;
        int rank = (int)(bits % (uint64_t)ranks);
        if (bits >> 20 & 1)
            append(&partition->shards[rank], partition->slices[rank], at, at, false);
        append(&partition->shards[rank], partition->slices[rank], at, end, bits >> 21 & 1);
    }
}

static void undeal(Partition *partition, int ranks) {
    for (int rank = 0; rank < ranks; rank++)
        free(partition->slices[rank]);
}

static ParamTable larger_table(void) {
    ParamTable table = odd_table();
    param_add(&table, "fcw", 1, 211, 157);
    param_add(&table, "fcb", 1, 1, 157);
    param_add(&table, "qkvw", 1, 64, 128); /* two whole blocks, at an odd offset */
    param_add(&table, "qkvb", 1, 1, 1);
    return table;
}

/* Each rank updates its shard of parameters of its own; elsewhere it has NaN, also in the gradient, so that a read or
 * a write beyond the shard shows. */
static void check_sharded_update(const ParamTable *table, const Partition *partition, int ranks) {
    size_t bytes = (size_t)table->elems * sizeof(float);
    float *params = random_array(table->elems, 0, 0.1), *own = malloc(bytes), *own_grads = malloc(bytes);
    AdamW whole;
    assert_ok(adamw_create(&whole, table, NULL, &host_memory, &optim_cpu));
    float *start = malloc(bytes);
    memcpy(start, params, bytes);
    for (int step = 0; step < 3; step++) {
        float *grads = random_array(table->elems, 1 + (uint64_t)step, 1);
        adamw_update(&whole, &gpt2_optim, 1e-3, 0.7, params, grads);
        free(grads);
    }
    for (int rank = 0; rank < ranks; rank++) {
        const Shard *shard = &partition->shards[rank];
        AdamW part;
        assert_ok(adamw_create(&part, table, shard, &host_memory, &optim_cpu));
        assert_int_equal(part.elems, shard_elems(shard));
        memset(own, 0xff, bytes);
        for (int i = 0; i < shard->count; i++)
            memcpy(own + shard->slices[i].start, start + shard->slices[i].start,
                   (size_t)shard->slices[i].elems * sizeof(float));
        for (int step = 0; step < 3; step++) {
            float *grads = random_array(table->elems, 1 + (uint64_t)step, 1);
            memset(own_grads, 0xff, bytes);
            for (int i = 0; i < shard->count; i++)
                memcpy(own_grads + shard->slices[i].start, grads + shard->slices[i].start,
                       (size_t)shard->slices[i].elems * sizeof(float));
            adamw_update(&part, &gpt2_optim, 1e-3, 0.7, own, own_grads);
            free(grads);
        }
        int64_t at = 0, end = 0;
        for (int i = 0; i < shard->count; i++) {
            Slice slice = shard->slices[i];
            size_t size = (size_t)slice.elems * sizeof(float);
            assert_memory_equal(own + slice.start, params + slice.start, size);
            assert_memory_equal(part.m + at, whole.m + slice.start, size);
            assert_memory_equal(part.v + at, whole.v + slice.start, size);
            for (; end < slice.start; end++)
                assert_memory_equal(&own[end], "\xff\xff\xff\xff", 4);
            at += slice.elems;
            end = slice.start + slice.elems;
        }
        for (; end < table->elems; end++)
            assert_memory_equal(&own[end], "\xff\xff\xff\xff", 4);
        adamw_destroy(&part);
    }
    adamw_destroy(&whole);
    free(start);
    free(own_grads);
    free(own);
    free(params);
}

static void adamw_on_shards_has_the_bits_of_the_whole(void **state) {
    (void)state;
    ParamTable table = larger_table();
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++)
        for (int units = 0; units < 2; units++) {
            Partition partition;
            deal(&partition, &table, ranks, units, (uint64_t)ranks);
            check_sharded_update(&table, &partition, ranks);
            undeal(&partition, ranks);
        }
    param_table_free(&table);
}

/* What every rank would find: its own part from its own gradient, NaN elsewhere, and the parts of the others. */
static double norm_in_parts(const NormPlan *plan, const float *grads, const Partition *partition, int ranks) {
    double *sums = malloc((size_t)plan->units * sizeof *sums);
    double *partial = malloc((size_t)plan->units * sizeof *partial);
    size_t bytes = (size_t)plan->starts[plan->units] * sizeof(float);
    float *own = malloc(bytes);
    memset(sums, 0xff, (size_t)plan->units * sizeof *sums);
    int64_t units = 0;
    for (int rank = 0; rank < ranks; rank++) {
        const Shard *shard = &partition->shards[rank];
        memset(own, 0xff, bytes);
        for (int i = 0; i < shard->count; i++)
            memcpy(own + shard->slices[i].start, grads + shard->slices[i].start,
                   (size_t)shard->slices[i].elems * sizeof(float));
        norm_partial(plan, own, shard, partial);
        norm_scatter(plan, shard, partial, sums);
        units += norm_shard_units(plan, shard);
    }
    assert_int_equal(units, plan->units);
    double norm = norm_total(plan, sums);
    free(own), free(partial), free(sums);
    return norm;
}

static void norm_from_shards_has_the_bits_of_the_whole(void **state) {
    (void)state;
    ParamTable table = larger_table();
    NormPlan plan;
    assert_ok(norm_plan_create(&plan, &table, &optim_cpu));
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++)
        for (uint64_t seed = 0; seed < 4; seed++) {
            float *grads = random_array(table.elems, 20 + seed, 1);
            Partition partition;
            deal(&partition, &table, ranks, true, seed);
            double whole = grad_norm(&table, grads), parts = norm_in_parts(&plan, grads, &partition, ranks);
            assert_memory_equal(&parts, &whole, sizeof whole);
            double *sums = malloc((size_t)plan.units * sizeof *sums);
            norm_partial(&plan, grads, NULL, sums);
            double direct = norm_total(&plan, sums);
            assert_memory_equal(&direct, &whole, sizeof whole);
            grads[(int64_t)seed * 9000 + ranks] = seed % 2 ? NAN : INFINITY;
            assert_false(isfinite(norm_in_parts(&plan, grads, &partition, ranks)));
            undeal(&partition, ranks);
            free(sums);
            free(grads);
        }
    norm_plan_destroy(&plan);
    param_table_free(&table);
}

static void norm_of_nothing_is_zero(void **state) {
    (void)state;
    const ParamTable empty = {0};
    NormPlan plan;
    assert_ok(norm_plan_create(&plan, &empty, &optim_cpu));
    assert_int_equal(plan.units, 0);
    assert_close(norm_total(&plan, NULL), 0, 0);
    assert_close(grad_norm(&empty, NULL), 0, 0);
    norm_plan_destroy(&plan);
    norm_plan_destroy(&plan);
}

static void norm_is_not_finite_when_a_gradient_is_not(void **state) {
    (void)state;
    float *grads = random_array(20000, 4, 1);
    static const int64_t places[] = {0, 15, 4095, 4096, 9999, 19999};
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++)
        for (int k = 0; k < 3; k++) {
            float kept = grads[places[i]];
            grads[places[i]] = bad[k];
            assert_false(isfinite(norm_of(grads, 20000)));
            grads[places[i]] = kept;
        }
    assert_true(isfinite(norm_of(grads, 20000)));
    free(grads);
}

static void clip_scales_only_above_the_limit(void **state) {
    (void)state;
    assert_close(clip_scale(0, 1), 1, 0);
    assert_close(clip_scale(0.99, 1), 1, 0);
    assert_close(clip_scale(1, 1), 1, 0);
    assert_close(clip_scale(4, 1), 0.25, 0);
    assert_close(clip_scale(4, 2), 0.5, 0);
    assert_close(clip_scale(4, 0), 1, 0);
    assert_false(isfinite(clip_scale(NAN, 1))); /* never 1: that would apply the update */
    assert_false(isfinite(clip_scale(INFINITY, 1)));
}

static void check_schedule(OptimConfig config, int64_t steps, const double *expected) {
    for (int64_t step = 0; step < steps; step++) {
        double rate = learning_rate(&config, step, steps);
        if (!(fabs(rate - expected[step]) <= 1e-12))
            fail_msg("schedule %d, step %lld of %lld: expected %.9g, found %.9g", config.schedule, (long long)step,
                     (long long)steps, expected[step], rate);
    }
}

static void schedules_follow_their_tables(void **state) {
    (void)state;
    OptimConfig config = {.lr = 1, .min_lr_ratio = 0.2, .warmup = 4, .schedule = SCHEDULE_COSINE, .decay_ratio = 0.5};
    double root = sqrt(0.5);
    const double cosine[] = {0.25, 0.5, 0.75, 1, 1, 0.2 + 0.4 * (1 + root), 0.6, 0.2 + 0.4 * (1 - root), 0.2};
    check_schedule(config, 9, cosine);
    config.schedule = SCHEDULE_LINEAR;
    const double linear[] = {0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2};
    check_schedule(config, 9, linear);
    config.schedule = SCHEDULE_CONSTANT;
    const double constant[] = {0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1};
    check_schedule(config, 9, constant);
    config.schedule = SCHEDULE_WSD;
    const double wsd[] = {0.25, 0.5, 0.75, 1, 1, 1 - 0.8 * 0.5, 1 - 0.8 * root, 1 - 0.8 * sqrt(0.75), 0.2};
    config.decay_ratio = 5.0 / 9;
    check_schedule(config, 9, wsd);
    config.decay_ratio = 1; /* the whole run, but warm-up goes first */
    check_schedule(config, 9, wsd);
    config.decay_ratio = 0;
    check_schedule(config, 9, constant);
    config.warmup = 0;
    config.decay_ratio = 0.4;
    const double late[] = {1, 1, 1, 1, 1, 1, 1, 1 - 0.8 * sqrt(1 / 3.0), 1 - 0.8 * sqrt(2 / 3.0), 0.2};
    check_schedule(config, 10, late);
}

static void schedules_have_defined_edges(void **state) {
    (void)state;
    const double peak[] = {1}, no_warmup[] = {1, 0.6, 0.2}, all_warmup[] = {0.25, 0.5, 0.75, 1};
    const double cut_warmup[] = {0.25, 0.5}, one_left[] = {0.25, 0.5, 0.75, 1, 1};
    for (int schedule = SCHEDULE_COSINE; schedule <= SCHEDULE_WSD; schedule++) {
        OptimConfig config = {.lr = 1, .min_lr_ratio = 0.2, .schedule = schedule, .decay_ratio = 0.5};
        check_schedule(config, 1, peak);
        config.warmup = 4;
        check_schedule(config, 4, all_warmup);
        check_schedule(config, 2, cut_warmup);
        check_schedule(config, 5, one_left);
        config.warmup = 1;
        check_schedule(config, 1, peak);
        config.warmup = 0;
        config.decay_ratio = 1;
        double after = learning_rate(&config, 10, 3); /* a run that was told to go on past its end */
        assert_close(after, schedule == SCHEDULE_CONSTANT ? 1 : 0.2, 1e-12);
    }
    OptimConfig config = {.lr = 1, .min_lr_ratio = 0.2, .schedule = SCHEDULE_LINEAR};
    check_schedule(config, 3, no_warmup);
    config.lr = 0;
    assert_close(learning_rate(&config, 1, 3), 0, 0);
}

static void options_have_the_defaults_of_gpt2(void **state) {
    (void)state;
    OptimConfig filled;
    const ConfigSection section = {"optim", optim_options, optim_option_count, &filled};
    Config *config = config_create(&section, 1);
    assert_close(filled.lr, gpt2_optim.lr, 0);
    assert_close(filled.beta2, gpt2_optim.beta2, 0);
    assert_close(filled.eps, gpt2_optim.eps, 0);
    assert_close(filled.weight_decay, gpt2_optim.weight_decay, 0);
    assert_close(filled.grad_clip, 1, 0);
    assert_int_equal(filled.schedule, SCHEDULE_COSINE);
    assert_int_equal(filled.warmup, 0);
    assert_ok(config_assign(config, "optim.schedule=wsd"));
    assert_int_equal(filled.schedule, SCHEDULE_WSD);
    assert_refused(config_assign(config, "optim.schedule=step"), "optim.schedule");
    assert_refused(config_assign(config, "optim.beta2=1"), "optim.beta2");
    assert_refused(config_assign(config, "optim.lr=-1"), "optim.lr");
    config_destroy(config);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(adamw_matches_float64),
    cmocka_unit_test(adamw_moments_of_a_constant_gradient_stand_still),
    cmocka_unit_test(adamw_leaves_zeros_alone),
    cmocka_unit_test(adamw_bits_do_not_depend_on_threads),
    cmocka_unit_test(adamw_bits_do_not_depend_on_position),
    cmocka_unit_test(adamw_reports_lack_of_memory),
    cmocka_unit_test(norm_matches_float64_on_odd_sizes),
    cmocka_unit_test(norm_bits_do_not_depend_on_threads),
    cmocka_unit_test(norm_is_a_sum_over_units),
    cmocka_unit_test(norm_is_not_finite_when_a_gradient_is_not),
    cmocka_unit_test(adamw_on_shards_has_the_bits_of_the_whole),
    cmocka_unit_test(norm_from_shards_has_the_bits_of_the_whole),
    cmocka_unit_test(norm_of_nothing_is_zero),
    cmocka_unit_test(clip_scales_only_above_the_limit),
    cmocka_unit_test(schedules_follow_their_tables),
    cmocka_unit_test(schedules_have_defined_edges),
    cmocka_unit_test(options_have_the_defaults_of_gpt2),
};

CHECK_MAIN(tests)
