#include "run/trainer.h"

#include "base/machine.h"
#include "model/checkpoint.h"
#include "run/interrupt.h"
#include "run/memory.h"
#include "run/outputs.h"
#include "run/placement.h"
#include "run/resume.h"
#include "run/snapshot.h"
#include "run/sync_table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TRACE_EVENTS = 20000 };

/* ---- checking ---- */

/* With one rank nothing travels, and the embedding's two gradients are better summed at once. */
static bool splits_embedding(const Trainer *t) {
    return t->settings->comm.split_embedding && t->ranks > 1;
}

int64_t trainer_lookup_elems(const Trainer *t) {
    return splits_embedding(t) ? (int64_t)(t->model_config.vocab / 2) * t->model_config.channels : 0;
}

bool trainer_grads_on_host(const Trainer *t) {
    return !t->device.gpu || (t->ranks > 1 && !comm_on_gpu(t->comm));
}

Gpt2Options trainer_model_options(const Trainer *t) {
    return (Gpt2Options){.max_B = (int)t->settings->train.batch, .max_T = (int)t->settings->train.seq_len,
                         .train = true, .recompute = t->settings->train.recompute};
}

/* All that can be wrong with what the user gave, before anything large is allocated or any file is written. */
static Status check_input(Trainer *t) {
    const Settings *s = t->settings;
    TRY(settings_model(s, &t->model_config));
    TRY(settings_micro_steps(s, t->ranks, &t->micro_steps));
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
    Gpt2Options options = trainer_model_options(t);
    TRY(device_open(&t->device, s, &t->model_config, &options, t->rank, comm_host_rank(t->comm)));
    if (!t->device.computes && s->run.resume)
        return config_error(s->config, "run.resume", "the replay device has nothing to resume");
    return t->rank == 0 ? outputs_check(s, t->train_data, t->val_data) : OK;
}

/* How gradients will be synchronised: told, and counted as memory. */
static Status outline_sync(Trainer *t) {
    SyncSetup setup = trainer_sync_setup(t);
    SyncOutline sync;
    Status status = comm_agree(t->comm, sync_outline(&sync, t->comm, &t->settings->comm, &setup));
    if (status == OK && t->rank == 0) {
        if (comm_gpu_note(t->comm)[0])
            log_fact(t->log, "gradients", "copied to the host and back: %s", comm_gpu_note(t->comm));
        log_fact(t->log, "sync", "%s", sync.plan);
        if (sync.warning[0])
            log_warning(t->log, "%s", sync.warning);
    }
    if (status == OK)
        status = comm_agree(t->comm, memory_check(t, &sync));
    free((Slice *)sync.shard.slices);
    return status;
}

static Status print_header(Trainer *t) {
    const Settings *s = t->settings;
    if (t->rank == 0) {
        t->log = log_open(s->train.steps, s->log.every, t->device.computes);
        log_fact(t->log, "model", "GPT-2, L%d NH%d C%d, context %d, vocabulary %d: %.1f M parameters, %s",
                 t->model_config.layers, t->model_config.heads, t->model_config.channels, t->model_config.context,
                 t->model_config.vocab, 1e-6 * (double)gpt2_param_count(&t->model_config), s->model.init);
        log_fact(t->log, "data", "%.2f M tokens in %d shard%s", 1e-6 * (double)loader_tokens(t->train_data),
                 loader_shards(t->train_data), loader_shards(t->train_data) > 1 ? "s" : "");
        log_fact(t->log, "batch", "%lld tokens: %d rank%s x %lld micro-step%s x %lld sequence%s x %lld token%s",
                 (long long)(t->global_sequences * s->train.seq_len), t->ranks, t->ranks > 1 ? "s" : "",
                 (long long)t->micro_steps, t->micro_steps > 1 ? "s" : "", (long long)s->train.batch,
                 s->train.batch > 1 ? "s" : "", (long long)s->train.seq_len, s->train.seq_len > 1 ? "s" : "");
        log_fact(t->log, "machine", "%s, %d core%s, %d NUMA domain%s", machine_cpu(), machine_all_cores(),
                 machine_all_cores() > 1 ? "s" : "", machine_numa_domains(), machine_numa_domains() > 1 ? "s" : "");
        log_fact(t->log, "device", "%s", t->device.text);
    }
    TRY(placement_threads(t->comm, (int)s->run.threads, t->log));
    if (t->rank == 0 && s->loop.ranks > 1 && s->loop.ranks != t->ranks)
        log_warning(t->log, "loop.ranks = %lld is not looked at: the launcher started %d rank%s",
                    (long long)s->loop.ranks, t->ranks, t->ranks > 1 ? "s" : "");
    return outline_sync(t);
}

