/* Compressors on a GPU beside the CPU: the same bytes on the wire, residuals, values and sums, to the bit. */
#include "tests/compress_cases.h"

#include "comm/compress/codec.h"
#include "comm/compress/compress_cuda.h"
#include "tests/gpu_arrays.h"

#include <math.h>

enum { ELEMS_MAX = 3 * 65536, WIRE_MAX = 4 * ELEMS_MAX + 64, SHIFT_MAX = 8 };

/* ---- values ---- */

static void fill_equal(float *values, int64_t elems, uint64_t seed) {
    for (int64_t i = 0; i < elems; i++)
        values[i] = seed % 2 ? 0.3f : -0.0f;
}

/* Stretches of 128 zeros, denormals, values whose scale is not normal, values whose scale overflows, small integers. */
static void fill_extremes(float *values, int64_t elems, uint64_t seed) {
    static const float sizes[] = {0, 1e-42f, 1e-37f, 3.4e38f, 1e-3f, 64};
    for (int64_t i = 0; i < elems; i++) {
        uint64_t kind = random_bits(seed, 1, (uint64_t)(i / 128)), bits = random_bits(seed, 2, (uint64_t)i);
        values[i] = sizes[kind % 6] * (float)((int)(bits % 257) - 128) / 128;
    }
}

/* The same, with a NaN or an Inf now and then. */
static void fill_broken(float *values, int64_t elems, uint64_t seed) {
    fill_extremes(values, elems, seed);
    for (int64_t i = 0; i < elems; i++) {
        uint64_t bits = random_bits(seed, 3, (uint64_t)i);
        if (bits % 2999 == 0)
            values[i] = as_float((bits >> 32 & 1 ? 0x80000000u : 0) | (bits >> 33 & 1 ? 0x7fc01234u : 0x7f800000u));
    }
}

static FillFn *const fills[] = {fill_gaussian, fill_ties,     fill_any_finite, fill_neighbours,
                                fill_equal,    fill_extremes, fill_broken};
enum { FILLS = sizeof fills / sizeof *fills };

/* ---- one operation on both ---- */

typedef struct Arrays {
    float *values, *residual, *new_residual;
    uint8_t *wire;
} Arrays;

typedef struct Bench {
    Gpu *gpu;
    Arrays host, device;    /* the device's hold SHIFT_MAX more */
    float *found, *decoded; /* the host's */
    uint8_t *found_wire;
} Bench;

static Bench bench_open(void) {
    size_t bytes = (ELEMS_MAX + SHIFT_MAX) * sizeof(float), wire_bytes = WIRE_MAX + SHIFT_MAX + 2 * GUARD;
    Bench bench = {.gpu = open_gpu(),
                   .host = {take(bytes), take(bytes), take(bytes), take(wire_bytes)},
                   .found = take(bytes),
                   .decoded = take(bytes),
                   .found_wire = take(wire_bytes)};
    bench.device = (Arrays){gpu_take(bench.gpu, bench.found, bytes), gpu_take(bench.gpu, bench.found, bytes),
                            gpu_take(bench.gpu, bench.found, bytes),
                            gpu_take(bench.gpu, bench.found_wire, wire_bytes)};
    return bench;
}

static void bench_close(Bench *bench) {
    free(bench->host.values), free(bench->host.residual), free(bench->host.new_residual), free(bench->host.wire);
    free(bench->found), free(bench->decoded), free(bench->found_wire);
    gpu_give(bench->gpu, bench->device.values);
    gpu_give(bench->gpu, bench->device.residual);
    gpu_give(bench->gpu, bench->device.new_residual);
    gpu_give(bench->gpu, bench->device.wire);
    gpu_close(bench->gpu);
    shuffle_threads(0);
}

/* A slice, and how its arrays lie. */
typedef struct Place {
    int64_t offset, elems;
    int shift, wire_shift; /* of device arrays, in elements and bytes, from where allocations begin */
    bool feedback;         /* with residuals */
    bool in_place;         /* the new ones take the place of the old ones */
} Place;

/* Bits equal, or both NaN: arithmetic makes different ones on different machines. */
static void check_values(const Case *c, Place place, const char *what, const float *found, const float *expected) {
    for (int64_t i = 0; i < place.elems; i++)
        if (as_bits(found[i]) != as_bits(expected[i]) && !(isnan(found[i]) && isnan(expected[i])))
            fail_msg("%s: %s of value %lld of [%lld, +%lld), shifted by %d, is %.9g, expected %.9g", c->name, what,
                     (long long)i, (long long)place.offset, (long long)place.elems, place.shift, (double)found[i],
                     (double)expected[i]);
}

