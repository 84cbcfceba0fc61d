/* What all transports share: messages and groups, the counters, the barrier, and which transports this build has.
 *
 *   unused  --send, recv-->  naming  --start-->  of the transport, in its queues  --message_done-->  unused
 *
 * Messages and groups live in two arrays of fixed size and change places by their links: nothing is allocated and
 * nothing is searched. A ticket is a group's place and how many groups had that place before, so an old ticket shows
 * by itself that its group is complete. */
#include "comm/transport/transport.h"

#include "base/clock.h"
#include "comm/transport/transport_mpi.h"
#ifdef HAVE_NCCL
#include "comm/transport/transport_nccl.h"
#endif
#include "comm/transport/vector.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MESSAGES_PER_PEER = 64 };

const ProcessTransport *process_transport(void) {
#ifdef HAVE_MPI
    return &mpi_processes;
#else
    return NULL;
#endif
}

const DeviceTransport *device_transport(void) {
#ifdef HAVE_NCCL
    return &nccl_device;
#else
    return NULL;
#endif
}

int transport_message_max(int ranks) { return ranks * MESSAGES_PER_PEER; }

bool transport_init(Transport *transport, const TransportOps *ops, int rank, int ranks, double timeout_s) {
    int max = transport_message_max(ranks);
    *transport = (Transport){.ops = ops, .rank = rank, .ranks = ranks, .timeout_s = timeout_s, .naming_group = -1,
                             .vector = &vector_host};
    transport->node = calloc((size_t)ranks, sizeof(int));
    transport->places = calloc(2 * (size_t)ranks, sizeof(int));
    transport->messages = calloc((size_t)max, sizeof(Message));
    transport->groups = calloc((size_t)max, sizeof(MessageGroup));
    if (!transport->node || !transport->places || !transport->messages || !transport->groups)
        return false;
    for (int i = 0; i < max; i++) {
        transport->messages[i].next = i + 1 < max ? &transport->messages[i + 1] : NULL;
        transport->groups[i] = (MessageGroup){.generation = 1, .next_unused = i + 1};
    }
    transport->unused = transport->messages;
    return true;
}

void transport_release(Transport *transport) {
    transport->failed = OK; /* no rank is at work on this one's memory any more */
    while (transport->region_count > 0)
        transport_unshare(transport, transport->regions[0].memory);
    free(transport->regions);
    free(transport->node);
    free(transport->places);
    free(transport->messages);
    free(transport->groups);
    *transport = (Transport){0};
}

/* ---- queues ---- */

void transport_enqueue(MessageQueue *queue, Message *message) {
    message->next = NULL;
    if (queue->head)
        queue->tail->next = message;
    else
        queue->head = message;
    queue->tail = message;
}

Message *transport_dequeue(MessageQueue *queue) {
    Message *message = queue->head;
    if (message)
        queue->head = message->next;
    return message;
}

/* ---- groups ---- */

void transport_label(Transport *transport, MessageLabel label) { transport->label = label; }

void transport_group_begin(Transport *transport) {
    assert(transport->naming_group < 0); /* groups do not nest */
    (void)transport;
}

static MessageGroup *open_group(Transport *transport) {
    if (transport->naming_group < 0) { /* one group has at least one message: there are enough of them */
        transport->naming_group = transport->unused_group;
        transport->unused_group = transport->groups[transport->naming_group].next_unused;
    }
    return &transport->groups[transport->naming_group];
}

static void add_message(Transport *transport, int peer, void *data, size_t bytes, bool outgoing) {
    Message *message = transport->unused;
    assert(peer >= 0 && peer < transport->ranks && peer != transport->rank);
    assert(message); /* transport_message_max */
    transport->unused = message->next;
    open_group(transport)->open++;
    *message = (Message){.data = data,
                         .bytes = bytes,
                         .label = transport->label,
                         .peer = peer,
                         .outgoing = outgoing,
                         .group = transport->naming_group};
    transport_enqueue(&transport->naming[outgoing ? OUTGOING : INCOMING], message);
}

