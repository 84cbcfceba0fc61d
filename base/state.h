/* Training state for exact resume: named byte arrays in one file. What they hold is the business of who saves them.
 * Layout, with a checksum per array: docs/formats.md. Every fault of a file is BAD_INPUT: the file, what was expected,
 * what was found. */
#ifndef BASE_STATE_H
#define BASE_STATE_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { STATE_NAME = 56, STATE_ITEMS_MAX = 65536 };

typedef struct StateItem {
    const char *name; /* unique in the file, shorter than STATE_NAME */
    const void *data;
    size_t bytes;
} StateItem;

/* Writes the file, complete or not at all. */
Status state_save(const char *path, const StateItem *items, int count);

/* The sum that arrays carry in the file: any change of one word changes it. */
uint64_t state_checksum(const void *data, size_t bytes);

typedef struct State State;

/* Reads and checks the list of arrays and the file's size, not yet the arrays. */
Status state_open(State **state, const char *path);
void state_close(State *state); /* accepts NULL */

bool state_has(const State *state, const char *name);

/* Fills data u8[bytes] with the array of that name, which must have that size. After an error data is undefined. Any
 * order, any subset. */
Status state_read(State *state, const char *name, void *data, size_t bytes);

#endif
