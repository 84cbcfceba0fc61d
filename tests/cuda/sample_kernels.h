/* Small kernels for the emulator's own test, some with a fault. */
#ifndef TESTS_CUDA_SAMPLE_KERNELS_H
#define TESTS_CUDA_SAMPLE_KERNELS_H

#ifdef __cplusplus
extern "C" {
#endif

enum { SAMPLE_THREADS = 160, SAMPLE_BLOCKS = 3, SAMPLE_ELEMS = SAMPLE_THREADS * SAMPLE_BLOCKS };

/* Runs the kernel `name` on in[SAMPLE_ELEMS] and fetches out[SAMPLE_ELEMS]; 0 when there is no such kernel. */
int sample_kernel_run(const char *name, float *out, const float *in);

/* `reverse` in a stream, on memory of the device. */
void sample_kernel_reverse(void *stream, float *out, const float *in);

#ifdef __cplusplus
}
#endif
#endif
