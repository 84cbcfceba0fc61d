/* tandem: trains GPT-2 on one rank or many.
 *
 *   settings -> data, model, optimizer, sync -> loop:
 *     forward and backward over the micro-steps; gradients are announced to the sync as they become final
 *     wait for the sync: every rank then holds the mean gradient, the same bits
 *     clip, update: every rank then holds the same parameters, the same bits
 *
 * Rank 0 also shows text, logs and saves. Whether ranks are processes or threads makes no difference here. */
#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/machine.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"
#include "run/device.h"
#include "run/placement.h"
#include "run/resume.h"
#include "run/sample.h"
#include "run/settings.h"
#include "run/shard.h"
#include "run/snapshot.h"
#include "run/sync_table.h"
#include "run/trace.h"
#include "run/validate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { RUNTIME_BYTES = 256 << 20, TRACE_EVENTS = 20000 }; /* buffers of BLAS and MPI, the program itself */

typedef struct Trainer {
    const Settings *settings;
    Comm *comm;
    int rank, ranks;
    int64_t micro_steps, global_sequences; /* per step */
    Loader *train_data, *val_data;         /* val_data may be NULL */
    Tokenizer *tokenizer;                  /* may be NULL */
    Gpt2Config model_config;
    ParamTable table;
    float *params, *grads; /* f32[table.elems] */
    int *inputs, *targets; /* i32[batch * seq_len], one micro-batch */
    Device device;
    Gpt2 *model;
    AdamW adamw;
    Sync *sync;
    ShardNorm norm;
    Log *log;                        /* rank 0 */
    Trace *trace;                    /* NULL without log.trace */
    int64_t step, position, skipped; /* done so far; position is the next sequence's */
} Trainer;

/* ---- setting up ---- */

/* With one rank nothing travels, and the embedding's two gradients are better summed at once. */
static bool splits_embedding(const Trainer *t) { return t->settings->comm.split_embedding && t->ranks > 1; }

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
    gpt2_param_table(&t->model_config, splits_embedding(t), &t->table);
    Gpt2Options options = model_options(t);
    TRY(device_open(&t->device, s, &t->model_config, &options, t->rank));
    if (!t->device.computes && s->run.resume)
        return config_error(s->config, "run.resume", "the replay device has nothing to resume");
    return t->rank == 0 ? folder_check_writable(s->run.out) : OK;
}

static double gb(double bytes) { return 1e-9 * bytes; }

static Status check_memory(Trainer *t) {
    Gpt2Options options = model_options(t);
    double params = 4.0 * (double)t->table.elems;
    double activations = t->device.computes ? (double)gpt2_activation_bytes(&t->model_config, &options) : 0;
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
    }
    TRY(placement_threads(t->comm, (int)s->run.threads, t->log));
    return comm_agree(t->comm, check_memory(t));
}

static Status allocate(Trainer *t) {
    const Settings *s = t->settings;
    Gpt2Options options = model_options(t);
    size_t bytes = (size_t)t->table.elems * sizeof(float), tokens = (size_t)(s->train.batch * s->train.seq_len);
    tokens *= (size_t)t->micro_steps;
    t->params = memory_alloc(s->optim.zero ? comm_memory(t->comm) : &host_memory, bytes);
    t->grads = memory_alloc(comm_memory(t->comm), bytes);
    t->inputs = calloc(tokens, sizeof(int));
    t->targets = calloc(tokens, sizeof(int));
    if (!t->params || !t->grads || !t->inputs || !t->targets)
        return fault("out of memory: %.2f GB of parameters and gradients", gb(2.0 * (double)bytes));
    return gpt2_create(&t->model, &t->model_config, &t->table, t->params, t->grads, &options, t->device.ops,
                       t->device.memory);
}

static Status synchronise(Trainer *t) {
    const Settings *s = t->settings;
    SyncSetup setup = {.table = &t->table, .grads = t->grads, .sharded = s->optim.zero, .params = t->params};
    if (splits_embedding(t))
        setup = (SyncSetup){.table = &t->table, .grads = t->grads, .sharded = s->optim.zero, .params = t->params,
                            .vocab = t->model_config.vocab, .channels = t->model_config.channels,
                            .tokens = t->micro_steps * s->train.batch * s->train.seq_len};
    TRY(sync_create(&t->sync, t->comm, &s->comm, &setup));
    gpt2_on_need(t->model, sync_need, t->sync);
    if (t->device.computes)
        TRY(adamw_create(&t->adamw, &t->table, sync_shard(t->sync, t->rank), &host_memory));
    return shard_norm_create(&t->norm, t->comm, t->sync, &t->table);
}

