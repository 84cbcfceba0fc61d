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
 * A single rank neither copies nor scales, and has no comm thread. Allocates nothing after sync_create. */
#include "comm/bucket.h"
#include "comm/calibrate.h"
#include "comm/internal.h"

#include "base/clock.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* auto: up to these sizes latency decides and tree is used; measured, docs/comm.md */
enum { SMALL_INSIDE_BYTES = 4 << 10, SMALL_BETWEEN_BYTES = 64 << 10 };

struct Sync {
    /* set once */
    Comm *comm;              /* borrowed */
    const ParamTable *table; /* borrowed */
    float *grads;            /* f32[table->elems], borrowed */
    bool overlap;
    Bucket *buckets; /* owned */
    int bucket_count;
    const Collective **collectives; /* of each bucket, owned */
    float *scratch;                 /* owned: enough for every bucket */
    bool calibrated;
    LinkCosts costs;
    char plan[192], links[192];
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a bucket became ready, or one of the flags below changed */
    /* any thread */
    atomic_uchar *marked; /* [gradient_count], owned: in this step */
    atomic_int *missing;  /* [bucket_count], owned: gradients not yet marked */
    double *ready_ms;     /* [gradient_count], owned: written by whoever marks it */
    /* under lock */
    bool released;  /* buckets may leave: from the start with overlap, else from sync_wait on */
    bool cancelled; /* sync_wait found a gradient missing */
    BucketStats *bucket_stats; /* [bucket_count], owned; ready_ms under lock, the rest the comm thread's in its job */
    /* between steps */
    int64_t step; /* syncs begun so far */
    bool begun;
    double begin_s;
    int64_t bytes_intra, bytes_inter; /* the transport's counters at sync_begin */
    SyncStats stats;
    BucketStats *sums; /* [bucket_count], owned: of `measured` steps, the first left out */
    int64_t measured;
};

/* ---- the plan ---- */

static const Collective *choose_collective(const Sync *sync, const CommConfig *config, int64_t elems) {
    const char *name = option_choice(comm_algorithms, config->algorithm);
    int nodes = sync->comm->nodes, ranks = comm_ranks(sync->comm);
    if (strcmp(name, "auto") == 0)
        name = nodes > 1 && nodes < ranks ? "hierarchical"
               : elems * (int64_t)sizeof(float) <= (nodes == 1 ? SMALL_INSIDE_BYTES : SMALL_BETWEEN_BYTES) ? "tree"
               : nodes == 1 ? "reduce_scatter" : "ring";
    if (config->leader && strcmp(name, "hierarchical") == 0)
        name = "leader";
    return collective_find(name);
}

static Status choose_collectives(Sync *sync, const CommConfig *config) {
    const Group *world = &sync->comm->world;
    int64_t most = 0;
    for (int b = 0; b < sync->bucket_count; b++) {
        const Collective *collective = choose_collective(sync, config, sync->buckets[b].elems);
        assert(collective); /* every choice but auto names one */
        if (collective->check)
            TRY(collective->check(world));
        int64_t scratch = collective->scratch_elems(world, sync->buckets[b].elems, NULL);
        most = scratch > most ? scratch : most;
        sync->collectives[b] = collective;
    }
    sync->scratch = memory_alloc(&host_memory, (size_t)most * sizeof(float));
    return sync->scratch ? OK : fault("no memory for %lld values of scratch", (long long)most);
}

static void describe_plan(Sync *sync, const CommConfig *config) {
    int64_t least = INT64_MAX, most = 0;
    for (int b = 0; b < sync->bucket_count; b++) {
        least = sync->buckets[b].elems < least ? sync->buckets[b].elems : least;
        most = sync->buckets[b].elems > most ? sync->buckets[b].elems : most;
    }
    const double mib = sizeof(float) / 1048576.0;
    const Collective *largest = choose_collective(sync, config, most);
    snprintf(sync->plan, sizeof sync->plan, "%s, f32, %d bucket%s of %.3g to %.3g MiB, %s", largest->name,
             sync->bucket_count, sync->bucket_count > 1 ? "s" : "", mib * (double)least, mib * (double)most,
             sync->overlap ? "during backward" : "after backward");
}

/* What must be the same on every rank before the first message. */
static Status compare_plans(Sync *sync, const CommConfig *config) {
    int64_t summary[] = {sync->table->elems, sync->bucket_count, config->bucket_bytes,
                         config->algorithm,  config->leader,     sync->comm->nodes};
    uint64_t hash = comm_hash(summary, sizeof summary);
    for (int b = 0; b < sync->bucket_count; b++)
        hash = hash * 31 + (uint64_t)sync->buckets[b].offset;
    return comm_verify(sync->comm, &hash, sizeof hash, "plan of gradient synchronisation");
}

