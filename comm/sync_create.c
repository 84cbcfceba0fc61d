/* The life of a Sync but for its steps: created, outlined before there are arrays, given another plan, its residuals
 * read and written for checkpoints, destroyed.
 *
 *   sync_create    build | scratch, residuals on a GPU | agree | compare plans | lookup | calibrate | predict
 *   sync_outline   build | tell | destroy
 *   sync_replan    copy residuals | another plan | scratch | agree | predict | compare plans
 *
 * Build is all that a rank can do alone and without large arrays, so an outline is made by the code that will make what
 * it outlines. What fails ahead of agree is one outcome for all ranks, and no rank waits for a message of one that has
 * given up.
 *
 * Whatever sends messages runs in the comm thread here too, hence the jobs. What a codec has still to feed back is on
 * the rank that encoded it alone until residuals are copied: only then can a checkpoint hold it, and another plan
 * encode it elsewhere. */
#include "comm/sync_internal.h"

#include "comm/calibrate_gpu.h"
#include "comm/residual.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- building ---- */

static void free_planned(Sync *sync) {
    plan_destroy(&sync->plan);
    memory_free(sync->comm->scratch_memory, sync->scratch);
    free(sync->missing);
    free(sync->stale);
    free(sync->bucket_stats);
    free(sync->sums);
}

static size_t scratch_bytes(const Sync *sync) { return ((size_t)sync->plan.scratch_elems + 1) * sizeof(float); }

/* What depends on the plan, without its scratch. */
static Status build_plan(Sync *sync) {
    TRY(plan_create(&sync->plan, sync->comm, &sync->config, &sync->setup, sync->codec));
    size_t count = (size_t)sync->plan.count + 1;
    sync->missing = calloc(count, sizeof *sync->missing);
    sync->stale = calloc(count, sizeof *sync->stale);
    sync->bucket_stats = calloc(count, sizeof *sync->bucket_stats);
    sync->sums = calloc(count, sizeof *sync->sums);
    sync->measured = 0;
    sync->compute_ms = sync->backward_ms = 0;
    if (!sync->missing || !sync->stale || !sync->bucket_stats || !sync->sums)
        return fault("no memory on the host for %d buckets", sync->plan.count);
    return OK;
}

static Status take_scratch(Sync *sync) {
    sync->scratch = memory_alloc(sync->comm->scratch_memory, scratch_bytes(sync));
    return sync->scratch ? OK : fault("out of memory: gradients on their way take %.2f GB",
                                      1e-9 * (double)scratch_bytes(sync));
}

static Status build_codec(Sync *sync) {
    const CommConfig *config = &sync->config;
    const Compressor *compressor = plan_compressor(config);
    CompressorOptions options = {.density = config->topk_density, .bf16_values = config->topk_values == 1};
    bool ring = config->requantise != 0;
    if (!plan_compresses(sync->comm, config))
        return OK;
    return codec_create(&sync->codec, sync->setup.table, compressor, &options, config->compress_scope == 1,
                        config->error_feedback && !ring);
}

/* All slices of all buckets that a rank owns. */
static int64_t owned_slices(const Sync *sync, int rank, Slice *slices) {
    int64_t count = 0;
    for (int b = 0; b < sync->plan.count; b++) {
        const Bucket *bucket = &sync->plan.buckets[b];
        Slice *at = slices ? slices + count : NULL;
        int64_t more = sync->plan.collectives[b]->owned(&sync->comm->world, rank, bucket->offset, bucket->elems, at);
        for (int64_t i = 0; at && i < more; i++)
            at[i].start += bucket->offset;
        count += more;
    }
    return count;
}

static Status build_shards(Sync *sync) {
    if (!sync->setup.sharded)
        return OK;
    int ranks = comm_ranks(sync->comm);
    sync->shards = calloc((size_t)ranks, sizeof *sync->shards);
    for (int rank = 0; sync->shards && rank < ranks; rank++) {
        int64_t count = alone(sync) ? 1 : owned_slices(sync, rank, NULL);
        Slice *slices = calloc((size_t)count + 1, sizeof *slices);
        sync->shards[rank] = (Shard){slices, (int)count};
        if (!slices)
            return fault("no memory for the owners of %d buckets", sync->plan.count);
        slices[0] = (Slice){0, sync->setup.table->elems};
        if (!alone(sync))
            owned_slices(sync, rank, slices);
    }
    return sync->shards ? OK : fault("no memory for %d shards", ranks);
}

