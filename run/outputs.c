/* A run writes into run.out under names of its own (snapshot.h, log.jsonl, model.bin), and to log.trace and
 * log.profile. Two names are one file when their real paths are equal; of one that is not there yet, the real path of
 * the folders that are, and the rest as it is written. */
#define _XOPEN_SOURCE 700
#include "run/outputs.h"

#include "base/file.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct File {
    const char *key, *path; /* path "": none */
} File;

enum { LOGS = 2, INPUTS = 4, PATH_BYTES = PATH_MAX + 2 * OPTION_TEXT };

/* Cuts the last name off the path: "a/b" leaves "a/", "b" leaves "". */
static void cut_name(char *path) {
    size_t length = strlen(path);
    while (length > 0 && path[length - 1] == '/')
        length--;
    while (length > 0 && path[length - 1] != '/')
        length--;
    path[length] = 0;
}

static void resolve(const char *path, char resolved[PATH_BYTES]) {
    char there[PATH_BYTES];
    snprintf(there, sizeof there, "%s", path);
    while (there[0] && !realpath(there, resolved))
        cut_name(there);
    if (!there[0] && !realpath(".", resolved))
        resolved[0] = 0;
    size_t used = strlen(resolved);
    const char *rest = path + strlen(there);
    snprintf(resolved + used, PATH_BYTES - used, "%s%s", *rest ? "/" : "", rest);
}

static bool same_file(const char *a, const char *b) {
    char real_a[PATH_BYTES], real_b[PATH_BYTES];
    resolve(a, real_a);
    resolve(b, real_b);
    return a[0] && b[0] && strcmp(real_a, real_b) == 0;
}

/* By its name one of those that the run writes, renames or removes in its folder. */
static bool is_of_run(const char *path, const char *folder) {
    static const char *const names[] = {"model", "state_", "residual", "log.jsonl", ".lock"};
    char real_folder[PATH_BYTES], real[PATH_BYTES];
    resolve(folder, real_folder);
    resolve(path, real);
    size_t length = strlen(real_folder);
    if (!path[0] || strncmp(real, real_folder, length) != 0 || real[length] != '/')
        return false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(real + length + 1, names[i], strlen(names[i])) == 0)
            return true;
    return false;
}

static Status check_writable(const Settings *s, const File *file) {
    char name[PATH_BYTES];
    const char *folder = name;
    struct stat info;
    if (lstat(file->path, &info) == 0 && !S_ISREG(info.st_mode))
        return config_error(s->config, file->key, "expected a regular file, or none, to write to, found %s",
                            file->path);
    snprintf(name, sizeof name, "%s", file->path);
    cut_name(name);
    if (!name[0])
        folder = ".";
    if (same_file(folder, s->run.out))
        return OK; /* made later, if need be */
    if (stat(folder, &info) != 0)
        return config_error(s->config, file->key, "expected a file in a folder that is there, found %s", file->path);
    return folder_check_writable(folder);
}

static Status check_shards(const Settings *s, const File *log, const Loader *data) {
    for (int i = 0; data && i < loader_shards(data); i++)
        if (same_file(log->path, loader_shard(data, i)))
            return config_error(s->config, log->key, "expected a file of its own, found a data shard, %s", log->path);
    return OK;
}

Status outputs_check(const Settings *s, const Loader *train, const Loader *val) {
    const File logs[LOGS] = {{"log.trace", s->log.trace}, {"log.profile", s->log.profile}};
    const File inputs[INPUTS] = {{"the config file", s->file}, {"model.init", s->model.init},
                                 {"data.tokenizer", s->data.tokenizer}, {"replay.profile", s->replay.profile}};
    TRY(folder_check_writable(s->run.out));
    for (const File *log = logs; log < logs + LOGS; log++) {
        if (!log->path[0])
            continue;
        if (is_of_run(log->path, s->run.out))
            return config_error(s->config, log->key, "expected a file that the run does not write in its folder "
                                "itself, found %s", log->path);
        if (log > logs && same_file(log->path, logs[0].path))
            return config_error(s->config, log->key, "expected another file than %s, found %s", logs[0].key,
                                log->path);
        for (const File *input = inputs; input < inputs + INPUTS; input++)
            if (same_file(log->path, input->path))
                return config_error(s->config, log->key, "expected a file of its own, found that of %s, %s",
                                    input->key, log->path);
        TRY(check_shards(s, log, train));
        TRY(check_shards(s, log, val));
        TRY(check_writable(s, log));
    }
    for (const File *input = inputs; input < inputs + INPUTS; input++)
        if (is_of_run(input->path, s->run.out))
            return config_error(s->config, "run.out", "expected another folder than that of %s, %s, which the run "
                                "would overwrite or remove", input->key, input->path);
    return OK;
}
