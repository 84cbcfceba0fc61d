/* Two streams and two events: a copy's stream waits for what stands in the computing stream when the copy is asked for,
 * and the computing stream for the last copy in. Callers of `done` lie in a ring, since nothing is allocated in a step;
 * a place is free again when its call was made. All calls come from the rank's thread, except the calls of `done`, and
 * gpu_fault, gpu_finish and gpu_hush, which the comm thread makes too. */
#include "base/cuda.cuh"

extern "C" {
#include "base/gpu_stamps.h"
}

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OLDEST_MAJOR = 8, CALLS = 1024 };

typedef struct Call {
    Gpu *gpu;
    GpuDoneFn *done; /* NULL: the place is free */
    void *user;
    int argument;
} Call;

struct Gpu {
    /* set once */
    int device;
    char name[320], pci[32];
    cudaStream_t computing, copying;
    cudaEvent_t computed, copied;
    GpuStamps *stamps;
    Allocator memory;
    pthread_mutex_t lock;
    /* of the rank's thread; a call's `done` also of the driver's */
    Call calls[CALLS];
    int next_call;
    /* under lock */
    bool hushed;
    char fault[384]; /* "": none so far */
};

static double gib(size_t bytes) { return (double)bytes / (1 << 30); }

/* ---- finding and opening ---- */

/* `remedy` is what to do. */
static int find(const char **why, const char **remedy) {
    int count = 0, driver = 0;
    cudaDriverGetVersion(&driver);
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError(); /* what is told by why is told */
    *remedy = "see what nvidia-smi says";
    if (driver == 0)
        *why = "no NVIDIA driver", *remedy = "install one";
    else if (error == cudaErrorInsufficientDriver)
        *why = "the NVIDIA driver is too old for this build", *remedy = "update it";
    else if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
        *why = "none is visible to this process", *remedy = "see what CUDA_VISIBLE_DEVICES and nvidia-smi say";
    else
        *why = cudaGetErrorString(error);
    return error == cudaSuccess ? count : 0;
}

int gpu_count(const char **why) {
    const char *remedy;
    return find(why, &remedy);
}

static Status none_found(const char *why, const char *remedy) {
    return fault("no GPU was found: %s; %s (this build needs a driver for CUDA %d)", why, remedy,
                 CUDART_VERSION / 1000);
}

/* No fault if the call was a success. */
static Status open_fault(const Gpu *gpu, cudaError_t error) {
    if (error == cudaErrorDevicesUnavailable)
        return fault("GPU %d, %s: in use exclusively by another process; end that, or name another GPU in "
                     "CUDA_VISIBLE_DEVICES", gpu->device, gpu->name);
    if (error == cudaErrorMemoryAllocation)
        return fault("GPU %d, %s: its memory is full; end other processes on it, or name another GPU in "
                     "CUDA_VISIBLE_DEVICES", gpu->device, gpu->name);
    return error == cudaSuccess ? OK : fault("GPU %d, %s: cannot be used: %s", gpu->device, gpu->name,
                                             cudaGetErrorString(error));
}

static Status describe(Gpu *gpu) {
    cudaDeviceProp card;
    snprintf(gpu->name, sizeof gpu->name, "unknown");
    TRY(open_fault(gpu, cudaGetDeviceProperties(&card, gpu->device)));
    snprintf(gpu->name, sizeof gpu->name, "%s, sm_%d%d, %.1f GiB", card.name, card.major, card.minor,
             gib(card.totalGlobalMem));
    snprintf(gpu->pci, sizeof gpu->pci, "%04x:%02x:%02x.0", card.pciDomainID, card.pciBusID, card.pciDeviceID);
    if (card.major < OLDEST_MAJOR)
        return fault("GPU %d, %s: this program needs sm_%d0 (Ampere) or newer; name another GPU in "
                     "CUDA_VISIBLE_DEVICES", gpu->device, gpu->name, OLDEST_MAJOR);
    return OK;
}

