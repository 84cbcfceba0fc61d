/* AdamW with decoupled weight decay (Loshchilov and Hutter 2019), learning-rate schedules, global-norm clip. */
#ifndef OPTIM_ADAMW_H
#define OPTIM_ADAMW_H

#include "base/config.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/param.h"

typedef enum Schedule { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } Schedule;

typedef struct OptimConfig {
    double lr;            /* peak learning rate */
    double min_lr_ratio;  /* final over peak */
    int64_t warmup;       /* steps of linear warm-up, from lr/warmup to lr */
    int schedule;         /* Schedule */
    double decay_ratio;   /* wsd: the last share of the steps, in which lr falls */
    double beta1, beta2, eps, weight_decay;
    double grad_clip;     /* clip the global norm to this; 0: off */
} OptimConfig;

extern const Option optim_options[];
extern const int optim_option_count;

/* Learning rate of a step (0-based) of a run of `steps`. Warm-up first; then cosine or linear from lr to
 * min_lr_ratio * lr at the last step, constant, or wsd: constant, then 1 - sqrt decay over the last decay_ratio *
 * steps. */
double learning_rate(const OptimConfig *config, int64_t step, int64_t steps);

/* Global L2 norm of grads f32[elems]: f64 sums over fixed blocks of 4,096 elements, added in block order, so that it
 * does not depend on threads or ranks. Inf or NaN anywhere gives a non-finite result. */
double grad_norm(const float *grads, int64_t elems);

/* What gradients are multiplied by: min(1, clip / norm), 1 when clip is 0. */
double clip_scale(double norm, double clip);

typedef struct AdamW {
    const ParamTable *table; /* borrowed */
    float *m, *v;            /* f32[table->elems], first and second moments, owned */
    int64_t step;            /* updates done; goes into checkpoints with m and v */
    const Allocator *memory; /* borrowed */
} AdamW;

Status adamw_create(AdamW *adamw, const ParamTable *table, const Allocator *memory);
void adamw_destroy(AdamW *adamw); /* accepts a zeroed one */

/* One update in place: g = grad_scale * grads; m, v and bias correction as in the paper; p -= lr * (mhat /
 * (sqrt(vhat) + eps) + wd * p), wd on tensors with `decay` only. One pass over memory, all threads; element-wise, so
 * bits do not depend on threads. */
void adamw_update(AdamW *adamw, const OptimConfig *config, double lr, double grad_scale, float *params,
                  const float *grads);

#endif