Status trainer_check(Trainer *t) {
    uint64_t hash = settings_hash(t->settings); /* ranks may have read different files or command lines */
    TRY(comm_verify(t->comm, &hash, sizeof hash, "settings (config file and command line)"));
    TRY(comm_agree(t->comm, check_input(t)));
    TRY(comm_verify(t->comm, &t->device.kind, sizeof t->device.kind, "device (run.device=auto found a GPU or none)"));
    TRY(comm_use_gpu(t->comm, &t->settings->comm, t->device.gpu));
    TRY(comm_agree(t->comm, sync_check(t->comm, &t->settings->comm, t->settings->optim.zero)));
    gpt2_param_table(&t->model_config, splits_embedding(t), &t->table);
    return print_header(t);
}

/* ---- building ---- */

static Status allocate(Trainer *t) {
    const Settings *s = t->settings;
    Gpt2Options options = trainer_model_options(t);
    size_t bytes = (size_t)t->table.elems * sizeof(float), tokens = (size_t)(s->train.batch * s->train.seq_len);
    tokens *= (size_t)t->micro_steps;
    t->params = memory_alloc(s->optim.zero ? comm_memory(t->comm) : &host_memory, bytes);
    if (trainer_grads_on_host(t))
        t->grads = memory_alloc(comm_memory(t->comm), bytes);
    t->inputs = calloc(tokens, sizeof(int));
    t->targets = calloc(tokens, sizeof(int));
    if (!t->params || (trainer_grads_on_host(t) && !t->grads) || !t->inputs || !t->targets)
        return fault("out of memory on the host: parameters and gradients take %s, a step's tokens "
                     "(train.global_batch) %s", bytes_text(2 * (double)bytes).text,
                     bytes_text(2 * (double)(tokens * sizeof(int))).text);
    TRY(stage_create(&t->stage, &t->device, &t->table, t->params, t->grads));
    TRY(device_connect(&t->device, t->stage.params, t->table.elems));
    return gpt2_create(&t->model, &t->model_config, &t->table, t->stage.params, t->stage.grads, &options,
                       t->device.ops, t->device.memory);
}

SyncSetup trainer_sync_setup(const Trainer *t) {
    const Settings *s = t->settings;
    bool on_gpu = comm_on_gpu(t->comm);
    return (SyncSetup){.table = &t->table, .grads = on_gpu ? t->stage.grads : t->grads, .sharded = s->optim.zero,
                       .params = on_gpu ? t->stage.params : t->params,
                       .vocab = splits_embedding(t) ? t->model_config.vocab : 0,
                       .channels = t->model_config.channels,
                       .tokens = t->micro_steps * s->train.batch * s->train.seq_len};
}

/* What needs the sync. */
static Status allocate_rest(Trainer *t) {
    TRY(stage_connect(&t->stage, t->sync, &t->adamw, t->settings->optim.zero, trainer_lookup_elems(t)));
    if (t->device.computes)
        TRY(adamw_create(&t->adamw, &t->table, sync_shard(t->sync, t->rank), t->device.memory, t->device.optim));
    return shard_norm_create(&t->norm, t->comm, t->sync, &t->table, t->device.optim);
}

static Status synchronise(Trainer *t) {
    SyncSetup setup = trainer_sync_setup(t);
    TRY(sync_create(&t->sync, t->comm, &t->settings->comm, &setup));
    TRY(comm_agree(t->comm, memory_explain(t, allocate_rest(t), 0)));
    gpt2_on_need(t->model, stage_need, &t->stage);
    return OK;
}

static Snapshot snapshot_of(Trainer *t) {
    return (Snapshot){.config = &t->model_config, .table = &t->table, .params = t->params,
                      .adamw_step = t->adamw.step, .step = t->step, .position = t->position, .skipped = t->skipped,
                      .seq_len = t->settings->train.seq_len};
}

static RunState run_state_of(Trainer *t, AdamW *moments, Snapshot *snapshot) {
    return (RunState){.comm = t->comm, .sync = t->sync, .adamw = moments, .snapshot = snapshot,
                      .settings = t->settings, .step_tokens = t->global_sequences * t->settings->train.seq_len,
                      .data_tokens = loader_tokens(t->train_data)};
}

