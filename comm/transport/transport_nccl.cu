/* The NCCL transport. A group of messages is one NCCL group in the rank's lane:
 *
 *   group_start   ncclGroupStart  ncclSend, ncclRecv ...  ncclGroupEnd     all in the lane when it returns
 *   group_wait    nothing: what is done with a message stands behind it in the lane
 *   flush         the host waits, with an eye on NCCL's asynchronous errors and on the time
 *
 * Sizes and order are the plan's, alike on both sides; labels are not sent, so they are not checked. NCCL refuses two
 * ranks on one card.
 *
 * No call waits for ever. The communicator is a non-blocking one: NCCL connects and launches in a thread of its own, at
 * the price of that thread, and the caller polls until that is done, so that what it puts in the lane next stands
 * behind. A rank that is lost leaves the others' kernels waiting on the card: flush gives up after timeout_s, by
 * ncclCommAbort, which waits for no other rank and ends the kernels. */
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

struct NcclTransport {
    Transport base;
    Gpu *gpu;
    GpuLane *lane;
    ncclComm_t comm; /* NULL once it is aborted */
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
    ncclResult_t state = ncclSuccess, result = ncclCommGetAsyncError(self->comm, &state);
    return result == ncclSuccess ? state : result;
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

/* NCCL has no message without bytes to wait for. */
static ncclResult_t put(NcclTransport *self, const Message *message) {
    if (message->bytes == 0)
        return ncclSuccess;
    cudaStream_t stream = stream_of(&self->base);
    return message->outgoing ? ncclSend(message->data, message->bytes, ncclChar, message->peer, self->comm, stream)
                             : ncclRecv(message->data, message->bytes, ncclChar, message->peer, self->comm, stream);
}

static Status nccl_start(Transport *transport) {
    NcclTransport *self = nccl_of(transport);
    if (!self->comm)
        return fault("NCCL: the communicator was aborted");
    ncclResult_t result = ncclGroupStart();
    for (int way = INCOMING; way <= OUTGOING; way++)
        while (Message *message = transport_dequeue(&transport->naming[way])) {
            if (result == ncclSuccess)
                result = put(self, message);
            transport_message_done(transport, message);
        }
    ncclResult_t end = ncclGroupEnd();
    result = result == ncclSuccess ? end : result;
    return settle(self, "messages between GPUs", result);
}

static Status nccl_progress(Transport *transport, const MessageGroup *group) {
    (void)transport, (void)group;
    return OK;
}

static void nccl_abandon(Transport *transport) {
    NcclTransport *self = nccl_of(transport);
    if (self->comm)
        ncclCommAbort(self->comm);
    self->comm = NULL;
    gpu_hush(self->gpu); /* what stands in the lane behind it is done now, for nobody */
}

/* Never spins: it only joins the lane. */
static Status nccl_allreduce_sum(Transport *transport, const float *terms, float *sum, int64_t elems, bool may_spin) {
    (void)may_spin;
    NcclTransport *self = nccl_of(transport);
    if (!self->comm)
        return fault("NCCL: the communicator was aborted");
    ncclResult_t result =
        ncclAllReduce(terms, sum, (size_t)elems, ncclFloat32, ncclSum, self->comm, stream_of(transport));
    return settle(self, "all-reduce", result);
}

/* ---- the lane ---- */

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
        Status status = self->comm ? settle(self, "between GPUs", ncclSuccess)
                                   : fault("NCCL: the communicator was aborted");
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
                                      .wait = nccl_progress,
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

/* Returns when NCCL has connected this rank, or this or another one has failed. */
static Status connect(NcclTransport *self, const Words *words, const ncclUniqueId *id, bool *failed) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    double start_s = clock_s();
    ncclResult_t result = ncclCommInitRankConfig(&self->comm, self->base.ranks, *id, self->base.rank, &config);
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

struct Id {
    int status; /* of rank 0, whose id it is */
    ncclUniqueId id;
};

static Status send_id(Transport *control, Id *id) {
    transport_group_begin(control);
    for (int rank = 1; rank < control->ranks && control->rank == 0; rank++)
        transport_send(control, rank, id, sizeof *id);
    if (control->rank > 0)
        transport_recv(control, 0, id, sizeof *id);
    return transport_group_end(control);
}

static Status join(NcclTransport *self, Words *words, bool *failed) {
    Transport *control = words->control;
    Id id = {};
    Status own = gpu_lane_create(&self->lane, self->gpu);
    if (own == OK && control->rank == 0) {
        ncclResult_t result = ncclGetUniqueId(&id.id);
        own = result == ncclSuccess ? OK : nccl_fault("start", ncclGetErrorString(result));
    }
    id.status = own;
    TRY(send_id(control, &id));
    words_listen(words);
    if (own == OK && id.status == OK)
        own = connect(self, words, &id.id, failed);
    TRY(words_end(words, own, failed));
    *failed |= own != OK;
    self->base.lane = own == OK ? gpu_lane_stream(self->lane) : NULL;
    return own;
}

/* Good order takes all ranks: where one has no time for that, the others do not wait for it. */
static void leave(NcclTransport *self) {
    double start_s = clock_s();
    ncclResult_t result = ncclCommFinalize(self->comm);
    while (result == ncclInProgress && clock_s() - start_s < LEAVE_S) {
        back_off(start_s);
        result = state_of(self);
    }
    if (result == ncclSuccess)
        ncclCommDestroy(self->comm);
    else
        ncclCommAbort(self->comm);
}

static void nccl_destroy(Transport *transport) {
    if (!transport)
        return;
    NcclTransport *self = nccl_of(transport);
    if (self->comm)
        leave(self);
    gpu_lane_destroy(self->lane);
    transport_release(transport);
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
        memcpy(self->base.node, control->node, (size_t)control->ranks * sizeof(int));
        status = join(self, &words, &failed);
    }
    if (status == OK && !failed)
        *result = &self->base;
    else if (self) {
        if (self->comm)
            ncclCommAbort(self->comm);
        self->comm = NULL;
        nccl_destroy(&self->base);
    }
    free(words.said);
    free(words.heard);
    return status;
}

extern "C" const DeviceTransport nccl_device = {.name = "nccl", .create = nccl_create, .destroy = nccl_destroy};
