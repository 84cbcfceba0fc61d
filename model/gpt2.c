/* GPT-2's forward pass, the loss, and the memory of both passes.
 *
 * Per position and layer backward needs 16 C floats (ln1 C, qkv 3C, att C, mid C, ln2 C, fc 4C, act 4C, and the
 * layer's input C). What is computed again (Recompute) has one place for all layers instead. The head is never run
 * over more positions at once than the device asks for (ops->head_logits): a chunk's gradient replaces its logits. */
#include "model/gpt2_model.h"

#include "base/gpu_range.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD_ROWS_MIN = 64, HEAD_ROWS_STEP = 64 };

static int head_rows_of(const Gpt2Config *config, const Ops *ops, size_t rows) {
    size_t fit = ops->head_logits / (size_t)config->vocab_padded / HEAD_ROWS_STEP * HEAD_ROWS_STEP;
    assert(ops->head_logits > 0);
    fit = fit < HEAD_ROWS_MIN ? HEAD_ROWS_MIN : fit;
    return (int)(fit < rows ? fit : rows);
}

static OpsLimits limits_of(const Gpt2Config *config, const Gpt2Options *options) {
    return (OpsLimits){
        .rows = options->max_B * options->max_T, .T = options->max_T, .C = config->channels, .NH = config->heads};
}

static void carve_activations(Gpt2 *model, Arena *arena, size_t rows, size_t C) {
    const Ops *ops = model->ops;
    int L = model->config.layers;
    int recompute = model->options.recompute;
    bool keep_stream = model->options.train, keep_acts = keep_stream && recompute != RECOMPUTE_LAYERS;
    model->acts[0] = gpt2_layer_acts(arena, &model->config, ops, rows, recompute, NULL);
    for (int layer = 1; layer < L; layer++)
        model->acts[layer] = keep_acts
                                 ? gpt2_layer_acts(arena, &model->config, ops, rows, recompute, &model->acts[0])
                                 : model->acts[0];
    for (int layer = 0; layer <= L; layer++)
        model->stream[layer] =
            layer == 0 || keep_stream ? arena_take(arena, rows * C, ops->act_bytes) : model->stream[0];
    model->lnf = arena_take(arena, rows * C, ops->act_bytes);
    model->meanf = arena_take(arena, rows, sizeof(float));
    model->rstdf = arena_take(arena, rows, sizeof(float));
}

/* Everything that the model owns on its device: sizes it when arena->base is NULL, else hands it out. */
static void carve(Gpt2 *model, Arena *arena) {
    size_t rows = (size_t)model->options.max_B * (size_t)model->options.max_T, C = (size_t)model->config.channels;
    size_t act_bytes = model->ops->act_bytes;
    model->tokens = arena_take(arena, rows, sizeof(int));
    model->targets = arena_take(arena, rows, sizeof(int));
    carve_activations(model, arena, rows, C);
    model->losses = arena_take(arena, rows, sizeof(float));
    model->head_rows = head_rows_of(&model->config, model->ops, rows);
    model->logits = arena_take(arena, (size_t)model->head_rows * (size_t)model->config.vocab_padded, act_bytes);
    if (model->options.train) {
        model->slots = arena_take(arena, rows, sizeof(int));
        model->dstream = arena_take(arena, rows * C, act_bytes);
        model->dnarrow = arena_take(arena, rows * C, act_bytes);
        model->dwide = arena_take(arena, rows * 4 * C, act_bytes);
    }
    model->context.scratch = arena_take(arena, model->context.scratch_bytes, 1);
}

static void free_tables(Gpt2 *model) {
    free(model->offsets);
    free(model->host_slots);
    free(model->acts);
    free(model->stream);
}

