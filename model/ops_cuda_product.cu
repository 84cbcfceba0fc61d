/* Products of matrices by cuBLASLt.
 *
 * cuBLASLt counts columns first, so it sees each of our matrices transposed: out^T = right^T left^T. Its A is our right
 * operand and its B our left one, and an epilogue's bias, one value per row there, is one per column here.
 *
 * What it takes to ask for a product of a shape (descriptions, and the algorithm that the heuristic names first) makes
 * a Plan. Plans are made when a shape is first seen and kept in a table hashed by shape; a table that has filled up, as
 * it can when prompts of many lengths are taken, starts over. The shape includes how far the pointers are aligned, by
 * which algorithms are chosen: weights lie anywhere in the flat array.
 *
 * Sums are split over k, if at all, through the workspace and added in a fixed order: the scheme that adds where the
 * output lies is not admitted. So a shape's bits are always the same. */
#include "model/ops_cuda_internal.cuh"

extern "C" {
#include "base/clock.h"
#include "base/random.h"
}

#include <cublasLt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    PLANS = 512, /* a power of two; at most 3/4 are used */
    ALIGNED_BYTES_MAX = 16 /* no kernel needs more; what lies further apart by chance must not choose another */
};

static const double LEAST_S = 5e-3; /* of products that are timed */

/* Compared and hashed as bytes, so padding is cleared. */
typedef struct ShapeKey {
    int64_t out_stride, out_batch, left_stride, left_batch, right_stride, right_batch;
    int rows, columns, depth, batch;
    int left_transposed, right_transposed, out_f32, epilogue;
    int left_aligned, right_aligned, add_aligned, out_aligned, bias_aligned, aux_aligned;
} ShapeKey;

typedef struct Plan {
    ShapeKey key;
    bool made;
    bool available; /* an algorithm was found */
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t left, right, out;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace_bytes; /* that it wants */
} Plan;

struct Products {
    Gpu *gpu;
    CudaDtype dtype;
    cublasLtHandle_t handle;
    cublasLtMatmulPreference_t preference;
    void *workspace;
    Plan plans[PLANS];
    int made;
};

/* Notes a failure of cuBLASLt in the Gpu. */
#define CHECK_LT(gpu, call)                                \
    do {                                                   \
        cublasStatus_t status_ = (call);                   \
        if (status_ != CUBLAS_STATUS_SUCCESS)              \
            gpu_fault(gpu, #call, cublasLtGetStatusString(status_));        \
    } while (0)

/* ---- plans ---- */

static int aligned_bytes(const void *at) {
    uintptr_t bits = (uintptr_t)at | ALIGNED_BYTES_MAX;
    return (int)(bits & -bits);
}

static ShapeKey key_of(const Product *p) {
    ShapeKey key;
    memset(&key, 0, sizeof key);
    key.out_stride = p->out_stride;
    key.out_batch = p->out_batch;
    key.left_stride = p->left.stride;
    key.left_batch = p->left.batch;
    key.right_stride = p->right.stride;
    key.right_batch = p->right.batch;
    key.rows = p->rows;
    key.columns = p->columns;
    key.depth = p->depth;
    key.batch = p->batch;
    key.left_transposed = p->left.transposed;
    key.right_transposed = p->right.transposed;
    key.out_f32 = p->out_f32;
    key.epilogue = p->epilogue;
    key.left_aligned = aligned_bytes(p->left.at);
    key.right_aligned = aligned_bytes(p->right.at);
    key.add_aligned = aligned_bytes(p->add ? p->add : p->out);
    key.out_aligned = aligned_bytes(p->out);
    key.bias_aligned = aligned_bytes(p->bias);
    key.aux_aligned = aligned_bytes(p->aux);
    return key;
}

/* FNV-1a. */
static uint64_t hash_of(const ShapeKey *key) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ ((const unsigned char *)key)[i]) * 0x100000001b3u;
    return hash;
}

static cudaDataType_t input_type(const Products *products) {
    return products->dtype == CUDA_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

template <class Value>
static void describe(Products *products, Plan *plan, cublasLtMatmulDescAttributes_t attribute, Value value) {
    CHECK_LT(products->gpu, cublasLtMatmulDescSetAttribute(plan->product, attribute, &value, sizeof value));
}

template <class Value>
static void prefer(Products *products, cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
    CHECK_LT(products->gpu,
             cublasLtMatmulPreferenceSetAttribute(products->preference, attribute, &value, sizeof value));
}

/* A matrix as it lies in memory: `lines` of `length` elements. */
static cublasLtMatrixLayout_t layout_of(Products *products, cudaDataType_t type, int length, int lines, int64_t stride,
                                        int batch, int64_t batch_stride) {
    cublasLtMatrixLayout_t layout = NULL;
    CHECK_LT(products->gpu,
             cublasLtMatrixLayoutCreate(&layout, type, (uint64_t)length, (uint64_t)lines, stride));
    CHECK_LT(products->gpu, cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                                             sizeof batch));
    CHECK_LT(products->gpu, cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                             &batch_stride, sizeof batch_stride));
    return layout;
}

