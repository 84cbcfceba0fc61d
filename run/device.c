#include "run/device.h"

#include "base/clock.h"
#include "base/gpu_stamps.h"

#ifdef HAVE_CUDA
#include "model/ops_cuda.h"
#include "optim/optim_cuda.h"
#endif

#include <stdio.h>
#include <string.h>

enum { WARM_UP_STEPS = 2, SIDE_MAX = 8192 };

static bool chosen(const char *choices, int index, const char *name) {
    return strcmp(option_choice(choices, index), name) == 0;
}

#ifdef HAVE_CUDA
/* Says in the header which attention runs. */
static void use_cudnn(Device *device, bool deterministic) {
    const char *why = "";
    const Gpt2Config *m = &device->model;
    bool used_cudnn = cuda_ops_use_cudnn(device->cuda_ops, deterministic, device->options.max_B, device->options.max_T,
                                         m->channels, m->heads, &why);
    snprintf(device->attention, sizeof device->attention, "%s%s", used_cudnn ? "cuDNN" : "our own: ",
             !used_cudnn ? why : deterministic ? "" : ", not deterministic");
}

/* Nothing on the GPU yet. */
static Status open_ops(Device *device, const Settings *settings) {
    CudaDtype dtype = (CudaDtype)settings->train.dtype; /* in the order of train_dtypes */
    TRY(cuda_ops_open(&device->cuda_ops, device->gpu, dtype));
    TRY(cuda_optim_create(&device->cuda_optim, device->gpu, NULL, (uint64_t)settings->run.seed));
    if (dtype == CUDA_BF16)
        use_cudnn(device, settings->run.deterministic);
    if (settings->run.cuda_graphs)
        TRY(cuda_ops_use_graphs(device->cuda_ops));
    device->ops = cuda_ops(device->cuda_ops);
    device->optim = cuda_optim(device->cuda_optim);
    return OK;
}

static Status open_gpu(Device *device, const Settings *settings, bool automatic, int local_rank) {
    const char *why;
    if (automatic && gpu_count(&why) == 0) {
        snprintf(device->text, sizeof device->text, "no GPU was found: %s, cpu", why);
        return OK;
    }
    if (gpu_open(&device->gpu, local_rank) != OK)
        return fault("%s; run.device=cpu does without", error_line());
    device->kind = DEVICE_CUDA;
    device->memory = gpu_memory(device->gpu);
    device->power = gpu_power_open(gpu_pci(device->gpu));
    snprintf(device->text, sizeof device->text, "%s, %s%s", gpu_name(device->gpu),
             option_choice(train_dtypes, settings->train.dtype), settings->run.cuda_graphs ? ", CUDA graphs" : "");
    return open_ops(device, settings);
}

static Status connect_gpu(Device *device, const float *params, int64_t elems) {
    TRY(cuda_ops_connect(device->cuda_ops, params, elems));
    cuda_optim_set_weights(device->cuda_optim, cuda_ops_weights(device->cuda_ops));
    return OK;
}

/* By products of our own matrices' kind: squares of the widest layer's side. */
static void measure_peak(Device *device) {
    int side = 4 * device->model.channels < SIDE_MAX ? 4 * device->model.channels : SIDE_MAX;
    device->peak_tflops = 1e-12 * cuda_ops_product_flops_per_s(device->cuda_ops, side);
    snprintf(device->peak_text, sizeof device->peak_text, "%.4g TFLOP/s, measured: %s products of %d x %d x %d",
             device->peak_tflops, option_choice(train_dtypes, device->settings->train.dtype), side, side, side);
}

size_t device_bytes(const Device *device, int64_t elems, int batch) {
    return device->cuda_ops ? cuda_ops_bytes(device->cuda_ops, elems, batch) : 0;
}

static void close_gpu(Device *device) {
    cuda_optim_destroy(device->cuda_optim);
    cuda_ops_destroy(device->cuda_ops);
    gpu_power_close(device->power);
    gpu_close(device->gpu);
}
#else
static Status open_gpu(Device *device, const Settings *settings, bool automatic, int local_rank) {
    (void)device, (void)local_rank;
    return automatic ? OK : config_error(settings->config, "run.device", "this program was built without CUDA");
}
static Status connect_gpu(Device *device, const float *params, int64_t elems) {
    (void)device, (void)params, (void)elems;
    return OK;
}
static void measure_peak(Device *device) { (void)device; }
size_t device_bytes(const Device *device, int64_t elems, int batch) {
    (void)device, (void)elems, (void)batch;
    return 0;
}
static void close_gpu(Device *device) { (void)device; }
#endif

