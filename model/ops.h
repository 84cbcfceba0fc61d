/* What the model computes, one const table per device. gpt2.c says what happens in which order, a device says how.
 *
 * Arrays are row-major and dense, in the device's memory: f32, and i32 `tokens` and `targets`. Activations, and the
 * gradients that flow back through them, are Act: f32 on most devices, bf16 where the table says so; only operations
 * look into those, everybody else finds places by act_at. rows = B*T positions (or a chunk of them). Weights are
 * [out][in], as in model/gpt2.h.
 *
 *   Time    a device may take operations on and compute them later, in their order. What `read`, `download` and `mean`
 *           bring to the host is computed when they return.
 *   Bits    an operation's result depends on its inputs, its shapes and context->threads, never on timing: partial sums
 *           are taken over fixed parts and added in a fixed order, there are no atomics on floats.
 *   Memory  nothing is allocated by an operation; what it needs beyond its arguments lies in context->scratch.
 *   Errors  none: arguments are checked by whoever reads them from outside; a NaN in gives a NaN out. */
#ifndef MODEL_OPS_H
#define MODEL_OPS_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>

/* An element of an activation array: f32, or, where ops->act_bytes is 2, the first half of one that holds two bf16. */
typedef float Act;

/* The largest shapes that the operations of one context will see. */
typedef struct OpsLimits {
    int rows; /* B*T */
    int T;
    int C;
    int NH;
} OpsLimits;

/* One per model; operations of one context run one after the other. Contexts of several ranks (threads of one process)
 * may be used at the same time. */
typedef struct OpsContext {
    int threads;          /* set by prepare: threads that share each operation */
    size_t scratch_bytes; /* set by prepare */
    void *scratch;        /* 64-byte aligned, scratch_bytes; brought by the caller */
    void *state;          /* ops->state, set by the caller before prepare */
    int layer;            /* whose operations run now, set by the caller; -1: embedding, final LayerNorm, head */
} OpsContext;

/* What a linear layer's backward needs to know of the layer's input. */
typedef struct LinearGrads {
    Act *dx;           /* [rows][C], overwritten; not NULL */
    float *dw;         /* [OC][C] */
    float *db;         /* [OC], or NULL */
    const Act *gelu;   /* [rows][C] or NULL. Not NULL: x is GELU of this, and dx is the gradient with respect to this */
    bool accumulate;   /* dw and db are added to; false: overwritten */
} LinearGrads;

/* A layer's whole pass; see `begin`. */
typedef struct LayerPass {
    bool backward, accumulate;
    int B, T;
} LayerPass;

