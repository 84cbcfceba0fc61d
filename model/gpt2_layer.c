#include "model/gpt2_layer.h"

#include <assert.h>

enum { ALIGN = 64 };

void *arena_take(Arena *arena, size_t count, size_t size) {
    void *slice = arena->base ? arena->base + arena->bytes : NULL;
    arena->bytes += (count * size + ALIGN - 1) / ALIGN * ALIGN;
    return slice;
}

static int gradient_of(const ParamTable *table, const char *name, int layer) {
    return param_gradient(table, param_find(table, name, layer));
}

static int64_t offset_of(const ParamTable *table, const char *name, int layer) {
    const Param *param = param_find(table, name, layer);
    assert(param);
    return param->offset;
}

LayerOffsets gpt2_layer_offsets(const ParamTable *table, int layer) {
    return (LayerOffsets){
        .ln1w = offset_of(table, "ln1w", layer),
        .ln1b = offset_of(table, "ln1b", layer),
        .qkvw = offset_of(table, "qkvw", layer),
        .qkvb = offset_of(table, "qkvb", layer),
        .attprojw = offset_of(table, "attprojw", layer),
        .attprojb = offset_of(table, "attprojb", layer),
        .ln2w = offset_of(table, "ln2w", layer),
        .ln2b = offset_of(table, "ln2b", layer),
        .fcw = offset_of(table, "fcw", layer),
        .fcb = offset_of(table, "fcb", layer),
        .fcprojw = offset_of(table, "fcprojw", layer),
        .fcprojb = offset_of(table, "fcprojb", layer),
        .gradients = {.vectors = gradient_of(table, "ln1w", layer),
                      .qkvw = gradient_of(table, "qkvw", layer),
                      .attprojw = gradient_of(table, "attprojw", layer),
                      .fcw = gradient_of(table, "fcw", layer),
                      .fcprojw = gradient_of(table, "fcprojw", layer)},
    };
}

LayerActs gpt2_layer_acts(Arena *arena, const Gpt2Config *config, const Ops *ops, size_t rows, int recompute,
                          const LayerActs *first) {
    size_t C = (size_t)config->channels;
    bool norms = recompute == RECOMPUTE_NORMS, gelu = norms || recompute == RECOMPUTE_GELU;
    LayerActs acts;
    acts.ln1 = norms && first ? first->ln1 : arena_take(arena, rows * C, ops->act_bytes);
    acts.mean1 = arena_take(arena, rows, sizeof(float));
    acts.rstd1 = arena_take(arena, rows, sizeof(float));
    acts.qkv = arena_take(arena, rows * 3 * C, ops->act_bytes);
    acts.att = arena_take(arena, rows * C, ops->act_bytes);
    acts.lse = arena_take(arena, rows * (size_t)config->heads, sizeof(float));
    acts.mid = arena_take(arena, rows * C, ops->act_bytes);
    acts.ln2 = norms ? acts.ln1 : arena_take(arena, rows * C, ops->act_bytes);
    acts.mean2 = arena_take(arena, rows, sizeof(float));
    acts.rstd2 = arena_take(arena, rows, sizeof(float));
    acts.fc = arena_take(arena, rows * 4 * C, ops->act_bytes);
    acts.act = gelu && first ? first->act : arena_take(arena, rows * 4 * C, ops->act_bytes);
    return acts;
}

static void attention(const LayerRun *run, const LayerActs *acts) {
    if (run->cache)
        run->ops->attention_cached(run->context, acts->att, run->cache, acts->qkv, run->first, run->T, run->C, run->NH);
    else
        run->ops->attention_forward(run->context, acts->att, acts->lse, acts->qkv, run->B, run->T, run->C, run->NH);
}

static void ask(const LayerRun *run, int gradient) {
    if (run->need)
        run->need(run->user, gradient);
}

void gpt2_layer_forward(const LayerRun *run, const LayerOffsets *at, const LayerActs *acts, const Act *in, Act *out) {
    const Ops *ops = run->ops;
    OpsContext *context = run->context;
    const LayerGradients *gradients = &at->gradients;
    const float *p = run->params;
    int rows = run->B * run->T, C = run->C;
    ask(run, gradients->vectors);
    ops->layernorm_forward(context, acts->ln1, acts->mean1, acts->rstd1, in, p + at->ln1w, p + at->ln1b, rows, C);
    ask(run, gradients->qkvw);
    ops->linear_forward(context, acts->qkv, NULL, acts->ln1, p + at->qkvw, p + at->qkvb, NULL, rows, C, 3 * C);
    attention(run, acts);
    ask(run, gradients->attprojw);
    ops->linear_forward(context, acts->mid, NULL, acts->att, p + at->attprojw, p + at->attprojb, in, rows, C, C);
    ops->layernorm_forward(context, acts->ln2, acts->mean2, acts->rstd2, acts->mid, p + at->ln2w, p + at->ln2b, rows,
                           C);
    ask(run, gradients->fcw);
    ops->linear_forward(context, acts->fc, run->gelu_apart ? NULL : acts->act, acts->ln2, p + at->fcw, p + at->fcb,
                        NULL, rows, C, 4 * C);
    if (run->gelu_apart)
        ops->gelu_forward(context, acts->act, acts->fc, rows, 4 * C);
    ask(run, gradients->fcprojw);
    ops->linear_forward(context, out, NULL, acts->act, p + at->fcprojw, p + at->fcprojb, acts->mid, rows, 4 * C, C);
}
