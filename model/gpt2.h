/* GPT-2: parameters, forward, backward. Knows nothing of other ranks, of files or of optimizers.
 *
 * Shapes use the textbook letters: B sequences per micro-step, T tokens per sequence, C channels, L layers, NH heads,
 * V vocabulary, Vp vocabulary padded (rows V..Vp-1 of wte are zero, and so are their gradients).
 * tanh GELU, LayerNorm eps 1e-5, learned positions, no dropout, output head tied to wte
 * (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; tensor names are llm.c's).
 *
 *   wte [Vp,C]  wpe [maxT,C]  and per layer
 *   ln1w ln1b [C]  qkvw [3C,C] qkvb [3C]  attprojw [C,C] attprojb [C]  ln2w ln2b [C]
 *   fcw [4C,C] fcb [4C]  fcprojw [C,4C] fcprojb [C]   and at the end  lnfw lnfb [C]                                  */
#ifndef MODEL_GPT2_H
#define MODEL_GPT2_H

#include "base/error.h"
#include "base/memory.h"
#include "base/param.h"
#include "model/ops.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Gpt2Config {
    int layers;       /* L */
    int heads;        /* NH, divides channels */
    int channels;     /* C */
    int context;      /* maxT: rows of wpe; T may be smaller */
    int vocab;        /* V */
    int vocab_padded; /* Vp >= V */
} Gpt2Config;

/* V rounded up to a multiple of 128, as llm.c pads it. */
int gpt2_pad_vocab(int vocab);

/* BAD_INPUT when the sizes cannot be a GPT-2 (heads do not divide channels, a size is 0 or absurd). `where` names the
 * file or config in the message. */
Status gpt2_check(const Gpt2Config *config, const char *where);

/* Lays the parameters out (base/param.h); allocates only the table. Free with param_table_free.
 *   split_embedding   wte stands first instead of last: for training with gpt2_set_lookup, which finishes it first */
void gpt2_param_table(const Gpt2Config *config, bool split_embedding, ParamTable *table);

/* Parameters without the padded rows of wte: GPT-2's usual count, 124,439,808 for the small one. */
int64_t gpt2_param_count(const Gpt2Config *config);

/* FLOPs of one training step (forward and backward) per token: 6 N for the matmuls (N = gpt2_param_count) plus causal
 * attention counted at half, 6 L T C. Recomputation is not counted. */
double gpt2_flops_per_token(const Gpt2Config *config, int T);

/* Draws N(0, 0.02), residual projections scaled by 1/sqrt(2L), gains 1, biases and padding 0. Each tensor in llm.c's
 * order is a stream of its own, so the result depends on seed and sizes only, not on threads. params
 * f32[table->elems]. */
void gpt2_init_random(const Gpt2Config *config, const ParamTable *table, uint64_t seed, float *params);

typedef struct Gpt2 Gpt2;

/* What backward computes again instead of keeping it, of the 16 C numbers that a layer keeps for a position. The bits
 * are those of RECOMPUTE_NO, but for bf16's GELU (model/ops.h, gelu_forward). */
typedef enum Recompute {
    RECOMPUTE_NO,
    RECOMPUTE_GELU,  /* its result: keeps 12 C, for a pass over memory */
    RECOMPUTE_NORMS, /* and that of LayerNorms: 10 C, for two passes more */
    RECOMPUTE_LAYERS /* all but the layer's input: C, for the time of a forward, about 1/3 of a step more */
} Recompute;

typedef struct Gpt2Options {
    int max_B, max_T; /* largest micro-batch that will be seen; activations are allocated for it */
    bool train;       /* false: forward and loss only, activations of one layer */
    int recompute;    /* Recompute */
} Gpt2Options;

/* Bytes that gpt2_create will allocate, for activations and scratch; on the cpu with the calling thread's number of
 * OpenMP threads (each has some scratch). */
size_t gpt2_activation_bytes(const Gpt2Config *config, const Gpt2Options *options, const Ops *ops);

/* params and grads are flat f32[table->elems] arrays, borrowed; grads may be NULL when options->train is false. ops
 * is the device. All memory is allocated here, from `memory`; nothing is allocated in a step. FAULT when there is too
 * little. */
