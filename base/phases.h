/* When the phases of something were at work, for a trace: each from its first beginning to its last end. Phases may
 * overlap, and each may begin and end many times. */
#ifndef BASE_PHASES_H
#define BASE_PHASES_H

enum { PHASES_MAX = 4 };

typedef struct Phase {
    const char *name;      /* a literal; NULL: it did not run */
    double start_s, end_s; /* on clock_s()'s scale */
} Phase;

typedef struct Phases {
    Phase phase[PHASES_MAX];
} Phases;

#endif
