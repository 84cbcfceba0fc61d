/* The NCCL transport. What is sent inside nodes, what is sent between them, and what is done with gradients stand in a
 * lane each, so that they overlap:
 *
 *   codec     | encode 0 | encode 1 | .......... | sum 0 | encode 2 |  sum 1 |      what is not a message: transport->lane
 *                        \         \            /          \        /
 *   between               | messages 0 | messages 1 |        | messages 2 |         or inside: by the peer's node
 *
 *   group_start   each link that has messages waits for what the codec lane holds now, then carries them as one NCCL
 *                 group: ncclGroupStart  ncclSend, ncclRecv ...  ncclGroupEnd. Inside first, then between; both are in
 *                 their streams when the call returns
 *   group_wait    the codec lane waits for those: what is done with a message from here on stands behind it. The host
 *                 waits for neither
 *   flush         the host waits for the codec lane, with an eye on NCCL's asynchronous errors and on the time
 *
 * A communicator does one thing at a time, so each link has its own, of all ranks; a link that no pair of ranks has is
 * not made. All ranks start the same groups in the same order, and a link's group waits only for what was asked for
 * before it, so no circle of them can arise.
 *
 * Sizes and order are the plan's, alike on both sides; labels are not sent, so they are not checked. NCCL refuses two
 * ranks on one card.
 *
 * No call waits for ever. Communicators are non-blocking ones: NCCL connects and launches in a thread of its own, at the
 * price of that thread, and the caller polls until that is done, so that what it puts in the stream next stands behind. A
 * rank that is lost leaves the others' kernels waiting on the card: flush gives up after timeout_s, by ncclCommAbort,
 * which waits for no other rank and ends the kernels. */
#include "base/cuda.cuh"
#include "comm/transport/vector_kernels.cuh"

extern "C" {
#include "base/clock.h"
#include "base/gpu_lane.h"
#include "base/gpu_stamps.h"
#include "comm/transport/transport_nccl.h"
#include "comm/transport/vector.h"
}

#include <nccl.h>

#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

enum { NAP_NS = 20000, CAUSE_S = 1, TURNS = 9, TURN_NS = 100000000 };
#define SPIN_S 100e-6
#define LEAVE_S 1.0 /* for the others to leave in good order */

enum { INSIDE, BETWEEN, LINKS, ARRIVALS = 16 };

/* A lane of messages. */
struct Link {
    ncclComm_t comm; /* NULL: nobody needs it, or it was aborted */
    cudaStream_t stream;
    cudaEvent_t begin;              /* in the codec lane, before the last group */
    cudaEvent_t arrivals[ARRIVALS]; /* behind groups. A later one may stand for another: that waits for more */
};

/* A group under way. */
struct Started {
    Message *last; /* keeps the group open until it is waited for */
    bool uses[LINKS];
};

struct NcclTransport {
    Transport base;
    Gpu *gpu;
    GpuLane *lane; /* codec */
    Link links[LINKS];
    Started *started; /* Started[message_max], owned: by place in base.groups */
    bool aborted;
};

static NcclTransport *nccl_of(Transport *transport) { return (NcclTransport *)transport; }
static cudaStream_t stream_of(Transport *transport) { return (cudaStream_t)transport->lane; }

/* With what NCCL itself said last. */
static Status nccl_fault(const char *what, const char *why) {
    const char *detail = ncclGetLastError(NULL);
    return fault("NCCL, %s: %s%s%s; NCCL_DEBUG=WARN tells more", what, why, detail && detail[0] ? ": " : "",
                 detail ? detail : "");
}

static Status timed_out(const NcclTransport *self, const char *what) {
    char why[128];
    snprintf(why, sizeof why, "no answer from the other GPUs for %g s (comm.timeout_s)", self->base.timeout_s);
    return nccl_fault(what, why);
}

/* Others may fail at the same moment, for the same reason. The lowest rank speaks first, and ends them. */
static void wait_for_my_turn(const NcclTransport *self) {
    const struct timespec time = {0, (self->base.rank < TURNS ? self->base.rank : TURNS) * TURN_NS};
    nanosleep(&time, NULL);
}

