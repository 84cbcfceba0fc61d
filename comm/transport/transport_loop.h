/* Ranks are threads of this process. See transport_loop.c. */
#ifndef COMM_TRANSPORT_TRANSPORT_LOOP_H
#define COMM_TRANSPORT_TRANSPORT_LOOP_H

#include "comm/transport/loop_links.h"
#include "comm/transport/transport.h"

typedef struct LoopWorld LoopWorld;

Status loop_create(LoopWorld **world, int ranks, double timeout_s);
void loop_destroy(LoopWorld *world); /* when no rank uses it any more; accepts NULL */

/* ---- before any rank starts ---- */

/* A model of links, see loop_links.h: a message becomes visible to its receiver only when it would have arrived over
 * them. Data still moves by one memcpy. All zero: none. BAD_INPUT with a line for a rate of less than 1 kB/s. */
#define LOOP_GB_PER_S_MIN 1e-6
Status loop_set_links(LoopWorld *world, const LoopLinks *links);

/* Injected faults: "" or, separated by ';',
 *
 *     delay:ms=5                   each message leaves 5 ms late: its sender sleeps
 *     delay:rank=1,ms=5,every=3    rank 1's only, and every third on average, at random points: the same in each run
 *     drop:rank=2,message=17       rank 2's 17th message never arrives, nor does what it sends to that rank later
 *     die:rank=0,message=40        before its 40th message rank 0 ends as if killed
 *     nan:rank=3,step=5            in its 5th step the gradient that rank 3 has computed holds a NaN
 *
 * A rank's messages are counted from 1, whoever they are for. BAD_INPUT with a line when the text cannot be read or
 * names a rank that is not there. */
Status loop_set_faults(LoopWorld *world, const char *faults);

Transport *loop_transport(LoopWorld *world, int rank); /* owned by the world */

/* ---- the end ---- */

/* The rank takes part no longer. With `status` not OK every rank that waits, or will wait, gets FAULT and the calling
 * thread's error line, which should name this rank; otherwise those get one that wait for this rank. */
void loop_leave(LoopWorld *world, int rank, Status status);

/* Returns OK when all ranks have left without failure. Otherwise the Status and line of the first one that failed;
 * `all_left` then says whether the others followed within grace_s. */
Status loop_wait(LoopWorld *world, double grace_s, bool *all_left);

#endif
