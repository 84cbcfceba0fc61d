/* Kernels of the compressors. Compiled with -fmad=false: their bits are the CPU's, by the same functions (bf16.h,
 * scale.h, topk.h).
 *
 * Values are moved in fours: a thread takes 16 bytes of values at once where they lie on 16 bytes, and what four codes
 * take, up to 8 bytes at once, where that lies on as many. Other places, and the ends of slices, go in smaller parts.
 *
 *   f32, bf16    a thread takes four values
 *   int8, int4   a warp takes a block of 256 or 128: values are read once, the maximum goes round by shuffles
 *   topk         a block of threads takes a block of 4,096: values are read once, and stay in registers
 *
 * All are bound by memory. */
#ifndef COMM_COMPRESS_COMPRESS_KERNELS_CUH
#define COMM_COMPRESS_COMPRESS_KERNELS_CUH

#include "base/cuda.cuh"

extern "C" {
#include "comm/compress/bf16.h"
#include "comm/compress/sample.h"
#include "comm/compress/scale.h"
#include "comm/compress/topk.h"
}

constexpr int CODEC_THREADS = 256, CODEC_WARPS = CODEC_THREADS / 32;

static __device__ inline int max_of(int a, int b) { return a > b ? a : b; }

/* ---- memory ---- */

typedef struct Four {
    float v[4];
} Four;

/* Of the `left` values at `from`, the first four; 0 for what is not there. */
static __device__ inline Four load_four(const float *from, int64_t left) {
    if (left >= 4 && (uintptr_t)from % sizeof(float4) == 0) {
        float4 four = *(const float4 *)from;
        return {{four.x, four.y, four.z, four.w}};
    }
    Four four;
    for (int j = 0; j < 4; j++)
        four.v[j] = j < left ? from[j] : 0;
    return four;
}

static __device__ inline void store_four(float *to, int64_t left, const Four &four) {
    if (left >= 4 && (uintptr_t)to % sizeof(float4) == 0)
        *(float4 *)to = float4{four.v[0], four.v[1], four.v[2], four.v[3]};
    else
        for (int j = 0; j < 4 && j < left; j++)
            to[j] = four.v[j];
}

template <class T> struct Halved;
template <> struct Halved<uint64_t> { typedef uint32_t Half; };
template <> struct Halved<uint32_t> { typedef uint16_t Half; };
template <> struct Halved<uint16_t> { typedef uint8_t Half; };

/* The low `bytes` of T's bytes, little-endian and with any alignment: at once, or half by half. */
template <class T> static __device__ void store_wire(uint8_t *to, T value, int bytes) {
    if (bytes >= (int)sizeof(T) && (uintptr_t)to % sizeof(T) == 0) {
        *(T *)to = value;
    } else if constexpr (sizeof(T) > 1) {
        typedef typename Halved<T>::Half Half;
        store_wire<Half>(to, (Half)value, bytes);
        store_wire<Half>(to + sizeof(Half), (Half)(value >> 8 * sizeof(Half)), bytes - (int)sizeof(Half));
    }
}

/* The reverse: 0 for bytes beyond `bytes`. */
template <class T> static __device__ T load_wire(const uint8_t *from, int bytes) {
    if (bytes >= (int)sizeof(T) && (uintptr_t)from % sizeof(T) == 0)
        return *(const T *)from;
    if constexpr (sizeof(T) > 1) {
        typedef typename Halved<T>::Half Half;
        T low = load_wire<Half>(from, bytes), high = load_wire<Half>(from + sizeof(Half), bytes - (int)sizeof(Half));
        return (T)(low | high << 8 * sizeof(Half));
    }
    return 0;
}

/* Writes what was decoded, or adds it to what is there. */
template <bool ADD> static __device__ void put_four(float *to, int64_t left, Four four) {
    if (ADD) {
        Four sum = load_four(to, left);
        for (int j = 0; j < 4; j++)
            four.v[j] = sum.v[j] + four.v[j];
    }
    store_four(to, left, four);
}

