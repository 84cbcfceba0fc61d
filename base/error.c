#define _POSIX_C_SOURCE 200809L
#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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

/* Before main: a standard stream that came closed is opened on /dev/null, the wrong way round, so that using it still
 * fails. The first file to be opened would get its number otherwise, and all that is printed. */
__attribute__((constructor)) static void hold_standard_streams(void) {
    for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; stream++)
        if (fcntl(stream, F_GETFD) < 0) /* open takes the lowest free number: this one */
            open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int error_exit_code(const char *program, Status status) {
    errno = 0;
    if (status == OK && (fflush(stdout) != 0 || ferror(stdout)))
        status = fault("standard output: not written: %s", errno ? strerror(errno) : "write error");
    if (status != OK)
        fprintf(stderr, "%s: %s\n", program, line);
    return (int)status;
}
