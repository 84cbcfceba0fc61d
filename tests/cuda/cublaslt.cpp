/* A stand-in for cuBLASLt, linked in its place: strided batches of column-major products, f32 or bf16 in and out, with
 * the epilogues of a transformer, by the CPU's BLAS in f32. What it does not know, and what the library's manual rules
 * out, it refuses with a line on stderr. An algorithm belongs to the problem that it was asked for. The workspace is
 * overwritten with 0xFF. */
#include "tests/cuda/runtime.h"

#include <cblas.h>
#include <cublasLt.h>
#include <cuda_bf16.h>

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

enum { ALGORITHM_WORKSPACE_BYTES = 4096 };

struct Description {
    cublasComputeType_t compute;
    int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int32_t bias_type = -1, aux_type = -1; /* -1: D's */
    int64_t aux_ld = 0, aux_stride = 0;
};

struct Layout {
    int32_t type;
    uint64_t rows, cols;
    int64_t ld;
    int32_t batches = 1;
    int64_t stride = 0;
};

struct Preference {
    uint64_t workspace_bytes = 0;
};

/* A product as it will be computed: D = epilogue(alpha op(A) op(B) + beta C). */
struct Product {
    Description what;
    Layout a, b, c, d;
    uint64_t inner;
    float alpha, beta;
    const void *A, *B, *C;
    void *D;
};