/* p = scale * values + residual, from place `at` on, in one rounding each. */
static __device__ inline Four load_p(const float *values, float scale, const float *residual, int64_t at,
                                     int64_t left) {
    Four p = load_four(values + at, left), before = {};
    if (residual)
        before = load_four(residual + at, left);
    for (int j = 0; j < 4; j++) {
        float scaled = scale * p.v[j];
        p.v[j] = residual ? scaled + before.v[j] : scaled;
    }
    return p;
}

/* ---- values on their own: f32 and bf16 ---- */

struct WireF32 {
    typedef uint32_t Word;
    static __device__ uint32_t code(float p) { return (uint32_t)float_bits(p); }
    static __device__ float value(uint32_t word) { return bits_float((int32_t)word); }
};

struct WireBf16 {
    typedef uint16_t Word;
    static __device__ uint16_t code(float p) { return bf16_from_float(p); }
    static __device__ float value(uint16_t word) { return bf16_to_float(word); }
};

/* Four values as bytes of the wire, 8 of them at a time. */
template <class Wire> static __device__ void store_four_words(uint8_t *to, int64_t left, const Four &p) {
    constexpr int BYTES = sizeof(typename Wire::Word), WORDS = 8 / BYTES;
    for (int j = 0; j < 4; j += WORDS) {
        uint64_t packed = 0;
        for (int i = 0; i < WORDS; i++)
            packed |= (uint64_t)Wire::code(p.v[j + i]) << 8 * BYTES * i;
        store_wire(to + BYTES * j, packed, left - j < WORDS ? (int)(left - j) * BYTES : 8);
    }
}

template <class Wire> static __device__ Four load_four_words(const uint8_t *from, int64_t left) {
    constexpr int BYTES = sizeof(typename Wire::Word), WORDS = 8 / BYTES;
    Four four;
    for (int j = 0; j < 4; j += WORDS) {
        uint64_t packed = load_wire<uint64_t>(from + BYTES * j, left - j < WORDS ? (int)(left - j) * BYTES : 8);
        for (int i = 0; i < WORDS; i++)
            four.v[j + i] = Wire::value((typename Wire::Word)(packed >> 8 * BYTES * i));
    }
    return four;
}

/* Launch: CODEC_THREADS threads a block, a thread for every four values.
 * Bytes a value: 4 read, the code written; with error feedback 4 more read and 4 written. */
