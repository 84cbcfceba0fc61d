/* The replay device.
 *
 * What an operation takes stands in a Profile, read from a file or made from the milliseconds of a micro-step; work_of
 * lists the operations for both. An operation that it does not know (the loss of validation, where no profile has it)
 * takes no time.
 *
 * Time. A GPU gets its operations in one queue and does not wait for the host in between. So each micro-step is a
 * time line that starts when embedding_forward is called, or when the operation before it ended:
 *
 *     start      + ms          + ms                + ms
 *       |--------->|------------>|------------------>|     deadlines
 *                    woken late: the next sleep is shorter
 *
 * An operation returns at its deadline or, where the cores were busy, later; deadlines do not move, so errors do not
 * add up. Only waiting for other ranks' parameters moves them, as it would keep a GPU waiting. It never spins and never
 * returns early. */
#define _GNU_SOURCE
#include "model/ops_replay.h"

#include "base/clock.h"
#include "base/profile.h"
#include "base/random.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct Replay {
    /* set once */
    Ops ops;
    int rank;
    uint64_t seed;
    /* of the thread that runs the model */
    Profile profile; /* times do not change; the place of the last look-up does */
    double deadline_s;
    bool filled;     /* gradients have been written */
    uint64_t drawn;  /* values so far */
};

#define MS(name, text) \
    {.key = #name, .type = OPTION_FLOAT, .offset = offsetof(ReplayConfig, name), .initial = "0", .min = 0, .max = 1e7, \
     .help = text}

const Option replay_options[] = {
    {.key = "profile", .type = OPTION_STRING, .offset = offsetof(ReplayConfig, profile), .initial = "",
     .help = "times of each operation, from log.profile of a real run"},
    MS(forward_ms, "without profile: one micro-step's forward, spread over the layers by FLOPs"),
    MS(backward_ms, "without profile: its backward, spread over head and layers by FLOPs"),
};
const int replay_option_count = sizeof replay_options / sizeof *replay_options;

/* ---- what there is to do in a micro-step ---- */

typedef struct Work {
    const char *op;
    int in, out;
    double flops; /* per row, as gpt2_flops_per_token counts them */
    bool backward;
} Work;

enum { LAYER_WORK = 12, OUTER_WORK = 5 };

/* The operations of each layer, and those outside. What is called twice in a layer stands here once: it has no
 * FLOPs. */
static void work_of(const Gpt2Config *config, int T, Work *layer, Work *outer) {
    int C = config->channels, V = config->vocab;
    double linear = 2.0 * C * C, attention = 2.0 * T * C;
    const Work layers[LAYER_WORK] = {
        {"layernorm_forward", C, C, 0, false},
        {"linear_forward", C, 3 * C, 3 * linear, false},
        {"attention_forward", T, C, attention, false},
        {"linear_forward", C, C, linear, false},
        {"linear_forward", C, 4 * C, 4 * linear, false},
        {"linear_forward", 4 * C, C, 4 * linear, false},
        {"linear_backward", 4 * C, C, 8 * linear, true},
        {"linear_backward", C, 4 * C, 8 * linear, true},
        {"layernorm_backward", C, C, 0, true},
        {"linear_backward", C, C, 2 * linear, true},
        {"attention_backward", T, C, 2 * attention, true},
        {"linear_backward", C, 3 * C, 6 * linear, true},
    };
    const Work outside[OUTER_WORK] = {
        {"embedding_forward", C, C, 0, false},
        {"layernorm_forward", C, C, 0, false},
        {"head_backward", C, V, 6.0 * C * V, true},
        {"layernorm_backward", C, C, 0, true},
        {"embedding_backward", C, C, 0, true},
    };
    memcpy(layer, layers, sizeof layers);
    memcpy(outer, outside, sizeof outside);
}

static double flops_of(const Work *work, int count, bool backward) {
    double flops = 0;
    for (int i = 0; i < count; i++)
        flops += work[i].backward == backward ? work[i].flops : 0;
    return flops;
}

