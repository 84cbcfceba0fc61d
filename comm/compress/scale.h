/* The arithmetic of values and of blocks with one scale, alike on the CPU and in CUDA kernels. Every product stands in
 * a statement of its own or in fmaf, so that no compiler fuses it. */
#ifndef COMM_COMPRESS_SCALE_H
#define COMM_COMPRESS_SCALE_H

#include "base/host_device.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { INF_BITS = 0x7f800000, MAGNITUDE_BITS = 0x7fffffff };

static HOST_DEVICE inline int32_t float_bits(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static HOST_DEVICE inline float bits_float(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The NaN that travels: machines differ in the bits of those that arithmetic makes. */
static HOST_DEVICE inline float wire_nan(void) { return bits_float(0x7fc00000); }

typedef struct BlockScale {
    float scale, inverse;
} BlockScale;

/* So that the largest value gets the code `levels`: NaN for a block with NaN or Inf, 0 where it would not be normal,
 * and one step less where scale * levels would overflow. */
static HOST_DEVICE inline BlockScale block_scale(int32_t max_bits, float levels) {
    BlockScale by = {wire_nan(), 0};
    if (max_bits >= INF_BITS)
        return by;
    by.scale = bits_float(max_bits) / levels;
    if (by.scale < FLT_MIN) {
        by.scale = 0;
        return by;
    }
    float largest = by.scale * levels;
    if (float_bits(largest) == INF_BITS)
        by.scale = bits_float(float_bits(by.scale) - 1);
    by.inverse = 1 / by.scale;
    return by;
}

/* The code of p in the low 8 bits; *left is p minus what the code stands for. 1.5 * 2^23, added to |x| < 2^22, leaves
 * no bits behind the point, rounded to nearest even, and x in the low bits. */
static HOST_DEVICE inline int32_t block_code(float p, BlockScale by, float *left) {
    const float rounder = 0x1.8p23f;
    float ratio = p * by.inverse;
    float rounded = ratio + rounder;
    *left = fmaf(-by.scale, rounded - rounder, p);
    return float_bits(rounded);
}

#endif
