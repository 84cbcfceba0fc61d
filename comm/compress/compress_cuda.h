/* The compressors on a GPU: the CPU's wire bytes, residuals and sums, to the bit. A build without CUDA has none
 * (compress_cuda_none.c). */
#ifndef COMM_COMPRESS_COMPRESS_CUDA_H
#define COMM_COMPRESS_COMPRESS_CUDA_H

#include "base/gpu.h"
#include "comm/compress/compressor.h"

/* The three operations of a Compressor as work for a stream (cudaStream_t) of the Gpu. They mean what they mean there,
 * but values, residuals and wire lie in the device's memory, the wire with any alignment; they come back before
 * anything is done, and faults are noted in the Gpu. Fastest where values and residuals lie on 16 bytes wherever a block
 * begins, and the wire on 4. Sizes are those of `compressor`. Only the bits of NaN that arithmetic makes are the
 * machine's. */
typedef struct CudaCompressor {
    const Compressor *compressor;
    void (*encode)(Gpu *gpu, void *stream, const CompressorOptions *options, int64_t offset, int64_t elems,
                   const float *values, float scale, const float *residual, float *new_residual, void *wire);
    void (*decode)(Gpu *gpu, void *stream, const CompressorOptions *options, int64_t offset, int64_t elems,
                   const void *wire, float *values);
    void (*decode_add)(Gpu *gpu, void *stream, const CompressorOptions *options, int64_t offset, int64_t elems,
                       const void *wire, float *sum);
} CudaCompressor;

/* NULL: that one runs on the CPU only. */
const CudaCompressor *cuda_compressor(const Compressor *compressor);

/* How much encoding lost, over the stretches (of `stretch` values, by global offset) that sample.h takes: sums
 * f64[CUDA_SUMS] grow by parts of the sums of lost^2 and of (scale * values + residual)^2. cuda_take_sums waits for the
 * stream, adds the parts to *noise and *signal, and starts anew. */
enum { CUDA_SUM_BLOCKS = 64, CUDA_SUMS = 2 * CUDA_SUM_BLOCKS };
void cuda_measure(Gpu *gpu, void *stream, int64_t offset, int64_t elems, int64_t stretch, const float *values,
                  float scale, const float *residual, const float *lost, double *sums);
void cuda_take_sums(Gpu *gpu, void *stream, double *sums, double *noise, double *signal);

/* array f32[elems] = 0, in the stream. */
void cuda_clear(Gpu *gpu, void *stream, float *array, int64_t elems);

#endif
