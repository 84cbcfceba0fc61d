/* Gradient synchronisation: the comm thread takes bucket after bucket, in the plan's order, while backward goes on.
 *
 *   rank's thread   begin | backward: mark_ready mark_ready ...          | wait .......|
 *   comm thread           | sleeps | bucket 0 | sleeps | 1 | 2 | ... | n-1             |
 *                                                                    exposed: ^^^^^^^^^^
 *
 * A bucket is ready when all gradients that overlap it are marked; marks may come from any thread in any order. The
 * order in which buckets leave never depends on it, so every rank sends the same things in the same order, and the
 * result depends on the plan alone. Without overlap the comm thread starts when sync_wait is called: the same work,
 * all of it exposed.
 *
 * Under the forward pass the comm thread exchanges token ids and gathers sharded parameters, in the order in which
 * forward needs them.
 *
 * A single rank neither copies nor scales, and has no comm thread. A step allocates nothing: sync_create.c has built
 * all that it uses. */
#include "comm/sync_internal.h"

#include "comm/bound.h"
#include "comm/collective/cost.h"

#include "base/clock.h"
#include "base/gpu_range.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Marks of what computing has been asked for; those of buckets are their numbers. */
static int update_mark(const Sync *sync) { return sync->plan.count; }
static int rows_mark(const Sync *sync) { return sync->plan.count + 1; }     /* the lookup's gradient */
static int embedded_mark(const Sync *sync) { return sync->plan.count + 2; } /* forward has read the embedding */

/* The order of buckets under backward: the head's are ready first if the lookup has rows of its own, else last. */
static int reduced_bucket(const Sync *sync, int i) {
    int shift = sync->lookup.count > 0 ? 0 : sync->plan.head_buckets;
    return (i + shift) % sync->plan.count;
}

/* Under forward: from the last bucket to the first, as forward needs them. The embedding's matrix is first of all,
 * unless its rows go ahead; then it is the last, and waits until forward has read them. */
static int gathered_bucket(const Sync *sync, int i) { return reduced_bucket(sync, sync->plan.count - 1 - i); }

/* ---- what buckets should take ---- */

static double predicted_ms(const Sync *sync, const Collective *collective, int64_t elems, const LinkCosts *costs) {
    bool known = sync->calibrated && (!collective->timed || collective == sync->timed);
    return known ? 1e3 * collective->predict_s(&sync->comm->world, elems, costs) : NAN;
}

static double predicted_half_ms(const Sync *sync, const Collective *collective, int64_t elems, bool gather) {
    return sync->calibrated ? 1e3 * collective->predict_half_s(&sync->comm->world, elems, &sync->costs, gather) : NAN;
}

void sync_predict_buckets(Sync *sync) {
    for (int b = 0; b < sync->plan.count; b++) {
        const Bucket *bucket = &sync->plan.buckets[b];
        const Collective *collective = sync->plan.collectives[b];
        BucketStats *stats = &sync->bucket_stats[b];
        *stats = (BucketStats){.offset = bucket->offset, .elems = bucket->elems};
        stats->predicted_ms = sync->setup.sharded ? predicted_half_ms(sync, collective, bucket->elems, false)
                                                  : predicted_ms(sync, collective, bucket->elems, &sync->costs);
        if (sync->setup.sharded)
            stats->gather_predicted_ms = predicted_half_ms(sync, collective, bucket->elems, true);
    }
}

/* The rows are never compressed. When they are gathered, the exchange of token ids is ahead of them: each rank sends
 * its own to every other one, as in reduce_scatter's second half. */
static void predict_rows(Sync *sync, int64_t elems) {
    BucketStats *stats = &sync->bucket_stats[sync->plan.count];
    LinkCosts dense = cost_dense(&sync->costs);
    int64_t ids = (int64_t)(sync->lookup.words * sizeof(uint64_t) / sizeof(float)) * comm_ranks(sync->comm);
    stats->elems = elems;
    stats->predicted_ms = predicted_ms(sync, sync->plan.lookup, elems, &dense);
    stats->gather_predicted_ms = stats->predicted_ms + predicted_half_ms(sync, &collective_reduce_scatter, ids, true);
}

