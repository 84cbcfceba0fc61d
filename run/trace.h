/* log.trace: a Chrome trace of all ranks in one JSON file, for Perfetto or chrome://tracing. A process per rank with
 * rows: compute (forward, backward by layer, update); comm (buckets in flight; the moments at which buckets became
 * ready); and a row for each phase of a bucket's collective (comm/collective/collective.h), because a bucket's segments
 * are in several phases at a time. Times count from a barrier in trace_open, so ranks on several machines line up to
 * about a network latency. */
#ifndef RUN_TRACE_H
#define RUN_TRACE_H

#include "comm/comm.h"

#include <stdint.h>

typedef struct Trace Trace;

enum { TRACE_COMPUTE, TRACE_COMM, TRACE_PHASES, TRACE_ROWS = TRACE_PHASES + PHASES_MAX };

/* Collective. Keeps the first `capacity` events; later ones are dropped. */
Status trace_open(Trace **trace, Comm *comm, int64_t capacity);
void trace_close(Trace *trace); /* not collective; accepts NULL */

/* start_s, end_s on clock_s()'s scale. Does nothing for a NULL trace. */
void trace_span(Trace *trace, int row, const char *name, int64_t number, double start_s, double end_s);

/* The last step's layers of backward, and buckets with their phases; backward was at work from start_s to end_s. */
void trace_sync(Trace *trace, const Sync *sync, const ParamTable *table, double start_s, double end_s);

/* Collective: rank 0 writes all ranks' events. */
Status trace_write(const Trace *trace, Comm *comm, const char *path);

#endif
