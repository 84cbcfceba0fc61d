/* Where a test's model is computed: the cpu, on the host's arrays, or a GPU, on copies of them. */
#ifndef TESTS_MODEL_DEVICE_H
#define TESTS_MODEL_DEVICE_H

#include "base/memory.h"
#include "model/ops.h"

#include <stdlib.h>

#ifdef HAVE_CUDA
#include "model/ops_cuda.h"
#define MODEL_DEVICES "cpu|cuda-f32|cuda-tf32|cuda-bf16"
#else
#define MODEL_DEVICES "cpu"
#endif

typedef struct ModelDevice {
    const Ops *ops;
    const Allocator *memory;
    float *params, *grads, *rows; /* on the device; of the cpu the host's own */
    double error;                 /* relative, of what is rounded on the way, beyond f32 */
    /* private */
    OpsContext context;
    float *host_params, *host_grads, *host_rows;
    size_t elems, row_elems;
#ifdef HAVE_CUDA
    Gpu *gpu;
    CudaOps *cuda;
#endif
} ModelDevice;

#ifdef HAVE_CUDA
static inline Status model_cuda_open(ModelDevice *device, CudaDtype dtype) {
    static const double errors[] = {[CUDA_F32] = 0, [CUDA_TF32] = 0x1p-11, [CUDA_BF16] = 0x1p-8};
    device->error = errors[dtype];
    TRY(gpu_open(&device->gpu, 0));
    device->memory = gpu_memory(device->gpu);
    device->params = memory_alloc(device->memory, device->elems * sizeof(float));
    device->grads = memory_alloc(device->memory, device->elems * sizeof(float));
    if (!device->params || !device->grads)
        return fault("no memory on the GPU for %zu parameters", device->elems);
    TRY(cuda_ops_create(&device->cuda, device->gpu, dtype, device->params, (int64_t)device->elems));
    device->ops = cuda_ops(device->cuda);
    return OK;
}
#endif

/* Before the model is created; as in training bf16 takes cuDNN's attention where that has the shape. Whose it is. */
static inline const char *model_device_attention(ModelDevice *device, int B, int T, int C, int NH) {
    const char *why = "";
    (void)device, (void)B, (void)T, (void)C, (void)NH, (void)why;
#ifdef HAVE_CUDA
    if (device->gpu && device->ops->act_bytes == sizeof(uint16_t) &&
        cuda_ops_use_cudnn(device->cuda, true, B, T, C, NH, &why)) {
        device->ops = cuda_ops(device->cuda);
        return "cuDNN";
    }
#endif
    return "our own";
}

/* Parameters that have changed on the host. */
static inline void model_device_give(ModelDevice *device) {
    if (device->params == device->host_params)
        return;
    device->ops->upload(&device->context, device->params, device->host_params, device->elems * sizeof(float));
#ifdef HAVE_CUDA
    cuda_ops_round_weights(device->cuda, 0, (int64_t)device->elems);
#endif
}

/* Gradients to the host. */
static inline void model_device_fetch(ModelDevice *device) {
    if (device->grads == device->host_grads)
        return;
    device->ops->download(&device->context, device->host_grads, device->grads, device->elems * sizeof(float));
    if (device->rows)
        device->ops->download(&device->context, device->host_rows, device->rows, device->row_elems * sizeof(float));
}

/* choice: of MODEL_DEVICES. params are on the host, and so will the gradients be. */
static inline Status model_device_open(ModelDevice *device, int choice, float *params, float *grads, int64_t elems) {
    *device = (ModelDevice){.ops = &ops_cpu,
                             .memory = &host_memory,
                             .params = params,
                             .grads = grads,
                             .host_params = params,
                             .host_grads = grads,
                             .elems = (size_t)elems};
#ifdef HAVE_CUDA
    if (choice > 0)
        TRY(model_cuda_open(device, (CudaDtype)(choice - 1)));
#endif
    (void)choice;
    device->context.state = device->ops->state;
    model_device_give(device);
    return OK;
}

/* The device's array for what shall arrive in `host`, zeroed at first; NULL: no memory. */
static inline float *model_device_rows(ModelDevice *device, float *host, size_t elems) {
    device->host_rows = host;
    device->row_elems = elems;
    bool here = device->params == device->host_params;
    return device->rows = here ? host : memory_alloc(device->memory, elems * sizeof(float));
}

static inline void model_device_close(ModelDevice *device) {
#ifdef HAVE_CUDA
    if (!device->gpu)
        return;
    cuda_ops_destroy(device->cuda);
    if (device->params != device->host_params)
        memory_free(device->memory, device->params);
    if (device->grads != device->host_grads)
        memory_free(device->memory, device->grads);
    memory_free(device->memory, device->rows);
    gpu_close(device->gpu);
#endif
    (void)device;
}

#endif