template <class Wire>
static __global__ void __launch_bounds__(CODEC_THREADS)
    flat_encode_kernel(int64_t elems, const float *values, float scale, const float *residual, float *new_residual,
                       uint8_t *wire) {
    int64_t at = ((int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x) * 4, left = elems - at;
    if (left <= 0)
        return;
    Four p = load_p(values, scale, residual, at, left), lost;
    for (int j = 0; j < 4; j++)
        lost.v[j] = p.v[j] - Wire::value(Wire::code(p.v[j]));
    store_four_words<Wire>(wire + at * (int64_t)sizeof(typename Wire::Word), left, p);
    if (new_residual)
        store_four(new_residual + at, left, lost);
}

/* Launch: the same. Bytes a value: the code read, 4 written; decode_add reads 4 more. */
template <class Wire, bool ADD>
static __global__ void __launch_bounds__(CODEC_THREADS)
    flat_decode_kernel(int64_t elems, const uint8_t *wire, float *values) {
    int64_t at = ((int64_t)blockIdx.x * CODEC_THREADS + threadIdx.x) * 4, left = elems - at;
    if (left <= 0)
        return;
    Four four = load_four_words<Wire>(wire + at * (int64_t)sizeof(typename Wire::Word), left);
    put_four<ADD>(values + at, left, four);
}

/* ---- blocks ---- */

/* Where the blocks of a slice lie. */
typedef struct Blocks {
    int64_t count, elems;
    int block_elems;
    int skip; /* of the first block, values before the slice */
    int64_t first_bytes, whole_bytes;
} Blocks;

typedef struct BlockPart {
    int64_t at;   /* its first value in the slice */
    int n;        /* values */
    int64_t byte; /* its first byte in the wire */
} BlockPart;

static __device__ inline BlockPart block_part(const Blocks &blocks, int64_t block) {
    int64_t at = block * blocks.block_elems - blocks.skip, end = at + blocks.block_elems;
    at = at > 0 ? at : 0;
    end = end < blocks.elems ? end : blocks.elems;
    return {at, (int)(end - at), block > 0 ? blocks.first_bytes + (block - 1) * blocks.whole_bytes : 0};
}

/* ---- blocks with one scale: int8 (LEVELS 127) and int4 (LEVELS 7) ---- */

constexpr int SCALE_BYTES = 4;

struct Int8 {
    typedef uint32_t Word; /* that holds four codes */
    static constexpr int LEVELS = 127, BITS = 8, ZERO = 0, BLOCK = 256;
};

struct Int4 {
    typedef uint16_t Word;
    static constexpr int LEVELS = 7, BITS = 4, ZERO = 8, BLOCK = 128;
};

/* That the codes of n values take; n may be less than 0. */
template <class Code> static __device__ int code_bytes(int n) { return (n * Code::BITS + 7) / 8; }

/* The codes of four values, the first one's in the low bits. */
template <class Code>
static __device__ typename Code::Word code_four(const Four &p, BlockScale by, bool finite, Four *lost) {
    uint32_t codes = 0;
    for (int j = 0; j < 4; j++) {
        int code = block_code(p.v[j], by, &lost->v[j]);
        code = finite ? code : 0;
        lost->v[j] = finite ? lost->v[j] : wire_nan();
        codes |= ((uint32_t)(code + Code::ZERO) & ((1u << Code::BITS) - 1)) << Code::BITS * j;
    }
    return (typename Code::Word)codes;
}

/* Launch: CODEC_THREADS threads a block, a warp for each block of values, lane by lane in fours.
 * Bytes a value: 4 read, 1.02 or 0.53 written; with error feedback 4 more read and 4 written. */
template <class Code>
static __global__ void __launch_bounds__(CODEC_THREADS)
    scaled_encode_kernel(Blocks blocks, const float *values, float scale, const float *residual, float *new_residual,
                         uint8_t *wire) {
    constexpr int ROUNDS = Code::BLOCK / 128;
    int64_t block = (int64_t)blockIdx.x * CODEC_WARPS + threadIdx.x / 32;
    if (block >= blocks.count)
        return;
    const BlockPart part = block_part(blocks, block);
    int first = threadIdx.x % 32 * 4, max_bits = 0;
    Four p[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        p[r] = load_p(values, scale, residual, part.at + first + 128 * r, part.n - first - 128 * r);
        for (int j = 0; j < 4; j++)
            max_bits = max_of(max_bits, float_bits(p[r].v[j]) & MAGNITUDE_BITS);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2)
        max_bits = max_of(max_bits, __shfl_xor_sync(0xffffffffu, max_bits, lanes));
    BlockScale by = block_scale(max_bits, Code::LEVELS);
    uint8_t *out = wire + part.byte;
    if (first == 0)
        store_wire(out, (uint32_t)float_bits(by.scale), SCALE_BYTES);
    for (int r = 0; r < ROUNDS; r++) {
        int at = first + 128 * r, left = part.n - at;
        Four lost;
        typename Code::Word codes = code_four<Code>(p[r], by, max_bits < INF_BITS, &lost);
        store_wire(out + SCALE_BYTES + code_bytes<Code>(at), codes, code_bytes<Code>(left));
        if (new_residual)
            store_four(new_residual + part.at + at, left, lost);
    }
}

/* Launch: the same. Bytes a value: 1.02 or 0.53 read, 4 written; decode_add reads 4 more. */
template <class Code, bool ADD>
static __global__ void __launch_bounds__(CODEC_THREADS)
    scaled_decode_kernel(Blocks blocks, const uint8_t *wire, float *values) {
    int64_t block = (int64_t)blockIdx.x * CODEC_WARPS + threadIdx.x / 32;
    if (block >= blocks.count)
        return;
    const BlockPart part = block_part(blocks, block);
    const uint8_t *in = wire + part.byte;
    float scale = bits_float((int32_t)load_wire<uint32_t>(in, SCALE_BYTES));
    for (int at = threadIdx.x % 32 * 4; at < part.n; at += 128) {
        uint32_t codes = load_wire<typename Code::Word>(in + SCALE_BYTES + code_bytes<Code>(at),
                                                        code_bytes<Code>(part.n - at));
        Four four;
        for (int j = 0; j < 4; j++) {
            uint32_t code = codes >> Code::BITS * j & ((1u << Code::BITS) - 1);
            four.v[j] = scale * (float)(Code::ZERO > 0 ? (int)code - Code::ZERO : (int8_t)code);
        }
        put_four<ADD>(values + part.at + at, part.n - at, four);
    }
}

/* ---- the k largest of a block ---- */

/* The k-th largest magnitude is found by its digits from the top, 8 bits each: a histogram of the digit over those keys
 * that agree with the digits found so far, then the bin that holds the k-th. Exponents of gradients crowd into few
 * bins, so each has REPLICAS counters, for a part of the threads each, in different banks. Counts do not depend on the
 * order in which they are made.
 *
 * Of the 4,096 values thread t has places 1,024 r + 4 t .. + 3, r = 0 .. 3, in registers. */
constexpr int TOPK_ROUNDS = TOPK_BLOCK / CODEC_THREADS / 4, TOPK_KEPT_MAX = TOPK_BLOCK / 2;
constexpr int BINS = CODEC_THREADS, REPLICAS = 8, REPLICA_STRIDE = BINS + 32 / REPLICAS;
static_assert(TOPK_ROUNDS * CODEC_WARPS == 32, "a warp scans the sums of all warps");

/* How many are kept of the first block of a slice, of those between, of the last one. */
typedef struct Kept {
    int first, whole, last;
    bool bf16_values;
} Kept;

/* What the threads of a block share. */
typedef struct TopkShared {
    int counts[REPLICAS * REPLICA_STRIDE];
    int warp_sums[32];
    int bin, above, inside; /* of the bin that was found: its number, keys in higher ones, keys in it */
    uint16_t places[TOPK_KEPT_MAX];
    uint32_t words[TOPK_KEPT_MAX]; /* values as they go into the wire */
} TopkShared;

/* Which keys stay: masked ones above `value`, and the first `equal` of those that equal it. */
typedef struct Threshold {
    int mask, value, equal;
} Threshold;

static __device__ inline int topk_place(int round) { return round * CODEC_THREADS * 4 + threadIdx.x * 4; }

static __device__ inline int kept_of(const Kept &kept, const Blocks &blocks) {
    return blockIdx.x == 0 ? kept.first : blockIdx.x == blocks.count - 1 ? kept.last : kept.whole;
}

/* The sum over this lane and those before it. */
static __device__ inline int warp_scan(int value) {
    int lane = threadIdx.x % 32;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        int before = __shfl_up_sync(0xffffffffu, value, lanes);
        value += lane >= lanes ? before : 0;
    }
    return value;
}

