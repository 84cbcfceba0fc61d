/* AdamW in one pass over memory. An element costs 28 bytes of traffic (params, m, v read and written, grads read) and
 * about a dozen operations, so the update runs at the rate of memory and everything else is folded into that pass:
 * the clip's scale, both bias corrections and the decay.
 *
 *     g  = grad_scale * grad
 *     m += (1 - beta1) * (g - m)
 *     v += (1 - beta2) * (g * g - v)
 *     p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)  +  lr * weight_decay * p
 *
 * The moments are written as steps towards g, so that a constant gradient is their fixed point although betas are
 * rounded to f32. Every element is computed alone and with explicit fmaf, so that its bits depend neither on its place
 * in a vector nor on the thread that gets it, nor on the compiler, nor on what else the rank owns.
 *
 * The shard's slices are cut once into runs of equal decay; each thread takes the same share of the moments, which lie
 * side by side, and passes over the runs in it:
 *
 *     params, grads   ....[ slice 0 | decay ]...............[ slice 1 ]......
 *     m, v                [ run 0   | run 1 ][ run 2  ]
 *     threads             |    0        |      1      |
 *
 * Never done: an update with a scale that is not finite. The caller skips such a step. */
#include "optim/adamw.h"

#include <assert.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>

enum { BLOCK = 4096 }; /* elements; threads share whole blocks */

typedef struct Constants {
    float grad_scale;
    float m_rate, v_rate; /* 1 - beta */
    float step_size;      /* lr / (1 - beta1^t) */
    float v_correction;   /* 1 / (1 - beta2^t) */
    float eps;
} Constants;

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

Status adamw_create(AdamW *adamw, const ParamTable *table, const Shard *shard, const Allocator *memory) {
    const Slice all = {0, table->elems};
    const Shard everything = {&all, 1};
    shard = shard ? shard : &everything;
    *adamw = (AdamW){.elems = shard_elems(shard), .run_count = cut_shard(table, shard, NULL), .memory = memory};
    size_t bytes = (size_t)adamw->elems * sizeof(float);
    adamw->runs = calloc((size_t)adamw->run_count + 1, sizeof *adamw->runs);
    adamw->m = memory_alloc(memory, bytes);
    adamw->v = adamw->m ? memory_alloc(memory, bytes) : NULL;
    if (!adamw->runs || !adamw->v) {
        adamw_destroy(adamw);
        return fault("out of memory: AdamW's moments take 2 x %.1f MiB", (double)bytes / (1 << 20));
    }
    cut_shard(table, shard, adamw->runs);
    return OK;
}

void adamw_destroy(AdamW *adamw) {
    if (adamw->memory) {
        memory_free(adamw->memory, adamw->v);
        memory_free(adamw->memory, adamw->m);
    }
    free(adamw->runs);
    *adamw = (AdamW){0};
}

static void update_run(Constants k, float decay, int64_t elems, float *restrict p, float *restrict m,
                       float *restrict v, const float *restrict grads) {
#pragma omp simd
    for (int64_t i = 0; i < elems; i++) {
        float g = k.grad_scale * grads[i];
        m[i] = fmaf(k.m_rate, g - m[i], m[i]);
        v[i] = fmaf(k.v_rate, fmaf(g, g, -v[i]), v[i]);
        float ratio = m[i] / (sqrtf(v[i] * k.v_correction) + k.eps);
        p[i] -= fmaf(k.step_size, ratio, decay * p[i]);
    }
}

/* Elements first..last-1 of the moments. */
static void update_range(const AdamW *adamw, Constants k, float decay, float *params, const float *grads,
                         int64_t first, int64_t last) {
    for (const AdamWRun *run = adamw->runs; run < adamw->runs + adamw->run_count; run++) {
        int64_t begin = run->at > first ? run->at : first;
        int64_t end = run->at + run->elems < last ? run->at + run->elems : last;
        int64_t place = run->start + begin - run->at;
        if (begin < end)
            update_run(k, run->decay ? decay : 0, end - begin, params + place, adamw->m + begin, adamw->v + begin,
                       grads + place);
    }
}

void adamw_update(AdamW *adamw, const OptimConfig *config, double lr, double grad_scale, float *params,
                  const float *grads) {
    assert(isfinite(grad_scale) && isfinite(lr));
    double t = (double)++adamw->step;
    Constants k = {
        .grad_scale = (float)grad_scale,
        .m_rate = (float)(1 - config->beta1),
        .v_rate = (float)(1 - config->beta2),
        .step_size = (float)(lr / (1 - pow(config->beta1, t))),
        .v_correction = (float)(1 / (1 - pow(config->beta2, t))),
        .eps = (float)config->eps,
    };
    float decay = (float)(lr * config->weight_decay);
    int64_t elems = adamw->elems, blocks = (elems + BLOCK - 1) / BLOCK;
#pragma omp parallel
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t first = blocks * thread / threads * BLOCK, last = blocks * (thread + 1) / threads * BLOCK;
        update_range(adamw, k, decay, params, grads, first, last < elems ? last : elems);
    }
}
