/* A profile: what each operation of a model took, means over its calls. Recorded from a real run (model/ops_timed.h),
 * written as text, and read back to replay that run (model/ops_replay.h).
 *
 * The file has one line per operation, in the order of their first calls; '#' starts a comment:
 *
 *     # layer operation              in    out     rows    calls          ms
 *           3 linear_forward        768   2304   1024.0       20    12.31741
 *
 *   layer      0..L-1, or -1 for what lies outside the layers
 *   operation  as in model/ops.h; with in and out, its widths, and the layer it names one operation, once per file
 *   rows, ms   positions and milliseconds of one call, means */
#ifndef BASE_PROFILE_H
#define BASE_PROFILE_H

#include "base/error.h"

#include <stdint.h>

enum { PROFILE_NAME = 32 };

typedef struct ProfileEntry {
    char op[PROFILE_NAME];
    int layer, in, out;
    int64_t calls;
    double rows, ms; /* means of one call */
} ProfileEntry;

/* A zeroed one is empty. */
typedef struct Profile {
    ProfileEntry *entries; /* owned */
    int count, room;
    int last; /* found last: operations come in the same order again and again */
} Profile;

void profile_free(Profile *profile); /* leaves it empty */

/* The entry of that operation, or NULL. Constant time where calls repeat in the order of the entries. */
ProfileEntry *profile_find(Profile *profile, const char *op, int layer, int in, int out);

/* Counts one more call. Allocates where the operation is new. */
void profile_add(Profile *profile, const char *op, int layer, int in, int out, double rows, double ms);

/* Forgets all calls so far, those of the warm-up, but not the operations. */
void profile_clear(Profile *profile);

/* Entries without calls are left out. BAD_INPUT or FAULT when it cannot be written; then nothing changes there. */
Status profile_write(const Profile *profile, const char *path);

/* Replaces *profile. BAD_INPUT with file and line; *profile is then empty. */
Status profile_read(Profile *profile, const char *path);

#endif