/* Another one has the cause: it speaks before all. */
static void wait_for_the_cause(const NcclTransport *self) {
    const struct timespec time = {CAUSE_S, 0};
    nanosleep(&time, NULL);
    wait_for_my_turn(self);
}

/* What NCCL is at, behind the calls. */
static ncclResult_t state_of(const NcclTransport *self) {
    ncclResult_t all = ncclSuccess;
    for (const Link &link : self->links) {
        ncclResult_t state = ncclSuccess, result = link.comm ? ncclCommGetAsyncError(link.comm, &state) : ncclSuccess;
        state = result == ncclSuccess ? state : result;
        if (state != ncclSuccess && (all == ncclSuccess || all == ncclInProgress))
            all = state;
    }
    return all;
}

/* A GPU that has failed says more than NCCL, which only saw that. */
static const char *cause_of(NcclTransport *self, ncclResult_t result) {
    cudaError_t error = result == ncclUnhandledCudaError ? cudaStreamQuery(stream_of(&self->base)) : cudaSuccess;
    return error == cudaSuccess || error == cudaErrorNotReady ? ncclGetErrorString(result) : cudaGetErrorString(error);
}

/* Between two looks, `since_s` the first one. */
static void back_off(double since_s) {
    const struct timespec nap = {0, NAP_NS};
    if (clock_s() - since_s < SPIN_S)
        sched_yield();
    else
        nanosleep(&nap, NULL);
}

/* Returns when NCCL is done with a call that gave `result`. */
static Status settle(NcclTransport *self, const char *what, ncclResult_t result) {
    double start_s = clock_s();
    while ((result == ncclSuccess || result == ncclInProgress) && (result = state_of(self)) == ncclInProgress) {
        if (clock_s() - start_s > self->base.timeout_s) {
            wait_for_my_turn(self);
            return timed_out(self, what);
        }
        back_off(start_s);
    }
    if (result == ncclRemoteError)
        wait_for_the_cause(self);
    return result == ncclSuccess ? OK : nccl_fault(what, cause_of(self, result));
}

/* ---- vector operations ---- */

template <class F> static void run(void *lane, F f, float *a, const float *b, int64_t elems) {
    if (elems > 0)
        LAUNCH(vector_kernel<F>, vector_blocks(elems), VECTOR_THREADS, 0, (cudaStream_t)lane, f, a, b, elems);
}

static void cuda_scale(void *lane, float *data, int64_t elems, float scale) {
    run(lane, Scale{scale}, data, data, elems);
}
static void cuda_add(void *lane, float *sum, const float *term, int64_t elems) { run(lane, Add{}, sum, term, elems); }
static void cuda_scale_add(void *lane, float *data, float scale, const float *sum, int64_t elems) {
    run(lane, ScaleAdd{scale}, data, sum, elems);
}
static void cuda_set_scaled(void *lane, float *sum, float scale, const float *term, int64_t elems) {
    run(lane, SetScaled{scale}, sum, term, elems);
}
static void cuda_add_scaled(void *lane, float *sum, float scale, const float *term, int64_t elems) {
    run(lane, AddScaled{scale}, sum, term, elems);
}
/* A copy, or a kernel's launch, that fails is seen by flush: the comm thread's calls leave their last error there. */
static void cuda_copy(void *lane, float *to, const float *from, int64_t elems) {
    cudaMemcpyAsync(to, from, (size_t)elems * sizeof *to, cudaMemcpyDeviceToDevice, (cudaStream_t)lane);
}

static void cuda_bring(void *lane, void *to, const void *host, size_t bytes) {
    cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, (cudaStream_t)lane);
}

