/* base/gpu on the stand-in for the CUDA runtime: what it opens and refuses, memory, the order of copies where nothing is
 * late and where everything is, faults. */
#define _GNU_SOURCE
#include "tests/check.h"

#include "base/clock.h"
#include "base/gpu_stamps.h"
#include "tests/cuda/sample_kernels.h"
#include "tests/cuda/stand_ins.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of cudaError_t. */
enum { OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, UNAVAILABLE = 46, ILLEGAL_ADDRESS = 700 };
enum { CUDA_VERSION_NOW = 13000, CUDA_VERSION_OLD = 11020, FLOATS = 5000, COPIES = 3000 };
static const size_t CARD_BYTES = (size_t)1 << 30;

/* Each test leaves the stand-in as it found it, with nothing kept. */
static int restore(void **state) {
    (void)state;
    cudart_fail(NULL, 0, 0);
    cudart_late(false);
    cudart_devices(1);
    cudart_device(9, 0, CARD_BYTES);
    cudart_driver(CUDA_VERSION_NOW);
    return 0;
}
static int nothing_kept(void **state) {
    restore(state);
    return cudart_memory_used() != 0 || cudart_objects() != 0;
}

static Gpu *open_gpu(void) {
    Gpu *gpu;
    assert_ok(gpu_open(&gpu, 0));
    return gpu;
}

static void assert_fault(Status status, const char *text) {
    assert_int_equal(status, FAULT);
    if (!strstr(error_line(), text))
        fail_msg("expected a line with '%s', found '%s'", text, error_line());
}

static void check_none(const char *reason) {
    const char *why = "";
    Gpu *gpu;
    char line[256];
    assert_int_equal(gpu_count(&why), 0);
    assert_string_equal(why, reason);
    snprintf(line, sizeof line, "no GPU was found: %s", reason);
    assert_fault(gpu_open(&gpu, 0), line);
}

static void test_none(void **state) {
    (void)state;
    cudart_devices(0);
    check_none("none is visible to this process");
    cudart_driver(CUDA_VERSION_OLD);
    check_none("the NVIDIA driver is too old for this build");
    cudart_driver(0);
    check_none("no NVIDIA driver");
}

static void test_which(void **state) {
    (void)state;
    const char *why;
    Gpu *gpu;
    cudart_devices(3);
    assert_int_equal(gpu_count(&why), 3);
    assert_ok(gpu_open(&gpu, 7)); /* 7 modulo 3: opened, so it exists */
    assert_string_equal(gpu_name(gpu), "CPU as a GPU, sm_90, 1.0 GiB");
    assert_string_equal(gpu_pci(gpu), "0000:11:00.0");
    assert_true(gpu_memory_free_bytes(gpu) == CARD_BYTES);
    gpu_close(gpu);
    gpu_close(NULL);
}

static void test_refused(void **state) {
    (void)state;
    Gpu *gpu;
    cudart_device(7, 5, CARD_BYTES);
    assert_fault(gpu_open(&gpu, 0), "GPU 0, CPU as a GPU, sm_75, 1.0 GiB: this program needs sm_80 (Ampere) or newer");
    assert_null(gpu);
    cudart_device(8, 0, CARD_BYTES);
    cudart_fail("cudaSetDevice", 1, UNAVAILABLE);
    assert_fault(gpu_open(&gpu, 0), "in use exclusively by another process");
    cudart_fail("cudaFree", 1, OUT_OF_MEMORY);
    assert_fault(gpu_open(&gpu, 0), "its memory is full");
}

/* Whatever fails on the way, there is a line, and nothing is kept. */
static void test_half_open(void **state) {
    (void)state;
    static const char *const functions[] = {"cudaGetDeviceCount", "cudaGetDeviceProperties", "cudaSetDevice", "cudaFree",
                                            "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        for (int call = 1; call <= (i < 4 ? 1 : 2); call++) {
            Gpu *gpu;
            cudart_fail(functions[i], call, UNAVAILABLE);
            assert_int_equal(gpu_open(&gpu, 0), FAULT);
            cudart_fail(NULL, 0, 0);
            assert_int_equal(cudart_objects(), 0);
        }
}

