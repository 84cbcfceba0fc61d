#define _DEFAULT_SOURCE
#include "run/snapshot.h"

#include "base/state.h"
#include "model/checkpoint.h"

#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { PATH_BYTES = 320, COUNTERS = 9 };

static void file_name(char *path, const char *folder, const char *kind, int64_t step) {
    snprintf(path, PATH_BYTES, "%s/%s_%08lld.bin", folder, kind, (long long)step);
}

/* The newest step below `below` with a state file, -1 when there is none. */
static int64_t newest_below(const char *folder, int64_t below) {
    DIR *listing = opendir(folder);
    int64_t newest = -1;
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        long long step;
        int end = 0;
        if (sscanf(entry->d_name, "state_%lld.bin%n", &step, &end) == 1 && end && !entry->d_name[end] &&
            step < below && step > newest)
            newest = step;
    }
    if (listing)
        closedir(listing);
    return newest;
}

static bool begins(const char *name, const char *with) { return strncmp(name, with, strlen(with)) == 0; }

/* Temporary files of killed writers, and what belongs to a checkpoint whose state was never written or is gone. */
static bool is_leftover(const char *folder, const char *name) {
    char state[PATH_BYTES];
    long long step;
    int end = 0;
    size_t length = strlen(name);
    if (length > 4 && strcmp(name + length - 4, ".tmp") == 0)
        return begins(name, "model") || begins(name, "state_") || begins(name, "residual");
    const char *number = strrchr(name, '_');
    bool ours = begins(name, "residual") || (begins(name, "model_") && number == name + strlen("model"));
    if (!ours || !number ||
        sscanf(number, "_%lld.bin%n", &step, &end) != 1 || !end || number[end])
        return false;
    file_name(state, folder, "state", step);
    return access(state, F_OK) != 0;
}

static void remove_leftovers(const char *folder) {
    char path[2 * PATH_BYTES];
    DIR *listing = opendir(folder);
    for (struct dirent *entry; listing && (entry = readdir(listing));)
        if (is_leftover(folder, entry->d_name)) {
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
            unlink(path);
        }
    if (listing)
        closedir(listing);
}

Status snapshot_open_folder(const char *folder, bool resume) {
    char path[PATH_BYTES];
    TRY(folder_create(folder));
    snprintf(path, sizeof path, "%s/.lock", folder);
    int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666); /* stays open: the lock is the process's */
    if (lock < 0)
        return bad_input("%s: cannot create: %s", path, strerror(errno));
    if (flock(lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        close(lock);
        return bad_input("%s: another run is writing to this folder", folder);
    }
    int64_t newest = snapshot_newest(folder);
    if (newest >= 0 && !resume)
        return bad_input("%s: holds checkpoints of an earlier run, up to step %lld; set run.resume=yes to go on with "
                         "it, or choose another run.out", folder, (long long)newest);
    remove_leftovers(folder);
    return OK;
}

int64_t snapshot_newest(const char *folder) { return newest_below(folder, INT64_MAX); }

static void remove_beyond(const char *folder, int64_t step, int64_t keep) {
    char path[PATH_BYTES];
    for (int64_t kept = 0; step >= 0; kept++, step = newest_below(folder, step)) {
        if (kept < keep)
            continue;
        file_name(path, folder, "state", step); /* first, so that no state stands without its model */
        unlink(path);
    }
    remove_leftovers(folder);
}

/* ---- the state file ---- */

/* Does not depend on the order of the tensors. */
static uint64_t params_checksum(const Snapshot *snapshot) {
    uint64_t sum = 0;
    for (const Param *p = snapshot->table->params; p < snapshot->table->params + snapshot->table->param_count; p++)
        sum += state_checksum(snapshot->params + p->offset, (size_t)p->elems * sizeof(float));
    return sum;
}

/* "adamw.m.wte", or with the layer "adamw.m.qkvw.11". */
static void item_name(char name[STATE_NAME], const char *array, const Param *param) {
    if (param->layer < 0)
        snprintf(name, STATE_NAME, "%s.%s", array, param->name);
    else
        snprintf(name, STATE_NAME, "%s.%s.%d", array, param->name, param->layer);
}

typedef char ItemName[STATE_NAME];

