/* What the devices' passes over memory (OptimOps in optim/adamw.h) have in common: inside this room only. */
#ifndef OPTIM_PASSES_H
#define OPTIM_PASSES_H

#include "base/host_device.h"
#include "optim/adamw.h"

#include <math.h>

/* ---- AdamW ---- */

/* One element's update. Explicit fmaf, and products in statements of their own or in fmaf, so that its bits depend on
 * no compiler; the moments are written as steps towards g, so that a constant gradient is their fixed point although
 * betas are rounded to f32. */
static HOST_DEVICE inline void adamw_element(AdamWConstants k, float decay, float *p, float *m, float *v, float grad) {
    float g = k.grad_scale * grad;
    *m = fmaf(k.m_rate, g - *m, *m);
    *v = fmaf(k.v_rate, fmaf(g, g, -*v), *v);
    float vhat = *v * k.v_correction;
    float ratio = *m / (sqrtf(vhat) + k.eps);
    *p -= fmaf(k.step_size, ratio, decay * *p);
}

/* ---- the norm ---- */

enum {
    NORM_BLOCK = 4096, /* multiples of it in the flat array, and the bounds of gradients, are where units begin */
    NORM_LANES = 16,   /* partial sums of a unit; lane = index in the unit modulo this; folded in halves */
};

/* Units first .. first + count - 1 of a plan. */
typedef struct NormUnits {
    int64_t first, count;
} NormUnits;

/* Those of a slice of whole units. */
NormUnits norm_slice_units(const NormPlan *plan, Slice slice);

/* The sum of the squares of grads[start .. end - 1], one unit, on the CPU. */
double norm_unit_sum(const float *grads, int64_t start, int64_t end);

#endif
