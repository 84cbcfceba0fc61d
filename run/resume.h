/* Checkpoints of a run on all its ranks. Rank 0 reads and writes files (snapshot.h); what other ranks alone have,
 * their shards of the moments and the residuals of error feedback, travels to it and from it, one array at a time. All
 * calls are collective. */
#ifndef RUN_RESUME_H
#define RUN_RESUME_H

#include "comm/comm.h"
#include "optim/adamw.h"
#include "run/settings.h"
#include "run/snapshot.h"

/* What a run resumes from, on each rank; borrowed. */
typedef struct RunState {
    Comm *comm;
    Sync *sync;
    AdamW *adamw;
    Snapshot *snapshot; /* m, v and sync are not used. The counters are those of the step that was done last */
    const Settings *settings;
    int64_t step_tokens, data_tokens; /* of a step, over all ranks; of the training data */
} RunState;

/* What has changed since the checkpoint, and what became of it: a line each, or empty. Rank 0's. */
typedef struct ResumeNotes {
    char settings[1024]; /* which of those that decide what is learnt from what */
    char sync[512];      /* how gradients travel, and what became of the residuals */
} ResumeNotes;

Status resume_save(const RunState *run, const char *folder, int64_t keep);

/* Fills params (on every rank), moments, residuals and the counters from the checkpoint of that step. Residuals come
 * back all or none: all, if values are quantised at the same places as in the run that saved them, by whatever
 * compressor. */
Status resume_load(const RunState *run, const char *folder, int64_t step, ResumeNotes *notes);

#endif
