/* A stand-in for model/cudnn_graph.cu that computes a graph as it is written, operation by operation in f32, with every
 * tensor between two operations in memory: slow, obvious, and a check of the formulas that cuDNN only recognises by
 * their form. A tensor is memory, a type and strides, so that a reshape is a copy; what goes into a bf16 tensor is
 * rounded. It takes the head sizes that cuDNN takes on every card: multiples of 8 up to 128. */
#include "tests/cuda/runtime.h"

extern "C" {
#include "model/cudnn_graph.h"
}

#include <assert.h>
#include <cuda_bf16.h>
#include <math.h>
#include <string.h>

#include <string>
#include <vector>

struct Cudnn {
    Gpu *gpu;
};

struct CudnnTensor_ {
    CudnnLayout layout;
    int name;                  /* -1: between two operations */
    std::vector<float> values; /* of those */
    void *memory;              /* of the others, while the graph is computed */
};

enum Kind { MATMUL, BINARY, UNARY, INDEX, SELECT, REDUCE, RESHAPE };

struct Operation {
    Kind kind;
    int mode; /* CudnnBinary, CudnnUnary, CudnnReduction or the axis */
    CudnnTensor x, b, where, out;
};

struct CudnnGraph {
    std::vector<CudnnTensor> tensors;
    std::vector<Operation> operations;
    std::string why;
};

/* ---- writing it down ---- */

static CudnnTensor tensor(CudnnGraph *graph, int name, const CudnnLayout &layout) {
    CudnnTensor t = new CudnnTensor_{layout, name, {}, NULL};
    graph->tensors.push_back(t);
    return t;
}

static void refuse_unless(CudnnGraph *graph, bool good, const char *what) {
    if (!good && graph->why.empty())
        graph->why = what;
}

/* Whether axis by axis x has as many elements as out, or one where that is allowed. */
static bool agrees(CudnnTensor x, CudnnTensor out, bool repeated) {
    bool good = true;
    for (int axis = 0; axis < 4; axis++)
        good = good && (x->layout.dims[axis] == out->layout.dims[axis] || (repeated && x->layout.dims[axis] == 1));
    return good;
}

static CudnnTensor add(CudnnGraph *graph, Operation operation, bool good, const char *what) {
    refuse_unless(graph, good, what);
    graph->operations.push_back(operation);
    return operation.out;
}

CudnnGraph *cudnn_graph_create(void) { return new CudnnGraph(); }

void cudnn_graph_destroy(CudnnGraph *graph) {
    if (!graph)
        return;
    for (CudnnTensor t : graph->tensors)
        delete t;
    delete graph;
}

const char *cudnn_graph_why(const CudnnGraph *graph) { return graph->why.c_str(); }

CudnnTensor cudnn_array(CudnnGraph *graph, int name, CudnnLayout layout) {
    for (int axis = 0; axis < 4; axis++)
        if (layout.type == TYPE_BF16 && layout.strides[axis] == 1)
            refuse_unless(graph, layout.dims[axis] % 8 == 0 && layout.dims[axis] <= 128, "no engine for this shape");
    return tensor(graph, name, layout);
}

CudnnTensor cudnn_scalar(CudnnGraph *graph, int name) {
    return tensor(graph, name, {TYPE_F32, {1, 1, 1, 1}, {1, 1, 1, 1}});
}

CudnnTensor cudnn_between(CudnnGraph *graph, CudnnLayout layout) { return tensor(graph, -1, layout); }

CudnnTensor cudnn_matmul(CudnnGraph *graph, CudnnTensor a, CudnnTensor b, CudnnTensor out) {
    const int64_t *left = a->layout.dims, *right = b->layout.dims, *product = out->layout.dims;
    bool batches = left[0] == product[0] && right[0] == product[0] && left[1] == product[1] && right[1] == product[1];
    bool good = batches && left[2] == product[2] && left[3] == right[2] && right[3] == product[3];
    return add(graph, {MATMUL, 0, a, b, NULL, out}, good, "a matmul of shapes that do not agree");
}

