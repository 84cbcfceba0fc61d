/* The mpi transport: ranks are processes started by mpirun or srun. The only file that knows MPI.
 *
 * A message travels in pieces, of which a few are in flight at a time: one message of any size becomes MPI messages
 * that MPI can count (int), and between nodes the pieces are small, because over TCP Open MPI 4.1 moves two large
 * messages in opposite directions one after the other, small ones at once. Pieces of one pair leave and arrive in
 * order, so both ends cut alike without agreeing on it: the cut depends only on the message's size and on who shares a
 * node.
 *
 *   message  |  piece  |  piece  |  piece  | rest |
 *             done      in flight (WINDOW)   not yet posted
 *
 * While it waits it polls: MPI's own waiting would burn the core that another rank or the computation needs. It polls
 * without pause for SPIN_S, then sleeps ever longer, up to a fixed share of the time waited so far. */
#define _POSIX_C_SOURCE 200809L
#include "comm/transport/transport_mpi.h"

#include "base/clock.h"

#include <mpi.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#define SPIN_S 1e-3        /* shorter, and pieces that arrive every 0.1 ms find us asleep: docs/comm.md */
#define SLEEP_SHARE 0.0625 /* of the time waited: what a sleep can add to it */
#define SLEEP_MAX_S 1e-3
#define HEARING_S 0.5 /* for the others to say whom they wait for */

enum { WINDOW = 4, PIECE_INTRA_BYTES = 4 << 20, PIECE_INTER_BYTES = 64 << 10 };
enum { TAG_DATA, TAG_WAITING };

typedef struct MpiTransport {
    Transport base;
    MPI_Comm comm;
    /* pieces in flight */
    int active;
    MPI_Request *requests;
    Message **owner; /* of requests[i] */
    int *piece_bytes;
    /* what MPI_Testsome returns */
    int *finished;
    MPI_Status *statuses;
    /* once a wait has been too long */
    int *waiting_for; /* int[ranks]: as each rank has said, or -1 */
} MpiTransport;

static Status mpi_fault(int code, const char *doing) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(code, text, &length);
    return fault("MPI failed while %s: %s", doing, text);
}

#define TRY_MPI(call, doing)                  \
    do {                                      \
        int code_ = (call);                   \
        if (code_ != MPI_SUCCESS)             \
            return mpi_fault(code_, (doing)); \
    } while (0)

/* ---- a group ---- */

static size_t piece_max(const Transport *transport, int peer) {
    return transport->node[peer] == transport->node[transport->rank] ? PIECE_INTRA_BYTES : PIECE_INTER_BYTES;
}

static Status post_piece(MpiTransport *self, Message *message) {
    size_t rest = message->bytes - message->posted, max = piece_max(&self->base, message->peer);
    int bytes = (int)(rest < max ? rest : max), slot = self->active++;
    char *data = message->data + message->posted;
    self->owner[slot] = message;
    self->piece_bytes[slot] = bytes;
    message->posted += (size_t)bytes;
    message->all_posted = message->posted == message->bytes;
    message->in_flight++;
    MPI_Request *request = &self->requests[slot];
    int code = message->outgoing ? MPI_Isend(data, bytes, MPI_BYTE, message->peer, TAG_DATA, self->comm, request)
                                 : MPI_Irecv(data, bytes, MPI_BYTE, message->peer, TAG_DATA, self->comm, request);
    TRY_MPI(code, message->outgoing ? "sending" : "receiving");
    return OK;
}

/* Whether an earlier message between the same two, the same way, still has pieces to post. */
static bool must_queue(const MpiTransport *self, const Message *message) {
    for (const Message *earlier = self->base.messages; earlier < message; earlier++)
        if (earlier->peer == message->peer && earlier->outgoing == message->outgoing && !earlier->all_posted)
            return true;
    return false;
}

/* Fills the windows. Receives come first, so that what arrives finds its place. */
static Status post(MpiTransport *self, bool outgoing) {
    for (int i = 0; i < self->base.message_count; i++) {
        Message *message = &self->base.messages[i];
        if (message->outgoing != outgoing || message->all_posted || must_queue(self, message))
            continue;
        while (message->in_flight < WINDOW && !message->all_posted)
            TRY(post_piece(self, message));
    }
    return OK;
}

