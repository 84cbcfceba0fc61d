/* Graphs of operations that cuDNN fuses into one kernel, for code that includes no CUDA header. Only in builds with
 * CUDA; emulated builds have a stand-in that computes the graph as written (tests/cuda/cudnn_graph.cpp).
 *
 * A graph is written down operation by operation, compiled once for a device, executed often:
 *
 *     CudnnGraph *graph = cudnn_graph_create();
 *     CudnnTensor x = cudnn_array(graph, 0, layout), w = cudnn_array(graph, 1, layout);
 *     cudnn_matmul(graph, x, w, cudnn_array(graph, 2, layout));
 *     if (cudnn_graph_compile(graph, cudnn))
 *         cudnn_graph_execute(graph, cudnn, (void *[]){x_data, w_data, y_data}, 3, workspace);
 *     else
 *         puts(cudnn_graph_why(graph));
 *
 * The first fault while it is written sticks: what follows does nothing, and cudnn_graph_why tells. Tensors belong to
 * their graph. All have four axes; operations return the tensor that they write. */
#ifndef MODEL_CUDNN_GRAPH_H
#define MODEL_CUDNN_GRAPH_H

#include "base/gpu.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct Cudnn Cudnn; /* cuDNN on one Gpu */
typedef struct CudnnGraph CudnnGraph;
typedef struct CudnnTensor_ *CudnnTensor;

enum { CUDNN_NAMES_MAX = 16 };

typedef enum CudnnType { TYPE_F32, TYPE_BF16, TYPE_I32, TYPE_BOOL } CudnnType;

typedef struct CudnnLayout {
    CudnnType type;
    int64_t dims[4], strides[4]; /* of elements */
} CudnnLayout;

/* FAULT where cuDNN cannot be used here, with a line that says why. */
Status cudnn_open(Cudnn **cudnn, Gpu *gpu);
void cudnn_close(Cudnn *cudnn); /* accepts NULL */

CudnnGraph *cudnn_graph_create(void); /* NULL: no memory */
void cudnn_graph_destroy(CudnnGraph *graph); /* accepts NULL */

/* What went wrong, in a few words; "" when nothing did. Valid until the graph is destroyed. */
const char *cudnn_graph_why(const CudnnGraph *graph);

/* ---- tensors ---- */

/* An array in device memory, 16-byte aligned; `name` in [0, CUDNN_NAMES_MAX) is its place among execute's pointers. */
CudnnTensor cudnn_array(CudnnGraph *graph, int name, CudnnLayout layout);
/* One f32 in host memory, read by execute. */
CudnnTensor cudnn_scalar(CudnnGraph *graph, int name);
/* Between two operations, never in memory. */
CudnnTensor cudnn_between(CudnnGraph *graph, CudnnLayout layout);

/* ---- operations, all in f32 ---- */

/* out = a b over the last two axes, for each index of the first two. */
CudnnTensor cudnn_matmul(CudnnGraph *graph, CudnnTensor a, CudnnTensor b, CudnnTensor out);

/* Element by element; axes of b with one element are repeated. */
typedef enum CudnnBinary { BINARY_ADD, BINARY_SUB, BINARY_MUL, BINARY_DIV, BINARY_GE } CudnnBinary;
CudnnTensor cudnn_binary(CudnnGraph *graph, CudnnBinary operation, CudnnTensor a, CudnnTensor b, CudnnTensor out);
typedef enum CudnnUnary { UNARY_EXP, UNARY_LOG, UNARY_COPY } CudnnUnary;
CudnnTensor cudnn_unary(CudnnGraph *graph, CudnnUnary operation, CudnnTensor x, CudnnTensor out);

/* out = the element's index on that axis; of x only the shape counts. */
CudnnTensor cudnn_index(CudnnGraph *graph, CudnnTensor x, int axis, CudnnTensor out);
/* out = where ? x : otherwise */
CudnnTensor cudnn_select(CudnnGraph *graph, CudnnTensor where, CudnnTensor x, CudnnTensor otherwise, CudnnTensor out);

/* Over the axes on which out has one element. */
typedef enum CudnnReduction { REDUCTION_MAX, REDUCTION_SUM } CudnnReduction;
CudnnTensor cudnn_reduce(CudnnGraph *graph, CudnnReduction operation, CudnnTensor x, CudnnTensor out);

/* The same elements under other dims and strides: a transpose, when those are swapped. */
CudnnTensor cudnn_reshape(CudnnGraph *graph, CudnnTensor x, CudnnTensor out);

/* ---- use ---- */

/* How many of cuDNN's engine configurations support the graph on a device that is described by `properties`, cuDNN's
 * JSON (tests/data/cudnn_sm90.json is one). Needs no device, but a libcuda. 0: cudnn_graph_why tells. -1: an
 * emulated build, which has no engines to ask and nothing against the graph. The graph can then only be destroyed. */
int cudnn_graph_engines(CudnnGraph *graph, const char *properties);

/* Takes cuDNN's first choice of engine for this device, a second or so. False: cudnn_graph_why tells. */
bool cudnn_graph_compile(CudnnGraph *graph, Cudnn *cudnn);

/* Of a compiled graph: device memory that execute needs, 256-byte aligned. */
size_t cudnn_graph_workspace_bytes(const CudnnGraph *graph);

/* Enqueues the graph on the Gpu's stream. pointers[name] for each name that the graph uses, [0, count) in all. A set of
 * pointers that the graph has not seen lately costs an allocation on the host, sets seen before none. A fault is noted
 * in the Gpu. */
void cudnn_graph_execute(CudnnGraph *graph, Cudnn *cudnn, void *const *pointers, int count, void *workspace);

#endif
