/* The sampler against a naive one, and generation against a model that sees its whole window anew for every token. */
#include "model/generate.h"

#include "base/random.h"
#include "base/utf8.h"
#include "tests/check.h"

#include <stdlib.h>
#include <string.h>

static void sampler_subtracts_the_maximum(void **state) {
    (void)state;
    const float logits[4] = {100, 0, 0, 0}, low[4] = {-1e30f, -1e30f, 88, 90};
    assert_int_equal(sample_token(logits, 4, 1, 0, 0.5, NULL), 0);
    assert_int_equal(sample_token(logits, 4, 1, 0, 0.999999, NULL), 0);
    assert_int_equal(sample_token(low, 4, 1, 0, 0.05, NULL), 2);
    assert_int_equal(sample_token(low, 4, 1, 0, 0.5, NULL), 3);
}

static void sampler_at_temperature_zero_is_argmax(void **state) {
    (void)state;
    const float logits[5] = {-3, -1, -2, -1, -7};
    for (int i = 0; i < 10; i++)
        assert_int_equal(sample_token(logits, 5, 0, 0, 0.1 * i, NULL), 1);
    int scratch[5];
    assert_int_equal(sample_token(logits, 5, 1, 1, 0.99, scratch), 1);
    assert_int_equal(sample_token(logits, 5, 1e-30f, 0, 0.4, NULL), 1);
    assert_int_equal(sample_token(logits, 5, 1e-30f, 0, 0.6, NULL), 3); /* half of the mass each */
    assert_int_equal(sample_token(logits, 1, 1, 0, 0.9, NULL), 0);
}

