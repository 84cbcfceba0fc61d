/* Ctrl-C, and the SIGTERM that schedulers send, and launchers when a rank is lost: one line that says how far the run
 * has come and where it can go on, then the process ends as the signal ends it, its ranks with it. Process-wide; for
 * the process of rank 0. */
#ifndef RUN_INTERRUPT_H
#define RUN_INTERRUPT_H

#include <stdint.h>

/* From now on, where setting up begins. `saved` is the newest checkpoint in `folder` that a run would go on from, 0:
 * none. A signal that is ignored stays so. */
void interrupt_watch(const char *folder, int64_t saved);

void interrupt_step(int64_t step);  /* has been done: the first call ends setting up */
void interrupt_saved(int64_t step); /* its checkpoint is complete */
void interrupt_end(void); /* a signal ends the process without a line again: all has been said */

#endif
