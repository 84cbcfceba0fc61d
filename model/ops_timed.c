#include "model/ops_timed.h"

#include "base/clock.h"
#include "base/profile.h"

#include <stdlib.h>

enum { STAMPED_CALLS_MAX = 4096 };

/* The context as the inner device knows it. */
static OpsContext inside(const OpsContext *context) {
    const TimedOps *timed = context->state;
    OpsContext inner = *context;
    inner.state = timed->inner->state;
    return inner;
}

static const Ops *device(const OpsContext *context) { return ((const TimedOps *)context->state)->inner; }

static void stamp(const TimedOps *timed, double *at_s) {
    if (timed->stamp)
        timed->stamp(timed->gpu, at_s);
    else
        *at_s = clock_s();
}

/* NULL: there are too many since timed_ops_settle. */
static TimedCall *begin(const OpsContext *context, const char *op, int rows, int in, int out) {
    TimedOps *timed = context->state;
    if (timed->count++ >= timed->room)
        return NULL;
    TimedCall *timed_call = &timed->calls[timed->count - 1];
    *timed_call = (TimedCall){{.op = op, .layer = context->layer, .rows = rows, .in = in, .out = out}, 0, 0};
    stamp(timed, &timed_call->start_s);
    return timed_call;
}

static void end(const OpsContext *context, TimedCall *timed_call) {
    TimedOps *timed = context->state;
    if (timed_call)
        stamp(timed, &timed_call->end_s);
    if (!timed->stamp)
        timed_ops_settle(timed);
}