static Status open_replay(Device *device, const Settings *settings, const Gpt2Config *model,
                          const Gpt2Options *options, int rank) {
    TRY(replay_create(&device->replay, &settings->replay, model, options, rank, (uint64_t)settings->run.seed));
    device->kind = DEVICE_REPLAY;
    snprintf(device->text, sizeof device->text, "replay");
    device->ops = replay_ops(device->replay);
    device->memory = &replay_memory;
    device->computes = false;
    return OK;
}

Status device_open(Device *device, const Settings *settings, const Gpt2Config *model, const Gpt2Options *options,
                   int rank, int local_rank) {
    bool automatic = chosen(run_devices, settings->run.device, "auto");
    *device = (Device){.kind = DEVICE_CPU, .text = "cpu", .ops = &ops_cpu, .optim = &optim_cpu,
                       .memory = &host_memory, .computes = true, .settings = settings, .model = *model,
                       .options = *options, .root = rank == 0};
    if (chosen(run_devices, settings->run.device, "replay"))
        TRY(open_replay(device, settings, model, options, rank));
    if (automatic || chosen(run_devices, settings->run.device, "cuda"))
        TRY(open_gpu(device, settings, automatic, local_rank));
    if (device->kind != DEVICE_CUDA && !chosen(train_dtypes, settings->train.dtype, "f32"))
        return config_error(settings->config, "train.dtype", "%s needs a GPU, the device is: %s",
                            option_choice(train_dtypes, settings->train.dtype), device->text);
    if (device->kind != DEVICE_CUDA && !settings->run.deterministic)
        return config_error(settings->config, "run.deterministic", "expected yes: all else needs a GPU, the device is: "
                            "%s", device->text);
    if (device->kind != DEVICE_CUDA && settings->run.cuda_graphs)
        return config_error(settings->config, "run.cuda_graphs", "expected no: they need a GPU, the device is: %s",
                            device->text);
    return OK;
}

static void find_peak(Device *device) {
    device->peak_tflops = device->settings->run.peak_tflops;
    if (device->peak_tflops > 0)
        snprintf(device->peak_text, sizeof device->peak_text, "%.4g TFLOP/s, run.peak_tflops", device->peak_tflops);
    else if (device->gpu)
        measure_peak(device);
}

static void stamp_op(void *device, double *at_s) { device_stamp(device, at_s); }

Status device_connect(Device *device, const float *params, int64_t elems) {
    if (device->gpu)
        TRY(connect_gpu(device, params, elems));
    if (device->root)
        find_peak(device);
    if (device->root && device->settings->log.profile[0]) {
        device->profile_path = device->settings->log.profile;
        timed_ops_init(&device->timed, device->ops, timed_ops_profile, &device->profile);
        if (device->gpu)
            TRY(timed_ops_use_stamps(&device->timed, stamp_op, device));
        device->ops = &device->timed.ops;
    }
    return OK;
}

void device_stamp(const Device *device, double *at_s) {
    if (device->gpu)
        gpu_stamp(device->gpu, gpu_stream(device->gpu), at_s);
    else
        *at_s = clock_s();
}

void device_read_stamps(const Device *device) {
    if (device->gpu)
        gpu_read_stamps(device->gpu);
}

void device_waited(const Device *device, double since_s) {
    if (device->replay)
        replay_waited(device->replay, since_s);
}

void device_close(Device *device) {
    close_gpu(device);
    replay_destroy(device->replay);
    timed_ops_free(&device->timed);
    profile_free(&device->profile);
}

void device_step_done(Device *device, int64_t step) {
    device_read_stamps(device);
    if (device->profile_path)
        timed_ops_settle(&device->timed);
    if (device->profile_path && step == WARM_UP_STEPS)
        profile_clear(&device->profile);
}

Status device_write_profile(const Device *device) {
    return device->profile_path ? profile_write(&device->profile, device->profile_path) : OK;
}
