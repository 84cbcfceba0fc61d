/* The model as a whole: what must not change the result (recomputation, accumulation, chunks, cache), and the
 * promises of gpt2.h and base/param.h. Its gradients are held against float64 references by build/golden and
 * test_ops. */
#include "base/memory.h"
#include "base/random.h"
#include "model/gpt2_model.h"
#include "tests/check.h"

#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const Gpt2Config small = {
    .layers = 3, .heads = 2, .channels = 24, .context = 20, .vocab = 61, .vocab_padded = 128};

enum { B = 4, T = 13, ROWS = B * T };

typedef struct Fixture {
    ParamTable table;
    float *params, *grads;
    Gpt2 *model;
    int tokens[ROWS], targets[ROWS];
} Fixture;

static void set_up_table(Fixture *fixture, const Gpt2Config *config, bool split, bool train, int recompute, int max_B,
                         int max_T) {
    omp_set_num_threads(2);
    *fixture = (Fixture){0};
    gpt2_param_table(config, split, &fixture->table);
    size_t elems = (size_t)fixture->table.elems;
    fixture->params = malloc(elems * sizeof(float));
    fixture->grads = malloc(elems * sizeof(float));
    memset(fixture->grads, 0xff, elems * sizeof(float)); /* NaN */
    gpt2_init_random(config, &fixture->table, 11, fixture->params);
    for (size_t i = 0; i < elems; i++) /* so that biases and gains count, and logits differ */
        fixture->params[i] += 0.1f * (float)(random_uniform(3, 0, i) - 0.5);
    const Param *wte = param_find(&fixture->table, "wte", -1);
    memset(fixture->params + wte->offset + config->vocab * config->channels, 0,
           (size_t)((config->vocab_padded - config->vocab) * config->channels) * sizeof(float));
    for (int i = 0; i < ROWS; i++) {
        fixture->tokens[i] = (int)(random_bits(5, 0, (uint64_t)i) % (uint64_t)config->vocab);
        fixture->targets[i] = (int)(random_bits(5, 1, (uint64_t)i) % (uint64_t)config->vocab);
    }
    Gpt2Options options = {.max_B = max_B, .max_T = max_T, .train = train, .recompute = recompute};
    assert_ok(gpt2_create(&fixture->model, config, &fixture->table, fixture->params, train ? fixture->grads : NULL,
                          &options, &ops_cpu, &host_memory));
}

static void set_up_config(Fixture *fixture, const Gpt2Config *config, bool train, int recompute, int max_B,
                          int max_T) {
    set_up_table(fixture, config, false, train, recompute, max_B, max_T);
}

static void set_up(Fixture *fixture, bool train, int recompute, int max_B, int max_T) {
    set_up_config(fixture, &small, train, recompute, max_B, max_T);
}

static void tear_down(Fixture *fixture) {
    gpt2_destroy(fixture->model);
    free(fixture->params);
    free(fixture->grads);
    param_table_free(&fixture->table);
}

static double run(Fixture *fixture, int sequences, int length) {
    gpt2_forward(fixture->model, fixture->tokens, sequences, length);
    return gpt2_backward(fixture->model, fixture->targets, 1, false, NULL, NULL);
}

static void assert_same_bits(const float *a, const float *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (memcmp(&a[i], &b[i], sizeof a[i]) != 0)
            fail_msg("element %lld: %.9g and %.9g", (long long)i, (double)a[i], (double)b[i]);
}

static void assert_all_close(const float *actual, const float *expected, int64_t count, double tolerance) {
    for (int64_t i = 0; i < count; i++)
        if (!(fabs((double)actual[i] - (double)expected[i]) <= tolerance * (1 + fabs((double)expected[i]))))
            fail_msg("element %lld: %.9g, expected %.9g", (long long)i, (double)actual[i], (double)expected[i]);
}

/* ---- the table ---- */

