#include "comm/transport/vector.h"

#include <string.h>

static void host_scale(void *lane, float *data, int64_t elems, float scale) {
    (void)lane;
    for (int64_t i = 0; i < elems; i++)
        data[i] *= scale;
}

static void host_add(void *lane, float *restrict sum, const float *restrict term, int64_t elems) {
    (void)lane;
    for (int64_t i = 0; i < elems; i++)
        sum[i] += term[i];
}

static void host_scale_add(void *lane, float *restrict data, float scale, const float *restrict sum, int64_t elems) {
    (void)lane;
    for (int64_t i = 0; i < elems; i++) {
        float scaled = scale * data[i];
        data[i] = sum[i] + scaled;
    }
}

static void host_set_scaled(void *lane, float *restrict sum, float scale, const float *restrict term, int64_t elems) {
    (void)lane;
    for (int64_t i = 0; i < elems; i++)
        sum[i] = scale * term[i];
}

static void host_add_scaled(void *lane, float *restrict sum, float scale, const float *restrict term, int64_t elems) {
    (void)lane;
    for (int64_t i = 0; i < elems; i++) {
        float scaled = scale * term[i];
        sum[i] += scaled;
    }
}

static void host_copy(void *lane, float *restrict to, const float *restrict from, int64_t elems) {
    (void)lane;
    memcpy(to, from, (size_t)elems * sizeof *to);
}

const VectorOps vector_host = {.name = "host",
                               .on_host = true,
                               .scale = host_scale,
                               .add = host_add,
                               .scale_add = host_scale_add,
                               .set_scaled = host_set_scaled,
                               .add_scaled = host_add_scaled,
                               .copy = host_copy};
