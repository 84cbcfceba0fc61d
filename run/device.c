#include "run/device.h"

#include <string.h>

enum { WARM_UP_STEPS = 2 };

Status device_open(Device *device, const Settings *settings, const Gpt2Config *model, const Gpt2Options *options,
                   int rank) {
    *device = (Device){.ops = &ops_cpu, .memory = &host_memory, .computes = true};
    if (strcmp(option_choice(run_devices, settings->run.device), "replay") == 0) {
        TRY(replay_create(&device->replay, &settings->replay, model, options, rank, (uint64_t)settings->run.seed));
        device->ops = replay_ops(device->replay);
        device->memory = &replay_memory;
        device->computes = false;
    }
    if (rank == 0 && settings->log.profile[0]) {
        device->profile_path = settings->log.profile;
        timed_ops_init(&device->timed, device->ops, timed_ops_profile, &device->profile);
        device->ops = &device->timed.ops;
    }
    return OK;
}

void device_close(Device *device) {
    replay_destroy(device->replay);
    profile_free(&device->profile);
}

void device_step_done(Device *device, int64_t step) {
    if (device->profile_path && step == WARM_UP_STEPS)
        profile_clear(&device->profile);
}

Status device_write_profile(const Device *device) {
    return device->profile_path ? profile_write(&device->profile, device->profile_path) : OK;
}
