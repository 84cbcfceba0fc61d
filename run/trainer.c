#include "run/trainer.h"

#include "base/file.h"
#include "base/machine.h"
#include "model/checkpoint.h"
#include "run/placement.h"
#include "run/resume.h"
#include "run/snapshot.h"
#include "run/sync_table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RUNTIME_BYTES = 256 << 20, TRACE_EVENTS = 20000 }; /* buffers of BLAS and MPI, the program itself */

/* ---- checking ---- */

/* With one rank nothing travels, and the embedding's two gradients are better summed at once. */
static bool splits_embedding(const Trainer *t) {
    return t->settings->comm.split_embedding && t->ranks > 1 && !comm_on_gpu(t->comm);
}

/* Gradients of a GPU that do not travel through the host's memory have no place there. */
static bool grads_on_host(const Trainer *t) {
    return !t->device.gpu || (t->ranks > 1 && !comm_on_gpu(t->comm));
}

static Gpt2Options model_options(const Trainer *t) {
    return (Gpt2Options){.max_B = (int)t->settings->train.batch, .max_T = (int)t->settings->train.seq_len,
                         .train = true, .recompute = t->settings->train.recompute};
}

/* All that can be wrong with what the user gave, before anything large is allocated or any file is written. */
static Status check_input(Trainer *t) {
    const Settings *s = t->settings;
    TRY(settings_model(s, &t->model_config));
    TRY(settings_micro_steps(s, t->ranks, &t->micro_steps));
    TRY(sync_check(&s->comm, s->optim.zero));
    t->global_sequences = t->ranks * s->train.batch * t->micro_steps;
    LoaderOptions data = {.glob = s->data.train, .seq_len = (int)s->train.seq_len, .vocab = t->model_config.vocab,
                          .shuffle = s->data.shuffle, .seed = (uint64_t)s->run.seed, .hint = "make data"};
    TRY(loader_open(&t->train_data, &data));
    data.glob = s->data.val;
    data.shuffle = false;
    if (s->data.val[0])
        TRY(loader_open(&t->val_data, &data));
    if (strcmp(s->data.tokenizer, "none") != 0)
        TRY(tokenizer_open(&t->tokenizer, s->data.tokenizer));
    if (t->tokenizer && tokenizer_vocab(t->tokenizer) != t->model_config.vocab)
        return config_error(s->config, "data.tokenizer", "%s has %d tokens, the model %d", s->data.tokenizer,
                            tokenizer_vocab(t->tokenizer), t->model_config.vocab);
    Gpt2Options options = model_options(t);
    TRY(device_open(&t->device, s, &t->model_config, &options, t->rank, comm_host_rank(t->comm)));
    if (!t->device.computes && s->run.resume)
        return config_error(s->config, "run.resume", "the replay device has nothing to resume");
    return t->rank == 0 ? folder_check_writable(s->run.out) : OK;
}

static double gb(double bytes) { return 1e-9 * bytes; }

/* On the GPU parameters, gradients and moments, on the host parameters and, where ranks talk there, gradients.
 * Activations are those of the cpu, at most: in half the bytes where they are bf16. */
static Status check_gpu_memory(Trainer *t, double params, double activations) {
    const Settings *s = t->settings;
    bool half = strcmp(option_choice(train_dtypes, s->train.dtype), "bf16") == 0;
    double moments = 2 * params / (s->optim.zero ? t->ranks : 1), weights = half ? params / 2 : 0;
    activations = half ? activations / 2 : activations;
    double bytes = 2 * params + moments + weights + activations + RUNTIME_BYTES;
    double available = (double)gpu_memory_free_bytes(t->device.gpu);
    if (t->rank == 0)
        log_fact(t->log, "memory", "%.2f GB on the GPU of each rank: parameters %.2f, gradients %.2f, moments %.2f, "
                 "activations %.2f", gb(bytes), gb(params + weights), gb(params), gb(moments), gb(activations));
    if (bytes > available)
        return bad_input("the run needs %.2f GB of the GPU's memory, %.2f GB are free; lower train.batch or "
                         "train.seq_len%s", gb(bytes), gb(available),
                         s->train.recompute ? "" : ", or set train.recompute=yes");
    return placement_memory(t->comm, (grads_on_host(t) ? 2 : 1) * params + RUNTIME_BYTES, s->train.recompute);
}