static Status retire(MpiTransport *self, int slot, const MPI_Status *result) {
    Message *message = self->owner[slot];
    int bytes = self->piece_bytes[slot], received = bytes;
    if (!message->outgoing)
        MPI_Get_count(result, MPI_BYTE, &received);
    if (received != bytes)
        return fault("rank %d sent %d bytes where rank %d expected %d", message->peer, received, self->base.rank,
                     bytes);
    message->in_flight--;
    message->done += (size_t)bytes;
    message->complete = message->done == message->bytes;
    return OK;
}

/* Closes the gaps that finished requests left. */
static void compact(MpiTransport *self) {
    int kept = 0;
    for (int slot = 0; slot < self->active; slot++)
        if (self->requests[slot] != MPI_REQUEST_NULL) {
            self->requests[kept] = self->requests[slot];
            self->owner[kept] = self->owner[slot];
            self->piece_bytes[kept++] = self->piece_bytes[slot];
        }
    self->active = kept;
}

static Status poll_pieces(MpiTransport *self, bool *progress) {
    int count;
    int code = MPI_Testsome(self->active, self->requests, &count, self->finished, self->statuses);
    if (code == MPI_ERR_IN_STATUS)
        for (int i = 0; i < count; i++)
            if (self->statuses[i].MPI_ERROR != MPI_SUCCESS && self->statuses[i].MPI_ERROR != MPI_ERR_PENDING)
                code = self->statuses[i].MPI_ERROR;
    TRY_MPI(code, "exchanging messages");
    for (int i = 0; i < count; i++)
        TRY(retire(self, self->finished[i], &self->statuses[i]));
    if (count > 0)
        compact(self);
    *progress = count > 0;
    return OK;
}

static void sleep_for(double seconds) {
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
}

static void back_off(double waited_s) {
    if (waited_s < SPIN_S) {
        sched_yield(); /* the rank that we wait for may share this core */
        return;
    }
    double share_s = waited_s * SLEEP_SHARE;
    sleep_for(share_s < SLEEP_MAX_S ? share_s : SLEEP_MAX_S);
}

/* Takes the others' words on whom they wait for. */
static void hear(MpiTransport *self) {
    MPI_Status word;
    int there, source;
    while (MPI_Iprobe(MPI_ANY_SOURCE, TAG_WAITING, self->comm, &there, &word) == MPI_SUCCESS && there) {
        source = word.MPI_SOURCE;
        MPI_Recv(&self->waiting_for[source], 1, MPI_INT, source, TAG_WAITING, self->comm, MPI_STATUS_IGNORE);
    }
}

/* Behind a rank that is stuck all others run out of patience together, most of them with one that only waits like
 * themselves. So they tell each other for whom they wait, and the lowest of them speaks for all: it returns first, and
 * ends the others. */
static Status give_up(MpiTransport *self, int peer) {
    int rank = self->base.rank, lower = 0;
    double start_s = clock_s();
    self->waiting_for[rank] = peer;
    for (int other = 0; other < self->base.ranks; other++) {
        MPI_Request request;
        if (other != rank &&
            MPI_Isend(&self->waiting_for[rank], 1, MPI_INT, other, TAG_WAITING, self->comm, &request) == MPI_SUCCESS)
            MPI_Request_free(&request);
    }
    while (clock_s() - start_s < HEARING_S) {
        hear(self);
        sleep_for(SLEEP_MAX_S);
    }
    for (int other = 0; other < rank; other++)
        lower |= self->waiting_for[other] >= 0;
    if (lower)
        sleep_for(2 * HEARING_S);
    return transport_timed_out(&self->base, peer, self->waiting_for);
}

static Status mpi_exchange(Transport *transport) {
    MpiTransport *self = (MpiTransport *)transport;
    double idle_since_s = clock_s();
    TRY(post(self, false));
    TRY(post(self, true));
    while (self->active > 0) {
        bool progress = false;
        TRY(poll_pieces(self, &progress));
        if (progress) {
            TRY(post(self, false));
            TRY(post(self, true));
            idle_since_s = clock_s();
            continue;
        }
        double waited_s = clock_s() - idle_since_s;
        if (waited_s > transport->timeout_s)
            return give_up(self, self->owner[0]->peer);
        back_off(waited_s);
    }
    return OK;
}

/* ---- MPI's own all-reduce ---- */

/* MPI says nothing about the bytes it moves: counted is what a ring sends, about the least that any algorithm can. */
static void count_as_ring(Transport *transport, int64_t elems) {
    int ranks = transport->ranks, next = (transport->rank + 1) % ranks;
    transport_count_sent(transport, next, (size_t)(2 * (ranks - 1) * elems / ranks) * sizeof(float));
}