static void check_wire(const Case *c, Place place, const uint8_t *found, const uint8_t *expected, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        float a, b;
        memcpy(&a, found + i / 4 * 4, sizeof a);
        memcpy(&b, expected + i / 4 * 4, sizeof b);
        if (found[i] != expected[i] && !(c->compressor == &compressor_none && isnan(a) && isnan(b)))
            fail_msg("%s: byte %zu of %zu of [%lld, +%lld), shifted by %d, is %d, expected %d", c->name, i, bytes,
                     (long long)place.offset, (long long)place.elems, place.wire_shift, found[i], expected[i]);
    }
}

static void check_encode(Bench *b, const Case *c, Place place, float scale) {
    size_t bytes = (size_t)place.elems * sizeof(float);
    size_t wire_bytes = c->compressor->wire_bytes(&c->options, place.offset, place.elems);
    float *residual = place.feedback ? b->device.residual + place.shift : NULL;
    float *new_residual = !place.feedback ? NULL
                          : place.in_place ? residual
                                           : b->device.new_residual + (place.shift + 1) % 4;
    memset(b->host.wire, GUARD_BYTE, wire_bytes + 2 * GUARD);
    to_device(b->gpu, b->device.wire + place.wire_shift, b->host.wire, wire_bytes + 2 * GUARD);
    to_device(b->gpu, b->device.values + place.shift, b->host.values, bytes);
    to_device(b->gpu, b->device.residual + place.shift, b->host.residual, bytes + sizeof(float));
    if (new_residual && !place.in_place)
        to_device(b->gpu, new_residual, b->host.residual, bytes + sizeof(float));

    c->compressor->encode(&c->options, place.offset, place.elems, b->host.values, scale,
                          place.feedback ? b->host.residual : NULL, place.feedback ? b->host.new_residual : NULL,
                          b->host.wire + GUARD);
    cuda_compressor(c->compressor)
        ->encode(b->gpu, gpu_stream(b->gpu), &c->options, place.offset, place.elems, b->device.values + place.shift,
                 scale, residual, new_residual, b->device.wire + place.wire_shift + GUARD);
    to_host(b->gpu, b->found_wire, b->device.wire + place.wire_shift, wire_bytes + 2 * GUARD);
    check_wire(c, place, b->found_wire + GUARD, b->host.wire + GUARD, wire_bytes);
    for (int i = 0; i < GUARD; i++)
        assert_true(b->found_wire[i] == GUARD_BYTE && b->found_wire[GUARD + wire_bytes + (size_t)i] == GUARD_BYTE);
    if (!place.feedback)
        return;
    to_host(b->gpu, b->found, new_residual, bytes + sizeof(float));
    check_values(c, place, "residual", b->found, b->host.new_residual);
    assert_int_equal(as_bits(b->found[place.elems]), as_bits(b->host.residual[place.elems]));
}

/* Of the wire that encode left; sums are added to the residuals. */
static void check_decode(Bench *b, const Case *c, Place place) {
    size_t bytes = (size_t)place.elems * sizeof(float);
    const CudaCompressor *cuda = cuda_compressor(c->compressor);
    const uint8_t *wire = b->device.wire + place.wire_shift + GUARD;
    float *sum = b->device.residual + place.shift, *values = b->device.values + place.shift;
    to_device(b->gpu, sum, b->host.residual, bytes + sizeof(float));
    to_device(b->gpu, values, b->host.residual, bytes + sizeof(float));
    cuda->decode(b->gpu, gpu_stream(b->gpu), &c->options, place.offset, place.elems, wire, values);
    cuda->decode_add(b->gpu, gpu_stream(b->gpu), &c->options, place.offset, place.elems, wire, sum);

    c->compressor->decode(&c->options, place.offset, place.elems, b->host.wire + GUARD, b->decoded);
    to_host(b->gpu, b->found, values, bytes + sizeof(float));
    check_values(c, place, "decoded", b->found, b->decoded);
    assert_int_equal(as_bits(b->found[place.elems]), as_bits(b->host.residual[place.elems]));

    memcpy(b->decoded, b->host.residual, bytes);
    c->compressor->decode_add(&c->options, place.offset, place.elems, b->host.wire + GUARD, b->decoded);
    to_host(b->gpu, b->found, sum, bytes + sizeof(float));
    check_values(c, place, "sum", b->found, b->decoded);
    assert_int_equal(as_bits(b->found[place.elems]), as_bits(b->host.residual[place.elems]));
}

/* ---- tests ---- */

