/* A stand-in for NCCL, linked in its place: ranks are threads of one process. A group of calls joins its stream when it
 * ends, by a thread of its own, as a non-blocking communicator does it. Until then ncclCommGetAsyncError says
 * ncclInProgress. Where streams are late nothing has moved by then: what is done with memory is done when the streams of
 * all whom it concerns have come to it, and each goes on when all of its group is done.
 *
 *   mail [from][to]   sends and receives that have not met yet, oldest first. Bytes are copied when two meet
 *   sum               the ranks that have come to an all-reduce; the last one adds up, in rank order
 *
 * Sizes that differ, pointers that are not the device's, groups that begin while one is in progress or that change the
 * communicator's stream, die: NCCL itself would hang, overwrite memory, or add what is not there yet. stand_ins.h tells
 * how it is made to fail. */
#include "tests/cuda/machine.h"
#include "tests/cuda/runtime.h"
#include "tests/cuda/stand_ins.h"

#include <nccl.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

using emulator::die;

namespace {

struct Call {
    enum { SEND, RECV, SUM } kind;
    ncclComm_t comm;
    void *data;
    size_t bytes;
    int peer;
    cudaStream_t stream;
};

struct Group {
    std::vector<Call> calls;
    std::atomic<int> open; /* calls that are not done */
};

/* A call whose stream has come to it. */
struct Here {
    Call call;
    std::shared_ptr<Group> group;
};

struct World {
    std::mutex lock;
    int ranks = 0, joined = 0, leaving = 0;
    std::set<int> devices;
    std::atomic<bool> aborted = false;
    std::set<int> left_alone; /* ranks that waited for others in vain */
    std::map<std::pair<int, int>, std::deque<Here>> mail[2]; /* sends and receives, by sender and receiver */
    std::map<int, Here> sum; /* by rank */
};

std::mutex worlds_lock;
std::map<uint64_t, std::shared_ptr<World>> worlds;
uint64_t next_id;

thread_local int depth;
thread_local std::vector<Call> calls;

size_t size_of(ncclDataType_t type) {
    switch (type) {
    case ncclChar: return 1;
    case ncclFloat32: return 4;
    default: die("NCCL: type %d", (int)type);
    }
}

} // namespace

struct ncclComm {
    std::shared_ptr<World> world;
    int rank, device;
    cudaStream_t stream = nullptr; /* of all its groups */
    /* under the world's lock */
    bool leaves = false, hangs = false, working = false;
    ncclResult_t result = ncclSuccess; /* of what was asked for last */
    std::thread thread; /* the caller's: has the last group join its stream */
};

/* ---- NCCL_FAIL ---- */

namespace {

struct Fault {
    char function[64] = "";
    int rank = -1, calls_left = 0, result = 0;

    Fault() {
        const char *text = getenv("NCCL_FAIL");
        if (text && sscanf(text, "%63[^:]:%d:%d:%d", function, &rank, &calls_left, &result) != 4)
            die("NCCL_FAIL: expected function:rank:call:result, found '%s'", text);
    }
};

/* What this call of a rank gives instead: ncclInProgress for one that never ends. */
ncclResult_t enter(const char *function, int rank) {
    static Fault fault;
    static std::mutex lock;
    std::lock_guard<std::mutex> locked(lock);
    bool meant = rank == fault.rank && strcmp(function, fault.function) == 0;
    return meant && fault.calls_left > 0 && --fault.calls_left == 0 ? (ncclResult_t)fault.result : ncclSuccess;
}

} // namespace