/* Every operation of a micro-step of `rows` positions, in proportion to its FLOPs. */
static void spread(Profile *profile, const ReplayConfig *config, const Gpt2Config *model, int T, int rows) {
    Work layer[LAYER_WORK], outer[OUTER_WORK];
    double ms_per_flop[2];
    work_of(model, T, layer, outer);
    for (int backward = 0; backward < 2; backward++) {
        double flops = model->layers * flops_of(layer, LAYER_WORK, backward) + flops_of(outer, OUTER_WORK, backward);
        ms_per_flop[backward] = (backward ? config->backward_ms : config->forward_ms) / flops;
    }
    for (int l = 0; l < model->layers; l++)
        for (const Work *w = layer; w < layer + LAYER_WORK; w++)
            profile_add(profile, w->op, l, w->in, w->out, rows, w->flops * ms_per_flop[w->backward]);
    for (const Work *w = outer; w < outer + OUTER_WORK; w++)
        profile_add(profile, w->op, -1, w->in, w->out, rows, w->flops * ms_per_flop[w->backward]);
}

static Status check_has(Profile *profile, const char *path, const Work *work, int layer) {
    if (profile_find(profile, work->op, layer, work->in, work->out))
        return OK;
    return bad_input("%s: no %s %d %d of layer %d: not a profile of the model and seq_len that are to be replayed",
                     path, work->op, work->in, work->out, layer);
}

static Status read_profile(Profile *profile, const char *path, const Gpt2Config *model, int T) {
    Work layer[LAYER_WORK], outer[OUTER_WORK];
    work_of(model, T, layer, outer);
    TRY(profile_read(profile, path));
    for (int i = 0; i < OUTER_WORK; i++)
        TRY(check_has(profile, path, &outer[i], -1));
    for (int l = 0; l < model->layers; l++)
        for (int i = 0; i < LAYER_WORK; i++)
            TRY(check_has(profile, path, &layer[i], l));
    return OK;
}

/* ---- time ---- */

static void sleep_until(double deadline_s) {
    struct timespec until = {.tv_sec = (time_t)deadline_s};
    until.tv_nsec = (long)ceil(1e9 * (deadline_s - (double)until.tv_sec));
    if (until.tv_nsec >= 1000000000)
        until.tv_sec++, until.tv_nsec -= 1000000000;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        ;
}

static void take_time(OpsContext *context, const char *op, int in, int out, int rows) {
    Replay *replay = context->state;
    const ProfileEntry *entry = profile_find(&replay->profile, op, context->layer, in, out);
    if (!entry || entry->ms <= 0)
        return;
    replay->deadline_s += 1e-3 * entry->ms * rows / entry->rows;
    sleep_until(replay->deadline_s);
}

void replay_waited(Replay *replay, double since_s) { replay->deadline_s += clock_s() - since_s; }

static void start_line(Replay *replay) {
    double now_s = clock_s();
    replay->deadline_s = now_s > replay->deadline_s ? now_s : replay->deadline_s;
}

/* ---- gradients ---- */

/* The sum of the four 16-bit parts of 64 random bits has mean 2 * 65535 and, nearly, deviation 65536 / sqrt(3). */
static void fill(Replay *replay, float *out, size_t count) {
    const float scale = 1e-4f * 1.7320508f / 65536.0f;
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = random_bits(replay->seed, (uint64_t)replay->rank, replay->drawn + i);
        int sum = (int)(bits & 0xffff) + (int)(bits >> 16 & 0xffff) + (int)(bits >> 32 & 0xffff) + (int)(bits >> 48);
        out[i] = scale * (float)(sum - 2 * 65535);
    }
    replay->drawn += count;
}

/* out f32[rows][cols], of which `padding` more rows behind are 0; NULL is allowed. */
static void fill_once(OpsContext *context, float *out, int rows, int cols, int padding, bool accumulate) {
    Replay *replay = context->state;
    if (!out || accumulate || replay->filled)
        return;
    size_t count = (size_t)rows * (size_t)cols;
    fill(replay, out, count);
    memset(out + count, 0, (size_t)padding * (size_t)cols * sizeof(float));
}

