/* The global gradient norm, in an order of summation that nothing can change: squares are exact in f64; LANES partial
 * sums per block (lane = index modulo LANES) are folded in halves; blocks are added in their order. So the result is
 * the same for any number of threads, any vector width, and for ranks that hold only some of the blocks. Costs one
 * read of the gradient. */
#include "optim/adamw.h"

#include <math.h>

enum { BLOCK = 4096, LANES = 16, BLOCKS_PER_ROUND = 2048 };

static double block_sum(const float *grads, int64_t elems) {
    double lanes[LANES] = {0};
    int64_t whole = elems / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += (double)grads[i + lane] * (double)grads[i + lane];
    for (int64_t i = whole; i < elems; i++)
        lanes[i - whole] += (double)grads[i] * (double)grads[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

double grad_norm(const float *grads, int64_t elems) {
    double sums[BLOCKS_PER_ROUND]; /* rounds keep this small, whatever the size of the gradient */
    double total = 0;
    int64_t blocks = (elems + BLOCK - 1) / BLOCK;
    for (int64_t first = 0; first < blocks; first += BLOCKS_PER_ROUND) {
        int64_t count = blocks - first < BLOCKS_PER_ROUND ? blocks - first : BLOCKS_PER_ROUND;
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < count; i++) {
            int64_t begin = (first + i) * BLOCK;
            sums[i] = block_sum(grads + begin, elems - begin < BLOCK ? elems - begin : BLOCK);
        }
        for (int64_t i = 0; i < count; i++)
            total += sums[i];
    }
    return sqrt(total);
}

double clip_scale(double norm, double clip) {
    if (clip == 0)
        return 1;
    if (!isfinite(norm))
        return NAN; /* no scale makes such a gradient usable: the step is to be skipped */
    return norm > clip ? clip / norm : 1;
}