template <bool ADD> static void run_rows(void *lane, const MatrixRows *rows, float *matrix, const float *values) {
    if (rows->count > 0)
        LAUNCH(rows_kernel<ADD>, (unsigned)rows->count, ROW_THREADS, 0, (cudaStream_t)lane, rows->places, rows->channels,
               matrix, values);
}
static void cuda_take_rows(void *lane, const MatrixRows *rows, const float *matrix, const Shard *shard, float *values) {
    static_assert(sizeof(Slice) == 2 * sizeof(int64_t));
    if (rows->count > 0)
        LAUNCH(take_rows_kernel, (unsigned)rows->count, ROW_THREADS, 0, (cudaStream_t)lane, rows->places, rows->channels,
               rows->offset, matrix, (const int64_t *)shard->slices, shard->count, values);
}

static const VectorOps vector_cuda = {.name = "cuda",
                                      .on_host = false,
                                      .scale = cuda_scale,
                                      .add = cuda_add,
                                      .scale_add = cuda_scale_add,
                                      .set_scaled = cuda_set_scaled,
                                      .add_scaled = cuda_add_scaled,
                                      .copy = cuda_copy,
                                      .bring = cuda_bring,
                                      .add_rows = run_rows<true>,
                                      .put_rows = run_rows<false>,
                                      .take_rows = cuda_take_rows};

/* ---- messages ---- */

/* What joins the link from now on waits for what the codec lane holds now. */
static void begin(NcclTransport *self, Link *link) {
    CHECK_CUDA(self->gpu, cudaEventRecord(link->begin, stream_of(&self->base)));
    CHECK_CUDA(self->gpu, cudaStreamWaitEvent(link->stream, link->begin, 0));
}

/* What joins the codec lane from now on waits for what the link held at that arrival. */
static void arrive(NcclTransport *self, const Link *link, int arrival) {
    CHECK_CUDA(self->gpu, cudaStreamWaitEvent(stream_of(&self->base), link->arrivals[arrival % ARRIVALS], 0));
}

static Status end(NcclTransport *self, const Link *link, int arrival, const char *what, ncclResult_t result) {
    TRY(settle(self, what, result));
    CHECK_CUDA(self->gpu, cudaEventRecord(link->arrivals[arrival % ARRIVALS], link->stream));
    return OK;
}

/* NCCL has no message without bytes to wait for. */
static bool travels(const NcclTransport *self, const Message *message, int link) {
    const int *node = self->base.node;
    return message->bytes > 0 && link == (node[message->peer] == node[self->base.rank] ? INSIDE : BETWEEN);
}

static ncclResult_t put(const Link *link, const Message *message) {
    return message->outgoing
               ? ncclSend(message->data, message->bytes, ncclChar, message->peer, link->comm, link->stream)
               : ncclRecv(message->data, message->bytes, ncclChar, message->peer, link->comm, link->stream);
}

static bool uses(const NcclTransport *self, int link) {
    for (int way = INCOMING; way <= OUTGOING; way++)
        for (const Message *message = self->base.naming[way].head; message; message = message->next)
            if (travels(self, message, link))
                return true;
    return false;
}

static Status start_link(NcclTransport *self, int i) {
    Link *link = &self->links[i];
    begin(self, link);
    ncclResult_t result = ncclGroupStart();
    for (int way = INCOMING; way <= OUTGOING; way++)
        for (const Message *message = self->base.naming[way].head; message && result == ncclSuccess;
             message = message->next)
            if (travels(self, message, i))
                result = put(link, message);
    ncclResult_t ended = ncclGroupEnd();
    return end(self, link, self->base.naming_group, "messages between GPUs", result == ncclSuccess ? ended : result);
}

static Status nccl_start(Transport *transport) {
    NcclTransport *self = nccl_of(transport);
    Started *started = &self->started[transport->naming_group];
    *started = {};
    Status status = self->aborted ? fault("NCCL: the communicator was aborted") : OK;
    for (int link = INSIDE; link < LINKS && status == OK; link++)
        if (uses(self, link)) {
            status = start_link(self, link);
            started->uses[link] = true;
        }
    for (int way = INCOMING; way <= OUTGOING; way++)
        while (Message *message = transport_dequeue(&transport->naming[way])) {
            if (started->last)
                transport_message_done(transport, started->last);
            started->last = message;
        }
    return status;
}

