/* GPT-2's backward pass. The gradient of the residual stream lives in dstream and is added to in place by each block's
 * branch; what lies inside a branch takes turns in dnarrow and dwide. Gradients are announced when they are final: a
 * layer's matrices as they finish, then its 1-D tensors together; wte behind the head where the lookup's gradient goes
 * elsewhere, else at the very end.
 *
 * The lookup costs B*T + slots rows of C, whatever the vocabulary: its rows are cleared and then added to, position by
 * position, as those of wte would be, with slots in place of tokens. */
#include "model/gpt2_model.h"

#include "base/gpu_range.h"

#include <assert.h>

/* One call of gpt2_backward. */
typedef struct Pass {
    Gpt2 *model;
    const Ops *ops;
    OpsContext *context;
    int rows, C;
    bool accumulate;
    ReadyFn *ready;
    void *user;
} Pass;

static void announce(const Pass *pass, int gradient) {
    if (pass->ready)
        pass->ready(pass->user, gradient);
}

/* dx from dy through a linear layer whose tensors are at `w` and `b`, C_in wide in and C_out wide out. */
static void linear(Pass *pass, Act *dx, const Act *gelu, const Act *dy, const Act *x, int64_t w, int64_t b,
                   int C_in, int C_out) {
    Gpt2 *model = pass->model;
    LinearGrads grads = {.dx = dx,
                         .dw = model->grads + w,
                         .db = model->grads + b,
                         .gelu = gelu,
                         .accumulate = pass->accumulate};
    pass->ops->linear_backward(pass->context, &grads, dy, x, model->params + w, pass->rows, C_in, C_out);
}

static void layernorm(Pass *pass, const Act *dy, const Act *x, const float *mean, const float *rstd, int64_t w,
                      int64_t b, bool residual) {
    Gpt2 *model = pass->model;
    pass->ops->layernorm_backward(pass->context, model->dstream, model->grads + w, model->grads + b, dy, x, mean, rstd,
                                  model->params + w, pass->rows, pass->C, residual, pass->accumulate);
}

/* Head and loss, a chunk of positions at a time, into dnarrow; then the final LayerNorm, into dstream. */
static void backward_head(Pass *pass, float scale) {
    Gpt2 *model = pass->model;
    for (int first = 0; first < pass->rows; first += model->head_rows) {
        int count = pass->rows - first < model->head_rows ? pass->rows - first : model->head_rows;
        size_t at = (size_t)first * (size_t)pass->C;
        pass->ops->head_backward(pass->context, model->losses + first, model->logits,
                                 act_at(pass->ops, model->dnarrow, at), model->grads + model->wte,
                                 act_at(pass->ops, model->lnf, at), model->params + model->wte,
                                 model->targets + first, count, pass->C, model->config.vocab,
                                 model->config.vocab_padded, scale, pass->accumulate || first > 0);
    }
    if (model->lookup.rows)
        announce(pass, model->wte_gradient);
    layernorm(pass, model->dnarrow, model->stream[model->config.layers], model->meanf, model->rstdf, model->lnfw,
              model->lnfb, false);
    announce(pass, model->lnf_gradient);
}

/* A LayerNorm's output again, if it was not kept. */
static void renormalise(const Pass *pass, Act *y, float *mean, float *rstd, const Act *x, int64_t w, int64_t b) {
    const Gpt2 *model = pass->model;
    if (model->options.recompute == RECOMPUTE_NORMS)
        pass->ops->layernorm_forward(pass->context, y, mean, rstd, x, model->params + w, model->params + b, pass->rows,
                                     pass->C);
}

/* The layer's activations again, those that were not kept until here. */
static void recompute(const Pass *pass, int layer) {
    Gpt2 *model = pass->model;
    const LayerActs *acts = &model->acts[layer];
    int level = model->options.recompute;
    bool last = layer == model->config.layers - 1; /* whose forward left all of them */
    if (level == RECOMPUTE_LAYERS && !last)
        gpt2_model_layer(model, layer, model->dwide, true);
    else if ((level == RECOMPUTE_GELU || level == RECOMPUTE_NORMS) && !last)
        pass->ops->gelu_forward(pass->context, acts->act, acts->fc, pass->rows, 4 * pass->C);
}

