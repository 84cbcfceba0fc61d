/* Graphs by cuDNN's backend API. Everything there is a descriptor: made, given attributes, finalised; a graph keeps all
 * that it made in one list, and destroying it destroys them from the last to the first.
 *
 *   tensors, operations -> operation graph -> heuristics -> engine configurations -> execution plan
 *                                                                    variant pack (pointers) + plan -> execute
 *
 * A variant pack is an object of its own and cannot be changed once finalised. A training step meets the same arrays
 * again and again (one set per layer and pass), so each graph keeps its packs, hashed by pointers; a table that has
 * filled up, which takes more layers than there are models of, starts over. */
#include "base/cuda.cuh"

extern "C" {
#include "model/cudnn_graph.h"
}

#include <assert.h>
#include <cudnn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef cudnnBackendDescriptor_t Descriptor;

enum { DESCRIPTORS_MAX = 192, OPERATIONS_MAX = 32, CONFIGS_MAX = 16, OLDEST_VERSION = 91000 };
enum { PACKS = 2048 }; /* a power of two; at most 3/4 are used */

struct Cudnn {
    Gpu *gpu;
    cudnnHandle_t handle;
};

typedef struct Pack {
    void *pointers[CUDNN_NAMES_MAX], *workspace;
    Descriptor descriptor; /* NULL: not used yet */
} Pack;

struct CudnnGraph {
    Descriptor descriptors[DESCRIPTORS_MAX]; /* all, in the order in which they were made */
    Descriptor operations[OPERATIONS_MAX];
    int descriptor_count, operation_count;
    int64_t next_uid;      /* of a tensor that is no array or scalar */
    unsigned names;        /* bit n: name n is used */
    char why[256];
    Descriptor plan;
    size_t workspace_bytes;
    Pack packs[PACKS];
    int pack_count;
};

/* ---- descriptors ---- */

/* Notes the first fault. */
static bool check(CudnnGraph *graph, cudnnStatus_t status, const char *what) {
    if (status == CUDNN_STATUS_SUCCESS)
        return true;
    char detail[160] = "";
    cudnnGetLastErrorString(detail, sizeof detail);
    detail[strcspn(detail, "\n")] = 0;
    if (!graph->why[0])
        snprintf(graph->why, sizeof graph->why, "%s: %s %s", what, cudnnGetErrorString(status), detail);
    return false;
}

static Descriptor make(CudnnGraph *graph, cudnnBackendDescriptorType_t type) {
    Descriptor descriptor = NULL;
    if (graph->why[0] || !check(graph, cudnnBackendCreateDescriptor(type, &descriptor), "a descriptor"))
        return NULL;
    assert(graph->descriptor_count < DESCRIPTORS_MAX);
    return graph->descriptors[graph->descriptor_count++] = descriptor;
}

static void set(CudnnGraph *graph, Descriptor descriptor, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *values) {
    if (!graph->why[0])
        check(graph, cudnnBackendSetAttribute(descriptor, name, type, count, values), "an attribute");
}

