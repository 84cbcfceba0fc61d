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

typedef struct TimedOps {
    Ops ops; /* give &timed.ops to gpt2_create */
    const Ops *inner;
    OpTookFn *took;
    void *user;
} TimedOps;

/* inner and user are borrowed; timed must not move while it is used. Moving data, `mean` and generation's
 * attention_cached pass through without a call of `took`. */
void timed_ops_init(TimedOps *timed, const Ops *inner, OpTookFn *took, void *user);

/* An OpTookFn that adds the call to a profile: user is a Profile (base/profile.h). */
void timed_ops_profile(void *profile, const OpCall *call, double start_s, double end_s);

#endif
