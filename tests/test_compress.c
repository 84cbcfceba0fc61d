/* The compression room, one encoder at a time: every wire format against a naive one written here, error bounds derived
 * from the format, and comm.md's traps by name. */
#include "tests/compress_cases.h"

#include <float.h>

enum { ELEMS_MAX = 3 * 65536, WIRE_MAX = 4 * ELEMS_MAX + 64 };

static FillFn *const fills[] = {fill_gaussian, fill_student,    fill_constant,
                                fill_ties,     fill_any_finite, fill_neighbours};
enum { FILLS = sizeof fills / sizeof *fills };

/* ---- naive encoders, one value after another ---- */

static uint32_t naive_bf16(float p) {
    if (!isfinite(p))
        return 0x7fc0;
    double step = 0; /* between neighbours of |p| in bf16: 8 bits of precision, denormals below 2^-126 */
    int exponent;
    frexp((double)p, &exponent);
    step = ldexp(1, (p == 0 || exponent < -125 ? -125 : exponent) - 8);
    double rounded = nearbyint((double)p / step) * step;
    if (fabs(rounded) >= 0x1p128)
        return 0x7fc0;
    return as_bits(copysignf((float)rounded, p)) >> 16;
}

static float naive_scale(const float *p, int n, float levels) {
    float max = 0;
    for (int i = 0; i < n; i++) {
        if (!isfinite(p[i]))
            return NAN;
        max = fmaxf(max, fabsf(p[i]));
    }
    float scale = max / levels;
    if (scale < FLT_MIN)
        return 0;
    return isinf(scale * levels) ? nextafterf(scale, 0) : scale;
}

static int naive_code(float p, float scale) {
    if (scale == 0 || isnan(scale))
        return 0;
    float inverse = 1 / scale, ratio = p * inverse;
    return (int)nearbyintf(ratio);
}

static size_t naive_coded(const float *p, int n, float scale, bool half, uint8_t *wire, float *decoded) {
    uint32_t bits = isnan(scale) ? 0x7fc00000 : as_bits(scale);
    memcpy(wire, &bits, 4);
    uint8_t *codes = wire + 4;
    for (int i = 0; i < n + (half && n % 2); i++) {
        codes[half ? i / 2 : i] = half && i % 2 ? codes[i / 2] : 0;
        int value = i < n ? naive_code(p[i], scale) : 0;
        if (half)
            codes[i / 2] |= (uint8_t)((value + 8) << (i % 2 * 4));
        else
            codes[i] = (uint8_t)value;
        if (i < n)
            decoded[i] = scale * (float)value;
    }
    return 4 + (size_t)(half ? (n + 1) / 2 : n);
}

static size_t naive_scaled(const float *p, int n, bool half, uint8_t *wire, float *decoded) {
    return naive_coded(p, n, naive_scale(p, n, half ? 7 : 127), half, wire, decoded);
}

static size_t naive_int8(const CompressorOptions *options, const float *p, int n, uint8_t *wire, float *decoded) {
    (void)options;
    return naive_scaled(p, n, false, wire, decoded);
}

static float slice_scale; /* of all that check_slice looks at */

static size_t naive_int8_tensor(const CompressorOptions *options, const float *p, int n, uint8_t *wire,
                                float *decoded) {
    (void)options;
    return naive_coded(p, n, slice_scale, false, wire, decoded);
}

static size_t naive_int4(const CompressorOptions *options, const float *p, int n, uint8_t *wire, float *decoded) {
    (void)options;
    return naive_scaled(p, n, true, wire, decoded);
}

static size_t naive_flat(const CompressorOptions *options, const float *p, int n, uint8_t *wire, float *decoded) {
    (void)options;
    for (int i = 0; i < n; i++) {
        uint32_t half = naive_bf16(p[i]);
        memcpy(wire + 2 * i, &half, 2);
        decoded[i] = as_float(half << 16);
    }
    return 2 * (size_t)n;
}

static size_t naive_none(const CompressorOptions *options, const float *p, int n, uint8_t *wire, float *decoded) {
    (void)options;
    memcpy(wire, p, 4 * (size_t)n);
    memcpy(decoded, p, 4 * (size_t)n);
    return 4 * (size_t)n;
}

