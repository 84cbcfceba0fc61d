/* The comm thread of a rank: the only one that talks to the transport. It runs one job at a time, so everything that
 * a rank sends leaves in one order; between jobs it sleeps.
 *
 *     rank's thread    engine_post(job) ... backward ...            engine_wait
 *     comm thread            | job: bucket 0, bucket 1, ...    |
 */
#ifndef COMM_ENGINE_H
#define COMM_ENGINE_H

#include "base/error.h"

typedef struct Engine Engine;

typedef Status EngineJob(void *argument);

/* Starts the thread, with the caller's CPU binding. */
Status engine_create(Engine **engine);
void engine_destroy(Engine *engine); /* ends it; no job may be under way. Accepts NULL */

/* Hands over a job; there must be none under way. `argument` is the job's until engine_wait returns. */
void engine_post(Engine *engine, EngineJob *job, void *argument);

/* Returns what the job returned, with its error line. */
Status engine_wait(Engine *engine);

/* Both. */
Status engine_call(Engine *engine, EngineJob *job, void *argument);

#endif
