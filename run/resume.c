#include "run/resume.h"

#include "base/memory.h"
#include "run/shard.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An array as long as the model on rank 0; NULL elsewhere. */
static Status whole_array(const RunState *run, float **array) {
    bool root = comm_rank(run->comm) == 0;
    size_t bytes = (size_t)run->snapshot->table->elems * sizeof(float);
    *array = root ? memory_alloc(&host_memory, bytes) : NULL;
    return comm_agree(run->comm, *array || !root ? OK : fault("no memory to gather a checkpoint"));
}

/* ---- what a run should keep ---- */

/* "KEY=VALUE KEY=VALUE ", for the checkpoint. */
typedef struct Words {
    char *text;
    size_t size;
    const char *wanted; /* of the settings: their names, a space behind each */
} Words;

static void add_word(const Words *words, const char *key, const char *value) {
    size_t used = strlen(words->text);
    snprintf(words->text + used, words->size - used, "%s=%s ", key, value);
}

static void add_count(const Words *words, const char *key, int64_t count) {
    char value[24];
    snprintf(value, sizeof value, "%lld", (long long)count);
    add_word(words, key, value);
}

static void add_setting(void *user, const char *section, const char *key, const char *value) {
    const Words *words = user;
    char name[96];
    snprintf(name, sizeof name, "%s.%s ", section, key);
    if (!strstr(words->wanted, name))
        return;
    name[strlen(name) - 1] = 0;
    add_word(words, name, value);
}

/* All that decides what is learnt from what, but for sizes, which must stay. With other ones a run goes on as a user
 * may well want it to; another order of the sequences repeats some in this epoch and leaves some out. */
static void describe_run(const RunState *run, char *text, size_t size) {
    Words words = {text, size, "run.seed data.shuffle train.steps train.dtype optim.lr optim.min_lr_ratio optim.warmup "
                               "optim.schedule optim.decay_ratio optim.beta1 optim.beta2 optim.eps optim.weight_decay "
                               "optim.grad_clip "};
    text[0] = 0;
    config_visit(run->settings->config, add_setting, &words);
    add_count(&words, "train.global_batch", run->step_tokens);
    add_count(&words, "data.train_tokens", run->data_tokens);
}

/* How many ranks each node has, "3,2"; where they do not stand in a row, or the list is long, the number of nodes and a
 * hash of whose ranks are whose. */
static void list_nodes(const Comm *comm, char *word, size_t size) {
    int runs = 0, run = 1;
    uint32_t hash = 0x811c9dc5; /* FNV-1a */
    word[0] = 0;
    for (int rank = 1; rank <= comm_ranks(comm); rank++, run++) {
        bool ends = rank == comm_ranks(comm) || !comm_same_node(comm, rank - 1, rank);
        size_t used = strlen(word);
        for (int before = 0; before < rank - 1; before++)
            hash = (hash ^ comm_same_node(comm, before, rank - 1)) * 0x01000193;
        if (!ends)
            continue;
        snprintf(word + used, size - used, "%s%d", runs ? "," : "", run);
        runs++;
        run = 0;
    }
    if (runs > comm_nodes(comm) || strlen(word) == size - 1)
        snprintf(word, size, "%d:%08x", comm_nodes(comm), hash);
}

/* All that decides where values are quantised, and by what. */
static void describe_sync(const RunState *run, char *text, size_t size) {
    char word[64];
    Words words = {text, size, "comm.compress comm.compress_scope comm.error_feedback optim.zero "};
    const char *plan = sync_plan(run->sync);
    text[0] = 0;
    config_visit(run->settings->config, add_setting, &words);
    snprintf(word, sizeof word, "%.*s", (int)strcspn(plan, ",:"), plan);
    add_word(&words, "algorithm", word);
    add_count(&words, "ranks", comm_ranks(run->comm));
    list_nodes(run->comm, word, sizeof word / 2);
    add_word(&words, "nodes", word);
}

/* Of "KEY=VALUE KEY=VALUE ...", "" when there is no such key. */
static void value_of(const char *text, const char *key, size_t key_length, char *value, size_t size) {
    value[0] = 0;
    for (; *text; text += strcspn(text, " ") + 1)
        if (strncmp(text, key, key_length) == 0 && text[key_length] == '=')
            snprintf(value, size, "%.*s", (int)(strcspn(text, " ") - key_length - 1), text + key_length + 1);
}

/* "KEY was A, is B; " for each that differs. Returns whether any but the compressor does. */
static bool list_changes(const char *before, const char *now, char *note, size_t size) {
    static const char compressor[] = "comm.compress=";
    bool others = false;
    note[0] = 0;
    for (const char *at = now; *at; at += strcspn(at, " ") + 1) {
        size_t key_length = strcspn(at, "="), used = strlen(note);
        char was[64], is[64];
        value_of(before, at, key_length, was, sizeof was);
        value_of(now, at, key_length, is, sizeof is);
        if (strcmp(was, is) == 0)
            continue;
        snprintf(note + used, size - used, "%.*s was %s, is %s; ", (int)key_length, at,
                 was[0] ? was : "not saved", is);
        others |= strncmp(at, compressor, sizeof compressor - 1) != 0;
    }
    return others;
}

