/* Between the memory in which the model computes and the one in which ranks talk (comm.h). On the cpu both are the same
 * and nothing here costs anything. On a GPU each gradient is copied to the host when it is final, and the sync hears of
 * it when it has arrived; the means, and parameters that other ranks updated, come back the same way:
 *
 *     device   backward: gradient ---.                       .--> update            forward: parameter <--.
 *     host                            '--> sync, mean ------'                       sync_need ------------'
 *
 * One rank alone has nobody to talk to, and where comm works on the GPU's memory nothing needs to move: gradients stay
 * where they are. */
#ifndef RUN_STAGE_H
#define RUN_STAGE_H

#include "comm/comm.h"
#include "optim/adamw.h"
#include "run/device.h"

typedef struct Stage {
    /* set once */
    float *params, *grads; /* f32[table->elems], the model's */
    /* private */
    const AdamW *adamw;
    const Device *device;
    Gpu *gpu; /* NULL: the host's arrays are the model's */
    const Allocator *memory;
    const ParamTable *table;
    float *host_params, *host_grads; /* borrowed; host_grads may be NULL */
    float *rows;                     /* f32[rows_elems], of the lookup; NULL without */
    int64_t rows_elems;
    Sync *sync;
    bool copies;  /* between gradients here and there */
    bool sharded;
    bool split; /* the embedding has two gradients */
} Stage;

/* host_params and host_grads are where ranks talk. host_grads NULL: the model is on a GPU, its gradients stay there. */
Status stage_create(Stage *stage, const Device *device, const ParamTable *table, float *host_params,
                    float *host_grads);

/* Before anything goes that is copied from or to: nothing is any more, also where waiting for it failed before. The
 * line of a failure stays. */
void stage_quiet(Stage *stage);   /* accepts a zeroed one */
void stage_destroy(Stage *stage); /* likewise */

/* The sync is there. adamw, not yet made, is who updates the parameters. rows_elems: the most that sync_lookup's rows
 * can hold, half of the vocabulary's; 0 without. */
Status stage_connect(Stage *stage, Sync *sync, const AdamW *adamw, bool sharded, int64_t rows_elems);

void stage_ready(void *stage, int gradient); /* a ReadyFn: sync_mark_ready, once the gradient has arrived */
void stage_need(void *stage, int gradient);  /* a NeedFn: sync_need, and the parameters are on their way */

/* Behind sync_forward_end: what the head reads of the embedding. */
void stage_forward_end(Stage *stage);

/* sync_lookup with the rows in the model's memory. */
SyncLookup stage_lookup(const Stage *stage);

/* Backward is over: returns when all gradients, and the lookup's rows, have arrived. Then comes sync_wait. */
Status stage_backward_end(Stage *stage);

/* The means (of a sharded sync: of the shard) are on their way to the model's memory. */
void stage_means_in(Stage *stage, const Shard *shard);

/* A rank has updated its shard: returns when that is where the sync gathers it from. */
Status stage_shard_out(Stage *stage, const Shard *shard);

/* The sync has gathered all parameters, or every rank has them: both arrays hold them when it returns. */
Status stage_params_whole(Stage *stage);

/* host_params were filled, and adamw's step set. */
Status stage_params_in(Stage *stage);

/* AdamW's moments on the host, for a checkpoint: `host` becomes a copy of adamw (of adamw itself on the cpu), to be
 * freed by stage_moments_free; _in brings them back. */
Status stage_moments_out(Stage *stage, const AdamW *adamw, AdamW *host);
Status stage_moments_in(Stage *stage, AdamW *adamw, const AdamW *host);
void stage_moments_free(Stage *stage, AdamW *host);

/* FAULT with the first fault of the device, if there was one. */
Status stage_check(const Stage *stage);

#endif
