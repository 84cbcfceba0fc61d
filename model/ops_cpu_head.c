#include "model/ops_cpu.h"

#include <omp.h>

size_t head_cpu_scratch_bytes(const OpsLimits *limits, int threads) {
    (void)limits;
    (void)threads;
    return 0;
}

static float row_loss(const float *logits, int target, int V, float *lse_out) {
    float max = logits[0];
    for (int v = 1; v < V; v++)
        max = logits[v] > max ? logits[v] : max;
    float sum = 0;
    for (int v = 0; v < V; v++)
        sum += fast_exp(logits[v] - max);
    *lse_out = max + logf(sum);
    return *lse_out - logits[target];
}

void head_loss_cpu(OpsContext *context, float *losses, float *logits, const float *x, const float *wte,
                   const int *targets, int rows, int C, int V, int Vp) {
    linear_forward_cpu(context, logits, NULL, x, wte, NULL, NULL, rows, C, Vp);
#pragma omp parallel for num_threads(context->threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        float lse;
        losses[row] = row_loss(logits + (size_t)row * (size_t)Vp, targets[row], V, &lse);
    }
}

void head_backward_cpu(OpsContext *context, float *losses, float *logits, float *dx, float *dwte, const float *x,
                       const float *wte, const int *targets, int rows, int C, int V, int Vp, float scale,
                       bool accumulate) {
    linear_forward_cpu(context, logits, NULL, x, wte, NULL, NULL, rows, C, Vp);
#pragma omp parallel for num_threads(context->threads) schedule(static)
    for (int row = 0; row < rows; row++) {
        float *out = logits + (size_t)row * (size_t)Vp, lse;
        losses[row] = row_loss(out, targets[row], V, &lse);
        for (int v = 0; v < V; v++)
            out[v] = fast_exp(out[v] - lse) * scale;
        out[targets[row]] -= scale;
        for (int v = V; v < Vp; v++)
            out[v] = 0;
    }
    linear_backward_cpu(context, &(LinearGrads){.dx = dx, .dw = dwte, .accumulate = accumulate}, logits, x, wte, rows, C,
                        Vp);
}