static const float *sorted_values;

/* Largest magnitude first, lowest place among equal ones. */
static int compare_places(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    float p = fabsf(sorted_values[x]), q = fabsf(sorted_values[y]);
    return p != q ? (p < q) - (p > q) : x - y;
}

static int compare_ints(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

static size_t naive_topk(const CompressorOptions *options, const float *p, int n, uint8_t *wire, float *decoded) {
    int places[4096], kept = (int)ceil(options->density * n);
    bool finite = true;
    for (int i = 0; i < n; i++) {
        places[i] = i;
        decoded[i] = 0;
        finite &= isfinite(p[i]) != 0;
    }
    sorted_values = p;
    if (finite)
        qsort(places, (size_t)n, sizeof *places, compare_places);
    qsort(places, (size_t)kept, sizeof *places, compare_ints);
    size_t indices = ((size_t)kept * 12 + 7) / 8, size = options->bf16_values ? 2 : 4;
    memset(wire, 0, indices);
    for (int i = 0; i < kept; i++) {
        for (int bit = 0; bit < 12; bit++)
            if (places[i] >> bit & 1)
                wire[(i * 12 + bit) / 8] |= (uint8_t)(1 << (i * 12 + bit) % 8);
        uint32_t bits = finite ? as_bits(p[places[i]]) : 0x7fc00000;
        if (options->bf16_values)
            bits = naive_bf16(as_float(bits));
        memcpy(wire + indices + size * (size_t)i, &bits, size);
        decoded[places[i]] = as_float(options->bf16_values ? bits << 16 : bits);
    }
    return indices + size * (size_t)kept;
}

/* ---- the table of formats ---- */

typedef size_t NaiveFn(const CompressorOptions *options, const float *p, int n, uint8_t *wire, float *decoded);

/* bf16 has 8 bits of precision, the first implied: half a step is 2^-8 of the power of two below. int8, int4: half a
 * step, and the rounding of scale, 1 / scale and p / scale: 3 times 2^-24 of max |p|. */
static const struct Format {
    NaiveFn *naive;
    double step;     /* |p - C(p)| <= step * (max |p| of the block) ... */
    double relative; /* ... or <= relative * |p|; both 0: kept values exactly */
    double ratio;    /* f32 bytes over wire bytes, of whole blocks */
} formats[CASES] = {
    {naive_none, 0, 0, 1},
    {naive_flat, 0, 0x1p-8, 2},
    {naive_int8, 0.5 / 127 + 0x3p-24, 0, 1024.0 / 260},
    {naive_int4, 0.5 / 7 + 0x3p-24, 0, 512.0 / 68},
    {naive_topk, 0, 0, 16384.0 / (62 + 4 * 41)},
    {naive_topk, 0, 0x1p-8, 16384.0 / (615 + 2 * 410)},
    {naive_topk, 0, 0, 16384.0 / (3072 + 4 * 2048)},
    {naive_int8_tensor, 0.5 / 127 + 0x3p-24, 0, 1024.0 / 260},
};

static const struct Format *format_of(const Case *c) { return &formats[c - cases]; }

static bool is_topk(const Case *c) { return c->compressor == &compressor_topk; }

/* ---- encode beside the naive encoder ---- */

static int part_elems(const Case *c, int64_t offset, int64_t elems) {
    int64_t left = c->compressor->block_elems - offset % c->compressor->block_elems;
    return (int)(left < elems ? left : elems);
}

/* p - C(p), once rounded: a double holds both terms, and their difference but for its last bits. */
static float naive_left(const Case *c, float p, float decoded, const uint8_t *part, int i) {
    double exact = decoded;
    if (format_of(c)->step > 0) {
        float scale;
        memcpy(&scale, part, 4);
        int code = c->compressor != &compressor_int4 ? (int8_t)part[4 + i] : (part[4 + i / 2] >> (i % 2 * 4) & 15) - 8;
        exact = (double)scale * code;
    }
    return (float)((double)p - exact);
}

static float naive_p(const Encoded *e, int64_t i, float scale) {
    volatile float scaled = scale * e->values[i];
    return scaled + e->residual[i];
}

static float naive_slice_scale(const Encoded *e, int64_t elems, float scale) {
    float *p = take((size_t)elems * sizeof *p + 1);
    for (int64_t i = 0; i < elems; i++)
        p[i] = naive_p(e, i, scale);
    float result = naive_scale(p, (int)elems, 127);
    free(p);
    return result;
}

/* wire, sizes, decoded values, residuals and sums of [offset, offset + elems) against the naive encoder. */
static void check_slice(const Case *c, Encoded *e, int64_t offset, int64_t elems, float scale) {
    const Compressor *compressor = c->compressor;
    e->bytes = compressor->wire_bytes(&c->options, offset, elems);
    assert_true(e->bytes <= compressor->wire_bytes_max(&c->options, elems));
    memset(e->wire, GUARD_BYTE, e->bytes + 2 * GUARD);
    e->new_residual[elems] = e->decoded[elems] = 12345;
    uint8_t *wire = e->wire + GUARD - 1 - offset % 3; /* any alignment */
    compressor->encode(&c->options, offset, elems, e->values, scale, e->residual, e->new_residual, wire);
    compressor->decode(&c->options, offset, elems, wire, e->decoded);
    for (int i = 0; i < GUARD / 2; i++)
        assert_true(wire[-1 - i] == GUARD_BYTE && wire[e->bytes + (size_t)i] == GUARD_BYTE);
    assert_true(e->new_residual[elems] == 12345 && e->decoded[elems] == 12345);

    size_t at = 0;
    slice_scale = naive_slice_scale(e, elems, scale);
    for (int64_t i = 0; i < elems;) {
        float p[4096], decoded[4096], left[4096], sum[4096];
        uint8_t naive[4 * 4096 + 4];
        int n = part_elems(c, offset + i, elems - i);
        bool finite = !(c->compressor->by_message && isnan(slice_scale));
        for (int j = 0; j < n; j++) {
            p[j] = naive_p(e, i + j, scale);
            finite &= isfinite(p[j]) != 0;
        }
        size_t bytes = format_of(c)->naive(&c->options, p, n, naive, decoded);
        if (memcmp(naive, wire + at, bytes) != 0)
            fail_msg("%s: wire of the block at %lld of [%lld, +%lld)", c->name, (long long)(offset + i),
                     (long long)offset, (long long)elems);
        check_same(c, "decoded", e->decoded + i, decoded, n);
        for (int j = 0; j < n; j++) {
            left[j] = naive_left(c, p[j], decoded[j], naive, j);
            sum[j] = (float)j + decoded[j];
        }
        if (finite)
            check_same(c, "residual", e->new_residual + i, left, n);
        for (int j = 0; j < n; j++)
            decoded[j] = (float)j;
        compressor->decode_add(&c->options, offset + i, n, wire + at, decoded);
        check_same(c, "sum", decoded, sum, n);
        at += bytes;
        i += n;
    }
    assert_int_equal(at, e->bytes);
}

/* Trap: size not divisible by a block: 0, 1, blocks and 4,096 and one less or more, at offsets inside a block. */
static void test_naive(void **state) {
    (void)state;
    static const int64_t sizes[] = {0, 1, 2, 3, 127, 128, 129, 255, 256, 257, 511, 4095, 4096, 4097, 9001};
    static const int64_t offsets[] = {0, 1, 100, 255, 4095, 4096 * 3 + 128, ((int64_t)1 << 33) + 5};
    Encoded e = take_encoded(9001);
    FOR_EACH_CASE(c)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (size_t o = 0; o < sizeof offsets / sizeof *offsets; o++) {
                FillFn *fill = fills[(s + o) % FILLS];
                fill(e.values, sizes[s], s * 10 + o);
                fill_gaussian(e.residual, sizes[s], 99);
                check_slice(c, &e, offsets[o], sizes[s], 0.125f);
            }
    give_encoded(&e);
}

/* Every kind of data, without residual to blur it. */
static void test_naive_data(void **state) {
    (void)state;
    Encoded e = take_encoded(2 * 4096 + 77);
    FOR_EACH_CASE(c)
        for (int f = 0; f < FILLS; f++)
            for (uint64_t seed = 0; seed < 3; seed++) {
                fills[f](e.values, 2 * 4096 + 77, seed);
                check_slice(c, &e, 33, 2 * 4096 + 77, 1);
            }
    give_encoded(&e);
}

/* Trap: 16-bit indices. */
static void test_over_65536_values(void **state) {
    (void)state;
    Encoded e = take_encoded(ELEMS_MAX);
    fill_student(e.values, ELEMS_MAX, 5);
    FOR_EACH_CASE(c)
        check_slice(c, &e, 4096 + 7, ELEMS_MAX, 1);
    for (int64_t i = 0; i < ELEMS_MAX; i++)
        e.values[i] = i == ELEMS_MAX - 3;
    FOR_EACH_CASE(c) {
        check_slice(c, &e, 0, ELEMS_MAX, 1);
        for (int64_t i = 0; i < ELEMS_MAX; i++)
            assert_true(e.decoded[i] == (i == ELEMS_MAX - 3));
    }
    give_encoded(&e);
}

/* ---- literal wires ---- */

static void check_wire(const Case *c, const float *values, int n, const uint8_t *expected, size_t bytes) {
    uint8_t wire[64];
    assert_int_equal(c->compressor->wire_bytes(&c->options, 0, n), bytes);
    c->compressor->encode(&c->options, 0, n, values, 1, NULL, NULL, wire);
    assert_memory_equal(wire, expected, bytes);
}

#define CHECK_WIRE(c, n, ...)                                                                                          \
    do {                                                                                                               \
        static const uint8_t expected_[] = {__VA_ARGS__};                                                              \
        check_wire(c, values, n, expected_, sizeof expected_);                                                         \
    } while (0)

static void test_golden(void **state) {
    (void)state;
    static const float values[] = {1, -2, 0.5f, 0, 127, -63.5f, -0.0f};
    const Case sparse = {.name = "topk", .compressor = &compressor_topk, .options = {0.4, false}};
    const Case sparse_bf16 = {.name = "topk", .compressor = &compressor_topk, .options = {0.4, true}};
    CHECK_WIRE(&cases[0], 2, 0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0);
    CHECK_WIRE(&cases[1], 7, 0x80, 0x3f, 0, 0xc0, 0, 0x3f, 0, 0, 0xfe, 0x42, 0x7e, 0xc2, 0, 0x80);
    CHECK_WIRE(&cases[2], 7, 0, 0, 0x80, 0x3f, 1, 0xfe, 0, 0, 127, 0xc0, 0); /* 0.5 to 0, -63.5 to -64 */
    CHECK_WIRE(&cases[3], 3, 0x25, 0x49, 0x92, 0x3e, 0x1b, 0x8a);            /* scale just over 2/7, codes 3 -7 2 */
    CHECK_WIRE(&sparse, 7, 1, 0x40, 0, 5, 0, 0, 0, 0, 0xc0, 0, 0, 0xfe, 0x42, 0, 0, 0x7e, 0xc2);
    CHECK_WIRE(&sparse_bf16, 3, 0, 0x10, 0, 0x80, 0x3f, 0, 0xc0);
}

/* ---- error bounds ---- */

static double bound(const struct Format *format, double max, double p) {
    return format->step * max + format->relative * fabs(p);
}

static void test_round_trip_bound(void **state) {
    (void)state;
    enum { ELEMS = 3 * 4096 };
    Encoded e = take_encoded(ELEMS);
    for (int f = 0; f < 4; f++)
        FOR_EACH_CASE(c) {
            fills[f](e.values, ELEMS, 7);
            c->compressor->encode(&c->options, 0, ELEMS, e.values, 1, NULL, NULL, e.wire);
            c->compressor->decode(&c->options, 0, ELEMS, e.wire, e.decoded);
            int64_t block = c->compressor->by_message ? ELEMS : c->compressor->block_elems;
            double max = 0;
            for (int64_t i = 0; i < ELEMS; i++) {
                double p = e.values[i];
                max = i % block == 0 ? 0 : max;
                for (int64_t j = i; i % block == 0 && j < i + block; j++)
                    max = fmax(max, fabs((double)e.values[j]));
                if (!(is_topk(c) && e.decoded[i] == 0))
                    assert_close(e.decoded[i], p, bound(format_of(c), max, p));
            }
        }
    give_encoded(&e);
}

/* Integers up to the number of levels, the largest in every block. */
static void test_exact_on_what_the_format_holds(void **state) {
    (void)state;
    enum { ELEMS = 4096 + 300 };
    Encoded e = take_encoded(ELEMS);
    FOR_EACH_CASE(c) {
        int levels = c->compressor == &compressor_int4 ? 7 : 127;
        for (int i = 0; i < ELEMS; i++)
            e.values[i] = i % 128 == 0 ? (float)levels : (float)((i * 7919) % (2 * levels + 1) - levels);
        for (int i = 0; is_topk(c) && i < ELEMS; i++)
            e.values[i] = i % 128 == 1 ? (float)-i : 0;
        c->compressor->encode(&c->options, 0, ELEMS, e.values, 0.25f, NULL, e.new_residual, e.wire);
        c->compressor->decode(&c->options, 0, ELEMS, e.wire, e.decoded);
        for (int i = 0; i < ELEMS; i++) {
            float rounded = is_topk(c) && c->options.bf16_values ? as_float(naive_bf16(e.values[i] / 4) << 16)
                                                                 : e.values[i] / 4;
            assert_true(e.decoded[i] == rounded && e.new_residual[i] == e.values[i] / 4 - rounded);
        }
    }
    give_encoded(&e);
}

static void test_ratio_and_nmse(void **state) {
    (void)state;
    static const double nmse_max[] = {0, 4e-6, 5e-4, 6e-2};
    enum { ELEMS = 16 * 4096 };
    Encoded e = take_encoded(ELEMS);
    for (int f = 0; f < 2; f++) /* Gaussian and Student's t */
        for (int k = 0; k < CASES; k++) {
            const Case *c = &cases[k];
            double noise = 0, signal = 0;
            fills[f](e.values, ELEMS, 11);
            c->compressor->encode(&c->options, 0, ELEMS, e.values, 1, NULL, NULL, e.wire);
            c->compressor->decode(&c->options, 0, ELEMS, e.wire, e.decoded);
            for (int i = 0; i < ELEMS; i++) {
                double lost = (double)e.values[i] - (double)e.decoded[i];
                noise += lost * lost;
                signal += (double)e.values[i] * (double)e.values[i];
            }
            if (k < 4)
                assert_true(noise / signal <= nmse_max[k]);
            double ratio = 4.0 * ELEMS / (double)c->compressor->wire_bytes(&c->options, 0, ELEMS);
            assert_close(ratio, format_of(c)->ratio, 1e-12);
        }
    give_encoded(&e);
}

/* ---- slices ---- */

/* Two slices that meet at a block bound have the wire of both together. */
static void test_adjacent_slices(void **state) {
    (void)state;
    enum { ELEMS = 20000, OFFSET = 1111 };
    Encoded e = take_encoded(ELEMS);
    uint8_t *whole = take(WIRE_MAX);
    fill_gaussian(e.values, ELEMS, 3);
    FOR_EACH_BLOCK_CASE(c) {
        int block = c->compressor->block_elems;
        c->compressor->encode(&c->options, OFFSET, ELEMS, e.values, 1, NULL, NULL, whole);
        for (int64_t cut = (OFFSET / block + 1) * block - OFFSET; cut < ELEMS; cut += block * (1 + 4000 / block)) {
            size_t first = c->compressor->wire_bytes(&c->options, OFFSET, cut);
            size_t both = c->compressor->wire_bytes(&c->options, OFFSET, ELEMS);
            assert_int_equal(first + c->compressor->wire_bytes(&c->options, OFFSET + cut, ELEMS - cut), both);
            c->compressor->encode(&c->options, OFFSET, cut, e.values, 1, NULL, NULL, e.wire);
            c->compressor->encode(&c->options, OFFSET + cut, ELEMS - cut, e.values + cut, 1, NULL, NULL,
                                  e.wire + first);
            assert_memory_equal(e.wire, whole, both);
        }
    }
    free(whole);
    give_encoded(&e);
}

static void test_wire_bytes_max(void **state) {
    (void)state;
    FOR_EACH_CASE(c)
        for (int64_t elems = 0; elems < 9000; elems += 1 + elems / 7) {
            size_t most = 0;
            for (int64_t offset = 0; offset < 4096; offset++) {
                size_t bytes = c->compressor->wire_bytes(&c->options, 4096 * 5 + offset, elems);
                most = bytes > most ? bytes : most;
            }
            size_t max = c->compressor->wire_bytes_max(&c->options, elems);
            assert_true(most <= max && max <= most + 8);
        }
}

static void test_residual_in_place(void **state) {
    (void)state;
    enum { ELEMS = 2 * 4096 + 100 };
    Encoded e = take_encoded(ELEMS);
    uint8_t *wire = take(WIRE_MAX);
    FOR_EACH_CASE(c) {
        fill_student(e.values, ELEMS, 1);
        fill_gaussian(e.residual, ELEMS, 2);
        c->compressor->encode(&c->options, 50, ELEMS, e.values, 0.5f, e.residual, e.new_residual, wire);
        c->compressor->encode(&c->options, 50, ELEMS, e.values, 0.5f, e.residual, e.residual, e.wire);
        assert_memory_equal(wire, e.wire, c->compressor->wire_bytes(&c->options, 50, ELEMS));
        check_same(c, "residual", e.residual, e.new_residual, ELEMS);
    }
    free(wire);
    give_encoded(&e);
}

/* Trap: two runs give the same bits, whatever memory held before. */
static void test_determinism(void **state) {
    (void)state;
    enum { ELEMS = 10000 };
    Encoded e = take_encoded(ELEMS);
    uint8_t *wire = take(WIRE_MAX);
    fill_student(e.values, ELEMS, 8);
    FOR_EACH_CASE(c) {
        size_t bytes = c->compressor->wire_bytes(&c->options, 3, ELEMS);
        memset(wire, 0xFF, bytes);
        memset(e.wire, 0, bytes);
        c->compressor->encode(&c->options, 3, ELEMS, e.values, 1, NULL, NULL, wire);
        c->compressor->encode(&c->options, 3, ELEMS, e.values, 1, NULL, e.new_residual, e.wire);
        assert_memory_equal(wire, e.wire, bytes);
    }
    free(wire);
    give_encoded(&e);
}

/* ---- unusual values ---- */

/* Trap: 0/0 on zero blocks; tiny gradients flattened. Zeros, denormals, 1e-12, -0.0, one huge value: nothing turns into
 * NaN, and what is not sent stays in the residual. */
static void test_tiny_and_huge(void **state) {
    (void)state;
    enum { ELEMS = 4096 };
    static const float fill[] = {0, -0.0f, 1e-12f, 1e-38f, 1e-40f, 0x1p-149f, 3e37f, -1e-3f, FLT_MAX / 4};
    static const float huge[] = {0, 1e30f, FLT_MAX / 2, -FLT_MAX};
    Encoded e = take_encoded(ELEMS);
    FOR_EACH_CASE(c)
        for (size_t f = 0; f < sizeof fill / sizeof *fill; f++)
            for (size_t h = 0; h < sizeof huge / sizeof *huge; h++) {
                for (int i = 0; i < ELEMS; i++)
                    e.values[i] = i % 2 ? fill[f] : fill[f] / 2;
                if (huge[h] != 0)
                    e.values[2000] = huge[h];
                check_slice(c, &e, 0, ELEMS, 1);
                bool rounds_to_inf = huge[h] == -FLT_MAX &&
                                     (c->compressor == &compressor_bf16 || c->options.bf16_values);
                for (int i = 0; i < ELEMS; i++) {
                    if (rounds_to_inf && i == 2000) {
                        assert_true(isnan(e.decoded[i]));
                        continue;
                    }
                    assert_true(isfinite(e.decoded[i]) && isfinite(e.new_residual[i]));
                    double both = (double)e.decoded[i] + (double)e.new_residual[i];
                    assert_close(both, e.values[i], 0x1p-23 * fabs((double)e.decoded[i]) + 0x1p-149);
                }
            }
    give_encoded(&e);
}

/* 1e-12 everywhere is a block like any other. */
static void test_small_gradients_keep_their_size(void **state) {
    (void)state;
    Encoded e = take_encoded(4096);
    FOR_EACH_CASE(c) {
        fill_gaussian(e.values, 4096, 4);
        c->compressor->encode(&c->options, 0, 4096, e.values, 0x1p-30f, NULL, NULL, e.wire);
        c->compressor->decode(&c->options, 0, 4096, e.wire, e.new_residual);
        c->compressor->encode(&c->options, 0, 4096, e.values, 1, NULL, NULL, e.wire);
        c->compressor->decode(&c->options, 0, 4096, e.wire, e.decoded);
        for (int i = 0; i < 4096; i++)
            assert_true(e.decoded[i] * 0x1p-30f == e.new_residual[i]);
    }
    give_encoded(&e);
}

/* Inf and NaN in any position, and what overflows in p, are seen behind the wire; other blocks stay as they are. */
static void test_inf_and_nan(void **state) {
    (void)state;
    enum { ELEMS = 3 * 4096 };
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY, FLT_MAX};
    Encoded e = take_encoded(ELEMS);
    FOR_EACH_BLOCK_CASE(c)
        for (int at = 4096; at < 2 * 4096; at += at < 4096 + 260 ? 1 : 257) {
            float value = bad[at % 5];
            fill_gaussian(e.values, ELEMS, 6);
            memset(e.residual, 0, ELEMS * sizeof(float));
            e.values[at] = value;
            e.residual[at] = value == FLT_MAX ? FLT_MAX / 2 : 0;
            check_slice(c, &e, 0, ELEMS, 1);
            int block = c->compressor->block_elems, nans = 0;
            for (int i = 0; i < ELEMS; i++) {
                bool same_block = i / block == at / block;
                nans += !isfinite(e.decoded[i]);
                assert_true(isfinite(e.decoded[i]) || same_block);
            }
            int expected = is_topk(c) ? (int)ceil(c->options.density * block) : block;
            assert_int_equal(nans, expected);
        }
    give_encoded(&e);
}