static Status check_memory(Trainer *t) {
    Gpt2Options options = model_options(t);
    double params = 4.0 * (double)t->table.elems;
    double activations = t->device.computes ? (double)gpt2_activation_bytes(&t->model_config, &options) : 0;
    if (t->device.gpu)
        return check_gpu_memory(t, params, activations);
    double moments = t->device.computes ? 2 * params / (t->settings->optim.zero ? t->ranks : 1) : 0;
    double bytes = 2 * params + moments + activations + RUNTIME_BYTES;
    if (t->rank == 0)
        log_fact(t->log, "memory", "%.2f GB per rank: parameters %.2f, gradients %.2f, moments %.2f, activations %.2f, "
                 "runtime %.2f", gb(bytes), gb(params), gb(params), gb(moments), gb(activations), gb(RUNTIME_BYTES));
    return placement_memory(t->comm, bytes, t->settings->train.recompute);
}

static Status print_header(Trainer *t) {
    const Settings *s = t->settings;
    if (t->rank == 0) {
        t->log = log_open(s->train.steps, s->log.every);
        log_fact(t->log, "model", "GPT-2, L%d NH%d C%d, context %d, vocabulary %d: %.1f M parameters, %s",
                 t->model_config.layers, t->model_config.heads, t->model_config.channels, t->model_config.context,
                 t->model_config.vocab, 1e-6 * (double)gpt2_param_count(&t->model_config), s->model.init);
        log_fact(t->log, "data", "%.2f M tokens in %d shard%s", 1e-6 * (double)loader_tokens(t->train_data),
                 loader_shards(t->train_data), loader_shards(t->train_data) > 1 ? "s" : "");
        log_fact(t->log, "batch", "%lld tokens: %d rank%s x %lld micro-step%s x %lld sequences x %lld tokens",
                 (long long)(t->global_sequences * s->train.seq_len), t->ranks, t->ranks > 1 ? "s" : "",
                 (long long)t->micro_steps, t->micro_steps > 1 ? "s" : "", (long long)s->train.batch,
                 (long long)s->train.seq_len);
        log_fact(t->log, "machine", "%s, %d cores, %d NUMA domain%s", machine_cpu(), machine_all_cores(),
                 machine_numa_domains(), machine_numa_domains() > 1 ? "s" : "");
        log_fact(t->log, "device", "%s", t->device.text);
    }
    TRY(placement_threads(t->comm, (int)s->run.threads, t->log));
    return comm_agree(t->comm, check_memory(t));
}

Status trainer_check(Trainer *t) {
    uint64_t hash = settings_hash(t->settings); /* ranks may have read different files or command lines */
    TRY(comm_verify(t->comm, &hash, sizeof hash, "settings (config file and command line)"));
    TRY(comm_agree(t->comm, check_input(t)));
    TRY(comm_verify(t->comm, &t->device.kind, sizeof t->device.kind, "device (run.device=auto found a GPU or none)"));
    TRY(comm_use_gpu(t->comm, &t->settings->comm, t->device.gpu));
    gpt2_param_table(&t->model_config, splits_embedding(t), &t->table);
    return print_header(t);
}

/* ---- building ---- */

static Status allocate(Trainer *t) {
    const Settings *s = t->settings;
    Gpt2Options options = model_options(t);
    size_t bytes = (size_t)t->table.elems * sizeof(float), tokens = (size_t)(s->train.batch * s->train.seq_len);
    tokens *= (size_t)t->micro_steps;
    t->params = memory_alloc(s->optim.zero ? comm_memory(t->comm) : &host_memory, bytes);
    if (grads_on_host(t))
        t->grads = memory_alloc(comm_memory(t->comm), bytes);
    t->inputs = calloc(tokens, sizeof(int));
    t->targets = calloc(tokens, sizeof(int));
    if (!t->params || (grads_on_host(t) && !t->grads) || !t->inputs || !t->targets)
        return fault("out of memory: %.2f GB of parameters and gradients, %.2f GB of a step's tokens "
                     "(train.global_batch)", gb(2.0 * (double)bytes), gb(2.0 * sizeof(int) * (double)tokens));
    TRY(stage_create(&t->stage, &t->device, &t->table, t->params, t->grads));
    TRY(device_connect(&t->device, t->stage.params, t->table.elems));
    return gpt2_create(&t->model, &t->model_config, &t->table, t->stage.params, t->stage.grads, &options,
                       t->device.ops, t->device.memory);
}

