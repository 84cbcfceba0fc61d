/* The loop transport: ranks are threads of one process, and a message is one memcpy.
 *
 *   sender                        queue [from][to]                     receiver
 *   links its messages into   ->  message -> message -> ...   ->       takes the head, copies outside the lock,
 *   the queues, then waits                                             marks it done, wakes the sender
 *
 * Queues link the senders' own Message records, which stay valid because a group's end waits for them: nothing is
 * allocated and nothing is copied twice. All sends of a group are linked before its first receive waits, so the order
 * of messages inside a group cannot deadlock. One lock guards the queues; waiting is on one condition variable per
 * rank.
 *
 * A rank that leaves wakes all others; whoever waits for what can no longer come returns FAULT. Never spins. */
#define _POSIX_C_SOURCE 200809L
#include "comm/transport/transport_loop.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct Queue {
    Message *head, *tail;
} Queue;

typedef struct LoopRank {
    Transport base;
    LoopWorld *world;
    pthread_cond_t changed; /* a message for this rank arrived, one of its own was taken, or a rank left */
    bool left;              /* under lock */
} LoopRank;

struct LoopWorld {
    /* set once */
    int ranks;
    LoopRank *members; /* LoopRank[ranks] */
    Queue *queues;     /* Queue[from][to], under lock */
    int *waiting_for;  /* int[ranks], under lock: the rank for which each one sleeps, or -1 */
    pthread_mutex_t lock;
    pthread_cond_t rank_left;
    /* under lock */
    int left_count;
    int failed_rank; /* the first that left with a failure, or -1 */
    Status failed_status;
    char failed_line[1024];
};

/* ---- waiting: all of it under the lock ---- */

static struct timespec deadline_after(double seconds) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double whole = (double)(time_t)seconds;
    long nanoseconds = now.tv_nsec + (long)((seconds - whole) * 1e9);
    return (struct timespec){now.tv_sec + (time_t)whole + nanoseconds / 1000000000, nanoseconds % 1000000000};
}

static void wake(LoopWorld *world, int rank) { pthread_cond_signal(&world->members[rank].changed); }

static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* ---- a group ---- */

static Queue *queue_of(LoopWorld *world, int from, int to) { return &world->queues[from * world->ranks + to]; }

static void post_sends(LoopRank *self) {
    for (int i = 0; i < self->base.message_count; i++) {
        Message *message = &self->base.messages[i];
        if (!message->outgoing)
            continue;
        Queue *queue = queue_of(self->world, self->base.rank, message->peer);
        if (queue->head)
            queue->tail->next = message;
        else
            queue->head = message;
        queue->tail = message;
        wake(self->world, message->peer);
    }
}

/* Copies the sender's oldest message, with the lock open meanwhile. */
static Status take(LoopRank *self, Queue *queue, Message *incoming) {
    LoopWorld *world = self->world;
    Message *sent = queue->head;
    if (sent->bytes != incoming->bytes)
        return fault("rank %d sent %zu bytes where rank %d expected %zu", incoming->peer, sent->bytes, self->base.rank,
                     incoming->bytes);
    queue->head = sent->next;
    sent->in_flight = 1;
    pthread_mutex_unlock(&world->lock);
    if (sent->bytes > 0)
        memcpy(incoming->data, sent->data, sent->bytes);
    pthread_mutex_lock(&world->lock);
    sent->in_flight = 0;
    sent->complete = true;
    incoming->complete = true;
    wake(world, incoming->peer);
    return OK;
}

/* Receives what is there; `progress` says whether anything was. `waiting_for` is the peer of the first message that was
 * not complete, or -1. An earlier message from the same sender meets the head of its queue first. */
static Status advance(LoopRank *self, bool *progress, int *waiting_for) {
    *progress = false;
    *waiting_for = -1;
    for (int i = 0; i < self->base.message_count; i++) {
        Message *message = &self->base.messages[i];
        if (message->complete)
            continue;
        Queue *queue = queue_of(self->world, message->peer, self->base.rank);
        if (!message->outgoing && queue->head) {
            TRY(take(self, queue, message));
            *progress = true;
        } else if (*waiting_for < 0) {
            *waiting_for = message->peer;
        }
    }
    return OK;
}

