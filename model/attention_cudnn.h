/* Causal self-attention of model/ops.h by cuDNN, bf16: fused, without a (T,T) array in memory. Only in builds with
 * CUDA.
 *
 * cuDNN takes head sizes that are multiples of 8, up to 128 on every card from sm_80 on; whoever computes attention
 * asks cudnn_attention_prepare before the first step, and goes another way where it says no. Any number of shapes up to
 * CUDNN_SHAPES_MAX can be prepared, each costs seconds. */
#ifndef MODEL_ATTENTION_CUDNN_H
#define MODEL_ATTENTION_CUDNN_H

#include "base/gpu.h"

#include <stdbool.h>
#include <stddef.h>

enum { CUDNN_SHAPES_MAX = 8 };

typedef struct CudnnAttention CudnnAttention;

/* deterministic: backward adds in a fixed order, so that its bits depend on its inputs only; it is slower and its
 * workspace grows with T*T. FAULT where cuDNN cannot be used, with a line that says why. */
Status cudnn_attention_create(CudnnAttention **attention, Gpu *gpu, bool deterministic);
void cudnn_attention_destroy(CudnnAttention *attention); /* accepts NULL */

/* Builds the plans of a shape, or finds them again. False: cuDNN cannot, and *why says why in a few words, valid until
 * attention is destroyed. */
bool cudnn_attention_prepare(CudnnAttention *attention, int B, int T, int C, int NH, const char **why);

/* Of a prepared shape: bytes of device memory, 256-byte aligned, that both passes need while they run. */
size_t cudnn_attention_workspace_bytes(const CudnnAttention *attention, int B, int T, int C, int NH);

/* As in model/ops.h, for a prepared shape: y bf16[B][T][C], lse f32[B][NH][T], qkv bf16[B][T][3C]; all 16-byte
 * aligned. Enqueued on the Gpu's stream. */
void cudnn_attention_forward(CudnnAttention *attention, void *y, float *lse, const void *qkv, void *workspace, int B,
                             int T, int C, int NH);
void cudnn_attention_backward(CudnnAttention *attention, void *dqkv, const void *dy, const void *y, const void *qkv,
                              const float *lse, void *workspace, int B, int T, int C, int NH);

/* For tests without a device: how many engines support a pass on the device that is described by cuDNN's JSON
 * `properties`; 0: `why`, a buffer of the caller's, says why. -1: cudnn_graph_engines explains. */
typedef enum CudnnPass { CUDNN_FORWARD, CUDNN_BACKWARD, CUDNN_BACKWARD_DETERMINISTIC } CudnnPass;
int cudnn_attention_engines(const char *properties, CudnnPass pass, int B, int T, int C, int NH, char *why,
                            size_t why_bytes);

#endif
