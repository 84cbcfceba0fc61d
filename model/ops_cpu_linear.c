#include "model/ops_cpu.h"

#include <cblas.h>
#include <omp.h>

static void matmul(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, int m, int n, int k, const float *a, int lda, const float *b,
                   int ldb, float beta, float *c, int ldc) {
    if (m > 0 && n > 0)
        cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1.0f, a, lda, b, ldb, beta, c, ldc);
}

void linear_forward_cpu(OpsContext *context, float *y, float *act, const float *x, const float *w, const float *b,
                        const float *residual, int rows, int C, int OC) {
#pragma omp parallel num_threads(context->threads)
    {
        Range part = range_part(rows, 1, omp_get_thread_num(), omp_get_num_threads());
        for (int row = part.begin; row < part.end; row++)
            for (int o = 0; o < OC; o++)
                y[(size_t)row * OC + o] = (b ? b[o] : 0) + (residual ? residual[(size_t)row * OC + o] : 0);
        size_t at = (size_t)part.begin;
        matmul(CblasNoTrans, CblasTrans, part.end - part.begin, OC, C, x + at * C, C, w, C, 1, y + at * OC, OC);
        if (act)
            for (size_t i = at * OC; i < (size_t)part.end * OC; i++)
                act[i] = gelu(y[i]);
    }
}

void linear_backward_cpu(OpsContext *context, const LinearGrads *grads, const float *dy, const float *x, const float *w,
                         int rows, int C, int OC) {
#pragma omp parallel num_threads(context->threads)
    {
        int index = omp_get_thread_num(), parts = omp_get_num_threads();
        Range part = range_part(rows, 1, index, parts);
        size_t at = (size_t)part.begin;
        matmul(CblasNoTrans, CblasNoTrans, part.end - part.begin, C, OC, dy + at * OC, OC, w, C, 0, grads->dx + at * C,
               C);
        if (grads->gelu)
            for (size_t i = at * C; i < (size_t)part.end * C; i++)
                grads->dx[i] *= gelu_slope(grads->gelu[i]);
        part = range_part(OC, 16, index, parts);
        at = (size_t)part.begin;
        matmul(CblasTrans, CblasNoTrans, part.end - part.begin, C, rows, dy + at, OC, x, C, grads->accumulate,
               grads->dw + at * C, C);
        if (grads->db) {
            for (int o = part.begin; o < part.end; o++)
                grads->db[o] = grads->accumulate ? grads->db[o] : 0;
            for (int row = 0; row < rows; row++)
                for (int o = part.begin; o < part.end; o++)
                    grads->db[o] += dy[(size_t)row * OC + o];
        }
    }
}
