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
