/* The cuda device: the table, the weights' copy, what goes to and from the host, and what is too small for a file of
 * its own.
 *
 * Operations are launched into the Gpu's stream and return. The host waits in read, download and mean only. An upload
 * goes through pinned memory, so that it neither waits nor asks for the host's array to stay as it is: the stage fills
 * up from its beginning, and is empty again whenever the stream has been waited for, at the latest by each step's
 * mean. */
#include "model/ops_cuda_kernels.cuh"
#include "model/ops_cuda_internal.cuh"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { STAGE_BYTES = 4 << 20, STAGE_ALIGN = 64, THREADS = 256 };

/* 4,096 rows at GPT-2's vocabulary, 0.41 GB in bf16 and 0.82 in f32. Their dx, 4096 x 768, is some 200 tiles for the
 * 108 to 132 multiprocessors of a card, and the products do 3,000 operations for each byte of the table's f32 gradient,
 * which every chunk reads and writes again: ten times what keeps a card's memory from being the bound in bf16. */
enum { HEAD_LOGITS = 197 << 20 };

static Status available(void) { return OK; } /* there is a Gpu */

static size_t larger_of(size_t a, size_t b) { return a > b ? a : b; }

static void prepare(OpsContext *context, const OpsLimits *limits) {
    CudaOps *ops = cuda_of(context);
    if (ops->graphs)
        gpu_graphs_clear(ops->graphs); /* another context may have been where this one is */
    size_t widest = 4 * (size_t)limits->C; /* of what is summed over rows */
    size_t bytes = larger_of((size_t)PARTS_FLOATS, widest) * sizeof(float);
    bytes = larger_of(bytes, embedding_cuda_scratch_bytes(limits));
    context->scratch_bytes = larger_of(bytes, attention_cuda_scratch_bytes(limits));
    context->threads = 1;
}

/* ---- to and from the host ---- */

static void wait(CudaOps *ops) {
    CHECK_CUDA(ops->gpu, cudaStreamSynchronize(ops->stream));
    ops->stage_bytes = 0;
}

static void upload(OpsContext *context, void *device, const void *host, size_t bytes) {
    CudaOps *ops = cuda_of(context);
    for (size_t done = 0; done < bytes;) {
        if (ops->stage_bytes == STAGE_BYTES)
            wait(ops);
        size_t room = STAGE_BYTES - ops->stage_bytes, piece = bytes - done < room ? bytes - done : room;
        char *stage = ops->stage + ops->stage_bytes;
        memcpy(stage, (const char *)host + done, piece);
        CHECK_CUDA(ops->gpu,
                   cudaMemcpyAsync((char *)device + done, stage, piece, cudaMemcpyHostToDevice, ops->stream));
        done += piece;
        size_t used = ops->stage_bytes + (piece + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;
        ops->stage_bytes = used < STAGE_BYTES ? used : (size_t)STAGE_BYTES;
    }
}

static void download(OpsContext *context, void *host, const void *device, size_t bytes) {
    CudaOps *ops = cuda_of(context);
    CHECK_CUDA(ops->gpu, cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, ops->stream));
    wait(ops);
}

static void read_f32(OpsContext *context, float *host, const Act *device, size_t elems) {
    download(context, host, device, elems * sizeof *host);
}

/* bf16 arrive in the upper half of the host's array; f32, spread from its beginning, never overtake them. */
static void read_bf16(OpsContext *context, float *host, const Act *device, size_t elems) {
    char *halves = (char *)host + elems * sizeof(uint16_t);
    download(context, halves, device, elems * sizeof(uint16_t));
    for (size_t i = 0; i < elems; i++) {
        uint16_t upper;
        memcpy(&upper, halves + i * sizeof upper, sizeof upper);
        uint32_t whole = (uint32_t)upper << 16;
        memcpy(&host[i], &whole, sizeof whole);
    }
}

static void clear(OpsContext *context, void *device, size_t bytes) {
    CudaOps *ops = cuda_of(context);
    CHECK_CUDA(ops->gpu, cudaMemsetAsync(device, 0, bytes, ops->stream));
}

static double mean(OpsContext *context, const float *values, int count) {
    CudaOps *ops = cuda_of(context);
    double *device_sum = (double *)context->scratch;
    ops->sum = NAN;
    LAUNCH(sum_kernel, 1, SUM_THREADS, 0, ops->stream, device_sum, values, count);
    CHECK_LAUNCH(ops);
    download(context, &ops->sum, device_sum, sizeof ops->sum);
    return ops->sum / count;
}

/* ---- a layer's pass as one ---- */

static bool begin(OpsContext *context, const LayerPass *pass) {
    const GpuGraphKey key = {context, {context->layer, pass->backward, pass->accumulate, pass->B, pass->T}};
    return gpu_graphs_begin(cuda_of(context)->graphs, &key);
}

static void end(OpsContext *context) { gpu_graphs_end(cuda_of(context)->graphs); }