/* ---- the comm thread: under forward ---- */

static double lap_ms(double *since_s) {
    double now_s = clock_s(), ms = 1e3 * (now_s - *since_s);
    *since_s = now_s;
    return ms;
}

static double now_ms(const Sync *sync) { return 1e3 * (clock_s() - sync->begin_s); }

static Payload payload_of(const Sync *sync, int b, float *array) {
    const Bucket *bucket = &sync->plan.buckets[b];
    return (Payload){.data = array + bucket->offset, .elems = bucket->elems, .offset = bucket->offset,
                     .scale = mean_scale(sync), .scratch = sync->scratch};
}

static void set_label(const Sync *sync, int bucket) {
    transport_label(sync->comm->transport, (MessageLabel){.step = sync->step, .bucket = bucket});
}

static void arrived(Sync *sync, atomic_uchar *stale) {
    pthread_mutex_lock(&sync->lock);
    atomic_store(stale, 0);
    pthread_cond_broadcast(&sync->gathered);
    pthread_mutex_unlock(&sync->lock);
}

/* The embedding's rows that this step looks up, ahead of the whole matrix, which only the head needs. */
static Status gather_rows(Sync *sync) {
    Lookup *lookup = &sync->lookup;
    float *matrix = sync->setup.params + lookup->offset;
    lookup_take(lookup, matrix);
    Payload payload = {.data = lookup->rows, .elems = lookup->count * lookup->channels, .scale = 1,
                       .scratch = sync->scratch};
    set_label(sync, sync->plan.count);
    TRY(sync->plan.lookup->allreduce(&sync->comm->world, &payload));
    lookup_put(lookup, matrix);
    TRY(transport_flush(sync->comm->world.transport));
    arrived(sync, &sync->rows_stale);
    return OK;
}

static Status wait_until(Sync *sync, const bool *flag, const atomic_int *missing);

/* A GPU fails behind the comm thread's back: the line tells where. What stands in its lane calls nobody any more. */
static Status at_bucket(const Sync *sync, Status status, int b) {
    char line[1024], bucket[32] = "";
    if (status == OK || !comm_on_gpu(sync->comm))
        return status;
    if (b >= 0)
        snprintf(bucket, sizeof bucket, "bucket %d of ", b);
    snprintf(line, sizeof line, "%s; node %d, %sstep %lld", error_line(), comm_node(sync->comm), bucket,
             (long long)sync->step);
    transport_abandon(sync->comm->device);
    return error_restore(status, line);
}

static Status gather_params(Sync *sync) {
    double start_s = clock_s(), since_s = start_s;
    transport_follow(sync->comm->world.transport, update_mark(sync));
    int count = sync->plan.count, shift = sync->lookup.count > 0 ? 0 : sync->plan.head_buckets;
    if (sync->lookup.count > 0)
        TRY(gather_rows(sync));
    sync->bucket_stats[count].gather_ms += lap_ms(&since_s);
    for (int i = 0; i < count; i++) {
        int b = gathered_bucket(sync, i);
        if (b < sync->plan.head_buckets && sync->lookup.count > 0) {
            TRY(wait_until(sync, &sync->embedded, NULL));
            transport_follow(sync->comm->world.transport, embedded_mark(sync));
        }
        set_label(sync, b);
        Payload payload = payload_of(sync, b, sync->setup.params);
        TRY(sync->plan.collectives[b]->all_gather(&sync->comm->world, &payload));
        TRY(at_bucket(sync, transport_flush(sync->comm->world.transport), b));
        sync->bucket_stats[b].gather_ms = lap_ms(&since_s);
        arrived(sync, &sync->stale[b]);
        if (i + 1 == shift) /* the whole matrix instead of its rows */
            arrived(sync, &sync->rows_stale);
    }
    set_label(sync, -1);
    sync->gather_ms += 1e3 * (clock_s() - start_s);
    return OK;
}