static Status nccl_wait(Transport *transport, const MessageGroup *group) {
    NcclTransport *self = nccl_of(transport);
    int place = (int)(group - transport->groups);
    for (int link = INSIDE; link < LINKS; link++)
        if (self->started[place].uses[link])
            arrive(self, &self->links[link], place);
    transport_message_done(transport, self->started[place].last);
    return OK;
}

/* A group that was started stays open until it is waited for. */
static Status nccl_progress(Transport *transport, const MessageGroup *group) {
    (void)transport, (void)group;
    return OK;
}

/* As a group: the work of each may stand behind that of the other one. */
static void abort_links(NcclTransport *self) {
    self->aborted = true;
    ncclGroupStart();
    for (Link &link : self->links) {
        if (link.comm)
            ncclCommAbort(link.comm);
        link.comm = NULL;
    }
    ncclGroupEnd();
}

static void nccl_abandon(Transport *transport) {
    NcclTransport *self = nccl_of(transport);
    abort_links(self);
    gpu_hush(self->gpu); /* what stands in the lanes behind it is done now, for nobody */
}

/* Never spins: it only joins a link, and the codec lane waits for that. */
static Status nccl_allreduce_sum(Transport *transport, const float *terms, float *sum, int64_t elems, bool may_spin) {
    (void)may_spin;
    NcclTransport *self = nccl_of(transport);
    if (self->aborted)
        return fault("NCCL: the communicator was aborted");
    Link *link = &self->links[self->links[BETWEEN].comm ? BETWEEN : INSIDE];
    begin(self, link);
    ncclResult_t result = ncclAllReduce(terms, sum, (size_t)elems, ncclFloat32, ncclSum, link->comm, link->stream);
    TRY(end(self, link, 0, "all-reduce", result));
    arrive(self, link, 0);
    return OK;
}

/* ---- the codec lane ---- */

static void nccl_mark(Transport *transport, int mark) { gpu_lane_mark(nccl_of(transport)->lane, mark); }
static void nccl_follow(Transport *transport, int mark) { gpu_lane_follow(nccl_of(transport)->lane, mark); }
static void nccl_call(Transport *transport, CallFn *fn, void *user, int argument) {
    gpu_lane_call(nccl_of(transport)->lane, fn, user, argument);
}

static void nccl_stamp(Transport *transport, bool computing, double *at_s) {
    NcclTransport *self = nccl_of(transport);
    gpu_stamp(self->gpu, computing ? gpu_stream(self->gpu) : stream_of(transport), at_s);
}

static Status give_up(NcclTransport *self, Status status) {
    char line[512];
    snprintf(line, sizeof line, "%s", error_line());
    nccl_abandon(&self->base);
    return error_restore(status, line);
}

static Status nccl_flush(Transport *transport) {
    NcclTransport *self = nccl_of(transport);
    double start_s = clock_s();
    cudaError_t launched = cudaGetLastError(); /* of this thread: vector operations do not look */
    if (launched != cudaSuccess)
        return give_up(self, fault("the GPU refused work on gradients: %s", cudaGetErrorString(launched)));
    for (bool empty = false;;) {
        Status status = self->aborted ? fault("NCCL: the communicator was aborted")
                                      : settle(self, "between GPUs", ncclSuccess);
        if (status == OK)
            status = gpu_lane_test(self->lane, &empty);
        if (status == OK && empty)
            break;
        if (status == OK && clock_s() - start_s > transport->timeout_s) {
            wait_for_my_turn(self);
            status = timed_out(self, "between GPUs");
        }
        if (status != OK)
            return give_up(self, status);
        back_off(start_s);
    }
    gpu_read_stamps(self->gpu);
    return OK;
}

