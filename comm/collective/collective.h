/* Collectives: who sends what to whom, and when. Written against a Transport, so that each is written once.
 *
 * An all-reduce turns data f32[elems] into the sum over the group's ranks of scale * data, with identical bits on every
 * rank: the sum is formed once, in an order that the group and elems alone decide, and copied. (scale 1/ranks makes it
 * the mean; scaling comes before adding, in f32, and costs no pass of its own.)
 *
 * N ranks on m nodes, S bytes; n ranks on the largest node, c on the smallest. NIC: what one carries each way when
 * nodes are equal and their ranks stand side by side.
 *
 *   name            steps        bytes sent by a rank         NIC              order of a sum
 *   naive           2 / 256 KiB  S; rank 0: (N-1) S           (N-n) S          ranks. The oracle, and slow
 *   native          MPI's choice, not told
 *   iallreduce      the same, not blocking
 *   ring            2 (N-1)      2 (N-1)/N S                  2 (N-1)/N S      round the ring, chunk's first on
 *   tree            log2 N       log2 N S                     n log2 m S       pairs, pairs of pairs, ...
 *     > 64 KiB      2 log2 N     2 (N-1)/N S                  2 (m-1)/m S      the same
 *     N not 2^k     2 more       S more, for some             as they lie      the first N - 2^k pairs ahead of all
 *   reduce_scatter  2            2 (N-1)/N S                  2 n (N-n)/N S    ranks
 *   hierarchical    4            2 (n-1)/n S inside, and      2 (m-1)/m S      ranks of a node, then nodes
 *                                2 (m-1)/m S/c between
 *   leader          4            S; the first of a node:      2 (m-1)/m S      the same
 *                                (n-1) S, and 2 (m-1)/m S between
 *
 * Orders by ranks, pairs and nodes do not depend on elems: an array reduced in pieces gets the same bits. Nodes stand
 * in the order of their first member. reduce_scatter, hierarchical and leader work directly on the peers' arrays where
 * data lies in memory that the node shares; it counts as sent all the same. They send 4 bytes more to each rank that
 * adds: the sender's scale.
 *
 * predict_s adds up, over the steps, latency and the longer of a rank's bytes inside its node and a NIC's bytes, each
 * times its beta; and the work of the busiest rank, or of the busiest node's cores. Where a collective cuts its data,
 * the shorter of NIC and work hides behind the longer but for one piece. See cost.h.
 *
 * Phases, as a trace shows them: naive reduce, broadcast; native barrier, all-reduce; iallreduce all-reduce; tree fold,
 * halving, doubling, unfold, as far as they run; ring and reduce_scatter reduce-scatter, all-gather; hierarchical and
 * leader on several nodes with several ranks reduce-scatter inside, between nodes, all-gather inside.
 *
 * Adding one: a file with a const Collective, a line in collective.c, a line in the test table. */
#ifndef COMM_COLLECTIVE_COLLECTIVE_H
#define COMM_COLLECTIVE_COLLECTIVE_H

#include "base/error.h"
#include "base/param.h"
#include "base/phases.h"
#include "comm/compress/codec.h"
#include "comm/transport/transport.h"

#include <stdint.h>

/* The ranks that take part, alike on each of them. */
typedef struct Group {
    Transport *transport;
    const int *members; /* int[size], distinct ranks */
    int size;
    int self; /* members[self] is this rank */
} Group;

enum { TIMED_MAX = 24 }; /* sizes */