static Status forward_job(void *argument) {
    Sync *sync = argument;
    double since_s = clock_s();
    Status status = sync->lookup.vocab ? lookup_exchange(&sync->lookup, sync->comm) : OK;
    sync->bucket_stats[sync->plan.count].gather_ms = lap_ms(&since_s);
    if (status == OK && sync->dirty)
        status = gather_params(sync);
    pthread_mutex_lock(&sync->lock);
    sync->gather_failed = status != OK;
    pthread_cond_broadcast(&sync->gathered);
    pthread_mutex_unlock(&sync->lock);
    return status;
}

/* ---- the comm thread: under backward ---- */

/* Sleeps until the flag is set, which is under lock, and nothing is missing. */
static Status wait_until(Sync *sync, const bool *flag, const atomic_int *missing) {
    pthread_mutex_lock(&sync->lock);
    while ((!*flag || (missing && atomic_load(missing) > 0)) && !sync->cancelled)
        pthread_cond_wait(&sync->changed, &sync->lock);
    bool cancelled = sync->cancelled;
    pthread_mutex_unlock(&sync->lock);
    return cancelled ? fault("cancelled") : OK;
}

static void stamp_start(void *user, int b) {
    Sync *sync = user;
    sync->bucket_stats[b].start_ms = now_ms(sync);
    atomic_store(&sync->current, b);
}
static void stamp_done(void *user, int b) { ((Sync *)user)->bucket_stats[b].done_ms = now_ms(user); }

static Status reduce_bucket(Sync *sync, int b) {
    Transport *transport = sync->comm->world.transport;
    const Collective *collective = sync->plan.collectives[b];
    Payload payload = payload_of(sync, b, sync->setup.grads);
    if (sync->codec && collective->compresses && sync->step > sync->config.warmup_steps)
        payload.codec = sync->codec;
    TRY(wait_until(sync, &sync->released, &sync->missing[b]));
    transport_follow(transport, b);
    gpu_range_begin("bucket", b);
    transport_call(transport, stamp_start, sync, b);
    payload.phases = &sync->bucket_stats[b].phases;
    *payload.phases = (Phases){0};
    set_label(sync, b);
    TRY((sync->setup.sharded ? collective->reduce_scatter : collective->allreduce)(&sync->comm->world, &payload));
    transport_call(transport, stamp_done, sync, b);
    gpu_range_end();
    return OK;
}

/* The rows are small, and every rank adds them all, also where the matrix' gradient is sharded. */
static Status reduce_lookup(Sync *sync) {
    BucketStats *stats = &sync->bucket_stats[sync->plan.count];
    Transport *transport = sync->comm->world.transport;
    Lookup *lookup = &sync->lookup;
    int64_t elems = lookup->count * lookup->channels;
    predict_rows(sync, elems);
    TRY(wait_until(sync, &sync->waited, NULL));
    transport_follow(transport, rows_mark(sync));
    transport_call(transport, stamp_start, sync, sync->plan.count);
    set_label(sync, sync->plan.count);
    Payload payload = {.data = lookup->rows, .elems = elems, .scale = mean_scale(sync), .scratch = sync->scratch,
                       .phases = &stats->phases};
    TRY(sync->plan.lookup->allreduce(&sync->comm->world, &payload));
    lookup_add(lookup, sync->setup.grads + lookup->offset);
    transport_call(transport, stamp_done, sync, sync->plan.count);
    return OK;
}

static Status backward_job(void *argument) {
    Sync *sync = argument;
    for (int i = 0; i < sync->plan.count; i++)
        TRY(reduce_bucket(sync, reduced_bucket(sync, i)));
    if (sync->lookup.count > 0)
        TRY(reduce_lookup(sync));
    TRY(transport_flush(sync->comm->world.transport));
    set_label(sync, -1);
    return OK;
}