typedef struct Ops {
    const char *name;
    size_t act_bytes; /* of an Act's value: 4, f32, or 2, bf16 */
    size_t head_logits; /* rows times vocabulary that the head is given at once, about: enough for its full speed */
    void *state; /* what the device knows of the rank that uses this table, borrowed; NULL where there is nothing */

    /* OK, or FAULT with a line that says why the device cannot be used here. */
    Status (*available)(void);

    /* Fills threads (the calling thread's OpenMP setting, for cpu) and scratch_bytes. Cheap. */
    void (*prepare)(OpsContext *context, const OpsLimits *limits);

    /* Between host memory and the device's. */
    void (*upload)(OpsContext *context, void *device, const void *host, size_t bytes);
    void (*download)(OpsContext *context, void *host, const void *device, size_t bytes);

    /* Activations, as f32 on the host. */
    void (*read)(OpsContext *context, float *host, const Act *device, size_t elems);

    /* Zeros. */
    void (*clear)(OpsContext *context, void *device, size_t bytes);

    /* x[b][t] = wte[tokens[b][t]] + wpe[t].   x [B*T][C], wpe [>= T][C] */
    void (*embedding_forward)(OpsContext *context, Act *x, const int *tokens, const float *wte, const float *wpe,
                              int B, int T, int C);
    /* dwte[token] += dx for every position, in their order; dwpe [maxT][C] is overwritten (0 from row T on) or added
     * to. */
    void (*embedding_backward)(OpsContext *context, float *dwte, float *dwpe, const Act *dx, const int *tokens, int B,
                               int T, int C, int maxT, bool accumulate);

    /* y = (x - mean) * rstd * w + b over each row; mean and rstd [rows] are kept for backward. eps 1e-5. */
    void (*layernorm_forward)(OpsContext *context, Act *y, float *mean, float *rstd, const Act *x, const float *w,
                              const float *b, int rows, int C);
    /* dx is added to (`residual`: it holds the gradient that came round the block) or overwritten; dw, db by
     * accumulate. */
    void (*layernorm_backward)(OpsContext *context, Act *dx, float *dw, float *db, const Act *dy, const Act *x,
                               const float *mean, const float *rstd, const float *w, int rows, int C, bool residual,
                               bool accumulate);

    /* y = x w^T + b + residual; b [OC] and residual [rows][OC] may be NULL.
     * gelu [rows][OC], if not NULL, receives GELU(y) (tanh form).   x [rows][C], w [OC][C], y [rows][OC] */
    void (*linear_forward)(OpsContext *context, Act *y, Act *gelu, const Act *x, const float *w, const float *b,
                           const Act *residual, int rows, int C, int OC);
    /* y = GELU(x), as linear_forward makes it of what it has stored: in f32 the same bits; in bf16 it may make it of a
     * sum that is not rounded yet.   x and y [rows][C] */
    void (*gelu_forward)(OpsContext *context, Act *y, const Act *x, int rows, int C);
    /* dx = dy w (times GELU' when grads->gelu), dw (+)= dy^T x, db (+)= column sums of dy.   dy [rows][OC] */
    void (*linear_backward)(OpsContext *context, const LinearGrads *grads, const Act *dy, const Act *x,
                            const float *w, int rows, int C, int OC);

    /* Causal self-attention of packed qkv [B][T][3C] (q, k, v side by side, heads side by side in each) into
     * y [B][T][C]; lse [B][NH][T] keeps log sum exp of each row's scaled scores for backward. */
    void (*attention_forward)(OpsContext *context, Act *y, float *lse, const Act *qkv, int B, int T, int C, int NH);
    /* dqkv [B][T][3C], overwritten. */
    void (*attention_backward)(OpsContext *context, Act *dqkv, const Act *dy, const Act *y, const Act *qkv,
                               const float *lse, int B, int T, int C, int NH);
    /* One sequence: stores k and v of the rows qkv [count][3C] as positions first..first+count-1 of cache [maxT][2C],
     * and attends from each of these rows to the positions up to its own. y [count][C] */
    void (*attention_cached)(OpsContext *context, Act *y, Act *cache, const Act *qkv, int first, int count, int C,
                             int NH);

    /* losses[row] = -log softmax(x wte^T)[target] over the V real tokens; logits [rows][Vp] is scratch of the
     * caller. */
    void (*head_loss)(OpsContext *context, float *losses, Act *logits, const Act *x, const float *wte,
                      const int *targets, int rows, int C, int V, int Vp);
    /* The same, with the gradients of scale * sum(losses): dx [rows][C] is overwritten, dwte [Vp][C] overwritten or
     * added to; its padded rows get 0. */
    void (*head_backward)(OpsContext *context, float *losses, Act *logits, Act *dx, float *dwte, const Act *x,
                          const float *wte, const int *targets, int rows, int C, int V, int Vp, float scale,
                          bool accumulate);

    /* Mean of values [count], summed in f64 in order. */
    double (*mean)(OpsContext *context, const float *values, int count);

    /* Optional, both or none: the device does a layer's pass as one. Operations that are called between the two must
     * depend on context, context->layer and pass alone, to the pointer, and move nothing to or from the host. begin
     * false: the device knows the pass and does it by itself; neither its operations nor `end` are to be called. */
    bool (*begin)(OpsContext *context, const LayerPass *pass);
    void (*end)(OpsContext *context);
} Ops;

static inline Act *act_at(const Ops *ops, const Act *activations, size_t elems) {
    return (Act *)((char *)activations + elems * ops->act_bytes);
}

extern const Ops ops_cpu; /* BLAS and OpenMP; context->threads threads */
/* Others: replay (model/ops_replay.h), which only takes time, and any device with a watch on it (model/ops_timed.h). */

#endif
