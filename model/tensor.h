/* Reading one tensor of a file into the flat parameter array. */
#ifndef MODEL_TENSOR_H
#define MODEL_TENSOR_H

#include "base/error.h"
#include "base/input.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum TensorType { TENSOR_F32, TENSOR_F16, TENSOR_BF16 } TensorType;

size_t tensor_type_bytes(TensorType type); /* of one element */

/* Reads the file's next rows * cols elements, row-major, as f32 into out: out[rows][cols], or with `transpose`
 * out[cols][rows]. f32 that needs no transposition goes straight there, the rest through a buffer of a few KiB. */
Status tensor_read(InputFile *input, TensorType type, int64_t rows, int64_t cols, bool transpose, float *out);

#endif
