/* One byte a value and one scale a block: see compressor.h and block.h. */
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