static cublasLtEpilogue_t epilogue_of(int epilogue) {
    switch (epilogue) {
    case EPILOGUE_BIAS: return CUBLASLT_EPILOGUE_BIAS;
    case EPILOGUE_GELU_BIAS: return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case EPILOGUE_GELU: return CUBLASLT_EPILOGUE_GELU_AUX;
    case EPILOGUE_SLOPE: return CUBLASLT_EPILOGUE_DGELU;
    default: return CUBLASLT_EPILOGUE_DEFAULT;
    }
}

static void describe_product(Products *products, Plan *plan, const Product *p) {
    cublasComputeType_t compute = products->dtype == CUDA_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    CHECK_LT(products->gpu, cublasLtMatmulDescCreate(&plan->product, compute, CUDA_R_32F));
    describe(products, plan, CUBLASLT_MATMUL_DESC_TRANSA, p->right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    describe(products, plan, CUBLASLT_MATMUL_DESC_TRANSB, p->left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (p->epilogue == EPILOGUE_NONE)
        return;
    describe(products, plan, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p->epilogue));
    if (p->epilogue != EPILOGUE_BIAS)
        describe(products, plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)p->columns);
}

/* Those of this call; the rest of a description is the plan's. */
static void describe_pointers(Products *products, Plan *plan, const Product *p) {
    if (p->bias)
        describe(products, plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p->bias);
    if (p->aux)
        describe(products, plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p->aux);
}

static void describe_layouts(Products *products, Plan *plan, const Product *p) {
    cudaDataType_t in = input_type(products), out = p->out_f32 ? CUDA_R_32F : in;
    bool right = p->right.transposed, left = p->left.transposed;
    plan->right = layout_of(products, in, right ? p->depth : p->columns, right ? p->columns : p->depth, p->right.stride,
                            p->batch, p->right.batch);
    plan->left = layout_of(products, in, left ? p->rows : p->depth, left ? p->depth : p->rows, p->left.stride, p->batch,
                           p->left.batch);
    plan->out = layout_of(products, out, p->columns, p->rows, p->out_stride, p->batch, p->out_batch);
}

static void choose(Products *products, Plan *plan) {
    prefer(products, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)plan->key.right_aligned);
    prefer(products, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)plan->key.left_aligned);
    prefer(products, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)plan->key.add_aligned);
    prefer(products, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)plan->key.out_aligned);
    cublasLtMatmulHeuristicResult_t found;
    memset(&found, 0, sizeof found);
    int count = 0;
    cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(products->handle, plan->product, plan->right, plan->left, plan->out, plan->out,
                                       products->preference, 1, &found, &count);
    plan->available = status == CUBLAS_STATUS_SUCCESS && count > 0 && found.state == CUBLAS_STATUS_SUCCESS;
    plan->algorithm = found.algo;
    plan->workspace_bytes = found.workspaceSize;
    if (!plan->available && plan->key.epilogue == EPILOGUE_NONE)
        gpu_fault(products->gpu, "a product of matrices", cublasLtGetStatusString(status));
}

static void plan_clear(Plan *plan) {
    if (plan->product)
        cublasLtMatmulDescDestroy(plan->product);
    if (plan->left)
        cublasLtMatrixLayoutDestroy(plan->left);
    if (plan->right)
        cublasLtMatrixLayoutDestroy(plan->right);
    if (plan->out)
        cublasLtMatrixLayoutDestroy(plan->out);
    memset((void *)plan, 0, sizeof *plan);
}

static void plans_clear(Products *products) {
    for (int i = 0; i < PLANS; i++)
        plan_clear(&products->plans[i]);
    products->made = 0;
}

static Plan *plan_of(Products *products, const Product *p) {
    ShapeKey key = key_of(p);
    if (products->made >= PLANS / 4 * 3)
        plans_clear(products);
    uint64_t slot = hash_of(&key) % PLANS;
    while (products->plans[slot].made && memcmp(&products->plans[slot].key, &key, sizeof key) != 0)
        slot = (slot + 1) % PLANS;
    Plan *plan = &products->plans[slot];
    if (!plan->made) {
        plan->made = true;
        plan->key = key;
        products->made++;
        describe_product(products, plan, p);
        describe_layouts(products, plan, p);
        describe_pointers(products, plan, p);
        choose(products, plan);
    }
    return plan;
}

/* ---- for the other files ---- */

