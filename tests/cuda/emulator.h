/* What a kernel sees where it runs on the CPU (CUDA=emulate): CUDA's keywords, indices and intrinsics, for the ground
 * that base/cuda.cuh marks out. tests/cuda/machine.h is the machine behind it. */
#ifndef TESTS_CUDA_EMULATOR_H
#define TESTS_CUDA_EMULATOR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <type_traits>

#include <cuda_bf16.h> /* conversions are NVIDIA's own, for the host */
#include <cuda_runtime.h>

#include "tests/cuda/machine.h"

/* ---- keywords ---- */

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local /* a thread of the system runs one block at a time */
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (emulator::indices.thread)
#define blockIdx (emulator::indices.block)
#define blockDim (emulator::indices.block_size)
#define gridDim (emulator::indices.grid_size)
constexpr int warpSize = emulator::WARP_LANES;

/* ---- launches ---- */

#define DYN_SHARED(T, name) T *name = reinterpret_cast<T *>(emulator::indices.dynamic_shared)
#define LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                          \
    emulator::launch({#kernel, grid, block, shared_bytes}, stream,                                      \
                     [=](auto... arguments_) { kernel(arguments_...); } __VA_OPT__(, ) __VA_ARGS__)

/* ---- barriers and warp primitives. Defaults name the caller's place in the source. ---- */

#define PLACE_ const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(PLACE_) { emulator::barrier(emulator::Vote::NONE, 0, {file, line}); }
inline int __syncthreads_count(int predicate, PLACE_) {
    return emulator::barrier(emulator::Vote::COUNT, predicate, {file, line});
}
inline int __syncthreads_and(int predicate, PLACE_) {
    return emulator::barrier(emulator::Vote::AND, predicate, {file, line});
}
inline int __syncthreads_or(int predicate, PLACE_) {
    return emulator::barrier(emulator::Vote::OR, predicate, {file, line});
}
inline void __syncwarp(unsigned mask = ~0u, PLACE_) {
    emulator::warp(emulator::WarpOp::SYNC, mask, 0, -1, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, PLACE_) {
    return (unsigned)emulator::warp(emulator::WarpOp::BALLOT, mask, predicate != 0, -1, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, PLACE_) { return __ballot_sync(mask, predicate, file, line) != 0; }
inline int __all_sync(unsigned mask, int predicate, PLACE_) {
    return __ballot_sync(mask, predicate, file, line) == mask;
}

template <class T> T shuffle_(unsigned mask, T value, int source, emulator::Place place) {
    static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>, "shuffles take at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulator::warp(emulator::WarpOp::SHUFFLE, mask, bits, source, place);
    memcpy(&value, &bits, sizeof value);
    return value;
}
/* Lanes that would read beyond their part of `width` lanes keep their own value. */
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, PLACE_) {
    int first = emulator::indices.lane & ~(width - 1);
    return shuffle_(mask, value, first | (source & (width - 1)), {file, line});
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, PLACE_) {
    int end = (emulator::indices.lane & ~(width - 1)) + width, source = emulator::indices.lane ^ bits;
    return shuffle_(mask, value, source < end ? source : -1, {file, line});
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, PLACE_) {
    int end = (emulator::indices.lane & ~(width - 1)) + width, source = emulator::indices.lane + (int)lanes;
    return shuffle_(mask, value, source < end ? source : -1, {file, line});
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, PLACE_) {
    int first = emulator::indices.lane & ~(width - 1), source = emulator::indices.lane - (int)lanes;
    return shuffle_(mask, value, source >= first ? source : -1, {file, line});
}
#undef PLACE_

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* ---- atomics: on integers only, since sums of floats would depend on timing ---- */

#define INTEGER_ template <class T, class = std::enable_if_t<std::is_integral_v<T>>>

INTEGER_ T atomicAdd(T *at, std::type_identity_t<T> value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
INTEGER_ T atomicSub(T *at, std::type_identity_t<T> value) { return __atomic_fetch_sub(at, value, __ATOMIC_RELAXED); }
INTEGER_ T atomicAnd(T *at, std::type_identity_t<T> value) { return __atomic_fetch_and(at, value, __ATOMIC_RELAXED); }
INTEGER_ T atomicOr(T *at, std::type_identity_t<T> value) { return __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }
INTEGER_ T atomicXor(T *at, std::type_identity_t<T> value) { return __atomic_fetch_xor(at, value, __ATOMIC_RELAXED); }
INTEGER_ T atomicExch(T *at, std::type_identity_t<T> value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
INTEGER_ T atomicCAS(T *at, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}
INTEGER_ T atomicMax(T *at, std::type_identity_t<T> value) {
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
INTEGER_ T atomicMin(T *at, std::type_identity_t<T> value) {
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (value < old && !__atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return old;
}
#undef INTEGER_

/* ---- loads and stores with a hint for the caches ---- */

template <class T> T __ldg(const T *at) { return *at; }
template <class T> T __ldcg(const T *at) { return *at; }
template <class T> T __ldcs(const T *at) { return *at; }
template <class T> void __stcg(T *at, T value) { *at = value; }
template <class T> void __stcs(T *at, T value) { *at = value; }

/* ---- arithmetic ---- */

template <class To, class From> To bits_as_(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return bits_as_<unsigned>(x); }
inline int __float_as_int(float x) { return bits_as_<int>(x); }
inline float __uint_as_float(unsigned x) { return bits_as_<float>(x); }
inline float __int_as_float(int x) { return bits_as_<float>(x); }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline float __int2float_rn(int x) { return (float)x; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1 / x; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
/* Fast ones are less exact on a card. */
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }

template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

#endif