/* What the links and the processor were measured to do (comm/calibrate.c). `inside` a node and `between` nodes. */
typedef struct LinkCosts {
    double latency_s[2];    /* alpha: of an empty message. [0] inside, [1] between */
    double s_per_byte[2];   /* beta: of one rank's messages; between nodes, of one node's (its NIC) */
    /* Work: CPU seconds of one rank per byte of f32, while all ranks work at once. So what they lose by sharing memory
     * is in it, and what they lose by sharing cores is not: that is cost_work_s's, from `cores`. */
    double add_s_per_byte;  /* gamma: sum += term, both from memory */
    double copy_s_per_byte; /* from this rank's cache to another rank's memory; 0: none is shared */
    double cores;           /* hardware threads for the ranks of a node together, may be a fraction; 0: enough */
    /* of the compressor in use, error feedback included; 1, 0, 0 and false where there is none */
    double wire_ratio; /* bytes on the wire for each of f32 */
    double encode_s_per_byte, decode_add_s_per_byte;
    bool every_hop; /* as in Codec */
    /* Of a collective that is timed: what it took for arrays of rising size (calibrate_collective). */
    int timed_count; /* 0: it was not */
    double timed_bytes[TIMED_MAX], timed_s[TIMED_MAX];
} LinkCosts;

/* What is reduced. */
typedef struct Payload {
    float *data; /* f32[elems] */
    int64_t elems;
    float scale;
    float *scratch; /* f32[scratch_elems(...)], may hold anything */
    int64_t offset; /* of data[0] in the flat gradient: where blocks and the bounds of parts sit */
    Codec *codec;   /* NULL: everything travels as f32 */
    Phases *phases; /* where the collective says when its phases were at work; NULL: nobody asks */
} Payload;

typedef struct Collective {
    const char *name; /* as in [comm] algorithm */

    /* Optional: BAD_INPUT with a line that says what is missing, where this collective cannot run. */
    Status (*check)(const Group *group);

    bool timed; /* how it works is a library's secret: predict_s goes by what it took at the start */

    /* It can use a codec: values are quantised a number of times that does not grow with the group (or, for the
     * baseline that shows why not, does). */
    bool compresses;

    /* f32 values that allreduce needs besides data: bounded, whatever elems is. A pure function, alike on all ranks. */
    int64_t (*scratch_elems)(const Group *group, int64_t elems, const Codec *codec);

    /* The cost model: seconds that allreduce should take; NaN if it should have been timed. A pure function. Formulas:
     * cost.h. */
    double (*predict_s)(const Group *group, int64_t elems, const LinkCosts *costs);

    /* No group of the transport may be open. */
    Status (*allreduce)(const Group *group, const Payload *payload);

    /* Optional, all four: the two halves of allreduce. After reduce_scatter the slices that `owned` names hold the
     * sum; the rest of data is undefined. all_gather copies each member's slices to everybody else's data, and waits
     * before it writes until they have called it. Together they leave allreduce's bits when there is no codec; with
     * one the result is not quantised again. all_gather has no scale and no codec. */
    Status (*reduce_scatter)(const Group *group, const Payload *payload);
    Status (*all_gather)(const Group *group, const Payload *payload);
    double (*predict_half_s)(const Group *group, int64_t elems, const LinkCosts *costs, bool gather);

    /* The slices, in rising order, that `member` owns of elems values at that offset; places count from data[0]. Returns
     * their number; slices NULL: only that. Pure, alike on all ranks. */
    int64_t (*owned)(const Group *group, int member, int64_t offset, int64_t elems, Slice *slices);
} Collective;

extern const Collective collective_naive, collective_native, collective_iallreduce, collective_ring, collective_tree,
    collective_reduce_scatter, collective_hierarchical, collective_leader, collective_ring_requantise;

/* NULL when there is none of that name. */
const Collective *collective_find(const char *name);

/* Cuts elems values at `offset` into `parts` slices: slice i is [chunk_start(i), chunk_start(i + 1)). Bounds lie at
 * multiples of CHUNK_ALIGN_ELEMS of the flat gradient, so that a vector or a compressor's block never straddles one;
 * slices may be empty. */
enum { CHUNK_ALIGN_ELEMS = 4096 };
int64_t chunk_start(int64_t offset, int64_t elems, int parts, int i);

#endif