static Status watched_backward_job(void *argument) {
    Sync *sync = argument;
    atomic_store(&sync->current, -1);
    Status status = backward_job(sync);
    return at_bucket(sync, status, atomic_load(&sync->current));
}

/* ---- the rank's threads: forward ---- */

/* Sent by this rank so far. */
static void sent_bytes(const Sync *sync, int64_t *intra, int64_t *inter) {
    const Transport *host = sync->comm->transport, *device = sync->comm->device;
    *intra = host->bytes_intra + (device ? device->bytes_intra : 0);
    *inter = host->bytes_inter + (device ? device->bytes_inter : 0);
}

static void count_bytes(Sync *sync) { sent_bytes(sync, &sync->bytes_intra, &sync->bytes_inter); }

void sync_forward_begin(Sync *sync, const int *tokens, int64_t count) {
    assert(!sync->begun && !sync->forward);
    sync->need_ms = sync->gather_ms = 0;
    if (alone(sync))
        return;
    sync->forward = true;
    sync->forward_s = clock_s();
    count_bytes(sync);
    for (int b = 0; b <= sync->plan.count; b++)
        sync->bucket_stats[b].gather_ms = 0, sync->bucket_stats[b].needed_ms = -1;
    for (int b = 0; b < sync->plan.count; b++)
        atomic_store(&sync->stale[b], sync->dirty);
    atomic_store(&sync->rows_stale, sync->dirty);
    pthread_mutex_lock(&sync->lock);
    sync->embedded = sync->cancelled = false;
    pthread_mutex_unlock(&sync->lock);
    if (sync->lookup.vocab)
        lookup_mark(&sync->lookup, tokens, count);
    engine_post(sync->comm->engine, forward_job, sync);
}

