/* The machine that runs CUDA kernels on the CPU in tests: blocks of fibers, one per CUDA thread. Kernels see it through
 * tests/cuda/emulator.h; tests steer it by tests/cuda/stand_ins.h.
 *
 * The threads of a block take turns on one thread of the system. One runs until it waits at a barrier or a warp
 * primitive, or ends; so what depends on others having gone on in the meantime, without waiting for them, goes wrong
 * here, in an order that emulator_seed chooses. Blocks run beside each other, shared out by OpenMP.
 *
 * What is undefined in CUDA and seen here ends the program with one line: barriers that not all threads reach, or reach
 * at different places of the source; lanes of a warp primitive that is called with other masks or elsewhere, that are
 * not in its mask, or have ended; launches that a card would refuse; pointers to the host's memory given to a kernel.
 * Shared memory starts as 0xFF bytes, which are NaN. */
#ifndef TESTS_CUDA_MACHINE_H
#define TESTS_CUDA_MACHINE_H

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

namespace emulator {

enum {
    WARP_LANES = 32,
    BLOCK_THREADS_MAX = 1024,
    STATIC_SHARED_BYTES = 48 << 10,
    OWN_SHARED_BYTES = 1 << 10, /* of these 48 KiB, for variables of the kernel and of what it calls */
    SHARED_BYTES_MAX = 227 << 10
};

/* Of a call in the source. */
struct Place {
    const char *file;
    int line;
};

/* Of the CUDA thread that runs now. */
struct Indices {
    uint3 thread, block;
    dim3 block_size, grid_size;
    char *dynamic_shared;
    int lane;
};
extern constinit thread_local Indices indices;

/* __syncthreads and its kin: waits for the block's threads that have not ended. Returns how many of them gave a
 * predicate other than 0 (COUNT), or whether all (AND) or any (OR) did. */
enum class Vote { NONE, COUNT, AND, OR };
int barrier(Vote vote, int predicate, Place place);

/* A warp primitive: waits for the lanes of mask. Returns the value that lane `source` brought (SHUFFLE; -1: one's own),
 * or the mask of lanes whose value is not 0 (BALLOT). */
enum class WarpOp { SYNC, SHUFFLE, BALLOT };
uint64_t warp(WarpOp op, unsigned mask, uint64_t value, int source, Place place);

/* emulator_seed's. */
uint64_t schedule_seed();

[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct Launch {
    const char *kernel;
    dim3 grid, block;
    size_t shared_bytes; /* dynamic */
};

/* Puts a kernel into the stream; `thread` is what each of its threads runs. */
void launch_in_stream(const Launch &launch, cudaStream_t stream, std::function<void()> thread);

/* A kernel's pointers lead to memory of the device, or to pinned memory of the host. */
void check_argument(const char *kernel, const volatile void *pointer);
template <class T> void check_argument(const char *kernel, T *pointer) {
    check_argument(kernel, (const volatile void *)pointer);
}
template <class T> void check_argument(const char *, const T &) {}

/* Arguments are taken as they are now, whenever the kernel runs. */
template <class Kernel, class... Arguments>
void launch(const Launch &launch, cudaStream_t stream, Kernel kernel, Arguments... arguments) {
    (check_argument(launch.kernel, arguments), ...);
    launch_in_stream(launch, stream, [=] { kernel(arguments...); });
}

} // namespace emulator
#endif
