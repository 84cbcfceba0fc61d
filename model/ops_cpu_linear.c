/* Linear layers on the cpu. BLAS multiplies, single-threaded, each thread of our team on a tile of the result:
 *
 *     threads = down * across, tiles of (rows / down) x (columns / across)
 *
 * A call of BLAS copies ("packs") both its operands once, which is what a cut costs: (columns / across) * k floats of
 * the right operand and (rows / down) * k of the left one, by every thread. The cut with the smaller weighted sum is
 * taken; the weight is such that the faster cut wins for GPT-2's shapes (docs/speed.md). What follows a product
 * element by element (bias, residual, GELU and its slope) is done by the same thread on its own tile; bias and
 * residual are stored first and the product added to them, which costs no more than the clearing that BLAS would do. */
#include "model/ops_cpu.h"

#include <cblas.h>
#include <omp.h>

Tile tile_of(int rows, int columns, int index, int parts) {
    enum { ROW_WEIGHT = 4, GRAIN = 16 };
    int down = 1;
    int64_t best = INT64_MAX;
    for (int d = 1; d <= parts; d++) {
        if (parts % d)
            continue;
        int64_t cost = (columns + parts / d - 1) / (parts / d) + (int64_t)ROW_WEIGHT * ((rows + d - 1) / d);
        if (cost <= best) {
            best = cost;
            down = d;
        }
    }
    int across = parts / down;
    return (Tile){range_part(rows, rows >= GRAIN * down ? GRAIN : 1, index / across, down),
                  range_part(columns, GRAIN, index % across, across)};
}

/* One row, as in generation: every weight is used once, so nothing is worth packing and memory sets the pace. */
static void multiply_row(float *restrict out, const float *restrict x, const float *restrict w, int stride, int n,
                         int k, bool add) {
    for (int column = 0; column < n; column++) {
        const float *row = w + (size_t)column * (size_t)stride;
        float sum = 0;
        for (int i = 0; i < k; i++)
            sum += x[i] * row[i];
        out[column] = add ? out[column] + sum : sum;
    }
}

void matmul_tile(Tile tile, float *out, int stride, Operand a, Operand b, int k, bool add) {
    int m = tile.rows.end - tile.rows.begin, n = tile.columns.end - tile.columns.begin;
    if (m <= 0 || n <= 0)
        return;
    const float *left = a.at + (size_t)tile.rows.begin * (a.transposed ? 1 : (size_t)a.stride);
    const float *right = b.at + (size_t)tile.columns.begin * (b.transposed ? (size_t)b.stride : 1);
    float *result = out + (size_t)tile.rows.begin * (size_t)stride + tile.columns.begin;
    if (m == 1 && !a.transposed && b.transposed)
        multiply_row(result, left, right, b.stride, n, k, add);
    else
        cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans,
                    m, n, k, 1, left, a.stride, right, b.stride, add ? 1 : 0, result, stride);
}

/* What the product will be added to: bias + residual, either of which may be NULL. */
static void store_start(float *y, const float *b, const float *residual, Tile tile, int OC) {
    for (int row = tile.rows.begin; row < tile.rows.end; row++)
        for (int o = tile.columns.begin; o < tile.columns.end; o++) {
            size_t at = (size_t)row * (size_t)OC + (size_t)o;
            y[at] = (b ? b[o] : 0) + (residual ? residual[at] : 0);
        }
}

static void store_gelu(float *restrict act, const float *restrict y, Tile tile, int OC) {
    for (int row = tile.rows.begin; row < tile.rows.end; row++)
        for (int o = tile.columns.begin; o < tile.columns.end; o++) {
            size_t at = (size_t)row * (size_t)OC + (size_t)o;
            act[at] = gelu(y[at]);
        }
}

void linear_forward_cpu(OpsContext *context, float *y, float *act, const float *x, const float *w, const float *b,
                        const float *residual, int rows, int C, int OC) {
#pragma omp parallel num_threads(context->threads)
    {
        Tile tile = tile_of(rows, OC, omp_get_thread_num(), omp_get_num_threads());
        bool start = b || residual;
        if (start)
            store_start(y, b, residual, tile, OC);
        matmul_tile(tile, y, OC, plain(x, C), transposed(w, C), C, start);
        if (act)
            store_gelu(act, y, tile, OC);
    }
}

void gelu_forward_cpu(OpsContext *context, float *y, const float *x, int rows, int C) {
#pragma omp parallel num_threads(context->threads)
    store_gelu(y, x, tile_of(rows, C, omp_get_thread_num(), omp_get_num_threads()), C);
}

static void multiply_slope(float *restrict dx, const float *restrict pre, Tile tile, int C) {
    for (int row = tile.rows.begin; row < tile.rows.end; row++)
        for (int c = tile.columns.begin; c < tile.columns.end; c++) {
            size_t at = (size_t)row * (size_t)C + (size_t)c;
            dx[at] *= gelu_slope(pre[at]);
        }
}

/* db (+)= sums of dy's columns; a thread has columns of its own and adds in the order of the rows. */
static void sum_columns(float *restrict db, const float *restrict dy, Range columns, int rows, int OC,
                        bool accumulate) {
    for (int o = columns.begin; o < columns.end; o++)
        db[o] = accumulate ? db[o] : 0;
    for (int row = 0; row < rows; row++)
        for (int o = columns.begin; o < columns.end; o++)
            db[o] += dy[(size_t)row * (size_t)OC + (size_t)o];
}

void linear_backward_cpu(OpsContext *context, const LinearGrads *grads, const float *dy, const float *x, const float *w,
                         int rows, int C, int OC) {
#pragma omp parallel num_threads(context->threads)
    {
        int index = omp_get_thread_num(), parts = omp_get_num_threads();
        Tile tile = tile_of(rows, C, index, parts);
        matmul_tile(tile, grads->dx, C, plain(dy, OC), plain(w, C), OC, false);
        if (grads->gelu)
            multiply_slope(grads->dx, grads->gelu, tile, C);
        matmul_tile(tile_of(OC, C, index, parts), grads->dw, C, transposed(dy, OC), plain(x, C), rows,
                    grads->accumulate);
        if (grads->db)
            sum_columns(grads->db, dy, range_part(OC, 16, index, parts), rows, OC, grads->accumulate);
    }
}
