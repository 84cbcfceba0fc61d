#include "run/stage.h"

#include "base/clock.h"
#include "base/gpu.h"

#include <stdio.h>

static size_t bytes_of(int64_t elems) { return (size_t)elems * sizeof(float); }

Status stage_create(Stage *stage, const Device *device, const ParamTable *table, float *host_params,
                    float *host_grads) {
    *stage = (Stage){.params = host_params, .grads = host_grads, .device = device, .gpu = device->gpu,
                     .memory = device->memory, .table = table, .host_params = host_params,
                     .host_grads = host_grads,
                     .copies = device->gpu && host_grads};
    if (!stage->gpu)
        return OK;
    stage->params = memory_alloc(stage->memory, bytes_of(table->elems));
    stage->grads = memory_alloc(stage->memory, bytes_of(table->elems));
    if (!stage->params || !stage->grads)
        return fault("out of memory on the GPU: parameters and gradients take 2 x %.2f GB",
                     1e-9 * (double)bytes_of(table->elems));
    gpu_pin(stage->gpu, host_params, bytes_of(table->elems));
    if (stage->copies)
        gpu_pin(stage->gpu, host_grads, bytes_of(table->elems));
    return OK;
}

void stage_quiet(Stage *stage) {
    char line[1024];
    if (!stage->gpu)
        return;
    snprintf(line, sizeof line, "%s", error_line());
    gpu_finish(stage->gpu);
    error_restore(OK, line);
}

void stage_destroy(Stage *stage) {
    if (!stage->gpu)
        return;
    gpu_unpin(stage->gpu, stage->host_params);
    if (stage->copies)
        gpu_unpin(stage->gpu, stage->host_grads);
    memory_free(stage->memory, stage->rows);
    memory_free(stage->memory, stage->grads);
    memory_free(stage->memory, stage->params);
}

Status stage_connect(Stage *stage, Sync *sync, const AdamW *adamw, bool sharded, int64_t rows_elems) {
    stage->sync = sync;
    stage->adamw = adamw;
    stage->sharded = sharded;
    stage->split = rows_elems > 0;
    stage->rows_elems = stage->copies ? rows_elems : 0;
    if (stage->rows_elems == 0)
        return OK;
    stage->rows = memory_alloc(stage->memory, bytes_of(rows_elems));
    return stage->rows ? OK : fault("out of memory on the GPU: rows of the embedding's lookup");
}

/* ---- gradients ---- */

void stage_ready(void *user, int gradient) {
    Stage *stage = user;
    if (!stage->copies) {
        sync_mark_ready(stage->sync, gradient);
        return;
    }
    const Gradient *g = &stage->table->gradients[gradient];
    gpu_copy_out(stage->gpu, stage->host_grads + g->offset, stage->grads + g->offset, bytes_of(g->elems),
                 sync_mark_ready, stage->sync, gradient);
}

SyncLookup stage_lookup(const Stage *stage) {
    SyncLookup lookup = sync_lookup(stage->sync);
    if (lookup.rows && stage->copies)
        lookup.rows = stage->rows;
    return lookup;
}

Status stage_backward_end(Stage *stage) {
    if (!stage->copies)
        return OK;
    SyncLookup lookup = sync_lookup(stage->sync);
    int64_t channels = stage->table->params[0].cols; /* the embedding stands first where it is split */
    if (lookup.rows)
        gpu_copy_out(stage->gpu, lookup.rows, stage->rows, bytes_of(lookup.slots * channels), NULL, NULL, 0);
    return gpu_finish(stage->gpu);
}

void stage_means_in(Stage *stage, const Shard *shard) {
    if (!stage->copies)
        return;
    const Slice all = {0, stage->table->elems};
    const Slice *slices = shard ? shard->slices : &all;
    for (int i = 0; i < (shard ? shard->count : 1); i++)
        gpu_copy_in(stage->gpu, stage->grads + slices[i].start, stage->host_grads + slices[i].start,
                    bytes_of(slices[i].elems));
}

/* ---- parameters ---- */

static void params_in(Stage *stage, Slice slice) {
    gpu_copy_in(stage->gpu, stage->params + slice.start, stage->host_params + slice.start, bytes_of(slice.elems));
    adamw_params_arrived(stage->adamw, stage->params, slice);
}

static void params_arrived(Stage *stage, int gradient) {
    const Gradient *g = &stage->table->gradients[gradient];
    const Slice slice = {g->offset, g->elems};
    if (stage->copies)
        params_in(stage, slice);
    else if (stage->gpu)
        adamw_params_arrived(stage->adamw, stage->params, slice);
}

void stage_need(void *user, int gradient) {
    Stage *stage = user;
    double since_s = clock_s();
    sync_need(stage->sync, gradient);
    if (!stage->sharded)
        return;
    device_waited(stage->device, since_s);
    params_arrived(stage, gradient);
}

void stage_forward_end(Stage *stage) {
    if (stage->split && stage->sharded)
        params_arrived(stage, 0); /* the embedding */
}

static void params_out(Stage *stage, Slice slice) {
    gpu_copy_out(stage->gpu, stage->host_params + slice.start, stage->params + slice.start, bytes_of(slice.elems), NULL,
                 NULL, 0);
}

Status stage_shard_out(Stage *stage, const Shard *shard) {
    for (int i = 0; stage->copies && i < shard->count; i++)
        params_out(stage, shard->slices[i]);
    return stage_check(stage);
}

Status stage_params_whole(Stage *stage) {
    if (!stage->gpu)
        return OK;
    if (stage->sharded && stage->copies)
        return stage_params_in(stage);
    params_out(stage, (Slice){0, stage->table->elems});
    return gpu_finish(stage->gpu);
}

Status stage_params_in(Stage *stage) {
    if (!stage->gpu)
        return OK;
    params_in(stage, (Slice){0, stage->table->elems});
    return gpu_finish(stage->gpu);
}

/* ---- moments ---- */

Status stage_moments_out(Stage *stage, const AdamW *adamw, AdamW *host) {
    *host = *adamw;
    if (!stage->gpu)
        return OK;
    host->m = memory_alloc(&host_memory, bytes_of(adamw->elems));
    host->v = memory_alloc(&host_memory, bytes_of(adamw->elems));
    if (!host->m || !host->v)
        return fault("no memory for a copy of AdamW's moments");
    gpu_copy_out(stage->gpu, host->m, adamw->m, bytes_of(adamw->elems), NULL, NULL, 0);
    gpu_copy_out(stage->gpu, host->v, adamw->v, bytes_of(adamw->elems), NULL, NULL, 0);
    return gpu_finish(stage->gpu);
}

Status stage_moments_in(Stage *stage, AdamW *adamw, const AdamW *host) {
    adamw->step = host->step;
    if (!stage->gpu)
        return OK;
    gpu_copy_in(stage->gpu, adamw->m, host->m, bytes_of(adamw->elems));
    gpu_copy_in(stage->gpu, adamw->v, host->v, bytes_of(adamw->elems));
    return gpu_finish(stage->gpu);
}

void stage_moments_free(Stage *stage, AdamW *host) {
    if (!stage->gpu)
        return;
    memory_free(&host_memory, host->m);
    memory_free(&host_memory, host->v);
}

Status stage_check(const Stage *stage) { return stage->gpu ? gpu_finish(stage->gpu) : OK; }
