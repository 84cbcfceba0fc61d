#include "run/resume.h"

#include "base/memory.h"
#include "run/shard.h"

#include <stdlib.h>

/* An array as long as the model on rank 0; NULL elsewhere. */
static Status whole_array(const RunState *run, float **array) {
    bool root = comm_rank(run->comm) == 0;
    size_t bytes = (size_t)run->snapshot->table->elems * sizeof(float);
    *array = root ? memory_alloc(&host_memory, bytes) : NULL;
    return comm_agree(run->comm, *array || !root ? OK : fault("no memory to gather a checkpoint"));
}

/* ---- save ---- */

static Status save_residuals(const RunState *run, const char *folder, float *array) {
    Status status = OK;
    for (int i = 0; i < sync_residuals(run->sync); i++) {
        char name[32];
        TRY(sync_residual_fetch(run->sync, i, array));
        if (array)
            status = snapshot_save_array(run->snapshot, folder, sync_residual_name(run->sync, i, name), array);
        TRY(comm_agree(run->comm, status));
    }
    return OK;
}

static Status save_state(const RunState *run, const char *folder, int64_t keep, float *m, float *v) {
    int64_t elems = run->snapshot->table->elems;
    TRY(save_residuals(run, folder, m));
    TRY(shard_collect(run->comm, run->sync, run->adamw->m, elems, m));
    TRY(shard_collect(run->comm, run->sync, run->adamw->v, elems, v));
    run->snapshot->m = m;
    run->snapshot->v = v;
    return comm_agree(run->comm, m ? snapshot_save(run->snapshot, folder, keep) : OK);
}

Status resume_save(const RunState *run, const char *folder, int64_t keep) {
    float *m = NULL, *v = NULL;
    Status status = whole_array(run, &m);
    if (status == OK)
        status = whole_array(run, &v);
    if (status == OK)
        status = save_state(run, folder, keep, m, v);
    memory_free(&host_memory, m);
    memory_free(&host_memory, v);
    return status;
}

/* ---- load ---- */

static Status load_residuals(const RunState *run, const char *folder, float *array, bool *dropped) {
    *dropped = false;
    for (int i = 0; i < sync_residuals(run->sync); i++) {
        char name[32];
        bool found = false;
        Status status = OK;
        if (array)
            status = snapshot_load_array(run->snapshot, folder, sync_residual_name(run->sync, i, name), array, &found);
        TRY(comm_agree(run->comm, status));
        TRY(comm_broadcast(run->comm, &found, sizeof found, 0));
        *dropped |= !found;
        if (found)
            TRY(sync_residual_restore(run->sync, i, array));
    }
    return OK;
}

static Status share(const RunState *run, const float *m, const float *v) {
    Snapshot *snapshot = run->snapshot;
    int64_t elems = snapshot->table->elems;
    int64_t counters[] = {snapshot->step, snapshot->position, snapshot->skipped, snapshot->adamw_step};
    TRY(comm_broadcast(run->comm, counters, sizeof counters, 0));
    snapshot->step = counters[0], snapshot->position = counters[1], snapshot->skipped = counters[2];
    run->adamw->step = snapshot->adamw_step = counters[3];
    TRY(comm_broadcast(run->comm, snapshot->params, (size_t)elems * sizeof(float), 0));
    TRY(shard_distribute(run->comm, run->sync, m, elems, run->adamw->m));
    TRY(shard_distribute(run->comm, run->sync, v, elems, run->adamw->v));
    sync_resume(run->sync, snapshot->step);
    return OK;
}

Status resume_load(const RunState *run, const char *folder, int64_t step, bool *dropped) {
    float *m = NULL, *v = NULL;
    Status status = whole_array(run, &m);
    if (status == OK)
        status = whole_array(run, &v);
    run->snapshot->m = m;
    run->snapshot->v = v;
    if (status == OK)
        status = comm_agree(run->comm, m ? snapshot_load(run->snapshot, folder, step) : OK);
    if (status == OK)
        status = share(run, m, v);
    if (status == OK)
        status = load_residuals(run, folder, m, dropped);
    memory_free(&host_memory, m);
    memory_free(&host_memory, v);
    return status;
}