/* ---- int8 with one scale per message ---- */

/* Of encode and decode of e->values, and of every block's largest square, the mean. */
static double nmse_of(const Compressor *compressor, Encoded *e, int64_t elems, double *mean_square_max) {
    double noise = 0, signal = 0, squares = 0;
    compressor->encode(&cases[2].options, 0, elems, e->values, 1, NULL, NULL, e->wire);
    compressor->decode(&cases[2].options, 0, elems, e->wire, e->decoded);
    for (int64_t i = 0; i < elems; i++) {
        double lost = (double)e->values[i] - (double)e->decoded[i];
        noise += lost * lost;
        signal += (double)e->values[i] * (double)e->values[i];
    }
    for (int64_t i = 0; i < elems; i += 256) {
        float scale;
        memcpy(&scale, e->wire + i / 256 * 260, sizeof scale);
        squares += pow(127.0 * (double)scale, 2) * 256 / (double)elems;
    }
    *mean_square_max = squares;
    return noise / signal;
}

/* What a scale loses of a value is s^2 / 12 as long as the values spread over a few steps. So with one scale instead of
 * one per block, noise grows from the mean of the blocks' squared maxima to the square of the largest one: on heavy
 * tails to far more, on Gaussian values by a little. */
static void test_one_scale_per_message(void **state) {
    (void)state;
    enum { ELEMS = 1 << 20 };
    Encoded e = take_encoded(ELEMS);
    for (int f = 0; f < 2; f++) {
        double of_blocks, of_all;
        fills[f](e.values, ELEMS, 11);
        double blocks = nmse_of(&compressor_int8, &e, ELEMS, &of_blocks);
        double all = nmse_of(&compressor_int8_tensor, &e, ELEMS, &of_all);
        print_message("%s, %d values: NMSE %.2e with a scale per block, %.2e with one scale\n",
                      f ? "Student t3" : "Gaussian", ELEMS, blocks, all);
        assert_close(all / blocks, of_all / of_blocks, 0.1 * of_all / of_blocks);
        assert_true(f ? all > 30 * blocks : all < 4 * blocks);
    }
    give_encoded(&e);
}

