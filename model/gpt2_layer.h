/* One transformer block, shared by training (gpt2.c) and generation (gpt2_cache.c). Private to model/. */
#ifndef MODEL_GPT2_LAYER_H
#define MODEL_GPT2_LAYER_H

#include "model/gpt2.h"

/* Hands out slices of one block of memory. With base NULL it only adds sizes up, so the pass that sizes and the pass
 * that carves are the same code. */
typedef struct Arena {
    char *base;
    size_t bytes;
} Arena;

void *arena_take(Arena *arena, size_t count, size_t size);

enum { LAYER_GRADIENTS = 5 };

/* The gradients of a layer, by number, in the order in which forward needs their parameters; backward finishes them in
 * the opposite one. */
typedef union LayerGradients {
    struct {
        int vectors; /* the group of 1-D tensors */
        int qkvw, attprojw, fcw, fcprojw;
    };
    int all[LAYER_GRADIENTS];
} LayerGradients;

/* Where a layer's tensors begin in the flat arrays, of parameters and of gradients alike. */
typedef struct LayerOffsets {
    int64_t ln1w, ln1b, qkvw, qkvb, attprojw, attprojb, ln2w, ln2b, fcw, fcb, fcprojw, fcprojb;
    LayerGradients gradients;
} LayerOffsets;

LayerOffsets gpt2_layer_offsets(const ParamTable *table, int layer);

/* What a layer's forward leaves for its backward; `rows` positions. What is computed again lies in the same place for
 * all layers, and with RECOMPUTE_NORMS for both LayerNorms. */
typedef struct LayerActs {
    Act *ln1;               /* [rows][C] */
    float *mean1, *rstd1;   /* [rows] */
    Act *qkv;               /* [rows][3C] */
    Act *att;               /* [rows][C] attention's output, heads side by side */
    float *lse;             /* [B][NH][T] */
    Act *mid;               /* [rows][C] residual stream between attention and MLP */
    Act *ln2;               /* [rows][C] */
    float *mean2, *rstd2;   /* [rows] */
    Act *fc, *act;          /* [rows][4C] before and after GELU */
} LayerActs;

/* first: the layer whose places are shared; NULL for that layer itself. */
LayerActs gpt2_layer_acts(Arena *arena, const Gpt2Config *config, const Ops *ops, size_t rows, int recompute,
                          const LayerActs *first);

/* How a layer is run. */
typedef struct LayerRun {
    const Ops *ops;
    OpsContext *context;
    const float *params;
    int B, T, C, NH;
    Act *cache;   /* NULL: plain causal attention. Else keys and values of this layer, [maxT][2C], and B = 1 */
    int first;    /* with cache: position of the first of the T tokens */
    bool gelu_apart; /* as backward will compute it again */
    NeedFn *need; /* called before parameters are read; NULL: nobody is asked */
    void *user;
} LayerRun;

/* out [B*T][C] = the block's output for in [B*T][C]; fills acts. out and in may be the same. */
void gpt2_layer_forward(const LayerRun *run, const LayerOffsets *at, const LayerActs *acts, const Act *in, Act *out);

#endif