static void test_table(void **state) {
    (void)state;
    ParamTable table;
    gpt2_param_table(&small, false, &table);
    assert_int_equal(table.param_count, 2 + 12 * small.layers + 2);
    assert_int_equal(table.gradient_count, 1 + 5 * small.layers + 2);
    int64_t padding = (int64_t)(small.vocab_padded - small.vocab) * small.channels;
    assert_int_equal(table.elems, gpt2_param_count(&small) + padding);
    int64_t offset = 0;
    for (int i = 0; i < table.gradient_count; i++) {
        assert_int_equal(table.gradients[i].offset, offset);
        offset += table.gradients[i].elems;
    }
    assert_int_equal(offset, table.elems);
    assert_string_equal(table.params[0].name, "lnfw");
    assert_string_equal(table.params[2].name, "fcprojw");
    assert_int_equal(table.params[2].layer, small.layers - 1);
    assert_string_equal(table.params[table.param_count - 1].name, "wte");
    param_table_free(&table);
}

static void test_counts(void **state) {
    (void)state;
    Gpt2Config gpt2 = {12, 12, 768, 1024, 50257, gpt2_pad_vocab(50257)};
    assert_int_equal(gpt2.vocab_padded, 50304);
    assert_int_equal(gpt2_param_count(&gpt2), 124439808);
    assert_close(gpt2_flops_per_token(&gpt2, 256), 6.0 * 124439808 + 6.0 * 12 * 256 * 768, 1);
}

static void test_bad_sizes(void **state) {
    (void)state;
    Gpt2Config config = small;
    assert_ok(gpt2_check(&config, "here"));
    config.heads = 5;
    assert_refused(gpt2_check(&config, "here"), "here: heads must divide channels");
    config = small;
    config.layers = 0;
    assert_refused(gpt2_check(&config, "here"), "layers: expected an integer");
    config = small;
    config.vocab_padded = 60;
    assert_refused(gpt2_check(&config, "here"), "padded");
    config = (Gpt2Config){1 << 24, 1, 1 << 24, 1 << 24, 1 << 24, 1 << 24};
    assert_refused(gpt2_check(&config, "here"), "more than 1e12");
}

/* Same values for any number of threads; the deviations that GPT-2 starts from. */
static void test_init(void **state) {
    (void)state;
    ParamTable table;
    gpt2_param_table(&small, false, &table);
    float *one = malloc((size_t)table.elems * sizeof(float)), *three = malloc((size_t)table.elems * sizeof(float));
    omp_set_num_threads(1);
    gpt2_init_random(&small, &table, 1, one);
    omp_set_num_threads(3);
    gpt2_init_random(&small, &table, 1, three);
    assert_same_bits(one, three, table.elems);
    for (int i = 0; i < table.param_count; i++) {
        const Param *param = &table.params[i];
        bool embedding = param->layer < 0, projection = strstr(param->name, "proj") != NULL;
        int64_t drawn = strcmp(param->name, "wte") ? param->elems : (int64_t)small.vocab * param->cols;
        double square = 0, expected = projection ? 0.02 / sqrt(2.0 * small.layers) : 0.02;
        for (int64_t j = 0; j < drawn; j++)
            square += (double)one[param->offset + j] * (double)one[param->offset + j] / (double)drawn;
        bool gain = strncmp(param->name, "ln", 2) == 0 && param->name[3] == 'w';
        if (param->decay)
            assert_close(sqrt(square), expected, embedding ? 0.1 * expected : 0.2 * expected);
        for (int64_t j = 0; j < param->elems && !param->decay; j++)
            assert_true(one[param->offset + j] == (gain ? 1.0f : 0.0f));
        for (int64_t j = drawn; j < param->elems; j++)
            assert_true(one[param->offset + j] == 0);
        for (int other = 0; other < i && param->decay; other++) /* no two tensors draw the same numbers */
            assert_true(one[param->offset] != one[table.params[other].offset]);
    }
    free(one), free(three);
    param_table_free(&table);
}

/* ---- one step ---- */