/* Inf and NaN anywhere are seen in every value of the message; zeros are zeros. */
static void test_one_scale_of_unusual_values(void **state) {
    (void)state;
    enum { ELEMS = 3 * 4096 };
    const Case *c = &cases[CASES - 1];
    Encoded e = take_encoded(ELEMS);
    check_slice(c, &e, 5, ELEMS, 1);
    for (int i = 0; i < ELEMS; i++)
        assert_true(e.decoded[i] == 0 && e.new_residual[i] == 0);
    for (int at = 0; at < ELEMS; at += 1 + at / 3) {
        fill_gaussian(e.values, ELEMS, 6);
        e.values[at] = at % 2 ? NAN : -INFINITY;
        check_slice(c, &e, 5, ELEMS, 1);
        for (int i = 0; i < ELEMS; i++)
            assert_true(isnan(e.decoded[i]));
    }
    give_encoded(&e);
}

/* ---- error feedback ---- */

/* Largest distance, over `rounds`, between what was sent so far (with what is left) and what came in. */
static double telescope(const Case *c, bool feedback, int rounds) {
    enum { ELEMS = 4096 + 500 };
    Encoded e = take_encoded(ELEMS);
    double *in = take(ELEMS * sizeof *in), *out = take(ELEMS * sizeof *out), worst = 0;
    for (int round = 0; round < rounds; round++) {
        fill_student(e.values, ELEMS, 100 + (uint64_t)round);
        c->compressor->encode(&c->options, 77, ELEMS, e.values, 1, feedback ? e.residual : NULL, e.residual, e.wire);
        c->compressor->decode(&c->options, 77, ELEMS, e.wire, e.decoded);
        for (int i = 0; i < ELEMS; i++) {
            in[i] += (double)e.values[i];
            out[i] += (double)e.decoded[i];
        }
    }
    for (int i = 0; i < ELEMS; i++)
        worst = fmax(worst, fabs(out[i] + (double)e.residual[i] - in[i]) / 100);
    give_encoded(&e);
    free(in), free(out);
    return worst;
}