/* The first bucket that overlaps the gradient; buckets stand in the order of their gradients. */
static int first_bucket_of(const Sync *sync, int gradient) {
    int low = 0, high = sync->plan.count - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (sync->plan.buckets[middle].last_gradient < gradient)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void has_embedded(Sync *sync) {
    pthread_mutex_lock(&sync->lock);
    if (!sync->embedded) /* later marks would stand for more of forward */
        transport_mark(sync->comm->world.transport, embedded_mark(sync));
    sync->embedded = true;
    pthread_cond_signal(&sync->changed);
    pthread_mutex_unlock(&sync->lock);
}

static void wait_for_arrival(Sync *sync, const atomic_uchar *stale) {
    if (!atomic_load(stale))
        return;
    double start_s = clock_s();
    pthread_mutex_lock(&sync->lock);
    while (atomic_load(stale) && !sync->gather_failed)
        pthread_cond_wait(&sync->gathered, &sync->lock);
    sync->need_ms += 1e3 * (clock_s() - start_s);
    pthread_mutex_unlock(&sync->lock);
}

/* Once in a forward pass. */
static void stamp_need(Sync *sync, int b) {
    double *needed_ms = &sync->bucket_stats[b].needed_ms;
    if (sync->forward && *needed_ms < 0)
        *needed_ms = 1e3 * (clock_s() - sync->forward_s) - sync->need_ms;
}

void sync_need(void *user, int gradient) {
    Sync *sync = user;
    if (gradient == 0 && sync->setup.vocab) {
        stamp_need(sync, sync->plan.count);
        wait_for_arrival(sync, &sync->rows_stale);
        return;
    }
    if (sync->forward && sync->setup.table->gradients[gradient].layer >= 0) /* behind the embedding */
        has_embedded(sync);
    int b = first_bucket_of(sync, gradient);
    for (; b < sync->plan.count && sync->plan.buckets[b].first_gradient <= gradient; b++) {
        stamp_need(sync, b);
        wait_for_arrival(sync, &sync->stale[b]);
    }
}

Status sync_forward_end(Sync *sync) {
    if (!sync->forward)
        return OK;
    for (int b = 0; b <= sync->plan.count; b++)
        stamp_need(sync, b);
    sync->forward = false;
    has_embedded(sync);
    double since_s = clock_s();
    TRY(engine_wait(sync->comm->engine));
    sync->need_ms += lap_ms(&since_s);
    sync->dirty = false;
    return OK;
}

SyncLookup sync_lookup(const Sync *sync) {
    const Lookup *lookup = &sync->lookup;
    return lookup->count > 0 ? (SyncLookup){lookup->rows, (int)lookup->count, lookup->slot_of_token} : (SyncLookup){0};
}

static Status gather_params_job(void *sync) { return gather_params(sync); }

Status sync_gather_params(Sync *sync) {
    assert(!sync->begun && !sync->forward);
    if (!sync->dirty || alone(sync))
        return OK;
    TRY(engine_call(sync->comm->engine, gather_params_job, sync));
    sync->dirty = false;
    return OK;
}

/* ---- the rank's threads: backward ---- */

void sync_begin(Sync *sync) {
    assert(!sync->begun && !sync->forward);
    sync->begun = true;
    sync->step++;
    sync->begin_s = clock_s();
    sync->stats = (SyncStats){0};
    for (int g = 0; g < sync->setup.table->gradient_count; g++)
        atomic_store(&sync->marked[g], 0);
    for (int b = 0; b < sync->plan.count; b++)
        atomic_store(&sync->missing[b],
                     sync->plan.buckets[b].last_gradient - sync->plan.buckets[b].first_gradient + 1);
    if (alone(sync))
        return;
    if (!sync->lookup.vocab && !sync->setup.sharded)
        count_bytes(sync); /* nobody has called sync_forward_begin */
    pthread_mutex_lock(&sync->lock);
    sync->released = sync->config.overlap;
    sync->waited = sync->cancelled = false;
    pthread_mutex_unlock(&sync->lock);
    engine_post(sync->comm->engine, watched_backward_job, sync);
}

/* Backward has just finished that gradient: loop.faults may ask for a NaN in the first one. */
static void spoil(Sync *sync, int gradient) {
    const Transport *transport = sync->comm->world.transport;
    if (gradient == 0 && transport->spoils && transport->spoils(transport, sync->step))
        sync->setup.grads[0] = NAN;
}

void sync_mark_ready(void *user, int gradient) {
    Sync *sync = user;
    assert(sync->begun && gradient >= 0 && gradient < sync->setup.table->gradient_count);
    spoil(sync, gradient);
    transport_stamp_computing(sync->comm->world.transport, &sync->ready_s[gradient]);
    unsigned char before = atomic_exchange(&sync->marked[gradient], 1);
    assert(!before); /* once per step */
    (void)before;
    int b = first_bucket_of(sync, gradient);
    for (; b < sync->plan.count && sync->plan.buckets[b].first_gradient <= gradient; b++) {
        transport_mark(sync->comm->world.transport, b);
        if (atomic_fetch_sub(&sync->missing[b], 1) > 1)
            continue;
        pthread_mutex_lock(&sync->lock);
        pthread_cond_signal(&sync->changed);
        pthread_mutex_unlock(&sync->lock);
    }
}

/* The first gradient that backward did not mark, -1 when all are. */
static int first_unmarked(Sync *sync) {
    for (int g = 0; g < sync->setup.table->gradient_count; g++)
        if (!atomic_load(&sync->marked[g]))
            return g;
    return -1;
}

static Status missing_gradient(const Sync *sync, int gradient) {
    for (int p = 0; p < sync->setup.table->param_count; p++) {
        const Param *param = &sync->setup.table->params[p];
        if (param->offset == sync->setup.table->gradients[gradient].offset)
            return fault("backward did not finish the gradient of %s, layer %d (sync_mark_ready was not called)",
                         param->name, param->layer);
    }
    return fault("backward did not finish gradient %d", gradient);
}

static void add_to_sums(BucketStats *sum, const BucketStats *bucket) {
    sum->ready_ms += bucket->ready_ms;
    sum->start_ms += bucket->start_ms;
    sum->done_ms += bucket->done_ms;
    sum->exposed_ms += bucket->exposed_ms;
    sum->needed_ms += bucket->needed_ms;
    sum->gather_ms += bucket->gather_ms;
    sum->elems += bucket->elems;
}

/* When the last of its gradients was marked. */
static double bucket_ready_ms(const Sync *sync, const Bucket *bucket) {
    double ready_ms = sync_ready_ms(sync, bucket->first_gradient);
    for (int g = bucket->first_gradient + 1; g <= bucket->last_gradient; g++)
        ready_ms = fmax(ready_ms, sync_ready_ms(sync, g));
    return ready_ms;
}

static void measure(Sync *sync, double wait_start_ms) {
    SyncStats *stats = &sync->stats;
    for (int b = 0; b < sync_bucket_count(sync); b++) {
        BucketStats *bucket = &sync->bucket_stats[b];
        bucket->ready_ms = b < sync->plan.count ? bucket_ready_ms(sync, &sync->plan.buckets[b])
                                                : sync_ready_ms(sync, sync->setup.table->gradient_count);
        double exposed_from_ms = bucket->start_ms > wait_start_ms ? bucket->start_ms : wait_start_ms;
        bucket->exposed_ms = bucket->done_ms > exposed_from_ms ? bucket->done_ms - exposed_from_ms : 0;
        stats->comm_ms += bucket->done_ms - bucket->start_ms; /* one at a time: the sum is the union */
        if (sync->step > 1)
            add_to_sums(&sync->sums[b], bucket);
    }
    if (sync->step > 1) {
        double forward_ms = sync->forward_s > 0 ? 1e3 * (sync->begin_s - sync->forward_s) - sync->need_ms : 0;
        sync->compute_ms += forward_ms + wait_start_ms;
        sync->backward_ms += wait_start_ms;
        sync->measured++;
    }
    sync->forward_s = 0;
    stats->comm_exposed_ms = now_ms(sync) - wait_start_ms;
    if (sync->gather_ms > 0) {
        stats->comm_ms += sync->gather_ms;
        stats->gather_exposed_ms = sync->need_ms;
        stats->comm_exposed_ms += sync->need_ms;
    }
    double error = sync->codec ? codec_measure(sync->codec) : 0;
    stats->compress_error = error > 0 ? sqrt(error) : 0;
    sent_bytes(sync, &stats->bytes_intra, &stats->bytes_inter);
    stats->bytes_intra -= sync->bytes_intra;
    stats->bytes_inter -= sync->bytes_inter;
}

Status sync_wait(Sync *sync) {
    assert(sync->begun);
    sync->begun = false;
    int unmarked = first_unmarked(sync);
    if (alone(sync))
        return unmarked < 0 ? OK : missing_gradient(sync, unmarked);
    double wait_start_ms = now_ms(sync);
    if (sync->lookup.count > 0)
        transport_stamp_computing(sync->comm->world.transport, &sync->ready_s[sync->setup.table->gradient_count]);
    transport_mark(sync->comm->world.transport, rows_mark(sync));
    pthread_mutex_lock(&sync->lock);
    sync->released = sync->waited = true;
    sync->cancelled = unmarked >= 0;
    pthread_cond_signal(&sync->changed);
    pthread_mutex_unlock(&sync->lock);
    Status status = engine_wait(sync->comm->engine);
    if (unmarked >= 0)
        return missing_gradient(sync, unmarked);
    if (status == OK)
        measure(sync, wait_start_ms);
    return status;
}

void sync_commit(Sync *sync) {
    assert(!sync->begun);
    sync->dirty = sync->setup.sharded;
    if (sync->dirty)
        transport_mark(sync->comm->world.transport, update_mark(sync));
    if (!sync->codec || sync->step <= sync->config.warmup_steps)
        return;
    codec_commit(sync->codec);
    if (sync->copied)
        codec_forget_new(sync->codec);
    sync->copied = false;
}

/* ---- statistics ---- */

SyncStats sync_stats(const Sync *sync) { return sync->stats; }
int sync_bucket_count(const Sync *sync) {
    return alone(sync) ? 0 : sync->plan.count + (sync->lookup.vocab > 0);
}
BucketStats sync_bucket(const Sync *sync, int bucket) { return sync->bucket_stats[bucket]; }

BucketStats sync_bucket_mean(const Sync *sync, int b) {
    BucketStats mean = sync->bucket_stats[b], sum = sync->sums[b];
    double steps = (double)sync->measured;
    if (sync->measured == 0)
        return mean;
    mean.ready_ms = sum.ready_ms / steps;
    mean.start_ms = sum.start_ms / steps;
    mean.done_ms = sum.done_ms / steps;
    mean.exposed_ms = sum.exposed_ms / steps;
    mean.needed_ms = sum.needed_ms / steps;
    mean.gather_ms = sum.gather_ms / steps;
    mean.elems = sum.elems / sync->measured; /* the lookup's rows differ from step to step */
    return mean;
}

double sync_ready_ms(const Sync *sync, int gradient) { return 1e3 * (sync->ready_s[gradient] - sync->begin_s); }
double sync_begin_s(const Sync *sync) { return sync->begin_s; }

/* ---- what a step should take ---- */

static double gather_exposed_ms(const Sync *sync, BoundArrival *arrivals) {
    int count = 0, head = sync->lookup.count > 0 ? 0 : sync->plan.head_buckets; /* those that the lookup reads whole */
    BucketStats rows = sync_bucket_mean(sync, sync->plan.count);
    if (sync->lookup.vocab)
        arrivals[count++] = (BoundArrival){.need_ms = rows.needed_ms, .duration_ms = rows.gather_predicted_ms};
    for (int i = 0; i < sync->plan.count; i++) {
        int b = gathered_bucket(sync, i);
        BucketStats bucket = sync_bucket_mean(sync, b);
        arrivals[count++] = (BoundArrival){.need_ms = b < head ? rows.needed_ms : bucket.needed_ms,
                                           .duration_ms = bucket.gather_predicted_ms};
    }
    return bound_gather_ms(arrivals, count);
}

static double reduce_exposed_ms(const Sync *sync, BoundBucket *buckets, double backward_ms) {
    int count = sync_bucket_count(sync);
    for (int i = 0; i < count; i++) {
        BucketStats bucket = sync_bucket_mean(sync, i < sync->plan.count ? reduced_bucket(sync, i) : i);
        buckets[i] = (BoundBucket){.ready_ms = sync->config.overlap ? bucket.ready_ms : backward_ms,
                                   .duration_ms = bucket.predicted_ms};
    }
    return bound_exposed_ms(buckets, count, backward_ms);
}

SyncPrediction sync_predict(const Sync *sync) {
    SyncPrediction prediction = {NAN, NAN, NAN};
    size_t count = (size_t)sync->plan.count + 1;
    BoundBucket *buckets = calloc(count, sizeof *buckets);
    BoundArrival *arrivals = calloc(count, sizeof *arrivals);
    if (sync->calibrated && sync->measured > 0 && buckets && arrivals) {
        double steps = (double)sync->measured;
        prediction.compute_ms = sync->compute_ms / steps;
        prediction.gather_exposed_ms = sync->setup.sharded ? gather_exposed_ms(sync, arrivals) : 0;
        prediction.reduce_exposed_ms = reduce_exposed_ms(sync, buckets, sync->backward_ms / steps);
    }
    free(arrivals);
    free(buckets);
    return prediction;
}
