/* The loop transport: ranks are threads of one process, and a message is one memcpy.
 *
 *   sender                        pipe [from][to]                      receiver, in test or wait
 *   start links its messages  ->  message -> message -> ...   ->       takes the head for the oldest message that it
 *   into the pipes                                                     expects from there, copies outside the lock,
 *   test and wait reap       <-   taken [from]                <-       hands the record back, wakes the sender
 *
 * Pipes link the senders' own Message records, which stay valid until they are taken: nothing is allocated and nothing
 * is copied twice. A send is complete when its receiver has it. One lock guards pipes and records on their way; waiting
 * is on one condition variable per rank.
 *
 * With a model of links a message is visible at its arrival time only; who waits for it sleeps until then.
 *
 * A rank that leaves wakes all others; whoever waits for what can no longer come returns FAULT. Never spins. */
#define _POSIX_C_SOURCE 200809L
#include "comm/transport/transport_loop.h"

#include "base/clock.h"
#include "comm/transport/loop_faults.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct Pipe {
    MessageQueue sent;
    bool cut; /* an injected fault lost a message: nothing comes through any more */
} Pipe;

typedef struct LoopRank {
    Transport base;
    LoopWorld *world;
    MessageQueue *expected; /* MessageQueue[ranks]: of the rank alone */
    int64_t sent;           /* messages, of the rank alone */
    pthread_cond_t changed; /* a message for this rank was sent, one of its own was taken, or a rank left */
    /* under lock */
    MessageQueue taken;     /* its messages that have arrived */
    double last_arrival_s;  /* of what is on modelled links, from it or to it */
    bool left, killed;      /* killed: by an injected fault */
} LoopRank;

struct LoopWorld {
    /* set once */
    int ranks;
    LoopRank *members; /* LoopRank[ranks] */
    Pipe *pipes;       /* Pipe[from][to], under lock */
    LinkModel *links;  /* or NULL; under lock */
    LoopFaults faults;
    int *waiting_for; /* int[ranks], under lock: the rank for which each one sleeps, or -1 */
    pthread_mutex_t lock;
    pthread_cond_t rank_left;
    /* under lock */
    int left_count;
    int failed_rank; /* the first that left with a failure, or -1 */
    Status failed_status;
    char failed_line[1024];
};

static Pipe *pipe_of(LoopWorld *world, int from, int to) { return &world->pipes[from * world->ranks + to]; }

static void wake(LoopWorld *world, int rank) { pthread_cond_signal(&world->members[rank].changed); }

static struct timespec to_timespec(double seconds) {
    double whole = floor(seconds);
    return (struct timespec){(time_t)whole, (long)((seconds - whole) * 1e9)};
}

static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* ---- sending ---- */

static void schedule(LoopRank *self, Message *message, double now_s) {
    LoopRank *receiver = &self->world->members[message->peer];
    message->arrival_s = link_model_send(self->world->links, self->base.node, self->base.rank, message->peer,
                                         message->bytes, now_s);
    self->last_arrival_s = fmax(self->last_arrival_s, message->arrival_s);
    receiver->last_arrival_s = fmax(receiver->last_arrival_s, message->arrival_s);
}

static void post(LoopRank *self, Message *message) {
    LoopWorld *world = self->world;
    pthread_mutex_lock(&world->lock);
    Pipe *pipe = pipe_of(world, self->base.rank, message->peer);
    if (pipe->cut) {
        transport_message_done(&self->base, message);
    } else {
        if (world->links)
            schedule(self, message, clock_s());
        if (!pipe->sent.head) /* otherwise the receiver knows already that something is coming */
            wake(world, message->peer);
        transport_enqueue(&pipe->sent, message);
    }
    pthread_mutex_unlock(&world->lock);
}

/* Under the lock: nobody will find or is still reading this rank's messages, whose memory is about to go. */
static void withdraw(LoopRank *self) {
    LoopWorld *world = self->world;
    for (int to = 0; to < world->ranks; to++)
        pipe_of(world, self->base.rank, to)->sent = (MessageQueue){NULL, NULL};
    for (int i = 0; i < transport_message_max(world->ranks); i++)
        while (self->base.messages[i].copying)
            pthread_cond_wait(&self->changed, &world->lock);
}

