/* A file that is read piece by piece into the caller's memory: for files too large to hold twice. */
#ifndef BASE_INPUT_H
#define BASE_INPUT_H

#include "base/error.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct InputFile {
    FILE *stream;
    int64_t size; /* bytes, when it was opened */
    char path[512];
} InputFile;

/* Missing, unreadable or not a regular file: BAD_INPUT naming it, and nothing to close. */
Status input_open(InputFile *input, const char *path);
void input_close(InputFile *input); /* accepts a zeroed one */

Status input_seek(InputFile *input, int64_t offset);

/* Exactly `bytes` from the present position on. BAD_INPUT when the file ends before: check its size first, for a
 * better message. */
Status input_read(InputFile *input, void *data, size_t bytes);

#endif
