/* What the compressors share: a slice is cut into parts of blocks, each part is loaded as p, scaled and coded.
 *
 * p goes through a small array on the stack, which stays in the first cache: so one loop looks for the largest
 * magnitude and the next one codes, both without branches for the compiler to vectorise, and new_residual may be
 * residual itself. Magnitudes are compared as integers: the bits of |p| order like |p|, with Inf and NaN above all
 * else, so the one maximum finds those too. Nothing here depends on the order of floating-point operations, and no
 * product is fused (scale.h). */
#ifndef COMM_COMPRESS_BLOCK_H
#define COMM_COMPRESS_BLOCK_H

#include "comm/compress/compressor.h"
#include "comm/compress/scale.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire is little-endian and written as it lies in memory");

/* How one part of a block, n <= elems values, is coded. */
typedef struct BlockCode {
    int elems; /* of a whole block, a power of two. bf16 and none, which have none, use any to stay in the cache */
    size_t (*bytes)(const CompressorOptions *options, int n);
    void (*encode)(const CompressorOptions *options, const float *p, int32_t max_bits, int n, float *new_residual,
                   uint8_t *wire); /* max_bits: the largest |p| */
    void (*decode)(const CompressorOptions *options, const uint8_t *wire, int n, float *values);
    void (*decode_add)(const CompressorOptions *options, const uint8_t *wire, int n, float *sum);
} BlockCode;

/* How many of the `elems` values at `offset` lie in the same block as the first. */
static inline int block_part(const BlockCode *code, int64_t offset, int64_t elems) {
    int64_t left = code->elems - (offset & (code->elems - 1));
    return (int)(left < elems ? left : elems);
}

static inline size_t block_wire_bytes(const BlockCode *code, const CompressorOptions *options, int64_t offset,
                                      int64_t elems) {
    if (elems == 0)
        return 0;
    int head = block_part(code, offset, elems);
    int64_t whole = (elems - head) / code->elems;
    int tail = (int)(elems - head - whole * code->elems);
    return code->bytes(options, head) + (size_t)whole * code->bytes(options, code->elems) +
           (tail ? code->bytes(options, tail) : 0);
}

/* The most over all offsets, by trying them. */
static inline size_t block_wire_bytes_max(const BlockCode *code, const CompressorOptions *options, int64_t elems) {
    size_t max = 0;
    for (int offset = 0; offset < code->elems; offset++) {
        size_t bytes = block_wire_bytes(code, options, offset, elems);
        max = bytes > max ? bytes : max;
    }
    return max;
}

/* p = scale * values + residual; returns the bits of the largest |p|. */
static inline int32_t block_load(float *restrict p, const float *restrict values, float scale,
                                 const float *restrict residual, int n) {
    int32_t max_bits = 0;
    for (int i = 0; i < n; i++) {
        float scaled = scale * values[i];
        p[i] = residual ? scaled + residual[i] : scaled;
        int32_t bits = float_bits(p[i]) & MAGNITUDE_BITS;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    return max_bits;
}

enum { BLOCK_ELEMS_MAX = 4096 };

static inline void block_encode(const BlockCode *code, const CompressorOptions *options, int64_t offset, int64_t elems,
                                const float *values, float scale, const float *residual, float *new_residual,
                                void *wire) {
    float p[BLOCK_ELEMS_MAX];
    uint8_t *out = wire;
    for (int64_t i = 0; i < elems;) {
        int n = block_part(code, offset + i, elems - i);
        int32_t max_bits = block_load(p, values + i, scale, residual ? residual + i : NULL, n);
        code->encode(options, p, max_bits, n, new_residual ? new_residual + i : NULL, out);
        out += code->bytes(options, n);
        i += n;
    }
}

static inline void block_decode(const BlockCode *code, const CompressorOptions *options, int64_t offset, int64_t elems,
                                const void *wire, float *values, bool add) {
    const uint8_t *in = wire;
    for (int64_t i = 0; i < elems;) {
        int n = block_part(code, offset + i, elems - i);
        (add ? code->decode_add : code->decode)(options, in, n, values + i);
        in += code->bytes(options, n);
        i += n;
    }
}

/* ---- blocks with one scale ---- */

/* Codes of p; new_residual may be NULL. */
static inline void block_quantise(const float *restrict p, BlockScale by, int n, float *restrict new_residual,
                                  int8_t *restrict codes) {
    for (int i = 0; i < n; i++) {
        float left;
        codes[i] = (int8_t)(block_code(p[i], by, &left) & 0xff);
        if (new_residual)
            new_residual[i] = left;
    }
}

/* What a block with NaN or Inf leaves: the step will be skipped, and its residuals never become current. */
static inline void block_poison(float *new_residual, int n) {
    for (int i = 0; new_residual && i < n; i++)
        new_residual[i] = wire_nan();
}

/* ---- a compressor from the code of its blocks ---- */

#define BLOCK_COMPRESSOR(name_, id_, block_elems_, code)                                                            \
    static size_t code##_wire_bytes(const CompressorOptions *options, int64_t offset, int64_t elems) {              \
        return block_wire_bytes(&code, options, offset, elems);                                                     \
    }                                                                                                               \
    static size_t code##_wire_bytes_max(const CompressorOptions *options, int64_t elems) {                          \
        return block_wire_bytes_max(&code, options, elems);                                                         \
    }                                                                                                               \
    static void code##_encode(const CompressorOptions *options, int64_t offset, int64_t elems, const float *values, \
                              float scale, const float *residual, float *new_residual, void *wire) {                \
        block_encode(&code, options, offset, elems, values, scale, residual, new_residual, wire);                   \
    }                                                                                                               \
    static void code##_decode(const CompressorOptions *options, int64_t offset, int64_t elems, const void *wire,    \
                              float *values) {                                                                      \
        block_decode(&code, options, offset, elems, wire, values, false);                                           \
    }                                                                                                               \
    static void code##_decode_add(const CompressorOptions *options, int64_t offset, int64_t elems,                  \
                                  const void *wire, float *sum) {                                                   \
        block_decode(&code, options, offset, elems, wire, sum, true);                                               \
    }                                                                                                               \
    const Compressor compressor_##name_ = {.name = #name_,                                                          \
                                           .id = id_,                                                               \
                                           .block_elems = block_elems_,                                             \
                                           .wire_bytes = code##_wire_bytes,                                         \
                                           .wire_bytes_max = code##_wire_bytes_max,                                 \
                                           .encode = code##_encode,                                                 \
                                           .decode = code##_decode,                                                 \
                                           .decode_add = code##_decode_add}

#endif
