/* Half a byte a value and one scale a block: see compressor.h and block.h. */
#include "comm/compress/block.h"

enum { BLOCK = 128, LEVELS = 7, ZERO = 8, SCALE_BYTES = sizeof(float) };

static size_t int4_bytes(const CompressorOptions *options, int n) {
    (void)options;
    return SCALE_BYTES + (size_t)(n + 1) / 2;
}

/* Codes in [-7, 7], those behind the n-th 0, to bytes. */
static void pack(const int8_t *restrict codes, int n, uint8_t *restrict bytes) {
    for (int i = 0; i < (n + 1) / 2; i++)
        bytes[i] = (uint8_t)((codes[2 * i] + ZERO) | (codes[2 * i + 1] + ZERO) << 4);
}

static void int4_encode_block(const CompressorOptions *options, const float *p, int32_t max_bits, int n,
                              float *new_residual, uint8_t *wire) {
    (void)options;
    BlockScale by = block_scale(max_bits, LEVELS);
    int8_t codes[BLOCK];
    memcpy(wire, &by.scale, SCALE_BYTES);
    if (max_bits < INF_BITS) {
        block_quantise(p, by, n, new_residual, codes);
    } else {
        memset(codes, 0, sizeof codes);
        block_poison(new_residual, n);
    }
    if (n % 2)
        codes[n] = 0;
    pack(codes, n, wire + SCALE_BYTES);
}

/* values f32[BLOCK], of which n are used. */
static inline void unpack(const uint8_t *restrict wire, int n, float *restrict values) {
    float scale;
    memcpy(&scale, wire, sizeof scale);
    const uint8_t *bytes = wire + SCALE_BYTES;
    for (int i = 0; i < (n + 1) / 2; i++) {
        values[2 * i] = scale * (float)((bytes[i] & 15) - ZERO);
        values[2 * i + 1] = scale * (float)((bytes[i] >> 4) - ZERO);
    }
}

static void int4_decode_block(const CompressorOptions *options, const uint8_t *wire, int n, float *values) {
    (void)options;
    float unpacked[BLOCK];
    unpack(wire, n, unpacked);
    memcpy(values, unpacked, (size_t)n * sizeof *values);
}

static void int4_add_block(const CompressorOptions *options, const uint8_t *wire, int n, float *restrict sum) {
    (void)options;
    float unpacked[BLOCK];
    unpack(wire, n, unpacked);
    for (int i = 0; i < n; i++)
        sum[i] += unpacked[i];
}

static const BlockCode int4 = {BLOCK, int4_bytes, int4_encode_block, int4_decode_block, int4_add_block};

BLOCK_COMPRESSOR(int4, 3, BLOCK, int4);
