/* Attention of the cuda device by cuDNN: the two operations of the table are replaced by ones that go to cuDNN for the
 * shape that was prepared, and to our own path for every other. */
#include "model/ops_cuda_internal.cuh"

extern "C" {
#include "model/attention_cudnn.h"
}

#include <stdio.h>
#include <stdlib.h>

#ifdef HAVE_CUDNN
struct CudnnUse {
    CudnnAttention *attention;
    void *workspace; /* u8[workspace_bytes], the Gpu's memory; NULL until connected */
    size_t workspace_bytes;
    int B, T, C, NH;
    Ops own; /* the table as it was */
    char why[256];
};

static bool is_prepared(const CudnnUse *use, int B, int T, int C, int NH) {
    return use->B == B && use->T == T && use->C == C && use->NH == NH;
}

static void attention_forward(OpsContext *context, Act *y, float *lse, const Act *qkv, int B, int T, int C, int NH) {
    const CudnnUse *use = cuda_of(context)->cudnn;
    if (is_prepared(use, B, T, C, NH))
        cudnn_attention_forward(use->attention, y, lse, qkv, use->workspace, B, T, C, NH);
    else
        use->own.attention_forward(context, y, lse, qkv, B, T, C, NH);
}

static void attention_backward(OpsContext *context, Act *dqkv, const Act *dy, const Act *y, const Act *qkv,
                               const float *lse, int B, int T, int C, int NH) {
    const CudnnUse *use = cuda_of(context)->cudnn;
    if (is_prepared(use, B, T, C, NH))
        cudnn_attention_backward(use->attention, dqkv, dy, y, qkv, lse, use->workspace, B, T, C, NH);
    else
        use->own.attention_backward(context, dqkv, dy, y, qkv, lse, B, T, C, NH);
}

/* NULL, or why not. */
static const char *prepare(CudaOps *ops, CudnnUse *use, bool deterministic) {
    const char *why;
    if (ops->dtype != CUDA_BF16)
        return "cuDNN's attention takes bf16 only";
    if (cudnn_attention_create(&use->attention, ops->gpu, deterministic) != OK) {
        snprintf(use->why, sizeof use->why, "%s", error_line());
        return use->why;
    }
    if (!cudnn_attention_prepare(use->attention, use->B, use->T, use->C, use->NH, &why))
        return why;
    use->workspace_bytes = cudnn_attention_workspace_bytes(use->attention, use->B, use->T, use->C, use->NH);
    bool connected = ops->params != NULL;
    if (connected && cudnn_use_connect(ops) != OK)
        return "no memory on the GPU for cuDNN's workspace";
    return NULL;
}

size_t cudnn_use_bytes(const CudaOps *ops, int B) {
    const CudnnUse *use = ops->cudnn;
    return use ? (use->workspace_bytes * (size_t)B + (size_t)use->B - 1) / (size_t)use->B : 0;
}

Status cudnn_use_connect(CudaOps *ops) {
    CudnnUse *use = ops->cudnn;
    if (!use || use->workspace_bytes == 0)
        return OK;
    use->workspace = memory_alloc(gpu_memory(ops->gpu), use->workspace_bytes);
    return use->workspace ? OK : fault("cuDNN: no memory on the GPU for a workspace of %zu bytes",
                                       use->workspace_bytes);
}

bool cuda_ops_use_cudnn(CudaOps *ops, bool deterministic, int B, int T, int C, int NH, const char **why) {
    assert(!ops->cudnn);
    CudnnUse *use = ops->cudnn = (CudnnUse *)calloc(1, sizeof *use);
    *why = "no memory";
    if (!use)
        return false;
    use->own = ops->table;
    use->B = B, use->T = T, use->C = C, use->NH = NH;
    *why = prepare(ops, use, deterministic);
    if (*why)
        return false;
    ops->table.attention_forward = attention_forward;
    ops->table.attention_backward = attention_backward;
    return true;
}

void cudnn_use_destroy(CudaOps *ops) {
    if (!ops->cudnn)
        return;
    cudnn_attention_destroy(ops->cudnn->attention);
    memory_free(gpu_memory(ops->gpu), ops->cudnn->workspace);
    free(ops->cudnn);
}
#else
size_t cudnn_use_bytes(const CudaOps *, int) { return 0; }
Status cudnn_use_connect(CudaOps *) { return OK; }
bool cuda_ops_use_cudnn(CudaOps *, bool, int, int, int, int, const char **why) {
    *why = "built without cuDNN";
    return false;
}

void cudnn_use_destroy(CudaOps *) {}
#endif