static void test_two_runs_same_bits(void **state) {
    (void)state;
    Fixture a, b;
    set_up(&a, true, RECOMPUTE_NO, B, T);
    set_up(&b, true, RECOMPUTE_NO, B, T);
    assert_true(run(&a, B, T) == run(&b, B, T));
    assert_same_bits(a.grads, b.grads, a.table.elems);
    run(&a, B, T); /* again, over what the first run left */
    assert_same_bits(a.grads, b.grads, a.table.elems);
    tear_down(&a), tear_down(&b);
}

static void test_recompute_same_bits(void **state) {
    (void)state;
    Fixture plain;
    set_up(&plain, true, RECOMPUTE_NO, B, T);
    double loss = run(&plain, B, T);
    Gpt2Options options = {.max_B = B, .max_T = T, .train = true};
    size_t least = gpt2_activation_bytes(&small, &options, &ops_cpu);
    for (int recompute = RECOMPUTE_GELU; recompute <= RECOMPUTE_LAYERS; recompute++) {
        Fixture again;
        set_up(&again, true, recompute, B, T);
        for (int step = 0; step < 2; step++) { /* the second over what the first left */
            assert_true(run(&again, B, T) == loss);
            assert_same_bits(plain.grads, again.grads, plain.table.elems);
        }
        options.recompute = recompute;
        size_t bytes = gpt2_activation_bytes(&small, &options, &ops_cpu);
        assert_true(bytes < least);
        least = bytes;
        tear_down(&again);
    }
    tear_down(&plain);
}

/* Two micro-steps of B/2, each scaled by a half, are one step of B. */
static void test_accumulation(void **state) {
    (void)state;
    Fixture whole, parts;
    set_up(&whole, true, RECOMPUTE_NO, B, T);
    set_up(&parts, true, RECOMPUTE_NO, B / 2, T);
    double loss = run(&whole, B, T), sum = 0;
    for (int part = 0; part < 2; part++) {
        gpt2_forward(parts.model, parts.tokens + part * ROWS / 2, B / 2, T);
        sum += gpt2_backward(parts.model, parts.targets + part * ROWS / 2, 0.5f, part > 0, NULL, NULL) / 2;
    }
    assert_close(sum, loss, 1e-6);
    assert_all_close(parts.grads, whole.grads, whole.table.elems, 1e-6);
    tear_down(&whole), tear_down(&parts);
}

/* A vocabulary padded so far that the head takes the positions in chunks of 64, against sequences one by one. */
static void test_head_in_chunks(void **state) {
    (void)state;
    const Gpt2Config wide = {
        .layers = 1, .heads = 1, .channels = 4, .context = 20, .vocab = 61, .vocab_padded = 400000};
    enum { LENGTH = 20 };
    Fixture whole, parts;
    set_up_config(&whole, &wide, true, RECOMPUTE_NO, 4, LENGTH);
    set_up_config(&parts, &wide, true, RECOMPUTE_NO, 1, LENGTH);
    int tokens[80], targets[80];
    for (int i = 0; i < 80; i++)
        tokens[i] = i * 7 % 61, targets[i] = i * 5 % 61;
    gpt2_forward(whole.model, tokens, 4, LENGTH);
    double loss = gpt2_loss(whole.model, targets), sum = 0;
    assert_close(gpt2_backward(whole.model, targets, 1, false, NULL, NULL), loss, 1e-6);
    for (int b = 0; b < 4; b++) {
        gpt2_forward(parts.model, tokens + b * LENGTH, 1, LENGTH);
        sum += gpt2_backward(parts.model, targets + b * LENGTH, 0.25f, b > 0, NULL, NULL) / 4;
    }
    assert_close(sum, loss, 1e-6);
    assert_all_close(parts.grads, whole.grads, whole.table.elems, 1e-6);
    tear_down(&whole), tear_down(&parts);
}

