/* One thread per process sleeps in poll() on a pidfd of each neighbour, which becomes readable when that process ends,
 * also while it is a zombie that the launcher has not yet looked at. It costs no time until then.
 *
 *   each rank    its badge {process, left}  in memory that the node shares    | all written |  pidfd of each neighbour
 *   leaves       left = true, then ends                                       -> nobody minds
 *   is killed                                                                 -> GRACE -> one line, all end
 *
 * The launcher ends all processes of a run by signals, which come at once to each: who sees his neighbours end waits
 * for his own for GRACE before he speaks. The first to take the word, in the badge of the node's lowest rank, speaks:
 * one line, whoever and however many have ended. A process that has ended keeps its badge, since the others map it.
 *
 * A badge is read through /proc/PID/fd, so its process number means the same process here. Needs Linux 5.3. */
#define _GNU_SOURCE
#include "comm/transport/watch.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { GRACE_MS = 100 };

/* In shared memory. */
typedef struct Badge {
    _Atomic int process;
    atomic_bool left;
    atomic_bool word_taken; /* of the node's lowest rank: for all of its node */
} Badge;

struct Watch {
    Transport *transport; /* borrowed */
    Badge *own;           /* of transport_share */
    Badge *lowest;        /* of the node's lowest rank */
    int count;            /* neighbours */
    Badge **badges;       /* Badge *[count], owned */
    int *ranks;           /* int[count], owned */
    struct pollfd *files; /* pollfd[count + 1], owned: of each neighbour, and last what ends the watch */
    pthread_t thread;
    bool running;
};

static int open_process(int process) {
#ifdef SYS_pidfd_open
    return (int)syscall(SYS_pidfd_open, process, 0);
#else
    (void)process;
    return -1;
#endif
}

static void sleep_ms(int ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL); }

/* ---- the thread ---- */

/* Not through MPI, which another thread uses and whose end waits for the rank that is lost. */
static _Noreturn void end_run(const Watch *watch, int lost) {
    char host[64] = "";
    sleep_ms(GRACE_MS);
    if (!atomic_exchange(&watch->lowest->word_taken, true)) {
        gethostname(host, sizeof host - 1);
        error_exit_code(program_invocation_short_name,
                        fault("rank %d (process %d on %s) ended unexpectedly; the run stops", watch->ranks[lost],
                              atomic_load(&watch->badges[lost]->process), host));
    } else {
        sleep_ms(GRACE_MS); /* until the line is out */
    }
    _exit(FAULT);
}

static void forget(struct pollfd *file) {
    if (file->events && file->fd >= 0)
        close(file->fd);
    *file = (struct pollfd){.fd = -1};
}

static void *watch_thread(void *argument) {
    Watch *watch = argument;
    struct pollfd *files = watch->files;
    while (!files[watch->count].revents) {
        if (poll(files, (nfds_t)watch->count + 1, -1) < 0)
            continue; /* a signal */
        for (int i = 0; i < watch->count; i++) {
            if (files[i].revents && !atomic_load(&watch->badges[i]->left))
                end_run(watch, i);
            if (files[i].revents)
                forget(&files[i]);
        }
    }
    return NULL;
}

/* ---- life ---- */

static void add_neighbour(Watch *watch, int rank) {
    Badge *badge = transport_peer_ptr(watch->transport, watch->own, rank);
    int file = badge && badge != watch->own ? open_process(atomic_load(&badge->process)) : -1;
    if (badge && !watch->lowest)
        watch->lowest = badge;
    if (file < 0)
        return;
    watch->badges[watch->count] = badge;
    watch->ranks[watch->count] = rank;
    watch->files[watch->count++] = (struct pollfd){.fd = file, .events = POLLIN};
}

static Status start(Watch *watch) {
    int ranks = watch->transport->ranks;
    watch->badges = calloc((size_t)ranks, sizeof *watch->badges);
    watch->ranks = calloc((size_t)ranks, sizeof *watch->ranks);
    watch->files = calloc((size_t)ranks, sizeof *watch->files);
    if (!watch->badges || !watch->ranks || !watch->files)
        return fault("no memory to watch %d processes", ranks);
    for (int rank = 0; rank < ranks; rank++)
        add_neighbour(watch, rank);
    if (watch->count == 0)
        return OK;
    watch->files[watch->count] = (struct pollfd){.fd = eventfd(0, EFD_CLOEXEC), .events = POLLIN};
    if (watch->files[watch->count].fd < 0)
        return fault("cannot watch the other processes: %s", strerror(errno));
    int code = pthread_create(&watch->thread, NULL, watch_thread, watch);
    watch->running = code == 0;
    return code == 0 ? OK : fault("cannot start the thread that watches the other processes: %s", strerror(code));
}

Status watch_create(Watch **result, Transport *transport) {
    Watch *watch = calloc(1, sizeof *watch);
    *result = watch;
    if (!watch)
        return fault("no memory to watch the other processes");
    watch->transport = transport;
    watch->own = transport_share(transport, sizeof *watch->own);
    if (!watch->own)
        return fault("no memory to watch the other processes");
    atomic_store(&watch->own->process, (int)getpid());
    TRY(transport_barrier(transport));
    return start(watch);
}

void watch_destroy(Watch *watch) {
    if (!watch)
        return;
    if (watch->own)
        atomic_store(&watch->own->left, true);
    if (watch->running) {
        eventfd_write(watch->files[watch->count].fd, 1);
        pthread_join(watch->thread, NULL);
    }
    for (int i = 0; watch->files && i <= watch->count; i++)
        forget(&watch->files[i]);
    transport_unshare(watch->transport, watch->own);
    free(watch->badges);
    free(watch->ranks);
    free(watch->files);
    free(watch);
}