static void backward_layer(Pass *pass, int layer) {
    Gpt2 *model = pass->model;
    const LayerOffsets *at = &model->offsets[layer];
    const LayerGradients *gradients = &at->gradients;
    const LayerActs *acts = &model->acts[layer];
    Act *dstream = model->dstream, *dnarrow = model->dnarrow, *dwide = model->dwide;
    int C = pass->C;

    recompute(pass, layer);
    linear(pass, dwide, acts->fc, dstream, acts->act, at->fcprojw, at->fcprojb, 4 * C, C);
    announce(pass, gradients->fcprojw);
    renormalise(pass, acts->ln2, acts->mean2, acts->rstd2, acts->mid, at->ln2w, at->ln2b);
    linear(pass, dnarrow, NULL, dwide, acts->ln2, at->fcw, at->fcb, C, 4 * C);
    announce(pass, gradients->fcw);
    layernorm(pass, dnarrow, acts->mid, acts->mean2, acts->rstd2, at->ln2w, at->ln2b, true);

    linear(pass, dnarrow, NULL, dstream, acts->att, at->attprojw, at->attprojb, C, C);
    announce(pass, gradients->attprojw);
    pass->ops->attention_backward(pass->context, dwide, dnarrow, acts->att, acts->qkv, acts->lse, model->B, model->T, C,
                                  model->config.heads);
    renormalise(pass, acts->ln1, acts->mean1, acts->rstd1, model->stream[layer], at->ln1w, at->ln1b);
    linear(pass, dnarrow, NULL, dwide, acts->ln1, at->qkvw, at->qkvb, C, 3 * C);
    announce(pass, gradients->qkvw);
    layernorm(pass, dnarrow, model->stream[layer], acts->mean1, acts->rstd1, at->ln1w, at->ln1b, true);
    announce(pass, gradients->vectors);
}

/* Where the device does all of it at once, its gradients are announced behind it. */
static void run_layer(Pass *pass, int layer) {
    bool at_once = pass->ops->begin != NULL;
    Pass quiet = *pass;
    if (at_once)
        quiet.ready = NULL;
    pass->context->layer = layer;
    if (gpt2_model_begin(pass->model, true, pass->accumulate)) {
        backward_layer(&quiet, layer);
        gpt2_model_end(pass->model);
    }
    for (int i = LAYER_GRADIENTS - 1; i >= 0 && at_once; i--)
        announce(pass, pass->model->offsets[layer].gradients.all[i]);
}

/* The slots of the last forward's tokens, and no gradient of an earlier step in any row. */
static void prepare_lookup(Pass *pass) {
    Gpt2 *model = pass->model;
    const Lookup *lookup = &model->lookup;
    for (int row = 0; row < pass->rows; row++) {
        model->host_slots[row] = lookup->slot_of_token[model->host_tokens[row]];
        assert(model->host_slots[row] >= 0 && model->host_slots[row] < lookup->slots);
    }
    pass->ops->upload(pass->context, model->slots, model->host_slots, (size_t)pass->rows * sizeof *model->host_slots);
    if (!pass->accumulate)
        pass->ops->clear(pass->context, lookup->rows, (size_t)lookup->slots * (size_t)pass->C * sizeof(float));
}

static void backward_embedding(Pass *pass) {
    Gpt2 *model = pass->model;
    bool apart = model->lookup.rows != NULL;
    pass->context->layer = -1;
    if (apart)
        prepare_lookup(pass);
    pass->ops->embedding_backward(pass->context, apart ? model->lookup.rows : model->grads + model->wte,
                                  model->grads + model->wpe, model->dstream, apart ? model->slots : model->tokens,
                                  model->B, model->T, pass->C, model->config.context, pass->accumulate);
    announce(pass, model->wpe_gradient);
    if (!apart)
        announce(pass, model->wte_gradient);
}

double gpt2_backward(Gpt2 *model, const int *targets, float loss_scale, bool accumulate, ReadyFn *ready, void *user) {
    int rows = model->B * model->T, L = model->config.layers;
    assert(rows > 0 && model->options.train && gpt2_model_knows(model, targets, rows));
    Pass pass = {.model = model,
                 .ops = model->ops,
                 .context = &model->context,
                 .rows = rows,
                 .C = model->config.channels,
                 .accumulate = accumulate,
                 .ready = ready,
                 .user = user};
    pass.ops->upload(pass.context, model->targets, targets, (size_t)rows * sizeof *targets);
    gpu_range_begin("backward head", -1);
    backward_head(&pass, loss_scale / (float)rows);
    gpu_range_end();
    for (int layer = L - 1; layer >= 0; layer--) {
        gpu_range_begin("backward layer", layer);
        run_layer(&pass, layer);
        gpu_range_end();
    }
    gpu_range_begin("backward embedding", -1);
    backward_embedding(&pass);
    gpu_range_end();
    return pass.ops->mean(pass.context, model->losses, rows);
}