/* ---- operations ---- */

static Status available(void) { return OK; }

static void prepare(OpsContext *context, const OpsLimits *limits) {
    (void)limits;
    context->threads = 1;
    context->scratch_bytes = 0;
}

static void upload(OpsContext *context, void *to, const void *from, size_t bytes) {
    (void)context, (void)to, (void)from, (void)bytes;
}

static void download(OpsContext *context, void *to, const void *from, size_t bytes) {
    (void)context, (void)from;
    memset(to, 0, bytes);
}

static void read_acts(OpsContext *context, float *host, const Act *device, size_t elems) {
    download(context, host, device, elems * sizeof *host);
}

static void clear(OpsContext *context, void *device, size_t bytes) {
    (void)context;
    memset(device, 0, bytes);
}

static void embedding_forward(OpsContext *context, float *x, const int *tokens, const float *wte, const float *wpe,
                              int B, int T, int C) {
    (void)x, (void)tokens, (void)wte, (void)wpe;
    start_line(context->state);
    take_time(context, __func__, C, C, B * T);
}

static void embedding_backward(OpsContext *context, float *dwte, float *dwpe, const float *dx, const int *tokens, int B,
                               int T, int C, int maxT, bool accumulate) {
    (void)dwte, (void)dx, (void)tokens;
    Replay *replay = context->state;
    fill_once(context, dwpe, T, C, maxT - T, accumulate);
    replay->filled |= !accumulate;
    take_time(context, __func__, C, C, B * T);
}

static void layernorm_forward(OpsContext *context, float *y, float *mean, float *rstd, const float *x, const float *w,
                              const float *b, int rows, int C) {
    (void)y, (void)mean, (void)rstd, (void)x, (void)w, (void)b;
    take_time(context, __func__, C, C, rows);
}

static void layernorm_backward(OpsContext *context, float *dx, float *dw, float *db, const float *dy, const float *x,
                               const float *mean, const float *rstd, const float *w, int rows, int C, bool residual,
                               bool accumulate) {
    (void)dx, (void)dy, (void)x, (void)mean, (void)rstd, (void)w, (void)residual;
    fill_once(context, dw, 1, C, 0, accumulate);
    fill_once(context, db, 1, C, 0, accumulate);
    take_time(context, __func__, C, C, rows);
}

static void linear_forward(OpsContext *context, float *y, float *gelu, const float *x, const float *w, const float *b,
                           const float *residual, int rows, int C, int OC) {
    (void)y, (void)gelu, (void)x, (void)w, (void)b, (void)residual;
    take_time(context, __func__, C, OC, rows);
}

static void gelu_forward(OpsContext *context, float *y, const float *x, int rows, int C) {
    (void)y, (void)x;
    take_time(context, __func__, C, C, rows);
}

static void linear_backward(OpsContext *context, const LinearGrads *grads, const float *dy, const float *x,
                            const float *w, int rows, int C, int OC) {
    (void)dy, (void)x, (void)w;
    fill_once(context, grads->dw, OC, C, 0, grads->accumulate);
    fill_once(context, grads->db, 1, OC, 0, grads->accumulate);
    take_time(context, __func__, C, OC, rows);
}

static void attention_forward(OpsContext *context, float *y, float *lse, const float *qkv, int B, int T, int C,
                              int NH) {
    (void)y, (void)lse, (void)qkv, (void)NH;
    take_time(context, __func__, T, C, B * T);
}

static void attention_backward(OpsContext *context, float *dqkv, const float *dy, const float *y, const float *qkv,
                               const float *lse, int B, int T, int C, int NH) {
    (void)dqkv, (void)dy, (void)y, (void)qkv, (void)lse, (void)NH;
    take_time(context, __func__, T, C, B * T);
}

static void attention_cached(OpsContext *context, float *y, float *cache, const float *qkv, int first, int count, int C,
                             int NH) {
    (void)context, (void)y, (void)cache, (void)qkv, (void)first, (void)count, (void)C, (void)NH;
}

