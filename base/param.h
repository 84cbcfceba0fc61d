/* Parameter and gradient tables: all that the model and gradient synchronisation know of each other.
 *
 * Every parameter tensor is a slice of ONE flat f32 array, and its gradient the same slice of a second one. Tensors
 * stand in the order in which backward finishes their gradients (last layer first), and a layer's 1-D tensors
 * (biases, LayerNorm gains) stand side by side behind its matrices, so that a bucket of whole layers is one slice:
 *
 *     offset 0                                                                             elems
 *     | lnf 1-D | layer L-1: fcproj fc attproj qkv, 1-D ... | ... | layer 0 ... | wpe | wte |
 *       first final gradient                                                    last one
 *
 * wte may also stand first (model/gpt2.h, gpt2_param_table); nothing else here depends on the order.
 * Optimizers and collectives work on the flat arrays; only the model and checkpoints look at single tensors. */
#ifndef BASE_PARAM_H
#define BASE_PARAM_H

#include <stdbool.h>
#include <stdint.h>

typedef struct Param {
    char name[16];  /* llm.c's name of the tensor kind, e.g. "qkvw"; see model/gpt2.h */
    int layer;      /* 0..L-1, or -1 for tensors outside the layers */
    int64_t rows;   /* f32[rows][cols], row-major; rows = 1 for 1-D tensors. Weights are [out][in] */
    int64_t cols;
    int64_t offset; /* of the first element in the flat arrays */
    int64_t elems;  /* rows * cols */
    bool decay;     /* weight decay applies: 2-D tensors only */
} Param;

/* What becomes final at once during backward and is announced once per backward: one matrix, or a layer's group of
 * 1-D tensors. Gradients are numbered in the order of their offsets, without gaps. */
typedef struct Gradient {
    int64_t offset;
    int64_t elems;
    int layer;  /* as in Param */
    bool dense; /* a group of 1-D tensors, which compressors leave alone */
} Gradient;

typedef struct ParamTable {
    Param *params; /* owned */
    int param_count;
    Gradient *gradients; /* owned */
    int gradient_count;
    int64_t elems; /* length of the flat arrays */
} ParamTable;

/* Elements start .. start + elems - 1 of the flat arrays. */
typedef struct Slice {
    int64_t start;
    int64_t elems;
} Slice;

/* What one rank owns of the flat arrays. */
typedef struct Shard {
    const Slice *slices; /* borrowed; in rising order, disjoint, some may be empty */
    int count;
} Shard;

int64_t shard_elems(const Shard *shard);

/* The tensor of that kind and layer, or NULL. */
const Param *param_find(const ParamTable *table, const char *name, int layer);

/* Appends a tensor behind the last one. It joins the last gradient if both are 1-D and of the same layer, and starts a
 * new gradient otherwise. `decay` is set for rows > 1. */
void param_add(ParamTable *table, const char *name, int layer, int64_t rows, int64_t cols);

/* The gradient that the tensor belongs to. */
int param_gradient(const ParamTable *table, const Param *param);

void param_table_free(ParamTable *table);

/* Backward's announcement that gradients[gradient] is final. May come from any thread. */
typedef void ReadyFn(void *user, int gradient);

/* Forward's announcement that it is about to read the parameters of gradients[gradient]: they must be there when the
 * function returns. */
typedef void NeedFn(void *user, int gradient);

#endif
