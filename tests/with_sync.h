/* A rank's sync for as long as a test needs it. */
#ifndef TESTS_WITH_SYNC_H
#define TESTS_WITH_SYNC_H

#include "comm/comm.h"

/* What a rank does with its sync over a table, and with gradients in memory of comm's. */
typedef Status SyncBody(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user);

/* Frees the table. */
static inline Status with_sync(Comm *comm, const CommConfig *config, ParamTable *table, SyncBody *body, void *user) {
    float *grads = memory_alloc(comm_memory(comm), (size_t)table->elems * sizeof(float));
    Sync *sync = NULL;
    Status status = sync_create(&sync, comm, config, &(SyncSetup){.table = table, .grads = grads});
    if (status == OK)
        status = body(comm, sync, table, grads, user);
    sync_destroy(sync);
    memory_free(comm_memory(comm), grads);
    param_table_free(table);
    return status;
}

#endif