/* Slices that begin and end anywhere, arrays that lie anywhere, all kinds of values. */
static void test_slices(void **state) {
    (void)state;
    static const int64_t sizes[] = {0,   1,   2,   3,   4,    5,    63,   127,  128,  129,
                                    255, 256, 257, 511, 1024, 4095, 4096, 4097, 9001, 12288};
    static const int64_t offsets[] = {0, 1, 2, 100, 128, 255, 4095, 4096 * 3 + 128, ((int64_t)1 << 33) + 5};
    Bench bench = bench_open();
    uint64_t seed = 0;
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t o = 0; o < sizeof offsets / sizeof *offsets; o++, seed++) {
            uint64_t bits = random_bits(1, 1, seed);
            Place place = {.offset = offsets[o],
                           .elems = sizes[s],
                           .shift = (int)(bits & 1 ? offsets[o] % 4 : (int64_t)(bits >> 8) % 4),
                           .wire_shift = (int)(bits & 2 ? 0 : (bits >> 16) % 8),
                           .feedback = bits & 12,
                           .in_place = bits & 4};
            fills[seed % FILLS](bench.host.values, sizes[s], seed);
            fill_gaussian(bench.host.residual, sizes[s] + 1, 99);
            shuffle_threads(seed);
            FOR_EACH_BLOCK_CASE(c) {
                check_encode(&bench, c, place, 0.125f);
                check_decode(&bench, c, place);
            }
        }
    bench_close(&bench);
}

/* Every kind of data in whole and part blocks, without residual to blur it, in several orders of the threads. */
static void test_data(void **state) {
    (void)state;
    enum { ELEMS = 2 * 4096 + 77 };
    Bench bench = bench_open();
    Place place = {.offset = 33, .elems = ELEMS, .shift = 1};
    for (int f = 0; f < FILLS; f++)
        for (uint64_t seed = 0; seed < 4; seed++) {
            fills[f](bench.host.values, ELEMS, seed);
            fill_any_finite(bench.host.residual, ELEMS + 1, seed);
            shuffle_threads(seed);
            FOR_EACH_BLOCK_CASE(c) {
                check_encode(&bench, c, place, 1);
                check_decode(&bench, c, place);
            }
        }
    bench_close(&bench);
}

static void test_many_blocks(void **state) {
    (void)state;
    Bench bench = bench_open();
    Place place = {.offset = 4096 + 8, .elems = ELEMS_MAX - 1, .feedback = true};
    fill_gaussian(bench.host.values, ELEMS_MAX, 5);
    fill_gaussian(bench.host.residual, ELEMS_MAX, 6);
    FOR_EACH_BLOCK_CASE(c) {
        check_encode(&bench, c, place, 1);
        check_decode(&bench, c, place);
    }
    bench_close(&bench);
}

/* Arrays that end where allocations do: nothing behind them may be touched, not even read. */
static void test_ends_of_memory(void **state) {
    (void)state;
    static const int64_t sizes[] = {1, 2, 7, 64, 127, 128, 255, 256, 1023, 1024, 4093, 4096, 5000};
    Gpu *gpu = open_gpu();
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        FOR_EACH_BLOCK_CASE(c) {
            int64_t elems = sizes[s], offset = (int64_t)s * 4;
            size_t bytes = (size_t)elems * sizeof(float);
            size_t wire_bytes = c->compressor->wire_bytes(&c->options, offset, elems);
            char *values = memory_alloc(gpu_memory(gpu), 65536), *wire = memory_alloc(gpu_memory(gpu), 65536);
            float *device = (float *)(values + 65536 - bytes), found;
            void *device_wire = wire + 65536 - wire_bytes;
            const CudaCompressor *cuda = cuda_compressor(c->compressor);
            cuda->encode(gpu, gpu_stream(gpu), &c->options, offset, elems, device, 1, device, device, device_wire);
            cuda->decode(gpu, gpu_stream(gpu), &c->options, offset, elems, device_wire, device);
            cuda->decode_add(gpu, gpu_stream(gpu), &c->options, offset, elems, device_wire, device);
            to_host(gpu, &found, device + elems - 1, sizeof found);
            assert_close(found, 0, 0);
            gpu_give(gpu, values);
            gpu_give(gpu, wire);
        }
    gpu_close(gpu);
}

