/* An NVIDIA GPU, for code that includes no CUDA header. A build without CUDA has none (base/gpu_none.c).
 *
 * One Gpu belongs to one rank. Its work stands in one stream, in the order of the calls; a second stream copies to and
 * from the host beside it. Faults of the device stick: operations go on without meaning, and gpu_finish tells.
 *
 *     stream   | forward | backward layer 11 | backward layer 10 | ...            | update
 *     copies             (after it)  | gradients of 11 to the host | of 10 | ...  | means back | (before it)      */
#ifndef BASE_GPU_H
#define BASE_GPU_H

#include "base/error.h"
#include "base/memory.h"

#include <stddef.h>

typedef struct Gpu Gpu;

/* How many GPUs this process may use. 0: *why says why in a few words (no driver, a driver too old for this build, none
 * visible); it points to a constant. */
int gpu_count(const char **why);

/* The card local_rank modulo their number. FAULT with one line that says what to do: none, too old (below sm_80), in use
 * exclusively, out of memory. */
Status gpu_open(Gpu **gpu, int local_rank);
void gpu_close(Gpu *gpu); /* waits for its work; accepts NULL */

/* Calls by the calling thread concern this Gpu from now on. gpu_open does that too. */
void gpu_use(const Gpu *gpu);

const char *gpu_name(const Gpu *gpu); /* "NVIDIA H200, sm_90, 139.8 GiB" */
const char *gpu_pci(const Gpu *gpu);  /* "0000:19:00.0", its place on the bus, as base/gpu_power.h wants it */
size_t gpu_memory_free_bytes(const Gpu *gpu);

/* Zeroed memory of the device, 256-byte aligned. Its context is the Gpu. */
const Allocator *gpu_memory(Gpu *gpu);

/* Host memory that already exists, so that copies of it can go on by themselves; where that fails copies are only
 * slower. */
void gpu_pin(Gpu *gpu, void *host, size_t bytes);
void gpu_unpin(Gpu *gpu, void *host);

/* cudaStream_t of computing. */
void *gpu_stream(const Gpu *gpu);

struct GpuStamps *gpu_stamps(const Gpu *gpu); /* base/gpu_stamps.h */

/* On the copying stream, behind what is in the computing stream now. When the bytes are there, and if done is not NULL,
 * done(user, argument) is called from a thread of the driver; it must not call gpu_* functions. After a fault of the
 * device it may never be called: whoever waits for it calls gpu_finish first, and when that fails it never is. */
typedef void GpuDoneFn(void *user, int argument);
void gpu_copy_out(Gpu *gpu, void *host, const void *device, size_t bytes, GpuDoneFn *done, void *user, int argument);

/* On the copying stream, behind what is in the computing stream now; what is put in the computing stream later waits
 * for it. host may not change before gpu_finish. */
void gpu_copy_in(Gpu *gpu, void *device, const void *host, size_t bytes);

/* Within the device's memory, in the computing stream. */
void gpu_copy(Gpu *gpu, void *to, const void *from, size_t bytes);

/* Returns when both streams are empty. FAULT with one line on the first fault since gpu_open: the streams may be at
 * work then, but no `done` is called any more, nor at work. Any thread. */
Status gpu_finish(Gpu *gpu);

/* Who gives up with work outstanding: when it returns, no `done` is called any more, nor at work. Any thread. */
void gpu_hush(Gpu *gpu);

/* For a thread of the driver: done(user, argument), unless the Gpu is hushed. */
void gpu_call_back(Gpu *gpu, GpuDoneFn *done, void *user, int argument);

/* Notes a fault that code with CUDA headers saw, unless there is one: `what` was being done, `why` in words. Any
 * thread. */
void gpu_fault(Gpu *gpu, const char *what, const char *why);

#endif
