/* Shared by the files of the cpu device: how work is cut, fast exp and GELU. */
#ifndef MODEL_OPS_CPU_H
#define MODEL_OPS_CPU_H

#include "model/ops.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Half-open range. */
typedef struct Range {
    int begin, end;
} Range;

/* Part `index` of `parts` of 0..count-1, cut at multiples of `grain`. */
static inline Range range_part(int count, int grain, int index, int parts) {
    int64_t grains = ((int64_t)count + grain - 1) / grain;
    int64_t begin = grains * index / parts * grain, end = grains * (index + 1) / parts * grain;
    return (Range){(int)(begin < count ? begin : count), (int)(end < count ? end : count)};
}

/* e^x to 2 ulp where e^x is a normal number, else saturated to the smallest or largest of them; NaN stays NaN. Written
 * so that loops over it become vector code. 2^f on [-1/2, 1/2] is the interpolation at Chebyshev nodes, error 3e-9. */
static inline float fast_exp(float x) {
    const float log2e = 1.44269504f;
    x = x < -87.0f ? -87.0f : x; /* in this order NaN passes */
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * log2e);
    float f = x * log2e - n;
    float p = 1.546144470e-04f;
    p = p * f + 1.340042818e-03f;
    p = p * f + 9.618056679e-03f;
    p = p * f + 5.550327227e-02f;
    p = p * f + 2.402265092e-01f;
    p = p * f + 6.931472067e-01f;
    p = p * f + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* tanh-form GELU is x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): one exp, and no cancellation for x < 0. */
static inline float gelu_sigmoid(float x) {
    const float two_root = 1.5957691216f; /* 2 sqrt(2/pi) */
    return 1.0f / (1.0f + fast_exp(-two_root * (x + 0.044715f * x * x * x)));
}

static inline float gelu(float x) { return x * gelu_sigmoid(x); }

static inline float gelu_slope(float x) {
    const float two_root = 1.5957691216f;
    float s = gelu_sigmoid(x);
    return s + x * s * (1.0f - s) * two_root * (1.0f + 3.0f * 0.044715f * x * x);
}

/* The largest of values[count], count >= 1; whether a NaN among them is returned is not said. In lanes, because
 * compilers leave a plain loop scalar where NaN keeps its meaning. */
static inline float row_max(const float *values, size_t count) {
    enum { WIDTH = 16 };
    float lanes[WIDTH], max = values[0];
    for (int lane = 0; lane < WIDTH; lane++)
        lanes[lane] = max;
    size_t whole = count / WIDTH * WIDTH;
    for (size_t i = 0; i < whole; i += WIDTH)
        for (int lane = 0; lane < WIDTH; lane++)
            lanes[lane] = values[i + (size_t)lane] > lanes[lane] ? values[i + (size_t)lane] : lanes[lane];
    for (size_t i = whole; i < count; i++)
        max = values[i] > max ? values[i] : max;
    for (int lane = 0; lane < WIDTH; lane++)
        max = lanes[lane] > max ? lanes[lane] : max;
    return max;
}

/* One thread's part of a matrix product. */
typedef struct Tile {
    Range rows, columns;
} Tile;

typedef struct Operand {
    const float *at;
    int stride; /* floats from row to row, as it lies in memory */
    bool transposed;
} Operand;

static inline Operand plain(const float *at, int stride) { return (Operand){at, stride, false}; }
static inline Operand transposed(const float *at, int stride) { return (Operand){at, stride, true}; }

/* How `parts` threads share a result of rows x columns, so that BLAS packs little; see ops_cpu_linear.c. */
Tile tile_of(int rows, int columns, int index, int parts);

/* The tile of out (+)= a b, over k terms; by BLAS, in the calling thread alone. */
void matmul_tile(Tile tile, float *out, int stride, Operand a, Operand b, int k, bool add);

/* Bytes of scratch that each part of the device wants; a context has the largest of them. */
size_t attention_cpu_scratch_bytes(const OpsLimits *limits, int threads);
size_t layernorm_cpu_scratch_bytes(const OpsLimits *limits);
size_t head_cpu_scratch_bytes(const OpsLimits *limits);

/* Slots of ops_cpu; documented in ops.h. */
void layernorm_forward_cpu(OpsContext *context, float *y, float *mean, float *rstd, const float *x, const float *w,
                           const float *b, int rows, int C);
void layernorm_backward_cpu(OpsContext *context, float *dx, float *dw, float *db, const float *dy, const float *x,
                            const float *mean, const float *rstd, const float *w, int rows, int C, bool residual,
                            bool accumulate);
void linear_forward_cpu(OpsContext *context, float *y, float *gelu, const float *x, const float *w, const float *b,
                        const float *residual, int rows, int C, int OC);
void gelu_forward_cpu(OpsContext *context, float *y, const float *x, int rows, int C);
void linear_backward_cpu(OpsContext *context, const LinearGrads *grads, const float *dy, const float *x, const float *w,
                         int rows, int C, int OC);
void attention_forward_cpu(OpsContext *context, float *y, float *lse, const float *qkv, int B, int T, int C, int NH);
void attention_backward_cpu(OpsContext *context, float *dqkv, const float *dy, const float *y, const float *qkv,
                            const float *lse, int B, int T, int C, int NH);
void attention_cached_cpu(OpsContext *context, float *y, float *cache, const float *qkv, int first, int count, int C,
                          int NH);
void head_loss_cpu(OpsContext *context, float *losses, float *logits, const float *x, const float *wte,
                   const int *targets, int rows, int C, int V, int Vp);
void head_backward_cpu(OpsContext *context, float *losses, float *logits, float *dx, float *dwte, const float *x,
                       const float *wte, const int *targets, int rows, int C, int V, int Vp, float scale,
                       bool accumulate);

#endif
