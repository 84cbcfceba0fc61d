/* The mpi transport: ranks are processes started by mpirun or srun. The only file that knows MPI.
 *
 * Two lanes lead to each other rank, one per direction. A message travels in pieces, and a lane has a few pieces in
 * flight at a time: one message of any size becomes MPI messages that MPI can count (int), and between nodes the pieces
 * are small enough to go at once, because over TCP Open MPI 4.1 moves two messages that it asks for in opposite
 * directions one after the other. Pieces of one lane leave and arrive in order, so both ends cut alike without agreeing
 * on it: the cut depends only on the message's size and on who shares a node.
 *
 *   lane  | message             | message ...
 *         | piece | piece | ... |
 *           in flight            not yet posted
 *
 * A message's label travels as the MPI tag. Pieces are received with any tag, in order, and the tag is compared on
 * arrival: a rank that is at another bucket is found out, not waited for. MPI's own all-reduce and the words below use
 * another communicator.
 *
 * While it waits it polls: MPI's own waiting would burn the core that another rank or the computation needs. It only
 * polls until POLL_S, then yields between polls until SPIN_S. A yield that takes long has shown that somebody else
 * computes on this core; yielding to him would cost a time slice per message, so for a while short sleeps, after which
 * the kernel prefers us, take its place: 4 MiB beside a computing thread take 0.5 ms instead of 4 to 8. After SPIN_S
 * it sleeps ever longer, up to a fixed share of the time waited so far. */
#define _POSIX_C_SOURCE 200809L
#include "comm/transport/transport_mpi.h"

#include "base/clock.h"
#include "comm/transport/watch.h"

#include <mpi.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#define POLL_S 100e-6 /* messages of up to 1 MiB come sooner, where nobody else has the core */
#define SPIN_S 1e-3   /* shorter, and pieces that arrive every 0.1 ms find us asleep */
#define LONG_YIELD_S 500e-6 /* a time slice is longer; three ranks that poll on this core take POLL_S each */
#define CROWDED_S 0.1 /* for so long one long yield is remembered */
#define NAP_S 20e-6   /* of which the kernel makes about 80 */
#define SLEEP_SHARE 0.0625 /* of the time waited: what a sleep can add to it */
#define SLEEP_MAX_S 1e-3
#define HEARING_S 0.5 /* for the others to say whom they wait for */

/* Pieces in flight. What arrives before its place is known Open MPI copies once more, so places are named further ahead
 * than a rank that is faster has sent. */
enum { SENDS = 4, RECEIVES = 8 };

/* Inside a node Open MPI sends 4 KiB at once, its header included; of more the receiver must fetch the data, and 8 KiB
 * in three pieces that go at once take half the time of one that is fetched. Over TCP what exceeds its limit, 64 KiB,
 * is asked for, and the answer queues behind what travels the other way; so the limit is raised to a piece and a
 * header, unless the user has set another one. */
enum { EAGER_BYTES = 4032, PIECE_INTRA_BYTES = 4 << 20, PIECE_INTER_BYTES = 256 << 10 };
#define TCP_LIMIT "OMPI_MCA_btl_tcp_eager_limit", "263168"

/* A label in a tag. UCX has 23 bits for tags. */
enum { STEP_BITS = 7, BUCKET_BITS = 12, COMPRESSOR_BITS = 4, TAG_BITS = STEP_BITS + BUCKET_BITS + COMPRESSOR_BITS };
enum { TAG_WAITING = 1 }; /* in `words` */

/* One direction between this rank and another. */
typedef struct Lane {
    MessageQueue waiting; /* with pieces to post */
    int in_flight;        /* pieces */
} Lane;

typedef struct Piece {
    Lane *lane;
    Message *message;
    size_t offset;
    int bytes;
} Piece;

