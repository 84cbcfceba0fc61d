/* The NCCL transport. A group of messages is one NCCL group in the rank's lane:
 *
 *   group_start   ncclGroupStart  ncclSend, ncclRecv ...  ncclGroupEnd     all in the lane; nothing waits on the host
 *   group_wait    nothing: what is done with a message stands behind it in the lane
 *   flush         the host waits, with an eye on NCCL's asynchronous errors and on the time
 *
 * Sizes and order are the plan's, alike on both sides; labels are not sent, so they are not checked. NCCL refuses two
 * ranks on one card. A rank that is lost leaves the others' kernels waiting on the card: flush then gives up and aborts
 * the communicator, which ends them. */
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

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

struct NcclTransport {
    Transport base;
    Gpu *gpu;
    GpuLane *lane;
    ncclComm_t comm; /* NULL once it is aborted */
};

static NcclTransport *nccl_of(Transport *transport) { return (NcclTransport *)transport; }
static cudaStream_t stream_of(Transport *transport) { return (cudaStream_t)transport->lane; }

static Status nccl_fault(const char *what, ncclResult_t result) {
    const char *detail = ncclGetLastError(NULL);
    return fault("NCCL, %s: %s%s%s; NCCL_DEBUG=WARN tells more", what, ncclGetErrorString(result),
                 detail && detail[0] ? ": " : "", detail ? detail : "");
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
    return result == ncclSuccess ? OK : nccl_fault("messages between GPUs", result);
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
}

/* Never spins: it only joins the lane. */
static Status nccl_allreduce_sum(Transport *transport, float *data, int64_t elems, bool may_spin) {
    (void)may_spin;
    NcclTransport *self = nccl_of(transport);
    if (!self->comm)
        return fault("NCCL: the communicator was aborted");
    ncclResult_t result =
        ncclAllReduce(data, data, (size_t)elems, ncclFloat32, ncclSum, self->comm, stream_of(transport));
    return result == ncclSuccess ? OK : nccl_fault("all-reduce", result);
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

static Status asynchronous_error(NcclTransport *self) {
    ncclResult_t state = ncclSuccess;
    ncclResult_t result = ncclCommGetAsyncError(self->comm, &state);
    result = result == ncclSuccess ? state : result;
    return result == ncclSuccess || result == ncclInProgress ? OK : nccl_fault("between GPUs", result);
}

static Status nccl_flush(Transport *transport) {
    NcclTransport *self = nccl_of(transport);
    const struct timespec nap = {0, 20000};
    double start_s = clock_s();
    cudaError_t launched = cudaGetLastError(); /* of this thread: vector operations do not look */
    if (launched != cudaSuccess)
        return give_up(self, fault("the GPU refused work on gradients: %s", cudaGetErrorString(launched)));
    for (bool empty = false;;) {
        Status status = self->comm ? asynchronous_error(self) : fault("NCCL: the communicator was aborted");
        if (status == OK)
            status = gpu_lane_test(self->lane, &empty);
        if (status == OK && empty)
            break;
        if (status == OK && clock_s() - start_s > transport->timeout_s)
            status = fault("NCCL: rank %d waited %.0f s for its GPU to hear from the others; a rank is lost, or "
                           "comm.timeout_s is too short", transport->rank, transport->timeout_s);
        if (status != OK)
            return give_up(self, status);
        nanosleep(&nap, NULL);
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

/* Rank 0's id goes to everybody; a rank that cannot go on tells them too, so that nobody waits for it inside NCCL. */
static Status agree(Transport *control, Status mine, const ncclUniqueId *id, ncclUniqueId *common) {
    struct Word {
        int status;
        ncclUniqueId id;
    } own = {mine, *id}, *all = (struct Word *)calloc((size_t)control->ranks, sizeof own);
    if (!all)
        return fault("no memory for %d ranks", control->ranks);
    Status status = transport_all_gather(control, &own, all, sizeof own);
    *common = all[0].id;
    for (int rank = 0; rank < control->ranks && status == OK && mine == OK; rank++)
        if (all[rank].status != OK)
            status = fault("rank %d cannot use NCCL", rank);
    free(all);
    return mine != OK ? mine : status;
}

static Status join(NcclTransport *self, Transport *control) {
    ncclUniqueId id = {}, common;
    Status status = gpu_lane_create(&self->lane, self->gpu);
    if (status == OK && control->rank == 0) {
        ncclResult_t result = ncclGetUniqueId(&id);
        status = result == ncclSuccess ? OK : nccl_fault("start", result);
    }
    TRY(agree(control, status, &id, &common));
    ncclResult_t result = ncclCommInitRank(&self->comm, control->ranks, common, control->rank);
    TRY(agree(control, result == ncclSuccess ? OK : nccl_fault("start", result), &id, &common));
    self->base.lane = gpu_lane_stream(self->lane);
    return OK;
}

static void nccl_destroy(Transport *transport) {
    if (!transport)
        return;
    NcclTransport *self = nccl_of(transport);
    if (self->comm)
        ncclCommDestroy(self->comm);
    gpu_lane_destroy(self->lane);
    transport_release(transport);
    free(self);
}

static Status nccl_create(Transport **result, Transport *control, Gpu *gpu) {
    NcclTransport *self = (NcclTransport *)calloc(1, sizeof *self);
    *result = NULL;
    if (!self || !transport_init(&self->base, &nccl_ops, control->rank, control->ranks, control->timeout_s))
        return fault("no memory for NCCL's transport");
    self->base.vector = &vector_cuda;
    self->gpu = gpu;
    memcpy(self->base.node, control->node, (size_t)control->ranks * sizeof(int));
    Status status = join(self, control);
    if (status != OK)
        nccl_destroy(&self->base);
    else
        *result = &self->base;
    return status;
}

extern "C" const DeviceTransport nccl_device = {.name = "nccl", .create = nccl_create, .destroy = nccl_destroy};