static void test_memory(void **state) {
    (void)state;
    Gpu *gpu = open_gpu();
    const Allocator *memory = gpu_memory(gpu);
    assert_ptr_equal(memory->context, gpu);
    float *device = memory_alloc(memory, FLOATS * sizeof(float)), host[FLOATS], zeros[FLOATS] = {0};
    assert_int_equal((uintptr_t)device % 256, 0);
    gpu_copy_out(gpu, host, device, sizeof host, NULL, NULL, 0);
    assert_ok(gpu_finish(gpu));
    assert_memory_equal(host, zeros, sizeof host);
    assert_null(memory_alloc(memory, CARD_BYTES)); /* some of it is taken */
    assert_ok(gpu_finish(gpu));                    /* which is not a fault of the device */
    void *empty = memory_alloc(memory, 0);
    assert_non_null(empty);
    memory_free(memory, empty);
    memory_free(memory, NULL);
    memory_free(memory, device);
    gpu_close(gpu);
}

static void test_pinning(void **state) {
    (void)state;
    Gpu *gpu = open_gpu();
    char host[100];
    int objects = cudart_objects();
    gpu_pin(gpu, host, sizeof host);
    assert_int_equal(cudart_objects(), objects + 1);
    gpu_pin(gpu, host, sizeof host); /* a second time it fails, in silence */
    gpu_unpin(gpu, host);
    assert_int_equal(cudart_objects(), objects);
    gpu_unpin(gpu, host);
    assert_ok(gpu_finish(gpu));
    gpu_close(gpu);
}

/* ---- copies ---- */

/* What `done` was told, in order. */
typedef struct Told {
    int arguments[COPIES];
    _Atomic int count;
    const float *host; /* must hold `expected` when the call comes */
    float expected;
    int wrong;
} Told;

static void note(void *user, int argument) {
    Told *told = user;
    told->arguments[told->count] = argument;
    told->wrong += told->host && !(told->host[argument] == told->expected);
    told->count++;
}

/* One after the other into the same place of the device: each copy out sees what came in before it. */
static void check_order(void) {
    Gpu *gpu = open_gpu();
    float *device = memory_alloc(gpu_memory(gpu), sizeof(float));
    float *in = calloc(COPIES, sizeof *in), *out = calloc(COPIES, sizeof *out);
    Told told = {.count = 0};
    for (int i = 0; i < COPIES; i++) {
        in[i] = (float)i;
        gpu_copy_in(gpu, device, &in[i], sizeof *device);
        gpu_copy_out(gpu, &out[i], device, sizeof *device, note, &told, i);
    }
    assert_ok(gpu_finish(gpu));
    assert_memory_equal(in, out, COPIES * sizeof *in);
    assert_int_equal(told.count, COPIES);
    for (int i = 0; i < COPIES; i++)
        assert_int_equal(told.arguments[i], i);
    memory_free(gpu_memory(gpu), device);
    gpu_close(gpu);
    free(in);
    free(out);
}

/* Between copy in and copy out a kernel runs in the computing stream: it sees what came in, what goes out is its work.
 * The call comes though nobody waits for the GPU. */
static void check_around_kernel(void) {
    Gpu *gpu = open_gpu();
    const Allocator *memory = gpu_memory(gpu);
    float *a = memory_alloc(memory, SAMPLE_ELEMS * sizeof(float));
    float *b = memory_alloc(memory, SAMPLE_ELEMS * sizeof(float));
    float in[SAMPLE_ELEMS], out[SAMPLE_ELEMS] = {0};
    Told told = {.host = out, .expected = SAMPLE_THREADS};
    for (int i = 0; i < SAMPLE_ELEMS; i++)
        in[i] = (float)(i % SAMPLE_THREADS + 1);
    gpu_copy_in(gpu, a, in, sizeof in);
    sample_kernel_reverse(gpu_stream(gpu), b, a);
    gpu_copy_out(gpu, out, b, sizeof out, note, &told, 0);
    while (told.count == 0)
        usleep(100);
    sample_kernel_reverse(gpu_stream(gpu), b, b);
    assert_ok(gpu_finish(gpu));
    assert_memory_equal(b, in, sizeof in); /* the emulated device's memory is the host's */
    for (int i = 0; i < SAMPLE_ELEMS; i++)
        assert_true(out[i] == (float)(SAMPLE_THREADS - i % SAMPLE_THREADS));
    assert_int_equal(told.count, 1);
    assert_int_equal(told.wrong, 0); /* the bytes were there before the call */
    memory_free(memory, a);
    memory_free(memory, b);
    gpu_close(gpu);
}

