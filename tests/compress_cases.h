/* What tests of compressors share: each with its options, values of every kind, arrays for one encode. */
#ifndef TESTS_COMPRESS_CASES_H
#define TESTS_COMPRESS_CASES_H

#include "base/random.h"
#include "comm/compress/compressor.h"
#include "tests/check.h"

#include <stdlib.h>
#include <string.h>

typedef struct Case {
    const char *name;
    const Compressor *compressor;
    CompressorOptions options;
} Case;

static const Case cases[] = {
    {"none", &compressor_none, {0, false}},
    {"bf16", &compressor_bf16, {0, false}},
    {"int8", &compressor_int8, {0, false}},
    {"int4", &compressor_int4, {0, false}},
    {"topk 1 %", &compressor_topk, {0.01, false}},
    {"topk 10 % bf16", &compressor_topk, {0.1, true}},
    {"topk 50 %", &compressor_topk, {0.5, false}},
    {"int8_tensor", &compressor_int8_tensor, {0, false}},
};
enum { CASES = sizeof cases / sizeof *cases };

#define FOR_EACH_CASE(c) for (const Case *c = cases; c < cases + CASES; c++)

/* Where the bits of a block do not depend on the block alone. */
#define FOR_EACH_BLOCK_CASE(c) FOR_EACH_CASE(c) if (!c->compressor->by_message)

/* ---- values ---- */

typedef void FillFn(float *values, int64_t elems, uint64_t seed);

static inline void fill_gaussian(float *values, int64_t elems, uint64_t seed) {
    for (int64_t i = 0; i < elems; i++)
        values[i] = (float)(1e-3 * random_normal(seed, 1, (uint64_t)i));
}

/* Three degrees of freedom. */
static inline void fill_student(float *values, int64_t elems, uint64_t seed) {
    for (int64_t i = 0; i < elems; i++) {
        double squares = 0;
        for (uint64_t j = 0; j < 3; j++) {
            double normal = random_normal(seed, 2 + j, (uint64_t)i);
            squares += normal * normal;
        }
        values[i] = (float)(random_normal(seed, 1, (uint64_t)i) / sqrt(squares / 3));
    }
}

static inline void fill_constant(float *values, int64_t elems, uint64_t seed) {
    for (int64_t i = 0; i < elems; i++)
        values[i] = 0.3f * (float)(seed + 1);
}

/* Four magnitudes, both signs: codes that lie half-way and equal magnitudes everywhere. */
static inline void fill_ties(float *values, int64_t elems, uint64_t seed) {
    static const float magnitudes[] = {0, 0.5f, 1.5f, 63.5f};
    for (int64_t i = 0; i < elems; i++) {
        uint64_t bits = random_bits(seed, 1, (uint64_t)i);
        values[i] = bits & 4 ? -magnitudes[bits & 3] : magnitudes[bits & 3];
    }
}

/* Every exponent, denormals included, every pattern of the mantissa. */
static inline void fill_any_finite(float *values, int64_t elems, uint64_t seed) {
    for (int64_t i = 0; i < elems; i++) {
        values[i] = as_float((uint32_t)random_bits(seed, 1, (uint64_t)i));
        if (!isfinite(values[i]))
            values[i] = 0;
    }
}

/* Told apart by their last bits only; the digits before have one bin each. */
static inline void fill_neighbours(float *values, int64_t elems, uint64_t seed) {
    uint32_t mask = seed % 2 ? 0x7f : 0xffff;
    for (int64_t i = 0; i < elems; i++)
        values[i] = as_float(0x3f800000u | ((uint32_t)random_bits(seed, 1, (uint64_t)i) & mask));
}

/* ---- one encode ---- */

enum { GUARD = 64, GUARD_BYTE = 0xA5 };

typedef struct Encoded {
    float *values, *residual, *new_residual, *decoded;
    uint8_t *wire;     /* GUARD bytes before and behind the wire of `bytes` */
    size_t bytes;
} Encoded;

static inline void *take(size_t bytes) {
    void *memory = calloc(bytes, 1);
    assert_non_null(memory);
    return memory;
}

static inline Encoded take_encoded(int64_t elems) {
    size_t bytes = ((size_t)elems + 1) * 4;
    return (Encoded){take(bytes), take(bytes), take(bytes), take(bytes),
                     take((size_t)elems * 8 + 64 + 2 * GUARD), 0};
}

static inline void give_encoded(Encoded *e) {
    free(e->values), free(e->residual), free(e->new_residual), free(e->decoded), free(e->wire);
}

/* Bits equal, or both NaN. */
static inline void check_same(const Case *c, const char *what, const float *found, const float *expected,
                              int64_t elems) {
    for (int64_t i = 0; i < elems; i++)
        if (as_bits(found[i]) != as_bits(expected[i]) && !(isnan(found[i]) && isnan(expected[i])))
            fail_msg("%s: %s of value %lld is %.9g, expected %.9g", c->name, what, (long long)i, (double)found[i],
                     (double)expected[i]);
}

#endif