static Status check_alive(const LoopRank *self, int waiting_for) {
    const LoopWorld *world = self->world;
    if (world->failed_rank >= 0)
        return error_restore(FAULT, world->failed_line);
    if (world->members[waiting_for].left)
        return fault("rank %d ended while rank %d waited for it", waiting_for, self->base.rank);
    return OK;
}

static Status complete_group(LoopRank *self) {
    struct timespec deadline = deadline_after(self->base.timeout_s);
    for (;;) {
        bool progress;
        int waiting_for;
        TRY(advance(self, &progress, &waiting_for));
        if (waiting_for < 0)
            return OK;
        if (progress) { /* the lock was open: look again before sleeping */
            deadline = deadline_after(self->base.timeout_s);
            continue;
        }
        TRY(check_alive(self, waiting_for));
        self->world->waiting_for[self->base.rank] = waiting_for;
        if (pthread_cond_timedwait(&self->changed, &self->world->lock, &deadline) == ETIMEDOUT)
            return transport_timed_out(&self->base, waiting_for, self->world->waiting_for);
    }
}

/* After a failure: nobody may find or still be reading this rank's messages, whose memory is about to go. */
static void withdraw_sends(LoopRank *self) {
    LoopWorld *world = self->world;
    for (int to = 0; to < world->ranks; to++)
        *queue_of(world, self->base.rank, to) = (Queue){NULL, NULL};
    for (int i = 0; i < self->base.message_count; i++)
        while (self->base.messages[i].in_flight)
            pthread_cond_wait(&self->changed, &world->lock);
}

static Status loop_exchange(Transport *transport) {
    LoopRank *self = (LoopRank *)transport;
    pthread_mutex_lock(&self->world->lock);
    post_sends(self);
    Status status = complete_group(self);
    self->world->waiting_for[transport->rank] = -1;
    if (status != OK)
        withdraw_sends(self);
    pthread_mutex_unlock(&self->world->lock);
    return status;
}

/* ---- life ---- */

static const TransportOps loop_ops = {.name = "loop", .exchange = loop_exchange};

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
    world->queues = calloc((size_t)ranks * (size_t)ranks, sizeof *world->queues);
    world->waiting_for = malloc((size_t)ranks * sizeof *world->waiting_for);
    bool complete = world->members && world->queues && world->waiting_for;
    for (int rank = 0; complete && rank < ranks; rank++) {
        LoopRank *member = &world->members[rank];
        complete = transport_init(&member->base, &loop_ops, rank, ranks, timeout_s);
        member->world = world;
        world->waiting_for[rank] = -1;
        init_condition(&member->changed);
    }
    return complete ? OK : fault("no memory for %d ranks", ranks);
}

void loop_destroy(LoopWorld *world) {
    if (!world)
        return;
    for (int rank = 0; world->members && rank < world->ranks && world->members[rank].world; rank++) {
        transport_release(&world->members[rank].base);
        pthread_cond_destroy(&world->members[rank].changed);
    }
    pthread_cond_destroy(&world->rank_left);
    pthread_mutex_destroy(&world->lock);
    free(world->members);
    free(world->queues);
    free(world->waiting_for);
    free(world);
}

Transport *loop_transport(LoopWorld *world, int rank) { return &world->members[rank].base; }

void loop_leave(LoopWorld *world, int rank, Status status) {
    pthread_mutex_lock(&world->lock);
    if (status != OK && world->failed_rank < 0) {
        world->failed_rank = rank;
        world->failed_status = status;
        snprintf(world->failed_line, sizeof world->failed_line, "%s", error_line());
    }
    world->members[rank].left = true;
    world->left_count++;
    pthread_cond_signal(&world->rank_left);
    for (int other = 0; other < world->ranks; other++)
        wake(world, other);
    pthread_mutex_unlock(&world->lock);
}

Status loop_wait(LoopWorld *world, double grace_s, bool *all_left) {
    pthread_mutex_lock(&world->lock);
    while (world->left_count < world->ranks && world->failed_rank < 0)
        pthread_cond_wait(&world->rank_left, &world->lock);
    struct timespec deadline = deadline_after(grace_s);
    while (world->left_count < world->ranks)
        if (pthread_cond_timedwait(&world->rank_left, &world->lock, &deadline) == ETIMEDOUT)
            break;
    *all_left = world->left_count == world->ranks;
    Status status = world->failed_rank < 0 ? OK : error_restore(world->failed_status, world->failed_line);
    pthread_mutex_unlock(&world->lock);
    return status;
}
