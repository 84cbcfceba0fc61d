/* AdamW with decoupled weight decay (Loshchilov and Hutter 2019), learning-rate schedules, global-norm clip.
 *
 * Flat arrays and moments lie in the memory of a device, whose OptimOps pass over them; counts, constants and sums of
 * units are the host's. All devices give the same bits. */
#ifndef OPTIM_ADAMW_H
#define OPTIM_ADAMW_H

#include "base/config.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/param.h"

typedef struct OptimOps OptimOps;

typedef enum Schedule { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } Schedule;

typedef struct OptimConfig {
    double lr;            /* peak learning rate */
    double min_lr_ratio;  /* final over peak */
    int64_t warmup;       /* steps of linear warm-up, from lr/warmup to lr */
    int schedule;         /* Schedule */
    double decay_ratio;   /* wsd: the last share of the steps, in which lr falls */
    double beta1, beta2, eps, weight_decay;
    double grad_clip;     /* clip the global norm to this; 0: off */
    int64_t zero;         /* 1: the moments are sharded over ranks (ZeRO-1); who has what is the caller's */
} OptimConfig;

extern const Option optim_options[];
extern const int optim_option_count;

/* Learning rate of a step (0-based) of a run of `steps`. Warm-up first; then cosine or linear from lr to
 * min_lr_ratio * lr at the last step, constant, or wsd: constant, then 1 - sqrt decay over the last decay_ratio *
 * steps. */
double learning_rate(const OptimConfig *config, int64_t step, int64_t steps);

/* Global L2 norm of grads f32[table->elems], which the host can read: f64 sums over units, added in the order of the
 * flat array, so that it does not depend on threads or ranks. A unit is what multiples of 4,096 and the bounds of
 * table->gradients leave uncut. Inf or NaN anywhere gives a non-finite result. Allocates nothing. */
double grad_norm(const ParamTable *table, const float *grads);

/* The same norm, the same bits, on any device, and where each rank has only its shard of the gradient: every rank calls
 * norm_partial, sends what it got to the others, puts what it received in place by norm_scatter, and adds up by
 * norm_total. Shards are made of whole units; together they hold each unit once. */
typedef struct NormPlan {
    int64_t units;
    int64_t *starts; /* [units + 1], owned: unit u is elements starts[u] .. starts[u + 1] - 1 */
    const OptimOps *ops; /* borrowed */
    void *device;        /* what ops keep of it */
} NormPlan;

Status norm_plan_create(NormPlan *plan, const ParamTable *table, const OptimOps *ops); /* does not keep table */
void norm_plan_destroy(NormPlan *plan); /* accepts a zeroed one */
size_t norm_plan_bytes(const ParamTable *table, const OptimOps *ops); /* that it takes of the device's memory */

int64_t norm_shard_units(const NormPlan *plan, const Shard *shard);

/* partial f64[norm_shard_units], on the host, = the sums of the shard's units, in the order of its slices. One read of
 * the shard's part of grads f32[table->elems]. shard NULL: everything, and partial is what norm_total takes. */
void norm_partial(const NormPlan *plan, const float *grads, const Shard *shard, double *partial);

/* Puts what norm_partial gave for that shard in its place among sums f64[units]. */
void norm_scatter(const NormPlan *plan, const Shard *shard, const double *partial, double *sums);

/* The norm from the sums of all units. */
double norm_total(const NormPlan *plan, const double *sums);

/* What gradients are multiplied by: min(1, clip / norm), 1 when clip is 0. */
double clip_scale(double norm, double clip);

/* Part of a slice whose tensors all decay, or all do not. */
typedef struct AdamWRun {
    int64_t start; /* in the flat arrays */
    int64_t at;    /* in the moments */
    int64_t elems;
    bool decay;
} AdamWRun;

typedef struct AdamW {
    int64_t elems;           /* of the shard */
    float *m, *v;            /* f32[elems], first and second moments of the slices one after the other, owned */
    int64_t step;            /* updates done; goes into checkpoints with m and v */
    AdamWRun *runs;          /* in the device's memory as m and v, owned; they cover 0 .. elems - 1 in order */
    int run_count;
    const Allocator *memory; /* borrowed, as is ops */
    const OptimOps *ops;
} AdamW;

/* shard NULL: everything, and the moments are laid out as the flat arrays. Slices may begin and end anywhere. memory is
 * that of the device of ops. Keeps neither table nor shard. */
Status adamw_create(AdamW *adamw, const ParamTable *table, const Shard *shard, const Allocator *memory,
                    const OptimOps *ops);
void adamw_destroy(AdamW *adamw); /* accepts a zeroed one */
size_t adamw_bytes(const ParamTable *table, const Shard *shard); /* that adamw_create allocates */

/* One update in place: g = grad_scale * grads; m, v and bias correction as in the paper; p -= lr * (mhat /
 * (sqrt(vhat) + eps) + wd * p), wd on tensors with `decay` only. params and grads are flat; the shard is updated and
 * nothing else is read or written. One pass over memory; element-wise, so bits depend neither on threads nor on the
 * shard. */
void adamw_update(AdamW *adamw, const OptimConfig *config, double lr, double grad_scale, float *params,
                  const float *grads);

/* That slice of params came from elsewhere than adamw_update: another rank's shard, a checkpoint of adamw->step, which
 * must be set before. What the device keeps beside the parameters becomes what the update itself would have left. */
void adamw_params_arrived(const AdamW *adamw, const float *params, Slice slice);

/* ---- devices ---- */

/* What one update has for all elements. */
typedef struct AdamWConstants {
    float grad_scale;
    float m_rate, v_rate; /* 1 - beta */
    float step_size;      /* lr / (1 - beta1^t) */
    float v_correction;   /* 1 / (1 - beta2^t) */
    float eps;
    float decay;          /* lr * weight_decay, for runs that decay */
} AdamWConstants;

/* The passes over memory, one const table per device. */
struct OptimOps {
    const char *name;
    void *state; /* what the device knows of the rank that uses this table, borrowed; NULL where there is nothing */

    /* From the host's memory to the device's; done when it returns. */
    void (*upload)(void *state, void *device, const void *host, size_t bytes);

    /* Optional: fills plan->device from the rest of the plan, norm_bytes of the device's memory, and gives it back. */
    size_t (*norm_bytes)(int64_t units);
    Status (*norm_create)(void *state, NormPlan *plan);
    void (*norm_destroy)(void *state, NormPlan *plan);

    /* norm_partial for a shard that is not NULL. */
    void (*norm_partial)(void *state, const NormPlan *plan, const float *grads, const Shard *shard, double *partial);

    /* adamw_update, whose step is adamw->step, from 1 on. May come back before it is done. */
    void (*update)(void *state, const AdamW *adamw, AdamWConstants k, float *params, const float *grads);

    /* Optional: adamw_params_arrived, likewise. */
    void (*arrived)(void *state, int64_t step, const float *params, Slice slice);
};

extern const OptimOps optim_cpu; /* OpenMP, the calling thread's setting */
/* Another: optim/optim_cuda.h. */

#endif