static void leave_as_killed(LoopRank *self) {
    LoopWorld *world = self->world;
    pthread_mutex_lock(&world->lock);
    withdraw(self);
    self->left = self->killed = true;
    for (int other = 0; other < world->ranks; other++)
        wake(world, other);
    pthread_mutex_unlock(&world->lock);
}

/* What shall go wrong with the rank's next message. */
static Status meet_fate(LoopRank *self, const Message *message) {
    LoopFate fate = loop_faults_fate(&self->world->faults, self->base.rank, ++self->sent);
    struct timespec delay = to_timespec(fate.delay_s);
    if (fate.delay_s > 0)
        nanosleep(&delay, NULL);
    if (fate.die) {
        leave_as_killed(self);
        return fault("killed before message %lld (loop.faults)", (long long)self->sent);
    }
    if (fate.drop) {
        pthread_mutex_lock(&self->world->lock);
        pipe_of(self->world, self->base.rank, message->peer)->cut = true;
        pthread_mutex_unlock(&self->world->lock);
    }
    return OK;
}

static Status loop_start(Transport *transport) {
    LoopRank *self = (LoopRank *)transport;
    Message *message;
    while ((message = transport_dequeue(&transport->naming[INCOMING])))
        transport_enqueue(&self->expected[message->peer], message);
    while ((message = transport_dequeue(&transport->naming[OUTGOING]))) {
        if (self->world->faults.count > 0)
            TRY(meet_fate(self, message));
        post(self, message);
    }
    return OK;
}

/* ---- receiving: under the lock ---- */

static Status check_match(const LoopRank *self, const Message *expected, const Message *sent) {
    MessageLabel mine = expected->label, theirs = sent->label;
    if (mine.step != theirs.step || mine.bucket != theirs.bucket || mine.compressor != theirs.compressor)
        return transport_label_differs(&self->base, expected, theirs);
    if (sent->bytes != expected->bytes)
        return transport_size_differs(&self->base, expected, sent->bytes);
    return OK;
}

/* Copies the sender's oldest message into the oldest that is expected from there, with the lock open meanwhile. */
static Status take(LoopRank *self, int from) {
    LoopWorld *world = self->world;
    MessageQueue *queue = &pipe_of(world, from, self->base.rank)->sent;
    Message *expected = self->expected[from].head, *sent = queue->head;
    TRY(check_match(self, expected, sent));
    transport_dequeue(queue);
    transport_dequeue(&self->expected[from]);
    sent->copying = true;
    pthread_mutex_unlock(&world->lock);
    if (sent->bytes > 0)
        memcpy(expected->data, sent->data, sent->bytes);
    transport_message_done(&self->base, expected);
    pthread_mutex_lock(&world->lock);
    sent->copying = false;
    transport_enqueue(&world->members[from].taken, sent);
    wake(world, from);
    return OK;
}

static bool reap(LoopRank *self) {
    bool any = self->taken.head != NULL;
    Message *message;
    while ((message = transport_dequeue(&self->taken)))
        transport_message_done(&self->base, message);
    return any;
}

/* Moves on what can move; *progress says whether anything did. *next_s: when the first of those arrives that are on
 * modelled links, or INFINITY. */
static Status advance(LoopRank *self, bool *progress, double *next_s) {
    double now_s = self->world->links ? clock_s() : 0;
    *progress = reap(self);
    *next_s = INFINITY;
    for (int from = 0; from < self->base.ranks; from++) {
        const MessageQueue *sent = &pipe_of(self->world, from, self->base.rank)->sent;
        while (self->expected[from].head && sent->head && sent->head->arrival_s <= now_s) {
            TRY(take(self, from));
            *progress = true;
        }
        if (self->expected[from].head && sent->head)
            *next_s = fmin(*next_s, sent->head->arrival_s);
    }
    return OK;
}

/* ---- waiting: under the lock ---- */

static bool holds(const MessageQueue *queue, int group) {
    const Message *message = queue->head;
    while (message && message->group != group)
        message = message->next;
    return message != NULL;
}

/* A rank that the group waits for: first those that should send. -1 while the last messages are being copied. */
static int awaited_rank(LoopRank *self, int group) {
    for (int from = 0; from < self->base.ranks; from++)
        if (holds(&self->expected[from], group))
            return from;
    for (int to = 0; to < self->base.ranks; to++)
        if (holds(&pipe_of(self->world, self->base.rank, to)->sent, group))
            return to;
    return -1;
}