static void test_copies(void **state) {
    (void)state;
    check_order();
    check_around_kernel();
}

static void test_late_copies(void **state) {
    (void)state;
    cudart_late(true);
    for (uint64_t seed = 0; seed < 8; seed++) {
        emulator_seed(seed);
        check_order();
        check_around_kernel();
    }
    emulator_seed(0);
}

/* The test before means something only if late copies are late. */
static void test_late_is_late(void **state) {
    (void)state;
    cudart_late(true);
    Gpu *gpu = open_gpu();
    float *device = memory_alloc(gpu_memory(gpu), sizeof(float)), in = 1, out = 0;
    gpu_copy_in(gpu, device, &in, sizeof in);
    in = 2; /* too early */
    gpu_copy_out(gpu, &out, device, sizeof out, NULL, NULL, 0);
    assert_ok(gpu_finish(gpu));
    assert_true(out == 2);
    memory_free(gpu_memory(gpu), device);
    gpu_close(gpu);
}

/* ---- faults ---- */

/* A fault of the device sticks: later calls do nothing that matters, gpu_finish tells of the first. */
static void test_fault_of_the_device(void **state) {
    (void)state;
    static const char *const functions[] = {"cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent",
                                            "cudaLaunchHostFunc", "cudaLaunchKernel", "cudaStreamSynchronize"};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        Gpu *gpu = open_gpu();
        float *device = memory_alloc(gpu_memory(gpu), SAMPLE_ELEMS * sizeof(float)), host[SAMPLE_ELEMS] = {0};
        Told told = {.count = 0};
        cudart_fail(functions[i], 1, ILLEGAL_ADDRESS);
        gpu_copy_in(gpu, device, host, sizeof host);
        sample_kernel_reverse(gpu_stream(gpu), device, device);
        gpu_copy_out(gpu, host, device, sizeof host, note, &told, 0);
        assert_fault(gpu_finish(gpu), "an illegal memory access was encountered");
        assert_fault(gpu_finish(gpu), "GPU 0, CPU as a GPU, sm_90, 1.0 GiB: ");
        cudart_fail(NULL, 0, 0); /* the driver forgives, so that memory can be given back */
        assert_fault(gpu_finish(gpu), "an illegal memory access was encountered");
        memory_free(gpu_memory(gpu), device);
        gpu_close(gpu);
    }
}

/* Between a copy in and a copy out, also where all is late. */
static void test_copy_within(void **state) {
    (void)state;
    static float host[FLOATS], back[FLOATS];
    cudart_late(true);
    Gpu *gpu = open_gpu();
    float *from = memory_alloc(gpu_memory(gpu), sizeof host), *to = memory_alloc(gpu_memory(gpu), sizeof host);
    for (int i = 0; i < FLOATS; i++)
        host[i] = (float)i;
    gpu_copy_in(gpu, from, host, sizeof host);
    gpu_copy(gpu, to, from, sizeof host);
    gpu_copy_out(gpu, back, to, sizeof host, NULL, NULL, 0);
    assert_ok(gpu_finish(gpu));
    assert_memory_equal(back, host, sizeof host);
    memory_free(gpu_memory(gpu), from);
    memory_free(gpu_memory(gpu), to);
    gpu_close(gpu);
}