/* All but large arrays. */
static Status build(Sync *sync) {
    pthread_mutex_init(&sync->lock, NULL);
    pthread_cond_init(&sync->changed, NULL);
    pthread_cond_init(&sync->gathered, NULL);
    size_t gradients = (size_t)sync->setup.table->gradient_count + 1;
    sync->ready_s = calloc(gradients, sizeof *sync->ready_s);
    sync->marked = calloc(gradients, sizeof *sync->marked);
    if (!sync->marked || !sync->ready_s)
        return fault("no memory for %d gradients", sync->setup.table->gradient_count);
    TRY(build_codec(sync));
    TRY(build_plan(sync));
    return build_shards(sync);
}

/* Of the plan's collectives those that no formula predicts: one at most. On the gradient, before it holds any. */
static Status time_plan(Sync *sync) {
    int64_t elems = 0;
    for (int b = 0; b < sync->plan.count; b++)
        if (sync->plan.collectives[b]->timed && sync->plan.buckets[b].elems > elems) {
            sync->timed = sync->plan.collectives[b];
            elems = sync->plan.buckets[b].elems;
        }
    Payload array = {.data = sync->setup.grads, .elems = sync->setup.table->elems, .scale = mean_scale(sync),
                     .scratch = sync->scratch};
    return sync->timed ? calibrate_collective(&sync->comm->world, sync->timed, &array, elems, &sync->costs) : OK;
}

static Status take_memory(Sync *sync) {
    if (sync->codec && comm_on_gpu(sync->comm))
        TRY(codec_use_gpu(sync->codec, sync->comm->gpu, sync->comm->device->lane));
    return take_scratch(sync);
}

static Status calibrate_job(void *argument) {
    Sync *sync = argument;
    int64_t bytes = sync->setup.table->elems * (int64_t)sizeof(float);
    if (comm_on_gpu(sync->comm))
        return calibrate_gpu(sync->comm, sync->codec, bytes, &sync->costs);
    TRY(calibrate(sync->comm->transport, sync->codec, bytes, &sync->costs));
    return time_plan(sync);
}

/* ---- creating ---- */

/* What must be the same on every rank before the first message. */
static Status compare_plans(Sync *sync) {
    return comm_verify(sync->comm, &sync->plan.hash, sizeof sync->plan.hash, "plan of gradient synchronisation");
}

static Status measure_links(Sync *sync) {
    sync->calibrated = sync->config.calibrate;
    if (!sync->calibrated) {
        snprintf(sync->links, sizeof sync->links, "not measured (comm.calibrate = no)");
        return OK;
    }
    TRY(engine_call(sync->comm->engine, calibrate_job, sync));
    calibrate_text(&sync->costs, sync->links, sizeof sync->links);
    return OK;
}

Status sync_check(const Comm *comm, const CommConfig *config, bool sharded) {
    return plan_check(comm, config, sharded);
}

static Status begin_create(Sync **result, Comm *comm, const CommConfig *config, const SyncSetup *setup) {
    Sync *sync = *result = calloc(1, sizeof *sync);
    if (!sync)
        return fault("no memory for gradient synchronisation");
    sync->comm = comm;
    sync->setup = *setup;
    sync->config = *config;
    return build(sync);
}

Status sync_create(Sync **result, Comm *comm, const CommConfig *config, const SyncSetup *setup) {
    Status status = begin_create(result, comm, config, setup);
    Sync *sync = *result;
    if (status == OK)
        status = take_memory(sync);
    TRY(comm_agree(comm, status));
    if (alone(sync))
        return OK;
    TRY(compare_plans(sync));
    if (setup->vocab) /* its rows are born in shared memory: every rank is here */
        TRY(comm_agree(comm, lookup_create(&sync->lookup, comm, setup, sync_shard(sync, comm_rank(comm)))));
    TRY(measure_links(sync));
    sync_predict_buckets(sync);
    return OK;
}

/* The host's residuals come as they are first written, current ones and new ones: of the terms that this rank encodes,
 * on each hop, and of the sums that it owns. */
static size_t host_residual_bytes(const Sync *sync) {
    int64_t elems = sync->setup.table->elems, inside = sync->config.leader ? 1 : comm_local_ranks(sync->comm);
    int64_t between = elems / inside, owned = between / comm_nodes(sync->comm);
    int64_t terms = between + (sync->config.compress_scope == 1 && inside > 1 ? elems : 0);
    return 2 * (size_t)(terms + owned) * sizeof(float);
}

static SyncOutline outline_of(Sync *sync) {
    SyncOutline outline = {.bytes = scratch_bytes(sync)};
    if (sync->codec && comm_on_gpu(sync->comm))
        outline.bytes += codec_gpu_bytes(sync->codec);
    else if (sync->codec && sync->codec->error_feedback)
        outline.bytes += host_residual_bytes(sync);
    if (sync->shards) { /* the caller's from now on */
        outline.shard = sync->shards[comm_rank(sync->comm)];
        sync->shards[comm_rank(sync->comm)] = (Shard){0};
    }
    snprintf(outline.plan, sizeof outline.plan, "%s", sync->plan.text);
    snprintf(outline.warning, sizeof outline.warning, "%s", sync->plan.warning);
    return outline;
}