static void head_loss(OpsContext *context, float *losses, float *logits, const float *x, const float *wte,
                      const int *targets, int rows, int C, int V, int Vp) {
    (void)losses, (void)logits, (void)x, (void)wte, (void)targets, (void)Vp;
    take_time(context, __func__, C, V, rows);
}

static void head_backward(OpsContext *context, float *losses, float *logits, float *dx, float *dwte, const float *x,
                          const float *wte, const int *targets, int rows, int C, int V, int Vp, float scale,
                          bool accumulate) {
    (void)losses, (void)logits, (void)dx, (void)x, (void)wte, (void)targets, (void)scale;
    fill_once(context, dwte, V, C, Vp - V, accumulate);
    take_time(context, __func__, C, V, rows);
}

static double mean(OpsContext *context, const float *values, int count) {
    (void)context, (void)values, (void)count;
    return NAN;
}

static const Ops table = {
    .name = "replay",
    .act_bytes = sizeof(float),
    .head_logits = 26 << 20,
    .available = available,
    .prepare = prepare,
    .upload = upload,
    .download = download,
    .read = read_acts,
    .clear = clear,
    .embedding_forward = embedding_forward,
    .embedding_backward = embedding_backward,
    .layernorm_forward = layernorm_forward,
    .layernorm_backward = layernorm_backward,
    .linear_forward = linear_forward,
    .gelu_forward = gelu_forward,
    .linear_backward = linear_backward,
    .attention_forward = attention_forward,
    .attention_backward = attention_backward,
    .attention_cached = attention_cached,
    .head_loss = head_loss,
    .head_backward = head_backward,
    .mean = mean,
};

/* ---- life ---- */

static Status set_times(Replay *replay, const ReplayConfig *config, const Gpt2Config *model,
                        const Gpt2Options *options) {
    bool have_ms = config->forward_ms > 0 || config->backward_ms > 0;
    if (config->profile[0] && have_ms)
        return bad_input("replay.profile: expected either a profile or forward_ms and backward_ms, found both");
    if (config->profile[0])
        return read_profile(&replay->profile, config->profile, model, options->max_T);
    if (!have_ms)
        return bad_input("replay.backward_ms: replaying needs replay.profile, or forward_ms and backward_ms");
    spread(&replay->profile, config, model, options->max_T, options->max_B * options->max_T);
    return OK;
}

Status replay_create(Replay **out, const ReplayConfig *config, const Gpt2Config *model, const Gpt2Options *options,
                     int rank, uint64_t seed) {
    Replay *replay = *out = calloc(1, sizeof *replay);
    if (!replay)
        return fault("out of memory for the replay device");
    replay->ops = table;
    replay->ops.state = replay;
    replay->rank = rank;
    replay->seed = seed;
    Status status = set_times(replay, config, model, options);
    if (status != OK) {
        replay_destroy(replay);
        *out = NULL;
    }
    return status;
}

void replay_destroy(Replay *replay) {
    if (!replay)
        return;
    profile_free(&replay->profile);
    free(replay);
}

const Ops *replay_ops(const Replay *replay) { return &replay->ops; }

/* ---- memory ---- */

/* One page in front, the only one that can be touched, keeps the size. */
static void *reserve(void *context, size_t bytes) {
    (void)context;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), size = page + bytes;
    char *base = size > bytes ? mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                              : MAP_FAILED;
    if (base == MAP_FAILED)
        return NULL;
    if (mprotect(base, page, PROT_READ | PROT_WRITE) != 0) {
        munmap(base, size);
        return NULL;
    }
    memcpy(base, &size, sizeof size);
    return base + page;
}

static void release(void *context, void *memory) {
    (void)context;
    if (!memory)
        return;
    char *base = (char *)memory - sysconf(_SC_PAGESIZE);
    size_t size;
    memcpy(&size, base, sizeof size);
    munmap(base, size);
}

const Allocator replay_memory = {reserve, release, NULL};
