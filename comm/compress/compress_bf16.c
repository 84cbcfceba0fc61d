/* The upper half of an f32, rounded to nearest even by integer arithmetic on its bits: 8 bits of precision, f32's range
 * down to its denormals. What would round to Inf is NaN, like Inf itself. */
#include "comm/compress/bf16.h"
#include "comm/compress/block.h"

static size_t bf16_bytes(const CompressorOptions *options, int n) {
    (void)options;
    return (size_t)n * sizeof(uint16_t);
}

static void bf16_encode_block(const CompressorOptions *options, const float *restrict p, int32_t max_bits, int n,
                              float *restrict new_residual, uint8_t *restrict wire) {
    (void)options, (void)max_bits;
    for (int i = 0; i < n; i++) {
        uint16_t half = bf16_from_float(p[i]);
        memcpy(wire + sizeof half * (size_t)i, &half, sizeof half);
        if (new_residual)
            new_residual[i] = p[i] - bf16_to_float(half);
    }
}

static inline float bf16_load(const uint8_t *wire, int i) {
    uint16_t half;
    memcpy(&half, wire + sizeof half * (size_t)i, sizeof half);
    return bf16_to_float(half);
}

static void bf16_decode_block(const CompressorOptions *options, const uint8_t *restrict wire, int n,
                              float *restrict values) {
    (void)options;
    for (int i = 0; i < n; i++)
        values[i] = bf16_load(wire, i);
}

static void bf16_add_block(const CompressorOptions *options, const uint8_t *restrict wire, int n,
                           float *restrict sum) {
    (void)options;
    for (int i = 0; i < n; i++)
        sum[i] += bf16_load(wire, i);
}

static const BlockCode bf16 = {1024, bf16_bytes, bf16_encode_block, bf16_decode_block, bf16_add_block};

BLOCK_COMPRESSOR(bf16, 1, 1, bf16);
