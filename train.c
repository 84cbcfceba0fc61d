/* tandem: trains GPT-2 on one rank or many.
 *
 *   settings -> data, model, optimizer, sync -> loop:
 *     forward and backward over the micro-steps; gradients are announced to the sync as they become final
 *     wait for the sync: every rank then holds the mean gradient, the same bits
 *     clip, update: every rank then holds the same parameters, the same bits
 *
 * Rank 0 also shows text, logs and saves. Whether ranks are processes or threads makes no difference here. */
#include "base/clock.h"
#include "base/gpu_range.h"
#include "run/interrupt.h"
#include "run/sample.h"
#include "run/snapshot.h"
#include "run/trainer.h"
#include "run/validate.h"

#include <math.h>

/* Ends a part of the step that began at *since_s; returns its ms. */
static double lap_until(Trainer *t, const char *part, double *since_s, double end_s) {
    double ms = 1e3 * (end_s - *since_s);
    trace_span(t->trace, TRACE_COMPUTE, part, t->step + 1, *since_s, end_s);
    *since_s = end_s;
    return ms;
}
static double lap(Trainer *t, const char *part, double *since_s) { return lap_until(t, part, since_s, clock_s()); }

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
        if (micro == 0) {
            double since_s = clock_s();
            TRY(sync_forward_end(t->sync));
            device_waited(&t->device, since_s);
            stage_forward_end(&t->stage);
            SyncLookup lookup = stage_lookup(&t->stage);
            gpt2_set_lookup(t->model, lookup.rows, lookup.slots, lookup.slot_of_token);
        }
        device_stamp(&t->device, &t->forward_end_s); /* all waiting for parameters is forward's */
        if (last)
            sync_begin(t->sync);
        *loss += gpt2_backward(t->model, t->targets + micro * tokens, 1.0f / (float)t->micro_steps, micro > 0,
                               last ? stage_ready : NULL, &t->stage);
        device_read_stamps(&t->device); /* the loss is here, so forward is over on any device */
        log->forward_ms += lap_until(t, "forward", mark_s, t->forward_end_s);
        log->backward_ms += lap(t, "backward", mark_s);
        if (t->rank == 0)
            log_progress(t->log, (double)t->step + (double)(micro + 1) / (double)t->micro_steps);
    }
    *loss /= (double)t->micro_steps * t->ranks;
    return stage_backward_end(&t->stage);
}

/* Clip and update; a step whose loss or gradient is not finite, which all ranks see alike, changes nothing. */
static Status update(Trainer *t, StepLog *log) {
    const OptimConfig *optim = &t->settings->optim;
    t->tried++;
    log->lr = learning_rate(optim, t->step, t->settings->train.steps);
    if (!t->device.computes) {
        log->grad_norm = NAN;
        t->updated++;
        sync_commit(t->sync);
        return OK;
    }
    const Shard *shard = sync_shard(t->sync, t->rank);
    stage_means_in(&t->stage, shard);
    TRY(shard_norm(&t->norm, t->stage.grads, &log->grad_norm));
    if (isfinite(log->loss) && isfinite(log->grad_norm)) {
        adamw_update(&t->adamw, optim, log->lr, clip_scale(log->grad_norm, optim->grad_clip), t->stage.params,
                     t->stage.grads);
        TRY(shard ? stage_shard_out(&t->stage, shard) : stage_check(&t->stage));
        sync_commit(t->sync);
        t->updated++;
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
    log->forward_ms -= stats.gather_exposed_ms;
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
    trace_sync(t->trace, t->sync, &t->table, t->forward_end_s, backward_end_s);
    gpu_range_begin("update", -1);
    TRY(update(t, log));
    gpu_range_end();
    log->update_ms = lap(t, "update", &mark_s);
    TRY(log_sync(t, log));

    t->step++;
    t->position += t->global_sequences;
    log->step = t->step, log->skipped = t->skipped;
    log->step_ms = 1e3 * (clock_s() - start_s);
    log->tokens_per_s = (double)(t->global_sequences * s->train.seq_len) / log->step_ms * 1e3;
    if (s->comm.verify_every && t->step % s->comm.verify_every == 0) {
        TRY(trainer_gather_params(t));
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
    snprintf(title, sizeof title, "text after %lld step%s", (long long)t->step, t->step == 1 ? "" : "s");
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
        if (t->rank == 0)
            interrupt_step(t->step);
        if (due(t->step, s->train.val_every, last) || due(t->step, s->train.sample_every, last) ||
            due(t->step, s->train.save_every, last))
            TRY(trainer_gather_params(t));
        if (due(t->step, s->train.val_every, last))
            TRY(validate(&(Validation){t->comm, t->model, t->val_data, t->tokenizer, &s->train, t->inputs, t->targets},
                         &log));
        device_step_done(&t->device, t->step);
        if (t->rank == 0)
            log_step(t->log, &log);
        if (t->rank == 0 && due(t->step, s->train.sample_every, last))
            show_sample(t);
        if (t->device.computes && due(t->step, s->train.save_every, last))
            TRY(trainer_save(t));
    }
    return OK;
}

static Status train(Trainer *t) {
    if (t->settings->help) {
        if (t->rank == 0)
            settings_help(t->settings, stdout);
        return OK;
    }
    if (t->rank == 0)
        interrupt_watch(t->settings->run.out, t->settings->run.resume ? snapshot_newest(t->settings->run.out) : 0);
    TRY(trainer_check(t));
    if (t->settings->plan)
        return OK;
    TRY(trainer_build(t));
    TRY(train_loop(t));
    return trainer_finish(t);
}

static Status run_rank(Comm *comm, void *settings) {
    Trainer trainer = {.settings = settings, .comm = comm, .rank = comm_rank(comm), .ranks = comm_ranks(comm)};
    Status status = train(&trainer);
    if (trainer.rank == 0 && (status != FAULT || comm_outcome_shared(comm)))
        interrupt_end(); /* not where one rank fails: it may be that others got the signal first */
    trainer_destroy(&trainer);
    return status;
}

int main(int argc, char **argv) {
    Settings settings = {0};
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ); /* a file shows each line when it is written, as a terminal does */
    Status status = comm_start(&argc, &argv);
    if (status == OK)
        status = settings_read(&settings, argc, argv);
    status = comm_run(&settings.comm, &settings.loop, status, run_rank, &settings);
    settings_free(&settings);
    return comm_finish("train", status);
}