static void set_descriptor(CudnnGraph *graph, Descriptor descriptor, cudnnBackendAttributeName_t name,
                           Descriptor value) {
    set(graph, descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void set_type(CudnnGraph *graph, Descriptor descriptor, cudnnBackendAttributeName_t name, cudnnDataType_t type) {
    set(graph, descriptor, name, CUDNN_TYPE_DATA_TYPE, 1, &type);
}

static void finalise(CudnnGraph *graph, Descriptor descriptor, const char *what) {
    if (!graph->why[0])
        check(graph, cudnnBackendFinalize(descriptor), what);
}

static void add_operation(CudnnGraph *graph, Descriptor operation, const char *what) {
    finalise(graph, operation, what);
    assert(graph->operation_count < OPERATIONS_MAX);
    graph->operations[graph->operation_count++] = operation;
}

CudnnGraph *cudnn_graph_create(void) {
    CudnnGraph *graph = (CudnnGraph *)calloc(1, sizeof *graph);
    if (graph)
        graph->next_uid = CUDNN_NAMES_MAX;
    return graph;
}

static void clear_packs(CudnnGraph *graph) {
    for (int i = 0; i < PACKS; i++)
        if (graph->packs[i].descriptor)
            cudnnBackendDestroyDescriptor(graph->packs[i].descriptor);
    memset(graph->packs, 0, sizeof graph->packs);
    graph->pack_count = 0;
}

void cudnn_graph_destroy(CudnnGraph *graph) {
    if (!graph)
        return;
    clear_packs(graph);
    while (graph->descriptor_count > 0)
        cudnnBackendDestroyDescriptor(graph->descriptors[--graph->descriptor_count]);
    free(graph);
}

const char *cudnn_graph_why(const CudnnGraph *graph) { return graph->why; }

/* ---- tensors ---- */

static cudnnDataType_t data_type(CudnnType type) {
    switch (type) {
    case TYPE_BF16: return CUDNN_DATA_BFLOAT16;
    case TYPE_I32: return CUDNN_DATA_INT32;
    case TYPE_BOOL: return CUDNN_DATA_BOOLEAN;
    default: return CUDNN_DATA_FLOAT;
    }
}

typedef enum Place { IN_DEVICE_MEMORY, BY_VALUE, VIRTUAL } Place;

static CudnnTensor tensor(CudnnGraph *graph, int64_t uid, const CudnnLayout *layout, Place place) {
    Descriptor t = make(graph, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    const int64_t alignment_bytes = 16;
    const bool yes = true;
    set(graph, t, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set_type(graph, t, CUDNN_ATTR_TENSOR_DATA_TYPE, data_type(layout->type));
    set(graph, t, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment_bytes);
    set(graph, t, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, layout->dims);
    set(graph, t, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, layout->strides);
    if (place == VIRTUAL)
        set(graph, t, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    if (place == BY_VALUE)
        set(graph, t, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    finalise(graph, t, "a tensor");
    return (CudnnTensor)t;
}

static CudnnTensor named(CudnnGraph *graph, int name, const CudnnLayout *layout, Place place) {
    assert(name >= 0 && name < CUDNN_NAMES_MAX && !(graph->names & 1u << name));
    graph->names |= 1u << name;
    return tensor(graph, name, layout, place);
}

CudnnTensor cudnn_array(CudnnGraph *graph, int name, CudnnLayout layout) {
    return named(graph, name, &layout, IN_DEVICE_MEMORY);
}

CudnnTensor cudnn_scalar(CudnnGraph *graph, int name) {
    const CudnnLayout layout = {TYPE_F32, {1, 1, 1, 1}, {1, 1, 1, 1}};
    return named(graph, name, &layout, BY_VALUE);
}

CudnnTensor cudnn_between(CudnnGraph *graph, CudnnLayout layout) {
    return tensor(graph, graph->next_uid++, &layout, VIRTUAL);
}

/* ---- operations ---- */

CudnnTensor cudnn_matmul(CudnnGraph *graph, CudnnTensor a, CudnnTensor b, CudnnTensor out) {
    Descriptor matmul = make(graph, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set_type(graph, matmul, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    finalise(graph, matmul, "a matmul");
    Descriptor operation = make(graph, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, out);
    set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, matmul);
    add_operation(graph, operation, "a matmul");
    return out;
}

typedef struct Pointwise {
    cudnnPointwiseMode_t mode;
    cudnnDataType_t type; /* computed in */
    int64_t axis;         /* of GEN_INDEX; else -1 */
} Pointwise;

/* b and where may be NULL. */
static CudnnTensor pointwise(CudnnGraph *graph, Pointwise pointwise, CudnnTensor x, CudnnTensor b, CudnnTensor where,
                             CudnnTensor out) {
    Descriptor function = make(graph, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(graph, function, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &pointwise.mode);
    set_type(graph, function, CUDNN_ATTR_POINTWISE_MATH_PREC, pointwise.type);
    if (pointwise.axis >= 0)
        set(graph, function, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &pointwise.axis);
    finalise(graph, function, "a function");
    Descriptor operation = make(graph, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, function);
    set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, out);
    if (b)
        set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (where)
        set_descriptor(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, where);
    add_operation(graph, operation, "a function of elements");
    return out;
}

CudnnTensor cudnn_binary(CudnnGraph *graph, CudnnBinary operation, CudnnTensor a, CudnnTensor b, CudnnTensor out) {
    static const Pointwise functions[] = {{CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT, -1},
                                          {CUDNN_POINTWISE_SUB, CUDNN_DATA_FLOAT, -1},
                                          {CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT, -1},
                                          {CUDNN_POINTWISE_DIV, CUDNN_DATA_FLOAT, -1},
                                          {CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN, -1}};
    return pointwise(graph, functions[operation], a, b, NULL, out);
}

CudnnTensor cudnn_unary(CudnnGraph *graph, CudnnUnary operation, CudnnTensor x, CudnnTensor out) {
    static const cudnnPointwiseMode_t modes[] = {CUDNN_POINTWISE_EXP, CUDNN_POINTWISE_LOG, CUDNN_POINTWISE_IDENTITY};
    return pointwise(graph, (Pointwise){modes[operation], CUDNN_DATA_FLOAT, -1}, x, NULL, NULL, out);
}

CudnnTensor cudnn_index(CudnnGraph *graph, CudnnTensor x, int axis, CudnnTensor out) {
    return pointwise(graph, (Pointwise){CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32, axis}, x, NULL, NULL, out);
}

CudnnTensor cudnn_select(CudnnGraph *graph, CudnnTensor where, CudnnTensor x, CudnnTensor otherwise, CudnnTensor out) {
    return pointwise(graph, (Pointwise){CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT, -1}, x, otherwise, where, out);
}

CudnnTensor cudnn_reduce(CudnnGraph *graph, CudnnReduction operation, CudnnTensor x, CudnnTensor out) {
    cudnnReduceTensorOp_t mode = operation == REDUCTION_MAX ? CUDNN_REDUCE_TENSOR_MAX : CUDNN_REDUCE_TENSOR_ADD;
    Descriptor reduction = make(graph, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(graph, reduction, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    set_type(graph, reduction, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    finalise(graph, reduction, "a reduction");
    Descriptor reduce = make(graph, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_descriptor(graph, reduce, CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction);
    set_descriptor(graph, reduce, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_descriptor(graph, reduce, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, out);
    add_operation(graph, reduce, "a reduction");
    return out;
}

CudnnTensor cudnn_reshape(CudnnGraph *graph, CudnnTensor x, CudnnTensor out) {
    Descriptor reshape = make(graph, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_descriptor(graph, reshape, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_descriptor(graph, reshape, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, out);
    add_operation(graph, reshape, "a reshape");
    return out;
}

/* ---- engines and plans ---- */

/* Engine configurations, the best first, for the handle's device or that of `properties`; one of the two is NULL. */
static int find_engines(CudnnGraph *graph, cudnnHandle_t handle, Descriptor properties, Descriptor *configs) {
    Descriptor operations = make(graph, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(graph, operations, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, graph->operation_count,
        graph->operations);
    if (handle)
        set(graph, operations, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    finalise(graph, operations, "the graph");
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    Descriptor heuristics = make(graph, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set_descriptor(graph, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, operations);
    set(graph, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    if (properties)
        set_descriptor(graph, heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, properties);
    finalise(graph, heuristics, "heuristics");
    for (int i = 0; i < CONFIGS_MAX; i++)
        configs[i] = make(graph, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    int64_t count = 0;
    if (!graph->why[0])
        check(graph, cudnnBackendGetAttribute(heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                              CONFIGS_MAX, &count, configs), "heuristics");
    if (!graph->why[0] && count == 0)
        snprintf(graph->why, sizeof graph->why, "cuDNN has no engine for this shape");
    return graph->why[0] ? 0 : (int)count;
}

int cudnn_graph_engines(CudnnGraph *graph, const char *properties) {
    Descriptor configs[CONFIGS_MAX], device = make(graph, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    set(graph, device, CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, (int64_t)strlen(properties) + 1,
        properties);
    finalise(graph, device, "the device's properties");
    return find_engines(graph, NULL, device, configs);
}

/* An engine may still refuse: then the next one is asked, and what it said is not kept. */
static bool make_plan(CudnnGraph *graph, cudnnHandle_t handle, Descriptor config) {
    Descriptor plan = make(graph, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    set(graph, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    set_descriptor(graph, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    finalise(graph, plan, "a plan");
    int64_t bytes = 0, count = 0;
    if (!graph->why[0])
        check(graph, cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1,
                                              &count, &bytes), "a plan's workspace");
    graph->plan = plan;
    graph->workspace_bytes = ((size_t)bytes + 255) / 256 * 256;
    return !graph->why[0];
}

bool cudnn_graph_compile(CudnnGraph *graph, Cudnn *cudnn) {
    Descriptor configs[CONFIGS_MAX];
    int count = find_engines(graph, cudnn->handle, NULL, configs);
    for (int i = 0; i < count; i++) {
        graph->why[0] = 0;
        if (make_plan(graph, cudnn->handle, configs[i]))
            return true;
    }
    return false;
}

size_t cudnn_graph_workspace_bytes(const CudnnGraph *graph) { return graph->workspace_bytes; }

/* ---- use ---- */

static Status not_usable(const char *why) { return fault("cuDNN cannot be used: %s", why); }

Status cudnn_open(Cudnn **cudnn, Gpu *gpu) {
    if (cudnnGetVersion() < OLDEST_VERSION)
        return fault("cuDNN %zu is too old: 9.10 or later is needed", cudnnGetVersion());
    *cudnn = (Cudnn *)calloc(1, sizeof **cudnn);
    if (!*cudnn)
        return not_usable("no memory");
    (*cudnn)->gpu = gpu;
    cudnnStatus_t status = cudnnCreate(&(*cudnn)->handle);
    if (status == CUDNN_STATUS_SUCCESS)
        status = cudnnSetStream((*cudnn)->handle, (cudaStream_t)gpu_stream(gpu));
    if (status == CUDNN_STATUS_SUCCESS)
        return OK;
    cudnn_close(*cudnn);
    *cudnn = NULL;
    return not_usable(cudnnGetErrorString(status));
}

void cudnn_close(Cudnn *cudnn) {
    if (!cudnn)
        return;
    if (cudnn->handle)
        cudnnDestroy(cudnn->handle);
    free(cudnn);
}

static cudnnStatus_t fill_pack(CudnnGraph *graph, Pack *pack) {
    int64_t uids[CUDNN_NAMES_MAX];
    void *pointers[CUDNN_NAMES_MAX];
    int count = 0;
    for (int name = 0; name < CUDNN_NAMES_MAX; name++)
        if (graph->names & 1u << name) {
            uids[count] = name;
            pointers[count++] = pack->pointers[name];
        }
    cudnnStatus_t statuses[] = {
        cudnnBackendSetAttribute(pack->descriptor, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, uids),
        cudnnBackendSetAttribute(pack->descriptor, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count,
                                 pointers),
        cudnnBackendSetAttribute(pack->descriptor, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1,
                                 &pack->workspace),
        cudnnBackendFinalize(pack->descriptor)};
    for (cudnnStatus_t status : statuses)
        if (status != CUDNN_STATUS_SUCCESS)
            return status;
    return CUDNN_STATUS_SUCCESS;
}

/* FNV-1a, a pointer at a time. */
static uint64_t hash_of(const Pack *pack) {
    uint64_t hash = 0xcbf29ce484222325u ^ (uintptr_t)pack->workspace;
    for (void *pointer : pack->pointers)
        hash = (hash ^ (uintptr_t)pointer) * 0x100000001b3u;
    return hash ^ hash >> 32;
}

/* The pack of these pointers, made when they are first seen. */
static cudnnStatus_t find_pack(CudnnGraph *graph, const Pack *wanted, Descriptor *descriptor) {
    const size_t key_bytes = offsetof(Pack, descriptor);
    if (graph->pack_count >= PACKS / 4 * 3)
        clear_packs(graph);
    uint64_t slot = hash_of(wanted) % PACKS;
    while (graph->packs[slot].descriptor && memcmp(&graph->packs[slot], wanted, key_bytes) != 0)
        slot = (slot + 1) % PACKS;
    Pack *pack = &graph->packs[slot];
    cudnnStatus_t status = CUDNN_STATUS_SUCCESS;
    if (!pack->descriptor) {
        *pack = *wanted;
        graph->pack_count++;
        status = cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack->descriptor);
        if (status == CUDNN_STATUS_SUCCESS)
            status = fill_pack(graph, pack);
    }
    *descriptor = pack->descriptor;
    return status;
}

void cudnn_graph_execute(CudnnGraph *graph, Cudnn *cudnn, void *const *pointers, int count, void *workspace) {
    assert(graph->plan && !graph->why[0] && count <= CUDNN_NAMES_MAX && !(graph->names >> count));
    Pack wanted = {};
    memcpy(wanted.pointers, pointers, (size_t)count * sizeof *pointers);
    wanted.workspace = workspace;
    Descriptor pack = NULL;
    cudnnStatus_t status = find_pack(graph, &wanted, &pack);
    if (status == CUDNN_STATUS_SUCCESS)
        status = cudnnBackendExecute(cudnn->handle, graph->plan, pack);
    if (status != CUDNN_STATUS_SUCCESS)
        gpu_fault(cudnn->gpu, "a graph of cuDNN", cudnnGetErrorString(status));
}
