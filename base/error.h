/* Errors: our bug is an assert, the world's fault is a Status and one line.
 *
 * A function that can fail because of its input or its surroundings returns a Status. Whoever finds the fault
 * writes the one line that the user will read (which file, which line of it, what was expected, what was found)
 * with bad_input() or fault(); everybody above passes the Status on with TRY(). Main programs print error_line()
 * once and exit with the Status as exit code. The line is kept per thread, since ranks can be threads. */
#ifndef BASE_ERROR_H
#define BASE_ERROR_H

typedef enum Status {
    OK = 0,
    FAULT = 1,     /* the machine or another rank failed: exit code 1 */
    BAD_INPUT = 2, /* a file, key or argument is wrong: exit code 2 */
} Status;

/* Store the thread's error line (printf style, no newline) and return BAD_INPUT or FAULT. */
Status bad_input(const char *format, ...) __attribute__((format(printf, 1, 2)));
Status fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The last line stored by this thread, or "". Valid until the next bad_input() or fault() in this thread. */
const char *error_line(void);

/* Store a line that came from elsewhere (another thread or rank) as this thread's, and return `status`. */
Status error_restore(Status status, const char *line);

/* The last thing a program does: prints "PROGRAM: line" on stderr if status is not OK, or if stdout could not be
 * written; returns the exit code. */
int error_exit_code(const char *program, Status status);

#define TRY(call)                            \
    do {                                     \
        Status try_status_ = (call);         \
        if (try_status_ != OK)               \
            return try_status_;              \
    } while (0)

#endif
