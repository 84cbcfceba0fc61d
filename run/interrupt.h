/* Ctrl-C, and the SIGTERM that schedulers send, and launchers when a rank is lost: one line that says how far the run
 * has come and where it can go on, then the process ends as the signal ends it, its ranks with it. Process-wide; for
 * the process of rank 0. */
#ifndef RUN_INTERRUPT_H
#define RUN_INTERRUPT_H

#include <stdint.h>

/* From now on. `step` has been done, and is the newest checkpoint in `folder` unless it is 0. A signal that is ignored
 * stays so. */
void interrupt_watch(const char *folder, int64_t step);

void interrupt_step(int64_t step);  /* has been done */
void interrupt_saved(int64_t step); /* its checkpoint is complete */

#endif