Status cuda_ops_use_graphs(CudaOps *ops) {
    ops->table.begin = begin;
    ops->table.end = end;
    return gpu_graphs_create(&ops->graphs, ops->gpu);
}

/* ---- the device ---- */

static void fill_table(CudaOps *ops) {
    Ops *table = &ops->table;
    table->name = "cuda";
    table->act_bytes = ops->dtype == CUDA_BF16 ? sizeof(bf16) : sizeof(float);
    table->head_logits = HEAD_LOGITS;
    table->state = ops;
    table->available = available;
    table->prepare = prepare;
    table->upload = upload;
    table->download = download;
    table->read = ops->dtype == CUDA_BF16 ? read_bf16 : read_f32;
    table->clear = clear;
    table->mean = mean;
    embedding_cuda_slots(table, ops->dtype);
    layernorm_cuda_slots(table, ops->dtype);
    linear_cuda_slots(table, ops->dtype);
    attention_cuda_slots(table, ops->dtype);
    attention_cached_cuda_slots(table, ops->dtype);
    head_cuda_slots(table, ops->dtype);
}

static Status make(CudaOps *ops) {
    fill_table(ops);
    ops->stage = (char *)memory_alloc(&host_memory, STAGE_BYTES);
    if (!ops->stage)
        return fault("cuda: no memory for %d bytes on the host", STAGE_BYTES);
    gpu_pin(ops->gpu, ops->stage, STAGE_BYTES);
    return products_create(&ops->products, ops->gpu, ops->dtype);
}

Status cuda_ops_open(CudaOps **out, Gpu *gpu, CudaDtype dtype) {
    CudaOps *ops = *out = (CudaOps *)calloc(1, sizeof *ops);
    if (!ops)
        return fault("cuda: no memory for the table of operations");
    ops->gpu = gpu;
    ops->stream = (cudaStream_t)gpu_stream(gpu);
    ops->dtype = dtype;
    Status status = make(ops);
    if (status != OK) {
        cuda_ops_destroy(ops);
        *out = NULL;
    }
    return status;
}

static size_t weight_bytes(const CudaOps *ops, int64_t elems) {
    return ops->dtype == CUDA_BF16 ? (size_t)elems * sizeof(bf16) : 0;
}

size_t cuda_ops_bytes(const CudaOps *ops, int64_t elems, int B) {
    return weight_bytes(ops, elems) + PRODUCT_WORKSPACE_BYTES + cudnn_use_bytes(ops, B);
}

Status cuda_ops_connect(CudaOps *ops, const float *params, int64_t elems) {
    ops->params = params;
    ops->elems = elems;
    if (ops->dtype == CUDA_BF16) {
        ops->weights = (bf16 *)memory_alloc(gpu_memory(ops->gpu), weight_bytes(ops, elems));
        if (!ops->weights)
            return fault("cuda: no memory on the GPU for %lld weights in bf16", (long long)elems);
    }
    TRY(products_connect(ops->products));
    TRY(cudnn_use_connect(ops));
    cuda_ops_round_weights(ops, 0, elems);
    return OK;
}

Status cuda_ops_create(CudaOps **ops, Gpu *gpu, CudaDtype dtype, const float *params, int64_t elems) {
    TRY(cuda_ops_open(ops, gpu, dtype));
    Status status = cuda_ops_connect(*ops, params, elems);
    if (status != OK) {
        cuda_ops_destroy(*ops);
        *ops = NULL;
    }
    return status;
}

void cuda_ops_destroy(CudaOps *ops) {
    if (!ops)
        return;
    CHECK_CUDA(ops->gpu, cudaStreamSynchronize(ops->stream));
    gpu_graphs_destroy(ops->graphs);
    cudnn_use_destroy(ops);
    products_destroy(ops->products);
    if (ops->weights)
        memory_free(gpu_memory(ops->gpu), ops->weights);
    if (ops->stage) {
        gpu_unpin(ops->gpu, ops->stage);
        memory_free(&host_memory, ops->stage);
    }
    free(ops);
}

const Ops *cuda_ops(CudaOps *ops) { return &ops->table; }

void *cuda_ops_weights(CudaOps *ops) { return ops->weights; }

void cuda_ops_round_weights(CudaOps *ops, int64_t start, int64_t elems) {
    if (!ops->weights || elems == 0)
        return;
    const float *params = ops->params + start;
    bf16 *weights = ops->weights + start;
    bool wide = aligned(params, weights);
    int64_t packs = wide ? blocks_of(elems, ROUND_PACK) : elems;
    unsigned blocks = (unsigned)blocks_of(packs, THREADS);
    if (wide)
        LAUNCH((round_kernel<ROUND_PACK>), blocks, THREADS, 0, ops->stream, weights, params, elems);
    else
        LAUNCH((round_kernel<1>), blocks, THREADS, 0, ops->stream, weights, params, elems);
    CHECK_LAUNCH(ops);
}
