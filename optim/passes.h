/* What the devices' passes over memory (OptimOps in optim/adamw.h) have in common: inside this room only. */
#ifndef OPTIM_PASSES_H
#define OPTIM_PASSES_H

#include "base/host_device.h"
#include "base/random.h"
#include "optim/adamw.h"

#include <math.h>
#include <string.h>

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

/* ---- weights in bf16 beside the f32 parameters ----
 *
 * A pure function of parameter, seed, step of the last update and place: whoever has the parameters, after an update,
 * from another rank or from a checkpoint, has the weights as well. */

enum { ROUNDING_STREAM = 1 << 30 }; /* + step: streams of base/random.h that nobody else draws from */

/* Draws for the four elements at the flat offsets 4 * group .. + 3, 16 bits each, the first one's lowest. */
static HOST_DEVICE inline uint64_t rounding_noise(uint64_t seed, int64_t step, int64_t group) {
    return random_bits(seed, (uint64_t)(ROUNDING_STREAM + step), (uint64_t)group);
}

/* Up or down at random, each as often as it is near, so that the mean is the value: bf16 is the upper half of an f32,
 * and 16 uniform bits added to the lower one carry with that probability, for either sign. Inf stays; NaN becomes one
 * NaN. */
static HOST_DEVICE inline uint16_t round_stochastic(float value, uint64_t noise) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((bits + (uint32_t)(noise & 0xffff)) >> 16);
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
