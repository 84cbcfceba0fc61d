/* Linear layers on the cuda device: three products, and what they leave over.
 *
 *     forward    y = x w^T + residual          bias by epilogue, GELU too with bf16
 *     backward   dx = dy w                     GELU' by epilogue with bf16
 *                dw (+)= dy^T x                f32 whatever the activations are
 *                db (+)= column sums of dy     in two stages
 *
 * Where cuBLASLt has no epilogue for a shape (pointers of odd alignment), a kernel does its work in one more pass over
 * y or dx. cuBLASLt's GELU is good to bf16 only, so with f32 it is always ours. */
#include "model/linear_kernels.cuh"
#include "model/ops_cuda_internal.cuh"

enum { THREADS = 256, SUM_ROWS_MIN = 32 };

void sum_parts(CudaOps *ops, float *first, float *second, int split, const float *partial, int parts, int width,
               bool accumulate) {
    LAUNCH(sum_parts_kernel, (unsigned)blocks_of(width, WARP), dim3(WARP, PART_LINES), 0, ops->stream, first, second,
           split, partial, parts, width, accumulate);
    CHECK_LAUNCH(ops);
}

/* Whether the epilogue's GELU is as good as the activations. */
static bool fuses_gelu(const CudaOps *ops) { return ops->dtype == CUDA_BF16; }

template <class A> static void finish_linear(CudaOps *ops, A *y, A *act, const A *bias, int rows, int OC) {
    bool wide = wide_rows<A>(OC) && aligned(y) && aligned(act) && aligned(bias);
    LAUNCH_PACKED(wide, finish_linear_kernel, A, (unsigned)rows, THREADS, 0, ops->stream, y, act, bias, OC);
    CHECK_LAUNCH(ops);
}

/* GELU of y as well, by the epilogue; false: nothing is done. */
template <class A> static bool forward_with_gelu(CudaOps *ops, Product forward, A *y, A *act, const A *bias) {
    if (!act || forward.add || !fuses_gelu(ops))
        return false;
    forward.out = act;
    forward.aux = y;
    forward.bias = bias;
    forward.epilogue = bias ? EPILOGUE_GELU_BIAS : EPILOGUE_GELU;
    return product(ops, &forward);
}

template <class A>
static void linear_forward(OpsContext *context, Act *y, Act *gelu, const Act *x, const float *w, const float *b,
                           const Act *residual, int rows, int C, int OC) {
    CudaOps *ops = cuda_of(context);
    const A *bias = weights_of<A>(ops, b);
    Product forward = {.out = y,
                       .out_stride = OC,
                       .rows = rows,
                       .columns = OC,
                       .depth = C,
                       .left = plain(x, C),
                       .right = transposed(weights_of<A>(ops, w), C),
                       .add = residual};
    if (forward_with_gelu(ops, forward, (A *)y, (A *)gelu, bias))
        return;
    forward.bias = bias;
    forward.epilogue = bias ? EPILOGUE_BIAS : EPILOGUE_NONE;
    if (!product(ops, &forward)) {
        forward.bias = NULL;
        forward.epilogue = EPILOGUE_NONE;
        product(ops, &forward);
        finish_linear(ops, (A *)y, (A *)gelu, bias, rows, OC);
    } else if (gelu) {
        finish_linear<A>(ops, (A *)y, (A *)gelu, NULL, rows, OC);
    }
}

template <class A> static void gelu_forward(OpsContext *context, Act *y, const Act *x, int rows, int C) {
    finish_linear<A>(cuda_of(context), (A *)x, (A *)y, NULL, rows, C); /* x stays as it is without a bias */
}

template <class A> static void slope(CudaOps *ops, A *dx, const A *pre, int64_t elems) {
    bool wide = wide_rows<A>(elems) && aligned(dx) && aligned(pre);
    int64_t blocks = blocks_of(elems, THREADS * (wide ? 16 / (int64_t)sizeof(A) : 1));
    LAUNCH_PACKED(wide, slope_kernel, A, (unsigned)blocks, THREADS, 0, ops->stream, dx, pre, elems);
    CHECK_LAUNCH(ops);
}

template <class A> static void backward_input(CudaOps *ops, const LinearGrads *grads, const Product *plain_product,
                                              int rows, int C) {
    Product fused = *plain_product;
    fused.aux = grads->gelu;
    fused.epilogue = EPILOGUE_SLOPE;
    if (grads->gelu && fuses_gelu(ops) && product(ops, &fused))
        return;
    product(ops, plain_product);
    if (grads->gelu)
        slope(ops, (A *)grads->dx, (const A *)grads->gelu, (int64_t)rows * C);
}

template <class A>
static void sum_columns(OpsContext *context, float *db, const A *dy, int rows, int OC, bool accumulate) {
    CudaOps *ops = cuda_of(context);
    float *partial = (float *)context->scratch;
    Parts parts = parts_of(rows, OC, SUM_ROWS_MIN);
    bool wide = wide_rows<A>(OC) && aligned(dy);
    dim3 grid((unsigned)blocks_of(OC, WARP * (wide ? 16 / (int64_t)sizeof(A) : 1)), (unsigned)parts.count);
    LAUNCH_PACKED(wide, column_sums_kernel, A, grid, dim3(WARP, COLUMN_LINES), 0, ops->stream, partial, dy, rows, OC,
                  parts.rows);
    CHECK_LAUNCH(ops);
    sum_parts(ops, db, NULL, OC, partial, parts.count, OC, accumulate);
}

template <class A>
static void linear_backward(OpsContext *context, const LinearGrads *grads, const Act *dy, const Act *x, const float *w,
                            int rows, int C, int OC) {
    CudaOps *ops = cuda_of(context);
    Product input = {.out = grads->dx,
                     .out_stride = C,
                     .rows = rows,
                     .columns = C,
                     .depth = OC,
                     .left = plain(dy, OC),
                     .right = plain(weights_of<A>(ops, w), C)};
    Product weights = {.out = grads->dw,
                       .out_stride = C,
                       .out_f32 = true,
                       .rows = OC,
                       .columns = C,
                       .depth = rows,
                       .left = transposed(dy, OC),
                       .right = plain(x, C),
                       .add = grads->accumulate ? grads->dw : NULL};
    backward_input<A>(ops, grads, &input, rows, C);
    product(ops, &weights);
    if (grads->db)
        sum_columns(context, grads->db, (const A *)dy, rows, OC, grads->accumulate);
}

template <class A> static void fill(Ops *table) {
    table->linear_forward = linear_forward<A>;
    table->gelu_forward = gelu_forward<A>;
    table->linear_backward = linear_backward<A>;
}

void linear_cuda_slots(Ops *table, CudaDtype dtype) { dtype == CUDA_BF16 ? fill<bf16>(table) : fill<float>(table); }
