/* AdamW in one pass over memory. An element costs 28 bytes of traffic (params, m, v read and written, grads read) and
 * about a dozen operations, so the update runs at the rate of memory and everything else is folded into that pass:
 * the clip's scale, both bias corrections and the decay.
 *
 *     g  = grad_scale * grad
 *     m += (1 - beta1) * (g - m)
 *     v += (1 - beta2) * (g * g - v)
 *     p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)  +  lr * weight_decay * p
 *
 * Every element is computed alone (optim/passes.h), so that its bits depend neither on its place in a vector nor on the
 * thread that gets it, nor on the device, nor on what else the rank owns.
 *
 * The shard's slices are cut once into runs of equal decay, one behind the other in the moments. A device divides the
 * moments among its threads, and each passes over the runs in its share:
 *
 *     params, grads   ....[ slice 0 | decay ]...............[ slice 1 ]......
 *     m, v                [ run 0   | run 1 ][ run 2  ]
 *     threads             |    0        |      1      |
 *
 * Never done: an update with a scale that is not finite. The caller skips such a step. */
#include "optim/adamw.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

/* The runs of equal decay in a slice, stored behind one another unless runs is NULL; returns how many. */
static int cut_slice(const ParamTable *table, Slice slice, int64_t at, AdamWRun *runs) {
    int count = 0;
    for (int i = 0; i < table->param_count;) {
        bool decay = table->params[i].decay;
        int64_t first = table->params[i].offset;
        while (i < table->param_count && table->params[i].decay == decay)
            i++;
        int64_t end = i < table->param_count ? table->params[i].offset : table->elems;
        first = first > slice.start ? first : slice.start;
        end = end < slice.start + slice.elems ? end : slice.start + slice.elems;
        if (first >= end)
            continue;
        if (runs)
            runs[count] = (AdamWRun){.start = first, .at = at + first - slice.start, .elems = end - first,
                                     .decay = decay};
        count++;
    }
    return count;
}

static int cut_shard(const ParamTable *table, const Shard *shard, AdamWRun *runs) {
    int count = 0;
    int64_t at = 0, end = 0;
    for (int i = 0; i < shard->count; i++) {
        Slice slice = shard->slices[i];
        assert(slice.start >= end && slice.elems >= 0 && slice.start + slice.elems <= table->elems);
        count += cut_slice(table, slice, at, runs ? runs + count : NULL);
        at += slice.elems;
        end = slice.start + slice.elems;
    }
    (void)end;
    return count;
}

static size_t moment_bytes(int64_t elems) { return (size_t)elems * sizeof(float); }
static size_t run_bytes_of(int count) { return (size_t)count * sizeof(AdamWRun) + 1; }

/* Moments, then the runs, by way of the host. */
static Status allocate(AdamW *adamw, const ParamTable *table, const Shard *shard) {
    size_t bytes = moment_bytes(adamw->elems), run_bytes = run_bytes_of(adamw->run_count);
    AdamWRun *runs = calloc(1, run_bytes);
    adamw->m = memory_alloc(adamw->memory, bytes);
    adamw->v = adamw->m ? memory_alloc(adamw->memory, bytes) : NULL;
    adamw->runs = adamw->v && runs ? memory_alloc(adamw->memory, run_bytes) : NULL;
    if (adamw->runs) {
        cut_shard(table, shard, runs);
        adamw->ops->upload(adamw->ops->state, adamw->runs, runs, run_bytes);
    }
    free(runs);
    return adamw->runs ? OK : fault("out of memory: AdamW's moments take 2 x %.1f MiB", (double)bytes / (1 << 20));
}

size_t adamw_bytes(const ParamTable *table, const Shard *shard) {
    const Slice all = {0, table->elems};
    const Shard everything = {&all, 1};
    shard = shard ? shard : &everything;
    return 2 * moment_bytes(shard_elems(shard)) + run_bytes_of(cut_shard(table, shard, NULL));
}

Status adamw_create(AdamW *adamw, const ParamTable *table, const Shard *shard, const Allocator *memory,
                    const OptimOps *ops) {
    const Slice all = {0, table->elems};
    const Shard everything = {&all, 1};
    shard = shard ? shard : &everything;
    *adamw = (AdamW){.elems = shard_elems(shard), .run_count = cut_shard(table, shard, NULL), .memory = memory,
                     .ops = ops};
    Status status = allocate(adamw, table, shard);
    if (status != OK)
        adamw_destroy(adamw);
    return status;
}

void adamw_destroy(AdamW *adamw) {
    if (adamw->memory) {
        memory_free(adamw->memory, adamw->runs);
        memory_free(adamw->memory, adamw->v);
        memory_free(adamw->memory, adamw->m);
    }
    *adamw = (AdamW){0};
}

void adamw_update(AdamW *adamw, const OptimConfig *config, double lr, double grad_scale, float *params,
                  const float *grads) {
    assert(isfinite(grad_scale) && isfinite(lr));
    double t = (double)++adamw->step;
    AdamWConstants k = {
        .grad_scale = (float)grad_scale,
        .m_rate = (float)(1 - config->beta1),
        .v_rate = (float)(1 - config->beta2),
        .step_size = (float)(lr / (1 - pow(config->beta1, t))),
        .v_correction = (float)(1 / (1 - pow(config->beta2, t))),
        .eps = (float)config->eps,
        .decay = (float)(lr * config->weight_decay),
    };
    adamw->ops->update(adamw->ops->state, adamw, k, params, grads);
}

void adamw_params_arrived(const AdamW *adamw, const float *params, Slice slice) {
    if (adamw->ops->arrived && slice.elems > 0)
        adamw->ops->arrived(adamw->ops->state, adamw->step, params, slice);
}
