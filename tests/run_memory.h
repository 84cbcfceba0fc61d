/* Runs that are checked and built, but take no step, in a folder of their own: for tests of the memory they take. */
#ifndef TESTS_RUN_MEMORY_H
#define TESTS_RUN_MEMORY_H

#include "run/trainer.h"
#include "tests/check.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ARGUMENTS_MAX = 16 };

typedef Status WatchFn(Trainer *trainer); /* instead of the steps */

typedef struct WatchedRun {
    Settings settings;
    WatchFn *watch;
} WatchedRun;

static const char model_text[] = "[model]\nlayers = 3\nheads = 3\nchannels = 48\ncontext = 32\nvocab = 257\n"
                                 "[data]\ntokenizer = none\n[train]\nseq_len = 31\nbatch = 2\n[comm]\ncalibrate = no\n";

static Status watch_rank(Comm *comm, void *watched) {
    WatchedRun *run = watched;
    Trainer trainer = {.settings = &run->settings, .comm = comm, .rank = comm_rank(comm), .ranks = comm_ranks(comm)};
    Status status = run->watch(&trainer);
    trainer_destroy(&trainer);
    return status;
}

static void write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void write_shard(const char *path) {
    const int32_t header[256] = {20240520, 1, 128};
    const uint16_t tokens[128] = {1, 2, 3};
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fwrite(header, sizeof header, 1, file);
    fwrite(tokens, sizeof tokens, 1, file);
    fclose(file);
}

/* arguments: keys with values, separated by spaces. */
static Status run_watched(const char *arguments, WatchFn *watch) {
    char folder[] = "/tmp/tandem_test_XXXXXX", config[64], train[64], out[64], line[512], command[96];
    char *argv[ARGUMENTS_MAX] = {"train", config, train, out}, *rest = line;
    int argc = 4;
    assert_non_null(mkdtemp(folder));
    snprintf(config, sizeof config, "%s/t.cfg", folder);
    snprintf(train, sizeof train, "data.train=%s/t.bin", folder);
    snprintf(out, sizeof out, "run.out=%s/out", folder);
    snprintf(line, sizeof line, "%s", arguments);
    write_text(config, model_text);
    write_shard(train + strlen("data.train="));
    for (char *word; (word = strsep(&rest, " "));)
        argv[argc++] = word;
    WatchedRun run = {.watch = watch};
    Status status = settings_read(&run.settings, argc, argv);
    status = comm_run(&run.settings.comm, &run.settings.loop, status, watch_rank, &run);
    settings_free(&run.settings);
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
    return status;
}

#endif