__attribute__((format(printf, 2, 3))) cublasStatus_t refuse(cublasStatus_t status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("cublaslt stand-in: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return status;
}

const char *injected(const char *function) { return cudart::enter(function) == cudaSuccess ? nullptr : function; }

/* ---- elements ---- */

bool known(int32_t type) { return type == CUDA_R_32F || type == CUDA_R_16BF; }
size_t bytes_of(int32_t type) { return type == CUDA_R_32F ? 4 : 2; }

float load(const void *from, int32_t type, size_t i) {
    return type == CUDA_R_32F ? ((const float *)from)[i] : __bfloat162float(((const __nv_bfloat16 *)from)[i]);
}
void store(void *to, int32_t type, size_t i, float value) {
    if (type == CUDA_R_32F)
        ((float *)to)[i] = value;
    else
        ((__nv_bfloat16 *)to)[i] = __float2bfloat16(value);
}

/* What tensor cores keep of an f32: 10 bits of mantissa, to nearest even. */
float tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (std::isfinite(value))
        bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

/* One matrix of a batch as dense f32 [cols][rows]. */
std::vector<float> widen(const void *from, const Layout &layout, int batch, bool round) {
    std::vector<float> to(layout.rows * layout.cols);
    for (uint64_t col = 0; col < layout.cols; col++)
        for (uint64_t row = 0; row < layout.rows; row++) {
            size_t at = (size_t)(batch * layout.stride + (int64_t)col * layout.ld) + row;
            float value = load(from, layout.type, at);
            to[col * layout.rows + row] = round ? tf32(value) : value;
        }
    return to;
}

/* ---- computing ---- */

float gelu(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
float gelu_slope(float x) {
    float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * 0.7978845608f * (1 + 3 * 0.044715f * x * x);
}

/* One element after the sum; aux_at is its place in the auxiliary matrix. */
float finish(const Product &p, float sum, uint64_t row, size_t aux_at) {
    const Description &w = p.what;
    if (w.epilogue & CUBLASLT_EPILOGUE_BIAS)
        sum += load(w.bias, w.bias_type, row);
    switch (w.epilogue & ~(uint32_t)CUBLASLT_EPILOGUE_BIAS) {
    case CUBLASLT_EPILOGUE_GELU_AUX:
        store(w.aux, w.aux_type, aux_at, sum);
        return gelu(sum);
    case CUBLASLT_EPILOGUE_GELU: return gelu(sum);
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD: return sum * gelu_slope(load(w.aux, w.aux_type, aux_at));
    default: return sum;
    }
}

/* Sums for a bias' gradient: over D's columns, or over the inner dimension of A or B (dense, as widened). */
void sum_bias(const Product &p, const std::vector<float> &a, const std::vector<float> &b, const std::vector<float> &d) {
    uint32_t epilogue = p.what.epilogue;
    if (epilogue != CUBLASLT_EPILOGUE_DGELU_BGRAD && epilogue != CUBLASLT_EPILOGUE_BGRADA &&
        epilogue != CUBLASLT_EPILOGUE_BGRADB)
        return;
    uint64_t M = p.d.rows, N = p.d.cols, K = p.inner;
    bool over_d = epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD, over_a = epilogue == CUBLASLT_EPILOGUE_BGRADA;
    for (uint64_t i = 0; i < (over_d || over_a ? M : N); i++) {
        float sum = 0;
        for (uint64_t k = 0; k < (over_d ? N : K); k++)
            sum += over_d ? d[k * M + i] : over_a ? a[p.what.transpose_a ? i * K + k : k * M + i]
                                                  : b[p.what.transpose_b ? k * N + i : i * K + k];
        store(p.what.bias, p.what.bias_type, i, sum);
    }
}

void compute_one(const Product &p, int batch) {
    bool round = p.what.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    std::vector<float> a = widen(p.A, p.a, batch, round), b = widen(p.B, p.b, batch, round);
    uint64_t M = p.d.rows, N = p.d.cols;
    std::vector<float> d(M * N);
    cblas_sgemm(CblasColMajor, p.what.transpose_a ? CblasTrans : CblasNoTrans,
                p.what.transpose_b ? CblasTrans : CblasNoTrans, (int)M, (int)N, (int)p.inner, p.alpha, a.data(),
                (int)p.a.rows, b.data(), (int)p.b.rows, 0, d.data(), (int)M);
    for (uint64_t col = 0; col < N; col++)
        for (uint64_t row = 0; row < M; row++) {
            size_t c_at = (size_t)(batch * p.c.stride + (int64_t)col * p.c.ld) + row;
            float sum = d[col * M + row] + (p.beta != 0 ? p.beta * load(p.C, p.c.type, c_at) : 0);
            sum = finish(p, sum, row, (size_t)(batch * p.what.aux_stride + (int64_t)col * p.what.aux_ld) + row);
            d[col * M + row] = sum;
            store(p.D, p.d.type, (size_t)(batch * p.d.stride + (int64_t)col * p.d.ld) + row, sum);
        }
    sum_bias(p, a, b, d);
}

void compute(const Product &p, void *workspace, size_t workspace_bytes) {
    if (workspace_bytes > 0)
        memset(workspace, 0xFF, workspace_bytes);
    for (int batch = 0; batch < p.d.batches; batch++)
        compute_one(p, batch);
}

/* ---- what is allowed ---- */

bool uses_bias(uint32_t epilogue) {
    return epilogue == CUBLASLT_EPILOGUE_BGRADA || epilogue == CUBLASLT_EPILOGUE_BGRADB ||
           epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD || (epilogue & CUBLASLT_EPILOGUE_BIAS);
}
bool uses_aux(uint32_t epilogue) { return epilogue & 128; }

cublasStatus_t check_epilogue(const Product &p) {
    const Description &w = p.what;
    switch (w.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB: break;
    default: return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "epilogue %u", w.epilogue);
    }
    if (uses_bias(w.epilogue) && (w.bias_type != p.d.type || p.d.batches != 1))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a bias is of D's type, and of one batch");
    if (uses_aux(w.epilogue) &&
        (w.aux_type != p.d.type || w.aux_ld % 8 || w.aux_ld < (int64_t)p.d.rows || w.aux_stride % 8))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                      "the auxiliary matrix has D's type, and a leading dimension and stride divisible by 8");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_layouts(const Product &p) {
    const Layout *all[] = {&p.a, &p.b, &p.c, &p.d};
    for (const Layout *l : all)
        if (!known(l->type) || l->ld < (int64_t)l->rows || l->batches != p.d.batches || l->rows == 0 || l->cols == 0)
            return refuse(CUBLAS_STATUS_INVALID_VALUE, "a layout of type %d, %lu x %lu, leading dimension %ld, x %d",
                          l->type, (unsigned long)l->rows, (unsigned long)l->cols, (long)l->ld, l->batches);
    const Layout &a = p.a, &b = p.b;
    uint64_t M = p.what.transpose_a ? a.cols : a.rows, K = p.what.transpose_b ? b.cols : b.rows;
    uint64_t N = p.what.transpose_b ? b.rows : b.cols;
    if (M != p.d.rows || N != p.d.cols || K != p.inner || p.c.rows != M || p.c.cols != N)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "shapes differ: D %lu x %lu, op(A) %lu x %lu, op(B) %lu x %lu",
                      (unsigned long)p.d.rows, (unsigned long)p.d.cols, (unsigned long)M, (unsigned long)p.inner,
                      (unsigned long)K, (unsigned long)N);
    bool bf16 = a.type == CUDA_R_16BF;
    if (a.type != b.type || p.c.type != p.d.type || (!bf16 && p.d.type != CUDA_R_32F))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "types %d x %d + %d -> %d", a.type, b.type, p.c.type, p.d.type);
    if (p.what.compute != CUBLAS_COMPUTE_32F && (bf16 || p.what.compute != CUBLAS_COMPUTE_32F_FAST_TF32))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "compute type %d of inputs of type %d", p.what.compute, a.type);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t make_product(Product *p, cublasLtMatmulDesc_t what, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                            cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    *p = {};
    p->what = *(const Description *)what;
    p->a = *(const Layout *)a;
    p->b = *(const Layout *)b;
    p->c = *(const Layout *)c;
    p->d = *(const Layout *)d;
    p->inner = p->what.transpose_a ? p->a.rows : p->a.cols;
    p->what.bias_type = p->what.bias_type < 0 ? p->d.type : p->what.bias_type;
    p->what.aux_type = p->what.aux_type < 0 ? p->d.type : p->what.aux_type;
    cublasStatus_t status = check_layouts(*p);
    return status == CUBLAS_STATUS_SUCCESS ? check_epilogue(*p) : status;
}