/* One item per tensor, and the names that they point to. */
static void list_array(const ParamTable *table, const char *array, const float *values, StateItem *items,
                         ItemName *names) {
    for (int i = 0; i < table->param_count; i++) {
        const Param *param = &table->params[i];
        item_name(names[i], array, param);
        items[i] = (StateItem){names[i], values + param->offset, (size_t)param->elems * sizeof(float)};
    }
}

static Status save_state(const Snapshot *snapshot, const char *path) {
    const ParamTable *table = snapshot->table;
    uint64_t checksum = params_checksum(snapshot);
    const StateItem counters[COUNTERS] = {
        {"step", &snapshot->step, sizeof snapshot->step},
        {"position", &snapshot->position, sizeof snapshot->position},
        {"skipped", &snapshot->skipped, sizeof snapshot->skipped},
        {"seq_len", &snapshot->seq_len, sizeof snapshot->seq_len},
        {"params.checksum", &checksum, sizeof checksum},
        {"adamw.step", &snapshot->adamw_step, sizeof snapshot->adamw_step},
        {"residuals", &snapshot->residuals, sizeof snapshot->residuals},
        {"sync", snapshot->sync, sizeof snapshot->sync},
        {"run", snapshot->run, sizeof snapshot->run},
    };
    int tensors = table->param_count, count = COUNTERS + 2 * tensors;
    StateItem *items = calloc((size_t)count, sizeof *items);
    ItemName *names = calloc(2 * (size_t)tensors, sizeof *names);
    Status status = items && names ? OK : fault("%s: out of memory", path);
    if (status == OK) {
        memcpy(items, counters, sizeof counters);
        list_array(table, "adamw.m", snapshot->m, items + COUNTERS, names);
        list_array(table, "adamw.v", snapshot->v, items + COUNTERS + tensors, names + tensors);
        status = state_save(path, items, count);
    }
    free(names);
    free(items);
    return status;
}

static Status read_array(const ParamTable *table, State *state, const char *array, float *values) {
    char name[STATE_NAME];
    for (const Param *p = table->params; p < table->params + table->param_count; p++) {
        item_name(name, array, p);
        TRY(state_read(state, name, values + p->offset, (size_t)p->elems * sizeof(float)));
    }
    return OK;
}

/* What ties the file of an array to its checkpoint. */
typedef struct Tie {
    StateItem item;
    const char *found; /* where it differs */
} Tie;
enum { TIES = 4 };

typedef struct Ties {
    char name[SNAPSHOT_ARRAY_NAME];
    uint64_t checksum;
    Tie ties[TIES];
} Ties;

static void tie(Ties *t, const Snapshot *snapshot, const char *name) {
    *t = (Ties){.checksum = params_checksum(snapshot)};
    snprintf(t->name, sizeof t->name, "%s", name);
    const Tie ties[TIES] = {{{"name", t->name, sizeof t->name}, "another rank's or node's"},
                            {{"step", &snapshot->step, sizeof snapshot->step}, "those of another step"},
                            {{"sync", snapshot->sync, sizeof snapshot->sync}, "those of another plan"},
                            {{"params.checksum", &t->checksum, sizeof t->checksum}, "another run's"}};
    memcpy(t->ties, ties, sizeof ties);
}

static Status check_ties(const Snapshot *snapshot, State *state, const char *path, const char *name) {
    Ties expected;
    char found[sizeof snapshot->sync];
    tie(&expected, snapshot, name);
    for (const Tie *t = expected.ties; t < expected.ties + TIES; t++) {
        TRY(state_read(state, t->item.name, found, t->item.bytes));
        if (memcmp(found, t->item.data, t->item.bytes) != 0)
            return bad_input("%s: expected the residuals that were saved with this checkpoint, found %s", path,
                             t->found);
    }
    return OK;
}

Status snapshot_save_array(const Snapshot *snapshot, const char *folder, const char *name, const float *values) {
    char path[PATH_BYTES];
    const ParamTable *table = snapshot->table;
    StateItem *items = calloc((size_t)(table->param_count + TIES), sizeof *items);
    ItemName *names = calloc((size_t)table->param_count, sizeof *names);
    Ties ties;
    file_name(path, folder, name, snapshot->step);
    Status status = items && names ? OK : fault("%s: out of memory", path);
    if (status == OK) {
        tie(&ties, snapshot, name);
        for (int i = 0; i < TIES; i++)
            items[i] = ties.ties[i].item;
        list_array(table, "values", values, items + TIES, names);
        status = state_save(path, items, TIES + table->param_count);
    }
    free(names);
    free(items);
    return status;
}

