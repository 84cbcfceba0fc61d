/* What the links and the processor do, measured at the start of a run: the numbers of the cost model. */
#ifndef COMM_CALIBRATE_H
#define COMM_CALIBRATE_H

#include "comm/collective/collective.h"

#include <stddef.h>

/* Which messages: between ranks of the same node, or of different ones. The indices of LinkCosts. */
typedef enum LinkClass { INSIDE, BETWEEN, LINK_CLASSES } LinkClass;

/* A ring over links of one class, in which many links work at once, each in both directions.
 *   INSIDE   all ranks of a node form a ring
 *   BETWEEN  the i-th ranks of all nodes form a ring, for every i that all nodes have: each NIC carries `lanes` rings
 * A pure function of who shares a node. */
typedef struct LinkRing {
    int to, from; /* -1: this rank takes no part */
    int lanes;    /* 0: there are no such links */
} LinkRing;

LinkRing link_ring(const Transport *transport, LinkClass class);

/* Sends u8[bytes] on and receives as many from the rank before; returns at once where this rank takes no part. */
Status link_shift(Transport *transport, const LinkRing *ring, const void *out, void *in, size_t bytes);

/* Collective, in any thread that may use the transport; 0.05 to 0.8 s. The same costs on every rank; 0 for links that
 * do not exist. codec: what collectives will use, or NULL; its residuals stay as they are. array_bytes: how much memory
 * a rank's collectives work on in turns, which decides what the caches hold: the gradient, or a benchmark's array. */
Status calibrate(Transport *transport, const Codec *codec, int64_t array_bytes, LinkCosts *costs);

/* Times a collective of which no formula is known (Collective.timed), for its predict_s: for sizes that double up to
 * `elems`, as far as 1.5 s go; what is larger than the last is taken from a line through the last two. Collective, all
 * ranks alike. array: all that the collective works on in turns, of array->elems >= elems; its data are lost. */
Status calibrate_collective(const Group *group, const Collective *collective, const Payload *array, int64_t elems,
                            LinkCosts *costs);

/* "inside a node 0.8 us, 5.20 GB/s; between nodes 51.0 us, 0.117 GB/s; add 9.10 GB/s, copy 8.20 GB/s"
 * and with a codec ", encode 1.2 GB/s, decode 5.1 GB/s" */
void calibrate_text(const LinkCosts *costs, char *text, size_t size);

#endif
