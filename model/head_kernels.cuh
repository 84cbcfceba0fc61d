/* The kernel of the head: softmax, loss and gradient of a row of logits, in place. */
#ifndef MODEL_HEAD_KERNELS_CUH
#define MODEL_HEAD_KERNELS_CUH

#include "model/pack_kernels.cuh"

enum { HEAD_THREADS = 512 };

/* How many of the N logits from v on are real. */
template <int N> __device__ inline int real_logits(int v, int V) { return V - v < N ? (V > v ? V - v : 0) : N; }

/* losses[row] = log sum exp z - z[target] over V logits. With `gradient` z becomes scale (softmax(z) - onehot), and 0
 * from V on; without it z stays.
 * Block: a row. Bytes: z once from memory and once more, with its gradient, from and to L2. */
template <class A, int N>
__global__ void __launch_bounds__(HEAD_THREADS)
    head_kernel(float *losses, A *logits, const int *targets, int V, int Vp, float scale, bool gradient) {
    A *z = logits + (int64_t)blockIdx.x * Vp;
    int target = targets[blockIdx.x], start = (int)threadIdx.x * N, step = (int)blockDim.x * N;
    float wanted = value_of(z[target]);
    SoftmaxSum sofar = {-FLT_MAX, 0};
    for (int v = start; v < V; v += step)
        softmax_add<N>(&sofar, load<A, N>(z + v), real_logits<N>(v, V));
    sofar = softmax_block(sofar); /* has barriers: everybody has read z[target] */
    if (threadIdx.x == 0)
        losses[blockIdx.x] = logf(sofar.sum) - (wanted - sofar.max);
    float each = scale / sofar.sum;
    for (int v = start; v < Vp && gradient; v += step) {
        Floats<N> out = load<A, N>(z + v);
        int real = real_logits<N>(v, V);
        for (int i = 0; i < N; i++)
            out.at[i] = i < real ? expf(out.at[i] - sofar.max) * each - (v + i == target ? scale : 0) : 0;
        store<A, N>(z + v, out);
    }
}

#endif
