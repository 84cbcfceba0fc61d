/* The head on the cuda device: logits of a chunk of positions by a product, then loss and, in place of the logits,
 * their gradient by one kernel, then the products that take the gradient back:
 *
 *     z = x wte^T,   dz = scale (softmax(z) - onehot),   dwte (+)= dz^T x,   dx = dz wte
 *
 * dz is 0 in the padding, and so are the padded rows of dwte. */
#include "model/head_kernels.cuh"
#include "model/ops_cuda_internal.cuh"

template <class A>
static void losses_and_gradient(CudaOps *ops, float *losses, A *logits, const A *x, const A *wte, const int *targets,
                                int rows, int C, int V, int Vp, float scale, bool gradient) {
    Product forward = {.out = logits,
                       .out_stride = Vp,
                       .rows = rows,
                       .columns = Vp,
                       .depth = C,
                       .left = plain(x, C),
                       .right = transposed(wte, C)};
    product(ops, &forward);
    LAUNCH_PACKED(wide_rows<A>(Vp) && aligned(logits), head_kernel, A, (unsigned)rows, HEAD_THREADS, 0, ops->stream,
                  losses, logits, targets, V, Vp, scale, gradient);
    CHECK_LAUNCH(ops);
}

template <class A>
static void head_loss(OpsContext *context, float *losses, Act *logits, const Act *x, const float *wte,
                      const int *targets, int rows, int C, int V, int Vp) {
    CudaOps *ops = cuda_of(context);
    losses_and_gradient(ops, losses, (A *)logits, (const A *)x, weights_of<A>(ops, wte), targets, rows, C, V, Vp, 0,
                        false);
}

template <class A>
static void head_backward(OpsContext *context, float *losses, Act *logits, Act *dx, float *dwte, const Act *x,
                          const float *wte, const int *targets, int rows, int C, int V, int Vp, float scale,
                          bool accumulate) {
    CudaOps *ops = cuda_of(context);
    const A *weights = weights_of<A>(ops, wte);
    losses_and_gradient(ops, losses, (A *)logits, (const A *)x, weights, targets, rows, C, V, Vp, scale, true);
    Product table = {.out = dwte,
                     .out_stride = C,
                     .out_f32 = true,
                     .rows = Vp,
                     .columns = C,
                     .depth = rows,
                     .left = transposed(logits, Vp),
                     .right = plain(x, C),
                     .add = accumulate ? dwte : NULL};
    Product input = {.out = dx,
                     .out_stride = C,
                     .rows = rows,
                     .columns = C,
                     .depth = Vp,
                     .left = plain(logits, Vp),
                     .right = plain(weights, C)};
    product(ops, &table);
    product(ops, &input);
}

template <class A> static void fill(Ops *table) {
    table->head_loss = head_loss<A>;
    table->head_backward = head_backward<A>;
}

void head_cuda_slots(Ops *table, CudaDtype dtype) { dtype == CUDA_BF16 ? fill<bf16>(table) : fill<float>(table); }