typedef struct MpiTransport {
    Transport base;
    MPI_Comm comm;  /* the pieces */
    MPI_Comm words; /* everything else */
    Lane *lanes;    /* Lane[INCOMING, OUTGOING][ranks] */
    Watch *watch;   /* owned */
    /* pieces in flight */
    int active;
    MPI_Request *requests;
    Piece *pieces; /* of requests[i] */
    /* what MPI_Testsome returns */
    int *finished;
    MPI_Status *statuses;
    Lane **freed; /* the lanes of the finished pieces */
    double crowded_until_s; /* this core has other work: see yield */
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

/* ---- labels ---- */

static int tag_of(MessageLabel label) {
    return (int)(((uint64_t)label.step & ((1 << STEP_BITS) - 1)) << (BUCKET_BITS + COMPRESSOR_BITS) |
                 ((uint64_t)label.bucket & ((1 << BUCKET_BITS) - 1)) << COMPRESSOR_BITS |
                 ((uint64_t)label.compressor & ((1 << COMPRESSOR_BITS) - 1)));
}

/* The number nearest to `like` whose lowest `bits` bits are as given. */
static int64_t nearest(int64_t low, int bits, int64_t like) {
    int64_t range = (int64_t)1 << bits, ahead = (low - like) & (range - 1);
    return like + (ahead < range / 2 ? ahead : ahead - range);
}

static MessageLabel label_of(int tag, MessageLabel like) {
    return (MessageLabel){.step = nearest(tag >> (BUCKET_BITS + COMPRESSOR_BITS), STEP_BITS, like.step),
                          .bucket = (int)nearest(tag >> COMPRESSOR_BITS, BUCKET_BITS, like.bucket),
                          .compressor = tag & ((1 << COMPRESSOR_BITS) - 1)};
}

/* ---- pieces ---- */

static Lane *lane_of(MpiTransport *self, int direction, int peer) {
    return &self->lanes[direction * self->base.ranks + peer];
}

static size_t piece_max(const Transport *transport, const Message *message) {
    if (transport->node[message->peer] != transport->node[transport->rank])
        return PIECE_INTER_BYTES;
    return message->bytes <= SENDS * EAGER_BYTES ? EAGER_BYTES : PIECE_INTRA_BYTES;
}

static Status post_piece(MpiTransport *self, Lane *lane, Message *message) {
    size_t rest = message->bytes - message->posted, max = piece_max(&self->base, message);
    int bytes = (int)(rest < max ? rest : max), slot = self->active++;
    char *data = message->data + message->posted;
    MPI_Request *request = &self->requests[slot];
    self->pieces[slot] = (Piece){lane, message, message->posted, bytes};
    message->posted += (size_t)bytes;
    lane->in_flight++;
    int code = message->outgoing
                   ? MPI_Isend(data, bytes, MPI_BYTE, message->peer, tag_of(message->label), self->comm, request)
                   : MPI_Irecv(data, bytes, MPI_BYTE, message->peer, MPI_ANY_TAG, self->comm, request);
    TRY_MPI(code, message->outgoing ? "sending" : "receiving");
    return OK;
}

static int window_of(const Message *message) { return message->outgoing ? SENDS : RECEIVES; }

/* Fills the lane's window. */
static Status post(MpiTransport *self, Lane *lane) {
    for (Message *message; (message = lane->waiting.head) && lane->in_flight < window_of(message);) {
        TRY(post_piece(self, lane, message));
        if (message->posted == message->bytes)
            transport_dequeue(&lane->waiting);
    }
    return OK;
}

static Status check_arrival(const MpiTransport *self, const Piece *piece, const MPI_Status *result) {
    const Message *message = piece->message;
    int received;
    if (result->MPI_TAG != tag_of(message->label))
        return transport_label_differs(&self->base, message, label_of(result->MPI_TAG, message->label));
    MPI_Get_count(result, MPI_BYTE, &received);
    if (received != piece->bytes)
        return transport_size_differs(&self->base, message, piece->offset + (size_t)received);
    return OK;
}

static Status retire(MpiTransport *self, const Piece *piece, const MPI_Status *result) {
    Message *message = piece->message;
    if (!message->outgoing)
        TRY(check_arrival(self, piece, result));
    piece->lane->in_flight--;
    message->done += (size_t)piece->bytes;
    if (message->done == message->bytes)
        transport_message_done(&self->base, message);
    return OK;
}

/* Closes the gaps that finished requests left. */
static void compact(MpiTransport *self) {
    int kept = 0;
    for (int slot = 0; slot < self->active; slot++)
        if (self->requests[slot] != MPI_REQUEST_NULL) {
            self->requests[kept] = self->requests[slot];
            self->pieces[kept++] = self->pieces[slot];
        }
    self->active = kept;
}

/* What is wrong with one of the finished pieces. One that is too long for its place is retire's to tell. */
static int find_error(const MpiTransport *self, int count) {
    for (int i = 0; i < count; i++) {
        int code = self->statuses[i].MPI_ERROR, class = MPI_SUCCESS;
        MPI_Error_class(code, &class);
        if (class != MPI_SUCCESS && class != MPI_ERR_PENDING && class != MPI_ERR_TRUNCATE)
            return code;
    }
    return MPI_SUCCESS;
}

static Status poll_pieces(MpiTransport *self, bool *progress) {
    int count = 0, code = MPI_SUCCESS;
    if (self->active > 0)
        code = MPI_Testsome(self->active, self->requests, &count, self->finished, self->statuses);
    if (code == MPI_ERR_IN_STATUS)
        code = find_error(self, count);
    TRY_MPI(code, "exchanging messages");
    *progress = count > 0 && count != MPI_UNDEFINED;
    if (!*progress)
        return OK;
    for (int i = 0; i < count; i++) {
        Piece *piece = &self->pieces[self->finished[i]];
        self->freed[i] = piece->lane;
        TRY(retire(self, piece, &self->statuses[i]));
    }
    compact(self);
    for (int i = 0; i < count; i++)
        TRY(post(self, self->freed[i]));
    return OK;
}

/* ---- groups ---- */

/* Receives come first, so that what arrives finds its place. */
static Status mpi_start_group(Transport *transport) {
    MpiTransport *self = (MpiTransport *)transport;
    for (int direction = INCOMING; direction <= OUTGOING; direction++) {
        Message *message;
        while ((message = transport_dequeue(&transport->naming[direction]))) {
            Lane *lane = lane_of(self, direction, message->peer);
            transport_enqueue(&lane->waiting, message);
            TRY(post(self, lane));
        }
    }
    return OK;
}

static Status mpi_progress(Transport *transport, const MessageGroup *group) {
    bool progress;
    (void)group;
    return poll_pieces((MpiTransport *)transport, &progress);
}

/* A rank that the group waits for. */
static int awaited_rank(const MpiTransport *self, int group) {
    for (int slot = 0; slot < self->active; slot++)
        if (self->pieces[slot].message->group == group)
            return self->pieces[slot].message->peer;
    for (int lane = 0; lane < 2 * self->base.ranks; lane++)
        for (const Message *message = self->lanes[lane].waiting.head; message; message = message->next)
            if (message->group == group)
                return message->peer;
    return -1;
}

static void sleep_for(double seconds) {
    struct timespec pause = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
}

static void yield(MpiTransport *self, double now_s) {
    if (now_s < self->crowded_until_s) {
        sleep_for(NAP_S);
        return;
    }
    sched_yield(); /* the rank that we wait for may share this core */
    if (clock_s() - now_s > LONG_YIELD_S)
        self->crowded_until_s = now_s + CROWDED_S;
}

static void back_off(MpiTransport *self, double now_s, double waited_s) {
    double share_s = waited_s * SLEEP_SHARE;
    if (waited_s < POLL_S)
        return;
    if (waited_s < SPIN_S)
        yield(self, now_s);
    else
        sleep_for(share_s < SLEEP_MAX_S ? share_s : SLEEP_MAX_S);
}

/* Takes the others' words on whom they wait for. */
static void hear(MpiTransport *self) {
    MPI_Status word;
    int there, source;
    while (MPI_Iprobe(MPI_ANY_SOURCE, TAG_WAITING, self->words, &there, &word) == MPI_SUCCESS && there) {
        source = word.MPI_SOURCE;
        MPI_Recv(&self->waiting_for[source], 1, MPI_INT, source, TAG_WAITING, self->words, MPI_STATUS_IGNORE);
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
            MPI_Isend(&self->waiting_for[rank], 1, MPI_INT, other, TAG_WAITING, self->words, &request) == MPI_SUCCESS)
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

static Status mpi_wait(Transport *transport, const MessageGroup *group) {
    MpiTransport *self = (MpiTransport *)transport;
    double idle_since_s = 0; /* 0: not idle */
    while (group->open > 0) {
        bool progress;
        TRY(poll_pieces(self, &progress));
        if (progress || group->open == 0) {
            idle_since_s = 0;
            continue;
        }
        double now_s = clock_s();
        if (idle_since_s == 0)
            idle_since_s = now_s;
        if (now_s - idle_since_s > transport->timeout_s)
            return give_up(self, awaited_rank(self, (int)(group - transport->groups)));
        back_off(self, now_s, now_s - idle_since_s);
    }
    return OK;
}

/* MPI cannot be asked to forget what was sent; nothing is polled any more, and the caller's end ends all processes. */
static void mpi_abandon(Transport *transport) {
    MpiTransport *self = (MpiTransport *)transport;
    for (int slot = 0; slot < self->active; slot++)
        if (!self->pieces[slot].message->outgoing)
            MPI_Cancel(&self->requests[slot]);
}

/* ---- MPI's own all-reduce ---- */

/* MPI says nothing about the bytes it moves: counted is what a ring sends, about the least that any algorithm can. */
static void count_as_ring(Transport *transport, int64_t elems) {
    int ranks = transport->ranks, next = (transport->rank + 1) % ranks;
    transport_count_sent(transport, next, (size_t)(2 * (ranks - 1) * elems / ranks) * sizeof(float));
}

/* Whom MPI waits for it does not tell. So each rank blames the next one, and who follows the chain of those that wait
 * finds one that does not. */
static Status wait_for_request(MpiTransport *self, MPI_Request *request) {
    const Transport *transport = &self->base;
    double start_s = clock_s(), now_s = start_s;
    for (int complete = 0; !complete; now_s = clock_s()) {
        if (now_s - start_s > transport->timeout_s)
            return give_up(self, (transport->rank + 1) % transport->ranks);
        back_off(self, now_s, now_s - start_s);
        TRY_MPI(MPI_Test(request, &complete, MPI_STATUS_IGNORE), "reducing");
    }
    return OK;
}

static Status mpi_allreduce_sum(Transport *transport, const float *terms, float *sums, int64_t elems, bool may_spin) {
    enum { PIECE_ELEMS = 1 << 28 };
    MpiTransport *self = (MpiTransport *)transport;
    for (int64_t start = 0; start < elems; start += PIECE_ELEMS) {
        int count = (int)(elems - start < PIECE_ELEMS ? elems - start : PIECE_ELEMS);
        const void *term = terms == sums ? MPI_IN_PLACE : (const void *)(terms + start);
        float *sum = sums + start;
        MPI_Request request;
        if (may_spin) {
            TRY_MPI(MPI_Allreduce(term, sum, count, MPI_FLOAT, MPI_SUM, self->words), "reducing");
            continue;
        }
        TRY_MPI(MPI_Iallreduce(term, sum, count, MPI_FLOAT, MPI_SUM, self->words, &request), "reducing");
        TRY(wait_for_request(self, &request));
    }
    count_as_ring(transport, elems);
    return OK;
}

/* ---- life ---- */

static const TransportOps mpi_ops = {.name = "mpi",
                                     .start = mpi_start_group,
                                     .progress = mpi_progress,
                                     .wait = mpi_wait,
                                     .abandon = mpi_abandon,
                                     .allreduce_sum = mpi_allreduce_sum};

/* One thread talks to MPI at a time, but not always the same one. */
static Status mpi_start(int *argc, char ***argv) {
    int provided;
    setenv(TCP_LIMIT, 0);
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

/* Ranks that share memory share a node; nodes are numbered by their lowest ranks. */
static Status find_nodes(MpiTransport *self) {
    int *node_of = self->base.node, nodes = 0;
    MPI_Comm node;
    int lowest = self->base.rank;
    TRY_MPI(MPI_Comm_split_type(self->words, MPI_COMM_TYPE_SHARED, self->base.rank, MPI_INFO_NULL, &node),
            "finding nodes");
    TRY_MPI(MPI_Bcast(&lowest, 1, MPI_INT, 0, node), "finding nodes");
    MPI_Comm_free(&node);
    TRY_MPI(MPI_Allgather(&lowest, 1, MPI_INT, node_of, 1, MPI_INT, self->words), "finding nodes");
    for (int rank = 0; rank < self->base.ranks; rank++)
        node_of[rank] = node_of[rank] == rank ? nodes++ : node_of[node_of[rank]];
    return OK;
}

static bool alloc_pieces(MpiTransport *self) {
    size_t ranks = (size_t)self->base.ranks, max = ranks * (SENDS + RECEIVES);
    self->lanes = calloc(2 * ranks, sizeof *self->lanes);
    self->requests = calloc(max, sizeof *self->requests);
    self->pieces = calloc(max, sizeof *self->pieces);
    self->finished = calloc(max, sizeof *self->finished);
    self->statuses = calloc(max, sizeof *self->statuses);
    self->freed = calloc(max, sizeof *self->freed);
    self->waiting_for = malloc(ranks * sizeof *self->waiting_for);
    for (size_t rank = 0; self->waiting_for && rank < ranks; rank++)
        self->waiting_for[rank] = -1;
    return self->lanes && self->requests && self->pieces && self->finished && self->statuses && self->freed &&
           self->waiting_for;
}

/* Labels must fit MPI's tags. */
static Status check_tags(const MpiTransport *self) {
    int *tag_max, found;
    TRY_MPI(MPI_Comm_get_attr(self->comm, MPI_TAG_UB, &tag_max, &found), "starting");
    if (!found || *tag_max < (1 << TAG_BITS) - 1)
        return fault("labels of messages need tags of %d bits, and this MPI has not got them", TAG_BITS);
    return OK;
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
    TRY_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &self->words), "starting");
    TRY(check_tags(self));
    TRY(find_nodes(self));
    return watch_create(&self->watch, &self->base);
}

/* Not collective, so the communicators are left to MPI_Finalize. */
static void mpi_destroy(Transport *transport) {
    MpiTransport *self = (MpiTransport *)transport;
    if (!self)
        return;
    watch_destroy(self->watch);
    transport_release(&self->base);
    free(self->lanes);
    free(self->requests);
    free(self->pieces);
    free(self->finished);
    free(self->statuses);
    free(self->freed);
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