static void sampler_walks_the_cumulative_distribution(void **state) {
    (void)state;
    const float logits[4] = {0, 0.69314718f, 1.09861229f, 1.38629436f}; /* 10, 20, 30, 40 % */
    static const struct {
        double coin;
        int token;
    } cases[] = {{0, 0}, {0.099, 0}, {0.101, 1}, {0.299, 1}, {0.301, 2}, {0.599, 2}, {0.601, 3}, {0.9999999999, 3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(sample_token(logits, 4, 1, 0, cases[i].coin, NULL), cases[i].token);
    const float scaled[4] = {0, 2 * 0.69314718f, 2 * 1.09861229f, 2 * 1.38629436f};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(sample_token(scaled, 4, 2, 0, cases[i].coin, NULL), cases[i].token);
}

/* A test of fit at p = 0.001, on fixed coins. */
static void sampler_draws_the_right_frequencies(void **state) {
    (void)state;
    enum { TOKENS = 8, DRAWS = 40000 };
    const float logits[TOKENS] = {0.5f, -1, 2, 0, 1.25f, -0.5f, 0.75f, -2};
    const double temperature = 0.8;
    double expected[TOKENS], total = 0, chi_square = 0;
    int found[TOKENS] = {0};
    for (int i = 0; i < TOKENS; i++)
        total += expected[i] = exp(logits[i] / temperature);
    for (uint64_t draw = 0; draw < DRAWS; draw++)
        found[sample_token(logits, TOKENS, (float)temperature, 0, random_uniform(11, 0, draw), NULL)]++;
    for (int i = 0; i < TOKENS; i++) {
        double mean = DRAWS * expected[i] / total;
        chi_square += (found[i] - mean) * (found[i] - mean) / mean;
    }
    assert_true(chi_square < 24.32); /* 7 degrees of freedom */
}

/* Marks the k best by looking for the best unmarked token k times. */
static int naive_sample(const float *logits, int count, double temperature, int k, double coin) {
    bool allowed[64] = {false};
    for (int picked = 0; picked < k; picked++) {
        int best = -1;
        for (int i = 0; i < count; i++)
            if (!allowed[i] && (best < 0 || logits[i] > logits[best]))
                best = i;
        allowed[best] = true;
    }
    double total = 0, reached = 0;
    for (int i = 0; i < count; i++)
        total += allowed[i] ? exp(logits[i] / temperature) : 0;
    for (int i = 0; i < count; i++) {
        reached += allowed[i] ? exp(logits[i] / temperature) / total : 0;
        if (coin < reached)
            return i;
    }
    return -1;
}

static void sampler_takes_the_top_k(void **state) {
    (void)state;
    enum { TOKENS = 37 };
    int scratch[TOKENS];
    for (uint64_t round = 0; round < 200; round++) {
        float logits[TOKENS];
        for (uint64_t i = 0; i < TOKENS; i++) /* few different values: many ties */
            logits[i] = (float)(random_bits(3, round, i) % (round % 2 ? 6 : 1000)) / (round % 2 ? 4 : 500);
        for (int k = 1; k <= TOKENS; k++) {
            double coin = random_uniform(3, round, 1000 + (uint64_t)k);
            int expected = naive_sample(logits, TOKENS, 0.9, k, k == 1 ? 0 : coin);
            assert_int_equal(sample_token(logits, TOKENS, 0.9f, k, coin, scratch), expected);
        }
        double coin = random_uniform(3, round, 2000);
        int unlimited = sample_token(logits, TOKENS, 1, 0, coin, NULL);
        assert_int_equal(sample_token(logits, TOKENS, 1, TOKENS, coin, scratch), unlimited);
        assert_int_equal(sample_token(logits, TOKENS, 1, 1000000, coin, scratch), unlimited);
    }
}

static void sampler_gives_ties_to_the_lowest(void **state) {
    (void)state;
    const float logits[5] = {1, 2, 2, 2, 0};
    int scratch[5];
    for (int i = 0; i < 100; i++)
        assert_int_equal(sample_token(logits, 5, 1, 2, i / 100.0, scratch), i < 50 ? 1 : 2);
}

static void sampler_stays_in_range_on_bad_logits(void **state) {
    (void)state;
    int scratch[4];
    const float cases[][4] = {{NAN, 1, 2, 3}, {1, NAN, 2, 3}, {INFINITY, 1, INFINITY, 2},
                              {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, {NAN, NAN, NAN, NAN}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int k = 0; k <= 4; k++) {
            int token = sample_token(cases[i], 4, 1, k, 0.7, scratch);
            assert_true(token >= 0 && token < 4);
        }
    const float masked[4] = {-INFINITY, 0, -INFINITY, 0};
    assert_int_equal(sample_token(masked, 4, 1, 0, 0, NULL), 1);
    assert_int_equal(sample_token(masked, 4, 1, 3, 0.99, scratch), 3);
}

/* ---- generation ---- */

enum { TEXT_MAX = 64 };

typedef struct Text {
    int tokens[TEXT_MAX];
    int count, limit; /* emit refuses to go on at `limit` tokens; 0: never */
} Text;

static bool collect(void *user, int token) {
    Text *text = user;
    assert_true(text->count < TEXT_MAX);
    text->tokens[text->count++] = token;
    return text->count != text->limit;
}

/* A model with a life of its own: weights large enough that the next token depends on all of the window. */
typedef struct Fixture {
    Gpt2Config config;
    ParamTable table;
    float *params;
    Gpt2Cache *cache;
} Fixture;

static void fixture_open(Fixture *f, int context) {
    *f = (Fixture){0};
    f->config = (Gpt2Config){
        .layers = 2, .heads = 2, .channels = 16, .context = context, .vocab = 23, .vocab_padded = 128};
    gpt2_param_table(&f->config, false, &f->table);
    f->params = memory_alloc(&host_memory, (size_t)f->table.elems * sizeof(float));
    gpt2_init_random(&f->config, &f->table, 5, f->params);
    for (int i = 0; i < f->table.param_count; i++)
        if (f->table.params[i].decay)
            for (int64_t k = 0; k < f->table.params[i].elems; k++)
                f->params[f->table.params[i].offset + k] *= 10;
    assert_ok(gpt2_cache_create(&f->cache, &f->config, &f->table, f->params, &ops_cpu, &host_memory));
}

static void fixture_close(Fixture *f) {
    gpt2_cache_destroy(f->cache);
    memory_free(&host_memory, f->params);
    param_table_free(&f->table);
}

static Text run(Fixture *f, const int *prompt, int count, GenerateOptions options, int limit) {
    Text text = {.limit = limit};
    int drawn = -1;
    assert_ok(generate(f->cache, &f->config, prompt, count, &options, collect, &text, &drawn));
    assert_int_equal(drawn, text.count);
    return text;
}

/* The same, with the whole window through a cleared cache for every token. */
static Text run_naively(Fixture *f, const int *prompt, int count, GenerateOptions options) {
    Text text = {0};
    int window[2 * TEXT_MAX], length = 0, scratch[23], context = f->config.context;
    int half = context / 2 > 0 ? context / 2 : 1;
    for (int i = count > context ? count - half : 0; i < count; i++)
        window[length++] = prompt[i];
    for (int i = 0; i < options.max_tokens; i++) {
        gpt2_cache_clear(f->cache);
        const float *logits = gpt2_cache_append(f->cache, window, length);
        double coin = random_uniform(options.seed, 0, (uint64_t)i);
        int token = sample_token(logits, f->config.vocab, options.temperature, options.top_k, coin, scratch);
        window[length++] = text.tokens[text.count++] = token;
        if (length > context) {
            memmove(window, window + length - half, (size_t)half * sizeof *window);
            length = half;
        }
    }
    return text;
}

static void assert_same_text(const Text *found, const Text *expected) {
    assert_int_equal(found->count, expected->count);
    assert_memory_equal(found->tokens, expected->tokens, (size_t)expected->count * sizeof(int));
}

static void generation_crosses_the_context_limit(void **state) {
    (void)state;
    static const int prompt[20] = {4, 8, 15, 16, 22, 1, 3, 0, 7, 21, 5, 2, 9, 19, 11, 6, 12, 18, 10, 14};
    static const int contexts[] = {1, 2, 3, 8, 9}, lengths[] = {1, 3, 8, 9, 20};
    for (int c = 0; c < 5; c++) {
        Fixture f;
        fixture_open(&f, contexts[c]);
        for (int n = 0; n < 5; n++) {
            GenerateOptions options = {
                .max_tokens = 40, .temperature = 1, .top_k = 9, .seed = (uint64_t)n, .stop_token = -1};
            Text expected = run_naively(&f, prompt, lengths[n], options);
            Text found = run(&f, prompt, lengths[n], options, 0);
            assert_int_equal(found.count, 40);
            assert_same_text(&found, &expected);
            assert_true(gpt2_cache_length(f.cache) <= contexts[c]);
        }
        fixture_close(&f);
    }
}

static void generation_depends_on_seed_and_prompt_only(void **state) {
    (void)state;
    Fixture f;
    fixture_open(&f, 8);
    const int prompt[] = {1, 2}, other[] = {3, 2};
    GenerateOptions options = {.max_tokens = 30, .temperature = 1, .seed = 1, .stop_token = -1};
    Text first = run(&f, prompt, 2, options, 0), second = run(&f, prompt, 2, options, 0);
    assert_same_text(&second, &first);
    Text from_other = run(&f, other, 2, options, 0);
    assert_memory_not_equal(from_other.tokens, first.tokens, sizeof first.tokens);
    options.seed = 2;
    Text reseeded = run(&f, prompt, 2, options, 0);
    assert_memory_not_equal(reseeded.tokens, first.tokens, sizeof first.tokens);
    fixture_close(&f);
}

static void generation_stops_where_it_is_told(void **state) {
    (void)state;
    Fixture f;
    fixture_open(&f, 8);
    const int prompt[] = {1, 2};
    GenerateOptions options = {.max_tokens = 30, .temperature = 1, .seed = 1, .stop_token = -1};
    Text all = run(&f, prompt, 2, options, 0), text = run(&f, prompt, 2, options, 7);
    assert_int_equal(text.count, 7);
    assert_memory_equal(text.tokens, all.tokens, 7 * sizeof(int));
    int first = 0; /* where the sixth token stands for the first time */
    while (all.tokens[first] != all.tokens[5])
        first++;
    options.stop_token = all.tokens[5];
    text = run(&f, prompt, 2, options, 0);
    assert_int_equal(text.count, first);
    options.max_tokens = 0;
    text = run(&f, prompt, 2, options, 0);
    assert_int_equal(text.count, 0);
    fixture_close(&f);
}

static void generation_refuses_logits_that_are_none(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY};
    for (int i = 0; i < 2; i++) {
        Fixture f;
        fixture_open(&f, 8);
        f.params[param_find(&f.table, "lnfb", -1)->offset] = bad[i];
        const int prompt[] = {1, 2};
        GenerateOptions options = {.max_tokens = 30, .temperature = 1, .seed = 1, .stop_token = -1};
        Text text = {0};
        int drawn = -1;
        assert_int_equal(generate(f.cache, &f.config, prompt, 2, &options, collect, &text, &drawn), FAULT);
        assert_string_equal(error_line(), "the model's logits are not finite");
        assert_true(drawn == 0 && text.count == 0);
        fixture_close(&f);
    }
}

static void unfinished_characters_are_held_back(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t complete;
    } cases[] = {
        {"", 0}, {"a", 1}, {"ab", 2},
        {"a\xc3", 1}, {"a\xc3\xa9", 3},                                              /* e acute */
        {"\xe2", 0}, {"\xe2\x82", 0}, {"\xe2\x82\xac", 3}, {"x\xe2\x82", 1},         /* euro sign */
        {"\xf0", 0}, {"\xf0\x9f\x98", 0}, {"\xf0\x9f\x98\x80", 4}, {"\xe2\x82\xac\xf0\x9f", 3},
        {"\x80", 1}, {"\x80\x80\x80\x80", 4}, {"\xff", 1}, {"a\xc3\xa9\xa9", 4}, {"\xf8\x80", 2}, /* not UTF-8 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        assert_int_equal(utf8_complete(cases[i].text, strlen(cases[i].text)), cases[i].complete);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(sampler_subtracts_the_maximum),
    cmocka_unit_test(sampler_at_temperature_zero_is_argmax),
    cmocka_unit_test(sampler_walks_the_cumulative_distribution),
    cmocka_unit_test(sampler_draws_the_right_frequencies),
    cmocka_unit_test(sampler_takes_the_top_k),
    cmocka_unit_test(sampler_gives_ties_to_the_lowest),
    cmocka_unit_test(sampler_stays_in_range_on_bad_logits),
    cmocka_unit_test(generation_crosses_the_context_limit),
    cmocka_unit_test(generation_depends_on_seed_and_prompt_only),
    cmocka_unit_test(generation_stops_where_it_is_told),
    cmocka_unit_test(generation_refuses_logits_that_are_none),
    cmocka_unit_test(unfinished_characters_are_held_back),
};

CHECK_MAIN(tests)
