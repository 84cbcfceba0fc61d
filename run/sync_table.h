/* The closing table of gradient synchronisation: a row per bucket, and what the step was predicted to take. */
#ifndef RUN_SYNC_TABLE_H
#define RUN_SYNC_TABLE_H

#include "comm/comm.h"

/* Prints means over the run's steps, of this rank; nothing with one rank. Of very many buckets only the first and
 * last. */
void sync_table_print(const Sync *sync);

#endif
