/* The arithmetic of collectives, on the memory that a transport moves: the host's (vector_host.c) or a device's, where
 * a call joins a queue, the transport's lane, behind the messages that it waits for. Each product is rounded before it
 * is added (no fused multiply-add), so every compiler and machine gets the same bits. Arrays do not overlap. */
#ifndef COMM_TRANSPORT_VECTOR_H
#define COMM_TRANSPORT_VECTOR_H

#include "base/param.h"
#include "comm/transport/transport.h"

#include <stdint.h>

/* Some rows of a matrix f32[..][channels], which begins at `offset` of the flat arrays; a second array,
 * f32[count][channels], holds them close together. */
typedef struct MatrixRows {
    const int *places; /* i32[count], rising: where they are in the matrix. Of the same memory */
    int64_t count, offset;
    int channels;
} MatrixRows;

typedef struct VectorOps {
    const char *name;
    bool on_host; /* a caller may touch the memory itself, and should work in pieces that stay in a cache */
    void (*scale)(void *lane, float *data, int64_t elems, float scale);
    void (*add)(void *lane, float *sum, const float *term, int64_t elems);
    void (*scale_add)(void *lane, float *data, float scale, const float *sum, int64_t elems);
    void (*set_scaled)(void *lane, float *sum, float scale, const float *term, int64_t elems);
    void (*add_scaled)(void *lane, float *sum, float scale, const float *term, int64_t elems);
    void (*copy)(void *lane, float *to, const float *from, int64_t elems);
    void (*bring)(void *lane, void *to, const void *host, size_t bytes);
    void (*add_rows)(void *lane, const MatrixRows *rows, float *matrix, const float *values);
    void (*put_rows)(void *lane, const MatrixRows *rows, float *matrix, const float *values);
    void (*take_rows)(void *lane, const MatrixRows *rows, const float *matrix, const Shard *shard, float *values);
} VectorOps;

extern const VectorOps vector_host; /* its lane is not looked at */

static inline void vector_scale(const Transport *transport, float *data, int64_t elems, float scale) {
    transport->vector->scale(transport->lane, data, elems, scale);
}

/* sum += term */
static inline void vector_add(const Transport *transport, float *sum, const float *term, int64_t elems) {
    transport->vector->add(transport->lane, sum, term, elems);
}

/* data = sum + scale * data */
static inline void vector_scale_add(const Transport *transport, float *data, float scale, const float *sum,
                                    int64_t elems) {
    transport->vector->scale_add(transport->lane, data, scale, sum, elems);
}

/* sum = scale * term */
static inline void vector_set_scaled(const Transport *transport, float *sum, float scale, const float *term,
                                     int64_t elems) {
    transport->vector->set_scaled(transport->lane, sum, scale, term, elems);
}

/* sum += scale * term */
static inline void vector_add_scaled(const Transport *transport, float *sum, float scale, const float *term,
                                     int64_t elems) {
    transport->vector->add_scaled(transport->lane, sum, scale, term, elems);
}

static inline void vector_copy(const Transport *transport, float *to, const float *from, int64_t elems) {
    transport->vector->copy(transport->lane, to, from, elems);
}

/* From the host's memory, which may not change before the lane is empty. */
static inline void vector_bring(const Transport *transport, void *to, const void *host, size_t bytes) {
    transport->vector->bring(transport->lane, to, host, bytes);
}

/* The matrix' rows += values */
static inline void vector_add_rows(const Transport *transport, const MatrixRows *rows, float *matrix,
                                   const float *values) {
    transport->vector->add_rows(transport->lane, rows, matrix, values);
}

/* The matrix' rows = values */
static inline void vector_put_rows(const Transport *transport, const MatrixRows *rows, float *matrix,
                                   const float *values) {
    transport->vector->put_rows(transport->lane, rows, matrix, values);
}

/* values = the matrix' rows, where they lie within the shard, whose slices are of the same memory; -0.0, which changes
 * nothing that it is added to, elsewhere. */
static inline void vector_take_rows(const Transport *transport, const MatrixRows *rows, const float *matrix,
                                    const Shard *shard, float *values) {
    transport->vector->take_rows(transport->lane, rows, matrix, shard, values);
}

#endif
