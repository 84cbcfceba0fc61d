/* One byte a value and one scale a block: see compressor.h and block.h.
 *
 * int8_tensor is here to show what the blocks are worth: one scale for all the values of a tensor that travel in one
 * message, so one outlier costs all of them precision. Nothing else differs: the wire is int8's, with the same scale
 * in front of every block of 256, so that whoever decodes need not know. (Sent once, it would save 1.5 % of the bytes.)
 * What a message is, the collective decides: with it the bits depend on bucket size and ranks. */
#include "comm/compress/block.h"

enum { BLOCK = 256, LEVELS = 127, SCALE_BYTES = sizeof(float) };

static size_t int8_bytes(const CompressorOptions *options, int n) {
    (void)options;
    return SCALE_BYTES + (size_t)n;
}

static void int8_encode_block(const CompressorOptions *options, const float *p, int32_t max_bits, int n,
                              float *new_residual, uint8_t *wire) {
    (void)options;
    BlockScale by = block_scale(max_bits, LEVELS);
    memcpy(wire, &by.scale, SCALE_BYTES);
    if (max_bits < INF_BITS) {
        block_quantise(p, by, n, new_residual, (int8_t *)wire + SCALE_BYTES);
        return;
    }
    memset(wire + SCALE_BYTES, 0, (size_t)n);
    block_poison(new_residual, n);
}

static inline float load_scale(const uint8_t *wire) {
    float scale;
    memcpy(&scale, wire, sizeof scale);
    return scale;
}

static void int8_decode_block(const CompressorOptions *options, const uint8_t *restrict wire, int n,
                              float *restrict values) {
    (void)options;
    float scale = load_scale(wire);
    const int8_t *codes = (const int8_t *)wire + SCALE_BYTES;
    for (int i = 0; i < n; i++)
        values[i] = scale * (float)codes[i];
}

static void int8_add_block(const CompressorOptions *options, const uint8_t *restrict wire, int n,
                           float *restrict sum) {
    (void)options;
    float scale = load_scale(wire);
    const int8_t *codes = (const int8_t *)wire + SCALE_BYTES;
    for (int i = 0; i < n; i++) {
        float value = scale * (float)codes[i];
        sum[i] += value;
    }
}

static const BlockCode int8 = {BLOCK, int8_bytes, int8_encode_block, int8_decode_block, int8_add_block};

BLOCK_COMPRESSOR(int8, 2, BLOCK, int8);

/* ---- one scale for all of it ---- */

static void int8_tensor_encode(const CompressorOptions *options, int64_t offset, int64_t elems, const float *values,
                               float scale, const float *residual, float *new_residual, void *wire) {
    float p[BLOCK];
    int32_t max_bits = 0;
    uint8_t *out = wire;
    for (int64_t i = 0, n; i < elems; i += n) {
        n = block_part(&int8, offset + i, elems - i);
        int32_t bits = block_load(p, values + i, scale, residual ? residual + i : NULL, (int)n);
        max_bits = bits > max_bits ? bits : max_bits;
    }
    for (int64_t i = 0, n; i < elems; i += n) {
        n = block_part(&int8, offset + i, elems - i);
        block_load(p, values + i, scale, residual ? residual + i : NULL, (int)n);
        int8_encode_block(options, p, max_bits, (int)n, new_residual ? new_residual + i : NULL, out);
        out += int8_bytes(options, (int)n);
    }
}

const Compressor compressor_int8_tensor = {.name = "int8_tensor",
                                           .id = 5,
                                           .block_elems = BLOCK,
                                           .wire_bytes = int8_wire_bytes,
                                           .wire_bytes_max = int8_wire_bytes_max,
                                           .encode = int8_tensor_encode,
                                           .decode = int8_decode,
                                           .decode_add = int8_decode_add,
                                           .by_message = true};