void transport_send(Transport *transport, int peer, const void *data, size_t bytes) {
    add_message(transport, peer, (void *)data, bytes, true); /* outgoing data is only read */
    transport_count_sent(transport, peer, bytes);
}

void transport_recv(Transport *transport, int peer, void *data, size_t bytes) {
    add_message(transport, peer, data, bytes, false);
}

void transport_message_done(Transport *transport, Message *message) {
    int place = message->group;
    MessageGroup *group = &transport->groups[place];
    message->next = transport->unused;
    transport->unused = message;
    if (--group->open > 0)
        return;
    group->generation++;
    group->next_unused = transport->unused_group;
    transport->unused_group = place;
}

/* The first failure stays: what follows from it explains less. Its messages' memory may go when the caller knows. */
static Status remember(Transport *transport, Status status) {
    if (status == OK || transport->failed != OK)
        return status;
    transport->failed = status;
    snprintf(transport->failed_line, sizeof transport->failed_line, "%s", error_line());
    transport->ops->abandon(transport);
    return status;
}

Ticket transport_group_start(Transport *transport) {
    int place = transport->naming_group;
    if (place < 0)
        return 0;
    Ticket max = (Ticket)transport_message_max(transport->ranks);
    Ticket ticket = transport->groups[place].generation * max + (Ticket)place;
    if (transport->failed == OK)
        remember(transport, transport->ops->start(transport));
    transport->naming[INCOMING] = transport->naming[OUTGOING] = (MessageQueue){NULL, NULL};
    transport->naming_group = -1;
    return ticket;
}

/* NULL when it is complete. */
static const MessageGroup *find_group(const Transport *transport, Ticket ticket) {
    Ticket max = (Ticket)transport_message_max(transport->ranks);
    const MessageGroup *group = &transport->groups[ticket % max];
    return ticket == 0 || group->generation != ticket / max ? NULL : group;
}

Status transport_group_test(Transport *transport, Ticket ticket, bool *complete) {
    const MessageGroup *group = find_group(transport, ticket);
    if (transport->failed != OK)
        return error_restore(transport->failed, transport->failed_line);
    TRY(remember(transport, transport->ops->progress(transport, group)));
    *complete = !group || group->open == 0;
    return OK;
}

Status transport_group_wait(Transport *transport, Ticket ticket) {
    const MessageGroup *group = find_group(transport, ticket);
    if (transport->failed != OK)
        return error_restore(transport->failed, transport->failed_line);
    return group ? remember(transport, transport->ops->wait(transport, group)) : OK;
}

Status transport_group_end(Transport *transport) {
    return transport_group_wait(transport, transport_group_start(transport));
}

void transport_mark(Transport *transport, int mark) {
    if (transport->ops->mark)
        transport->ops->mark(transport, mark);
}

void transport_follow(Transport *transport, int mark) {
    if (transport->ops->follow)
        transport->ops->follow(transport, mark);
}

void transport_call(Transport *transport, CallFn *fn, void *user, int argument) {
    if (transport->ops->call)
        transport->ops->call(transport, fn, user, argument);
    else
        fn(user, argument);
}

static void stamp(Transport *transport, bool computing, double *at_s) {
    if (transport->ops->stamp)
        transport->ops->stamp(transport, computing, at_s);
    else
        *at_s = clock_s();
}

void transport_stamp(Transport *transport, double *at_s) { stamp(transport, false, at_s); }
void transport_stamp_computing(Transport *transport, double *at_s) { stamp(transport, true, at_s); }

void phase_begin(Transport *transport, Phases *phases, int i, const char *name) {
    if (!phases || phases->phase[i].name)
        return;
    phases->phase[i].name = name;
    transport_stamp(transport, &phases->phase[i].start_s);
}

void phase_end(Transport *transport, Phases *phases, int i) {
    if (phases)
        transport_stamp(transport, &phases->phase[i].end_s);
}

Status transport_flush(Transport *transport) { return transport->ops->flush ? transport->ops->flush(transport) : OK; }