/* Sum of decoded + residual = sum of inputs. Each round rounds p, C(p) and what is left, of values below 100 or so: 3
 * times 2^-24, 50 times. Without feedback it is not. */
static void test_telescope(void **state) {
    (void)state;
    FOR_EACH_CASE(c) {
        double tolerance = 50 * 3 * 0x1p-24;
        assert_close(telescope(c, true, 50), 0, tolerance);
        if (c->compressor != &compressor_none)
            assert_false(telescope(c, false, 50) <= tolerance);
    }
}

static void test_find(void **state) {
    (void)state;
    FOR_EACH_CASE(c)
        assert_ptr_equal(compressor_find(c->compressor->name), c->compressor);
    assert_null(compressor_find("int5"));
    assert_int_equal(compressor_none.id, 0);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_find),
    cmocka_unit_test(test_golden),
    cmocka_unit_test(test_naive),
    cmocka_unit_test(test_naive_data),
    cmocka_unit_test(test_over_65536_values),
    cmocka_unit_test(test_round_trip_bound),
    cmocka_unit_test(test_exact_on_what_the_format_holds),
    cmocka_unit_test(test_ratio_and_nmse),
    cmocka_unit_test(test_adjacent_slices),
    cmocka_unit_test(test_wire_bytes_max),
    cmocka_unit_test(test_residual_in_place),
    cmocka_unit_test(test_determinism),
    cmocka_unit_test(test_tiny_and_huge),
    cmocka_unit_test(test_small_gradients_keep_their_size),
    cmocka_unit_test(test_inf_and_nan),
    cmocka_unit_test(test_one_scale_per_message),
    cmocka_unit_test(test_one_scale_of_unusual_values),
    cmocka_unit_test(test_telescope),
};

CHECK_MAIN(tests)
