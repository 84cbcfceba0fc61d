/* Where the ranks of a run stand on this machine: threads, binding, memory. */
#ifndef RUN_PLACEMENT_H
#define RUN_PLACEMENT_H

#include "base/error.h"
#include "base/log.h"
#include "comm/comm.h"

#include <stdbool.h>

/* Sets the calling rank's OpenMP threads to `threads`, or for 0 to its share of the cores it is bound to: ranks with
 * the same binding share evenly. Collective. `log` is NULL on all ranks but 0, where the header gets a line, and a
 * warning when threads share a core or cores lie idle. */
Status placement_threads(Comm *comm, int threads, Log *log);

/* BAD_INPUT unless this host can hold bytes_per_rank for each of its ranks; advice: what else to do. */
Status placement_memory(Comm *comm, double bytes_per_rank, const char *advice);

#endif
