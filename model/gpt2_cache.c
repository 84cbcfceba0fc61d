/* Generation: the same layers, a few positions at a time, with the keys and values of earlier ones kept, 2 C floats per
 * layer and position. Per token the weights are read once; attention costs the positions so far. */
#include "model/gpt2_layer.h"

#include <assert.h>
#include <stdlib.h>

struct Gpt2Cache {
    Gpt2Config config;
    const Ops *ops;
    OpsContext context;
    const Allocator *memory;
    const float *params; /* borrowed */
    int64_t wte, wpe, lnfw, lnfb;
    LayerOffsets *offsets; /* [L] */
    void *block;           /* all that follows lies in it */
    Act *keys_values;      /* [L][maxT][2C] */
    int *tokens;           /* [maxT] */
    Act *stream;           /* [maxT][C] */
    LayerActs acts;
    Act *logits;        /* [V] on the device */
    float *host_logits; /* [V], what the caller sees */
    int length;
};

static void carve(Gpt2Cache *cache, Arena *arena) {
    size_t maxT = (size_t)cache->config.context, C = (size_t)cache->config.channels, act_bytes = cache->ops->act_bytes;
    cache->keys_values = arena_take(arena, (size_t)cache->config.layers * maxT * 2 * C, act_bytes);
    cache->tokens = arena_take(arena, maxT, sizeof(int));
    cache->stream = arena_take(arena, maxT * C, act_bytes);
    cache->acts = gpt2_layer_acts(arena, &cache->config, cache->ops, maxT, RECOMPUTE_NO, NULL);
    cache->logits = arena_take(arena, (size_t)cache->config.vocab, act_bytes);
    cache->context.scratch = arena_take(arena, cache->context.scratch_bytes, 1);
}

static void find_tensors(Gpt2Cache *cache, const ParamTable *table) {
    cache->wte = param_find(table, "wte", -1)->offset;
    cache->wpe = param_find(table, "wpe", -1)->offset;
    cache->lnfw = param_find(table, "lnfw", -1)->offset;
    cache->lnfb = param_find(table, "lnfb", -1)->offset;
    for (int layer = 0; layer < cache->config.layers; layer++)
        cache->offsets[layer] = gpt2_layer_offsets(table, layer);
}

static bool make(Gpt2Cache *cache, const Gpt2Config *config, const Ops *ops, const Allocator *memory, size_t *bytes) {
    cache->config = *config;
    cache->ops = ops;
    cache->memory = memory;
    cache->offsets = calloc((size_t)config->layers, sizeof *cache->offsets);
    cache->host_logits = calloc((size_t)config->vocab, sizeof *cache->host_logits);
    OpsLimits limits = {.rows = config->context, .T = config->context, .C = config->channels, .NH = config->heads};
    cache->context.state = ops->state;
    ops->prepare(&cache->context, &limits);
    Arena arena = {0};
    carve(cache, &arena);
    *bytes = arena.bytes;
    cache->block = memory_alloc(memory, arena.bytes);
    return cache->offsets && cache->host_logits && cache->block;
}

Status gpt2_cache_create(Gpt2Cache **out, const Gpt2Config *config, const ParamTable *table, const float *params,
                         const Ops *ops, const Allocator *memory) {
    *out = NULL;
    TRY(ops->available());
    Gpt2Cache *cache = *out = calloc(1, sizeof *cache);
    size_t bytes = 0;
    if (!cache || !make(cache, config, ops, memory, &bytes)) {
        gpt2_cache_destroy(cache);
        *out = NULL;
        return fault("model: no memory for a cache of %zu bytes", bytes);
    }
    Arena arena = {.base = cache->block};
    carve(cache, &arena);
    assert(arena.bytes == bytes);
    find_tensors(cache, table);
    cache->params = params;
    return OK;
}

void gpt2_cache_destroy(Gpt2Cache *cache) {
    if (!cache)
        return;
    if (cache->block)
        memory_free(cache->memory, cache->block);
    free(cache->offsets);
    free(cache->host_logits);
    free(cache);
}

void gpt2_cache_clear(Gpt2Cache *cache) { cache->length = 0; }

int gpt2_cache_length(const Gpt2Cache *cache) { return cache->length; }

static void forward(Gpt2Cache *cache, int count) {
    size_t C = (size_t)cache->config.channels, maxT = (size_t)cache->config.context;
    const float *params = cache->params;
    cache->ops->embedding_forward(&cache->context, cache->stream, cache->tokens, params + cache->wte,
                                  params + cache->wpe + (size_t)cache->length * C, 1, count, (int)C);
    for (int layer = 0; layer < cache->config.layers; layer++) {
        LayerRun run = {.ops = cache->ops,
                        .context = &cache->context,
                        .params = params,
                        .B = 1,
                        .T = count,
                        .C = (int)C,
                        .NH = cache->config.heads,
                        .cache = act_at(cache->ops, cache->keys_values, (size_t)layer * maxT * 2 * C),
                        .first = cache->length};
        gpt2_layer_forward(&run, &cache->offsets[layer], &cache->acts, cache->stream, cache->stream);
    }
}

const float *gpt2_cache_append(Gpt2Cache *cache, const int *tokens, int count) {
    assert(count >= 1 && cache->length + count <= cache->config.context);
    const Ops *ops = cache->ops;
    int C = cache->config.channels, V = cache->config.vocab;
    ops->upload(&cache->context, cache->tokens, tokens, (size_t)count * sizeof *tokens);
    forward(cache, count);
    cache->length += count;
    const Act *last = act_at(ops, cache->stream, (size_t)(count - 1) * (size_t)C);
    ops->layernorm_forward(&cache->context, cache->acts.ln1, cache->acts.mean1, cache->acts.rstd1, last,
                           cache->params + cache->lnfw, cache->params + cache->lnfb, 1, C);
    ops->linear_forward(&cache->context, cache->logits, NULL, cache->acts.ln1, cache->params + cache->wte, NULL, NULL,
                        1, C, V);
    ops->read(&cache->context, cache->host_logits, cache->logits, (size_t)V);
    return cache->host_logits;
}
