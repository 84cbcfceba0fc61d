/* When the phases of something were at work, for a trace: each from its first beginning to its last end. Phases may
 * overlap, and each may begin and end many times. */
#ifndef BASE_PHASES_H
#define BASE_PHASES_H

#include "base/clock.h"

#include <stddef.h>

enum { PHASES_MAX = 4 };

typedef struct Phase {
    const char *name;      /* a literal; NULL: it did not run */
    double start_s, end_s; /* on clock_s()'s scale */
} Phase;

typedef struct Phases {
    Phase phase[PHASES_MAX];
} Phases;

/* Nobody asks where phases is NULL. */
static inline void phase_begin(Phases *phases, int i, const char *name) {
    if (phases && !phases->phase[i].name)
        phases->phase[i] = (Phase){.name = name, .start_s = clock_s()};
}

static inline void phase_end(Phases *phases, int i) {
    if (phases)
        phases->phase[i].end_s = clock_s();
}

#endif
