/* The options of section [optim], and the learning rate of each step:
 *
 *      lr |    /-------\                 warm-up: steps 0 .. warmup-1, lr/warmup .. lr
 *         |   /         \                decay:   progress goes from 0 at its first step to 1 at the last of the run;
 *     min |  /           \               cosine and linear decay from the end of warm-up on, wsd over
 *         +-------------------> step              the last decay_ratio * steps (and never during warm-up)
 *
 * Where warm-up leaves one step or none there is nothing to decay, and the rate stays at lr. */
#include "optim/adamw.h"

#include <math.h>

#define FIELD(name) offsetof(OptimConfig, name)
const Option optim_options[] = {
    {"lr", OPTION_FLOAT, FIELD(lr), "6e-4", 0, 10, NULL, "peak learning rate"},
    {"min_lr_ratio", OPTION_FLOAT, FIELD(min_lr_ratio), "0.1", 0, 1, NULL, "final learning rate over the peak"},
    {"warmup", OPTION_INT, FIELD(warmup), "0", 0, 1e9, NULL, "steps of linear warm-up"},
    {"schedule", OPTION_CHOICE, FIELD(schedule), "cosine", 0, 0, "cosine|linear|constant|wsd",
     "learning rate after warm-up; wsd is constant, then falls with 1 - sqrt"},
    {"decay_ratio", OPTION_FLOAT, FIELD(decay_ratio), "0.2", 0, 1, NULL, "wsd: last share of the steps, which decays"},
    {"beta1", OPTION_FLOAT, FIELD(beta1), "0.9", 0, 0.999999, NULL, "AdamW: decay of the first moment"},
    {"beta2", OPTION_FLOAT, FIELD(beta2), "0.95", 0, 0.999999, NULL, "AdamW: decay of the second moment"},
    {"eps", OPTION_FLOAT, FIELD(eps), "1e-8", 1e-15, 1, NULL, "AdamW: added to the root of the second moment"},
    {"weight_decay", OPTION_FLOAT, FIELD(weight_decay), "0.1", 0, 10, NULL, "decoupled, on 2-D tensors only"},
    {"grad_clip", OPTION_FLOAT, FIELD(grad_clip), "1.0", 0, 1e9, NULL, "clip the global gradient norm to this; 0: off"},
    {"zero", OPTION_INT, FIELD(zero), "0", 0, 1, NULL, "1: each rank keeps the moments of its share only (ZeRO-1)"},
};
#undef FIELD
const int optim_option_count = sizeof optim_options / sizeof optim_options[0];

/* Share of the peak that a decay has left, down to `least`. progress is in [0, 1]. */
static double decayed(int schedule, double progress, double least) {
    double left = 1;
    if (schedule == SCHEDULE_COSINE)
        left = 0.5 * (1 + cos(3.14159265358979323846 * progress));
    else if (schedule == SCHEDULE_LINEAR)
        left = 1 - progress;
    else if (schedule == SCHEDULE_WSD)
        left = 1 - sqrt(progress);
    return least + (1 - least) * left;
}

double learning_rate(const OptimConfig *config, int64_t step, int64_t steps) {
    if (step < config->warmup)
        return config->lr * (double)(step + 1) / (double)config->warmup;
    if (config->schedule == SCHEDULE_CONSTANT)
        return config->lr;
    int64_t first = config->warmup, last = steps - 1;
    if (config->schedule == SCHEDULE_WSD) {
        int64_t decay_start = steps - llround(config->decay_ratio * (double)steps);
        first = decay_start > first ? decay_start : first;
    }
    if (step <= first || last <= first)
        return config->lr;
    double progress = step < last ? (double)(step - first) / (double)(last - first) : 1;
    return config->lr * decayed(config->schedule, progress, config->min_lr_ratio);
}