static void compare_run(const RunState *run, char *note, size_t size) {
    char now[sizeof run->snapshot->run];
    note[0] = 0;
    if (!run->snapshot->run[0])
        return; /* an older checkpoint, which does not say */
    describe_run(run, now, sizeof now);
    list_changes(run->snapshot->run, now, note, size);
    if (note[0])
        note[strlen(note) - 2] = 0; /* of the last "; " */
}

/* Whether the checkpoint's residuals fit. */
static bool compare_sync(const RunState *run, char *note, size_t size) {
    char now[sizeof run->snapshot->sync];
    bool saved = run->snapshot->residuals > 0, wanted = sync_residuals(run->sync) > 0;
    describe_sync(run, now, sizeof now);
    bool fit = !list_changes(run->snapshot->sync, now, note, size) && saved && wanted;
    if (!note[0])
        return fit;
    if (!saved && !wanted)
        note[0] = 0;
    else
        strncat(note, fit     ? "the residuals of error feedback are kept"
                      : saved ? wanted ? "the residuals of error feedback do not fit, and start at zero"
                                       : "the residuals of error feedback are dropped"
                              : "residuals of error feedback start at zero",
                size - 1 - strlen(note));
    return fit;
}

/* ---- save ---- */

static Status save_residuals(const RunState *run, const char *folder, float *array) {
    Status status = OK;
    for (int i = 0; i < sync_residuals(run->sync); i++) {
        char name[SNAPSHOT_ARRAY_NAME];
        TRY(sync_residual_fetch(run->sync, i, array));
        if (array)
            status = snapshot_save_array(run->snapshot, folder, sync_residual_name(run->sync, i, name), array);
        TRY(comm_agree(run->comm, status));
    }
    return OK;
}

static Status save_state(const RunState *run, const char *folder, int64_t keep, float *m, float *v) {
    int64_t elems = run->snapshot->table->elems;
    describe_sync(run, run->snapshot->sync, sizeof run->snapshot->sync);
    describe_run(run, run->snapshot->run, sizeof run->snapshot->run);
    TRY(save_residuals(run, folder, m));
    TRY(shard_collect(run->comm, run->sync, run->adamw->m, elems, m));
    TRY(shard_collect(run->comm, run->sync, run->adamw->v, elems, v));
    run->snapshot->m = m;
    run->snapshot->v = v;
    run->snapshot->residuals = sync_residuals(run->sync);
    return comm_agree(run->comm, m ? snapshot_save(run->snapshot, folder, keep) : OK);
}

Status resume_save(const RunState *run, const char *folder, int64_t keep) {
    float *m = NULL, *v = NULL;
    Status status = whole_array(run, &m);
    if (status == OK)
        status = whole_array(run, &v);
    if (status == OK)
        status = save_state(run, folder, keep, m, v);
    memory_free(&host_memory, m);
    memory_free(&host_memory, v);
    return status;
}

/* ---- load ---- */

static Status load_residual(const RunState *run, const char *folder, const char *name, float *array) {
    bool found;
    TRY(snapshot_load_array(run->snapshot, folder, name, array, &found));
    return found ? OK : bad_input("%s: expected %s_%08lld.bin, which belongs to the checkpoint, found no such file",
                                  folder, name, (long long)run->snapshot->step);
}

static Status load_residuals(const RunState *run, const char *folder, float *array, ResumeNotes *notes) {
    bool fit = array && compare_sync(run, notes->sync, sizeof notes->sync);
    TRY(comm_broadcast(run->comm, &fit, sizeof fit, 0));
    for (int i = 0; fit && i < sync_residuals(run->sync); i++) {
        char name[SNAPSHOT_ARRAY_NAME];
        sync_residual_name(run->sync, i, name);
        TRY(comm_agree(run->comm, array ? load_residual(run, folder, name, array) : OK));
        TRY(sync_residual_restore(run->sync, i, array));
    }
    return OK;
}

static Status share(const RunState *run, const float *m, const float *v) {
    Snapshot *snapshot = run->snapshot;
    int64_t elems = snapshot->table->elems;
    int64_t counters[] = {snapshot->step, snapshot->position, snapshot->skipped, snapshot->adamw_step};
    TRY(comm_broadcast(run->comm, counters, sizeof counters, 0));
    snapshot->step = counters[0], snapshot->position = counters[1], snapshot->skipped = counters[2];
    run->adamw->step = snapshot->adamw_step = counters[3];
    TRY(comm_broadcast(run->comm, snapshot->params, (size_t)elems * sizeof(float), 0));
    TRY(shard_distribute(run->comm, run->sync, m, elems, run->adamw->m));
    TRY(shard_distribute(run->comm, run->sync, v, elems, run->adamw->v));
    sync_resume(run->sync, snapshot->step);
    return OK;
}

Status resume_load(const RunState *run, const char *folder, int64_t step, ResumeNotes *notes) {
    float *m = NULL, *v = NULL;
    Status status = whole_array(run, &m);
    if (status == OK)
        status = whole_array(run, &v);
    run->snapshot->m = m;
    run->snapshot->v = v;
    if (status == OK)
        status = comm_agree(run->comm, m ? snapshot_load(run->snapshot, folder, step) : OK);
    if (status == OK)
        status = share(run, m, v);
    if (status == OK)
        status = load_residuals(run, folder, m, notes);
    if (status == OK && m)
        compare_run(run, notes->settings, sizeof notes->settings);
    memory_free(&host_memory, m);
    memory_free(&host_memory, v);
    return status;
}