Status transport_allreduce_sum(Transport *transport, const float *terms, float *sum, int64_t elems, bool may_spin) {
    if (transport->failed != OK)
        return error_restore(transport->failed, transport->failed_line);
    return remember(transport, transport->ops->allreduce_sum(transport, terms, sum, elems, may_spin));
}

void transport_abandon(Transport *transport) {
    if (transport->failed == OK)
        remember(transport, fault("rank %d gave up", transport->rank));
}

/* ---- nodes and counters ---- */

void transport_set_nodes(Transport *transport, int ranks_per_node) {
    for (int rank = 0; ranks_per_node > 0 && rank < transport->ranks; rank++)
        transport->node[rank] = rank / ranks_per_node;
}

void transport_count_sent(Transport *transport, int peer, size_t bytes) {
    bool intra = transport->node[peer] == transport->node[transport->rank];
    *(intra ? &transport->bytes_intra : &transport->bytes_inter) += (int64_t)bytes;
}

/* ---- failures ---- */

/* ", node 1: bucket 3 of step 12 waits", as far as there is something to say. */
static void describe_wait(const Transport *transport, int guilty, char *text, size_t size) {
    MessageLabel label = transport->label;
    char node[32] = "", bucket[64] = "";
    if (transport->node[guilty] != transport->node[transport->rank])
        snprintf(node, sizeof node, ", node %d", transport->node[guilty]);
    if (label.step > 0 && label.bucket >= 0)
        snprintf(bucket, sizeof bucket, ": bucket %d of step %lld waits", label.bucket, (long long)label.step);
    snprintf(text, size, "%s%s", node, bucket);
}

Status transport_timed_out(const Transport *transport, int peer, const int *waiting_for) {
    int guilty = peer, links = 0;
    while (waiting_for[guilty] >= 0 && links++ < transport->ranks)
        guilty = waiting_for[guilty];
    if (waiting_for[guilty] >= 0)
        guilty = peer;
    char wait[96];
    describe_wait(transport, guilty, wait, sizeof wait);
    return fault("no answer from rank %d for %g s (comm.timeout_s)%s", guilty, transport->timeout_s, wait);
}

Status transport_label_differs(const Transport *transport, const Message *expected, MessageLabel sent) {
    MessageLabel label = expected->label;
    return fault("rank %d sent step %lld bucket %d compressor %d "
                 "where rank %d expected step %lld bucket %d compressor %d",
                 expected->peer, (long long)sent.step, sent.bucket, sent.compressor, transport->rank,
                 (long long)label.step, label.bucket, label.compressor);
}

Status transport_size_differs(const Transport *transport, const Message *expected, size_t sent_bytes) {
    return fault("rank %d sent %zu bytes where rank %d expected %zu", expected->peer, sent_bytes, transport->rank,
                 expected->bytes);
}

/* ---- barrier ---- */

/* Dissemination (Hensgen, Finkel, Manber 1988): after round k a rank knows that the 2^(k+1) - 1 before it have come. */
static Status disseminate(Transport *transport) {
    int ranks = transport->ranks;
    for (int distance = 1; distance < ranks; distance *= 2) {
        transport_group_begin(transport);
        transport_send(transport, (transport->rank + distance) % ranks, NULL, 0);
        transport_recv(transport, (transport->rank + ranks - distance) % ranks, NULL, 0);
        TRY(transport_group_end(transport));
    }
    return OK;
}

Status transport_barrier(Transport *transport) {
    MessageLabel label = transport->label;
    transport->label = (MessageLabel){0};
    Status status = disseminate(transport);
    transport->label = label;
    return status;
}

Status transport_all_gather(Transport *transport, const void *mine, void *all, size_t bytes) {
    char *rows = all;
    memcpy(rows + (size_t)transport->rank * bytes, mine, bytes);
    transport_group_begin(transport);
    for (int i = 1; i < transport->ranks; i++) {
        int to = (transport->rank + i) % transport->ranks;
        int from = (transport->rank + transport->ranks - i) % transport->ranks;
        transport_send(transport, to, mine, bytes);
        transport_recv(transport, from, rows + (size_t)from * bytes, bytes);
    }
    return transport_group_end(transport);
}
