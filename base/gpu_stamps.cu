/* A ring of events, made when they are first used. The GPU's clock is tied to the host's by a base event: it is renewed
 * when all stamps are read and the computing stream is idle, between steps, since the two clocks drift and
 * cudaEventElapsedTime is a float. A call that fails leaves its stamp as it was: whoever looks for faults finds the
 * device's elsewhere. */
#include "base/cuda.cuh"

extern "C" {
#include "base/clock.h"
#include "base/gpu_stamps.h"
}

#include <pthread.h>

#include <cstdlib>

enum { STAMPS_MAX = 8192, LOOK_BACK = 4, TRIES = 3 };

static const double CLOSE_S = 50e-6;

struct GpuStamps {
    cudaStream_t computing; /* set once */
    pthread_mutex_t lock;
    /* under lock */
    cudaEvent_t base, next_base;
    double base_s; /* 0: none yet */
    cudaEvent_t events[STAMPS_MAX];
    double *at_s[STAMPS_MAX];
    int first, count; /* outstanding */
};

/* The event came to pass between two looks at the clock. Where these lie far apart, as this thread was held up, the
 * base stays the old one, if there is one. */
static bool renew_base(GpuStamps *stamps) {
    for (int i = 0; i < TRIES; i++) {
        double before_s = clock_s();
        if (cudaEventRecord(stamps->next_base, stamps->computing) != cudaSuccess ||
            cudaEventSynchronize(stamps->next_base) != cudaSuccess)
            return false;
        double after_s = clock_s();
        if (after_s - before_s > CLOSE_S && (stamps->base_s > 0 || i < TRIES - 1))
            continue;
        cudaEvent_t base = stamps->base;
        stamps->base = stamps->next_base;
        stamps->next_base = base;
        stamps->base_s = (before_s + after_s) / 2;
        break;
    }
    return true;
}

GpuStamps *gpu_stamps_create(void *computing_stream) {
    GpuStamps *stamps = (GpuStamps *)calloc(1, sizeof *stamps);
    if (!stamps)
        return NULL;
    stamps->computing = (cudaStream_t)computing_stream;
    pthread_mutex_init(&stamps->lock, NULL);
    if (cudaEventCreate(&stamps->base) == cudaSuccess && cudaEventCreate(&stamps->next_base) == cudaSuccess &&
        renew_base(stamps))
        return stamps;
    gpu_stamps_destroy(stamps);
    return NULL;
}

void gpu_stamps_destroy(GpuStamps *stamps) {
    if (!stamps)
        return;
    for (int i = 0; i < STAMPS_MAX && stamps->events[i]; i++)
        cudaEventDestroy(stamps->events[i]);
    if (stamps->base)
        cudaEventDestroy(stamps->base);
    if (stamps->next_base)
        cudaEventDestroy(stamps->next_base);
    pthread_mutex_destroy(&stamps->lock);
    free(stamps);
}

/* The place of a stamp for at_s: that of one of the last few, which it replaces, or a new one; -1: there is none. */
static int place_for(GpuStamps *stamps, const double *at_s) {
    for (int back = 1; back <= LOOK_BACK && back <= stamps->count; back++) {
        int before = (stamps->first + stamps->count - back) % STAMPS_MAX;
        if (stamps->at_s[before] == at_s)
            return before;
    }
    int place = (stamps->first + stamps->count) % STAMPS_MAX;
    bool there = stamps->count < STAMPS_MAX &&
                 (stamps->events[place] || cudaEventCreate(&stamps->events[place]) == cudaSuccess);
    stamps->count += there;
    return there ? place : -1;
}

void gpu_stamp(Gpu *gpu, void *stream, double *at_s) {
    GpuStamps *stamps = gpu_stamps(gpu);
    pthread_mutex_lock(&stamps->lock);
    int place = place_for(stamps, at_s);
    if (place >= 0) {
        stamps->at_s[place] = at_s;
        cudaEventRecord(stamps->events[place], (cudaStream_t)stream);
    }
    pthread_mutex_unlock(&stamps->lock);
}

void gpu_stamps_hold(GpuStamps *stamps) { pthread_mutex_lock(&stamps->lock); }
void gpu_stamps_release(GpuStamps *stamps) { pthread_mutex_unlock(&stamps->lock); }

void gpu_read_stamps(Gpu *gpu) {
    GpuStamps *stamps = gpu_stamps(gpu);
    float ms;
    pthread_mutex_lock(&stamps->lock);
    for (; stamps->count > 0; stamps->count--) {
        cudaEvent_t event = stamps->events[stamps->first];
        if (cudaEventQuery(event) != cudaSuccess || cudaEventElapsedTime(&ms, stamps->base, event) != cudaSuccess)
            break;
        *stamps->at_s[stamps->first] = stamps->base_s + 1e-3 * (double)ms;
        stamps->first = (stamps->first + 1) % STAMPS_MAX;
    }
    if (stamps->count == 0 && cudaStreamQuery(stamps->computing) == cudaSuccess)
        renew_base(stamps);
    pthread_mutex_unlock(&stamps->lock);
}
