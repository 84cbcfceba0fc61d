/* The operations of model/ops.h on an NVIDIA GPU: products by cuBLASLt, attention by cuDNN where it takes the shape and by
 * our own kernels elsewhere, the rest by our own kernels. Only in builds with CUDA.
 *
 *   f32    activations f32, products in f32
 *   tf32   the same, products on tensor cores with 10 bits of mantissa
 *   bf16   activations bf16; weights as a bf16 copy of the f32 parameters; sums, statistics, losses and weight
 *          gradients f32 */
#ifndef MODEL_OPS_CUDA_H
#define MODEL_OPS_CUDA_H

#include "base/gpu.h"
#include "model/ops.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum CudaDtype { CUDA_F32, CUDA_TF32, CUDA_BF16 } CudaDtype;

typedef struct CudaOps CudaOps;

/* What can be asked for sizes, and cuDNN, before anything is allocated on the Gpu; cuda_ops_connect makes it work. */
Status cuda_ops_open(CudaOps **ops, Gpu *gpu, CudaDtype dtype);

/* params f32[elems] is the flat array whose tensors the operations will be given, borrowed, in the Gpu's memory; of other
 * weights bf16 knows no copy. Allocates cuda_ops_bytes: workspaces and, for bf16, the copy. */
Status cuda_ops_connect(CudaOps *ops, const float *params, int64_t elems);

/* For the largest batch: that of cuda_ops_use_cudnn, or another one, for which cuDNN's workspace is scaled. */
size_t cuda_ops_bytes(const CudaOps *ops, int64_t elems, int B);

/* Both at once. */
Status cuda_ops_create(CudaOps **ops, Gpu *gpu, CudaDtype dtype, const float *params, int64_t elems);
void cuda_ops_destroy(CudaOps *ops); /* accepts NULL */

/* The table, whose state is this CudaOps. */
const Ops *cuda_ops(CudaOps *ops);

/* From now on attention of B sequences of T tokens goes to cuDNN, all other shapes still our own way: bf16 only, once,
 * before the first step; takes seconds and, as soon as ops are connected, a workspace in the Gpu's memory.
 * deterministic: model/attention_cudnn.h, and what model/ops.h promises; without it gradients' last bits depend on
 * timing. False: nothing has changed, and *why says why cuDNN cannot, valid as long as ops. */
bool cuda_ops_use_cudnn(CudaOps *ops, bool deterministic, int B, int T, int C, int NH, const char **why);

/* From now on a layer's pass is recorded when it comes for the second time, and launched whole from then on
 * (base/gpu_graph.h). Before the table is used. */
Status cuda_ops_use_graphs(CudaOps *ops);

/* What products of n x n matrices reach, for a few ms, in memory that is given back; 0: there is none, or they fail.
 * Behind cuda_ops_connect. */
double cuda_ops_product_flops_per_s(CudaOps *ops, int n);

/* bf16[elems], the weights as products see them, for whoever updates params; NULL unless dtype is bf16. */
void *cuda_ops_weights(CudaOps *ops);

/* Refreshes elements start .. start + elems - 1 of that copy from params, rounded to nearest. */
void cuda_ops_round_weights(CudaOps *ops, int64_t start, int64_t elems);

#endif