static const TransportOps nccl_ops = {.name = "nccl",
                                      .one_process = false,
                                      .start = nccl_start,
                                      .progress = nccl_progress,
                                      .wait = nccl_wait,
                                      .abandon = nccl_abandon,
                                      .allreduce_sum = nccl_allreduce_sum,
                                      .mark = nccl_mark,
                                      .follow = nccl_follow,
                                      .call = nccl_call,
                                      .stamp = nccl_stamp,
                                      .flush = nccl_flush};

/* ---- life ---- */

/* What each rank says to each other one, over `control`, when its start has ended, well or not: so one that cannot go
 * on is heard of while NCCL still waits for it. */
struct Words {
    Transport *control;
    int own, *said; /* int[ranks], owned: Status */
    Ticket *heard;  /* Ticket[ranks], owned: the groups that bring them */
};

static void words_listen(Words *words) {
    for (int rank = 0; rank < words->control->ranks; rank++) {
        transport_group_begin(words->control);
        if (rank != words->control->rank)
            transport_recv(words->control, rank, &words->said[rank], sizeof(int));
        words->heard[rank] = transport_group_start(words->control);
    }
}

/* Whether a rank has said by now that it failed. */
static Status words_test(const Words *words, bool *failed) {
    for (int rank = 0; rank < words->control->ranks; rank++) {
        bool complete;
        TRY(transport_group_test(words->control, words->heard[rank], &complete));
        *failed |= complete && words->said[rank] != OK;
    }
    return OK;
}

/* Says the own word, and hears all. */
static Status words_end(Words *words, Status own, bool *failed) {
    words->own = own;
    transport_group_begin(words->control);
    for (int rank = 0; rank < words->control->ranks; rank++)
        if (rank != words->control->rank)
            transport_send(words->control, rank, &words->own, sizeof(int));
    TRY(transport_group_end(words->control));
    for (int rank = 0; rank < words->control->ranks; rank++)
        TRY(transport_group_wait(words->control, words->heard[rank]));
    return words_test(words, failed);
}

/* A link of any two ranks. */
static bool is_needed(const Transport *transport, int link) {
    for (int a = 0; a < transport->ranks; a++)
        for (int b = 0; b < a; b++)
            if ((transport->node[a] == transport->node[b]) == (link == INSIDE))
                return true;
    return false;
}

/* Returns when NCCL has connected this rank, or this or another one has failed. */
static Status connect(NcclTransport *self, Link *link, const Words *words, const ncclUniqueId *id, bool *failed) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    double start_s = clock_s();
    ncclResult_t result = ncclCommInitRankConfig(&link->comm, self->base.ranks, *id, self->base.rank, &config);
    while ((result == ncclSuccess || result == ncclInProgress) && (result = state_of(self)) == ncclInProgress) {
        TRY(words_test(words, failed));
        if (*failed)
            return OK;
        if (clock_s() - start_s > self->base.timeout_s)
            return timed_out(self, "start");
        back_off(start_s);
    }
    return result == ncclSuccess ? OK : nccl_fault("start", ncclGetErrorString(result));
}

static cudaError_t create_lane(Link *link) {
    cudaError_t error = cudaStreamCreateWithFlags(&link->stream, cudaStreamNonBlocking);
    if (error == cudaSuccess)
        error = cudaEventCreateWithFlags(&link->begin, cudaEventDisableTiming);
    for (int i = 0; i < ARRIVALS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&link->arrivals[i], cudaEventDisableTiming);
    return error;
}

static Status create_lanes(NcclTransport *self) {
    cudaError_t error = cudaSuccess;
    TRY(gpu_lane_create(&self->lane, self->gpu));
    for (int link = INSIDE; link < LINKS && error == cudaSuccess; link++)
        if (is_needed(&self->base, link))
            error = create_lane(&self->links[link]);
    return error == cudaSuccess ? OK : fault("the GPU gives no lane: %s", cudaGetErrorString(error));
}

