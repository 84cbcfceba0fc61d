/* What a run takes of memory, before it takes it: sizes are asked of those who will allocate (gpt2_activation_bytes,
 * cuda_ops_bytes, adamw_bytes, ...), so that the sum is what trainer_build allocates. */
#ifndef RUN_MEMORY_H
#define RUN_MEMORY_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>

struct SyncOutline;
struct Trainer;

/* Bytes of a rank: large arrays where its model is computed. */
typedef struct RunMemory {
    size_t params, grads, moments, activations;
    size_t work;      /* copies of weights, workspaces, gradients on their way */
    size_t available; /* for this rank, when nothing was allocated yet */
} RunMemory;

size_t memory_total(const RunMemory *memory);

/* Fills trainer->memory, tells it in the header, with the largest train.batch that fits, and refuses what does not fit:
 * BAD_INPUT. Collective. */
Status memory_check(struct Trainer *trainer, const struct SyncOutline *sync);

/* If status is that memory ran out although there seemed to be enough: the line says whose, how much was asked for and
 * is free, and what to do. `later`: what was still to be asked for. */
Status memory_explain(const struct Trainer *trainer, Status status, size_t later);

#endif
