/* The model behind gpt2.h, shared by its forward (gpt2.c) and backward (gpt2_backward.c). Private to model/. */
#ifndef MODEL_GPT2_MODEL_H
#define MODEL_GPT2_MODEL_H

#include "model/gpt2.h"
#include "model/gpt2_layer.h"

/* Where the lookup's gradient goes; see gpt2_set_lookup. */
typedef struct Lookup {
    float *rows; /* NULL: to wte's gradient */
    int slots;
    const int *slot_of_token;
} Lookup;

struct Gpt2 {
    /* set once */
    Gpt2Config config;
    Gpt2Options options;
    const Ops *ops;
    OpsContext context;
    const Allocator *memory;
    const float *params; /* borrowed */
    float *grads;        /* borrowed; NULL when not training */
    int64_t wte, wpe, lnfw, lnfb;
    int wte_gradient, wpe_gradient, lnf_gradient; /* by number */
    LayerOffsets *offsets; /* [L] */
    int *host_slots;       /* [rows] */
    void *block;           /* all that follows lies in it */

    /* rows = max_B * max_T */
    int *tokens, *targets;     /* [rows] */
    int *slots;                /* [rows], of the tokens; only when training */
    LayerActs *acts;           /* [L], all the same when only one layer's are kept */
    Act **stream;              /* [L+1]: residual stream before each layer and after the last, [rows][C]; one and the
                                * same when not training */
    Act *lnf;                   /* [rows][C]: final LayerNorm */
    float *meanf, *rstdf;       /* [rows] */
    float *losses;             /* [rows] */
    Act *logits;               /* [head_rows][Vp] */
    int head_rows;             /* positions per chunk of the head */
    Act *dstream, *dnarrow;  /* [rows][C]: gradient of the residual stream; of a LayerNorm's output or attention's */
    Act *dwide;              /* [rows][4C]: gradient of fc or qkv */

    /* set by gpt2_on_need */
    NeedFn *need; /* may be NULL */
    void *need_user;

    /* set by gpt2_set_lookup */
    Lookup lookup;

    /* of the last forward */
    int B, T;
    const int *host_tokens; /* [B*T], borrowed; read again only with a lookup */
};

/* Whether all are tokens of the model: a device would read beyond its arrays, and tell late. NULL: there are none,
 * as for a replay. */
bool gpt2_model_knows(const Gpt2 *model, const int *tokens, int count);

/* Ops' begin, for the layer that context.layer names; a device without it is told nothing. */
bool gpt2_model_begin(Gpt2 *model, bool backward, bool accumulate);
void gpt2_model_end(Gpt2 *model);

/* Runs layer `layer`'s forward from model->stream[layer] into `out`: for the first time, and its parameters are asked
 * for, or again. */
void gpt2_model_layer(Gpt2 *model, int layer, Act *out, bool again);

#endif
