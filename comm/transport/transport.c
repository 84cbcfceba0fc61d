/* What all transports share: the open group, the counters, the barrier, and which of them this build has. */
#include "comm/transport/transport.h"

#include "comm/transport/transport_mpi.h"

#include <assert.h>
#include <stdlib.h>

enum { MESSAGES_PER_PEER = 8 };

const ProcessTransport *process_transport(void) {
#ifdef HAVE_MPI
    return &mpi_processes;
#else
    return NULL;
#endif
}

int transport_group_max(int ranks) { return ranks * MESSAGES_PER_PEER; }

bool transport_init(Transport *transport, const TransportOps *ops, int rank, int ranks, double timeout_s) {
    *transport = (Transport){.ops = ops, .rank = rank, .ranks = ranks, .timeout_s = timeout_s};
    transport->node = calloc((size_t)ranks, sizeof(int));
    transport->messages = calloc((size_t)transport_group_max(ranks), sizeof(Message));
    return transport->node && transport->messages;
}

void transport_release(Transport *transport) {
    free(transport->node);
    free(transport->messages);
    *transport = (Transport){0};
}

void transport_group_begin(Transport *transport) {
    assert(transport->message_count == 0); /* groups do not nest */
    (void)transport;
}

static void add_message(Transport *transport, int peer, void *data, size_t bytes, bool outgoing) {
    assert(peer >= 0 && peer < transport->ranks && peer != transport->rank);
    assert(transport->message_count < transport_group_max(transport->ranks));
    transport->messages[transport->message_count++] =
        (Message){.data = data, .bytes = bytes, .peer = peer, .outgoing = outgoing};
}

void transport_send(Transport *transport, int peer, const void *data, size_t bytes) {
    add_message(transport, peer, (void *)data, bytes, true); /* outgoing data is only read */
    transport_count_sent(transport, peer, bytes);
}

void transport_recv(Transport *transport, int peer, void *data, size_t bytes) {
    add_message(transport, peer, data, bytes, false);
}

Status transport_group_end(Transport *transport) {
    Status status = transport->message_count > 0 ? transport->ops->exchange(transport) : OK;
    transport->message_count = 0;
    return status;
}

void transport_count_sent(Transport *transport, int peer, size_t bytes) {
    bool intra = transport->node[peer] == transport->node[transport->rank];
    *(intra ? &transport->bytes_intra : &transport->bytes_inter) += (int64_t)bytes;
}

Status transport_timed_out(const Transport *transport, int peer, const int *waiting_for) {
    int links = 0;
    while (waiting_for[peer] >= 0 && links++ < transport->ranks) /* they may wait in a circle */
        peer = waiting_for[peer];
    return fault("no answer from rank %d for %g s (comm.timeout_s)", peer, transport->timeout_s);
}

/* Dissemination (Hensgen, Finkel, Manber 1988): after round k a rank knows that the 2^(k+1) - 1 before it have come. */
Status transport_barrier(Transport *transport) {
    int ranks = transport->ranks;
    for (int distance = 1; distance < ranks; distance *= 2) {
        transport_group_begin(transport);
        transport_send(transport, (transport->rank + distance) % ranks, NULL, 0);
        transport_recv(transport, (transport->rank + ranks - distance) % ranks, NULL, 0);
        TRY(transport_group_end(transport));
    }
    return OK;
}