CudnnTensor cudnn_binary(CudnnGraph *graph, CudnnBinary mode, CudnnTensor a, CudnnTensor b, CudnnTensor out) {
    return add(graph, {BINARY, mode, a, b, NULL, out}, agrees(a, out, false) && agrees(b, out, true),
               "operands that do not agree");
}

CudnnTensor cudnn_unary(CudnnGraph *graph, CudnnUnary mode, CudnnTensor x, CudnnTensor out) {
    return add(graph, {UNARY, mode, x, NULL, NULL, out}, agrees(x, out, false), "a function's operand and result");
}

CudnnTensor cudnn_index(CudnnGraph *graph, CudnnTensor x, int axis, CudnnTensor out) {
    return add(graph, {INDEX, axis, x, NULL, NULL, out}, agrees(x, out, false), "an index of another shape");
}

CudnnTensor cudnn_select(CudnnGraph *graph, CudnnTensor where, CudnnTensor x, CudnnTensor otherwise, CudnnTensor out) {
    bool good = agrees(where, out, false) && agrees(x, out, false) && agrees(otherwise, out, true);
    return add(graph, {SELECT, 0, x, otherwise, where, out}, good, "a selection of shapes that do not agree");
}

CudnnTensor cudnn_reduce(CudnnGraph *graph, CudnnReduction mode, CudnnTensor x, CudnnTensor out) {
    return add(graph, {REDUCE, mode, x, NULL, NULL, out}, agrees(out, x, true), "a reduction to another shape");
}

CudnnTensor cudnn_reshape(CudnnGraph *graph, CudnnTensor x, CudnnTensor out) {
    int64_t from = 1, to = 1;
    for (int axis = 0; axis < 4; axis++)
        from *= x->layout.dims[axis], to *= out->layout.dims[axis];
    return add(graph, {RESHAPE, 0, x, NULL, NULL, out}, from == to, "a reshape to another number of elements");
}

/* ---- elements ---- */

typedef struct Index {
    int64_t at[4];
} Index;

/* Axes with one element are repeated. */
static int64_t offset_of(CudnnTensor t, const Index &index) {
    int64_t offset = 0;
    for (int axis = 0; axis < 4; axis++)
        offset += t->layout.dims[axis] == 1 ? 0 : index.at[axis] * t->layout.strides[axis];
    return offset;
}

static float load_at(CudnnTensor t, int64_t offset) {
    if (t->name < 0)
        return t->values[(size_t)offset];
    return t->layout.type == TYPE_BF16 ? __bfloat162float(((const __nv_bfloat16 *)t->memory)[offset])
                                       : ((const float *)t->memory)[offset];
}

static float load(CudnnTensor t, const Index &index) { return load_at(t, offset_of(t, index)); }

static void store_at(CudnnTensor t, int64_t offset, float value) {
    if (t->name >= 0 && t->layout.type == TYPE_BF16)
        ((__nv_bfloat16 *)t->memory)[offset] = __float2bfloat16(value);
    else if (t->name >= 0)
        ((float *)t->memory)[offset] = value;
    else
        t->values[(size_t)offset] = t->layout.type == TYPE_BF16 ? __bfloat162float(__float2bfloat16(value)) : value;
}

static void store(CudnnTensor t, const Index &index, float value) { store_at(t, offset_of(t, index), value); }

/* body(index) for each element of a tensor of these dims. */
template <class Body> static void for_each(const int64_t *dims, Body body) {
    Index i;
    for (i.at[0] = 0; i.at[0] < dims[0]; i.at[0]++)
        for (i.at[1] = 0; i.at[1] < dims[1]; i.at[1]++)
            for (i.at[2] = 0; i.at[2] < dims[2]; i.at[2]++)
                for (i.at[3] = 0; i.at[3] < dims[3]; i.at[3]++)
                    body(i);
}

/* ---- operations ---- */

