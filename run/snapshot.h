/* Checkpoints of a run in its folder: model_00001000.bin (llm.c's format, ready for build/generate) and
 * state_00001000.bin (all that an exact resume needs besides). The state is written last, so a checkpoint is complete
 * when its state file is there; each file appears complete or not at all. Both name tensors, so a run can go on with
 * another layout of the flat arrays (gpt2_param_table). */
#ifndef RUN_SNAPSHOT_H
#define RUN_SNAPSHOT_H

#include "base/error.h"
#include "model/gpt2.h"

#include <stdint.h>

enum { SNAPSHOT_ARRAY_NAME = 32 }; /* bytes of an array's name */

typedef struct Snapshot {
    const Gpt2Config *config;
    const ParamTable *table;
    float *params;      /* f32[table->elems] */
    float *m, *v;       /* f32[table->elems], AdamW's moments: whole, also where each rank keeps its shard of them */
    int64_t adamw_step; /* updates done */
    int64_t step;       /* updates tried, skipped ones included */
    int64_t position;   /* of the next sequence, see data/loader.h */
    int64_t skipped;
    int64_t seq_len;    /* of a sequence, in tokens: what position counts */
    int64_t residuals;  /* arrays of error feedback that were saved with it */
    char sync[256];     /* how gradients travelled, "KEY=VALUE KEY=VALUE ...", run/resume.c's; may be empty */
    char run[512];      /* settings that a run should keep, likewise */
} Snapshot;

/* Makes the folder this run's: creates it, locks it against a second run (until the process ends) and removes what a
 * killed one left half-written. BAD_INPUT when another run holds it, or when it holds checkpoints and `resume` is
 * false. */
Status snapshot_open_folder(const char *folder, bool resume);

/* An array that belongs to the checkpoint of snapshot->step: values f32[table->elems], kept in a file of its own, such
 * as residual_node0_00001000.bin, that names tensors too. To be saved before the checkpoint, whose state file makes it
 * complete, with the same params and sync. Loading, behind snapshot_load: *found is false, and values are untouched,
 * when there is none of that name; BAD_INPUT when it was saved with another checkpoint or under another name. */
Status snapshot_save_array(const Snapshot *snapshot, const char *folder, const char *name, const float *values);
Status snapshot_load_array(const Snapshot *snapshot, const char *folder, const char *name, float *values, bool *found);

/* Writes the checkpoint of snapshot->step into the folder and removes the oldest ones beyond `keep`. */
Status snapshot_save(const Snapshot *snapshot, const char *folder, int64_t keep);

/* The step of the newest complete checkpoint, -1 when there is none. */
int64_t snapshot_newest(const char *folder);

/* Fills params, moments and counters from the checkpoint of that step; BAD_INPUT when its model has other sizes,
 * when its two files do not belong together, or when seq_len is another one. */
Status snapshot_load(Snapshot *snapshot, const char *folder, int64_t step);

#endif
