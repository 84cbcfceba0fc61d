/* A folder for a test program's files: set_up and tear_down are its group's. Needs _POSIX_C_SOURCE 200809L. */
#ifndef TESTS_FOLDER_H
#define TESTS_FOLDER_H

#include "tests/check.h"

#include <stdlib.h>
#include <unistd.h>

static char folder[] = "/tmp/tandem_test_XXXXXX", last_path[256]; /* in_folder's */

static inline int set_up(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static inline int tear_down(void **state) {
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

static inline const char *in_folder(const char *name) {
    snprintf(last_path, sizeof last_path, "%s/%s", folder, name);
    return last_path;
}

static inline void make_file(const char *name, const void *bytes, size_t size) {
    FILE *file = fopen(in_folder(name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    fclose(file);
}

#endif
