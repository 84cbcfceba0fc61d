/* The validation loss of a run. */
#ifndef RUN_VALIDATE_H
#define RUN_VALIDATE_H

#include "base/log.h"
#include "comm/comm.h"
#include "data/loader.h"
#include "data/tokenizer.h"
#include "model/gpt2.h"
#include "run/settings.h"

typedef struct Validation {
    Comm *comm;
    Gpt2 *model;
    Loader *data;
    const Tokenizer *tokenizer; /* NULL: no bits per byte */
    const TrainSettings *settings;
    int *inputs, *targets; /* i32[batch * seq_len], scratch */
} Validation;

/* Mean loss over the first val_batches batches, dealt out to the ranks; each sequence counts once. Collective: the same
 * figures on every rank, in log->val_loss and val_bits_per_byte. */
Status validate(const Validation *validation, StepLog *log);

#endif
