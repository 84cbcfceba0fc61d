/* A build without CUDA has no compressors for a GPU. */
#include "comm/compress/compress_cuda.h"

#include <assert.h>
#include <stddef.h>

const CudaCompressor *cuda_compressor(const Compressor *compressor) {
    (void)compressor;
    return NULL;
}

void cuda_clear(Gpu *gpu, void *stream, float *array, int64_t elems) {
    assert(!gpu), (void)gpu, (void)stream, (void)array, (void)elems;
}

void cuda_measure(Gpu *gpu, void *stream, int64_t offset, int64_t elems, int64_t stretch, const float *values,
                  float scale, const float *residual, const float *lost, double *sums) {
    assert(!gpu), (void)gpu, (void)stream, (void)offset, (void)elems, (void)stretch, (void)values, (void)scale;
    (void)residual, (void)lost, (void)sums;
}

void cuda_take_sums(Gpu *gpu, void *stream, double *sums, double *noise, double *signal) {
    assert(!gpu), (void)gpu, (void)stream, (void)sums, (void)noise, (void)signal;
}