Status snapshot_load_array(const Snapshot *snapshot, const char *folder, const char *name, float *values, bool *found) {
    char path[PATH_BYTES];
    State *state = NULL;
    file_name(path, folder, name, snapshot->step);
    *found = access(path, F_OK) == 0;
    if (!*found)
        return OK;
    TRY(state_open(&state, path));
    Status status = check_ties(snapshot, state, path, name);
    if (status == OK)
        status = read_array(snapshot->table, state, "values", values);
    state_close(state);
    return status;
}

Status snapshot_save(const Snapshot *snapshot, const char *folder, int64_t keep) {
    char path[PATH_BYTES];
    file_name(path, folder, "model", snapshot->step);
    TRY(checkpoint_write(path, snapshot->config, snapshot->table, snapshot->params));
    file_name(path, folder, "state", snapshot->step);
    TRY(save_state(snapshot, path));
    remove_beyond(folder, snapshot->step, keep);
    return OK;
}

static Status check_sizes(const Snapshot *snapshot, const char *path) {
    Gpt2Config found;
    TRY(checkpoint_read_config(path, &found));
    const Gpt2Config *expected = snapshot->config;
    if (found.layers != expected->layers || found.heads != expected->heads || found.channels != expected->channels ||
        found.context != expected->context || found.vocab != expected->vocab)
        return bad_input("%s: expected the run's model, L%d NH%d C%d context %d vocabulary %d, found L%d NH%d C%d "
                         "context %d vocabulary %d", path, expected->layers, expected->heads, expected->channels,
                         expected->context, expected->vocab, found.layers, found.heads, found.channels, found.context,
                         found.vocab);
    return OK;
}

static Status check_state(const Snapshot *snapshot, State *state, const char *path) {
    int64_t seq_len;
    uint64_t checksum;
    TRY(state_read(state, "params.checksum", &checksum, sizeof checksum));
    if (checksum != params_checksum(snapshot))
        return bad_input("%s: expected the state of the model file beside it, found another model's", path);
    TRY(state_read(state, "seq_len", &seq_len, sizeof seq_len));
    if (seq_len != snapshot->seq_len)
        return bad_input("%s: expected train.seq_len = %lld as in the run that wrote it, found %lld", path,
                         (long long)seq_len, (long long)snapshot->seq_len);
    return OK;
}

/* Older files do not say: then it is empty. */
static Status read_text(State *state, const char *name, char *text, size_t size) {
    text[0] = 0;
    if (state_has(state, name))
        TRY(state_read(state, name, text, size));
    text[size - 1] = 0;
    return OK;
}

static Status read_sync(Snapshot *snapshot, State *state) {
    snapshot->residuals = 0;
    if (state_has(state, "residuals"))
        TRY(state_read(state, "residuals", &snapshot->residuals, sizeof snapshot->residuals));
    TRY(read_text(state, "sync", snapshot->sync, sizeof snapshot->sync));
    return read_text(state, "run", snapshot->run, sizeof snapshot->run);
}

static Status read_state(Snapshot *snapshot, State *state, const char *path) {
    TRY(check_state(snapshot, state, path));
    TRY(state_read(state, "step", &snapshot->step, sizeof snapshot->step));
    TRY(state_read(state, "position", &snapshot->position, sizeof snapshot->position));
    TRY(state_read(state, "skipped", &snapshot->skipped, sizeof snapshot->skipped));
    TRY(state_read(state, "adamw.step", &snapshot->adamw_step, sizeof snapshot->adamw_step));
    TRY(read_sync(snapshot, state));
    TRY(read_array(snapshot->table, state, "adamw.m", snapshot->m));
    return read_array(snapshot->table, state, "adamw.v", snapshot->v);
}

Status snapshot_load(Snapshot *snapshot, const char *folder, int64_t step) {
    char path[PATH_BYTES];
    file_name(path, folder, "model", step);
    TRY(check_sizes(snapshot, path));
    TRY(checkpoint_read_params(path, snapshot->config, snapshot->table, snapshot->params));
    file_name(path, folder, "state", step);
    State *state = NULL;
    TRY(state_open(&state, path));
    Status status = read_state(snapshot, state, path);
    state_close(state);
    return status;
}
