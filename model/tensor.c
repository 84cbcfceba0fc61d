#include "model/tensor.h"

#include <math.h>
#include <string.h>

enum { CHUNK = 8192 }; /* elements converted at a time */

size_t tensor_type_bytes(TensorType type) { return type == TENSOR_F32 ? 4 : 2; }

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float from_bf16(uint16_t half) { return from_bits((uint32_t)half << 16); }

/* IEEE binary16: sign, 5 bits of exponent (bias 15), 10 of mantissa. */
static float from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 31)
        return from_bits(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0) /* zero or subnormal: mantissa * 2^-24 */
        return copysignf((float)mantissa * 0x1p-24f, from_bits(sign));
    return from_bits(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
}

/* Stores elements at .. at+count-1 of the file's tensor. */
static void store(const float *values, int64_t at, int64_t count, int64_t rows, int64_t cols, bool transpose,
                  float *out) {
    if (!transpose) {
        memcpy(out + at, values, (size_t)count * sizeof *values);
        return;
    }
    int64_t row = at / cols, col = at % cols;
    for (int64_t i = 0; i < count; i++) {
        out[col * rows + row] = values[i];
        if (++col == cols)
            col = 0, row++;
    }
}

static Status read_chunk(InputFile *input, TensorType type, int64_t count, float *values) {
    if (type == TENSOR_F32)
        return input_read(input, values, (size_t)count * sizeof *values);
    uint16_t halves[CHUNK];
    TRY(input_read(input, halves, (size_t)count * sizeof *halves));
    for (int64_t i = 0; i < count; i++)
        values[i] = type == TENSOR_F16 ? from_f16(halves[i]) : from_bf16(halves[i]);
    return OK;
}

Status tensor_read(InputFile *input, TensorType type, int64_t rows, int64_t cols, bool transpose, float *out) {
    int64_t elems = rows * cols;
    if (type == TENSOR_F32 && !transpose)
        return input_read(input, out, (size_t)elems * sizeof *out);
    float values[CHUNK];
    for (int64_t at = 0; at < elems; at += CHUNK) {
        int64_t count = elems - at < CHUNK ? elems - at : CHUNK;
        TRY(read_chunk(input, type, count, values));
        store(values, at, count, rows, cols, transpose, out);
    }
    return OK;
}
