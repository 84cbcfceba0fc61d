#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char line[1024];

static void store(const char *format, va_list args) {
    char fresh[sizeof line]; /* the arguments may point into the old line */
    vsnprintf(fresh, sizeof fresh, format, args);
    memcpy(line, fresh, sizeof line);
}

Status bad_input(const char *format, ...) {
    va_list args;
    va_start(args, format);
    store(format, args);
    va_end(args);
    return BAD_INPUT;
}

Status fault(const char *format, ...) {
    va_list args;
    va_start(args, format);
    store(format, args);
    va_end(args);
    return FAULT;
}

const char *error_line(void) { return line; }

Status error_restore(Status status, const char *text) {
    if (text != line)
        snprintf(line, sizeof line, "%s", text);
    return status;
}

int error_exit_code(const char *program, Status status) {
    errno = 0;
    if (status == OK && (fflush(stdout) != 0 || ferror(stdout)))
        status = fault("standard output: not written: %s", errno ? strerror(errno) : "write error");
    if (status != OK)
        fprintf(stderr, "%s: %s\n", program, line);
    return (int)status;
}