static Status check_alive(const LoopRank *self, int peer) {
    const LoopWorld *world = self->world;
    if (world->failed_rank >= 0)
        return error_restore(FAULT, world->failed_line);
    if (peer >= 0 && world->members[peer].left)
        return fault("rank %d ended while rank %d waited for it", peer, self->base.rank);
    return OK;
}

/* Sleeps until something changes, next_s or the deadline. A message on a slow link is no sign of a lost rank. */
static Status sleep_for_change(LoopRank *self, int peer, double idle_since_s, double next_s) {
    int *waiting_for = self->world->waiting_for;
    double deadline_s = fmax(idle_since_s, self->last_arrival_s) + self->base.timeout_s;
    struct timespec until = to_timespec(fmin(deadline_s, next_s));
    waiting_for[self->base.rank] = peer;
    if (pthread_cond_timedwait(&self->changed, &self->world->lock, &until) == ETIMEDOUT && clock_s() >= deadline_s &&
        peer >= 0)
        return transport_timed_out(&self->base, peer, waiting_for);
    waiting_for[self->base.rank] = -1;
    return OK;
}

static Status complete_group(LoopRank *self, const MessageGroup *group) {
    double idle_since_s = clock_s(), next_s;
    while (group->open > 0) {
        bool progress;
        TRY(advance(self, &progress, &next_s));
        if (progress) { /* the lock was open: look again before sleeping */
            idle_since_s = clock_s();
            continue;
        }
        int peer = awaited_rank(self, (int)(group - self->base.groups));
        if (!(next_s < INFINITY))
            TRY(check_alive(self, peer));
        TRY(sleep_for_change(self, peer, idle_since_s, next_s));
    }
    return OK;
}

static Status loop_wait_group(Transport *transport, const MessageGroup *group) {
    LoopRank *self = (LoopRank *)transport;
    pthread_mutex_lock(&self->world->lock);
    Status status = complete_group(self, group);
    self->world->waiting_for[transport->rank] = -1;
    pthread_mutex_unlock(&self->world->lock);
    return status;
}

static Status progress_or_fail(LoopRank *self, const MessageGroup *group) {
    bool progress;
    double next_s;
    TRY(advance(self, &progress, &next_s));
    if (!group || group->open == 0 || progress || next_s < INFINITY)
        return OK;
    return check_alive(self, awaited_rank(self, (int)(group - self->base.groups)));
}

static Status loop_progress(Transport *transport, const MessageGroup *group) {
    LoopRank *self = (LoopRank *)transport;
    pthread_mutex_lock(&self->world->lock);
    Status status = progress_or_fail(self, group);
    pthread_mutex_unlock(&self->world->lock);
    return status;
}

static void loop_abandon(Transport *transport) {
    LoopRank *self = (LoopRank *)transport;
    pthread_mutex_lock(&self->world->lock);
    withdraw(self);
    pthread_mutex_unlock(&self->world->lock);
}

/* ---- life ---- */

static bool loop_spoils(const Transport *transport, int64_t step) {
    const LoopRank *self = (const LoopRank *)transport;
    return loop_faults_nan(&self->world->faults, transport->rank, step);
}

static const TransportOps loop_ops = {.name = "loop",
                                      .one_process = true,
                                      .start = loop_start,
                                      .progress = loop_progress,
                                      .wait = loop_wait_group,
                                      .abandon = loop_abandon};

static bool init_rank(LoopWorld *world, int rank, double timeout_s) {
    LoopRank *member = &world->members[rank];
    bool complete = transport_init(&member->base, &loop_ops, rank, world->ranks, timeout_s);
    member->expected = calloc((size_t)world->ranks, sizeof *member->expected);
    member->base.spoils = loop_spoils;
    member->world = world;
    world->waiting_for[rank] = -1;
    init_condition(&member->changed);
    return complete && member->expected;
}

