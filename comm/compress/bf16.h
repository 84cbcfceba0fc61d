/* bf16 as it travels: the upper half of an f32. */
#ifndef COMM_COMPRESS_BF16_H
#define COMM_COMPRESS_BF16_H

#include "base/host_device.h"

#include <stdint.h>
#include <string.h>

/* Rounded to nearest even. Inf, NaN and what would round to Inf: one NaN. */
static HOST_DEVICE inline uint16_t bf16_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) >= 0x7f7f8000 ? 0x7fc0 : rounded);
}

static HOST_DEVICE inline float bf16_to_float(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
