/* The k largest of each block, their places and values; k depends on the block's length alone.
 *
 * The k-th largest of some keys is found bit by bit from the top: a bit is set if at least k keys reach the number with
 * it. Each pass only counts, which vectorises. Keys are the upper 16 bits of magnitudes, then, of those few that have
 * the same upper ones, the lower 16.
 *
 *     large k    upper halves --k-th largest--> the tied ones --lower halves--> those too small get no key; the rest
 *     small k    maxima of columns --k-th largest--> candidates, k and a few --the same of them alone--> the rest
 *
 * A small k can afford to look at its candidates one by one, and a large one to go over all keys again. */
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

/* In pairs, which vectorises: of an odd number the one behind the last is read from the values that follow, and means
 * nothing. */
static void unpack_indices(const uint8_t *wire, int kept, uint16_t *places) {
    for (int i = 0; i < kept; i += 2, wire += 3) {
        places[i] = (uint16_t)(wire[0] | (wire[1] & 15) << 8);
        places[i + 1] = (uint16_t)(wire[1] >> 4 | wire[2] << 4);
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

/* The largest number below 2^bits more than `least` that at least k of the keys reach: the k-th largest key, if k of
 * them reach `least` and none lies further above it. */
static uint16_t kth_largest_from(const uint16_t *keys, int n, int k, uint16_t least, int bits) {
    uint16_t found = least;
    for (int bit = 1 << (bits - 1); bit; bit >>= 1)
        if (count_reaching(keys, n, (uint16_t)(found + bit)) >= k)
            found = (uint16_t)(found + bit);
    return found;
}

static uint16_t kth_largest(const uint16_t *keys, int n, int k) { return kth_largest_from(keys, n, k, 0, 16); }

/* The upper half of a magnitude and 1, so that 0 is the key of nothing. */
static inline uint16_t key_of(float value) { return (uint16_t)(((float_bits(value) & MAGNITUDE_BITS) >> 16) + 1); }

typedef enum Relation { REACHES, EQUALS } Relation;

/* Bit i: keys[i] stands in that relation to the threshold. */
static inline uint32_t mask_of(const uint16_t *keys, Relation relation, uint16_t threshold) {
#ifdef __AVX512BW__ /* compilers do not find these instructions */
    __m512i found = _mm512_loadu_si512(keys), wanted = _mm512_set1_epi16((short)threshold);
    return relation == EQUALS ? _mm512_cmpeq_epu16_mask(found, wanted) : _mm512_cmpge_epu16_mask(found, wanted);
#else
    uint32_t mask = 0;
    for (int i = 0; i < GROUP; i++)
        mask |= (uint32_t)(relation == EQUALS ? keys[i] == threshold : keys[i] >= threshold) << i;
    return mask;
#endif
}

/* Appends first + the numbers of the bits; places has room for GROUP more than that. Returns how many. */
static inline int append_places(uint16_t *places, uint32_t mask, int first) {
#ifdef __AVX512VBMI2__
    static const uint16_t lanes[GROUP] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                          16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    __m512i all = _mm512_add_epi16(_mm512_loadu_si512(lanes), _mm512_set1_epi16((short)first));
    _mm512_storeu_si512(places, _mm512_maskz_compress_epi16(mask, all));
#else
    int count = 0;
    for (uint32_t left = mask; left; left &= left - 1)
        places[count++] = (uint16_t)(first + __builtin_ctz(left));
#endif
    return __builtin_popcount(mask);
}

/* Places of the keys in that relation to the threshold, rising; returns how many. Keys behind the n-th are 0, up to a
 * multiple of GROUP, and threshold is not; places has room for GROUP more. */
static inline int gather(const uint16_t *keys, int n, Relation relation, uint16_t threshold, uint16_t *places) {
    int count = 0;
    for (int first = 0; first < n; first += GROUP)
        count += append_places(places + count, mask_of(keys + first, relation, threshold), first);
    return count;
}

/* Of values with the same key, at places[count], the k largest; of equal ones the first: stays[i]. */
static void choose_tied(const float *p, const uint16_t *places, int count, int k, bool *stays) {
    uint16_t lower[BLOCK];
    for (int i = 0; i < count; i++)
        lower[i] = (uint16_t)float_bits(p[places[i]]);
    uint16_t last = kth_largest(lower, count, k);
    int equal = k - (last == UINT16_MAX ? 0 : count_reaching(lower, count, (uint16_t)(last + 1)));
    for (int i = 0; i < count; i++)
        stays[i] = lower[i] > last || (lower[i] == last && equal-- > 0);
}

/* For a small k. The k-th largest of the columns' maxima is a bound that at least k keys reach, and not many more. */
static uint16_t bound_of_columns(const uint16_t *keys, int k) {
    uint16_t columns[COLUMNS] = {0};
    for (int row = 0; row < BLOCK; row += COLUMNS)
        for (int i = 0; i < COLUMNS; i++)
            columns[i] = keys[row + i] > columns[i] ? keys[row + i] : columns[i];
    return kth_largest(columns, COLUMNS, k);
}

/* places holds `count` > k candidates, of which the k largest stay. */
static void thin(const float *p, int k, uint16_t *places, int count) {
    uint16_t keys[BLOCK], tied[BLOCK];
    bool stays[BLOCK];
    int ties = 0, above = 0;
    for (int i = 0; i < count; i++)
        keys[i] = key_of(p[places[i]]);
    uint16_t threshold = kth_largest(keys, count, k);
    for (int i = 0; i < count; i++) {
        tied[ties] = places[i];
        ties += keys[i] == threshold;
        above += keys[i] > threshold;
    }
    choose_tied(p, tied, ties, k - above, stays);
    for (int i = 0, tie = 0, stay = 0; stay < k; i++)
        if (keys[i] > threshold || (keys[i] == threshold && stays[tie++]))
            places[stay++] = places[i];
}

/* The k-th largest key. Few keys lie far below the largest one: eight powers of two below it is where to look first. */
static uint16_t find_threshold(const uint16_t *keys, int n, int k, uint16_t largest) {
    enum { NEAR_BITS = 10 };
    uint16_t least = largest >= 1 << NEAR_BITS ? (uint16_t)(largest - (1 << NEAR_BITS) + 1) : 0;
    bool near = count_reaching(keys, n, least) >= k;
    return near ? kth_largest_from(keys, n, k, least, NEAR_BITS) : kth_largest(keys, n, k);
}

/* Takes the keys away from those of the threshold that are not among the k largest. */
static void drop_ties(const float *p, uint16_t *keys, int n, int k, uint16_t threshold) {
    uint16_t tied[BLOCK + GROUP];
    bool stays[BLOCK];
    int reach = count_reaching(keys, n, threshold);
    if (reach == k)
        return;
    int ties = gather(keys, n, EQUALS, threshold, tied);
    choose_tied(p, tied, ties, k - (reach - ties), stays);
    for (int i = 0; i < ties; i++)
        keys[tied[i]] = stays[i] ? threshold : 0;
}

/* The places of the k largest |p|, rising; of equal ones the lowest. places has room for BLOCK + GROUP. */
static void select_largest(const float *restrict p, int n, int k, int32_t max_bits, uint16_t *restrict places) {
    uint16_t keys[BLOCK];
    for (int i = 0; i < n; i++)
        keys[i] = key_of(p[i]);
    memset(keys + n, 0, (size_t)(BLOCK - n) * sizeof *keys);
    if (n == BLOCK && k <= COLUMNS / 2) {
        int count = gather(keys, n, REACHES, bound_of_columns(keys, k), places);
        if (count > k)
            thin(p, k, places, count);
        return;
    }
    uint16_t threshold = find_threshold(keys, n, k, key_of(bits_float(max_bits)));
    drop_ties(p, keys, n, k, threshold);
    gather(keys, n, REACHES, threshold, places);
}

/* ---- blocks ---- */

static void topk_encode_block(const CompressorOptions *options, const float *p, int32_t max_bits, int n,
                              float *new_residual, uint8_t *wire) {
    uint16_t places[BLOCK + GROUP];
    int kept = topk_kept(options, n);
    bool finite = max_bits < INF_BITS;
    if (finite)
        select_largest(p, n, kept, max_bits, places);
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

/* Places of real gradients are too uneven for the hardware to foresee the next line of sums, so it is asked for. */
static void topk_add_block(const CompressorOptions *options, const uint8_t *wire, int n, float *sum) {
    enum { AHEAD = 64 };
    uint16_t places[BLOCK + AHEAD];
    int kept = topk_kept(options, n);
    unpack_indices(wire, kept, places);
    memset(places + kept, 0, AHEAD * sizeof *places);
    for (int i = 0; i < kept; i++) {
        assert(places[i] < n);
        __builtin_prefetch(&sum[places[i + AHEAD]], 1);
        sum[places[i]] += load_value(options, wire + topk_index_bytes(kept), i);
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
