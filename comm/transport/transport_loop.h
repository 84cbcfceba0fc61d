/* Ranks are threads of this process. See transport_loop.c. */
#ifndef COMM_TRANSPORT_TRANSPORT_LOOP_H
#define COMM_TRANSPORT_TRANSPORT_LOOP_H

#include "comm/transport/transport.h"

typedef struct LoopWorld LoopWorld;

Status loop_create(LoopWorld **world, int ranks, double timeout_s);
void loop_destroy(LoopWorld *world); /* when no rank uses it any more; accepts NULL */

Transport *loop_transport(LoopWorld *world, int rank); /* owned by the world */

/* The rank takes part no longer. With `status` not OK every rank that waits, or will wait, gets FAULT and the calling
 * thread's error line, which should name this rank; otherwise those get one that wait for this rank. */
void loop_leave(LoopWorld *world, int rank, Status status);

/* Returns OK when all ranks have left without failure. Otherwise the Status and line of the first one that failed;
 * `all_left` then says whether the others followed within grace_s. */
Status loop_wait(LoopWorld *world, double grace_s, bool *all_left);

#endif
