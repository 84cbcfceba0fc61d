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
} RunState;

enum { RESUME_NOTE = 512 };

Status resume_save(const RunState *run, const char *folder, int64_t keep);

/* Fills params (on every rank), moments, residuals and the counters from the checkpoint of that step. Residuals come
 * back all or none: all, if values are quantised at the same places as in the run that saved them, by whatever
 * compressor. When that run's gradients travelled in another way, rank 0's note says what changed and what became of
 * the residuals; else it is empty. */
Status resume_load(const RunState *run, const char *folder, int64_t step, char note[RESUME_NOTE]);

#endif
