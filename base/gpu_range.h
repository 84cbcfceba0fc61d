/* Names for stretches of a thread's work, which Nsight Systems shows above the GPU's: NVTX. They nest, and cost next to
 * nothing where no tool listens; a build without CUDA, or without NVTX's header, has none. */
#ifndef BASE_GPU_RANGE_H
#define BASE_GPU_RANGE_H

/* "name number", or where number is below 0 only the name. */
void gpu_range_begin(const char *name, int number);
void gpu_range_end(void);

#endif
