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
 * in a vector nor on the thread that gets it, nor on the compiler.
 *
 * Never done: an update with a scale that is not finite. The caller skips such a step. */
#include "optim/adamw.h"

#include <assert.h>
#include <math.h>
#include <omp.h>

enum { BLOCK = 4096 }; /* elements; threads share whole blocks */

typedef struct Constants {
    float grad_scale;
    float m_rate, v_rate; /* 1 - beta */
    float step_size;      /* lr / (1 - beta1^t) */
    float v_correction;   /* 1 / (1 - beta2^t) */
    float eps;
} Constants;

Status adamw_create(AdamW *adamw, const ParamTable *table, const Allocator *memory) {
    size_t bytes = (size_t)table->elems * sizeof(float);
    *adamw = (AdamW){.table = table, .memory = memory};
    adamw->m = memory_alloc(memory, bytes);
    adamw->v = adamw->m ? memory_alloc(memory, bytes) : NULL;
    if (adamw->v)
        return OK;
    adamw_destroy(adamw);
    return fault("out of memory: AdamW's moments take 2 x %.1f MiB", (double)bytes / (1 << 20));
}

void adamw_destroy(AdamW *adamw) {
    if (adamw->memory) {
        memory_free(adamw->memory, adamw->v);
        memory_free(adamw->memory, adamw->m);
    }
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

/* Elements first..last-1, one run of tensors with the same decay after the other. */
static void update_range(const AdamW *adamw, Constants k, float decay, float *params, const float *grads,
                         int64_t first, int64_t last) {
    const Param *table = adamw->table->params;
    int count = adamw->table->param_count;
    for (int i = 0; i < count;) {
        bool decays = table[i].decay;
        int64_t begin = table[i].offset;
        while (i < count && table[i].decay == decays)
            i++;
        int64_t end = i < count ? table[i].offset : adamw->table->elems;
        begin = begin > first ? begin : first;
        end = end < last ? end : last;
        if (begin < end)
            update_run(k, decays ? decay : 0, end - begin, params + begin, adamw->m + begin, adamw->v + begin,
                       grads + begin);
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
    int64_t elems = adamw->table->elems, blocks = (elems + BLOCK - 1) / BLOCK;
#pragma omp parallel
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t first = blocks * thread / threads * BLOCK, last = blocks * (thread + 1) / threads * BLOCK;
        update_range(adamw, k, decay, params, grads, first, last < elems ? last : elems);
    }
}