/* Equal for equal problems, whatever their pointers. */
uint64_t fingerprint(const Product &p) {
    uint64_t hash = 0xcbf29ce484222325u;
    auto add = [&](uint64_t value) { hash = (hash ^ value) * 0x100000001b3u; };
    add((uint64_t)p.what.compute);
    add((uint64_t)(p.what.transpose_a * 4 + p.what.transpose_b));
    add(p.what.epilogue);
    add((uint64_t)p.what.aux_ld);
    const Layout *all[] = {&p.a, &p.b, &p.c, &p.d};
    for (const Layout *l : all) {
        add((uint64_t)l->type);
        add(l->rows);
        add(l->cols);
        add((uint64_t)l->ld);
        add((uint64_t)l->batches);
        add((uint64_t)l->stride);
    }
    return hash;
}

bool lies_on_device(const void *at, const Layout &l) {
    int64_t elems = (l.batches - 1) * l.stride + ((int64_t)l.cols - 1) * l.ld + (int64_t)l.rows;
    return cudart::on_device(at, (size_t)elems * bytes_of(l.type));
}

cublasStatus_t check_memory(const Product &p, const void *workspace, size_t workspace_bytes) {
    Layout aux = p.d;
    aux.ld = p.what.aux_ld;
    aux.stride = p.what.aux_stride;
    size_t bias = (p.what.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p.d.cols : p.d.rows) * bytes_of(p.d.type);
    if (!lies_on_device(p.A, p.a) || !lies_on_device(p.B, p.b) || !lies_on_device(p.D, p.d) ||
        (p.beta != 0 && !lies_on_device(p.C, p.c)) || (uses_aux(p.what.epilogue) && !lies_on_device(p.what.aux, aux)) ||
        (uses_bias(p.what.epilogue) && !cudart::on_device(p.what.bias, bias)) ||
        (workspace_bytes > 0 && !cudart::on_device(workspace, workspace_bytes)))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "a matrix, bias or workspace beyond the device's memory");
    return CUBLAS_STATUS_SUCCESS;
}