Status gpt2_create(Gpt2 **model, const Gpt2Config *config, const ParamTable *table, float *params, float *grads,
                   const Gpt2Options *options, const Ops *ops, const Allocator *memory);
void gpt2_destroy(Gpt2 *model); /* accepts NULL */

/* From now on gpt2_forward calls need(user, gradient) before it reads the parameters of gradients[gradient], from the
 * thread that called it, once for each gradient and in the order in which they are needed: wte, wpe; then for each
 * layer from 0 on its group of 1-D tensors, qkvw, attprojw, fcw, fcprojw; then lnf. (Of wte it reads the rows of its
 * tokens only.) Loss, logits and backward, with
 * recomputation too, follow a gpt2_forward and ask for nothing. need NULL: nobody is asked, as at first. */
void gpt2_on_need(Gpt2 *model, NeedFn *need, void *user);

/* Runs the trunk, embedding to final LayerNorm, and keeps what backward needs.
 *   tokens i32[B*T], each in [0, V); B <= max_B, T <= max_T. */
void gpt2_forward(Gpt2 *model, const int *tokens, int B, int T);

/* After gpt2_forward: mean cross-entropy, in nats per token, of the next tokens, targets i32[B*T]. Head and softmax
 * run over chunks of positions, so (B,T,V) is never held. NaN if any logit is NaN. */
double gpt2_loss(Gpt2 *model, const int *targets);

/* The tied embedding in two gradients. wte's gradient is the sum of the head's, dense and the first to be final, and
 * the lookup's, which touches only rows of tokens that occur and is the last. From now on gpt2_backward adds the
 * lookup's to `rows`, and grads holds the head's alone for wte:
 *   rows            f32[slots][C], borrowed, device memory; NULL: both go to wte, as at first
 *   slot_of_token   i32[V], borrowed: in [0, slots) for the tokens of the batch, elsewhere not read
 * To be set before the first backward of a step, for all its micro-steps alike: the slots must cover the tokens of all
 * of them. gpt2_backward then reads the tokens that gpt2_forward was given once more, so they must still be there. */
void gpt2_set_lookup(Gpt2 *model, float *rows, int slots, const int *slot_of_token);

/* After gpt2_forward: head (fused with the loss, so that logits are computed once), then layers in reverse.
 *   loss_scale   gradients are those of loss_scale * mean loss: 1/micro-steps under gradient accumulation
 *   accumulate   false: gradients, and all rows of the lookup, are overwritten (no need to clear them); true: added to
 *   ready        called once for each gradient when it is final: lnf, the layers from the last on, wpe, wte; with a
 *                lookup wte comes first, and the lookup's rows are final on return. NULL: nobody listens
 * Returns the unscaled mean loss. Gradients of padded rows of wte are 0. */
double gpt2_backward(Gpt2 *model, const int *targets, float loss_scale, bool accumulate, ReadyFn *ready, void *user);

/* After gpt2_forward: logits of the chosen positions, for tests and generation. position p = b*T + t;
 * logits f32[count][V], unpadded, at positions first..first+count-1. */
void gpt2_logits(Gpt2 *model, int first, int count, float *logits);

/* Incremental forward for generation: one token per call through a KV cache of up to `context` positions. */
typedef struct Gpt2Cache Gpt2Cache;

Status gpt2_cache_create(Gpt2Cache **cache, const Gpt2Config *config, const ParamTable *table, const float *params,
                         const Ops *ops, const Allocator *memory);
void gpt2_cache_destroy(Gpt2Cache *cache); /* accepts NULL */
void gpt2_cache_clear(Gpt2Cache *cache);   /* forget all tokens */

/* Appends tokens[count] (count >= 1; prefill runs as one pass where count > 1) and returns the logits, f32[V], owned
 * by the cache, that follow the last one. Past `context` positions: asserts; the caller clears and refills with a
 * recent window. */
const float *gpt2_cache_append(Gpt2Cache *cache, const int *tokens, int count);
int gpt2_cache_length(const Gpt2Cache *cache);

#endif
