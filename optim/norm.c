/* The global gradient norm, in an order of summation that nothing can change: squares are exact in f64; NORM_LANES
 * partial sums per unit (lane = index in the unit modulo NORM_LANES) are folded in halves; units are added in their
 * order. The flat array is cut into units at every multiple of NORM_BLOCK and at the bounds of the gradients:
 *
 *     BLOCK       0         1         2         3         4
 *     gradients   | 0     | 1                        | 2  |
 *     units       | 0     |1| 2       | 3       | 4  | 5  |
 *
 * Buckets are made of gradients or cut at multiples of NORM_BLOCK, and so are the shards of ranks: each unit lies in
 * one of them. So the result is the same for any number of threads or ranks, any vector width, any device, any buckets.
 * Costs one read of the gradient. */
#include "optim/passes.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

enum { UNITS_PER_ROUND = 2048 };

/* Where the unit ends that begins at `start`; *gradient is the one that the unit before lay in. */
static int64_t unit_end(const ParamTable *table, int *gradient, int64_t start) {
    const Gradient *g = &table->gradients[*gradient];
    while (g->offset + g->elems <= start)
        g++;
    *gradient = (int)(g - table->gradients);
    int64_t block_end = (start / NORM_BLOCK + 1) * NORM_BLOCK, gradient_end = g->offset + g->elems;
    return block_end < gradient_end ? block_end : gradient_end;
}

double grad_norm(const ParamTable *table, const float *grads) {
    int64_t bounds[UNITS_PER_ROUND + 1] = {0}; /* rounds keep this small, whatever the size of the gradient */
    double sums[UNITS_PER_ROUND], total = 0;
    for (int gradient = 0; bounds[0] < table->elems;) {
        int count = 0;
        while (count < UNITS_PER_ROUND && bounds[count] < table->elems) {
            bounds[count + 1] = unit_end(table, &gradient, bounds[count]);
            count++;
        }
#pragma omp parallel for schedule(static)
        for (int i = 0; i < count; i++)
            sums[i] = norm_unit_sum(grads, bounds[i], bounds[i + 1]);
        for (int i = 0; i < count; i++)
            total += sums[i];
        bounds[0] = bounds[count];
    }
    return sqrt(total);
}

/* ---- in parts ---- */

static int64_t count_units(const ParamTable *table) {
    int gradient = 0;
    int64_t units = 0;
    for (int64_t at = 0; at < table->elems; units++)
        at = unit_end(table, &gradient, at);
    return units;
}

size_t norm_plan_bytes(const ParamTable *table, const OptimOps *ops) {
    return ops->norm_bytes ? ops->norm_bytes(count_units(table)) : 0;
}

static Status fill_plan(NormPlan *plan, const ParamTable *table) {
    plan->units = count_units(table);
    plan->starts = calloc((size_t)plan->units + 1, sizeof *plan->starts);
    if (!plan->starts)
        return fault("out of memory: the gradient norm has %lld units", (long long)plan->units);
    int gradient = 0;
    for (int64_t unit = 0; unit < plan->units; unit++)
        plan->starts[unit + 1] = unit_end(table, &gradient, plan->starts[unit]);
    return OK;
}

Status norm_plan_create(NormPlan *plan, const ParamTable *table, const OptimOps *ops) {
    *plan = (NormPlan){.ops = ops};
    Status status = fill_plan(plan, table);
    if (status == OK && ops->norm_create)
        status = ops->norm_create(ops->state, plan);
    if (status != OK)
        norm_plan_destroy(plan);
    return status;
}

void norm_plan_destroy(NormPlan *plan) {
    if (plan->ops && plan->ops->norm_destroy)
        plan->ops->norm_destroy(plan->ops->state, plan);
    free(plan->starts);
    *plan = (NormPlan){0};
}

/* The unit that begins at `start`, or `units` at the end of the array. */
static int64_t unit_at(const NormPlan *plan, int64_t start) {
    int64_t low = 0, high = plan->units;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (plan->starts[middle] < start)
            low = middle + 1;
        else
            high = middle;
    }
    assert(plan->starts[low] == start);
    return low;
}

NormUnits norm_slice_units(const NormPlan *plan, Slice slice) {
    if (slice.elems == 0)
        return (NormUnits){0};
    int64_t first = unit_at(plan, slice.start);
    return (NormUnits){first, unit_at(plan, slice.start + slice.elems) - first};
}

int64_t norm_shard_units(const NormPlan *plan, const Shard *shard) {
    int64_t count = 0;
    for (int i = 0; i < shard->count; i++)
        count += norm_slice_units(plan, shard->slices[i]).count;
    return count;
}

void norm_partial(const NormPlan *plan, const float *grads, const Shard *shard, double *partial) {
    const Slice all = {0, plan->starts[plan->units]};
    const Shard everything = {&all, 1};
    plan->ops->norm_partial(plan->ops->state, plan, grads, shard ? shard : &everything, partial);
}

void norm_scatter(const NormPlan *plan, const Shard *shard, const double *partial, double *sums) {
    for (int i = 0; i < shard->count; i++) {
        NormUnits units = norm_slice_units(plan, shard->slices[i]);
        for (int64_t unit = 0; unit < units.count; unit++)
            sums[units.first + unit] = *partial++;
    }
}

double norm_total(const NormPlan *plan, const double *sums) {
    double total = 0;
    for (int64_t unit = 0; unit < plan->units; unit++)
        total += sums[unit];
    return sqrt(total);
}

double clip_scale(double norm, double clip) {
    if (clip == 0)
        return 1;
    if (!isfinite(norm))
        return NAN; /* no scale makes such a gradient usable: the step is to be skipped */
    return norm > clip ? clip / norm : 1;
}
