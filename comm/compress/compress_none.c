/* Values as they are: f32, for pieces that are not compressed. Inf and NaN pass as they are too. */
#include "comm/compress/block.h"

static size_t none_bytes(const CompressorOptions *options, int n) {
    (void)options;
    return (size_t)n * sizeof(float);
}

static void none_encode_block(const CompressorOptions *options, const float *p, int32_t max_bits, int n,
                              float *new_residual, uint8_t *wire) {
    (void)options, (void)max_bits;
    memcpy(wire, p, (size_t)n * sizeof *p);
    for (int i = 0; new_residual && i < n; i++)
        new_residual[i] = p[i] - p[i];
}

static void none_decode_block(const CompressorOptions *options, const uint8_t *wire, int n, float *values) {
    (void)options;
    memcpy(values, wire, (size_t)n * sizeof *values);
}

static void none_add_block(const CompressorOptions *options, const uint8_t *restrict wire, int n,
                           float *restrict sum) {
    (void)options;
    for (int i = 0; i < n; i++) {
        float value;
        memcpy(&value, wire + sizeof value * (size_t)i, sizeof value);
        sum[i] += value;
    }
}

static const BlockCode none = {1024, none_bytes, none_encode_block, none_decode_block, none_add_block};

BLOCK_COMPRESSOR(none, 0, 1, none);
