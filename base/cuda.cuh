/* What every .cu file includes first: CUDA, or, in builds that run kernels on the CPU (CUDA=emulate), its emulator.
 *
 * The same sources build with nvcc and with g++, so kernels keep to a common ground: launched by LAUNCH; dynamic shared
 * memory by DYN_SHARED; __shared__ at block scope; no PTX, cp.async, mma, cooperative groups, spinning between blocks;
 * shuffles of at most 8 bytes with honest masks; no reliance on lockstep. No atomics on floats: results do not depend
 * on timing. Where bits must equal the CPU's: explicit fmaf, and -fmad=false. */
#ifndef BASE_CUDA_CUH
#define BASE_CUDA_CUH

#ifdef CUDA_EMULATED
#include "tests/cuda/emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#define DYN_SHARED(T, name)                                   \
    extern __shared__ __align__(16) char dynamic_shared_[];   \
    T *name = reinterpret_cast<T *>(dynamic_shared_)
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#endif

extern "C" {
#include "base/gpu.h"
}

typedef __nv_bfloat16 bf16;

/* CHECK_CUDA(gpu, call): a call that fails is noted in the Gpu; computing goes on without meaning. */
#define CHECK_CUDA(gpu, call)                                     \
    do {                                                          \
        cudaError_t error_ = (call);                              \
        if (error_ != cudaSuccess)                                \
            gpu_fault(gpu, #call, cudaGetErrorString(error_));    \
    } while (0)

#endif