Status sync_outline(SyncOutline *outline, Comm *comm, const CommConfig *config, const SyncSetup *setup) {
    Sync *sync;
    Status status = begin_create(&sync, comm, config, setup);
    *outline = status == OK ? outline_of(sync) : (SyncOutline){0};
    sync_destroy(sync);
    return status;
}

/* A rank gives up in the middle of a step: its comm thread ends with the bucket it is at. The line of why stays. */
static void leave_step(Sync *sync) {
    char line[1024];
    if (alone(sync) || !(sync->begun || sync->forward))
        return;
    snprintf(line, sizeof line, "%s", error_line());
    pthread_mutex_lock(&sync->lock);
    sync->cancelled = true;
    pthread_cond_signal(&sync->changed);
    pthread_mutex_unlock(&sync->lock);
    error_restore(engine_wait(sync->comm->engine), line);
}

void sync_destroy(Sync *sync) {
    if (!sync)
        return;
    leave_step(sync);
    for (int rank = 0; sync->shards && rank < comm_ranks(sync->comm); rank++)
        free((Slice *)sync->shards[rank].slices);
    free(sync->shards);
    lookup_destroy(&sync->lookup);
    codec_destroy(sync->codec);
    free_planned(sync);
    free(sync->marked);
    free(sync->ready_s);
    pthread_cond_destroy(&sync->gathered);
    pthread_cond_destroy(&sync->changed);
    pthread_mutex_destroy(&sync->lock);
    free(sync);
}

const char *sync_plan(const Sync *sync) { return sync->plan.text; }
const char *sync_links(const Sync *sync) { return sync->links; }
const Shard *sync_shard(const Sync *sync, int rank) { return sync->shards ? &sync->shards[rank] : NULL; }
void sync_resume(Sync *sync, int64_t step) { sync->step = step; }

/* ---- residuals ---- */

typedef struct ResidualJob {
    Sync *sync;
    int array;
    float *data;
} ResidualJob;

static Status gather_residuals_job(void *argument) {
    Sync *sync = argument;
    TRY(codec_hold(sync->codec));
    TRY(residual_gather(sync->comm, sync->codec));
    return codec_release(sync->codec);
}

/* Idempotent until a step is committed. */
static Status copy_residuals(Sync *sync) {
    if (!sync->codec || sync->copied)
        return OK;
    TRY(engine_call(sync->comm->engine, gather_residuals_job, sync));
    codec_forget_new(sync->codec);
    sync->copied = true;
    return OK;
}

Status sync_replan(Sync *sync, const CommConfig *config) {
    assert(!sync->begun && !sync->forward && !sync->setup.sharded);
    assert(config->compress == sync->config.compress && config->requantise == sync->config.requantise);
    if (!alone(sync))
        TRY(copy_residuals(sync));
    free_planned(sync);
    sync->scratch = NULL;
    sync->missing = NULL;
    sync->stale = NULL;
    sync->bucket_stats = sync->sums = NULL;
    sync->config = *config;
    Status status = build_plan(sync);
    TRY(comm_agree(sync->comm, status == OK ? take_scratch(sync) : status));
    if (alone(sync))
        return OK;
    sync_predict_buckets(sync);
    return compare_plans(sync);
}

int sync_residuals(const Sync *sync) { return sync->codec ? residual_arrays(sync->comm, sync->codec) : 0; }

const char *sync_residual_name(const Sync *sync, int i, char name[32]) {
    ResidualArray array = residual_array(sync->comm, sync->codec, i);
    memcpy(name, array.name, 32);
    return name;
}

static Status fetch_job(void *argument) {
    ResidualJob *job = argument;
    Codec *codec = job->sync->codec;
    TRY(codec_hold(codec));
    TRY(residual_fetch(job->sync->comm, codec, job->array, job->data));
    return codec_release(codec);
}

Status sync_residual_fetch(Sync *sync, int i, float *data) {
    TRY(copy_residuals(sync));
    return engine_call(sync->comm->engine, fetch_job, &(ResidualJob){sync, i, data});
}

static Status restore_job(void *argument) {
    ResidualJob *job = argument;
    Codec *codec = job->sync->codec;
    TRY(codec_hold(codec));
    TRY(residual_restore(job->sync->comm, codec, job->array, job->data));
    return codec_release(codec);
}

Status sync_residual_restore(Sync *sync, int i, const float *data) {
    sync->copied = true;
    return engine_call(sync->comm->engine, restore_job, &(ResidualJob){sync, i, (float *)data});
}
