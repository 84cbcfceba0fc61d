/* The k largest of each block, their places and values; k depends on the block's length alone.
 *
 * The k-th largest of some keys is found bit by bit from the top: a bit is set if at least k keys reach the number with
 * it. Each pass only counts, which vectorises. Keys are the upper 16 bits of magnitudes, then, of those few that have
 * the same upper ones, the lower 16. For a small k the first passes go over the maxima of columns, not over all values.
 *
 *     upper halves --bound--> candidates, k and a few --upper halves, lower halves--> the k largest
 */
#include "comm/compress/bf16.h"
#include "comm/compress/block.h"
#include "comm/compress/topk.h"

#include <assert.h>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

enum { BLOCK = TOPK_BLOCK, GROUP = 32, COLUMNS = 256 };

/* ---- the wire ---- */

static size_t value_bytes(const CompressorOptions *options) {
    return options->bf16_values ? sizeof(uint16_t) : sizeof(float);
}

static size_t topk_bytes(const CompressorOptions *options, int n) {
    int kept = topk_kept(options, n);
    return (size_t)topk_index_bytes(kept) + (size_t)kept * value_bytes(options);
}

static void pack_indices(const uint16_t *places, int kept, uint8_t *wire) {
    for (int i = 0; i < kept; i += 2, wire += 3) {
        int low = places[i], high = i + 1 < kept ? places[i + 1] : 0;
        wire[0] = (uint8_t)low;
        wire[1] = (uint8_t)(low >> 8 | (high & 15) << 4);
        if (i + 1 < kept)
            wire[2] = (uint8_t)(high >> 4);
    }
}

/* Returns what the value will be decoded to. */
static inline float store_value(const CompressorOptions *options, uint8_t *wire, int i, float value) {
    if (!options->bf16_values) {
        memcpy(wire + sizeof value * (size_t)i, &value, sizeof value);
        return value;
    }
    uint16_t half = bf16_from_float(value);
    memcpy(wire + sizeof half * (size_t)i, &half, sizeof half);
    return bf16_to_float(half);
}

static inline float load_value(const CompressorOptions *options, const uint8_t *wire, int i) {
    float value;
    uint16_t half;
    if (!options->bf16_values)
        return *(float *)memcpy(&value, wire + sizeof value * (size_t)i, sizeof value);
    return bf16_to_float(*(uint16_t *)memcpy(&half, wire + sizeof half * (size_t)i, sizeof half));
}

/* ---- selecting ---- */

static inline int count_reaching(const uint16_t *keys, int n, uint16_t threshold) {
    uint16_t count = 0; /* at most BLOCK */
    for (int i = 0; i < n; i++)
        count = (uint16_t)(count + (keys[i] >= threshold));
    return count;
}

/* The largest threshold that at least k of the keys reach: the k-th largest key. */
static uint16_t kth_largest(const uint16_t *keys, int n, int k) {
    uint16_t found = 0;
    for (int bit = 1 << 15; bit; bit >>= 1)
        if (count_reaching(keys, n, (uint16_t)(found | bit)) >= k)
            found = (uint16_t)(found | bit);
    return found;
}

static inline uint16_t upper_half(float value) { return (uint16_t)((float_bits(value) & MAGNITUDE_BITS) >> 16); }

/* Bit i: keys[i] reaches the threshold. */
static inline uint32_t mask_reaching(const uint16_t *keys, uint16_t threshold) {
#ifdef __AVX512BW__ /* compilers do not find this instruction */
    return _mm512_cmpge_epu16_mask(_mm512_loadu_si512(keys), _mm512_set1_epi16((short)threshold));
#else
    uint32_t mask = 0;
    for (int i = 0; i < GROUP; i++)
        mask |= (uint32_t)(keys[i] >= threshold) << i;
    return mask;
#endif
}

/* Places of the values whose upper half reaches the threshold, rising; returns how many. What `upper` holds behind the
 * n-th up to a multiple of GROUP does not matter. */
static int gather(const uint16_t *upper, int n, uint16_t threshold, uint16_t *places) {
    int count = 0;
    for (int first = 0; first < n; first += GROUP) {
        uint32_t mask = mask_reaching(upper + first, threshold);
        if (n - first < GROUP)
            mask &= (1u << (n - first)) - 1;
        for (; mask; mask &= mask - 1)
            places[count++] = (uint16_t)(first + __builtin_ctz(mask));
    }
    return count;
}

