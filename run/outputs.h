/* The files that a run writes: that each can be written, is not another of them, and is none that the run reads. */
#ifndef RUN_OUTPUTS_H
#define RUN_OUTPUTS_H

#include "data/loader.h"
#include "run/settings.h"

/* BAD_INPUT naming the key and the file. Writes nothing. `val` may be NULL. */
Status outputs_check(const Settings *settings, const Loader *train, const Loader *val);

#endif
