/* A transport moves bytes between ranks. It knows nothing of gradients.
 *
 * Messages travel in groups: between transport_group_begin and transport_group_start a rank names all that it sends
 * and receives. The group then travels while the rank does other things; transport_group_test and _wait complete it.
 * Nothing in a group waits for anything else in it (full duplex), so two ranks may send to each other, and a ring may
 * turn, in one group. Several groups may travel at a time. Between a pair of ranks messages arrive in the order in
 * which they were named, whatever their groups. Both sides must name the same size, which may be 0 and may pass 4 GiB,
 * under the same label.
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
#include "base/gpu.h"
#include "base/phases.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Transport Transport;
typedef struct VectorOps VectorOps; /* comm/transport/vector.h */

/* What a message belongs to. It travels with the message and is compared on arrival. mpi compares step modulo 128,
 * bucket modulo 4096 and compressor modulo 16. */
typedef struct MessageLabel {
    int64_t step;
    int bucket;
    int compressor;
} MessageLabel;

/* A group that was started; 0 is an empty one. */
typedef uint64_t Ticket;

/* ---- what a transport is made of ---- */

typedef struct Message {
    /* as it was named */
    char *data; /* u8[bytes], borrowed until its group is complete */
    size_t bytes;
    MessageLabel label;
    int peer;
    bool outgoing;
    int group; /* index in transport->groups */
    /* of the transport, while the message travels */
    size_t posted, done;  /* bytes; a transport that cuts messages: on their way or arrived, and arrived */
    double arrival_s;     /* a transport with a model of links: not visible before */
    bool copying;         /* a transport within a process: the receiver reads data now */
    struct Message *next; /* in the queue that holds it */
} Message;

/* Messages between the same two ranks, one way, oldest first. */
typedef struct MessageQueue {
    Message *head, *tail;
} MessageQueue;

typedef struct MessageGroup {
    int open;            /* messages that have not arrived */
    uint64_t generation; /* how many groups had this place before, and 1 */
    int next_unused;
} MessageGroup;

/* Memory born in transport_share. */
typedef struct Region {
    char *memory; /* u8[bytes], of this rank */
    size_t bytes, mapped_bytes;
    char **peer; /* char *[ranks], owned: where the same place of each rank's memory is, or NULL */
} Region;

typedef void CallFn(void *user, int argument);

typedef struct TransportOps {
    const char *name; /* as in [comm] transport */
    bool one_process; /* ranks are threads, which share all memory */

    /* Takes the messages of transport->naming over and sends them on their way; each ends in transport_message_done.
     * Like the others it returns FAULT when a rank is lost or sends what nobody expects: the transport is abandoned
     * and unusable then. */
    Status (*start)(Transport *transport);

    /* Of all groups, without sleeping; `group`, or NULL, is the one that the caller asks for. */
    Status (*progress)(Transport *transport, const MessageGroup *group);
    Status (*wait)(Transport *transport, const MessageGroup *group); /* progress until it has arrived */
    void (*abandon)(Transport *transport); /* the transport touches no memory of its messages any more */

    /* Optional: sum f32[elems] becomes that of all ranks' terms, in the transport's own order. terms == sum: in place;
     * else they do not overlap. It waits as `wait` does, or, if it may spin, as it likes and for ever. */
    Status (*allreduce_sum)(Transport *transport, const float *terms, float *sum, int64_t elems, bool may_spin);

    /* Of a transport that moves a device's memory; NULL where work is done when a call returns. See below. */
    void (*mark)(Transport *transport, int mark);
    void (*follow)(Transport *transport, int mark);
    void (*call)(Transport *transport, CallFn *fn, void *user, int argument);
    void (*stamp)(Transport *transport, bool computing, double *at_s);
    Status (*flush)(Transport *transport);
} TransportOps;

enum { INCOMING, OUTGOING };