Status products_create(Products **out, Gpu *gpu, CudaDtype dtype) {
    Products *products = *out = (Products *)calloc(1, sizeof *products);
    if (!products)
        return fault("no memory for the plans of products");
    products->gpu = gpu;
    products->dtype = dtype;
    cublasStatus_t status = cublasLtCreate(&products->handle);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasLtMatmulPreferenceCreate(&products->preference);
    if (status != CUBLAS_STATUS_SUCCESS)
        return fault("cuBLASLt: cannot be used: %s", cublasLtGetStatusString(status));
    prefer(products, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (size_t)PRODUCT_WORKSPACE_BYTES);
    prefer(products, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    return OK;
}

Status products_connect(Products *products) {
    products->workspace = memory_alloc(gpu_memory(products->gpu), PRODUCT_WORKSPACE_BYTES);
    return products->workspace ? OK : fault("cuBLASLt: no memory on the GPU for a workspace of %d MiB",
                                            PRODUCT_WORKSPACE_BYTES >> 20);
}

void products_destroy(Products *products) {
    if (!products)
        return;
    plans_clear(products);
    if (products->workspace)
        memory_free(gpu_memory(products->gpu), products->workspace);
    if (products->preference)
        cublasLtMatmulPreferenceDestroy(products->preference);
    if (products->handle)
        cublasLtDestroy(products->handle);
    free(products);
}

/* What cuBLASLt asks of an epilogue's pointers; its heuristic does not. */
static bool epilogue_fits(const Product *p) {
    bool aux = p->epilogue >= EPILOGUE_GELU_BIAS;
    return (!p->bias || aligned(p->bias)) && (!aux || (aligned(p->aux) && p->columns % 8 == 0));
}

bool product(CudaOps *ops, const Product *p) {
    Products *products = ops->products;
    if (!epilogue_fits(p))
        return false;
    Plan *plan = plan_of(products, p);
    if (!plan->available)
        return p->epilogue == EPILOGUE_NONE;
    describe_pointers(products, plan, p);
    float one = p->add ? 1.0f : 0.0f;
    cublasStatus_t status =
        cublasLtMatmul(products->handle, plan->product, &p->scale, p->right.at, plan->right, p->left.at, plan->left,
                       &one, p->add ? p->add : p->out, plan->out, p->out, plan->out, &plan->algorithm,
                       products->workspace, plan->workspace_bytes, ops->stream);
    if (status != CUBLAS_STATUS_SUCCESS)
        gpu_fault(products->gpu, "a product of matrices", cublasLtGetStatusString(status));
    return true;
}

/* ---- how fast ---- */

/* Numbers from -1 to 1, a block of them over and over: a card takes less power, and less time, for zeros. Their two
 * halves are the same, so that they are such numbers as f32 and, twice as many, as bf16. */
static void fill_at_random(const CudaOps *ops, char *memory, size_t bytes) {
    enum { DRAWN = 1 << 16 };
    static const size_t block = DRAWN * sizeof(uint32_t);
    uint32_t *drawn = (uint32_t *)malloc(block), bits;
    for (int i = 0; drawn && i < DRAWN; i++) {
        float number = (float)(2 * random_uniform(1, 0, (uint64_t)i) - 1);
        memcpy(&bits, &number, sizeof bits);
        drawn[i] = (bits & 0xffff0000u) | bits >> 16;
    }
    for (size_t done = 0; drawn && done < bytes; done += block)
        gpu_copy_in(ops->gpu, memory + done, drawn, bytes - done < block ? bytes - done : block);
    gpu_finish(ops->gpu); /* a fault sticks */
    free(drawn);
}

static double calls_s(CudaOps *ops, const Product *p, int calls) {
    double start_s = clock_s();
    for (int i = 0; i < calls; i++)
        product(ops, p);
    return gpu_finish(ops->gpu) == OK ? clock_s() - start_s : INFINITY;
}

double cuda_ops_product_flops_per_s(CudaOps *ops, int n) {
    size_t bytes = (size_t)n * (size_t)n * ops->table.act_bytes;
    char *memory = (char *)memory_alloc(gpu_memory(ops->gpu), 3 * bytes);
    if (!memory)
        return 0;
    fill_at_random(ops, memory, 2 * bytes);
    const Product square = {.out = memory + 2 * bytes,
                            .out_stride = n,
                            .rows = n,
                            .columns = n,
                            .depth = n,
                            .left = plain(memory, n),
                            .right = transposed(memory + bytes, n)};
    calls_s(ops, &square, 1); /* loads kernels */
    int calls = 1;
    double took_s;
    while ((took_s = calls_s(ops, &square, calls)) < LEAST_S)
        calls *= 2;
    memory_free(gpu_memory(ops->gpu), memory);
    return 2.0 * n * n * n * calls / took_s;
}
