/* The sum is exact but for what libraries take by themselves (BLAS, MPI, cuBLAS' kernels, NCCL's channels), for which
 * RUNTIME_BYTES of a process are left over, and, on the host, residuals of error feedback, which come as they are first
 * written and are estimated from above.
 *
 * The largest train.batch is found by halving: only activations, cuDNN's workspace and tokens depend on it. cuDNN has
 * planned for the run's own batch; its workspace for others is taken to be in proportion. */
#define _DEFAULT_SOURCE
#include "run/memory.h"

#include "base/machine.h"
#include "run/placement.h"
#include "run/trainer.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RUNTIME_BYTES = 256 << 20, BATCH_MAX = 65536, ROWS_MAX = 1 << 30, ADVICE_BYTES = 192 };

static double gb(size_t bytes) { return 1e-9 * (double)bytes; }

/* Ranks that are threads share a process. */
static size_t runtime_bytes(const Trainer *t) {
    bool threads = strcmp(comm_transport_name(t->comm), "loop") == 0;
    return RUNTIME_BYTES / (size_t)(threads ? t->ranks : 1);
}

size_t memory_total(const RunMemory *memory) {
    return memory->params + memory->grads + memory->moments + memory->activations + memory->work;
}

/* What grows with the batch, where the model is computed. */
static size_t batch_bytes(const Trainer *t, int64_t batch) {
    Gpt2Options options = trainer_model_options(t);
    options.max_B = (int)batch;
    size_t activations = t->device.computes ? gpt2_activation_bytes(&t->model_config, &options, t->device.ops) : 0;
    return activations + device_bytes(&t->device, t->table.elems, (int)batch);
}