struct Transport {
    /* set once */
    const TransportOps *ops;
    int rank, ranks;
    double timeout_s; /* a rank that waits longer for another one gives up with FAULT, naming it */
    int *node;        /* int[ranks], owned: ranks with equal numbers share a host */
    const VectorOps *vector; /* arithmetic on the memory that this transport moves */
    void *lane;              /* of a transport whose memory is a device's: the queue in which it works */
    int *places;             /* int[2 * ranks], owned: for the groups that a collective cuts */
    bool (*spoils)(const Transport *transport, int64_t step); /* NULL, or: an injected fault wants a NaN in this rank's
                                                               * gradient of that step */
    /* of the rank */
    int64_t bytes_intra, bytes_inter; /* sent so far to ranks of the same node, and of others */
    MessageLabel label;               /* of the next message */
    MessageQueue naming[2];           /* the open group: INCOMING and OUTGOING messages */
    int naming_group;                 /* its index, or -1 before its first message */
    Message *messages, *unused;       /* Message[message_max], owned, and those at rest */
    MessageGroup *groups;             /* MessageGroup[message_max], owned */
    int unused_group;
    Region *regions; /* owned */
    int region_count;
    Status failed; /* the first failure, which all later calls return */
    char failed_line[512];
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

/* Moves on whatever can move, of all groups; *complete says whether this one has arrived. Never sleeps, so it never
 * times out: that is wait's. */
Status transport_group_test(Transport *transport, Ticket group, bool *complete);
Status transport_group_wait(Transport *transport, Ticket group); /* sleeps or backs off */
Status transport_group_end(Transport *transport); /* start and wait */

/* A device's memory. Vector operations then join the transport's lane, and messages lanes beside it: a group travels when
 * all that was in the lane as it started is done, and what joins the lane after group_wait finds what it brought, and may
 * write to what it sent. So group_wait returns at once; group_test says that a group is complete when it was waited for,
 * not before. A group ends only when all before it on the same link have: one that receives what a peer sends in a later
 * one than its own such group waits for ever. On the host there is no lane: mark, follow and flush do nothing, call calls
 * and stamp fills in at once.
 *     mark    by the thread that computes: what it has asked its device for so far
 *     follow  what joins the lane from now on waits for the last mark of that number
 *     call    fn is called when all that is in the lane now is done
 *     stamp   *at_s becomes when that was so, on clock_s's scale: filled in when flush returns
 *     stamp_computing   the same, by the thread that computes, of what it has asked its device for so far, if a later flush
 *             waits for that
 *     flush   returns when the lane is empty; FAULT when that takes longer than timeout_s */
void transport_mark(Transport *transport, int mark);
void transport_follow(Transport *transport, int mark);
void transport_call(Transport *transport, CallFn *fn, void *user, int argument);
void transport_stamp(Transport *transport, double *at_s);
void transport_stamp_computing(Transport *transport, double *at_s);
Status transport_flush(Transport *transport);

/* A phase is at work from here on, or up to here: for the collectives. Nobody asks where phases is NULL. */
void phase_begin(Transport *transport, Phases *phases, int i, const char *name);
void phase_end(Transport *transport, Phases *phases, int i);

/* Of ops->allreduce_sum, where there is one. No group may be under way. */
Status transport_allreduce_sum(Transport *transport, const float *terms, float *sum, int64_t elems, bool may_spin);

/* For a rank that gives up with groups under way: when it returns their memory may go. All later calls return FAULT.
 * A call that returns FAULT has done it already. */
void transport_abandon(Transport *transport);

/* Memory that the ranks of this node can reach: every rank of the transport calls it, in the same order, with the same
 * size. 64-byte aligned, zeroed. Falls back to private memory, on all ranks of the node, where sharing is impossible.
 * NULL: no memory. */
void *transport_share(Transport *transport, size_t bytes);

/* Not collective; NULL is allowed. Peers may no longer touch it, unless the transport has failed: peers that do not
 * know yet may be at work on it, so where ranks are threads it stays until transport_release. */
void transport_unshare(Transport *transport, void *memory);

/* Where this rank finds what `peer` holds at the same place of its own shared memory as `mine` is in ours; NULL when
 * peer is on another node, or `mine` not in shared memory. Who reads or writes there orders itself by messages. */
void *transport_peer_ptr(Transport *transport, const void *mine, int peer);

/* Overrides what was found: rank r counts as on node r / ranks_per_node from now on, for counters, sizes of pieces,
 * models of links and peer_ptr. 0: leaves all as it is. Every rank calls it alike, with no message under way. */
void transport_set_nodes(Transport *transport, int ranks_per_node);

/* Returns when every rank has called it: ceil(log2(ranks)) groups of one empty message each way. */
Status transport_barrier(Transport *transport);

/* all u8[ranks][bytes]: what every rank has at `mine`. All to all at once: for small things. */
Status transport_all_gather(Transport *transport, const void *mine, void *all, size_t bytes);

/* ---- for transports ---- */

/* Fills the common part; every rank on node 0. false: no memory. */
bool transport_init(Transport *transport, const TransportOps *ops, int rank, int ranks, double timeout_s);
void transport_release(Transport *transport); /* accepts a zeroed one */

/* The message has arrived, or its data left for good: its group is one message nearer to complete, its place free. */
void transport_message_done(Transport *transport, Message *message);

void transport_enqueue(MessageQueue *queue, Message *message);
Message *transport_dequeue(MessageQueue *queue); /* NULL when it is empty */

/* The counters' one place: also for what a native collective sends. */
void transport_count_sent(Transport *transport, int peer, size_t bytes);

/* The FAULT of a rank that has waited too long for `peer`. Who waits is not to blame: waiting_for int[ranks] says for
 * whom each rank waits, or -1, and the line names the one at the end of the chain; `peer` when they wait in a
 * circle. */
Status transport_timed_out(const Transport *transport, int peer, const int *waiting_for);

/* The FAULTs of a message that is not the one this rank expected from its peer. */
Status transport_label_differs(const Transport *transport, const Message *expected, MessageLabel sent);
Status transport_size_differs(const Transport *transport, const Message *expected, size_t sent_bytes);

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

/* ---- ranks that compute on GPUs ---- */

/* A transport between the memories of the ranks' GPUs; `control`, over which they talk already, must outlive it. */
typedef struct DeviceTransport {
    const char *name;
    /* Collective. Where a rank fails it gets FAULT and says why; elsewhere *transport is NULL then. */
    Status (*create)(Transport **transport, Transport *control, Gpu *gpu);
    void (*destroy)(Transport *transport);
} DeviceTransport;

/* NULL in a build without any. */
const DeviceTransport *device_transport(void);

#endif