static void matmul(const Operation &o) {
    for_each(o.out->layout.dims, [&](const Index &i) {
        float sum = 0;
        for (int64_t k = 0; k < o.x->layout.dims[3]; k++) {
            Index left = {{i.at[0], i.at[1], i.at[2], k}}, right = {{i.at[0], i.at[1], k, i.at[3]}};
            sum += load(o.x, left) * load(o.b, right);
        }
        store(o.out, i, sum);
    });
}

static float binary(CudnnBinary mode, float a, float b) {
    switch (mode) {
    case BINARY_ADD: return a + b;
    case BINARY_SUB: return a - b;
    case BINARY_MUL: return a * b;
    case BINARY_DIV: return a / b;
    default: return a >= b;
    }
}

static float unary(CudnnUnary mode, float x) {
    return mode == UNARY_EXP ? expf(x) : mode == UNARY_LOG ? logf(x) : x;
}

static void reduce(const Operation &o) {
    bool max = o.mode == REDUCTION_MAX;
    for_each(o.out->layout.dims, [&](const Index &i) { store(o.out, i, max ? -INFINITY : 0); });
    for_each(o.x->layout.dims, [&](const Index &i) {
        float so_far = load(o.out, i), value = load(o.x, i);
        store(o.out, i, max ? fmaxf(so_far, value) : so_far + value);
    });
}

static void element(const Operation &o, const Index &i) {
    switch (o.kind) {
    case BINARY: store(o.out, i, binary((CudnnBinary)o.mode, load(o.x, i), load(o.b, i))); break;
    case UNARY: store(o.out, i, unary((CudnnUnary)o.mode, load(o.x, i))); break;
    case INDEX: store(o.out, i, (float)i.at[o.mode]); break;
    case SELECT: store(o.out, i, load(o.where, i) != 0 ? load(o.x, i) : load(o.b, i)); break;
    default: store_at(o.out, offset_of(o.out, i), load_at(o.x, offset_of(o.out, i))); break; /* RESHAPE */
    }
}

static void compute(const Operation &o) {
    if (o.kind == MATMUL)
        matmul(o);
    else if (o.kind == REDUCE)
        reduce(o);
    else
        for_each(o.out->layout.dims, [&](const Index &i) { element(o, i); });
}

/* ---- use ---- */

int cudnn_graph_engines(CudnnGraph *graph, const char *) { return graph->why.empty() ? -1 : 0; }

bool cudnn_graph_compile(CudnnGraph *graph, Cudnn *) { return graph->why.empty(); }

/* Asked for, to see that it is brought, and filled with NaN. */
size_t cudnn_graph_workspace_bytes(const CudnnGraph *) { return 256; }

Status cudnn_open(Cudnn **cudnn, Gpu *gpu) {
    *cudnn = new Cudnn{gpu};
    return OK;
}

void cudnn_close(Cudnn *cudnn) { delete cudnn; }

static void execute(CudnnGraph *graph, const std::vector<void *> &pointers, void *workspace) {
    memset(workspace, 0xff, cudnn_graph_workspace_bytes(graph));
    for (CudnnTensor t : graph->tensors) {
        if (t->name >= 0) {
            t->memory = pointers[(size_t)t->name];
            assert(t->memory);
            continue;
        }
        int64_t last = 0;
        for (int axis = 0; axis < 4; axis++)
            last += (t->layout.dims[axis] - 1) * t->layout.strides[axis];
        t->values.assign((size_t)last + 1, NAN);
    }
    for (const Operation &operation : graph->operations)
        compute(operation);
    for (CudnnTensor t : graph->tensors)
        t->values = {};
}

void cudnn_graph_execute(CudnnGraph *graph, Cudnn *cudnn, void *const *pointers, int count, void *workspace) {
    std::vector<void *> kept(pointers, pointers + count);
    cudart::enqueue((cudaStream_t)gpu_stream(cudnn->gpu), [=] { execute(graph, kept, workspace); });
}
