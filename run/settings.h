/* The settings of a training run: every section of a config file, with the option tables of train.c's own sections;
 * the rooms bring theirs ([optim], [comm], [loop]). configs/demo.cfg is an example, `./train --help` the manual. */
#ifndef RUN_SETTINGS_H
#define RUN_SETTINGS_H

#include "base/config.h"
#include "comm/comm.h"
#include "model/gpt2.h"
#include "model/ops_replay.h"
#include "optim/adamw.h"

enum { SETTINGS_SECTIONS = 9 };

extern const char run_devices[], train_dtypes[], train_recomputations[]; /* alternatives of run.device, train.* */

typedef struct RunSettings {
    int device; /* index into run_devices */
    bool cuda_graphs, deterministic;
    int64_t threads, seed;
    char out[OPTION_TEXT];
    bool resume;
    double peak_tflops;
} RunSettings;

typedef struct ModelSettings {
    int64_t layers, heads, channels, context, vocab;
    char init[OPTION_TEXT];
} ModelSettings;

typedef struct DataSettings {
    char train[OPTION_TEXT], val[OPTION_TEXT], tokenizer[OPTION_TEXT];
    bool shuffle;
} DataSettings;

typedef struct TrainSettings {
    int64_t batch, seq_len, global_batch, steps, val_every, val_batches;
    int64_t sample_every, sample_tokens, save_every, keep;
    char sample_prompt[OPTION_TEXT];
    int recompute; /* Recompute, in the order of train_recomputations */
    int dtype; /* index into train_dtypes */
} TrainSettings;

typedef struct LogSettings {
    bool jsonl;
    int64_t every;
    char trace[OPTION_TEXT], profile[OPTION_TEXT];
} LogSettings;

typedef struct Settings {
    RunSettings run;
    ModelSettings model;
    DataSettings data;
    TrainSettings train;
    OptimConfig optim;
    CommConfig comm;
    LoopConfig loop;
    ReplayConfig replay;
    LogSettings log;
    bool help, plan; /* --help, --plan */
    const char *file; /* the config file, as given */
    ConfigSection sections[SETTINGS_SECTIONS];
    Config *config; /* owned: remembers which line of which file set each key */
} Settings;

/* Reads "[--plan] FILE.cfg [section.key=value ...]" or "--help" over the defaults and checks what can be checked
 * without knowing the number of ranks. The config points into `settings`, which must not move afterwards. */
Status settings_read(Settings *settings, int argc, char **argv);
void settings_free(Settings *settings); /* accepts a zeroed one */
/* Of every key and value: equal on ranks that were given the same. */
uint64_t settings_hash(const Settings *settings);
void settings_help(const Settings *settings, FILE *out);

/* The model's sizes: from model.init's file when there is one (only the sizes are read), else from [model]. */
Status settings_model(const Settings *settings, Gpt2Config *model);

/* Micro-steps per rank and step, so that ranks * batch * seq_len * micro_steps = global_batch; BAD_INPUT when none
 * fits. */
Status settings_micro_steps(const Settings *settings, int ranks, int64_t *micro_steps);

#endif