/* The histogram of the digit at `shift`. */
static __device__ void count_digits(TopkShared *shared, const Four *p, int n, Threshold threshold, int shift) {
    for (int i = threadIdx.x; i < REPLICAS * REPLICA_STRIDE; i += CODEC_THREADS)
        shared->counts[i] = 0;
    __syncthreads();
    int *counts = shared->counts + threadIdx.x % REPLICAS * REPLICA_STRIDE;
    for (int r = 0; r < TOPK_ROUNDS; r++)
        for (int j = 0; j < 4; j++) {
            int key = float_bits(p[r].v[j]) & MAGNITUDE_BITS;
            if (topk_place(r) + j < n && (key & threshold.mask) == threshold.value)
                atomicAdd(&counts[key >> shift & (BINS - 1)], 1);
        }
    __syncthreads();
}

/* The bin that holds the wanted-th key from above: thread t looks at the t-th bin from above. */
static __device__ void find_bin(TopkShared *shared, int wanted) {
    int bin = BINS - 1 - (int)threadIdx.x, warp = threadIdx.x / 32, inside = 0;
    for (int i = 0; i < REPLICAS; i++)
        inside += shared->counts[i * REPLICA_STRIDE + bin];
    int reached = warp_scan(inside);
    if (threadIdx.x % 32 == 31)
        shared->warp_sums[warp] = reached;
    __syncthreads();
    for (int i = 0; i < warp; i++)
        reached += shared->warp_sums[i];
    if (reached >= wanted && reached - inside < wanted)
        shared->bin = bin, shared->above = reached - inside, shared->inside = inside;
    __syncthreads();
}

