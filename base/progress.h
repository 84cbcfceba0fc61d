/* One line on a terminal that is rewritten in place: what, how far, how fast, how long still. Silent elsewhere. */
#ifndef BASE_PROGRESS_H
#define BASE_PROGRESS_H

#include <stdbool.h>
#include <stdio.h>

typedef struct Progress {
    FILE *out;
    bool live; /* out is a terminal */
    double start_s, shown_s;
    double total; /* in any unit; done / total is the share that is finished */
} Progress;

void progress_start(Progress *progress, FILE *out, double total);

/* Redraws at most ten times a second. `what` stands in front: "step 120/400  loss 2.31". */
void progress_update(Progress *progress, double done, const char *what);

void progress_clear(Progress *progress); /* wipes the line, before other output and at the end */

/* Seconds as "1:02:03", "12:05" or "42 s". Writes into text, which is also returned. */
char *duration_text(double seconds, char *text, int size);

#endif
