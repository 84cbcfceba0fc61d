/* What the files of the sync share: sync.c, the steps, and sync_create.c, its life between them. */
#ifndef COMM_SYNC_INTERNAL_H
#define COMM_SYNC_INTERNAL_H

#include "comm/calibrate.h"
#include "comm/lookup.h"
#include "comm/plan.h"

#include <pthread.h>
#include <stdatomic.h>

struct Sync {
    /* set once */
    Comm *comm; /* borrowed */
    SyncSetup setup;
    CommConfig config;
    Codec *codec;  /* owned; NULL without compression */
    Lookup lookup; /* vocab 0: the embedding has one gradient */
    bool calibrated;
    LinkCosts costs;
    const Collective *timed; /* what costs.timed_s is of, or NULL */
    char links[256];
    Shard *shards; /* [ranks], owned; NULL unless sharded */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* a bucket became ready, or one of the flags below changed */
    pthread_cond_t gathered; /* a bucket's parameters arrived, or gathering failed */
    /* set by a plan, between steps */
    Plan plan;
    float *scratch; /* owned: enough for every bucket */
    /* any thread */
    atomic_uchar *marked; /* [gradient_count], owned: in this step */
    atomic_int *missing;  /* [plan.count], owned: gradients not yet marked */
    atomic_uchar *stale;  /* [plan.count], owned: parameters on their way */
    atomic_uchar rows_stale; /* the embedding's rows of this step are on their way */
    double *ready_s;      /* [gradient_count + 1], owned: stamped by whoever marks it; the last: by sync_wait */
    atomic_int current;   /* the bucket that was begun last in this step, -1: none yet */
    /* under lock */
    bool released;  /* buckets may leave: from the start with overlap, else from sync_wait on */
    bool waited;    /* backward is over: the lookup's rows may leave */
    bool cancelled; /* sync_wait found a gradient missing */
    bool gather_failed;
    bool embedded; /* forward has read the embedding's rows: peers may write the matrix */
    double need_ms;            /* sync_need and sync_forward_end waited so long, in this step */
    BucketStats *bucket_stats; /* [plan.count + 1], owned; the comm thread's in its job */
    /* between steps */
    int64_t step; /* syncs begun so far */
    bool forward, begun; /* a begin waits for its end */
    bool dirty;          /* sharded parameters were updated and not gathered */
    bool copied;         /* residuals are where other ranks have them too */
    double begin_s, gather_ms;
    double forward_s;            /* sync_forward_begin was called; 0: it was not, in this step */
    int64_t bytes_intra, bytes_inter; /* the transport's counters when the step began */
    SyncStats stats;
    BucketStats *sums; /* [plan.count + 1], owned: of `measured` steps, the first left out */
    double compute_ms, backward_ms; /* of those steps too: without waiting */
    int64_t measured;
};

static inline float mean_scale(const Sync *sync) { return 1.0f / (float)comm_ranks(sync->comm); }

static inline bool alone(const Sync *sync) { return comm_ranks(sync->comm) == 1; }

/* What each of the plan's buckets should take, in statistics that are new. */
void sync_predict_buckets(Sync *sync);

#endif
