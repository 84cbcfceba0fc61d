/* The tied embedding's second gradient. The token embedding's matrix is used twice: by the head, whose gradient is
 * dense and final first, and by the lookup, whose gradient is final last and has at most one row per token of the
 * step. So the lookup's gradient is kept in an array of its own, that holds a row for each token id that any rank will
 * look up in this step, and nothing else:
 *
 *     ids of rank 0   5 9 9 2          union   2 5 7 9        slot of 7: 2
 *     ids of rank 1   7 2 2 2          rows    f32[4][C]      the same on every rank
 *
 * The ids travel before backward, one bit per id of the vocabulary. The rows are reduced like a bucket and added to the
 * matrix' gradient. Where the union is larger than half of the vocabulary that would not pay: the lookup then adds to
 * the dense gradient as ever, on every rank alike. */
#ifndef COMM_LOOKUP_H
#define COMM_LOOKUP_H

#include "comm/internal.h"

typedef struct Lookup {
    /* set once */
    int vocab, channels;
    int64_t rows_max;
    size_t words;       /* of a bitmap */
    uint64_t *mine, *all; /* u64[words], u64[ranks][words], owned */
    int64_t offset;       /* of the matrix in the flat arrays */
    Transport *transport; /* borrowed: that of gradients. In the memory that it moves: */
    const Allocator *memory, *row_memory;
    float *rows;   /* f32[rows_max][channels], owned */
    int *places;   /* i32[rows_max], owned: tokens as well */
    Slice *slices; /* owned: the shard's */
    Shard shard;   /* what this rank owns */
    /* of the step */
    int *slot_of_token; /* i32[vocab], owned: -1 where nobody looks it up */
    int *tokens;        /* i32[rows_max], owned: of each slot, rising */
    int64_t count;      /* rows in use; 0: the lookup is part of the dense gradient */
} Lookup;

/* Of a matrix at `offset` of the flat arrays. tokens: looked up by a rank in a step, at most. shard: what this rank
 * owns; NULL where parameters are not sharded. Collective. */
Status lookup_create(Lookup *lookup, Comm *comm, const SyncSetup *setup, const Shard *shard);
void lookup_destroy(Lookup *lookup); /* accepts a zeroed one */

void lookup_mark(Lookup *lookup, const int *tokens, int64_t count); /* this rank's */

/* In the comm thread, like all below: the union of what all ranks marked. */
Status lookup_exchange(Lookup *lookup, const Comm *comm);

/* grad f32[vocab][channels] += rows, at the rows' tokens. */
void lookup_add(const Lookup *lookup, float *grad);

/* For sharded parameters, matrix f32[vocab][channels]: rows become what the shard has of the rows' tokens, and -0.0,
 * which changes nothing it is added to, elsewhere; so their sum over ranks are the rows themselves, which lookup_put
 * writes back. */
void lookup_take(Lookup *lookup, const float *matrix);
void lookup_put(const Lookup *lookup, float *matrix);

#endif