/* A model made for more than it is given: the same as one made to measure, and positions beyond T get no gradient. */
static void test_smaller_than_max(void **state) {
    (void)state;
    Fixture exact, roomy;
    set_up(&exact, true, RECOMPUTE_NO, 2, 7);
    set_up(&roomy, true, RECOMPUTE_NO, B, T);
    run(&roomy, B, T); /* leaves larger activations behind */
    assert_close(run(&roomy, 2, 7), run(&exact, 2, 7), 1e-6);
    assert_all_close(roomy.grads, exact.grads, exact.table.elems, 1e-6);
    const Param *wpe = param_find(&exact.table, "wpe", -1);
    for (int64_t i = 7 * wpe->cols; i < wpe->elems; i++)
        assert_true(roomy.grads[wpe->offset + i] == 0);
    tear_down(&exact), tear_down(&roomy);
}

static void test_padding_gets_no_gradient(void **state) {
    (void)state;
    Fixture fixture;
    set_up(&fixture, true, RECOMPUTE_NO, B, T);
    run(&fixture, B, T);
    const Param *wte = param_find(&fixture.table, "wte", -1);
    for (int64_t i = (int64_t)small.vocab * wte->cols; i < wte->elems; i++)
        assert_true(fixture.grads[wte->offset + i] == 0);
    tear_down(&fixture);
}

/* loss_scale scales the gradients, not the loss. */
static void test_loss_scale(void **state) {
    (void)state;
    Fixture one, quarter;
    set_up(&one, true, RECOMPUTE_NO, B, T);
    set_up(&quarter, true, RECOMPUTE_NO, B, T);
    double loss = run(&one, B, T);
    gpt2_forward(quarter.model, quarter.tokens, B, T);
    assert_close(gpt2_backward(quarter.model, quarter.targets, 0.25f, false, NULL, NULL), loss, 1e-6);
    for (int64_t i = 0; i < one.table.elems; i++)
        one.grads[i] *= 0.25f;
    assert_all_close(quarter.grads, one.grads, one.table.elems, 1e-6);
    tear_down(&one), tear_down(&quarter);
}

static void test_loss_agrees_with_logits(void **state) {
    (void)state;
    Fixture fixture;
    set_up(&fixture, false, RECOMPUTE_NO, B, T);
    gpt2_forward(fixture.model, fixture.tokens, B, T);
    float *logits = malloc(sizeof(float) * (size_t)(ROWS * small.vocab));
    gpt2_logits(fixture.model, 0, ROWS, logits);
    double mean = 0;
    for (int row = 0; row < ROWS; row++) {
        double sum = 0;
        for (int v = 0; v < small.vocab; v++)
            sum += exp((double)logits[row * small.vocab + v]);
        mean += (log(sum) - (double)logits[row * small.vocab + fixture.targets[row]]) / ROWS;
    }
    assert_close(gpt2_loss(fixture.model, fixture.targets), mean, 1e-6);
    float few[2 * 61];
    gpt2_logits(fixture.model, 5, 2, few);
    assert_all_close(few, logits + 5 * small.vocab, 2 * small.vocab, 1e-6);
    free(logits);
    tear_down(&fixture);
}

static void test_nan_loss(void **state) {
    (void)state;
    Fixture fixture;
    set_up(&fixture, true, RECOMPUTE_NO, B, T);
    fixture.params[param_find(&fixture.table, "fcb", 1)->offset] = NAN;
    assert_true(isnan(run(&fixture, B, T)));
    assert_true(isnan(gpt2_loss(fixture.model, fixture.targets)));
    tear_down(&fixture);
}

/* ---- ready ---- */

typedef struct Watch {
    Fixture *fixture;
    float *seen; /* gradients as they were when announced */
    int next;
} Watch;

static void watch(void *user, int gradient) {
    Watch *w = user;
    assert_int_equal(gradient, w->next++);
    const Gradient *g = &w->fixture->table.gradients[gradient];
    memcpy(w->seen + g->offset, w->fixture->grads + g->offset, (size_t)g->elems * sizeof(float));
}

