#define _DEFAULT_SOURCE
#include "run/snapshot.h"

#include "base/state.h"
#include "model/checkpoint.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { PATH_BYTES = 320 };

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

int64_t snapshot_newest(const char *folder) { return newest_below(folder, INT64_MAX); }

static void remove_beyond(const char *folder, int64_t step, int64_t keep) {
    char path[PATH_BYTES];
    for (int64_t kept = 0; step >= 0; kept++, step = newest_below(folder, step)) {
        if (kept < keep)
            continue;
        file_name(path, folder, "state", step); /* first, so that no state stands without its model */
        unlink(path);
        file_name(path, folder, "model", step);
        unlink(path);
    }
}

Status snapshot_save(const Snapshot *snapshot, const char *folder, int64_t keep) {
    char path[PATH_BYTES];
    size_t bytes = (size_t)snapshot->table->elems * sizeof(float);
    Snapshot counters = *snapshot;
    const StateItem items[] = {
        {"step", &counters.step, sizeof counters.step},
        {"position", &counters.position, sizeof counters.position},
        {"skipped", &counters.skipped, sizeof counters.skipped},
        {"adamw.step", &snapshot->adamw->step, sizeof snapshot->adamw->step},
        {"adamw.m", snapshot->adamw->m, bytes},
        {"adamw.v", snapshot->adamw->v, bytes},
    };
    file_name(path, folder, "model", snapshot->step);
    TRY(checkpoint_write(path, snapshot->config, snapshot->table, snapshot->params));
    file_name(path, folder, "state", snapshot->step);
    TRY(state_save(path, items, sizeof items / sizeof *items));
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

static Status read_state(Snapshot *snapshot, State *state) {
    size_t bytes = (size_t)snapshot->table->elems * sizeof(float);
    TRY(state_read(state, "step", &snapshot->step, sizeof snapshot->step));
    TRY(state_read(state, "position", &snapshot->position, sizeof snapshot->position));
    TRY(state_read(state, "skipped", &snapshot->skipped, sizeof snapshot->skipped));
    TRY(state_read(state, "adamw.step", &snapshot->adamw->step, sizeof snapshot->adamw->step));
    TRY(state_read(state, "adamw.m", snapshot->adamw->m, bytes));
    return state_read(state, "adamw.v", snapshot->adamw->v, bytes);
}

Status snapshot_load(Snapshot *snapshot, const char *folder, int64_t step) {
    char path[PATH_BYTES];
    file_name(path, folder, "model", step);
    TRY(check_sizes(snapshot, path));
    TRY(checkpoint_read_params(path, snapshot->config, snapshot->table, snapshot->params));
    file_name(path, folder, "state", step);
    State *state = NULL;
    TRY(state_open(&state, path));
    Status status = read_state(snapshot, state);
    state_close(state);
    return status;
}