/* Of n values `kept` stay. Ends early where all keys of a bin do. */
static __device__ Threshold find_threshold(TopkShared *shared, const Four *p, int n, int kept) {
    Threshold threshold = {0, 0, kept};
    for (int shift = 23; shift >= 0; shift = shift == 7 ? 0 : shift - 8) { /* the last digit has 7 new bits */
        count_digits(shared, p, n, threshold, shift);
        find_bin(shared, threshold.equal);
        threshold.mask |= (BINS - 1) << shift;
        threshold.value |= shared->bin << shift;
        threshold.equal -= shared->above;
        if (threshold.equal == shared->inside)
            break;
    }
    return threshold;
}

/* As the at-th of what is kept; returns what the wire loses of the value. */
static __device__ float keep(TopkShared *shared, bool bf16_values, int at, int place, float value) {
    uint16_t rounded = bf16_from_float(value);
    shared->places[at] = (uint16_t)place;
    shared->words[at] = bf16_values ? rounded : (uint32_t)float_bits(value);
    return value - (bf16_values ? bf16_to_float(rounded) : value);
}

/* Keys above the threshold in the lower half, keys that equal it in the upper one. */
static __device__ inline int compare_key(float p, bool there, Threshold threshold) {
    int key = float_bits(p) & threshold.mask;
    return there ? (key > threshold.value) + ((key == threshold.value) << 16) : 0;
}

/* Keeps the largest, in the order of their places: so each place needs to know how many before it stay. What is left of
 * the values remains in p. */
static __device__ void keep_largest(TopkShared *shared, Four *p, int n, int kept, bool bf16_values) {
    Threshold threshold = find_threshold(shared, p, n, kept);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, before[TOPK_ROUNDS];
    for (int r = 0; r < TOPK_ROUNDS; r++) {
        int own = 0;
        for (int j = 0; j < 4; j++)
            own += compare_key(p[r].v[j], topk_place(r) + j < n, threshold);
        before[r] = warp_scan(own) - own;
        if (lane == 31)
            shared->warp_sums[r * CODEC_WARPS + warp] = before[r] + own;
    }
    __syncthreads();
    int sum = shared->warp_sums[lane], sums_before = warp_scan(sum) - sum;
    for (int r = 0; r < TOPK_ROUNDS; r++) {
        before[r] += __shfl_sync(0xffffffffu, sums_before, r * CODEC_WARPS + warp);
        for (int j = 0; j < 4; j++) {
            int own = compare_key(p[r].v[j], topk_place(r) + j < n, threshold);
            int above = before[r] & 0xffff, equal = before[r] >> 16;
            int at = above + (equal < threshold.equal ? equal : threshold.equal);
            if ((own & 1) || (own && equal < threshold.equal))
                p[r].v[j] = keep(shared, bf16_values, at, topk_place(r) + j, p[r].v[j]);
            before[r] += own;
        }
    }
}

/* What a block with NaN or Inf sends: its first values, as NaN. */
static __device__ void keep_first(TopkShared *shared, Four *p, int kept, bool bf16_values) {
    for (int r = 0; r < TOPK_ROUNDS; r++)
        for (int j = 0; j < 4; j++) {
            int place = topk_place(r) + j;
            if (place < kept)
                p[r].v[j] = keep(shared, bf16_values, place, place, wire_nan());
        }
}

/* Byte i of what was kept, as it goes into the wire. */
static __device__ inline uint8_t topk_byte(const TopkShared *shared, int kept, bool bf16_values, int i) {
    int index_bytes = topk_index_bytes(kept), pair = i / 3 * 2;
    if (i >= index_bytes) {
        int at = i - index_bytes;
        return (uint8_t)(bf16_values ? shared->words[at / 2] >> at % 2 * 8 : shared->words[at / 4] >> at % 4 * 8);
    }
    uint32_t low = shared->places[pair], high = pair + 1 < kept ? shared->places[pair + 1] : 0;
    return (uint8_t)((low | high << TOPK_INDEX_BITS) >> i % 3 * 8);
}

/* Launch: CODEC_THREADS threads a block, a block for each block of values; four of them share a multiprocessor, so that
 * one computes while others wait for memory.
 * Bytes a value: 4 read, with error feedback 4 more read and 4 written; what is kept is little. */