/* Every gradient once, in the table's order, and final when announced. */
static void test_ready(void **state) {
    (void)state;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        Fixture fixture;
        set_up(&fixture, true, accumulate, B, T);
        run(&fixture, B, T);
        Watch w = {.fixture = &fixture, .seen = malloc((size_t)fixture.table.elems * sizeof(float))};
        gpt2_forward(fixture.model, fixture.tokens, B, T);
        gpt2_backward(fixture.model, fixture.targets, 1, accumulate, watch, &w);
        assert_int_equal(w.next, fixture.table.gradient_count);
        assert_same_bits(w.seen, fixture.grads, fixture.table.elems);
        free(w.seen);
        tear_down(&fixture);
    }
}

/* ---- need ---- */

typedef struct Supply {
    Fixture *fixture;
    const float *values; /* what the parameters will be */
    int asked[32], count;
} Supply;

/* Brings the parameters in the moment they are asked for. */
static void supply(void *user, int gradient) {
    Supply *s = user;
    const Gradient *g = &s->fixture->table.gradients[gradient];
    memcpy(s->fixture->params + g->offset, s->values + g->offset, (size_t)g->elems * sizeof(float));
    s->asked[s->count++] = gradient;
}

static int gradient_of(const ParamTable *table, const char *name, int layer) {
    return param_gradient(table, param_find(table, name, layer));
}

/* The order that gpt2.h promises. */
static void assert_order_of_need(const Supply *s) {
    static const char *const layer_order[] = {"ln2b", "qkvw", "attprojw", "fcw", "fcprojw"};
    const ParamTable *table = &s->fixture->table;
    int at = 0;
    assert_int_equal(s->count, table->gradient_count);
    assert_int_equal(s->asked[at++], gradient_of(table, "wte", -1));
    assert_int_equal(s->asked[at++], gradient_of(table, "wpe", -1));
    for (int layer = 0; layer < small.layers; layer++)
        for (int i = 0; i < 5; i++)
            assert_int_equal(s->asked[at++], gradient_of(table, layer_order[i], layer));
    assert_int_equal(s->asked[at++], gradient_of(table, "lnfb", -1));
}

/* Parameters are NaN until they are asked for: a read before that would show in loss or gradients. */
static void test_need(void **state) {
    (void)state;
    for (int recompute = RECOMPUTE_NO; recompute <= RECOMPUTE_LAYERS; recompute++) {
        Fixture plain, late;
        set_up(&plain, true, recompute, B, T);
        set_up(&late, true, recompute, B, T);
        Supply s = {.fixture = &late, .values = plain.params};
        gpt2_on_need(late.model, supply, &s);
        double loss = run(&plain, B, T);
        for (int step = 0; step < 2; step++) {
            memset(late.params, 0xff, (size_t)late.table.elems * sizeof(float));
            s.count = 0;
            assert_true(run(&late, B, T) == loss);
            assert_same_bits(late.grads, plain.grads, plain.table.elems);
            assert_order_of_need(&s);
        }
        gpt2_on_need(late.model, NULL, NULL);
        assert_true(run(&late, B, T) == loss);
        assert_int_equal(s.count, late.table.gradient_count);
        tear_down(&plain), tear_down(&late);
    }
}

/* ---- the tied embedding in two gradients ---- */

enum { SPARE = 2 }; /* slots of tokens that only other ranks have */

typedef struct Lookups {
    int slot_of_token[61], slots;
    float rows[(61 + SPARE) * 24];
} Lookups;

/* Slots for the tokens of the first `sequences`, not in the order of the tokens; all rows NaN. */
static void give_slots(Lookups *lookup, const Fixture *fixture, int sequences) {
    lookup->slots = 0;
    memset(lookup->slot_of_token, 0xff, sizeof lookup->slot_of_token);
    for (int i = sequences * T - 1; i >= 0; i--)
        if (lookup->slot_of_token[fixture->tokens[i]] < 0)
            lookup->slot_of_token[fixture->tokens[i]] = lookup->slots++;
    lookup->slots += SPARE;
    memset(lookup->rows, 0xff, sizeof lookup->rows);
    gpt2_set_lookup(fixture->model, lookup->rows, lookup->slots, lookup->slot_of_token);
}

