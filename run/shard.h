/* ZeRO-1 between the rooms: each rank has the mean gradient and the moments of its shard (comm/comm.h, sync_shard), the
 * optimizer updates that. Here is what still concerns all ranks: the norm of the whole gradient, and whole moments for
 * checkpoints. Without shards each rank has everything, and nothing here sends anything. Collective. */
#ifndef RUN_SHARD_H
#define RUN_SHARD_H

#include "comm/comm.h"
#include "optim/adamw.h"

typedef struct ShardNorm {
    Comm *comm;       /* borrowed, as is sync */
    const Sync *sync;
    NormPlan plan;
    int64_t most;     /* units of the rank that has most */
    double *partial;  /* f64[most], owned */
    double *gathered; /* f64[ranks][most], owned */
    double *sums;     /* f64[units], owned */
} ShardNorm;

Status shard_norm_create(ShardNorm *norm, Comm *comm, const Sync *sync, const ParamTable *table, const OptimOps *ops);
void shard_norm_destroy(ShardNorm *norm); /* accepts a zeroed one */

/* The norm of the whole gradient, of which this rank has its shard in grads f32[table->elems], in the
 * memory of the device of ops: the bits of grad_norm, the same on all ranks. */
Status shard_norm(ShardNorm *norm, const float *grads, double *result);

/* moments, as AdamW keeps them, become flat f32[table->elems] on rank 0; elsewhere flat is not used and may be NULL. */
Status shard_collect(Comm *comm, const Sync *sync, const float *moments, int64_t elems, float *flat);

/* The reverse: each rank gets its shard of what rank 0 has. */
Status shard_distribute(Comm *comm, const Sync *sync, const float *flat, int64_t elems, float *moments);

#endif