/* An index beyond the block, from a wire that nobody wrote. */
static void test_wild_index(void **state) {
    (void)state;
    enum { ELEMS = 100, ALL = 4096 };
    Gpu *gpu = open_gpu();
    const CompressorOptions options = {.density = 0.01};
    const uint8_t wire[6] = {0xff, 0x0f, 0, 0, 0x80, 0x3f};
    float values[ALL] = {0}, found[ALL];
    void *device_wire = gpu_take(gpu, wire, sizeof wire);
    float *device = gpu_take(gpu, values, sizeof values);
    cuda_compressor(&compressor_topk)->decode(gpu, gpu_stream(gpu), &options, 0, ELEMS, device_wire, device);
    cuda_compressor(&compressor_topk)->decode_add(gpu, gpu_stream(gpu), &options, 0, ELEMS, device_wire, device);
    to_host(gpu, found, device, sizeof found);
    assert_memory_equal(found, values, sizeof values);
    gpu_give(gpu, device_wire);
    gpu_give(gpu, device);
    gpu_close(gpu);
}

/* A kernel that cannot run does not pass unseen. */
static void test_failed_launch(void **state) {
    (void)state;
    FOR_EACH_BLOCK_CASE(c)
        for (int operation = 0; operation < 3; operation++) {
            Gpu *gpu = open_gpu();
            const CudaCompressor *cuda = cuda_compressor(c->compressor);
            float *values = memory_alloc(gpu_memory(gpu), 4096);
            void *wire = memory_alloc(gpu_memory(gpu), 4096);
            fail_call("cudaLaunchKernel", 1, CUDA_LAUNCH_FAILED);
            if (operation == 0)
                cuda->encode(gpu, gpu_stream(gpu), &c->options, 0, 100, values, 1, NULL, NULL, wire);
            else
                (operation == 1 ? cuda->decode : cuda->decode_add)(gpu, gpu_stream(gpu), &c->options, 0, 100, wire,
                                                                   values);
            assert_int_equal(gpu_finish(gpu), FAULT);
            fail_call(NULL, 0, 0);
            gpu_give(gpu, values);
            gpu_give(gpu, wire);
            gpu_close(gpu);
        }
}

/* What a codec on the GPU says of its losses is what the CPU's says, over slices of several pieces and two steps. */
static void test_measure(void **state) {
    (void)state;
    enum { STEPS = 2, CUT = 70000 };
    ParamTable table = {0};
    param_add(&table, "wte", -1, 300, 256);
    param_add(&table, "ln", 0, 1, 3000); /* dense */
    param_add(&table, "fc", 0, 97, 331);
    assert_true(table.elems <= ELEMS_MAX);
    Gpu *gpu = open_gpu();
    float *values = malloc((size_t)table.elems * sizeof(float)), *device;
    void *wire = malloc(WIRE_MAX), *device_wire = memory_alloc(gpu_memory(gpu), WIRE_MAX);
    FOR_EACH_BLOCK_CASE(c)
        for (int feedback = 0; feedback < 2; feedback++) {
            Codec *here, *there;
            assert_ok(codec_create(&here, &table, c->compressor, &c->options, true, feedback));
            assert_ok(codec_create(&there, &table, c->compressor, &c->options, true, feedback));
            assert_ok(codec_use_gpu(there, gpu, gpu_stream(gpu)));
            for (int step = 0; step < STEPS; step++) {
                assert_true(isnan(codec_measure(there)));
                fill_gaussian(values, table.elems, (uint64_t)step + 1);
                device = gpu_take(gpu, values, (size_t)table.elems * sizeof(float));
                for (int part = 0; part < 2; part++) {
                    int64_t start = part ? CUT : 0, elems = part ? table.elems - CUT : CUT;
                    codec_encode(here, HOP_FIRST, start, elems, values + start, 0.5f, wire);
                    codec_encode(there, HOP_FIRST, start, elems, device + start, 0.5f, device_wire);
                }
                double nmse = codec_measure(here);
                assert_close(codec_measure(there), nmse, 1e-6 * nmse);
                codec_commit(here);
                codec_commit(there);
                gpu_give(gpu, device);
            }
            codec_destroy(here);
            codec_destroy(there);
        }
    free(values), free(wire), gpu_give(gpu, device_wire);
    gpu_close(gpu);
    param_table_free(&table);
}

static void test_table(void **state) {
    (void)state;
    FOR_EACH_BLOCK_CASE(c)
        assert_ptr_equal(cuda_compressor(c->compressor)->compressor, c->compressor);
    const Compressor other = compressor_int8;
    assert_null(cuda_compressor(&other));
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_slices),
    cmocka_unit_test(test_data),
    cmocka_unit_test(test_many_blocks),
    cmocka_unit_test(test_ends_of_memory),
    cmocka_unit_test(test_wild_index),
    cmocka_unit_test(test_failed_launch),
    cmocka_unit_test(test_measure),
    cmocka_unit_test(test_table),
};

CHECK_MAIN(tests)