/* A threshold that at least k of the upper halves reach, and not many more. The columns' maxima are as many values, so
 * the k-th largest of them is one. */
static uint16_t find_bound(const uint16_t *upper, int n, int k) {
    uint16_t columns[COLUMNS] = {0};
    if (n < BLOCK || k > COLUMNS / 2)
        return kth_largest(upper, n, k);
    for (int row = 0; row < BLOCK; row += COLUMNS)
        for (int i = 0; i < COLUMNS; i++)
            columns[i] = upper[row + i] > columns[i] ? upper[row + i] : columns[i];
    return kth_largest(columns, COLUMNS, k);
}

/* places holds `count` > k candidates, of which the k largest stay. */
static void thin(const float *p, int k, uint16_t *places, int count) {
    uint16_t upper[BLOCK], lower[BLOCK];
    int tied = 0, above = 0;
    for (int i = 0; i < count; i++)
        upper[i] = upper_half(p[places[i]]);
    uint16_t threshold = kth_largest(upper, count, k);
    for (int i = 0; i < count; i++) {
        lower[tied] = (uint16_t)float_bits(p[places[i]]);
        tied += upper[i] == threshold;
        above += upper[i] > threshold;
    }
    uint16_t last = kth_largest(lower, tied, k - above);
    int equal = k - above - (last == UINT16_MAX ? 0 : count_reaching(lower, tied, (uint16_t)(last + 1)));
    int64_t limit = (int64_t)threshold << 16 | last;
    for (int i = 0, stay = 0; stay < k; i++) {
        int32_t bits = float_bits(p[places[i]]) & MAGNITUDE_BITS;
        if (bits > limit || (bits == limit && equal-- > 0))
            places[stay++] = places[i];
    }
}

/* The places of the k largest |p|, rising; of equal ones the lowest. */
static void select_largest(const float *restrict p, int n, int k, uint16_t *restrict places) {
    uint16_t upper[BLOCK];
    for (int i = 0; i < n; i++)
        upper[i] = upper_half(p[i]);
    memset(upper + n, 0, (size_t)(BLOCK - n) * sizeof *upper);
    int count = gather(upper, n, find_bound(upper, n, k), places);
    if (count > k)
        thin(p, k, places, count);
}

/* ---- blocks ---- */

static void topk_encode_block(const CompressorOptions *options, const float *p, int32_t max_bits, int n,
                              float *new_residual, uint8_t *wire) {
    uint16_t places[BLOCK];
    int kept = topk_kept(options, n);
    bool finite = max_bits < INF_BITS;
    if (finite)
        select_largest(p, n, kept, places);
    for (int i = 0; !finite && i < kept; i++)
        places[i] = (uint16_t)i; /* what arithmetic makes of NaN is not the same everywhere: not an order to go by */
    pack_indices(places, kept, wire);
    if (new_residual)
        memcpy(new_residual, p, (size_t)n * sizeof *p);
    for (int i = 0; i < kept; i++) {
        float value = finite ? p[places[i]] : wire_nan();
        float decoded = store_value(options, wire + topk_index_bytes(kept), i, value);
        if (new_residual)
            new_residual[places[i]] = value - decoded;
    }
}

static void topk_add_block(const CompressorOptions *options, const uint8_t *wire, int n, float *sum) {
    int kept = topk_kept(options, n);
    for (int i = 0; i < kept; i++) {
        int place = topk_index(wire, i);
        assert(place < n);
        sum[place] += load_value(options, wire + topk_index_bytes(kept), i);
    }
}

static void topk_decode_block(const CompressorOptions *options, const uint8_t *wire, int n, float *values) {
    int kept = topk_kept(options, n);
    memset(values, 0, (size_t)n * sizeof *values);
    for (int i = 0; i < kept; i++) {
        int place = topk_index(wire, i);
        assert(place < n);
        values[place] = load_value(options, wire + topk_index_bytes(kept), i);
    }
}

static const BlockCode topk = {BLOCK, topk_bytes, topk_encode_block, topk_decode_block, topk_add_block};

BLOCK_COMPRESSOR(topk, 4, BLOCK, topk);
