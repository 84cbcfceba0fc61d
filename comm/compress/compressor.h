/* A compressor turns f32 values into fewer bytes and back. It knows nothing of buckets, ranks or residuals' history:
 * codec.h puts those around it.
 *
 * Values stand at global offsets, of the flat gradient. Blocks sit on multiples of block_elems there, so a slice that
 * begins or ends inside a block holds a part of one, coded as a block of that many values. The wire form of a slice is
 * that of its blocks one after another, without padding: so the wire of two adjacent slices that meet at a block bound
 * is the wire of both together. Every size is a pure function of offset and elems: nothing waits to learn it.
 *
 *   name   block   wire form of a block of n values (little-endian)                                ratio
 *   none   1       f32[n]                                                                          1
 *   bf16   1       u16[n], round to nearest even                                                   2
 *   int8   256     f32 scale, i8[n]: value = scale * code, code in [-127, 127]                     3.94
 *   int4   128     f32 scale, u4[n], two a byte, low half first: value = scale * (code - 8),
 *                  code in [1, 15]; an odd last one leaves the high half 8                         7.53
 *   topk   4,096   k = ceil(density * n) kept: their indices in the block, rising, 12 bits each,
 *                  two in three bytes (an odd last one in two), then their values, f32[k] or bf16[k]
 *
 * int8_tensor is int8 with the same scale in all blocks of what is encoded at once: a baseline, whose wire does depend
 * on how slices are cut (compress_int8.c).
 *
 * What a compressor does with p, the same bits on every machine and device:
 *   NaN or Inf anywhere in a block: every value of the block (topk: every kept one, the first k) decodes to NaN, and so
 *   becomes visible on every rank. none passes them as they are. bf16: what would round to Inf is NaN as well.
 *   int8, int4: scale = max |p| / 127 or 7, one step less where scale * 127 or 7 would overflow; code = p * (1 / scale)
 *   rounded to nearest even. A block of zeros, or of values too small for its scale to be normal, has scale 0 and
 *   decodes to zeros.
 *   topk: the largest |p|, of equal ones the lowest index.
 *
 * Adding one: a file with a const Compressor, a line in compressor.c, a line in the test table. */
#ifndef COMM_COMPRESS_COMPRESSOR_H
#define COMM_COMPRESS_COMPRESSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct CompressorOptions {
    double density;   /* topk: share of values kept, in (0, 0.5] */
    bool bf16_values; /* topk: values as bf16 instead of f32 */
} CompressorOptions;

typedef struct Compressor {
    const char *name; /* as in [comm] compress */
    int id;           /* travels in messages' labels; none is 0 */
    int block_elems;  /* divides 4096 */

    /* Of the slice [offset, offset + elems), exactly. Pure. */
    size_t (*wire_bytes)(const CompressorOptions *options, int64_t offset, int64_t elems);

    /* An upper bound for any slice of that many values, wherever it starts. Pure. */
    size_t (*wire_bytes_max)(const CompressorOptions *options, int64_t elems);

    /* p = scale * values + residual (one rounding each, no fused multiply-add); wire = C(p); new_residual = p - C(p),
     * in f32 (fmaf where C(p) is a product). residual NULL: p = scale * values; new_residual NULL: not wanted. Both may
     * be the same array; values f32[elems] overlaps neither. A block that holds NaN or Inf leaves anything in
     * new_residual. wire may have any alignment. */
    void (*encode)(const CompressorOptions *options, int64_t offset, int64_t elems, const float *values, float scale,
                   const float *residual, float *new_residual, void *wire);

    void (*decode)(const CompressorOptions *options, int64_t offset, int64_t elems, const void *wire, float *values);
    void (*decode_add)(const CompressorOptions *options, int64_t offset, int64_t elems, const void *wire, float *sum);

    /* What encode writes for a block depends on all values that it is given: whoever sends them gives it a message's
     * at once. Sizes and decode know blocks only. */
    bool by_message;
} Compressor;

extern const Compressor compressor_none, compressor_bf16, compressor_int8, compressor_int4, compressor_topk,
    compressor_int8_tensor;

/* NULL when there is none of that name. */
const Compressor *compressor_find(const char *name);

#endif
