/* Watch: when a process of this node ends without leave, one of the others says so and all of them end.
 *
 * Without it the survivors wait until comm.timeout_s for what can no longer come, or until the launcher ends them. */
#ifndef COMM_TRANSPORT_WATCH_H
#define COMM_TRANSPORT_WATCH_H

#include "comm/transport/transport.h"

typedef struct Watch Watch;

/* Over the other ranks that share memory with this one, as the transport has found them. Collective. Where the system
 * offers no way to watch a process there is nothing to see, and it is OK. */
Status watch_create(Watch **watch, Transport *transport);

/* Not collective: takes leave. Comes before the transport's memory goes. Accepts NULL. */
void watch_destroy(Watch *watch);

#endif