/* Attributes are copied to and fro by size. */
template <class T> cublasStatus_t set(T *to, const void *from, size_t bytes) {
    if (bytes != sizeof *to)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "an attribute of %zu bytes, expected %zu", bytes, sizeof *to);
    memcpy(to, from, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

template <class T> cublasStatus_t release(void *object) {
    delete (T *)object;
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
    if (injected(__func__))
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = (cublasLtHandle_t) new int;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return release<int>(handle); }
const char *cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "the operation completed successfully";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the GPU program failed to execute";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality is not supported";
    default: return "an unsupported value or parameter was passed to the function";
    }
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *what, cublasComputeType_t compute, cudaDataType_t scale) {
    if (scale != CUDA_R_32F)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "scale type %d", scale);
    Description *description = new Description;
    description->compute = compute;
    *what = (cublasLtMatmulDesc_t)description;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t what) { return release<Description>(what); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t what, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    Description *d = (Description *)what;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(&d->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(&d->transpose_b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(&d->epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(&d->bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return set(&d->bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return set(&d->aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return set(&d->aux_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return set(&d->aux_ld, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return set(&d->aux_stride, value, bytes);
    default: return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "attribute %d of a product", (int)attribute);
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    Layout *l = new Layout;
    l->type = type;
    l->rows = rows;
    l->cols = cols;
    l->ld = ld;
    *layout = (cublasLtMatrixLayout_t)l;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return release<Layout>(layout); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) {
    Layout *l = (Layout *)layout;
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: return set(&l->type, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS: return set(&l->rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS: return set(&l->cols, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD: return set(&l->ld, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return set(&l->batches, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return set(&l->stride, value, bytes);
    default: return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "attribute %d of a layout", (int)attribute);
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference) {
    *preference = (cublasLtMatmulPreference_t) new Preference;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return release<Preference>(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes) {
    uint32_t ignored; /* of alignments and schemes the one algorithm knows nothing */
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return set(&((Preference *)preference)->workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(&ignored, value, bytes);
    default: return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "attribute %d of a preference", (int)attribute);
    }
}

/* One algorithm, which takes some workspace where there is some. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t what, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int requested, cublasLtMatmulHeuristicResult_t *results, int *count) {
    Product product;
    *count = 0;
    if (injected(__func__) || requested < 1)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    cublasStatus_t status = make_product(&product, what, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    bool has_workspace = ((const Preference *)preference)->workspace_bytes >= ALGORITHM_WORKSPACE_BYTES;
    results[0] = cublasLtMatmulHeuristicResult_t{};
    results[0].workspaceSize = has_workspace ? ALGORITHM_WORKSPACE_BYTES : 0;
    results[0].algo.data[0] = fingerprint(product);
    results[0].algo.data[1] = results[0].workspaceSize;
    results[0].wavesCount = 1;
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t what, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    Product p;
    if (injected(__func__))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    cublasStatus_t status = make_product(&p, what, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    if (algorithm && (algorithm->data[0] != fingerprint(p) || algorithm->data[1] > workspace_bytes))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "an algorithm for another problem, or too little workspace for it");
    p.alpha = *(const float *)alpha;
    p.beta = *(const float *)beta;
    p.A = A;
    p.B = B;
    p.C = C;
    p.D = D;
    status = check_memory(p, workspace, workspace_bytes);
    if (status == CUBLAS_STATUS_SUCCESS)
        cudart::enqueue(stream, [=] { compute(p, workspace, workspace_bytes); });
    return status;
}
