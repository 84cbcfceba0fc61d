/* The table of kernels behind each compressor (compress_kernels.cuh). An operation is one launch, of which the host
 * computes the geometry: what a slice has of its first and last block. */
#include "comm/compress/compress_kernels.cuh"

extern "C" {
#include "comm/compress/compress_cuda.h"
}

#include <assert.h>

static unsigned ceil_div(int64_t a, int64_t b) { return (unsigned)((a + b - 1) / b); }

/* ---- values on their own ---- */

template <class Wire>
static void flat_encode(Gpu *gpu, void *stream, const CompressorOptions *, int64_t, int64_t elems, const float *values,
                        float scale, const float *residual, float *new_residual, void *wire) {
    if (elems == 0)
        return;
    LAUNCH(flat_encode_kernel<Wire>, ceil_div(elems, 4 * CODEC_THREADS), CODEC_THREADS, 0, (cudaStream_t)stream, elems,
           values, scale, residual, new_residual, (uint8_t *)wire);
    CHECK_CUDA(gpu, cudaGetLastError());
}

template <class Wire, bool ADD>
static void flat_decode(Gpu *gpu, void *stream, const CompressorOptions *, int64_t, int64_t elems, const void *wire,
                        float *values) {
    if (elems == 0)
        return;
    LAUNCH((flat_decode_kernel<Wire, ADD>), ceil_div(elems, 4 * CODEC_THREADS), CODEC_THREADS, 0, (cudaStream_t)stream,
           elems, (const uint8_t *)wire, values);
    CHECK_CUDA(gpu, cudaGetLastError());
}

/* ---- blocks ---- */

/* elems > 0. */
static Blocks blocks_of(const Compressor *compressor, const CompressorOptions *options, int64_t offset, int64_t elems) {
    int block = compressor->block_elems, skip = (int)(offset % block);
    int64_t first = block - skip < elems ? block - skip : elems;
    return Blocks{
        .count = (skip + elems + block - 1) / block,
        .elems = elems,
        .block_elems = block,
        .skip = skip,
        .first_bytes = (int64_t)compressor->wire_bytes(options, offset, first),
        .whole_bytes = (int64_t)compressor->wire_bytes(options, 0, block),
    };
}

static const Compressor *compressor_of(Int8) { return &compressor_int8; }
static const Compressor *compressor_of(Int4) { return &compressor_int4; }

template <class Code> static Blocks scaled_blocks(const CompressorOptions *options, int64_t offset, int64_t elems) {
    const Compressor *compressor = compressor_of(Code());
    assert(compressor->block_elems == Code::BLOCK);
    return blocks_of(compressor, options, offset, elems);
}

template <class Code>
static void scaled_encode(Gpu *gpu, void *stream, const CompressorOptions *options, int64_t offset, int64_t elems,
                          const float *values, float scale, const float *residual, float *new_residual, void *wire) {
    if (elems == 0)
        return;
    Blocks blocks = scaled_blocks<Code>(options, offset, elems);
    LAUNCH(scaled_encode_kernel<Code>, ceil_div(blocks.count, CODEC_WARPS), CODEC_THREADS, 0, (cudaStream_t)stream,
           blocks, values, scale, residual, new_residual, (uint8_t *)wire);
    CHECK_CUDA(gpu, cudaGetLastError());
}

template <class Code, bool ADD>
static void scaled_decode(Gpu *gpu, void *stream, const CompressorOptions *options, int64_t offset, int64_t elems,
                          const void *wire, float *values) {
    if (elems == 0)
        return;
    Blocks blocks = scaled_blocks<Code>(options, offset, elems);
    LAUNCH((scaled_decode_kernel<Code, ADD>), ceil_div(blocks.count, CODEC_WARPS), CODEC_THREADS, 0,
           (cudaStream_t)stream, blocks, (const uint8_t *)wire, values);
    CHECK_CUDA(gpu, cudaGetLastError());
}

/* ---- the k largest of a block ---- */