static Status synchronise(Trainer *t) {
    const Settings *s = t->settings;
    bool on_gpu = comm_on_gpu(t->comm), splits = splits_embedding(t);
    SyncSetup setup = {.table = &t->table, .grads = on_gpu ? t->stage.grads : t->grads, .sharded = s->optim.zero,
                       .params = on_gpu ? t->stage.params : t->params, .vocab = splits ? t->model_config.vocab : 0,
                       .channels = t->model_config.channels,
                       .tokens = t->micro_steps * s->train.batch * s->train.seq_len};
    TRY(sync_create(&t->sync, t->comm, &s->comm, &setup));
    TRY(stage_connect(&t->stage, t->sync, s->optim.zero, (int64_t)(setup.vocab / 2) * setup.channels));
    gpt2_on_need(t->model, stage_need, &t->stage);
    if (t->device.computes)
        TRY(adamw_create(&t->adamw, &t->table, sync_shard(t->sync, t->rank), t->device.memory, t->device.optim));
    return shard_norm_create(&t->norm, t->comm, t->sync, &t->table, t->device.optim);
}

static Snapshot snapshot_of(Trainer *t) {
    return (Snapshot){.config = &t->model_config, .table = &t->table, .params = t->params,
                      .adamw_step = t->adamw.step, .step = t->step, .position = t->position, .skipped = t->skipped,
                      .seq_len = t->settings->train.seq_len};
}

static Status resume(Trainer *t, int64_t newest) {
    const Settings *s = t->settings;
    Snapshot snapshot = snapshot_of(t);
    char note[RESUME_NOTE] = "";
    snapshot.step = newest;
    AdamW moments;
    Status status = stage_moments_out(&t->stage, &t->adamw, &moments);
    if (status == OK)
        status = resume_load(&(RunState){t->comm, t->sync, &moments, &snapshot, s}, s->run.out, newest, note);
    if (status == OK)
        status = stage_moments_in(&t->stage, &t->adamw, &moments);
    stage_moments_free(&t->stage, &moments);
    TRY(status);
    t->step = snapshot.step, t->position = snapshot.position, t->skipped = snapshot.skipped;
    if (note[0])
        log_warning(t->log, "%s: since its checkpoint, %s", s->run.out, note);
    return OK;
}

/* Rank 0 reads files; the others receive what it read. */
static Status initialise(Trainer *t) {
    const Settings *s = t->settings;
    Status status = OK;
    int64_t newest = t->rank == 0 && s->run.resume ? snapshot_newest(s->run.out) : -1;
    if (newest > s->train.steps)
        status = config_error(s->config, "train.steps", "expected at least the %lld steps that the checkpoint in %s "
                              "has behind it", (long long)newest, s->run.out);
    else if (t->rank == 0 && newest < 0 && strcmp(s->model.init, "random") != 0)
        status = checkpoint_read_params(s->model.init, &t->model_config, &t->table, t->params);
    else if (t->rank == 0 && newest < 0)
        gpt2_init_random(&t->model_config, &t->table, (uint64_t)s->run.seed, t->params);
    TRY(comm_agree(t->comm, status));
    TRY(comm_broadcast(t->comm, &newest, sizeof newest, 0));
    TRY(newest >= 0 ? resume(t, newest)
                    : comm_broadcast(t->comm, t->params, (size_t)t->table.elems * sizeof(float), 0));
    TRY(stage_params_in(&t->stage));
    device_params_arrived(&t->device, 0, t->table.elems);
    return OK;
}

