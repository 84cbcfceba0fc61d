/* What a training run tells: log.jsonl for programs; header, progress and closing table for people. Rank 0 only.
 *
 * log.jsonl: the first line says what runs, {"options": {every key}, "run": {"model": ..., "data": ..., "ranks":
 * ...}}, then one object per step with the fields of StepLog under the same names: null where a measured one is not
 * finite. A file that can no longer be written gives one warning, and the run goes on without. */
#ifndef BASE_LOG_H
#define BASE_LOG_H

#include "base/config.h"
#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct StepLog {
    int64_t step;      /* 1 is the first update */
    double loss;       /* mean over all tokens of the global batch, nats per token */
    double lr;
    double grad_norm;  /* before clipping */
    double tokens_per_s;
    double step_ms, forward_ms, backward_ms, update_ms; /* wall time; forward and backward sum over micro-steps,
                                                         * forward without waiting for parameters */
    double comm_ms, comm_exposed_ms;                    /* of rank 0; see comm/comm.h */
    double bytes_intra, bytes_inter;                    /* sent by all ranks */
    double compress_error; /* relative RMS error of compression; 0 without */
    int64_t skipped;       /* steps without update so far, for a non-finite loss or gradient */
    bool validated;        /* the next two were measured at this step; else they are not read */
    double val_loss;
    double val_bits_per_byte; /* NaN when no tokenizer tells the bytes of a token */
} StepLog;

typedef struct Log Log;

/* `steps` is the last step of the run; every `every` steps there is a line on the terminal, without the loss where
 * nothing is computed. Owned; log_close accepts NULL. */
Log *log_open(int64_t steps, int64_t every, bool computes);
void log_close(Log *log);

/* Starts log.jsonl at `path`, or goes on in the one that is there when the run resumes after step `done` > 0: lines
 * of later steps, and those that are not whole, are dropped. "" for none. BAD_INPUT when it cannot be written. */
Status log_jsonl(Log *log, const char *path, int64_t done);

/* A line "name  value" of the run header, or of the closing table. Those of the header go into the first JSONL line. */
void log_fact(Log *log, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
void log_warning(Log *log, const char *format, ...) __attribute__((format(printf, 2, 3)));
void log_start(Log *log, const Config *config); /* ends the header: writes the first JSONL line, starts the clock */

void log_step(Log *log, const StepLog *step); /* once per step */
void log_progress(Log *log, double steps_done); /* inside a step: 12.25 is a quarter of step 13 */
void log_text(Log *log, const char *title, const char *prompt, const char *text); /* a sample: title, prompt + text */

/* The closing table, from all steps; log_fact may add lines behind it. Returns the mean tokens per second. */
double log_summary(Log *log);

#endif