static Status mpi_allreduce_sum(Transport *transport, float *data, int64_t elems) {
    enum { PIECE_ELEMS = 1 << 28 };
    MpiTransport *self = (MpiTransport *)transport;
    for (int64_t start = 0; start < elems; start += PIECE_ELEMS) {
        int count = (int)(elems - start < PIECE_ELEMS ? elems - start : PIECE_ELEMS);
        TRY_MPI(MPI_Allreduce(MPI_IN_PLACE, data + start, count, MPI_FLOAT, MPI_SUM, self->comm), "reducing");
    }
    count_as_ring(transport, elems);
    return OK;
}

/* ---- life ---- */

static const TransportOps mpi_ops = {.name = "mpi", .exchange = mpi_exchange, .allreduce_sum = mpi_allreduce_sum};

/* One thread talks to MPI at a time, but not always the same one. */
static Status mpi_start(int *argc, char ***argv) {
    int provided;
    TRY_MPI(MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided), "starting");
    if (provided < MPI_THREAD_SERIALIZED)
        return fault("this MPI offers thread level %d, %d (MPI_THREAD_SERIALIZED) is needed", provided,
                     MPI_THREAD_SERIALIZED);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    return OK;
}

static bool mpi_started(void) {
    int initialized;
    MPI_Initialized(&initialized);
    return initialized;
}

/* node[rank]: the lowest rank that shares memory with it. */
static Status find_nodes(MpiTransport *self) {
    MPI_Comm node;
    int lowest = self->base.rank;
    TRY_MPI(MPI_Comm_split_type(self->comm, MPI_COMM_TYPE_SHARED, self->base.rank, MPI_INFO_NULL, &node),
            "finding nodes");
    TRY_MPI(MPI_Bcast(&lowest, 1, MPI_INT, 0, node), "finding nodes");
    MPI_Comm_free(&node);
    TRY_MPI(MPI_Allgather(&lowest, 1, MPI_INT, self->base.node, 1, MPI_INT, self->comm), "finding nodes");
    return OK;
}

static bool alloc_pieces(MpiTransport *self) {
    size_t max = (size_t)transport_group_max(self->base.ranks) * WINDOW;
    self->requests = calloc(max, sizeof *self->requests);
    self->owner = calloc(max, sizeof *self->owner);
    self->piece_bytes = calloc(max, sizeof *self->piece_bytes);
    self->finished = calloc(max, sizeof *self->finished);
    self->statuses = calloc(max, sizeof *self->statuses);
    self->waiting_for = malloc((size_t)self->base.ranks * sizeof *self->waiting_for);
    for (int rank = 0; self->waiting_for && rank < self->base.ranks; rank++)
        self->waiting_for[rank] = -1;
    return self->waiting_for && self->requests && self->owner && self->piece_bytes && self->finished && self->statuses;
}

static Status mpi_create(Transport **result, double timeout_s) {
    int rank, ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MpiTransport *self = calloc(1, sizeof *self);
    *result = (Transport *)self;
    if (!self)
        return fault("no memory for the mpi transport");
    if (!transport_init(&self->base, &mpi_ops, rank, ranks, timeout_s) || !alloc_pieces(self))
        return fault("no memory for the mpi transport");
    TRY_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &self->comm), "starting");
    return find_nodes(self);
}

/* Not collective, so the communicator is left to MPI_Finalize. */
static void mpi_destroy(Transport *transport) {
    MpiTransport *self = (MpiTransport *)transport;
    if (!self)
        return;
    transport_release(&self->base);
    free(self->requests);
    free(self->owner);
    free(self->piece_bytes);
    free(self->finished);
    free(self->statuses);
    free(self->waiting_for);
    free(self);
}

static int mpi_rank(void) {
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

static void mpi_stop(void) { MPI_Finalize(); }

static void mpi_abort(int exit_code) { MPI_Abort(MPI_COMM_WORLD, exit_code); }

const ProcessTransport mpi_processes = {.name = "mpi",
                                        .start = mpi_start,
                                        .started = mpi_started,
                                        .create = mpi_create,
                                        .destroy = mpi_destroy,
                                        .rank = mpi_rank,
                                        .stop = mpi_stop,
                                        .abort = mpi_abort};