static Status resume(Trainer *t, int64_t newest) {
    const Settings *s = t->settings;
    Snapshot snapshot = snapshot_of(t);
    ResumeNotes notes = {"", ""};
    snapshot.step = newest;
    AdamW moments;
    RunState run = run_state_of(t, &moments, &snapshot);
    Status status = stage_moments_out(&t->stage, &t->adamw, &moments);
    if (status == OK)
        status = resume_load(&run, s->run.out, newest, &notes);
    if (status == OK)
        status = stage_moments_in(&t->stage, &t->adamw, &moments);
    stage_moments_free(&t->stage, &moments);
    TRY(status);
    t->step = snapshot.step, t->position = snapshot.position, t->skipped = snapshot.skipped;
    if (notes.settings[0])
        log_warning(t->log, "%s: since its checkpoint, %s", s->run.out, notes.settings);
    if (notes.sync[0])
        log_warning(t->log, "%s: since its checkpoint, %s", s->run.out, notes.sync);
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
    return stage_params_in(&t->stage);
}

static Status open_log(Trainer *t) {
    if (t->rank != 0)
        return OK;
    char path[OPTION_TEXT + 16];
    snprintf(path, sizeof path, "%s/log.jsonl", t->settings->run.out);
    if (t->device.peak_tflops > 0)
        log_fact(t->log, "peak", "%s", t->device.peak_text);
    if (t->device.attention[0])
        log_fact(t->log, "attention", "%s", t->device.attention);
    if (t->ranks > 1)
        log_fact(t->log, "links", "%s; a comm thread per rank, on the rank's cores", sync_links(t->sync));
    if (t->step > 0)
        log_fact(t->log, "resume", "after step %lld", (long long)t->step);
    TRY(log_jsonl(t->log, t->settings->log.jsonl ? path : "", t->step));
    log_start(t->log, t->settings->config);
    interrupt_step(t->step);
    return OK;
}

Status trainer_build(Trainer *t) {
    const Settings *s = t->settings;
    TRY(comm_agree(t->comm, t->rank == 0 ? snapshot_open_folder(s->run.out, s->run.resume) : OK));
    TRY(comm_agree(t->comm, memory_explain(t, allocate(t), t->memory.moments)));
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
    RunState run = run_state_of(t, &moments, &snapshot);
    Status status = stage_moments_out(&t->stage, &t->adamw, &moments);
    if (status == OK)
        status = resume_save(&run, s->run.out, s->train.keep);
    stage_moments_free(&t->stage, &moments);
    if (status == OK && t->rank == 0)
        interrupt_saved(t->step);
    return status;
}

/* Rank 0: the model, and what became of the run. */
static Status finish(Trainer *t) {
    const Settings *s = t->settings;
    char path[OPTION_TEXT + 16], mfu[128] = "n/a";
    snprintf(path, sizeof path, "%s/model.bin", s->run.out);
    if (t->device.computes)
        TRY(checkpoint_write(path, &t->model_config, &t->table, t->params));
    if (device_write_profile(&t->device) != OK)
        log_warning(t->log, "no profile: %s", error_line());
    double tokens_per_s = log_summary(t->log);
    double flops_per_s = tokens_per_s * gpt2_flops_per_token(&t->model_config, (int)s->train.seq_len);
    if (t->device.peak_tflops > 0)
        snprintf(mfu, sizeof mfu, "%.1f %% of %s", 1e-10 * flops_per_s / t->device.peak_tflops / t->ranks,
                 t->device.peak_text);
    sync_table_print(t->sync);
    if (t->device.computes)
        log_fact(t->log, "compute", "%.1f GFLOP/s, MFU %s", 1e-9 * flops_per_s, mfu);
    double watts = gpu_power_watts(t->device.power);
    if (isfinite(watts))
        log_fact(t->log, "power", "%.0f W on average since the start, rank 0's GPU", watts);
    log_fact(t->log, "memory", "%.2f GB at most, rank 0", 1e-9 * (double)machine_peak_rss());
    if (t->device.computes)
        log_fact(t->log, "model", "%s; try: build/generate %s \"Once upon a time\"", path, path);
    return OK;
}

Status trainer_finish(Trainer *t) {
    TRY(trainer_gather_params(t));
    TRY(comm_agree(t->comm, t->rank == 0 ? finish(t) : OK));
    /* Behind the model, which matters more. */
    if (t->trace)
        TRY(trace_write(t->trace, t->comm, t->settings->log.trace));
    bool in_vain = t->tried > 0 && t->updated == 0;
    return comm_agree(t->comm, in_vain ? fault("every step was skipped (%lld of them), for a loss or gradient that was "
                                               "not finite: the model has not changed", (long long)t->tried) : OK);
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
