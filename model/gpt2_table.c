/* What can be said of a GPT-2 from its sizes alone: checks, the parameter table, counts, the initial values. */
#include "base/random.h"
#include "model/gpt2.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum { SIZE_MAX_EACH = 1 << 24, VOCAB_MULTIPLE = 128 };

int gpt2_pad_vocab(int vocab) { return (vocab + VOCAB_MULTIPLE - 1) / VOCAB_MULTIPLE * VOCAB_MULTIPLE; }

static Status check_size(const char *where, const char *name, int value) {
    if (value < 1 || value > SIZE_MAX_EACH)
        return bad_input("%s: %s: expected an integer in [1, %d], found %d", where, name, SIZE_MAX_EACH, value);
    return OK;
}

/* Exact below 2^53, and absurd sizes do not overflow it. */
static double count_params(const Gpt2Config *config) {
    double C = config->channels, layer = 12 * C * C + 13 * C;
    return ((double)config->vocab + config->context) * C + config->layers * layer + 2 * C;
}

Status gpt2_check(const Gpt2Config *config, const char *where) {
    TRY(check_size(where, "layers", config->layers));
    TRY(check_size(where, "heads", config->heads));
    TRY(check_size(where, "channels", config->channels));
    TRY(check_size(where, "context", config->context));
    TRY(check_size(where, "vocab", config->vocab));
    TRY(check_size(where, "padded vocab", config->vocab_padded));
    if (config->channels % config->heads != 0)
        return bad_input("%s: heads must divide channels, found %d heads and %d channels", where, config->heads,
                         config->channels);
    if (config->vocab_padded < config->vocab)
        return bad_input("%s: the padded vocabulary must hold the vocabulary, found %d padded and %d", where,
                         config->vocab_padded, config->vocab);
    if (count_params(config) > 1e12)
        return bad_input("%s: these sizes make a model of %.3g parameters, more than 1e12", where,
                         count_params(config));
    return OK;
}

int64_t gpt2_param_count(const Gpt2Config *config) { return (int64_t)count_params(config); }

double gpt2_flops_per_token(const Gpt2Config *config, int T) {
    double attention = 6.0 * config->layers * (double)T * config->channels;
    return 6.0 * (double)gpt2_param_count(config) + attention;
}

void gpt2_param_table(const Gpt2Config *config, bool split_embedding, ParamTable *table) {
    int64_t C = config->channels;
    *table = (ParamTable){0};
    if (split_embedding)
        param_add(table, "wte", -1, config->vocab_padded, C);
    param_add(table, "lnfw", -1, 1, C);
    param_add(table, "lnfb", -1, 1, C);
    for (int layer = config->layers - 1; layer >= 0; layer--) {
        param_add(table, "fcprojw", layer, C, 4 * C);
        param_add(table, "fcw", layer, 4 * C, C);
        param_add(table, "attprojw", layer, C, C);
        param_add(table, "qkvw", layer, 3 * C, C);
        param_add(table, "fcprojb", layer, 1, C);
        param_add(table, "fcb", layer, 1, 4 * C);
        param_add(table, "ln2w", layer, 1, C);
        param_add(table, "ln2b", layer, 1, C);
        param_add(table, "attprojb", layer, 1, C);
        param_add(table, "qkvb", layer, 1, 3 * C);
        param_add(table, "ln1w", layer, 1, C);
        param_add(table, "ln1b", layer, 1, C);
    }
    param_add(table, "wpe", -1, config->context, C);
    if (!split_embedding)
        param_add(table, "wte", -1, config->vocab_padded, C);
}

/* Tensor kinds in the order of llm.c's files, which numbers the random streams: kind * L + layer. */
static const char *const kinds[] = {"wte",  "wpe",  "ln1w", "ln1b",    "qkvw",    "qkvb", "attprojw", "attprojb",
                                    "ln2w", "ln2b", "fcw",  "fcb",     "fcprojw", "fcprojb", "lnfw",   "lnfb"};

static uint64_t stream_of(const Param *param, int layers) {
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        if (strcmp(param->name, kinds[kind]) == 0)
            return kind * (uint64_t)layers + (uint64_t)(param->layer < 0 ? 0 : param->layer);
    assert(!"a tensor of GPT-2");
    return 0;
}

static void fill(float *out, int64_t count, float value) {
    for (int64_t i = 0; i < count; i++)
        out[i] = value;
}

static char last_of(const char *text) { return text[strlen(text) - 1]; }

static void init_tensor(const Gpt2Config *config, const Param *param, uint64_t seed, float *out) {
    bool bias = last_of(param->name) == 'b', gain = !bias && strncmp(param->name, "ln", 2) == 0;
    if (bias || gain) {
        fill(out, param->elems, gain ? 1.0f : 0.0f);
        return;
    }
    bool projection = strstr(param->name, "proj") != NULL, embedding = strcmp(param->name, "wte") == 0;
    double deviation = 0.02 * (projection ? 1.0 / sqrt(2.0 * config->layers) : 1.0);
    uint64_t stream = stream_of(param, config->layers);
    int64_t drawn = embedding ? (int64_t)config->vocab * param->cols : param->elems;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < drawn; i++)
        out[i] = (float)(deviation * random_normal(seed, stream, (uint64_t)i));
    fill(out + drawn, param->elems - drawn, 0.0f);
}

void gpt2_init_random(const Gpt2Config *config, const ParamTable *table, uint64_t seed, float *params) {
    for (int i = 0; i < table->param_count; i++)
        init_tensor(config, &table->params[i], seed, params + table->params[i].offset);
}
