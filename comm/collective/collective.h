/* Collectives: who sends what to whom, and when. Written against a Transport, so that each is written once.
 *
 * An all-reduce turns data f32[elems] into the sum over the group's ranks of scale * data, with identical bits on every
 * rank: the sum is formed once, in an order that the group and elems alone decide, and copied. (scale 1/ranks makes it
 * the mean; scaling comes before adding, in f32, and costs no pass of its own.)
 *
 *   name     steps          bytes sent per rank           order of the sum of one element
 *   naive    2 per segment  S; rank 0: (N-1) S            rank order. The oracle, and slow
 *   native   MPI's choice   not told                      MPI's choice
 *   ring     2 (N-1)        2 (N-1)/N S                   round the ring, from its chunk's first rank on
 *
 * Adding one: a file with a const Collective, a line in collective.c, a line in the test table. */
#ifndef COMM_COLLECTIVE_COLLECTIVE_H
#define COMM_COLLECTIVE_COLLECTIVE_H

#include "base/error.h"
#include "comm/transport/transport.h"

#include <stdint.h>

/* The ranks that take part, alike on each of them. */
typedef struct Group {
    Transport *transport;
    const int *members; /* int[size], distinct ranks */
    int size;
    int self; /* members[self] is this rank */
} Group;

/* What the links and the processor were measured to do (comm/calibrate.c). `inside` a node and `between` nodes. */
typedef struct LinkCosts {
    double latency_s[2];    /* alpha: of an empty message. [0] inside, [1] between */
    double s_per_byte[2];   /* beta: of one rank's messages; between nodes, of one node's (its NIC) */
    double add_s_per_byte;  /* gamma: reading, adding and storing one byte of f32 */
    double copy_s_per_byte; /* memcpy from another rank's shared memory */
} LinkCosts;

typedef struct Collective {
    const char *name; /* as in [comm] algorithm */

    /* Optional: BAD_INPUT with a line that says what is missing, where this collective cannot run. */
    Status (*check)(const Group *group);

    /* f32 values that allreduce needs besides data: bounded, whatever elems is. A pure function of size, nodes and elems. */
    int64_t (*scratch_elems)(const Group *group, int64_t elems);

    /* The cost model: seconds that allreduce should take. A pure function. Formulas: docs/comm.md. */
    double (*predict_s)(const Group *group, int64_t elems, const LinkCosts *costs);

    /* scratch f32[scratch_elems(...)] may hold anything. No group of the transport may be open. */
    Status (*allreduce)(const Group *group, float *data, int64_t elems, float scale, float *scratch);
} Collective;

extern const Collective collective_naive, collective_native, collective_ring, collective_tree, collective_reduce_scatter,
    collective_hierarchical, collective_leader;

/* NULL when there is none of that name. */
const Collective *collective_find(const char *name);

/* Cuts elems into `parts` slices: slice i is [chunk_start(i), chunk_start(i + 1)). Bounds are multiples of
 * CHUNK_ALIGN_ELEMS, so that a vector or a compressor's block never straddles one; slices may be empty. */
enum { CHUNK_ALIGN_ELEMS = 4096 };
int64_t chunk_start(int64_t elems, int parts, int i);

#endif