static __global__ void __launch_bounds__(CODEC_THREADS, 4)
    topk_encode_kernel(Blocks blocks, Kept kept, const float *values, float scale, const float *residual,
                       float *new_residual, uint8_t *wire) {
    __shared__ TopkShared shared;
    const BlockPart part = block_part(blocks, blockIdx.x);
    int count = kept_of(kept, blocks), infinite = 0;
    Four p[TOPK_ROUNDS];
    for (int r = 0; r < TOPK_ROUNDS; r++) {
        p[r] = load_p(values, scale, residual, part.at + topk_place(r), part.n - topk_place(r));
        for (int j = 0; j < 4; j++)
            infinite |= (float_bits(p[r].v[j]) & MAGNITUDE_BITS) >= INF_BITS;
    }
    if (__syncthreads_or(infinite))
        keep_first(&shared, p, count, kept.bf16_values);
    else
        keep_largest(&shared, p, part.n, count, kept.bf16_values);
    for (int r = 0; new_residual && r < TOPK_ROUNDS; r++)
        store_four(new_residual + part.at + topk_place(r), part.n - topk_place(r), p[r]);
    __syncthreads();
    int bytes = topk_index_bytes(count) + count * (kept.bf16_values ? 2 : 4);
    for (int i = threadIdx.x; i < bytes; i += CODEC_THREADS)
        wire[part.byte + i] = topk_byte(&shared, count, kept.bf16_values, i);
}

/* Launch: the same. Bytes a value: 4 written; decode_add touches only what was kept. An index beyond the block, which
 * no encoder writes, is left out. */
template <bool ADD>
static __global__ void __launch_bounds__(CODEC_THREADS)
    topk_decode_kernel(Blocks blocks, Kept kept, const uint8_t *wire, float *values) {
    const BlockPart part = block_part(blocks, blockIdx.x);
    int count = kept_of(kept, blocks);
    const uint8_t *in = wire + part.byte, *words = in + topk_index_bytes(count);
    for (int r = 0; !ADD && r < TOPK_ROUNDS; r++)
        store_four(values + part.at + topk_place(r), part.n - topk_place(r), Four{});
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += CODEC_THREADS) {
        int place = topk_index(in, i);
        float value = kept.bf16_values ? WireBf16::value(load_wire<uint16_t>(words + 2 * i, 2))
                                       : WireF32::value(load_wire<uint32_t>(words + 4 * i, 4));
        if (place < part.n)
            values[part.at + place] = ADD ? values[part.at + place] + value : value;
    }
}

/* ---- how much is lost ---- */

/* A block takes every gridDim-th stretch, if the sample takes it, and adds what it finds to its own two of the sums: a
 * fixed order. Reads a sixteenth of three arrays. */
static __global__ void __launch_bounds__(CODEC_THREADS)
    measure_kernel(int64_t offset, int64_t elems, int64_t stretch, const float *values, float scale,
                   const float *residual, const float *lost, double *sums) {
    __shared__ double noise[CODEC_THREADS], signal[CODEC_THREADS];
    int thread = (int)threadIdx.x;
    double my_noise = 0, my_signal = 0;
    for (int64_t s = offset / stretch + blockIdx.x; s * stretch < offset + elems; s += gridDim.x) {
        if (!sample_takes(s))
            continue;
        for (int64_t i = s * stretch - offset + thread; i < (s + 1) * stretch - offset; i += CODEC_THREADS) {
            if (i < 0 || i >= elems)
                continue;
            float scaled = scale * values[i], p = residual ? scaled + residual[i] : scaled;
            my_noise += (double)lost[i] * (double)lost[i];
            my_signal += (double)p * (double)p;
        }
    }
    noise[thread] = my_noise;
    signal[thread] = my_signal;
    for (int width = CODEC_THREADS / 2; width > 0; width /= 2) {
        __syncthreads();
        if (thread < width) {
            noise[thread] += noise[thread + width];
            signal[thread] += signal[thread + width];
        }
    }
    if (thread == 0) {
        sums[2 * blockIdx.x] += noise[0];
        sums[2 * blockIdx.x + 1] += signal[0];
    }
}

#endif