/* The small host-side arrays, and the sizes; false when there is no memory for them. */
static bool make_tables(Gpt2 *model, const Gpt2Config *config, const Gpt2Options *options, const Ops *ops) {
    size_t L = (size_t)config->layers, rows = (size_t)options->max_B * (size_t)options->max_T;
    model->config = *config;
    model->options = *options;
    model->ops = ops;
    model->offsets = calloc(L, sizeof *model->offsets);
    model->host_slots = calloc(rows, sizeof *model->host_slots);
    model->acts = calloc(L, sizeof *model->acts);
    model->stream = calloc(L + 1, sizeof *model->stream);
    OpsLimits limits = limits_of(config, options);
    model->context.state = ops->state;
    ops->prepare(&model->context, &limits);
    return model->offsets && model->host_slots && model->acts && model->stream;
}

size_t gpt2_activation_bytes(const Gpt2Config *config, const Gpt2Options *options, const Ops *ops) {
    Gpt2 model = {0};
    Arena arena = {0};
    if (make_tables(&model, config, options, ops))
        carve(&model, &arena);
    free_tables(&model);
    return arena.bytes;
}

static void find_tensors(Gpt2 *model, const ParamTable *table) {
    const Param *wte = param_find(table, "wte", -1), *wpe = param_find(table, "wpe", -1);
    const Param *lnfw = param_find(table, "lnfw", -1), *lnfb = param_find(table, "lnfb", -1);
    model->wte = wte->offset;
    model->wpe = wpe->offset;
    model->lnfw = lnfw->offset;
    model->lnfb = lnfb->offset;
    model->wte_gradient = param_gradient(table, wte);
    model->wpe_gradient = param_gradient(table, wpe);
    model->lnf_gradient = param_gradient(table, lnfw);
    for (int layer = 0; layer < model->config.layers; layer++)
        model->offsets[layer] = gpt2_layer_offsets(table, layer);
}

Status gpt2_create(Gpt2 **out, const Gpt2Config *config, const ParamTable *table, float *params, float *grads,
                   const Gpt2Options *options, const Ops *ops, const Allocator *memory) {
    assert(grads || !options->train);
    *out = NULL;
    TRY(ops->available());
    Gpt2 *model = *out = calloc(1, sizeof *model);
    Arena arena = {0};
    if (model && make_tables(model, config, options, ops)) {
        carve(model, &arena);
        model->memory = memory;
        model->block = memory_alloc(memory, arena.bytes);
    }
    if (!model || !model->block) {
        gpt2_destroy(model);
        *out = NULL;
        return fault("out of memory: activations take %.2f GB", 1e-9 * (double)arena.bytes);
    }
    size_t bytes = arena.bytes;
    arena = (Arena){.base = model->block};
    carve(model, &arena);
    assert(arena.bytes == bytes);
    (void)bytes;
    find_tensors(model, table);
    model->params = params;
    model->grads = grads;
    return OK;
}

void gpt2_destroy(Gpt2 *model) {
    if (!model)
        return;
    if (model->block)
        memory_free(model->memory, model->block);
    free_tables(model);
    free(model);
}

void gpt2_on_need(Gpt2 *model, NeedFn *need, void *user) {
    model->need = need;
    model->need_user = user;
}

void gpt2_set_lookup(Gpt2 *model, float *rows, int slots, const int *slot_of_token) {
    model->lookup = (Lookup){.rows = rows, .slots = slots, .slot_of_token = slot_of_token};
}

static void ask(Gpt2 *model, int gradient) {
    if (model->need)
        model->need(model->need_user, gradient);
}

void gpt2_model_layer(Gpt2 *model, int layer, Act *out, bool again) {
    int recompute = model->options.recompute;
    LayerRun run = {.ops = model->ops,
                    .context = &model->context,
                    .params = model->params,
                    .B = model->B,
                    .T = model->T,
                    .C = model->config.channels,
                    .NH = model->config.heads,
                    .gelu_apart = recompute == RECOMPUTE_GELU || recompute == RECOMPUTE_NORMS,
                    .need = again || model->ops->begin ? NULL : model->need,
                    .user = model->need_user};
    model->context.layer = layer;
    gpu_range_begin(again ? "recompute layer" : "forward layer", layer);
    gpt2_layer_forward(&run, &model->offsets[layer], &model->acts[layer], model->stream[layer], out);
    gpu_range_end();
}