/* A slot of the table. `parameters` begin with the context, `arguments` with that of the inner device. */
#define TIMED(slot, rows, in, out, parameters, arguments)  \
    static void slot parameters {                          \
        OpsContext inner = inside(context);                \
        TimedCall *call = begin(context, #slot, rows, in, out); \
        device(context)->slot arguments;                   \
        end(context, call);                                \
    }

TIMED(embedding_forward, B *T, C, C,
      (OpsContext * context, float *x, const int *tokens, const float *wte, const float *wpe, int B, int T, int C),
      (&inner, x, tokens, wte, wpe, B, T, C))
TIMED(embedding_backward, B *T, C, C,
      (OpsContext * context, float *dwte, float *dwpe, const float *dx, const int *tokens, int B, int T, int C,
       int maxT, bool accumulate),
      (&inner, dwte, dwpe, dx, tokens, B, T, C, maxT, accumulate))
TIMED(layernorm_forward, rows, C, C,
      (OpsContext * context, float *y, float *mean, float *rstd, const float *x, const float *w, const float *b,
       int rows, int C),
      (&inner, y, mean, rstd, x, w, b, rows, C))
TIMED(layernorm_backward, rows, C, C,
      (OpsContext * context, float *dx, float *dw, float *db, const float *dy, const float *x, const float *mean,
       const float *rstd, const float *w, int rows, int C, bool residual, bool accumulate),
      (&inner, dx, dw, db, dy, x, mean, rstd, w, rows, C, residual, accumulate))
TIMED(linear_forward, rows, C, OC,
      (OpsContext * context, float *y, float *gelu, const float *x, const float *w, const float *b,
       const float *residual, int rows, int C, int OC),
      (&inner, y, gelu, x, w, b, residual, rows, C, OC))
TIMED(gelu_forward, rows, C, C, (OpsContext * context, float *y, const float *x, int rows, int C),
      (&inner, y, x, rows, C))
TIMED(linear_backward, rows, C, OC,
      (OpsContext * context, const LinearGrads *grads, const float *dy, const float *x, const float *w, int rows,
       int C, int OC),
      (&inner, grads, dy, x, w, rows, C, OC))
TIMED(attention_forward, B *T, T, C,
      (OpsContext * context, float *y, float *lse, const float *qkv, int B, int T, int C, int NH),
      (&inner, y, lse, qkv, B, T, C, NH))
TIMED(attention_backward, B *T, T, C,
      (OpsContext * context, float *dqkv, const float *dy, const float *y, const float *qkv, const float *lse, int B,
       int T, int C, int NH),
      (&inner, dqkv, dy, y, qkv, lse, B, T, C, NH))
TIMED(head_loss, rows, C, V,
      (OpsContext * context, float *losses, float *logits, const float *x, const float *wte, const int *targets,
       int rows, int C, int V, int Vp),
      (&inner, losses, logits, x, wte, targets, rows, C, V, Vp))
TIMED(head_backward, rows, C, V,
      (OpsContext * context, float *losses, float *logits, float *dx, float *dwte, const float *x, const float *wte,
       const int *targets, int rows, int C, int V, int Vp, float scale, bool accumulate),
      (&inner, losses, logits, dx, dwte, x, wte, targets, rows, C, V, Vp, scale, accumulate))

static void prepare(OpsContext *context, const OpsLimits *limits) {
    OpsContext inner = inside(context);
    device(context)->prepare(&inner, limits);
    context->threads = inner.threads;
    context->scratch_bytes = inner.scratch_bytes;
}

static void upload(OpsContext *context, void *to, const void *from, size_t bytes) {
    OpsContext inner = inside(context);
    device(context)->upload(&inner, to, from, bytes);
}

static void download(OpsContext *context, void *to, const void *from, size_t bytes) {
    OpsContext inner = inside(context);
    device(context)->download(&inner, to, from, bytes);
}

static void read_acts(OpsContext *context, float *host, const Act *acts, size_t elems) {
    OpsContext inner = inside(context);
    device(context)->read(&inner, host, acts, elems);
}

static void clear(OpsContext *context, void *to, size_t bytes) {
    OpsContext inner = inside(context);
    device(context)->clear(&inner, to, bytes);
}

static void attention_cached(OpsContext *context, float *y, float *cache, const float *qkv, int first, int count, int C,
                             int NH) {
    OpsContext inner = inside(context);
    device(context)->attention_cached(&inner, y, cache, qkv, first, count, C, NH);
}

static double mean(OpsContext *context, const float *values, int count) {
    OpsContext inner = inside(context);
    return device(context)->mean(&inner, values, count);
}

void timed_ops_init(TimedOps *timed, const Ops *inner, OpTookFn *took, void *user) {
    *timed = (TimedOps){.inner = inner, .took = took, .user = user, .calls = &timed->first, .room = 1};
    timed->ops = (Ops){
        .name = inner->name,
        .act_bytes = inner->act_bytes,
        .head_logits = inner->head_logits,
        .state = timed,
        .available = inner->available,
        .prepare = prepare,
        .upload = upload,
        .download = download,
        .read = read_acts,
        .clear = clear,
        .embedding_forward = embedding_forward,
        .embedding_backward = embedding_backward,
        .layernorm_forward = layernorm_forward,
        .layernorm_backward = layernorm_backward,
        .linear_forward = linear_forward,
        .gelu_forward = gelu_forward,
        .linear_backward = linear_backward,
        .attention_forward = attention_forward,
        .attention_backward = attention_backward,
        .attention_cached = attention_cached,
        .head_loss = head_loss,
        .head_backward = head_backward,
        .mean = mean,
    };
}

Status timed_ops_use_stamps(TimedOps *timed, StampFn *stamp_fn, void *gpu) {
    timed->calls = calloc(STAMPED_CALLS_MAX, sizeof *timed->calls);
    if (!timed->calls)
        return fault("no memory for a profile");
    timed->room = STAMPED_CALLS_MAX;
    timed->stamp = stamp_fn;
    timed->gpu = gpu;
    return OK;
}

void timed_ops_free(TimedOps *timed) {
    if (timed->stamp)
        free(timed->calls);
}

void timed_ops_settle(TimedOps *timed) {
    for (int i = 0; i < timed->count && i < timed->room; i++) {
        const TimedCall *call = &timed->calls[i];
        if (call->end_s > 0) /* 0: there were too many stamps */
            timed->took(timed->user, &call->call, call->start_s, call->end_s);
    }
    timed->count = 0;
}

void timed_ops_profile(void *profile, const OpCall *call, double start_s, double end_s) {
    profile_add(profile, call->op, call->layer, call->in, call->out, call->rows, 1e3 * (end_s - start_s));
}