/* Another layout of the same model. */
static void copy_params(Fixture *to, const Fixture *from) {
    for (int i = 0; i < to->table.param_count; i++) {
        const Param *param = &to->table.params[i], *source = param_find(&from->table, param->name, param->layer);
        memcpy(to->params + param->offset, from->params + source->offset, (size_t)param->elems * sizeof(float));
    }
}

/* Micro-steps of one sequence each. */
static double run_micro_steps(Fixture *fixture, int count) {
    double loss = 0;
    for (int micro = 0; micro < count; micro++) {
        gpt2_forward(fixture->model, fixture->tokens + micro * T, 1, T);
        loss += gpt2_backward(fixture->model, fixture->targets + micro * T, 1.0f / (float)count, micro > 0, NULL, NULL);
    }
    return loss;
}

/* What head and lookup have for wte, row by row, into the head's. */
static void join(Fixture *fixture, const Lookups *lookup) {
    int C = small.channels;
    float *wte = fixture->grads + param_find(&fixture->table, "wte", -1)->offset;
    for (int token = 0; token < small.vocab; token++)
        for (int c = 0, slot = lookup->slot_of_token[token]; slot >= 0 && c < C; c++)
            wte[token * C + c] += lookup->rows[slot * C + c];
}

/* The same gradients: wte's to rounding, all others to the bit. */
static void assert_same_gradients(const Fixture *split, const Fixture *plain) {
    for (int i = 0; i < split->table.param_count; i++) {
        const Param *param = &split->table.params[i], *other = param_find(&plain->table, param->name, param->layer);
        const float *actual = split->grads + param->offset, *expected = plain->grads + other->offset;
        if (strcmp(param->name, "wte") == 0)
            assert_all_close(actual, expected, param->elems, 1e-7);
        else
            assert_same_bits(actual, expected, param->elems);
    }
}

static void test_split_embedding(void **state) {
    (void)state;
    for (int recompute = RECOMPUTE_NO; recompute <= RECOMPUTE_LAYERS; recompute++) {
        Fixture plain, split;
        Lookups lookup;
        set_up(&plain, true, recompute, 1, T);
        set_up_table(&split, &small, true, true, recompute, 1, T);
        copy_params(&split, &plain);
        for (int micro_steps = 3; micro_steps >= 1; micro_steps--) {
            give_slots(&lookup, &split, micro_steps);
            double loss = run_micro_steps(&plain, micro_steps);
            for (int step = 0; step < 2; step++) { /* the second over what the first left */
                assert_true(run_micro_steps(&split, micro_steps) == loss);
                join(&split, &lookup);
                assert_same_gradients(&split, &plain);
            }
            for (int i = (lookup.slots - SPARE) * small.channels; i < lookup.slots * small.channels; i++)
                assert_true(lookup.rows[i] == 0);
            for (int i = lookup.slots * small.channels; i < (61 + SPARE) * small.channels; i++)
                assert_true(isnan(lookup.rows[i]));
        }
        gpt2_set_lookup(split.model, NULL, 0, NULL); /* both to wte again, in any layout */
        run_micro_steps(&plain, 3), run_micro_steps(&split, 3);
        assert_same_gradients(&split, &plain);
        tear_down(&plain), tear_down(&split);
    }
}

/* Rows are sums over the positions in their order, whatever the number of threads. */
static void test_lookup_bits(void **state) {
    (void)state;
    for (int threads = 1; threads <= 2; threads++) { /* set_up has scratch for two */
        Fixture fixture;
        Lookups lookup;
        set_up_table(&fixture, &small, true, true, RECOMPUTE_NO, B, T);
        give_slots(&lookup, &fixture, B);
        fixture.model->context.threads = threads;
        run(&fixture, B, T);
        float expected[(61 + SPARE) * 24] = {0};
        for (int row = 0; row < ROWS; row++)
            for (int c = 0, slot = lookup.slot_of_token[fixture.tokens[row]]; c < small.channels; c++)
                expected[slot * small.channels + c] += fixture.model->dstream[row * small.channels + c];
        assert_same_bits(lookup.rows, expected, lookup.slots * small.channels);
        tear_down(&fixture);
    }
}

