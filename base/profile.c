#include "base/profile.h"

#include "base/file.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 256, ENTRIES_MAX = 1 << 20 };

void profile_free(Profile *profile) {
    free(profile->entries);
    *profile = (Profile){0};
}

static bool is(const ProfileEntry *entry, const char *op, int layer, int in, int out) {
    return entry->layer == layer && entry->in == in && entry->out == out && strcmp(entry->op, op) == 0;
}

ProfileEntry *profile_find(Profile *profile, const char *op, int layer, int in, int out) {
    for (int i = 1; i <= profile->count; i++) {
        int at = (profile->last + i) % profile->count;
        if (is(&profile->entries[at], op, layer, in, out)) {
            profile->last = at;
            return &profile->entries[at];
        }
    }
    return NULL;
}

static ProfileEntry *append(Profile *profile, const char *op, int layer, int in, int out) {
    if (profile->count == profile->room) {
        profile->room = profile->room ? 2 * profile->room : 64;
        profile->entries = realloc(profile->entries, (size_t)profile->room * sizeof *profile->entries);
        assert(profile->entries);
    }
    profile->last = profile->count++;
    ProfileEntry *entry = &profile->entries[profile->last];
    *entry = (ProfileEntry){.layer = layer, .in = in, .out = out};
    snprintf(entry->op, sizeof entry->op, "%s", op);
    return entry;
}

void profile_add(Profile *profile, const char *op, int layer, int in, int out, double rows, double ms) {
    ProfileEntry *entry = profile_find(profile, op, layer, in, out);
    if (!entry)
        entry = append(profile, op, layer, in, out);
    entry->calls++;
    entry->rows += (rows - entry->rows) / (double)entry->calls;
    entry->ms += (ms - entry->ms) / (double)entry->calls;
}

void profile_clear(Profile *profile) {
    for (int i = 0; i < profile->count; i++)
        profile->entries[i].calls = 0, profile->entries[i].rows = 0, profile->entries[i].ms = 0;
}

Status profile_write(const Profile *profile, const char *path) {
    AtomicFile file;
    TRY(atomic_open(&file, path));
    fprintf(file.stream, "# %4s %-20s %7s %7s %9s %8s %12s\n", "layer", "operation", "in", "out", "rows", "calls",
            "ms");
    for (int i = 0; i < profile->count; i++) {
        const ProfileEntry *entry = &profile->entries[i];
        if (entry->calls > 0)
            fprintf(file.stream, "%7d %-20s %7d %7d %9.1f %8lld %12.5f\n", entry->layer, entry->op, entry->in,
                    entry->out, entry->rows, (long long)entry->calls, entry->ms);
    }
    return atomic_commit(&file);
}

/* One line without its newline; a blank one adds nothing. */
static Status read_line(Profile *profile, const char *text, const char *path, int line) {
    ProfileEntry entry = {0};
    char calls[24], rest;
    if (text[strspn(text, " \t\r")] == 0)
        return OK;
    int fields = sscanf(text, "%d %31s %d %d %lf %23s %lf %c", &entry.layer, entry.op, &entry.in, &entry.out,
                        &entry.rows, calls, &entry.ms, &rest);
    char *end = calls;
    entry.calls = fields == 7 ? strtoll(calls, &end, 10) : 0;
    if (fields != 7 || *end)
        return bad_input("%s:%d: expected 'layer operation in out rows calls ms', found '%s'", path, line, text);
    if (entry.layer < -1 || entry.in < 1 || entry.out < 1 || entry.calls < 1 || !(entry.rows > 0 && entry.rows < 1e12))
        return bad_input("%s:%d: expected a layer from -1 on and widths, rows and calls above 0, found '%s'", path,
                         line, text);
    if (!(entry.ms >= 0 && entry.ms < 1e9))
        return bad_input("%s:%d: expected milliseconds in [0, 1e9), found %g", path, line, entry.ms);
    if (profile_find(profile, entry.op, entry.layer, entry.in, entry.out))
        return bad_input("%s:%d: %s %d %d of layer %d stands here a second time", path, line, entry.op, entry.in,
                         entry.out, entry.layer);
    if (profile->count == ENTRIES_MAX)
        return bad_input("%s:%d: expected at most %d operations", path, line, ENTRIES_MAX);
    *append(profile, entry.op, entry.layer, entry.in, entry.out) = entry;
    return OK;
}

static Status read_lines(Profile *profile, const FileMap *map, const char *path) {
    const char *at = (const char *)map->bytes, *end = at + map->size;
    for (int line = 1; at < end; line++) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        size_t length = (size_t)((newline ? newline : end) - at);
        char text[LINE];
        if (length >= sizeof text)
            return bad_input("%s:%d: expected at most %d characters, found %zu", path, line, LINE - 1, length);
        memcpy(text, at, length);
        text[length] = 0;
        text[strcspn(text, "#")] = 0;
        TRY(read_line(profile, text, path, line));
        at += length + 1;
    }
    return profile->count ? OK : bad_input("%s: no operation in this profile", path);
}

Status profile_read(Profile *profile, const char *path) {
    FileMap map;
    profile_free(profile);
    TRY(file_map(&map, path));
    Status status = read_lines(profile, &map, path);
    file_unmap(&map);
    if (status != OK)
        profile_free(profile);
    return status;
}
