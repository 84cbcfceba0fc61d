/* The optimizer's two passes over memory on an NVIDIA GPU (optim/adamw.h, OptimOps). Only in builds with CUDA. */
#ifndef OPTIM_OPTIM_CUDA_H
#define OPTIM_OPTIM_CUDA_H

#include "base/gpu.h"
#include "optim/adamw.h"

#include <stdint.h>

typedef struct CudaOptim CudaOptim;

/* weights: bf16[elems] beside the f32 parameters, borrowed, written with every update and by adamw_params_arrived, by
 * stochastic rounding keyed by seed, step and place; NULL: there are none. */
Status cuda_optim_create(CudaOptim **optim, Gpu *gpu, void *weights, uint64_t seed);
void cuda_optim_set_weights(CudaOptim *optim, void *weights);
void cuda_optim_destroy(CudaOptim *optim); /* accepts NULL */
const OptimOps *cuda_optim(CudaOptim *optim);

#endif
