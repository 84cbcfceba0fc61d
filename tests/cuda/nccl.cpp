/* A stand-in for NCCL, linked in its place: ranks are threads of one process. A group of calls is carried out when it
 * ends, by a thread of its own, as a non-blocking communicator does it: first the stream's work so far, as far as it
 * must be, then a meeting with the peers. Until then ncclCommGetAsyncError says ncclInProgress.
 *
 *   mailbox [from][to]   what was sent and not yet taken, oldest first. Whoever receives copies; whoever sent waits
 *                        until all of its own is taken
 *   sum                  an all-reduce waits for all ranks; the last one adds up, in rank order
 *
 * Sizes that differ, pointers that are not the device's, streams that are used while a group is in progress, die: NCCL
 * itself would hang, overwrite memory, or add what is not there yet. stand_ins.h tells how it is made to fail. */
#include "tests/cuda/machine.h"
#include "tests/cuda/runtime.h"
#include "tests/cuda/stand_ins.h"

#include <nccl.h>

#include <condition_variable>
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

struct Sent {
    const void *data;
    size_t bytes;
    int *open; /* of the sender: what is not yet taken */
};

struct World {
    std::mutex lock;
    std::condition_variable changed;
    int ranks = 0, joined = 0, leaving = 0;
    std::set<int> devices;
    bool aborted = false;
    std::map<std::pair<int, int>, std::deque<Sent>> mail; /* by sender and receiver */
    /* an all-reduce */
    std::vector<float *> arrays;
    int arrived = 0;
    size_t elems = 0;
    uint64_t sums = 0; /* done so far */
};

struct Call {
    enum { SEND, RECV, SUM } kind;
    ncclComm_t comm;
    void *data;
    size_t bytes;
    int peer;
    cudaStream_t stream;
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
    /* under the world's lock */
    bool leaves = false, hangs = false, working = false;
    ncclResult_t result = ncclSuccess; /* of what was asked for last */
    std::thread thread;                /* the caller's: carries the last group out */
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

void post(World &world, const Call &call, int *open) {
    world.mail[{call.comm->rank, call.peer}].push_back({call.data, call.bytes, open});
    ++*open;
}

bool take(World &world, const Call &call, std::unique_lock<std::mutex> &locked) {
    auto &box = world.mail[{call.peer, call.comm->rank}];
    world.changed.wait(locked, [&] { return world.aborted || !box.empty(); });
    if (world.aborted)
        return false;
    Sent sent = box.front();
    box.pop_front();
    if (sent.bytes != call.bytes)
        die("NCCL: rank %d sends %zu bytes, rank %d expects %zu", call.peer, sent.bytes, call.comm->rank, call.bytes);
    memcpy(call.data, sent.data, sent.bytes);
    --*sent.open;
    world.changed.notify_all();
    return true;
}

bool sum(World &world, const Call &call, std::unique_lock<std::mutex> &locked) {
    uint64_t mine = world.sums;
    size_t elems = call.bytes / sizeof(float);
    world.arrays.resize((size_t)world.ranks);
    world.arrays[(size_t)call.comm->rank] = (float *)call.data;
    if (world.arrived++ > 0 && world.elems != elems)
        die("NCCL: all-reduce of %zu and of %zu elements", world.elems, elems);
    world.elems = elems;
    if (world.arrived < world.ranks) {
        world.changed.wait(locked, [&] { return world.aborted || world.sums > mine; });
        return !world.aborted;
    }
    for (size_t i = 0; i < elems; i++) {
        float total = world.arrays[0][i];
        for (size_t rank = 1; rank < world.arrays.size(); rank++)
            total += world.arrays[rank][i];
        for (float *array : world.arrays)
            array[i] = total;
    }
    world.arrived = 0;
    world.sums++;
    world.changed.notify_all();
    return true;
}

ncclResult_t carry_out(const std::vector<Call> &group) {
    for (const Call &call : group)
        if (cudaStreamSynchronize(call.stream) != cudaSuccess)
            return ncclUnhandledCudaError;
    World &world = *group[0].comm->world;
    std::unique_lock<std::mutex> locked(world.lock);
    int open = 0;
    if (world.aborted)
        return ncclRemoteError;
    for (const Call &call : group)
        if (call.kind == Call::SEND)
            post(world, call, &open);
    world.changed.notify_all();
    for (const Call &call : group)
        if (world.aborted || (call.kind == Call::RECV && !take(world, call, locked)) ||
            (call.kind == Call::SUM && !sum(world, call, locked)))
            return ncclRemoteError;
    world.changed.wait(locked, [&] { return world.aborted || open == 0; });
    return world.aborted ? ncclRemoteError : ncclSuccess;
}

/* A kernel that waits for its peers for ever, until the communicator is aborted. */
ncclResult_t stand_still(const Call &call) {
    std::shared_ptr<World> world = call.comm->world;
    cudart::enqueue(call.stream, [world] {
        std::unique_lock<std::mutex> locked(world->lock);
        world->changed.wait(locked, [&] { return world->aborted; });
    });
    return ncclSuccess;
}

void work(ncclComm_t comm, std::vector<Call> group, bool stands_still) {
    cudaSetDevice(comm->device);
    ncclResult_t result = stands_still ? stand_still(group[0]) : carry_out(group);
    std::lock_guard<std::mutex> locked(comm->world->lock);
    comm->result = result;
    comm->working = false;
}

ncclResult_t launch() {
    std::vector<Call> group;
    group.swap(calls);
    if (group.empty())
        return ncclSuccess;
    ncclComm_t comm = group[0].comm;
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
        comm->world->changed.notify_all();
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
    *state = waits || comm->hangs || comm->working ? ncclInProgress : comm->result;
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
