/* A run of training on one rank: what it consists of, from its settings to the state in which steps can begin, and what
 * becomes of it at the end. The steps themselves are train.c's.
 *
 *     trainer_check     all that can be wrong with what the user gave; the header: what will run
 *     trainer_build     memory, model, sync, optimizer; parameters that are the same on every rank; the log
 *     ... steps ...
 *     trainer_finish    the trained model and the closing table
 *     trainer_destroy
 *
 * All but the last are collective. */
#ifndef RUN_TRAINER_H
#define RUN_TRAINER_H

#include "base/log.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "run/device.h"
#include "run/memory.h"
#include "run/settings.h"
#include "run/shard.h"
#include "run/stage.h"
#include "run/trace.h"

typedef struct Trainer {
    const Settings *settings;
    Comm *comm;
    int rank, ranks;
    int64_t micro_steps, global_sequences; /* per step */
    Loader *train_data, *val_data;         /* val_data may be NULL */
    Tokenizer *tokenizer;                  /* may be NULL */
    Gpt2Config model_config;
    ParamTable table;
    float *params, *grads; /* f32[table.elems], on the host; grads NULL where none travel through it */
    int *inputs, *targets; /* i32[batch * seq_len], one micro-batch */
    Device device;
    RunMemory memory; /* what trainer_build will allocate */
    Stage stage; /* where the model sees them */
    Gpt2 *model;
    AdamW adamw;
    Sync *sync;
    ShardNorm norm;
    Log *log;                        /* rank 0 */
    Trace *trace;                    /* NULL without log.trace */
    int64_t step, position, skipped; /* done so far; position is the next sequence's */
    int64_t tried, updated;          /* steps of this run; those that were not skipped */
    double forward_end_s; /* of the micro-step; stamped by the device */
} Trainer;

/* What the model is made with; the sync; the most elements of the lookup's rows, 0 where the embedding is not split. */
Gpt2Options trainer_model_options(const Trainer *t);
SyncSetup trainer_sync_setup(const Trainer *t);
int64_t trainer_lookup_elems(const Trainer *t);

/* Gradients of a GPU that do not travel through the host's memory have no place there. */
bool trainer_grads_on_host(const Trainer *t);

/* Before anything large is allocated or any file is written. *t has settings, comm, rank and ranks, the rest is 0. */
Status trainer_check(Trainer *t);

Status trainer_build(Trainer *t);

/* All parameters, where comm sees them, for whoever reads them outside of a step. */
Status trainer_gather_params(Trainer *t);

/* A checkpoint of the step that was done last. */
Status trainer_save(Trainer *t);

Status trainer_finish(Trainer *t);
void trainer_destroy(Trainer *t); /* accepts a half-built one; not collective */

#endif