static Snapshot snapshot_of(Trainer *t) {
    return (Snapshot){.config = &t->model_config, .table = &t->table, .params = t->params,
                      .adamw_step = t->adamw.step, .step = t->step, .position = t->position, .skipped = t->skipped,
                      .seq_len = t->settings->train.seq_len};
}

static Status resume(Trainer *t, int64_t newest) {
    const Settings *s = t->settings;
    Snapshot snapshot = snapshot_of(t);
    bool dropped = false;
    snapshot.step = newest;
    TRY(resume_load(&(RunState){t->comm, t->sync, &t->adamw, &snapshot}, s->run.out, newest, &dropped));
    t->step = snapshot.step, t->position = snapshot.position, t->skipped = snapshot.skipped;
    if (dropped && t->rank == 0)
        log_warning(t->log, "%s has no residuals of error feedback for this many ranks: they start at zero",
                    s->run.out);
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
    return newest >= 0 ? resume(t, newest)
                       : comm_broadcast(t->comm, t->params, (size_t)t->table.elems * sizeof(float), 0);
}

static Status open_log(Trainer *t) {
    if (t->rank != 0)
        return OK;
    char path[OPTION_TEXT + 16];
    snprintf(path, sizeof path, "%s/log.jsonl", t->settings->run.out);
    log_fact(t->log, "sync", "%s", sync_plan(t->sync));
    if (t->ranks > 1)
        log_fact(t->log, "links", "%s; a comm thread per rank, on the rank's cores", sync_links(t->sync));
    if (t->step > 0)
        log_fact(t->log, "resume", "after step %lld", (long long)t->step);
    TRY(log_jsonl(t->log, t->settings->log.jsonl ? path : "", t->step));
    log_start(t->log, t->settings->config);
    return OK;
}

/* ---- the loop ---- */

/* Ends a part of the step that began at *since_s; returns its ms. */
static double lap(Trainer *t, const char *part, double *since_s) {
    double now_s = clock_s(), ms = 1e3 * (now_s - *since_s);
    trace_span(t->trace, TRACE_COMPUTE, part, t->step + 1, *since_s, now_s);
    *since_s = now_s;
    return ms;
}

/* All that this rank reads in the step. */
static Status load(Trainer *t) {
    int batch = (int)t->settings->train.batch;
    int64_t tokens = batch * t->settings->train.seq_len;
    for (int64_t micro = 0; micro < t->micro_steps; micro++) {
        int64_t mine = t->position + (micro * t->ranks + t->rank) * batch;
        TRY(loader_read(t->train_data, mine, batch, t->inputs + micro * tokens, t->targets + micro * tokens));
    }
    sync_forward_begin(t->sync, t->inputs, t->micro_steps * tokens);
    return OK;
}

/* Loss and gradients of the whole step, summed up over its micro-steps. */
static Status forward_backward(Trainer *t, StepLog *log, double *mark_s, double *loss) {
    int batch = (int)t->settings->train.batch, seq_len = (int)t->settings->train.seq_len;
    int64_t tokens = (int64_t)batch * seq_len;
    for (int64_t micro = 0; micro < t->micro_steps; micro++) {
        bool last = micro == t->micro_steps - 1;
        gpt2_forward(t->model, t->inputs + micro * tokens, batch, seq_len);
        log->forward_ms += lap(t, "forward", mark_s);
        if (micro == 0) {
            TRY(sync_forward_end(t->sync));
            SyncLookup lookup = sync_lookup(t->sync);
            gpt2_set_lookup(t->model, lookup.rows, lookup.slots, lookup.slot_of_token);
        }
        if (last)
            sync_begin(t->sync);
        *loss += gpt2_backward(t->model, t->targets + micro * tokens, 1.0f / (float)t->micro_steps, micro > 0,
                               last ? sync_mark_ready : NULL, t->sync);
        log->backward_ms += lap(t, "backward", mark_s);
        if (t->rank == 0)
            log_progress(t->log, (double)t->step + (double)(micro + 1) / (double)t->micro_steps);
    }
    *loss /= (double)t->micro_steps * t->ranks;
    return OK;
}

