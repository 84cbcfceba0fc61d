/* When the work of a GPU was done, told by the GPU itself: nobody waits for it on the host.
 *
 *   stream    | forward | stamp &a | backward layer 11 | stamp &b | ...
 *   host      asks for both, goes on ...                                 read: a and b are filled in
 *
 * A Gpu has one GpuStamps, which any thread may use. */
#ifndef BASE_GPU_STAMPS_H
#define BASE_GPU_STAMPS_H

#include "base/gpu.h"

typedef struct GpuStamps GpuStamps;

GpuStamps *gpu_stamps_create(void *computing_stream); /* NULL: no memory, or the GPU gives none */
void gpu_stamps_destroy(GpuStamps *stamps);           /* accepts NULL */

/* *at_s will be when the stream (cudaStream_t) came to this point, on clock_s's scale; asked for more than once, the
 * last time counts. It must last until it is read. Where too many are outstanding it stays as it is. */
void gpu_stamp(Gpu *gpu, void *stream, double *at_s);

/* For whom nobody else may touch the computing stream: between the two other threads wait with what they ask of
 * stamps. */
void gpu_stamps_hold(GpuStamps *stamps);
void gpu_stamps_release(GpuStamps *stamps);

/* Fills in those that were reached, in the order of the calls up to the first that was not. */
void gpu_read_stamps(Gpu *gpu);

#endif
