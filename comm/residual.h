/* Residuals of error feedback between steps: they stay with their place in the gradient whoever holds it. Which rank
 * quantises a place depends on the plan; so before the plan changes, and for a checkpoint, each rank that may have to
 * quantise it gets the one residual that there is:
 *
 *   HOP_RESULT   of all ranks one has it:              copied to all
 *   HOP_SECOND   of a node's ranks one has it:         copied within the node
 *   HOP_FIRST    each rank has its own:                stays
 *
 * A copy is a sum in which all terms but one are zero, so it is exact. Once the new holders have committed a step of
 * their own the copies are dropped. */
#ifndef COMM_RESIDUAL_H
#define COMM_RESIDUAL_H

#include "comm/internal.h"

/* In the comm thread. Does nothing to a codec without error feedback. */
Status residual_gather(const Comm *comm, Codec *codec);

/* What a checkpoint holds, after residual_gather: array i is the same on all ranks of a group, of which `holder` is
 * one. */
typedef struct ResidualArray {
    CodecHop hop;
    int holder; /* rank */
    char name[32];
} ResidualArray;

int residual_arrays(const Comm *comm, const Codec *codec); /* 0 without error feedback */
ResidualArray residual_array(const Comm *comm, const Codec *codec, int i);

/* In the comm thread. rank 0's out f32[codec->elems] receives array i; elsewhere out is not used. */
Status residual_fetch(const Comm *comm, const Codec *codec, int i, float *out);

/* In the comm thread. Array i, known to rank 0, becomes current wherever it belongs. */
Status residual_restore(const Comm *comm, Codec *codec, int i, const float *in);

#endif