/* Clip and update; a step whose loss or gradient is not finite, which all ranks see alike, changes nothing. */
static Status update(Trainer *t, StepLog *log) {
    const OptimConfig *optim = &t->settings->optim;
    log->lr = learning_rate(optim, t->step, t->settings->train.steps);
    if (!t->device.computes) {
        sync_commit(t->sync);
        return OK;
    }
    TRY(shard_norm(&t->norm, t->grads, &log->grad_norm));
    if (isfinite(log->loss) && isfinite(log->grad_norm)) {
        adamw_update(&t->adamw, optim, log->lr, clip_scale(log->grad_norm, optim->grad_clip), t->params, t->grads);
        sync_commit(t->sync);
    } else {
        t->skipped++;
    }
    return OK;
}

static Status log_sync(Trainer *t, StepLog *log) {
    SyncStats stats = sync_stats(t->sync);
    double bytes[] = {(double)stats.bytes_intra, (double)stats.bytes_inter};
    TRY(comm_reduce(t->comm, bytes, 2, COMM_SUM));
    log->comm_ms = stats.comm_ms, log->comm_exposed_ms = stats.comm_exposed_ms;
    log->bytes_intra = bytes[0], log->bytes_inter = bytes[1];
    log->compress_error = stats.compress_error;
    return OK;
}

/* One step: returns with the same parameters on every rank, or on their way there. */
static Status train_step(Trainer *t, StepLog *log) {
    const Settings *s = t->settings;
    double start_s = clock_s(), mark_s = start_s;
    TRY(load(t));
    lap(t, "load", &mark_s);
    TRY(forward_backward(t, log, &mark_s, &log->loss));
    double backward_end_s = mark_s;
    TRY(sync_wait(t->sync));
    TRY(comm_reduce(t->comm, &log->loss, 1, COMM_SUM));
    lap(t, "wait for gradients", &mark_s);
    trace_sync(t->trace, t->sync, &t->table, backward_end_s);
    TRY(update(t, log));
    log->update_ms = lap(t, "update", &mark_s);
    TRY(log_sync(t, log));

    t->step++;
    t->position += t->global_sequences;
    log->step = t->step, log->skipped = t->skipped;
    log->step_ms = 1e3 * (clock_s() - start_s);
    log->tokens_per_s = (double)(t->global_sequences * s->train.seq_len) / log->step_ms * 1e3;
    if (s->comm.verify_every && t->step % s->comm.verify_every == 0) {
        TRY(sync_gather_params(t->sync));
        TRY(comm_verify(t->comm, t->params, (size_t)t->table.elems * sizeof(float), "parameters"));
    }
    return OK;
}

/* Rank 0 only: the others wait in their next collective call. */
static void show_sample(Trainer *t) {
    const TrainSettings *s = &t->settings->train;
    char title[64], text[1 << 14];
    if (sample_text(&t->model_config, &t->table, t->params, t->tokenizer, s->sample_prompt, (int)s->sample_tokens,
                    (uint64_t)t->settings->run.seed, text, sizeof text) != OK) {
        log_warning(t->log, "no sample: %s", error_line());
        return;
    }
    snprintf(title, sizeof title, "text after %lld steps", (long long)t->step);
    log_text(t->log, title, s->sample_prompt, text);
}

static bool due(int64_t step, int64_t every, int64_t last) { return every > 0 && (step % every == 0 || step == last); }

