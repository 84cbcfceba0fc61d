/* Where a run's model is computed: run.device, with the watch that log.profile puts on it. */
#ifndef RUN_DEVICE_H
#define RUN_DEVICE_H

#include "base/gpu.h"
#include "base/gpu_power.h"
#include "base/profile.h"
#include "model/ops_replay.h"
#include "model/ops_timed.h"
#include "optim/adamw.h"
#include "run/settings.h"

typedef enum DeviceKind { DEVICE_CPU, DEVICE_CUDA, DEVICE_REPLAY } DeviceKind;

typedef struct Device {
    DeviceKind kind;
    char text[512];          /* for the header: which, and for run.device=auto why not a GPU */
    char attention[256];     /* whose attention runs, "" where there is no choice */
    double peak_tflops;      /* of a rank's device, from device_connect on; 0: not known */
    char peak_text[96];      /* the same, and where from */
    const Ops *ops;          /* before device_connect for sizes only, after it for gpt2_create */
    const OptimOps *optim;   /* for adamw_create and norm_plan_create, after device_connect */
    const Allocator *memory; /* for its activations and all that it updates */
    bool computes;           /* false: replay. There is nothing to update, sample or save */
    Gpu *gpu;                /* NULL unless DEVICE_CUDA: memory is the host's */
    GpuPower *power;         /* NULL where it is not known */
    /* private */
    const Settings *settings;
    Gpt2Config model;
    Gpt2Options options;
    bool root;
    Replay *replay;
    struct CudaOps *cuda_ops;
    struct CudaOptim *cuda_optim;
    TimedOps timed;
    Profile profile;
    const char *profile_path; /* NULL: nothing is recorded */
} Device;

/* rank and, among those of this node, local_rank, which says whose GPU is whose. The device must not move afterwards.
 * BAD_INPUT when the settings ask for what the device or this build cannot do, FAULT when there is no GPU to be had;
 * run.device=auto takes a GPU where there is one. */
Status device_open(Device *device, const Settings *settings, const Gpt2Config *model, const Gpt2Options *options,
                   int rank, int local_rank);

/* params f32[elems], in the device's memory, is what the model will work on. Allocates device_bytes of its memory, with
 * the settings' batch: what operations need beside their arguments. */
Status device_connect(Device *device, const float *params, int64_t elems);
size_t device_bytes(const Device *device, int64_t elems, int batch);

/* *at_s becomes when the device has done what it was asked for so far, on clock_s's scale: no later than
 * device_read_stamps, if the device is done by then. */
void device_stamp(const Device *device, double *at_s);
void device_read_stamps(const Device *device);

/* The host has waited since since_s before it could give the device more to do. For replay, which has no queue to run
 * dry. */
void device_waited(const Device *device, double since_s);

void device_close(Device *device); /* accepts a zeroed one */

/* After each step: the first ones, which warm up, are left out of the profile. */
void device_step_done(Device *device, int64_t step);

/* At the end: writes the profile, if one was recorded. */
Status device_write_profile(const Device *device);

#endif