static Kept kept_in(const Blocks &blocks, const CompressorOptions *options) {
    int block = blocks.block_elems;
    int64_t end = blocks.skip + blocks.elems, first = block < end ? block : end;
    return Kept{
        .first = topk_kept(options, (int)first - blocks.skip),
        .whole = topk_kept(options, block),
        .last = topk_kept(options, (int)(end - (blocks.count - 1) * block)),
        .bf16_values = options->bf16_values,
    };
}

static void topk_encode(Gpu *gpu, void *stream, const CompressorOptions *options, int64_t offset, int64_t elems,
                        const float *values, float scale, const float *residual, float *new_residual, void *wire) {
    if (elems == 0)
        return;
    Blocks blocks = blocks_of(&compressor_topk, options, offset, elems);
    LAUNCH(topk_encode_kernel, (unsigned)blocks.count, CODEC_THREADS, 0, (cudaStream_t)stream, blocks,
           kept_in(blocks, options), values, scale, residual, new_residual, (uint8_t *)wire);
    CHECK_CUDA(gpu, cudaGetLastError());
}

template <bool ADD>
static void topk_decode(Gpu *gpu, void *stream, const CompressorOptions *options, int64_t offset, int64_t elems,
                        const void *wire, float *values) {
    if (elems == 0)
        return;
    Blocks blocks = blocks_of(&compressor_topk, options, offset, elems);
    LAUNCH(topk_decode_kernel<ADD>, (unsigned)blocks.count, CODEC_THREADS, 0, (cudaStream_t)stream, blocks,
           kept_in(blocks, options), (const uint8_t *)wire, values);
    CHECK_CUDA(gpu, cudaGetLastError());
}

/* ---- the table ---- */

const CudaCompressor *cuda_compressor(const Compressor *compressor) {
    static const CudaCompressor all[] = {
        {&compressor_none, flat_encode<WireF32>, flat_decode<WireF32, false>, flat_decode<WireF32, true>},
        {&compressor_bf16, flat_encode<WireBf16>, flat_decode<WireBf16, false>, flat_decode<WireBf16, true>},
        {&compressor_int8, scaled_encode<Int8>, scaled_decode<Int8, false>, scaled_decode<Int8, true>},
        {&compressor_int4, scaled_encode<Int4>, scaled_decode<Int4, false>, scaled_decode<Int4, true>},
        {&compressor_topk, topk_encode, topk_decode<false>, topk_decode<true>},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].compressor == compressor)
            return &all[i];
    return NULL;
}

void cuda_measure(Gpu *gpu, void *stream, int64_t offset, int64_t elems, int64_t stretch, const float *values,
                  float scale, const float *residual, const float *lost, double *sums) {
    if (elems == 0)
        return;
    LAUNCH(measure_kernel, CUDA_SUM_BLOCKS, CODEC_THREADS, 0, (cudaStream_t)stream, offset, elems, stretch, values, scale,
           residual, lost, sums);
    CHECK_CUDA(gpu, cudaGetLastError());
}

void cuda_take_sums(Gpu *gpu, void *stream, double *sums, double *noise, double *signal) {
    double parts[CUDA_SUMS];
    CHECK_CUDA(gpu, cudaMemcpyAsync(parts, sums, sizeof parts, cudaMemcpyDeviceToHost, (cudaStream_t)stream));
    CHECK_CUDA(gpu, cudaMemsetAsync(sums, 0, sizeof parts, (cudaStream_t)stream));
    CHECK_CUDA(gpu, cudaStreamSynchronize((cudaStream_t)stream));
    for (int i = 0; i < CUDA_SUM_BLOCKS; i++) {
        *noise += parts[2 * i];
        *signal += parts[2 * i + 1];
    }
}

void cuda_clear(Gpu *gpu, void *stream, float *array, int64_t elems) {
    CHECK_CUDA(gpu, cudaMemsetAsync(array, 0, (size_t)elems * sizeof *array, (cudaStream_t)stream));
}