/* One that does not stick, and that no call returns. */
static void test_fault_of_a_launch(void **state) {
    (void)state;
    Gpu *gpu = open_gpu();
    float *device = memory_alloc(gpu_memory(gpu), SAMPLE_ELEMS * sizeof(float));
    cudart_fail("cudaLaunchKernel", 1, INVALID_CONFIGURATION);
    sample_kernel_reverse(gpu_stream(gpu), device, device);
    assert_fault(gpu_finish(gpu), "invalid configuration argument");
    memory_free(gpu_memory(gpu), device);
    gpu_close(gpu);
}

/* A stream that could not be waited for goes on; nobody hears of it, who may be gone. */
static void test_no_call_after_a_fault(void **state) {
    (void)state;
    for (int call = 1; call <= 2; call++) {
        cudart_late(true);
        Gpu *gpu = open_gpu();
        float *device = memory_alloc(gpu_memory(gpu), sizeof(float)), host = 0;
        Told told = {.count = 0};
        gpu_copy_out(gpu, &host, device, sizeof host, note, &told, 0);
        cudart_fail("cudaStreamSynchronize", call, OUT_OF_MEMORY);
        if (call == 1)
            assert_fault(gpu_finish(gpu), "out of memory");
        else
            gpu_hush(gpu);
        int count = told.count;
        cudart_fail(NULL, 0, 0);
        cudart_late(false); /* returns when all is done */
        assert_int_equal(told.count, count);
        memory_free(gpu_memory(gpu), device);
        gpu_close(gpu);
    }
}

static void test_first_fault(void **state) {
    (void)state;
    Gpu *gpu = open_gpu();
    assert_ok(gpu_finish(gpu));
    gpu_fault(gpu, "a product", "not supported");
    gpu_fault(gpu, "another", "too late");
    assert_fault(gpu_finish(gpu), ": a product: not supported");
    gpu_close(gpu);
}

static void nothing_to_do(void *user, int argument) { (void)user, (void)argument; }

/* Stamps of two streams tell in which order work was done, on the host's clock, once it is done and not before; of one that
 * is asked for again the last time counts. */
static void check_stamps(bool late) {
    enum { STAMPS = 50 };
    cudart_late(late);
    Gpu *gpu = open_gpu();
    for (int round = 0; round < 3; round++) {
        double at_s[STAMPS] = {0}, again_s = 0, start_s = clock_s();
        float *device = memory_alloc(gpu_memory(gpu), FLOATS * sizeof(float)), host[FLOATS];
        for (int i = 0; i < STAMPS; i++) {
            gpu_stamp(gpu, gpu_stream(gpu), &again_s);
            gpu_stamp(gpu, gpu_stream(gpu), &at_s[i]);
            gpu_copy_out(gpu, host, device, sizeof host, nothing_to_do, NULL, 0);
        }
        gpu_read_stamps(gpu); /* some, or none */
        assert_ok(gpu_finish(gpu));
        gpu_read_stamps(gpu);
        double end_s = clock_s(), slack_s = 1e-4;
        for (int i = 0; i < STAMPS; i++)
            assert_true(at_s[i] >= (i ? at_s[i - 1] : start_s) - slack_s && at_s[i] <= end_s + slack_s);
        assert_true(again_s >= at_s[STAMPS - 2] - slack_s && again_s <= at_s[STAMPS - 1] + slack_s);
        memory_free(gpu_memory(gpu), device);
    }
    gpu_close(gpu);
}

static void test_stamps(void **state) {
    (void)state;
    check_stamps(false);
    check_stamps(true);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, restore, nothing_kept)
static const struct CMUnitTest tests[] = {
    TEST(test_none), TEST(test_which), TEST(test_refused), TEST(test_half_open), TEST(test_memory), TEST(test_pinning),
    TEST(test_copies), TEST(test_late_copies), TEST(test_late_is_late), TEST(test_fault_of_the_device),
    TEST(test_fault_of_a_launch), TEST(test_first_fault), TEST(test_no_call_after_a_fault), TEST(test_copy_within),
    TEST(test_stamps),
};
CHECK_MAIN(tests)
