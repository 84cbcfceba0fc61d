/* The arithmetic of collectives. Each product is rounded before it is added (no fused multiply-add), so every compiler
 * and machine gets the same bits. Arrays do not overlap. */
#ifndef COMM_COLLECTIVE_VECTOR_H
#define COMM_COLLECTIVE_VECTOR_H

#include <stdint.h>

static inline void vector_scale(float *data, int64_t elems, float scale) {
    for (int64_t i = 0; i < elems; i++)
        data[i] *= scale;
}

/* sum += term */
static inline void vector_add(float *restrict sum, const float *restrict term, int64_t elems) {
    for (int64_t i = 0; i < elems; i++)
        sum[i] += term[i];
}

/* data = sum + scale * data */
static inline void vector_scale_add(float *restrict data, float scale, const float *restrict sum, int64_t elems) {
    for (int64_t i = 0; i < elems; i++) {
        float scaled = scale * data[i];
        data[i] = sum[i] + scaled;
    }
}

/* sum = scale * term */
static inline void vector_set_scaled(float *restrict sum, float scale, const float *restrict term, int64_t elems) {
    for (int64_t i = 0; i < elems; i++)
        sum[i] = scale * term[i];
}

/* sum += scale * term */
static inline void vector_add_scaled(float *restrict sum, float scale, const float *restrict term, int64_t elems) {
    for (int64_t i = 0; i < elems; i++) {
        float scaled = scale * term[i];
        sum[i] += scaled;
    }
}

#endif
