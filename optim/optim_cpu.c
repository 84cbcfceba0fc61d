/* The optimizer's passes on the CPU: every thread takes the same share of the shard, in whole blocks, and the compiler
 * vectorises over the elements of a run and over the lanes of a unit. */
#include "optim/passes.h"

#include <omp.h>
#include <string.h>

enum { BLOCK = 4096 }; /* elements; threads share whole blocks */

/* ---- AdamW ---- */

static void update_run(AdamWConstants k, float decay, int64_t elems, float *restrict p, float *restrict m,
                       float *restrict v, const float *restrict grads) {
#pragma omp simd
    for (int64_t i = 0; i < elems; i++)
        adamw_element(k, decay, &p[i], &m[i], &v[i], grads[i]);
}

/* Elements first..last-1 of the moments. */
static void update_range(const AdamW *adamw, AdamWConstants k, float *params, const float *grads, int64_t first,
                         int64_t last) {
    for (const AdamWRun *run = adamw->runs; run < adamw->runs + adamw->run_count; run++) {
        int64_t begin = run->at > first ? run->at : first;
        int64_t end = run->at + run->elems < last ? run->at + run->elems : last;
        int64_t place = run->start + begin - run->at;
        if (begin < end)
            update_run(k, run->decay ? k.decay : 0, end - begin, params + place, adamw->m + begin, adamw->v + begin,
                       grads + place);
    }
}

static void cpu_update(void *state, const AdamW *adamw, AdamWConstants k, float *params, const float *grads) {
    (void)state;
    int64_t elems = adamw->elems, blocks = (elems + BLOCK - 1) / BLOCK;
#pragma omp parallel
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t first = blocks * thread / threads * BLOCK, last = blocks * (thread + 1) / threads * BLOCK;
        update_range(adamw, k, params, grads, first, last < elems ? last : elems);
    }
}

/* ---- the norm ---- */

double norm_unit_sum(const float *grads, int64_t start, int64_t end) {
    double lanes[NORM_LANES] = {0};
    int64_t elems = end - start, whole = elems / NORM_LANES * NORM_LANES;
    grads += start;
    for (int64_t i = 0; i < whole; i += NORM_LANES)
        for (int lane = 0; lane < NORM_LANES; lane++)
            lanes[lane] += (double)grads[i + lane] * (double)grads[i + lane];
    for (int64_t i = whole; i < elems; i++)
        lanes[i - whole] += (double)grads[i] * (double)grads[i];
    for (int half = NORM_LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* Places first..last-1 of partial. */
static void partial_range(const NormPlan *plan, const float *grads, const Shard *shard, double *partial, int64_t first,
                          int64_t last) {
    int64_t at = 0; /* place of the slice's first unit */
    for (int i = 0; i < shard->count && at < last; i++) {
        NormUnits units = norm_slice_units(plan, shard->slices[i]);
        int64_t begin = at > first ? at : first, end = at + units.count < last ? at + units.count : last;
        for (int64_t place = begin; place < end; place++) {
            const int64_t *start = &plan->starts[units.first + place - at];
            partial[place] = norm_unit_sum(grads, start[0], start[1]);
        }
        at += units.count;
    }
}

static void cpu_norm_partial(void *state, const NormPlan *plan, const float *grads, const Shard *shard,
                             double *partial) {
    (void)state;
    int64_t count = norm_shard_units(plan, shard);
#pragma omp parallel
    {
        int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        partial_range(plan, grads, shard, partial, count * thread / threads, count * (thread + 1) / threads);
    }
}

static void cpu_upload(void *state, void *device, const void *host, size_t bytes) {
    (void)state;
    memcpy(device, host, bytes);
}

const OptimOps optim_cpu = {.name = "cpu", .upload = cpu_upload, .norm_partial = cpu_norm_partial,
                            .update = cpu_update};