static Status build(Sync *sync, const CommConfig *config) {
    pthread_mutex_init(&sync->lock, NULL);
    pthread_cond_init(&sync->changed, NULL);
    sync->overlap = config->overlap;
    sync->buckets = bucket_cut(sync->table, config->bucket_bytes, &sync->bucket_count);
    size_t count = (size_t)sync->bucket_count + 1;
    sync->collectives = calloc(count, sizeof *sync->collectives);
    sync->missing = calloc(count, sizeof *sync->missing);
    sync->bucket_stats = calloc(count, sizeof *sync->bucket_stats);
    sync->sums = calloc(count, sizeof *sync->sums);
    sync->ready_ms = calloc((size_t)sync->table->gradient_count + 1, sizeof *sync->ready_ms);
    sync->marked = calloc((size_t)sync->table->gradient_count + 1, sizeof *sync->marked);
    if (!sync->buckets || !sync->collectives || !sync->missing || !sync->bucket_stats || !sync->sums ||
        !sync->marked || !sync->ready_ms)
        return fault("no memory for %d buckets", sync->bucket_count);
    if (comm_ranks(sync->comm) == 1) {
        snprintf(sync->plan, sizeof sync->plan, "none: one rank");
        return OK;
    }
    TRY(choose_collectives(sync, config));
    describe_plan(sync, config);
    return OK;
}

static Status calibrate_job(void *argument) {
    Sync *sync = argument;
    return calibrate(sync->comm->transport, &sync->costs);
}

static void predict(Sync *sync) {
    for (int b = 0; b < sync->bucket_count; b++) {
        int64_t elems = sync->buckets[b].elems;
        sync->bucket_stats[b] =
            (BucketStats){.offset = sync->buckets[b].offset, .elems = elems,
                          .predicted_ms = sync->calibrated ? 1e3 * sync->collectives[b]->predict_s(
                                              &sync->comm->world, elems, &sync->costs) : NAN};
    }
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
    TRY(comm_agree(comm, status));
    if (comm_ranks(comm) == 1)
        return OK;
    TRY(compare_plans(sync, config));
    sync->calibrated = config->calibrate;
    if (config->calibrate) {
        TRY(engine_call(comm->engine, calibrate_job, sync));
        calibrate_text(&sync->costs, sync->links, sizeof sync->links);
    } else {
        snprintf(sync->links, sizeof sync->links, "not measured (comm.calibrate = no)");
    }
    predict(sync);
    return OK;
}

void sync_destroy(Sync *sync) {
    if (!sync)
        return;
    memory_free(&host_memory, sync->scratch);
    free(sync->buckets);
    free(sync->collectives);
    free(sync->missing);
    free(sync->bucket_stats);
    free(sync->marked);
    free(sync->ready_ms);
    free(sync->sums);
    pthread_cond_destroy(&sync->changed);
    pthread_mutex_destroy(&sync->lock);
    free(sync);
}

const char *sync_plan(const Sync *sync) { return sync->plan; }

/* ---- the comm thread ---- */

static double now_ms(const Sync *sync) { return 1e3 * (clock_s() - sync->begin_s); }

/* Sleeps until the bucket may leave. */
static Status wait_for_bucket(Sync *sync, int b) {
    pthread_mutex_lock(&sync->lock);
    while ((!sync->released || atomic_load(&sync->missing[b]) > 0) && !sync->cancelled)
        pthread_cond_wait(&sync->changed, &sync->lock);
    bool cancelled = sync->cancelled;
    pthread_mutex_unlock(&sync->lock);
    return cancelled ? fault("cancelled") : OK;
}

static Status reduce_buckets(void *argument) {
    Sync *sync = argument;
    const Group *world = &sync->comm->world;
    const float scale = 1.0f / (float)world->size;
    for (int b = 0; b < sync->bucket_count; b++) {
        const Bucket *bucket = &sync->buckets[b];
        TRY(wait_for_bucket(sync, b));
        sync->bucket_stats[b].start_ms = now_ms(sync);
        transport_label(world->transport, (MessageLabel){.step = sync->step, .bucket = b});
        Payload payload = {.data = sync->grads + bucket->offset, .elems = bucket->elems, .offset = bucket->offset,
                           .scale = scale, .scratch = sync->scratch};
        TRY(sync->collectives[b]->allreduce(world, &payload));
        sync->bucket_stats[b].done_ms = now_ms(sync);
    }
    transport_label(world->transport, (MessageLabel){.step = sync->step, .bucket = -1});
    return OK;
}

