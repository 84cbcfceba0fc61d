/* Gradient synchronisation, blocking: sync_wait all-reduces the whole flat gradient at once, after backward.
 *
 *   backward   mark_ready mark_ready ... mark_ready     (recorded)
 *   sync_wait                                       |== all-reduce of grads[0..elems) ==|
 *
 * All communication is exposed. The order is the flat array's, whatever the order of mark_ready. A single rank neither
 * copies nor scales. Allocates nothing after sync_create. */
#include "comm/internal.h"

#include "base/clock.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Sync {
    /* set once */
    Comm *comm;              /* borrowed */
    const ParamTable *table; /* borrowed */
    float *grads;            /* f32[table->elems], borrowed */
    const Collective *collective;
    float *scratch; /* owned */
    char plan[128];
    /* any thread */
    atomic_uchar *ready; /* [gradient_count], owned: marked in this step */
    atomic_int ready_count;
    /* the rank's thread */
    SyncStats stats;
};

static Status choose_collective(Sync *sync, const CommConfig *config) {
    const char *name = option_choice(comm_algorithms, config->algorithm);
    /* auto: fastest for whole gradients at every count of ranks that was measured, see docs/comm.md */
    sync->collective = strcmp(name, "auto") == 0 ? &collective_ring : collective_find(name);
    assert(sync->collective); /* every choice but auto names one */
    return sync->collective->check ? sync->collective->check(&sync->comm->world) : OK;
}

static Status alloc_scratch(Sync *sync) {
    int64_t elems = sync->collective->scratch_elems(comm_ranks(sync->comm), sync->table->elems);
    sync->scratch = memory_alloc(&host_memory, (size_t)elems * sizeof(float));
    return sync->scratch ? OK : fault("no memory for %lld values of scratch", (long long)elems);
}

static Status build(Sync *sync, const CommConfig *config) {
    sync->ready = calloc((size_t)sync->table->gradient_count + 1, sizeof *sync->ready);
    if (!sync->ready)
        return fault("no memory for the state of %d gradients", sync->table->gradient_count);
    if (comm_ranks(sync->comm) == 1) {
        snprintf(sync->plan, sizeof sync->plan, "none: one rank");
        return OK;
    }
    TRY(choose_collective(sync, config));
    TRY(alloc_scratch(sync));
    snprintf(sync->plan, sizeof sync->plan, "%s, f32, blocking", sync->collective->name);
    return OK;
}

Status sync_create(Sync **result, Comm *comm, const CommConfig *config, const ParamTable *table, float *grads) {
    Sync *sync = calloc(1, sizeof *sync);
    *result = sync;
    Status status;
    if (sync) {
        sync->comm = comm;
        sync->table = table;
        sync->grads = grads;
        status = build(sync, config);
    } else {
        status = fault("no memory for gradient synchronisation");
    }
    return comm_agree(comm, status);
}

void sync_destroy(Sync *sync) {
    if (!sync)
        return;
    memory_free(&host_memory, sync->scratch);
    free(sync->ready);
    free(sync);
}

const char *sync_plan(const Sync *sync) { return sync->plan; }

void sync_mark_ready(void *user, int gradient) {
    Sync *sync = user;
    assert(gradient >= 0 && gradient < sync->table->gradient_count);
    unsigned char before = atomic_exchange(&sync->ready[gradient], 1);
    assert(!before); /* once per step */
    (void)before;
    atomic_fetch_add(&sync->ready_count, 1);
}

static void start_next_step(Sync *sync) {
    int ready = atomic_exchange(&sync->ready_count, 0);
    assert(ready == sync->table->gradient_count);
    (void)ready;
    for (int i = 0; i < sync->table->gradient_count; i++)
        atomic_store(&sync->ready[i], 0);
}

Status sync_wait(Sync *sync) {
    const Transport *transport = sync->comm->transport;
    start_next_step(sync);
    sync->stats = (SyncStats){0};
    if (transport->ranks == 1)
        return OK;
    int64_t intra = transport->bytes_intra, inter = transport->bytes_inter;
    double start_s = clock_s();
    float scale = 1.0f / (float)transport->ranks;
    TRY(sync->collective->allreduce(&sync->comm->world, sync->grads, sync->table->elems, scale, sync->scratch));
    sync->stats.comm_ms = sync->stats.comm_exposed_ms = (clock_s() - start_s) * 1e3;
    sync->stats.bytes_intra = transport->bytes_intra - intra;
    sync->stats.bytes_inter = transport->bytes_inter - inter;
    return OK;
}

SyncStats sync_stats(const Sync *sync) { return sync->stats; }