static Status create_streams(Gpu *gpu) {
    TRY(open_fault(gpu, cudaStreamCreateWithFlags(&gpu->computing, cudaStreamNonBlocking)));
    TRY(open_fault(gpu, cudaStreamCreateWithFlags(&gpu->copying, cudaStreamNonBlocking)));
    TRY(open_fault(gpu, cudaEventCreateWithFlags(&gpu->computed, cudaEventDisableTiming)));
    TRY(open_fault(gpu, cudaEventCreateWithFlags(&gpu->copied, cudaEventDisableTiming)));
    gpu->stamps = gpu_stamps_create(gpu->computing);
    return gpu->stamps ? OK : fault("GPU %d, %s: cannot be used: it gives no events", gpu->device, gpu->name);
}

static void *gpu_alloc(void *context, size_t bytes);
static void gpu_free(void *context, void *memory);

Status gpu_open(Gpu **gpu, int local_rank) {
    const char *why, *remedy;
    int count = find(&why, &remedy);
    if (count == 0)
        return none_found(why, remedy);
    *gpu = (Gpu *)calloc(1, sizeof **gpu);
    if (!*gpu)
        return fault("out of memory");
    pthread_mutex_init(&(*gpu)->lock, NULL);
    (*gpu)->device = local_rank % count;
    (*gpu)->memory = Allocator{gpu_alloc, gpu_free, *gpu};
    Status status = describe(*gpu);
    if (status == OK)
        status = open_fault(*gpu, cudaSetDevice((*gpu)->device));
    if (status == OK)
        status = open_fault(*gpu, cudaFree(nullptr)); /* the driver's own start-up, where it was put off until now */
    if (status == OK)
        status = create_streams(*gpu);
    if (status != OK) {
        gpu_close(*gpu);
        *gpu = NULL;
    }
    return status;
}

void gpu_close(Gpu *gpu) {
    if (!gpu)
        return;
    gpu_stamps_destroy(gpu->stamps);
    if (gpu->copied)
        cudaEventDestroy(gpu->copied);
    if (gpu->computed)
        cudaEventDestroy(gpu->computed);
    if (gpu->copying) {
        cudaStreamSynchronize(gpu->copying);
        cudaStreamDestroy(gpu->copying);
    }
    if (gpu->computing) {
        cudaStreamSynchronize(gpu->computing);
        cudaStreamDestroy(gpu->computing);
    }
    pthread_mutex_destroy(&gpu->lock);
    free(gpu);
}

void gpu_use(const Gpu *gpu) { cudaSetDevice(gpu->device); }

const char *gpu_name(const Gpu *gpu) { return gpu->name; }
const char *gpu_pci(const Gpu *gpu) { return gpu->pci; }
void *gpu_stream(const Gpu *gpu) { return gpu->computing; }
GpuStamps *gpu_stamps(const Gpu *gpu) { return gpu->stamps; }

size_t gpu_memory_free_bytes(const Gpu *gpu) {
    size_t free_bytes = 0, all_bytes = 0;
    cudaSetDevice(gpu->device);
    return cudaMemGetInfo(&free_bytes, &all_bytes) == cudaSuccess ? free_bytes : 0;
}

/* ---- memory ---- */

static void *gpu_alloc(void *context, size_t bytes) {
    Gpu *gpu = (Gpu *)context;
    void *memory = NULL;
    cudaSetDevice(gpu->device); /* it is the thread's, and memory comes from it */
    if (cudaMalloc(&memory, bytes ? bytes : 1) != cudaSuccess) {
        cudaGetLastError(); /* the caller tells */
        return NULL;
    }
    CHECK_CUDA(gpu, cudaMemsetAsync(memory, 0, bytes, gpu->computing));
    CHECK_CUDA(gpu, cudaStreamSynchronize(gpu->computing)); /* other streams may write there at once */
    return memory;
}

static void gpu_free(void *context, void *memory) {
    (void)context;
    cudaFree(memory); /* waits for what uses it; a fault of that shows elsewhere */
}