static Status open_log(Trainer *t) {
    if (t->rank != 0)
        return OK;
    char path[OPTION_TEXT + 16];
    snprintf(path, sizeof path, "%s/log.jsonl", t->settings->run.out);
    if (t->device.attention[0])
        log_fact(t->log, "attention", "%s", t->device.attention);
    if (comm_gpu_note(t->comm)[0])
        log_fact(t->log, "gradients", "copied to the host and back: %s", comm_gpu_note(t->comm));
    log_fact(t->log, "sync", "%s", sync_plan(t->sync));
    if (sync_warning(t->sync)[0])
        log_warning(t->log, "%s", sync_warning(t->sync));
    if (t->ranks > 1)
        log_fact(t->log, "links", "%s; a comm thread per rank, on the rank's cores", sync_links(t->sync));
    if (t->step > 0)
        log_fact(t->log, "resume", "after step %lld", (long long)t->step);
    TRY(log_jsonl(t->log, t->settings->log.jsonl ? path : "", t->step));
    log_start(t->log, t->settings->config);
    return OK;
}

Status trainer_build(Trainer *t) {
    const Settings *s = t->settings;
    TRY(comm_agree(t->comm, t->rank == 0 ? snapshot_open_folder(s->run.out, s->run.resume) : OK));
    TRY(comm_agree(t->comm, allocate(t)));
    TRY(synchronise(t));
    TRY(initialise(t));
    TRY(comm_agree(t->comm, open_log(t)));
    return s->log.trace[0] ? trace_open(&t->trace, t->comm, TRACE_EVENTS) : OK;
}

/* ---- saving, ending ---- */

Status trainer_gather_params(Trainer *t) {
    TRY(sync_gather_params(t->sync));
    return stage_params_whole(&t->stage);
}

Status trainer_save(Trainer *t) {
    const Settings *s = t->settings;
    Snapshot snapshot = snapshot_of(t);
    AdamW moments;
    Status status = stage_moments_out(&t->stage, &t->adamw, &moments);
    if (status == OK)
        status = resume_save(&(RunState){t->comm, t->sync, &moments, &snapshot, s}, s->run.out, s->train.keep);
    stage_moments_free(&t->stage, &moments);
    return status;
}

/* Rank 0: the model, and what became of the run. */
static Status finish(Trainer *t) {
    const Settings *s = t->settings;
    char path[OPTION_TEXT + 16], mfu[32] = "n/a";
    snprintf(path, sizeof path, "%s/model.bin", s->run.out);
    if (t->device.computes)
        TRY(checkpoint_write(path, &t->model_config, &t->table, t->params));
    if (device_write_profile(&t->device) != OK)
        log_warning(t->log, "no profile: %s", error_line());
    double flops_per_s = log_summary(t->log) * gpt2_flops_per_token(&t->model_config, (int)s->train.seq_len);
    if (s->run.peak_tflops > 0)
        snprintf(mfu, sizeof mfu, "%.1f %%", 1e-10 * flops_per_s / s->run.peak_tflops / t->ranks);
    sync_table_print(t->sync);
    log_fact(t->log, "compute", "%.1f GFLOP/s, MFU %s", 1e-9 * flops_per_s, mfu);
    double watts = gpu_power_watts(t->device.power);
    if (isfinite(watts))
        log_fact(t->log, "power", "%.0f W on average since the start, rank 0's GPU", watts);
    log_fact(t->log, "memory", "%.2f GB at most, rank 0", gb((double)machine_peak_rss()));
    if (t->device.computes)
        log_fact(t->log, "model", "%s; try: build/generate %s \"Once upon a time\"", path, path);
    return OK;
}

Status trainer_finish(Trainer *t) {
    TRY(trainer_gather_params(t));
    TRY(comm_agree(t->comm, t->rank == 0 ? finish(t) : OK));
    /* Behind the model, which matters more. */
    return t->trace ? trace_write(t->trace, t->comm, t->settings->log.trace) : OK;
}

void trainer_destroy(Trainer *t) {
    stage_quiet(&t->stage);
    trace_close(t->trace);
    log_close(t->log);
    sync_destroy(t->sync);
    shard_norm_destroy(&t->norm);
    adamw_destroy(&t->adamw);
    gpt2_destroy(t->model);
    stage_destroy(&t->stage);
    comm_leave_gpu(t->comm);
    device_close(&t->device);
    free(t->targets);
    free(t->inputs);
    memory_free(comm_memory(t->comm), t->grads);
    memory_free(t->settings->optim.zero ? comm_memory(t->comm) : &host_memory, t->params);
    param_table_free(&t->table);
    tokenizer_close(t->tokenizer);
    loader_close(t->val_data);
    loader_close(t->train_data);
}