/* ---- the rank's threads ---- */

void sync_begin(Sync *sync) {
    assert(!sync->begun);
    sync->begun = true;
    sync->step++;
    sync->begin_s = clock_s();
    sync->stats = (SyncStats){0};
    for (int g = 0; g < sync->table->gradient_count; g++)
        atomic_store(&sync->marked[g], 0);
    for (int b = 0; b < sync->bucket_count; b++)
        atomic_store(&sync->missing[b], sync->buckets[b].last_gradient - sync->buckets[b].first_gradient + 1);
    if (comm_ranks(sync->comm) == 1)
        return;
    const Transport *transport = sync->comm->transport;
    sync->bytes_intra = transport->bytes_intra;
    sync->bytes_inter = transport->bytes_inter;
    pthread_mutex_lock(&sync->lock);
    sync->released = sync->overlap;
    sync->cancelled = false;
    pthread_mutex_unlock(&sync->lock);
    engine_post(sync->comm->engine, reduce_buckets, sync);
}

/* The first bucket that overlaps the gradient; buckets stand in the order of their gradients. */
static int first_bucket_of(const Sync *sync, int gradient) {
    int low = 0, high = sync->bucket_count - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (sync->buckets[middle].last_gradient < gradient)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void sync_mark_ready(void *user, int gradient) {
    Sync *sync = user;
    assert(sync->begun && gradient >= 0 && gradient < sync->table->gradient_count);
    sync->ready_ms[gradient] = now_ms(sync);
    unsigned char before = atomic_exchange(&sync->marked[gradient], 1);
    assert(!before); /* once per step */
    (void)before;
    int b = first_bucket_of(sync, gradient);
    for (; b < sync->bucket_count && sync->buckets[b].first_gradient <= gradient; b++) {
        if (atomic_fetch_sub(&sync->missing[b], 1) > 1)
            continue;
        pthread_mutex_lock(&sync->lock);
        sync->bucket_stats[b].ready_ms = now_ms(sync);
        pthread_cond_signal(&sync->changed);
        pthread_mutex_unlock(&sync->lock);
    }
}

/* The first gradient that backward did not mark, -1 when all are. */
static int first_unmarked(Sync *sync) {
    for (int g = 0; g < sync->table->gradient_count; g++)
        if (!atomic_load(&sync->marked[g]))
            return g;
    return -1;
}

static Status missing_gradient(const Sync *sync, int gradient) {
    for (int p = 0; p < sync->table->param_count; p++) {
        const Param *param = &sync->table->params[p];
        if (param->offset == sync->table->gradients[gradient].offset)
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
}

static void measure(Sync *sync, double wait_start_ms) {
    SyncStats *stats = &sync->stats;
    for (int b = 0; b < sync->bucket_count; b++) {
        BucketStats *bucket = &sync->bucket_stats[b];
        double exposed_from_ms = bucket->start_ms > wait_start_ms ? bucket->start_ms : wait_start_ms;
        bucket->exposed_ms = bucket->done_ms > exposed_from_ms ? bucket->done_ms - exposed_from_ms : 0;
        stats->comm_ms += bucket->done_ms - bucket->start_ms; /* one at a time: the sum is the union */
        if (sync->step > 1)
            add_to_sums(&sync->sums[b], bucket);
    }
    sync->measured += sync->step > 1;
    stats->comm_exposed_ms = now_ms(sync) - wait_start_ms;
    stats->bytes_intra = sync->comm->transport->bytes_intra - sync->bytes_intra;
    stats->bytes_inter = sync->comm->transport->bytes_inter - sync->bytes_inter;
}

Status sync_wait(Sync *sync) {
    assert(sync->begun);
    sync->begun = false;
    int unmarked = first_unmarked(sync);
    if (comm_ranks(sync->comm) == 1)
        return unmarked < 0 ? OK : missing_gradient(sync, unmarked);
    double wait_start_ms = now_ms(sync);
    pthread_mutex_lock(&sync->lock);
    sync->released = true;
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

SyncStats sync_stats(const Sync *sync) { return sync->stats; }
int sync_bucket_count(const Sync *sync) { return comm_ranks(sync->comm) == 1 ? 0 : sync->bucket_count; }
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
    return mean;
}

double sync_ready_ms(const Sync *sync, int gradient) { return sync->ready_ms[gradient]; }
double sync_begin_s(const Sync *sync) { return sync->begin_s; }
const char *sync_links(const Sync *sync) { return sync->links; }
double sync_cpu_s(const Sync *sync) { return sync->comm->engine ? engine_cpu_s(sync->comm->engine) : 0; }