static Status train_loop(Trainer *t) {
    const Settings *s = t->settings;
    int64_t last = s->train.steps;
    if (t->rank == 0 && t->step == 0 && s->train.sample_every)
        show_sample(t);
    while (t->step < last) {
        StepLog log = {0};
        TRY(train_step(t, &log));
        if (due(t->step, s->train.val_every, last) || due(t->step, s->train.sample_every, last) ||
            due(t->step, s->train.save_every, last))
            TRY(sync_gather_params(t->sync));
        if (due(t->step, s->train.val_every, last))
            TRY(validate(&(Validation){t->comm, t->model, t->val_data, t->tokenizer, &s->train, t->inputs, t->targets},
                         &log));
        device_step_done(&t->device, t->step);
        if (t->rank == 0)
            log_step(t->log, &log);
        if (t->rank == 0 && due(t->step, s->train.sample_every, last))
            show_sample(t);
        Snapshot snapshot = snapshot_of(t);
        if (t->device.computes && due(t->step, s->train.save_every, last))
            TRY(resume_save(&(RunState){t->comm, t->sync, &t->adamw, &snapshot}, s->run.out, s->train.keep));
    }
    return OK;
}

/* Rank 0: the model, and what became of the run. */
static Status finish(Trainer *t) {
    const Settings *s = t->settings;
    char path[OPTION_TEXT + 16], mfu[32] = "n/a";
    snprintf(path, sizeof path, "%s/model.bin", s->run.out);
    TRY(device_write_profile(&t->device));
    if (t->device.computes)
        TRY(checkpoint_write(path, &t->model_config, &t->table, t->params));
    double flops_per_s = log_summary(t->log) * gpt2_flops_per_token(&t->model_config, (int)s->train.seq_len);
    if (s->run.peak_tflops > 0)
        snprintf(mfu, sizeof mfu, "%.1f %%", 1e-10 * flops_per_s / s->run.peak_tflops / t->ranks);
    sync_table_print(t->sync);
    log_fact(t->log, "compute", "%.1f GFLOP/s, MFU %s", 1e-9 * flops_per_s, mfu);
    log_fact(t->log, "memory", "%.2f GB at most, rank 0", gb((double)machine_peak_rss()));
    if (t->device.computes)
        log_fact(t->log, "model", "%s; try: build/generate %s \"Once upon a time\"", path, path);
    return OK;
}

static Status train(Trainer *t) {
    if (t->settings->help) {
        if (t->rank == 0)
            settings_help(t->settings, stdout);
        return OK;
    }
    uint64_t hash = settings_hash(t->settings); /* ranks may have read different files or command lines */
    TRY(comm_verify(t->comm, &hash, sizeof hash, "settings (config file and command line)"));
    TRY(comm_agree(t->comm, check_input(t)));
    TRY(print_header(t));
    if (t->settings->plan)
        return OK;
    TRY(comm_agree(t->comm, t->rank == 0 ? snapshot_open_folder(t->settings->run.out, t->settings->run.resume) : OK));
    TRY(comm_agree(t->comm, allocate(t)));
    TRY(synchronise(t));
    TRY(initialise(t));
    TRY(comm_agree(t->comm, open_log(t)));
    if (t->settings->log.trace[0])
        TRY(trace_open(&t->trace, t->comm, TRACE_EVENTS));
    TRY(train_loop(t));
    TRY(sync_gather_params(t->sync));
    if (t->trace)
        TRY(trace_write(t->trace, t->comm, t->settings->log.trace));
    return t->rank == 0 ? finish(t) : OK;
}

static Status run_rank(Comm *comm, void *settings) {
    Trainer t = {.settings = settings, .comm = comm, .rank = comm_rank(comm), .ranks = comm_ranks(comm)};
    Status status = train(&t);
    trace_close(t.trace);
    log_close(t.log);
    sync_destroy(t.sync);
    shard_norm_destroy(&t.norm);
    adamw_destroy(&t.adamw);
    gpt2_destroy(t.model);
    device_close(&t.device);
    free(t.targets);
    free(t.inputs);
    memory_free(comm_memory(comm), t.grads);
    memory_free(t.settings->optim.zero ? comm_memory(comm) : &host_memory, t.params);
    param_table_free(&t.table);
    tokenizer_close(t.tokenizer);
    loader_close(t.val_data);
    loader_close(t.train_data);
    return status;
}

int main(int argc, char **argv) {
    Settings settings = {0};
    Status status = comm_start(&argc, &argv);
    if (status == OK)
        status = settings_read(&settings, argc, argv);
    status = comm_run(&settings.comm, &settings.loop, status, run_rank, &settings);
    settings_free(&settings);
    return comm_finish("train", status);
}
