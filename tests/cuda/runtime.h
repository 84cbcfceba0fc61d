/* Between the parts of the stand-in for the CUDA runtime. */
#ifndef TESTS_CUDA_RUNTIME_H
#define TESTS_CUDA_RUNTIME_H

#include <cuda_runtime.h>

#include <functional>

namespace cudart {

/* What a call returns before it does anything: the error that sticks or that a test asked for, else success. */
cudaError_t enter(const char *function);
/* Remembered for cudaGetLastError. */
cudaError_t failed(cudaError_t error);

/* Does `work` when the stream comes to it: now, or late. */
void enqueue(cudaStream_t stream, std::function<void()> work);
/* Goes on with the stream when `ready` says so, which holds from then on and takes no lock. */
void enqueue_until(cudaStream_t stream, std::function<bool()> ready);
/* Of streams that are being captured, cudart_graph.cpp: takes work that would be put in one; false: it is none. */
bool gather(cudaStream_t stream, const std::function<void()> &work);
bool is_captured(cudaStream_t stream);
/* Whether a call cannot be made because the stream, or one by this thread, is being captured: that is then spoilt. */
bool spoils(cudaStream_t stream);
bool spoils_own();
int graphs_kept();
/* Returns when all streams of the calling thread's device are empty. */
void drain();
/* Returns when nothing of the device is being done: for calls that give its error that sticks. */
void wait_for_running(int device);

int own_device(); /* the calling thread's */
bool is_stuck(int device);

/* Whether [at, at + bytes) lies within one allocation of the device's memory. */
bool on_device(const volatile void *at, size_t bytes);
/* Or within pinned memory of the host. */
bool device_can_read(const volatile void *at);
int pinned_parts();

/* The largest that a kernel was allowed to take by cudaFuncSetAttribute. */
size_t dynamic_shared_allowed();

} // namespace cudart

/* First in each call that may fail. */
#define ENTER()                                           \
    do {                                                  \
        if (cudaError_t error_ = cudart::enter(__func__)) \
            return error_;                                \
    } while (0)

#endif