typedef struct Arrivals {
    Fixture *fixture;
    float *seen; /* gradients as they were when announced */
    int order[32], count;
} Arrivals;

static void arrive(void *user, int gradient) {
    Arrivals *a = user;
    const Gradient *g = &a->fixture->table.gradients[gradient];
    memcpy(a->seen + g->offset, a->fixture->grads + g->offset, (size_t)g->elems * sizeof(float));
    a->order[a->count++] = gradient;
}

/* In the order of this table, and wte first or last. */
static void test_split_ready(void **state) {
    (void)state;
    for (int apart = 0; apart < 2; apart++) {
        Fixture fixture;
        Lookups lookup;
        set_up_table(&fixture, &small, true, true, RECOMPUTE_NO, B, T);
        int count = fixture.table.gradient_count, wte = gradient_of(&fixture.table, "wte", -1);
        assert_int_equal(wte, 0);
        assert_int_equal(gradient_of(&fixture.table, "wpe", -1), count - 1);
        if (apart)
            give_slots(&lookup, &fixture, B);
        Arrivals a = {.fixture = &fixture, .seen = malloc((size_t)fixture.table.elems * sizeof(float))};
        gpt2_forward(fixture.model, fixture.tokens, B, T);
        gpt2_backward(fixture.model, fixture.targets, 1, false, arrive, &a);
        assert_int_equal(a.count, count);
        for (int i = 0; i < count; i++)
            assert_int_equal(a.order[i], apart ? i : (i + 1) % count);
        assert_same_bits(a.seen, fixture.grads, fixture.table.elems);
        free(a.seen);
        tear_down(&fixture);
    }
}

/* Tensors start from the same values wherever they stand. */
static void test_split_init(void **state) {
    (void)state;
    Fixture plain, split;
    set_up(&plain, true, RECOMPUTE_NO, B, T);
    set_up_table(&split, &small, true, true, RECOMPUTE_NO, B, T);
    gpt2_init_random(&small, &plain.table, 7, plain.params);
    gpt2_init_random(&small, &split.table, 7, split.params);
    for (int i = 0; i < split.table.param_count; i++) {
        const Param *param = &split.table.params[i], *other = param_find(&plain.table, param->name, param->layer);
        assert_same_bits(split.params + param->offset, plain.params + other->offset, param->elems);
        assert_int_equal(param->decay, other->decay);
    }
    tear_down(&plain), tear_down(&split);
}

/* ---- ranks as threads ---- */

static void *rank_main(void *fixture) {
    omp_set_num_threads(2);
    for (int step = 0; step < 5; step++)
        run(fixture, B, T);
    return NULL;
}

/* Several models at work at once in one process, each with a team of its own, do not disturb each other. */
static void test_ranks_as_threads(void **state) {
    (void)state;
    enum { RANKS = 4 };
    Fixture alone, ranks[RANKS];
    pthread_t threads[RANKS];
    set_up(&alone, true, RECOMPUTE_NO, B, T);
    run(&alone, B, T);
    for (int i = 0; i < RANKS; i++)
        set_up(&ranks[i], true, RECOMPUTE_NO, B, T);
    for (int i = 0; i < RANKS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, &ranks[i]), 0);
    for (int i = 0; i < RANKS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < RANKS; i++) {
        assert_same_bits(ranks[i].grads, alone.grads, alone.table.elems);
        tear_down(&ranks[i]);
    }
    tear_down(&alone);
}

/* ---- generation ---- */

/* Logits after every position, from a cache fed in pieces of the given sizes, against one forward pass. */
static void cache_case(Fixture *fixture, Gpt2Cache *cache, const int *pieces) {
    float logits[61];
    gpt2_cache_clear(cache);
    for (int done = 0, i = 0; done < T; i++) {
        const float *last = gpt2_cache_append(cache, fixture->tokens + done, pieces[i]);
        done += pieces[i];
        assert_int_equal(gpt2_cache_length(cache), done);
        gpt2_logits(fixture->model, done - 1, 1, logits);
        assert_all_close(last, logits, small.vocab, 2e-6);
    }
}

