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

static void host_bring(void *lane, void *to, const void *host, size_t bytes) {
    (void)lane;
    memcpy(to, host, bytes);
}

/* ---- rows of a matrix ---- */

static void host_add_rows(void *lane, const MatrixRows *rows, float *matrix, const float *values) {
    for (int64_t i = 0; i < rows->count; i++)
        host_add(lane, matrix + (int64_t)rows->places[i] * rows->channels, values + i * rows->channels, rows->channels);
}

static void host_put_rows(void *lane, const MatrixRows *rows, float *matrix, const float *values) {
    for (int64_t i = 0; i < rows->count; i++)
        host_copy(lane, matrix + (int64_t)rows->places[i] * rows->channels, values + i * rows->channels, rows->channels);
}

/* The first slice that ends behind `place`. */
static int slice_behind(const Shard *shard, int64_t place) {
    int low = 0, high = shard->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (shard->slices[middle].start + shard->slices[middle].elems <= place)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void take_row(float *row, const float *from, int64_t place, int channels, const Shard *shard) {
    for (int c = 0; c < channels; c++)
        row[c] = -0.0f;
    for (int s = slice_behind(shard, place); s < shard->count && shard->slices[s].start < place + channels; s++) {
        int64_t start = shard->slices[s].start - place, stop = start + shard->slices[s].elems;
        for (int64_t c = start > 0 ? start : 0; c < stop && c < channels; c++)
            row[c] = from[c];
    }
}

static void host_take_rows(void *lane, const MatrixRows *rows, const float *matrix, const Shard *shard, float *values) {
    (void)lane;
    for (int64_t i = 0; i < rows->count; i++) {
        int64_t at = (int64_t)rows->places[i] * rows->channels;
        take_row(values + i * rows->channels, matrix + at, rows->offset + at, rows->channels, shard);
    }
}

const VectorOps vector_host = {.name = "host",
                               .on_host = true,
                               .scale = host_scale,
                               .add = host_add,
                               .scale_add = host_scale_add,
                               .set_scaled = host_set_scaled,
                               .add_scaled = host_add_scaled,
                               .copy = host_copy,
                               .bring = host_bring,
                               .add_rows = host_add_rows,
                               .put_rows = host_put_rows,
                               .take_rows = host_take_rows};
