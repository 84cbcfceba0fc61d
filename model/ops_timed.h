/* A device with a watch on it: the same operations, each followed by a call that says how long it took. For profiles,
 * traces and benches; the model runs as it always does. */
#ifndef MODEL_OPS_TIMED_H
#define MODEL_OPS_TIMED_H

#include "model/ops.h"

typedef struct OpCall {
    const char *op; /* the slot's name in Ops, static: "linear_forward" */
    int layer;      /* as in OpsContext */
    int rows;       /* positions */
    int in, out;    /* widths: C and OC of a linear layer, C and V of the head, T and C of attention, else C and C */
} OpCall;

/* After each operation, in the thread that ran it; times are clock_s's. */
typedef void OpTookFn(void *user, const OpCall *call, double start_s, double end_s);

/* *at_s becomes when the device has done what it was asked for so far; it may be filled in later. */
typedef void StampFn(void *gpu, double *at_s);

typedef struct TimedCall {
    OpCall call;
    double start_s, end_s;
} TimedCall;

typedef struct TimedOps {
    Ops ops; /* give &timed.ops to gpt2_create */
    const Ops *inner;
    OpTookFn *took;
    void *user;
    StampFn *stamp; /* NULL: the host's clock */
    void *gpu;
    TimedCall first, *calls; /* [room], owned if stamp is there */
    int count, room;
} TimedOps;

/* inner and user are borrowed; timed must not move while it is used. Moving data, `mean` and generation's
 * attention_cached pass through without a call of `took`. */
void timed_ops_init(TimedOps *timed, const Ops *inner, OpTookFn *took, void *user);

/* For a device that computes later than it is asked to: `took` is called by timed_ops_settle, which the caller calls
 * when the stamps are filled in, for the first 4,096 operations since it did so before. */
Status timed_ops_use_stamps(TimedOps *timed, StampFn *stamp, void *gpu);
void timed_ops_settle(TimedOps *timed);
void timed_ops_free(TimedOps *timed); /* accepts a zeroed one */

/* An OpTookFn that adds the call to a profile: user is a Profile (base/profile.h). */
void timed_ops_profile(void *profile, const OpCall *call, double start_s, double end_s);

#endif
