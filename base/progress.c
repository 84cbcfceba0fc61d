#define _DEFAULT_SOURCE
#include "base/progress.h"

#include "base/clock.h"

#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { BAR = 10 };

char *duration_text(double seconds, char *text, int size) {
    long whole = (long)(seconds + 0.5);
    if (whole >= 3600)
        snprintf(text, (size_t)size, "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
    else if (whole >= 60)
        snprintf(text, (size_t)size, "%ld:%02ld", whole / 60, whole % 60);
    else
        snprintf(text, (size_t)size, "%.*f s", seconds < 9.95 ? 1 : 0, seconds);
    return text;
}

/* A terminal that a person sees. mpirun gives its ranks a pseudo-terminal as stdout even where its own goes to a
 * file, so the parent's stdout must be a terminal as well; where the parent cannot be asked, our own stdout decides. */
static bool is_terminal(FILE *out) {
    char path[64], target[64];
    if (isatty(fileno(out)) != 1)
        return false;
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", (long)getppid(), fileno(out));
    ssize_t length = readlink(path, target, sizeof target);
    return length < 0 || (length >= 9 && (strncmp(target, "/dev/pts/", 9) == 0 || strncmp(target, "/dev/tty", 8) == 0));
}

/* Of the terminal: a line that wraps could not be wiped. */
static int columns(FILE *out) {
    struct winsize size;
    return ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
}

void progress_start(Progress *progress, FILE *out, double total) {
    *progress = (Progress){.out = out, .live = is_terminal(out), .start_s = clock_s(), .total = total};
}

void progress_update(Progress *progress, double done, const char *what) {
    double now = clock_s();
    if (!progress->live || (now - progress->shown_s < 0.1 && done < progress->total))
        return;
    progress->shown_s = now;
    double share = progress->total > 0 ? done / progress->total : 1, spent = now - progress->start_s;
    char bar[BAR + 1], left[32] = "?", line[256];
    for (int i = 0; i < BAR; i++)
        bar[i] = i < (int)(share * BAR) ? '#' : '.';
    bar[BAR] = 0;
    if (share > 0)
        duration_text(spent / share - spent, left, sizeof left);
    snprintf(line, sizeof line, "[%s] %3d %%  %s  ETA %s", bar, (int)(share * 100), what, left);
    fprintf(progress->out, "\r\033[K%.*s", columns(progress->out) - 1, line);
    fflush(progress->out);
}

void progress_clear(Progress *progress) {
    if (progress->live && progress->shown_s > 0)
        fputs("\r\033[K", progress->out);
    fflush(progress->out);
}