static void test_cache(void **state) {
    (void)state;
    Fixture fixture;
    Gpt2Cache *cache;
    set_up(&fixture, false, RECOMPUTE_NO, B, T);
    gpt2_forward(fixture.model, fixture.tokens, 1, T);
    assert_ok(gpt2_cache_create(&cache, &small, &fixture.table, fixture.params, &ops_cpu, &host_memory));
    cache_case(&fixture, cache, (const int[]){1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
    cache_case(&fixture, cache, (const int[]){13});
    cache_case(&fixture, cache, (const int[]){7, 1, 4, 1});
    gpt2_cache_destroy(cache);
    tear_down(&fixture);
}

/* A cache takes as many tokens as the context has, whatever max_T a training model would have. */
static void test_cache_full(void **state) {
    (void)state;
    Fixture fixture;
    Gpt2Cache *cache;
    set_up(&fixture, false, RECOMPUTE_NO, 1, 20);
    gpt2_forward(fixture.model, fixture.tokens, 1, 20);
    assert_ok(gpt2_cache_create(&cache, &small, &fixture.table, fixture.params, &ops_cpu, &host_memory));
    float logits[61];
    gpt2_cache_append(cache, fixture.tokens, 19);
    const float *last = gpt2_cache_append(cache, fixture.tokens + 19, 1);
    gpt2_logits(fixture.model, 19, 1, logits);
    assert_all_close(last, logits, small.vocab, 2e-6);
    gpt2_cache_destroy(cache);
    tear_down(&fixture);
}

/* ---- memory ---- */

static void *refuse(void *context, size_t bytes) {
    *(size_t *)context = bytes;
    return NULL;
}
static void free_nothing(void *context, void *memory) {
    (void)context;
    assert_null(memory);
}

static void test_no_memory(void **state) {
    (void)state;
    size_t asked = 0;
    const Allocator none = {refuse, free_nothing, &asked};
    ParamTable table;
    gpt2_param_table(&small, false, &table);
    float *params = calloc((size_t)table.elems, sizeof(float));
    Gpt2 *model;
    Gpt2Cache *cache;
    Gpt2Options options = {.max_B = B, .max_T = T, .train = true};
    assert_int_equal(gpt2_create(&model, &small, &table, params, params, &options, &ops_cpu, &none), FAULT);
    assert_int_equal(asked, gpt2_activation_bytes(&small, &options, &ops_cpu));
    gpt2_destroy(model);
    assert_int_equal(gpt2_cache_create(&cache, &small, &table, params, &ops_cpu, &none), FAULT);
    gpt2_cache_destroy(cache);
    free(params);
    param_table_free(&table);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_table),
    cmocka_unit_test(test_counts),
    cmocka_unit_test(test_bad_sizes),
    cmocka_unit_test(test_init),
    cmocka_unit_test(test_two_runs_same_bits),
    cmocka_unit_test(test_recompute_same_bits),
    cmocka_unit_test(test_accumulation),
    cmocka_unit_test(test_head_in_chunks),
    cmocka_unit_test(test_smaller_than_max),
    cmocka_unit_test(test_padding_gets_no_gradient),
    cmocka_unit_test(test_loss_scale),
    cmocka_unit_test(test_loss_agrees_with_logits),
    cmocka_unit_test(test_nan_loss),
    cmocka_unit_test(test_ready),
    cmocka_unit_test(test_need),
    cmocka_unit_test(test_split_embedding),
    cmocka_unit_test(test_lookup_bits),
    cmocka_unit_test(test_split_ready),
    cmocka_unit_test(test_split_init),
    cmocka_unit_test(test_ranks_as_threads),
    cmocka_unit_test(test_cache),
    cmocka_unit_test(test_cache_full),
    cmocka_unit_test(test_no_memory),
};

CHECK_MAIN(tests)
