/* A transport moves bytes between ranks. It knows nothing of gradients.
 *
 * Messages travel in groups: between transport_group_begin and transport_group_start a rank names all that it sends and
 * receives. The group then travels while the rank does other things; transport_group_test and _wait complete it. Nothing
 * in a group waits for anything else in it (full duplex), so two ranks may send to each other, and a ring may turn, in
 * one group. Several groups may travel at a time. Between a pair of ranks messages arrive in the order in which they were
 * named, whatever their groups. Both sides must name the same size, which may be 0 and may pass 4 GiB, under the same label.
 *
 *     begin  send recv ...  g = start        other work, test(g) now and then        wait(g)
 *
 * Groups are cut by each rank as it likes: what one sends in two groups another may receive in one.
 *
 * Ranks of one node can also read and write each other's memory where it was allocated by transport_share.
 *
 * One Transport belongs to one rank and is used by one thread at a time. */
#ifndef COMM_TRANSPORT_TRANSPORT_H
#define COMM_TRANSPORT_TRANSPORT_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Transport Transport;

typedef struct Message {
    char *data; /* u8[bytes], borrowed until group_end returns */
    size_t bytes;
    int peer;
    bool outgoing;
    /* of the transport, while it completes the group */
    bool all_posted, complete;
    int in_flight;        /* pieces that are under way now */
    size_t posted, done;  /* bytes */
    struct Message *next; /* in a queue of messages between the same pair */
} Message;

typedef struct TransportOps {
    const char *name; /* as in [comm] transport */

    /* Completes every message in transport->messages. After FAULT the group of ranks is unusable. */
    Status (*exchange)(Transport *transport);

    /* Optional: data f32[elems] becomes the sum over all ranks, in the transport's own order. */
    Status (*allreduce_sum)(Transport *transport, float *data, int64_t elems);
} TransportOps;

struct Transport {
    /* set once */
    const TransportOps *ops;
    int rank, ranks;
    double timeout_s; /* a rank that waits longer for another one gives up with FAULT, naming it */
    int *node;        /* int[ranks], owned: ranks with equal numbers share a host */
    /* of the rank */
    Message *messages; /* owned: the open group */
    int message_count;
    int64_t bytes_intra, bytes_inter; /* sent so far to ranks of the same node, and of others */
};

/* ---- for the users of a transport ---- */

/* Messages that all groups under way may hold together. */
int transport_message_max(int ranks);

/* The label of all messages named from now on. */
void transport_label(Transport *transport, MessageLabel label);

void transport_group_begin(Transport *transport);
void transport_send(Transport *transport, int peer, const void *data, size_t bytes);
void transport_recv(Transport *transport, int peer, void *data, size_t bytes);
Ticket transport_group_start(Transport *transport); /* an empty group is complete at once */

/* Moves on whatever can move, of all groups; *complete says whether this one has arrived. Never sleeps. */
Status transport_group_test(Transport *transport, Ticket group, bool *complete);
Status transport_group_wait(Transport *transport, Ticket group); /* sleeps or backs off */
Status transport_group_end(Transport *transport); /* start and wait */

/* Memory that the ranks of this node can reach: every rank of the transport calls it, in the same order, with the same size. 64-byte
 * aligned, zeroed. Falls back to private memory where sharing is impossible. NULL: no memory. */
void *transport_share(Transport *transport, size_t bytes);
void transport_unshare(Transport *transport, void *memory); /* not collective; NULL allowed. Peers may no longer touch it */

/* Where this rank finds what `peer` holds at the same place of its own shared memory as `mine` is in ours; NULL when peer is on another
 * node, or `mine` not in shared memory. Who reads or writes there orders itself by messages. */
void *transport_peer_ptr(Transport *transport, const void *mine, int peer);

/* Returns when every rank has called it: ceil(log2(ranks)) groups of one empty message each way. */
Status transport_barrier(Transport *transport);

/* ---- for transports ---- */

/* Fills the common part; every rank on node 0. false: no memory. */
bool transport_init(Transport *transport, const TransportOps *ops, int rank, int ranks, double timeout_s);
void transport_release(Transport *transport); /* accepts a zeroed one */

/* The counters' one place: also for what a native collective sends. */
void transport_count_sent(Transport *transport, int peer, size_t bytes);

/* The FAULT of a rank that has waited too long for `peer`. Who waits is not to blame: waiting_for int[ranks] says for
 * whom each rank waits, or -1, and the line names the one at the end of the chain. */
Status transport_timed_out(const Transport *transport, int peer, const int *waiting_for);

/* ---- ranks that are processes ---- */

/* A transport whose ranks are processes, started by a launcher such as mpirun. */
typedef struct ProcessTransport {
    const char *name;
    Status (*start)(int *argc, char ***argv); /* once, at the start of main() */
    bool (*started)(void);
    Status (*create)(Transport **transport, double timeout_s); /* of all the processes. Collective */
    void (*destroy)(Transport *transport);
    int (*rank)(void);
    void (*stop)(void);           /* collective */
    void (*abort)(int exit_code); /* ends every process, this one included */
} ProcessTransport;

/* NULL in a build without any. */
const ProcessTransport *process_transport(void);

#endif
