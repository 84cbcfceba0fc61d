/* Arrays of a GPU, for tests of what runs there. */
#ifndef TESTS_GPU_ARRAYS_H
#define TESTS_GPU_ARRAYS_H

#include "base/gpu.h"
#include "tests/check.h"

/* Of cudaError_t. */
enum { CUDA_OUT_OF_MEMORY = 2, CUDA_LAUNCH_FAILED = 719 };

/* The first card; skips the test where there is none. */
static inline Gpu *open_gpu(void) {
    const char *why;
    Gpu *gpu = NULL;
    if (gpu_count(&why) == 0) {
        print_message("%s\n", why);
        skip();
    }
    assert_ok(gpu_open(&gpu, 0));
    return gpu;
}

static inline void to_device(Gpu *gpu, void *device, const void *host, size_t bytes) {
    gpu_copy_in(gpu, device, host, bytes);
    assert_ok(gpu_finish(gpu));
}

static inline void to_host(Gpu *gpu, void *host, const void *device, size_t bytes) {
    gpu_copy_out(gpu, host, device, bytes, NULL, NULL, 0);
    assert_ok(gpu_finish(gpu));
}

/* A copy of the host's, for gpu_give. */
static inline void *gpu_take(Gpu *gpu, const void *host, size_t bytes) {
    void *device = memory_alloc(gpu_memory(gpu), bytes + 1);
    assert_non_null(device);
    to_device(gpu, device, host, bytes);
    return device;
}

/* Where kernels run on the CPU, their threads take turns in an order by this seed; on a card it is nobody's. */
__attribute__((weak)) void emulator_seed(uint64_t seed);

static inline void shuffle_threads(uint64_t seed) {
    if (emulator_seed)
        emulator_seed(seed);
}

/* Where CUDA's runtime is a stand-in: the call-th call of `function` from now on returns `error`; NULL ends that. Skips
 * the test on a card. */
__attribute__((weak)) void cudart_fail(const char *function, int call, int error);

static inline void fail_call(const char *function, int call, int error) {
    if (!cudart_fail)
        skip();
    cudart_fail(function, call, error);
}

static inline void gpu_give(Gpu *gpu, void *device) { memory_free(gpu_memory(gpu), device); }

#endif
