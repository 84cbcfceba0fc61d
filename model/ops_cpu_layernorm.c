/* LayerNorm on the cpu: one pass over memory per call; a row of x stays in L1 between its sums and its output.
 *
 * Backward, with xhat = (x - mean) rstd and g = dy w:   dx = rstd (g - mean(g) - xhat mean(g xhat)).
 * dw = sum over rows of dy xhat and db = sum of dy are taken over blocks of BLOCK rows into scratch, then added in
 * block order: their bits do not depend on the number of threads. */
#include "model/ops_cpu.h"

#include <omp.h>

enum { BLOCK = 32 }; /* rows */

static const float epsilon = 1e-5f;

size_t layernorm_cpu_scratch_bytes(const OpsLimits *limits) {
    size_t blocks = ((size_t)limits->rows + BLOCK - 1) / BLOCK;
    return blocks * 2 * (size_t)limits->C * sizeof(float);
}

void layernorm_forward_cpu(OpsContext *context, float *y, float *mean, float *rstd, const float *x, const float *w,
                           const float *b, int rows, int C) {
#pragma omp parallel for num_threads(context->threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        const float *in = x + (size_t)row * (size_t)C;
        float *out = y + (size_t)row * (size_t)C;
        float sum = 0, square = 0;
        for (int c = 0; c < C; c++)
            sum += in[c];
        float middle = sum / (float)C;
        for (int c = 0; c < C; c++)
            square += (in[c] - middle) * (in[c] - middle);
        float scale = 1.0f / sqrtf(square / (float)C + epsilon);
        for (int c = 0; c < C; c++)
            out[c] = (in[c] - middle) * scale * w[c] + b[c];
        mean[row] = middle;
        rstd[row] = scale;
    }
}

/* One row of dx; adds the row's share to the sums of its block. */
static void backward_row(float *restrict dx, float *restrict dw, float *restrict db, const float *restrict dy,
                         const float *restrict x, const float *restrict w, float mean, float rstd, int C,
                         bool residual) {
    float sum = 0, product = 0;
    for (int c = 0; c < C; c++) {
        float normal = (x[c] - mean) * rstd, g = dy[c] * w[c];
        sum += g;
        product += g * normal;
        dw[c] += dy[c] * normal;
        db[c] += dy[c];
    }
    sum /= (float)C;
    product /= (float)C;
    for (int c = 0; c < C; c++) {
        float normal = (x[c] - mean) * rstd;
        float gradient = rstd * (dy[c] * w[c] - sum - normal * product);
        dx[c] = residual ? dx[c] + gradient : gradient;
    }
}

/* out (+)= the sum over blocks of partial[block][column], for the columns of one thread. */
static void add_blocks(float *out, const float *partial, int blocks, size_t stride, Range columns, bool accumulate) {
    for (int c = columns.begin; c < columns.end; c++)
        out[c] = accumulate ? out[c] : 0;
    for (int block = 0; block < blocks; block++)
        for (int c = columns.begin; c < columns.end; c++)
            out[c] += partial[(size_t)block * stride + (size_t)c];
}

void layernorm_backward_cpu(OpsContext *context, float *dx, float *dw, float *db, const float *dy, const float *x,
                            const float *mean, const float *rstd, const float *w, int rows, int C, bool residual,
                            bool accumulate) {
    float *partial = context->scratch; /* [blocks][2C]: dw, db of the block's rows */
    size_t stride = 2 * (size_t)C;
    int blocks = (rows + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(context->threads)
    {
#pragma omp for schedule(static)
        for (int block = 0; block < blocks; block++) {
            float *sums = partial + (size_t)block * stride;
            memset(sums, 0, stride * sizeof(float));
            int end = (block + 1) * BLOCK < rows ? (block + 1) * BLOCK : rows;
            for (int row = block * BLOCK; row < end; row++) {
                size_t at = (size_t)row * (size_t)C;
                backward_row(dx + at, sums, sums + C, dy + at, x + at, w, mean[row], rstd[row], C, residual);
            }
        }
        Range columns = range_part(C, 16, omp_get_thread_num(), omp_get_num_threads());
        add_blocks(dw, partial, blocks, stride, columns, accumulate);
        add_blocks(db, partial + C, blocks, stride, columns, accumulate);
    }
}
