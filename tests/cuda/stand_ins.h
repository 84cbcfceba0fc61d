/* What a test can ask of the emulator and of the stand-ins for the CUDA runtime (CUDA=emulate). Each holds for the
 * whole process. The environment sets the same before the first call: EMULATOR_SEED=7, CUDART_LATE=1, CUDART_DEVICES=0,
 * CUDART_DRIVER=11020 (0: none), CUDART_ARCH=75, CUDART_MEMORY_MIB=64, CUDART_FAIL=cudaMalloc:3:2 (function:call:error;
 * function@1:call:error counts, and fails, those of device 1 alone).
 *
 * NCCL_FAIL=ncclGroupEnd:1:3:2 (function:rank:call:result): that rank's third call gives ncclSystemError; 7 is
 * ncclInProgress: it never comes to an end. "kernel" stands for what a group puts in its stream, which then waits for
 * ever (CUDART_LATE=1). */
#ifndef TESTS_CUDA_STAND_INS_H
#define TESTS_CUDA_STAND_INS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The order in which the threads of a block take turns: 0, in order; else at random by this seed. */
void emulator_seed(uint64_t seed);

/* Streams. false (at the start): all is done when the call that asks for it returns. true: by a thread of the driver,
 * which begins when a call waits for something, or when nothing was asked for some milliseconds. It goes on only as far
 * as must be, and takes streams that may go on in an order by the emulator's seed. Not while work is queued. */
void cudart_late(bool late);

/* The devices there are (at the start: 1), all alike. */
void cudart_devices(int count);
void cudart_device(int major, int minor, size_t memory_bytes);

/* The call-th call of `function` from now on (1: the next) returns `error`, a cudaError_t. A kernel's launch is
 * "cudaLaunchKernel". Errors of the device itself (700 and up) stick: all later calls return them. NULL: nothing fails
 * any more, nothing sticks. */
void cudart_fail(const char *function, int call, int error);

/* What cudaDriverGetVersion says; 0: there is no driver. At the start what the headers are of. */
void cudart_driver(int version);

/* What is not given back. */
size_t cudart_memory_used(void);
int cudart_objects(void); /* streams, events, pinned parts of the host's memory */

#ifdef __cplusplus
}
#endif
#endif