/* The largest batch that takes at most so much. 0: none. */
static int64_t largest_batch(const Trainer *t, size_t bytes) {
    int64_t low = 0, high = ROWS_MAX / t->settings->train.seq_len;
    high = high < BATCH_MAX ? high : BATCH_MAX;
    while (low < high) {
        int64_t middle = high - (high - low) / 2;
        if (batch_bytes(t, middle) <= bytes)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* "train.batch = 12 fits", and what else there is to do. */
static const char *advice(const Trainer *t, int64_t fits, char *text, size_t size) {
    bool most = t->settings->train.recompute == RECOMPUTE_LAYERS;
    size_t model = t->memory.params + t->memory.grads + t->memory.moments;
    if (model > t->memory.available)
        snprintf(text, size, "a rank's parameters, gradients and moments alone take %.2f GB; %sa smaller model, or "
                 "more %s with optim.zero=1", gb(model), comm_host_ranks(t->comm) > 1 ? "fewer ranks here, " : "",
                 t->device.gpu ? "GPUs" : "hosts");
    else if (fits > 0)
        snprintf(text, size, "train.batch=%lld fits%s", (long long)fits,
                 most ? "" : "; train.recompute=layers makes room for more");
    else
        snprintf(text, size, "train.batch=1 does not fit either; lower train.seq_len%s",
                 most ? "" : " or set train.recompute=layers");
    return text;
}

/* ---- what there is ---- */

typedef struct Card {
    char pci[32], host[96];
} Card;

/* Ranks that share this one's GPU. */
static Status count_on_card(const Trainer *t, int *count) {
    Card mine = {0}, *all = calloc((size_t)t->ranks, sizeof *all);
    snprintf(mine.pci, sizeof mine.pci, "%s", gpu_pci(t->device.gpu));
    gethostname(mine.host, sizeof mine.host - 1);
    Status status = all ? comm_gather(t->comm, &mine, all, sizeof mine) : fault("out of memory");
    *count = 0;
    for (int rank = 0; status == OK && rank < t->ranks; rank++)
        *count += memcmp(&all[rank], &mine, sizeof mine) == 0;
    free(all);
    return status;
}

/* For this rank, where its model is computed. */
static Status find_available(Trainer *t, size_t *bytes) {
    int sharing = comm_host_ranks(t->comm);
    *bytes = (size_t)machine_memory_available();
    if (t->device.gpu) {
        *bytes = gpu_memory_free_bytes(t->device.gpu);
        TRY(count_on_card(t, &sharing));
    }
    *bytes /= (size_t)sharing;
    return OK;
}

/* ---- what is needed ---- */

/* Of a rank's step: inputs and targets. */
static size_t token_bytes(const Trainer *t) {
    const TrainSettings *s = &t->settings->train;
    return 2 * (size_t)(s->batch * s->seq_len * t->micro_steps) * sizeof(int);
}

static void add_up(Trainer *t, const SyncOutline *sync, size_t *host_bytes) {
    const Settings *s = t->settings;
    size_t params = (size_t)t->table.elems * sizeof(float);
    size_t rows = (size_t)trainer_lookup_elems(t) * sizeof(float), norm = norm_plan_bytes(&t->table, t->device.optim);
    size_t device = device_bytes(&t->device, t->table.elems, (int)s->train.batch);
    bool on_gpu = t->device.gpu != NULL, sync_here = !on_gpu || comm_on_gpu(t->comm);
    t->memory.params = t->memory.grads = params;
    t->memory.moments = t->device.computes ? adamw_bytes(&t->table, sync->shard.slices ? &sync->shard : NULL) : 0;
    t->memory.activations = batch_bytes(t, s->train.batch) - device;
    t->memory.work = device + norm + rows + (sync_here ? sync->bytes : 0);
    *host_bytes = token_bytes(t) + (sync_here ? 0 : sync->bytes);
    *host_bytes += on_gpu ? (trainer_grads_on_host(t) ? 2 : 1) * params + rows : memory_total(&t->memory);
}

static void tell(const Trainer *t, int64_t fits) {
    const RunMemory *m = &t->memory;
    log_fact(t->log, "memory", "%.2f of %.2f GB%s per rank: parameters %.2f, gradients %.2f, moments %.2f, activations "
             "%.2f, work %.2f, runtime %.2f; largest train.batch that fits: %lld",
             gb(memory_total(m) + runtime_bytes(t)), gb(m->available), t->device.gpu ? " of a GPU" : "", gb(m->params),
             gb(m->grads), gb(m->moments), gb(m->activations), gb(m->work), gb(runtime_bytes(t)), (long long)fits);
}

/* The batch that every rank can take. */
static Status agree_on_batch(const Trainer *t, int64_t *fits) {
    double least = -(double)*fits;
    TRY(comm_reduce(t->comm, &least, 1, COMM_MAX));
    *fits = (int64_t)-least;
    return OK;
}

Status memory_check(Trainer *t, const SyncOutline *sync) {
    size_t host_bytes = 0;
    char text[ADVICE_BYTES];
    RunMemory *m = &t->memory;
    TRY(comm_agree(t->comm, find_available(t, &m->available)));
    add_up(t, sync, &host_bytes);
    size_t fixed = memory_total(m) - batch_bytes(t, t->settings->train.batch) + runtime_bytes(t);
    int64_t fits = m->available > fixed ? largest_batch(t, m->available - fixed) : 0;
    TRY(agree_on_batch(t, &fits));
    if (t->rank == 0)
        tell(t, fits);
    advice(t, fits, text, sizeof text);
    if (token_bytes(t) > (size_t)machine_memory_available())
        snprintf(text, sizeof text, "a step's tokens alone take %s; lower train.global_batch",
                 bytes_text((double)token_bytes(t)).text);
    if (t->device.gpu && memory_total(m) + runtime_bytes(t) > m->available)
        return bad_input("each rank needs %s of its GPU's memory, %s are free for it; %s",
                         bytes_text((double)(memory_total(m) + runtime_bytes(t))).text,
                         bytes_text((double)m->available).text, text);
    return placement_memory(t->comm, (double)(host_bytes + runtime_bytes(t)), text);
}

/* ---- when there was less than it seemed ---- */

Status memory_explain(const Trainer *t, Status status, size_t later) {
    size_t asked, available;
    char text[ADVICE_BYTES];
    const Allocator *refuser = memory_refused(&asked);
    if (status != FAULT || !refuser)
        return status;
    bool on_gpu = t->device.gpu && refuser == gpu_memory(t->device.gpu);
    if (on_gpu)
        TRY(gpu_finish(t->device.gpu)); /* one that has failed gives nothing */
    available = on_gpu ? gpu_memory_free_bytes(t->device.gpu) : (size_t)machine_memory_available();
    size_t varying = batch_bytes(t, t->settings->train.batch), wanted = asked + later;
    if (wanted <= available)
        snprintf(text, sizeof text, "end other processes there, or lower train.batch");
    else
        advice(t, wanted - available < varying ? largest_batch(t, varying - (wanted - available)) : 0, text,
               sizeof text);
    return fault("out of memory on the %s: %s asked for, %s are free; %s", on_gpu ? "GPU" : "host",
                 bytes_text((double)asked).text, bytes_text((double)available).text, text);
}