const Allocator *gpu_memory(Gpu *gpu) { return &gpu->memory; }

void gpu_pin(Gpu *gpu, void *host, size_t bytes) {
    cudaSetDevice(gpu->device);
    if (cudaHostRegister(host, bytes, cudaHostRegisterPortable) != cudaSuccess)
        cudaGetLastError(); /* only slower */
}

void gpu_unpin(Gpu *gpu, void *host) {
    cudaSetDevice(gpu->device);
    if (cudaHostUnregister(host) != cudaSuccess)
        cudaGetLastError(); /* it never was */
}

/* ---- copies ---- */

/* Copies asked for from now on see what is computed by then. */
static void follow_computing(Gpu *gpu) {
    CHECK_CUDA(gpu, cudaEventRecord(gpu->computed, gpu->computing));
    CHECK_CUDA(gpu, cudaStreamWaitEvent(gpu->copying, gpu->computed, 0));
}

static void make_call(void *argument) {
    Call *call = (Call *)argument;
    gpu_call_back(call->gpu, call->done, call->user, call->argument);
    __atomic_store_n(&call->done, (GpuDoneFn *)NULL, __ATOMIC_RELEASE);
}

void gpu_copy(Gpu *gpu, void *to, const void *from, size_t bytes) {
    CHECK_CUDA(gpu, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, gpu->computing));
}

void gpu_copy_out(Gpu *gpu, void *host, const void *device, size_t bytes, GpuDoneFn *done, void *user, int argument) {
    follow_computing(gpu);
    CHECK_CUDA(gpu, cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, gpu->copying));
    if (!done)
        return;
    Call *call = &gpu->calls[gpu->next_call];
    if (__atomic_load_n(&call->done, __ATOMIC_ACQUIRE))
        CHECK_CUDA(gpu, cudaStreamSynchronize(gpu->copying)); /* the ring is full */
    gpu->next_call = (gpu->next_call + 1) % CALLS;
    *call = Call{gpu, done, user, argument};
    CHECK_CUDA(gpu, cudaLaunchHostFunc(gpu->copying, make_call, call));
}

void gpu_copy_in(Gpu *gpu, void *device, const void *host, size_t bytes) {
    follow_computing(gpu);
    CHECK_CUDA(gpu, cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, gpu->copying));
    CHECK_CUDA(gpu, cudaEventRecord(gpu->copied, gpu->copying));
    CHECK_CUDA(gpu, cudaStreamWaitEvent(gpu->computing, gpu->copied, 0));
}

/* ---- faults ---- */

void gpu_call_back(Gpu *gpu, GpuDoneFn *done, void *user, int argument) {
    pthread_mutex_lock(&gpu->lock);
    if (!gpu->hushed)
        done(user, argument);
    pthread_mutex_unlock(&gpu->lock);
}

void gpu_hush(Gpu *gpu) {
    pthread_mutex_lock(&gpu->lock);
    gpu->hushed = true;
    pthread_mutex_unlock(&gpu->lock);
}

void gpu_fault(Gpu *gpu, const char *what, const char *why) {
    pthread_mutex_lock(&gpu->lock);
    if (!gpu->fault[0])
        snprintf(gpu->fault, sizeof gpu->fault, "%s: %s", what, why);
    pthread_mutex_unlock(&gpu->lock);
}

/* A stream that could not be waited for may still be at work. */
Status gpu_finish(Gpu *gpu) {
    CHECK_CUDA(gpu, cudaGetLastError()); /* of launches, which return nothing */
    CHECK_CUDA(gpu, cudaStreamSynchronize(gpu->computing));
    CHECK_CUDA(gpu, cudaStreamSynchronize(gpu->copying));
    pthread_mutex_lock(&gpu->lock);
    gpu->hushed |= gpu->fault[0] != 0;
    Status status = gpu->fault[0] ? fault("GPU %d, %s: %s", gpu->device, gpu->name, gpu->fault) : OK;
    pthread_mutex_unlock(&gpu->lock);
    return status;
}
