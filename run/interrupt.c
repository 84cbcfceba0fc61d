/* The handler may run in any thread, in the middle of anything: it only uses atomics, calls write(), and raises the
 * signal anew with its default action. A launcher may send another one meanwhile, which another thread gets: it must not
 * end the process before the line is out. */
#define _GNU_SOURCE
#include "run/interrupt.h"

#include "base/config.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

static char run_folder[OPTION_TEXT]; /* set before there is a handler */
static atomic_llong step_done = -1, step_saved; /* -1: still setting up */
static atomic_flag speaks = ATOMIC_FLAG_INIT;

typedef struct Line {
    char text[2 * OPTION_TEXT];
    size_t used;
} Line;

static void add(Line *line, const char *text) {
    size_t length = strlen(text), room = sizeof line->text - line->used;
    length = length < room ? length : room;
    memcpy(line->text + line->used, text, length);
    line->used += length;
}

/* snprintf may allocate. */
static void add_number(Line *line, long long number) {
    char digits[24] = "", *at = digits + sizeof digits - 1;
    do
        *--at = (char)('0' + number % 10);
    while (number /= 10);
    add(line, at);
}

static void on_signal(int number) {
    if (atomic_flag_test_and_set(&speaks))
        return;
    Line line = {.used = 0};
    long long done = atomic_load(&step_done), saved = atomic_load(&step_saved);
    add(&line, isatty(STDERR_FILENO) ? "\n" : ""); /* behind a line of progress */
    add(&line, program_invocation_short_name);
    if (done < 0) {
        add(&line, ": stopped while setting up, before any step");
    } else {
        add(&line, ": stopped after step ");
        add_number(&line, done);
    }
    if (saved > 0) {
        add(&line, "; the last checkpoint is of step ");
        add_number(&line, saved);
        add(&line, ", in ");
        add(&line, run_folder);
        add(&line, ": run.resume=yes goes on from it\n");
    } else {
        add(&line, done < 0 ? "\n" : "; there is no checkpoint (train.save_every)\n");
    }
    if (write(STDERR_FILENO, line.text, line.used) < 0)
        errno = 0; /* there is nobody to tell */
    signal(number, SIG_DFL);
    raise(number);
}

static void set_handler(void (*handler)(int)) {
    const int numbers[] = {SIGINT, SIGTERM};
    for (int i = 0; i < 2; i++) {
        struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
        if (sigaction(numbers[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN)
            sigaction(numbers[i], &action, NULL);
    }
}

void interrupt_watch(const char *folder, int64_t saved) {
    snprintf(run_folder, sizeof run_folder, "%s", folder);
    interrupt_saved(saved);
    set_handler(on_signal);
}

void interrupt_end(void) { set_handler(SIG_DFL); }

void interrupt_step(int64_t step) { atomic_store(&step_done, step); }
void interrupt_saved(int64_t step) { atomic_store(&step_saved, step); }
