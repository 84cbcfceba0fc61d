/* LayerNorm on the cuda device; the formulas are ops_cpu_layernorm.c's. Forward takes a warp per row. Backward takes a
 * block per part of the rows, for dx and for the part's share of dw and db; the shares are then added in order. */
#include "model/layernorm_kernels.cuh"
#include "model/ops_cuda_internal.cuh"

enum { BACKWARD_ROWS_MIN = 8, BACKWARD_THREADS_MAX = 256, SHARED_BYTES_MAX = 47 << 10 /* 48 with what block_sum has */ };

template <class A>
static void layernorm_forward(OpsContext *context, Act *y, float *mean, float *rstd, const Act *x, const float *w,
                              const float *b, int rows, int C) {
    CudaOps *ops = cuda_of(context);
    const A *gain = weights_of<A>(ops, w), *bias = weights_of<A>(ops, b);
    bool wide = wide_rows<A>(C) && aligned(y, x, gain, bias);
    LAUNCH_PACKED(wide, layernorm_forward_kernel, A, (unsigned)blocks_of(rows, NORM_WARPS), WARP * NORM_WARPS, 0,
                  ops->stream, (A *)y, mean, rstd, (const A *)x, gain, bias, rows, C);
    CHECK_LAUNCH(ops);
}

/* Whole warps, a pack of columns for each thread where there are not too many. */
static unsigned backward_threads(int C, int pack) {
    int64_t threads = blocks_of(blocks_of(C, pack), WARP) * WARP;
    return (unsigned)(threads < BACKWARD_THREADS_MAX ? threads : (int64_t)BACKWARD_THREADS_MAX);
}

template <class A>
static void layernorm_backward(OpsContext *context, Act *dx, float *dw, float *db, const Act *dy, const Act *x,
                               const float *mean, const float *rstd, const float *w, int rows, int C, bool residual,
                               bool accumulate) {
    CudaOps *ops = cuda_of(context);
    const A *gain = weights_of<A>(ops, w);
    float *partial = (float *)context->scratch;
    Parts parts = parts_of(rows, 2 * C, BACKWARD_ROWS_MIN);
    bool wide = wide_rows<A>(C) && aligned(dx, dy, x, gain);
    size_t shared_bytes = 2 * (size_t)C * sizeof(float);
    bool shared = shared_bytes <= SHARED_BYTES_MAX;
    LAUNCH_PACKED(wide, layernorm_backward_kernel, A, (unsigned)parts.count,
                  backward_threads(C, wide ? (int)(16 / sizeof(A)) : 1), shared ? shared_bytes : 0, ops->stream,
                  (A *)dx, partial, (const A *)dy, (const A *)x, mean, rstd, gain, rows, C, parts.rows, residual,
                  shared);
    CHECK_LAUNCH(ops);
    sum_parts(ops, dw, db, C, partial, parts.count, 2 * C, accumulate);
}

template <class A> static void fill(Ops *table) {
    table->layernorm_forward = layernorm_forward<A>;
    table->layernorm_backward = layernorm_backward<A>;
}

void layernorm_cuda_slots(Ops *table, CudaDtype dtype) { dtype == CUDA_BF16 ? fill<bf16>(table) : fill<float>(table); }
