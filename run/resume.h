/* Checkpoints of a run on all its ranks. Rank 0 reads and writes files (snapshot.h); what other ranks alone have,
 * their shards of the moments and the residuals of error feedback, travels to it and from it, one array at a time. All
 * calls are collective. */
#ifndef RUN_RESUME_H
#define RUN_RESUME_H

#include "comm/comm.h"
#include "optim/adamw.h"
#include "run/snapshot.h"

/* What a run resumes from, on each rank; borrowed. */
typedef struct RunState {
    Comm *comm;
    Sync *sync;
    AdamW *adamw;
    Snapshot *snapshot; /* m and v are not used. The counters are those of the step that was done last */
} RunState;

Status resume_save(const RunState *run, const char *folder, int64_t keep);

/* Fills params (on every rank), moments, residuals and the counters from the checkpoint of that step. Residuals of
 * another world are dropped: *dropped then says so. */
Status resume_load(const RunState *run, const char *folder, int64_t step, bool *dropped);

#endif