bool gpt2_model_begin(Gpt2 *model, bool backward, bool accumulate) {
    LayerPass pass = {.backward = backward, .accumulate = accumulate, .B = model->B, .T = model->T};
    return !model->ops->begin || model->ops->begin(&model->context, &pass);
}

void gpt2_model_end(Gpt2 *model) {
    if (model->ops->end)
        model->ops->end(&model->context);
}

/* Where the device does all of it at once, all of its parameters are asked for before. */
static void forward_layer(Gpt2 *model, int layer) {
    model->context.layer = layer;
    for (int i = 0; i < LAYER_GRADIENTS && model->ops->begin; i++)
        ask(model, model->offsets[layer].gradients.all[i]);
    if (!gpt2_model_begin(model, false, false))
        return;
    gpt2_model_layer(model, layer, model->stream[layer + 1], false);
    gpt2_model_end(model);
}

bool gpt2_model_knows(const Gpt2 *model, const int *tokens, int count) {
    for (int i = 0; tokens && i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= model->config.vocab)
            return false;
    return true;
}

void gpt2_forward(Gpt2 *model, const int *tokens, int B, int T) {
    assert(gpt2_model_knows(model, tokens, B * T));
    assert(B >= 1 && B <= model->options.max_B && T >= 1 && T <= model->options.max_T && T <= model->config.context);
    const Ops *ops = model->ops;
    OpsContext *context = &model->context;
    const float *params = model->params;
    int C = model->config.channels, L = model->config.layers;
    model->B = B;
    model->T = T;
    model->host_tokens = tokens;
    ops->upload(context, model->tokens, tokens, (size_t)B * (size_t)T * sizeof *tokens);
    context->layer = -1;
    ask(model, model->wte_gradient);
    ask(model, model->wpe_gradient);
    ops->embedding_forward(context, model->stream[0], model->tokens, params + model->wte, params + model->wpe, B, T, C);
    for (int layer = 0; layer < L; layer++)
        forward_layer(model, layer);
    context->layer = -1;
    ask(model, model->lnf_gradient);
    ops->layernorm_forward(context, model->lnf, model->meanf, model->rstdf, model->stream[L], params + model->lnfw,
                           params + model->lnfb, B * T, C);
}

double gpt2_loss(Gpt2 *model, const int *targets) {
    int rows = model->B * model->T, C = model->config.channels;
    assert(rows > 0 && gpt2_model_knows(model, targets, rows));
    model->ops->upload(&model->context, model->targets, targets, (size_t)rows * sizeof *targets);
    for (int first = 0; first < rows; first += model->head_rows) {
        int count = rows - first < model->head_rows ? rows - first : model->head_rows;
        model->ops->head_loss(&model->context, model->losses + first, model->logits,
                              act_at(model->ops, model->lnf, (size_t)first * (size_t)C), model->params + model->wte,
                              model->targets + first, count, C, model->config.vocab, model->config.vocab_padded);
    }
    return model->ops->mean(&model->context, model->losses, rows);
}

void gpt2_logits(Gpt2 *model, int first, int count, float *logits) {
    assert(first >= 0 && count >= 0 && first + count <= model->B * model->T);
    size_t C = (size_t)model->config.channels, V = (size_t)model->config.vocab;
    for (int done = 0; done < count; done += model->head_rows) {
        int rows = count - done < model->head_rows ? count - done : model->head_rows;
        const Act *x = act_at(model->ops, model->lnf, (size_t)(first + done) * C);
        model->ops->linear_forward(&model->context, model->logits, NULL, x, model->params + model->wte, NULL, NULL,
                                   rows, (int)C, (int)V);
        model->ops->read(&model->context, logits + (size_t)done * V, model->logits, (size_t)rows * V);
    }
}
