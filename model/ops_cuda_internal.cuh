/* Shared by the files of the cuda device: what a CudaOps holds, products of matrices, how rows are cut into parts. */
#ifndef MODEL_OPS_CUDA_INTERNAL_CUH
#define MODEL_OPS_CUDA_INTERNAL_CUH

#include "base/cuda.cuh"

#include <assert.h>
#include <stdint.h>

extern "C" {
#include "base/gpu_graph.h"
#include "model/ops_cuda.h"
}

typedef struct Products Products; /* ops_cuda_product.cu */
typedef struct CudnnUse CudnnUse; /* ops_cuda_cudnn.cu */

struct CudaOps {
    Ops table;
    Gpu *gpu;
    cudaStream_t stream;
    CudaDtype dtype;
    const float *params; /* f32[elems], borrowed */
    int64_t elems;
    bf16 *weights;       /* [elems], of params; NULL unless dtype is CUDA_BF16 */
    Products *products;
    CudnnUse *cudnn;     /* NULL until cuda_ops_use_cudnn */
    GpuGraphs *graphs;   /* NULL unless cuda_ops_use_graphs */
    char *stage;         /* pinned, STAGE_BYTES: what uploads have not yet been taken from it */
    size_t stage_bytes;  /* used of it since the stream was last seen empty */
    double sum;          /* mean's: its copy may arrive after a wait that failed */
};

static inline CudaOps *cuda_of(const OpsContext *context) { return (CudaOps *)context->state; }

/* The weights at `params`, in the type that products take. */
template <class A> const A *weights_of(const CudaOps *ops, const float *params);
template <> inline const float *weights_of<float>(const CudaOps *ops, const float *params) {
    (void)ops;
    return params;
}
template <> inline const bf16 *weights_of<bf16>(const CudaOps *ops, const float *params) {
    assert(!params || (params >= ops->params && params < ops->params + ops->elems));
    return params ? ops->weights + (params - ops->params) : NULL;
}

/* Each file puts its operations into the table, for the activations of dtype. */
void embedding_cuda_slots(Ops *table, CudaDtype dtype);
void layernorm_cuda_slots(Ops *table, CudaDtype dtype);
void linear_cuda_slots(Ops *table, CudaDtype dtype);
void attention_cuda_slots(Ops *table, CudaDtype dtype);
void attention_cached_cuda_slots(Ops *table, CudaDtype dtype);
void head_cuda_slots(Ops *table, CudaDtype dtype);

/* Of ops->cudnn; both accept one that was never made. */
size_t cudnn_use_bytes(const CudaOps *ops, int B);
Status cudnn_use_connect(CudaOps *ops);
void cudnn_use_destroy(CudaOps *ops);

/* Bytes of scratch that they want; a context has the largest of them. */
size_t embedding_cuda_scratch_bytes(const OpsLimits *limits);
size_t attention_cuda_scratch_bytes(const OpsLimits *limits);

/* ---- products ---- */

/* An operand as it lies in memory: rows `stride` elements apart, the batch's matrices `batch` elements. */
typedef struct Operand {
    const void *at;
    int64_t stride, batch;
    bool transposed;
} Operand;

static inline Operand plain(const void *at, int64_t stride, int64_t batch = 0) { return {at, stride, batch, false}; }
static inline Operand transposed(const void *at, int64_t stride, int64_t batch = 0) {
    return {at, stride, batch, true};
}

typedef enum Epilogue {
    EPILOGUE_NONE,
    EPILOGUE_BIAS,      /* + bias [columns] */
    EPILOGUE_GELU_BIAS, /* out = GELU of what also goes to aux, bias included */
    EPILOGUE_GELU,      /* the same without bias */
    EPILOGUE_SLOPE      /* times GELU' of aux */
} Epilogue;

/* out [rows][columns] = epilogue(scale * left right + add), `batch` times. Operands, bias and aux are activations or
 * weights; out and add are f32 with out_f32, else as they are. add may be NULL, or out itself; it lies as out does. aux
 * lies in rows of `columns`. */
typedef struct Product {
    void *out;
    int64_t out_stride, out_batch = 0;
    bool out_f32 = false;
    int rows, columns, depth, batch = 1;
    Operand left, right;
    float scale = 1;
    const void *add = NULL;
    Epilogue epilogue = EPILOGUE_NONE;
    const void *bias = NULL;
    const void *aux = NULL;
} Product;

enum { PRODUCT_WORKSPACE_BYTES = 32 << 20 /* what NVIDIA advises for sm_90 */ };
Status products_create(Products **products, Gpu *gpu, CudaDtype dtype);
Status products_connect(Products *products); /* allocates the workspace */
void products_destroy(Products *products); /* accepts NULL */

/* False, with nothing done, when an epilogue cannot be had at this shape; without one it is always true. */
bool product(CudaOps *ops, const Product *product);

/* ---- sums over rows ---- */

enum {
    PARTS_MAX = 1024,
    PARTS_FLOATS = 1 << 21 /* 8 MiB of partial sums, unless one part alone is wider */
};

/* Rows in `count` parts of `rows` each, the last one shorter: by the shape alone, so that sums have one order. */
typedef struct Parts {
    int count, rows;
} Parts;

static inline Parts parts_of(int rows, int width, int rows_min) {
    int most = PARTS_FLOATS / width < PARTS_MAX ? PARTS_FLOATS / width : PARTS_MAX;
    int each = most > 1 ? (int)(((int64_t)rows + most - 1) / most) : rows;
    each = each < rows_min ? rows_min : each;
    return {(int)(((int64_t)rows + each - 1) / each), each};
}

/* columns c of partial [parts][width], added in order, go to first[c] for c < split and to second[c - split] from
 * there on: overwritten or added to. */
void sum_parts(CudaOps *ops, float *first, float *second, int split, const float *partial, int parts, int width,
               bool accumulate);

/* ---- launches ---- */

static inline int64_t blocks_of(int64_t count, int64_t per_block) { return (count + per_block - 1) / per_block; }

/* Whether rows of `width` elements from here on can be taken 16 bytes at a time. */
template <class A> static inline bool wide_rows(int64_t width) { return width * (int64_t)sizeof(A) % 16 == 0; }
static inline bool aligned(const void *at) { return (uintptr_t)at % 16 == 0; }
template <class... More> static inline bool aligned(const void *at, More... more) {
    return aligned(at) && aligned(more...);
}

/* kernel<A, N>: N elements, 16 bytes, per access where `wide`, else one. */
#define LAUNCH_PACKED(wide, kernel, A, ...)                              \
    do {                                                                 \
        if (wide)                                                        \
            LAUNCH((kernel<A, (int)(16 / sizeof(A))>), __VA_ARGS__);     \
        else                                                             \
            LAUNCH((kernel<A, 1>), __VA_ARGS__);                         \
    } while (0)

/* After launches: one that was refused is noted, with the name of the function that asked for it. */
#define CHECK_LAUNCH(ops)                                                    \
    do {                                                                     \
        cudaError_t error_ = cudaGetLastError();                             \
        if (error_ != cudaSuccess)                                           \
            gpu_fault((ops)->gpu, __func__, cudaGetErrorString(error_));     \
    } while (0)

#endif
