#include "run/shard.h"

#include <stdlib.h>
#include <string.h>

/* ---- the norm ---- */

Status shard_norm_create(ShardNorm *norm, Comm *comm, const Sync *sync, const ParamTable *table,
                         const OptimOps *ops) {
    *norm = (ShardNorm){.comm = comm, .sync = sync};
    TRY(norm_plan_create(&norm->plan, table, ops));
    for (int rank = 0; rank < comm_ranks(comm); rank++) {
        int64_t units = sync_shard(sync, rank) ? norm_shard_units(&norm->plan, sync_shard(sync, rank)) : 0;
        norm->most = units > norm->most ? units : norm->most;
    }
    norm->partial = calloc((size_t)norm->most + 1, sizeof *norm->partial);
    norm->gathered = calloc((size_t)norm->most * (size_t)comm_ranks(comm) + 1, sizeof *norm->gathered);
    norm->sums = calloc((size_t)norm->plan.units + 1, sizeof *norm->sums);
    return norm->partial && norm->gathered && norm->sums ? OK : fault("no memory for the gradient's norm");
}

void shard_norm_destroy(ShardNorm *norm) {
    norm_plan_destroy(&norm->plan);
    free(norm->partial);
    free(norm->gathered);
    free(norm->sums);
    *norm = (ShardNorm){0};
}

Status shard_norm(ShardNorm *norm, const float *grads, double *result) {
    const Shard *mine = sync_shard(norm->sync, comm_rank(norm->comm));
    norm_partial(&norm->plan, grads, mine, mine ? norm->partial : norm->sums);
    if (mine)
        TRY(comm_gather(norm->comm, norm->partial, norm->gathered, (size_t)norm->most * sizeof(double)));
    for (int rank = 0; mine && rank < comm_ranks(norm->comm); rank++)
        norm_scatter(&norm->plan, sync_shard(norm->sync, rank), norm->gathered + rank * norm->most, norm->sums);
    *result = norm_total(&norm->plan, norm->sums);
    return OK;
}

/* ---- moments: each rank's go through everybody, one rank after another ---- */

static int64_t most_elems(Comm *comm, const Sync *sync) {
    int64_t most = 0;
    for (int rank = 0; rank < comm_ranks(comm); rank++) {
        int64_t elems = shard_elems(sync_shard(sync, rank));
        most = elems > most ? elems : most;
    }
    return most;
}

/* Between the flat array and a shard's values side by side. */
static void copy_slices(const Shard *shard, float *flat, float *compact, bool to_flat) {
    for (int i = 0; i < shard->count; i++) {
        size_t bytes = (size_t)shard->slices[i].elems * sizeof(float);
        float *place = flat + shard->slices[i].start;
        memcpy(to_flat ? place : compact, to_flat ? compact : place, bytes);
        compact += shard->slices[i].elems;
    }
}

/* `own` f32[shard] of this rank; rank 0's flat is filled from all of them (collect), or fills them. */
static Status move(Comm *comm, const Sync *sync, float *own, float *flat, bool collect) {
    float *buffer = malloc(((size_t)most_elems(comm, sync) + 1) * sizeof *buffer);
    TRY(comm_agree(comm, buffer ? OK : fault("no memory to move moments between ranks")));
    Status status = OK;
    for (int rank = 0; rank < comm_ranks(comm) && status == OK; rank++) {
        const Shard *shard = sync_shard(sync, rank);
        size_t bytes = (size_t)shard_elems(shard) * sizeof(float);
        bool root = comm_rank(comm) == 0, mine = comm_rank(comm) == rank;
        if (collect && mine)
            memcpy(buffer, own, bytes);
        else if (!collect && root)
            copy_slices(shard, flat, buffer, false);
        status = comm_broadcast(comm, buffer, bytes, collect ? rank : 0);
        if (status == OK && collect && root)
            copy_slices(shard, flat, buffer, true);
        else if (status == OK && !collect && mine)
            memcpy(own, buffer, bytes);
    }
    free(buffer);
    return status;
}

Status shard_collect(Comm *comm, const Sync *sync, const float *moments, int64_t elems, float *flat) {
    if (sync_shard(sync, 0))
        return move(comm, sync, (float *)moments, flat, true);
    if (comm_rank(comm) == 0)
        memcpy(flat, moments, (size_t)elems * sizeof(float));
    return OK;
}

Status shard_distribute(Comm *comm, const Sync *sync, const float *flat, int64_t elems, float *moments) {
    if (sync_shard(sync, 0))
        return move(comm, sync, moments, (float *)flat, false);
    if (comm_rank(comm) == 0)
        memcpy(moments, flat, (size_t)elems * sizeof(float));
    return comm_broadcast(comm, moments, (size_t)elems * sizeof(float), 0);
}
