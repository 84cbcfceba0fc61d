/* The wire form of topk's blocks, for the CPU and for CUDA kernels. */
#ifndef COMM_COMPRESS_TOPK_H
#define COMM_COMPRESS_TOPK_H

#include "base/host_device.h"
#include "comm/compress/compressor.h"

#include <math.h>

enum { TOPK_BLOCK = 4096, TOPK_INDEX_BITS = 12 };

/* Of a block of n values. */
static inline int topk_kept(const CompressorOptions *options, int n) { return (int)ceil(options->density * n); }

static HOST_DEVICE inline int topk_index_bytes(int kept) { return (kept * TOPK_INDEX_BITS + 7) / 8; }

/* The i-th index. */
static HOST_DEVICE inline int topk_index(const uint8_t *wire, int i) {
    const uint8_t *pair = wire + i / 2 * 3;
    return i % 2 ? pair[1] >> 4 | pair[2] << 4 : pair[0] | (pair[1] & 15) << 8;
}

#endif