static void destroy_lane(Link *link) {
    if (link->stream) {
        cudaStreamSynchronize(link->stream);
        cudaStreamDestroy(link->stream);
    }
    if (link->begin)
        cudaEventDestroy(link->begin);
    for (cudaEvent_t arrival : link->arrivals)
        if (arrival)
            cudaEventDestroy(arrival);
}

struct Ids {
    int status; /* of rank 0, whose ids they are */
    ncclUniqueId id[LINKS];
};

static Status make_ids(Ids *ids) {
    for (ncclUniqueId &id : ids->id) {
        ncclResult_t result = ncclGetUniqueId(&id);
        if (result != ncclSuccess)
            return nccl_fault("start", ncclGetErrorString(result));
    }
    return OK;
}

static Status send_ids(Transport *control, Ids *ids) {
    transport_group_begin(control);
    for (int rank = 1; rank < control->ranks && control->rank == 0; rank++)
        transport_send(control, rank, ids, sizeof *ids);
    if (control->rank > 0)
        transport_recv(control, 0, ids, sizeof *ids);
    return transport_group_end(control);
}

static Status join(NcclTransport *self, Words *words, bool *failed) {
    Transport *control = words->control;
    Ids ids = {};
    Status own = create_lanes(self);
    if (own == OK && control->rank == 0)
        own = make_ids(&ids);
    ids.status = own;
    TRY(send_ids(control, &ids));
    words_listen(words);
    bool goes_on = own == OK && ids.status == OK;
    for (int link = INSIDE; link < LINKS && goes_on; link++) {
        if (is_needed(&self->base, link))
            own = connect(self, &self->links[link], words, &ids.id[link], failed);
        goes_on = own == OK && !*failed;
    }
    TRY(words_end(words, own, failed));
    *failed |= own != OK;
    self->base.lane = own == OK ? gpu_lane_stream(self->lane) : NULL;
    return own;
}

/* Good order takes all ranks: where one has no time for that, the others do not wait for it. */
static void leave(ncclComm_t comm) {
    double start_s = clock_s();
    ncclResult_t result = ncclCommFinalize(comm), state = ncclSuccess;
    while (result == ncclInProgress && clock_s() - start_s < LEAVE_S) {
        back_off(start_s);
        result = ncclCommGetAsyncError(comm, &state);
        result = result == ncclSuccess ? state : result;
    }
    if (result == ncclSuccess)
        ncclCommDestroy(comm);
    else
        ncclCommAbort(comm);
}

static void nccl_destroy(Transport *transport) {
    if (!transport)
        return;
    NcclTransport *self = nccl_of(transport);
    for (const Link &link : self->links)
        if (link.comm)
            leave(link.comm);
    for (Link &link : self->links)
        destroy_lane(&link);
    gpu_lane_destroy(self->lane);
    transport_release(transport);
    free(self->started);
    free(self);
}

static Status nccl_create(Transport **result, Transport *control, Gpu *gpu) {
    NcclTransport *self = (NcclTransport *)calloc(1, sizeof *self);
    Words words = {control, OK, (int *)calloc((size_t)control->ranks, sizeof(int)),
                   (Ticket *)calloc((size_t)control->ranks, sizeof(Ticket))};
    bool failed = false;
    *result = NULL;
    Status status = fault("no memory for NCCL's transport");
    if (self && words.said && words.heard &&
        transport_init(&self->base, &nccl_ops, control->rank, control->ranks, control->timeout_s)) {
        self->base.vector = &vector_cuda;
        self->gpu = gpu;
        self->started = (Started *)calloc((size_t)transport_message_max(control->ranks), sizeof *self->started);
        memcpy(self->base.node, control->node, (size_t)control->ranks * sizeof(int));
        if (self->started)
            status = join(self, &words, &failed);
    }
    if (status == OK && !failed)
        *result = &self->base;
    else if (self) {
        abort_links(self);
        nccl_destroy(&self->base);
    }
    free(words.said);
    free(words.heard);
    return status;
}

extern "C" const DeviceTransport nccl_device = {.name = "nccl", .create = nccl_create, .destroy = nccl_destroy};
