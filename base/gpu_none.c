/* A build without CUDA has no GPU. */
#include "base/gpu_range.h"
#include "base/gpu_stamps.h"

#include <assert.h>

int gpu_count(const char **why) {
    *why = "this build has no CUDA";
    return 0;
}

Status gpu_open(Gpu **gpu, int local_rank) {
    (void)local_rank;
    *gpu = NULL;
    return fault("this build has no CUDA: make CUDA=1 where the CUDA toolkit is");
}

/* There never is a Gpu that these could be given, but the NULL that gpu_close accepts. */
void gpu_use(const Gpu *gpu) { assert(!gpu), (void)gpu; }
void gpu_close(Gpu *gpu) { assert(!gpu), (void)gpu; }
const char *gpu_name(const Gpu *gpu) { return assert(!gpu), (void)gpu, ""; }
const char *gpu_pci(const Gpu *gpu) { return assert(!gpu), (void)gpu, ""; }
size_t gpu_memory_free_bytes(const Gpu *gpu) { return assert(!gpu), (void)gpu, (size_t)0; }
const Allocator *gpu_memory(Gpu *gpu) { return assert(!gpu), (void)gpu, &host_memory; }
void *gpu_stream(const Gpu *gpu) { return assert(!gpu), (void)gpu, NULL; }
Status gpu_finish(Gpu *gpu) { return assert(!gpu), (void)gpu, OK; }

void gpu_pin(Gpu *gpu, void *host, size_t bytes) { assert(!gpu), (void)gpu, (void)host, (void)bytes; }
void gpu_unpin(Gpu *gpu, void *host) { assert(!gpu), (void)gpu, (void)host; }
void gpu_fault(Gpu *gpu, const char *what, const char *why) { assert(!gpu), (void)gpu, (void)what, (void)why; }

void gpu_stamp(Gpu *gpu, void *stream, double *at_s) { assert(!gpu), (void)gpu, (void)stream, (void)at_s; }
void gpu_read_stamps(Gpu *gpu) { assert(!gpu), (void)gpu; }

void gpu_copy_out(Gpu *gpu, void *host, const void *device, size_t bytes, GpuDoneFn *done, void *user, int argument) {
    assert(!gpu), (void)gpu, (void)host, (void)device, (void)bytes, (void)done, (void)user, (void)argument;
}

void gpu_copy_in(Gpu *gpu, void *device, const void *host, size_t bytes) {
    assert(!gpu), (void)gpu, (void)device, (void)host, (void)bytes;
}

void gpu_range_begin(const char *name, int number) { (void)name, (void)number; }
void gpu_range_end(void) {}