Status loop_create(LoopWorld **result, int ranks, double timeout_s) {
    LoopWorld *world = calloc(1, sizeof *world);
    *result = world;
    if (!world)
        return fault("no memory for %d ranks", ranks);
    world->ranks = ranks;
    world->failed_rank = -1;
    pthread_mutex_init(&world->lock, NULL);
    init_condition(&world->rank_left);
    world->members = calloc((size_t)ranks, sizeof *world->members);
    world->pipes = calloc((size_t)ranks * (size_t)ranks, sizeof *world->pipes);
    world->waiting_for = malloc((size_t)ranks * sizeof *world->waiting_for);
    bool complete = world->members && world->pipes && world->waiting_for;
    for (int rank = 0; complete && rank < ranks; rank++)
        complete = init_rank(world, rank, timeout_s);
    return complete ? OK : fault("no memory for %d ranks", ranks);
}

void loop_destroy(LoopWorld *world) {
    if (!world)
        return;
    for (int rank = 0; world->members && rank < world->ranks && world->members[rank].world; rank++) {
        transport_release(&world->members[rank].base);
        free(world->members[rank].expected);
        pthread_cond_destroy(&world->members[rank].changed);
    }
    pthread_cond_destroy(&world->rank_left);
    pthread_mutex_destroy(&world->lock);
    link_model_destroy(world->links);
    free(world->members);
    free(world->pipes);
    free(world->waiting_for);
    free(world);
}

/* Arrival times far beyond a run's are no times that a clock can wait for. */
static Status check_rate(const char *key, double gb_per_s) {
    if (gb_per_s > 0 && gb_per_s < LOOP_GB_PER_S_MIN)
        return bad_input("loop.%s: expected 0 or at least %g, found %g", key, LOOP_GB_PER_S_MIN, gb_per_s);
    return OK;
}

Status loop_set_links(LoopWorld *world, const LoopLinks *links) {
    TRY(check_rate("gb_per_s_inside", links->gb_per_s_inside));
    TRY(check_rate("gb_per_s_between", links->gb_per_s_between));
    bool any = links->latency_inside_us > 0 || links->latency_between_us > 0 || links->gb_per_s_inside > 0 ||
               links->gb_per_s_between > 0;
    world->links = any ? link_model_create(links, world->ranks) : NULL;
    return any && !world->links ? fault("no memory for the links of %d ranks", world->ranks) : OK;
}

Status loop_set_faults(LoopWorld *world, const char *faults) {
    TRY(loop_faults_parse(&world->faults, faults));
    for (int i = 0; i < world->faults.count; i++)
        if (world->faults.faults[i].rank >= world->ranks)
            return bad_input("loop.faults: expected a rank below %d, found %lld", world->ranks,
                             (long long)world->faults.faults[i].rank);
    return OK;
}

Transport *loop_transport(LoopWorld *world, int rank) { return &world->members[rank].base; }

void loop_leave(LoopWorld *world, int rank, Status status) {
    LoopRank *self = &world->members[rank];
    pthread_mutex_lock(&world->lock);
    withdraw(self);
    if (status != OK && world->failed_rank < 0 && !self->killed) {
        world->failed_rank = rank;
        world->failed_status = status;
        snprintf(world->failed_line, sizeof world->failed_line, "%s", error_line());
    }
    self->left = true;
    world->left_count++;
    pthread_cond_signal(&world->rank_left);
    for (int other = 0; other < world->ranks; other++)
        wake(world, other);
    pthread_mutex_unlock(&world->lock);
}

/* A killed rank has no words of its own: a line of it only when nobody missed it. */
static Status outcome(const LoopWorld *world) {
    if (world->failed_rank >= 0)
        return error_restore(world->failed_status, world->failed_line);
    for (int rank = 0; rank < world->ranks; rank++)
        if (world->members[rank].killed)
            return fault("rank %d was killed (loop.faults)", rank);
    return OK;
}

Status loop_wait(LoopWorld *world, double grace_s, bool *all_left) {
    pthread_mutex_lock(&world->lock);
    while (world->left_count < world->ranks && world->failed_rank < 0)
        pthread_cond_wait(&world->rank_left, &world->lock);
    struct timespec deadline = to_timespec(clock_s() + grace_s);
    while (world->left_count < world->ranks)
        if (pthread_cond_timedwait(&world->rank_left, &world->lock, &deadline) == ETIMEDOUT)
            break;
    *all_left = world->left_count == world->ranks;
    Status status = outcome(world);
    pthread_mutex_unlock(&world->lock);
    return status;
}