namespace {

/* Under the world's lock. */
void meet(World &world, std::pair<int, int> pair) {
    auto &sends = world.mail[Call::SEND][pair], &receives = world.mail[Call::RECV][pair];
    while (!sends.empty() && !receives.empty()) {
        const Here &from = sends.front(), &to = receives.front();
        if (from.call.bytes != to.call.bytes)
            die("NCCL: rank %d sends %zu bytes, rank %d expects %zu", pair.first, from.call.bytes, pair.second,
                to.call.bytes);
        memcpy(to.call.data, from.call.data, to.call.bytes);
        from.group->open--;
        to.group->open--;
        sends.pop_front();
        receives.pop_front();
    }
}

/* Under the world's lock. */
void add_up(World &world, const Here &last) {
    size_t elems = last.call.bytes / sizeof(float);
    for (const auto &[rank, here] : world.sum)
        if (here.call.bytes != last.call.bytes)
            die("NCCL: all-reduce of %zu and of %zu bytes", here.call.bytes, last.call.bytes);
    for (size_t i = 0; i < elems; i++) {
        float total = ((float *)world.sum[0].call.data)[i];
        for (int rank = 1; rank < world.ranks; rank++)
            total += ((float *)world.sum[rank].call.data)[i];
        for (const auto &[rank, here] : world.sum)
            ((float *)here.call.data)[i] = total;
    }
    for (const auto &[rank, here] : world.sum)
        here.group->open--;
    world.sum.clear();
}

/* The stream has come to the group. */
void arrive(World &world, const std::shared_ptr<Group> &group, int rank) {
    std::lock_guard<std::mutex> locked(world.lock);
    if (world.aborted)
        return;
    for (const Call &call : group->calls) {
        Here here = {call, group};
        if (call.kind == Call::SUM) {
            world.sum[rank] = here;
            if ((int)world.sum.size() == world.ranks)
                add_up(world, here);
            continue;
        }
        std::pair<int, int> pair(call.kind == Call::SEND ? rank : call.peer, call.kind == Call::SEND ? call.peer : rank);
        world.mail[call.kind][pair].push_back(here);
        meet(world, pair);
    }
}

/* A group that stands still waits for its peers for ever, until the communicator is aborted. */
void join_stream(ncclComm_t comm, const std::shared_ptr<Group> &group, bool stands_still) {
    std::shared_ptr<World> world = comm->world;
    cudaStream_t stream = group->calls[0].stream;
    int rank = comm->rank;
    if (!stands_still)
        cudart::enqueue(stream, [=] { arrive(*world, group, rank); });
    cudart::enqueue_until(stream, [=] { return group->open == 0 || world->aborted; });
    cudart::enqueue(stream, [=] {
        std::lock_guard<std::mutex> locked(world->lock);
        if (group->open > 0 && world->aborted)
            world->left_alone.insert(rank);
    });
}

void work(ncclComm_t comm, std::shared_ptr<Group> group, bool stands_still) {
    cudaSetDevice(comm->device);
    cudaError_t error = cudaStreamQuery(group->calls[0].stream);
    bool fit = error == cudaSuccess || error == cudaErrorNotReady;
    if (fit)
        join_stream(comm, group, stands_still);
    std::lock_guard<std::mutex> locked(comm->world->lock);
    comm->result = fit ? ncclSuccess : ncclUnhandledCudaError;
    comm->working = false;
}

ncclResult_t launch() {
    if (calls.empty())
        return ncclSuccess;
    auto group = std::make_shared<Group>();
    group->calls.swap(calls);
    group->open = (int)group->calls.size();
    ncclComm_t comm = group->calls[0].comm;
    comm->stream = comm->stream ? comm->stream : group->calls[0].stream;
    for (const Call &call : group->calls)
        if (call.comm != comm || call.stream != comm->stream)
            die("NCCL: rank %d: the stand-in knows one communicator to a group, and one stream to that", comm->rank);
    ncclResult_t fault = enter("ncclGroupEnd", comm->rank);
    if (fault != ncclSuccess && fault != ncclInProgress)
        return fault;
    if (comm->working)
        die("NCCL: rank %d: a group begins while one is in progress", comm->rank);
    if (comm->thread.joinable())
        comm->thread.join();
    comm->hangs = fault == ncclInProgress;
    comm->working = true;
    if (!comm->hangs)
        comm->thread = std::thread(work, comm, group, enter("kernel", comm->rank) != ncclSuccess);
    return ncclInProgress;
}

ncclResult_t add(const Call &call) {
    if (!cudart::on_device(call.data, call.bytes))
        die("NCCL: rank %d: %zu bytes that are not the device's", call.comm->rank, call.bytes);
    calls.push_back(call);
    return depth > 0 ? ncclSuccess : launch();
}

} // namespace

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : result == ncclRemoteError ? "remote process exited" : "unhandled error";
}
const char *ncclGetLastError(ncclComm_t) { return getenv("NCCL_FAIL") ? "the last words of NCCL" : ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (ncclResult_t fault = enter(__func__, 0))
        return fault;
    std::lock_guard<std::mutex> locked(worlds_lock);
    uint64_t number = ++next_id;
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &number, sizeof number);
    worlds[number] = std::make_shared<World>();
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    uint64_t number;
    int device = -1;
    ncclResult_t fault = enter(__func__, rank);
    memcpy(&number, id.internal, sizeof number);
    std::lock_guard<std::mutex> locked(worlds_lock);
    if (config->blocking != 0)
        die("NCCL: the stand-in has non-blocking communicators only");
    if (!worlds.count(number))
        return ncclInvalidArgument;
    if (fault != ncclSuccess && fault != ncclInProgress)
        return fault;
    std::shared_ptr<World> world = worlds[number];
    std::lock_guard<std::mutex> also_locked(world->lock);
    if (cudaGetDevice(&device) != cudaSuccess || !world->devices.insert(device).second)
        return ncclInvalidUsage; /* a GPU of another rank */
    *comm = new ncclComm;
    (*comm)->world = world;
    (*comm)->rank = rank;
    (*comm)->device = device;
    (*comm)->hangs = fault != ncclSuccess;
    world->ranks = ranks;
    world->joined += fault == ncclSuccess;
    return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    ncclResult_t fault = enter(__func__, comm->rank);
    std::lock_guard<std::mutex> locked(comm->world->lock);
    comm->world->leaving++;
    comm->leaves = true;
    comm->hangs = fault == ncclInProgress;
    return fault == ncclSuccess ? ncclInProgress : fault;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!comm->leaves)
        die("NCCL: rank %d: ncclCommDestroy without ncclCommFinalize may wait for ever", comm->rank);
    if (comm->thread.joinable())
        comm->thread.join();
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    {
        std::lock_guard<std::mutex> locked(comm->world->lock);
        comm->world->aborted = true;
    }
    if (comm->thread.joinable())
        comm->thread.join();
    delete comm;
    return ncclSuccess;
}

/* Others do not notice that a rank has aborted, but for those that were waiting for it. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    const World &world = *comm->world;
    std::lock_guard<std::mutex> locked(comm->world->lock);
    bool waits = world.joined < world.ranks || (comm->leaves && world.leaving < world.ranks);
    bool in_progress = waits || comm->hangs || comm->working;
    *state = in_progress ? ncclInProgress : world.left_alone.count(comm->rank) ? ncclRemoteError : comm->result;
    return enter(__func__, comm->rank);
}

ncclResult_t ncclGroupStart() {
    depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return --depth > 0 ? ncclSuccess : launch(); }

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add({Call::SEND, comm, (void *)data, count * size_of(type), peer, stream});
}
ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return add({Call::RECV, comm, data, count * size_of(type), peer, stream});
}
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
    if (type != ncclFloat32 || op != ncclSum)
        die("NCCL: only sums of f32");
    if (from != to && cudaMemcpyAsync(to, from, count * sizeof(float), cudaMemcpyDeviceToDevice, stream) != cudaSuccess)
        return ncclInvalidArgument;
    return add({Call::SUM, comm, to, count * sizeof(float), -1, stream});
}
