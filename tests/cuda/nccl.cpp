/* A stand-in for NCCL, linked in its place: ranks are threads of one process. A group of calls is carried out when it
 * ends, by the thread that ends it: first the stream's work so far, as far as it must be, then a meeting with the peers.
 *
 *   mailbox [from][to]   what was sent and not yet taken, oldest first. Whoever receives copies; whoever sent waits
 *                        until all of its own is taken
 *   sum                  an all-reduce waits for all ranks; the last one adds up, in rank order
 *
 * Sizes that differ, and pointers that are not the device's, die: NCCL itself would hang, or overwrite memory. */
#include "tests/cuda/machine.h"
#include "tests/cuda/runtime.h"
#include "tests/cuda/stand_ins.h"

#include <nccl.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
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
    int ranks = 0, joined = 0;
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
    int rank;
};

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

ncclResult_t carry_out() {
    std::vector<Call> group;
    group.swap(calls);
    if (group.empty())
        return ncclSuccess;
    for (const Call &call : group)
        if (cudaStreamSynchronize(call.stream) != cudaSuccess)
            return ncclUnhandledCudaError;
    World &world = *group[0].comm->world;
    std::unique_lock<std::mutex> locked(world.lock);
    int open = 0;
    for (const Call &call : group)
        if (call.kind == Call::SEND)
            post(world, call, &open);
    world.changed.notify_all();
    for (const Call &call : group)
        if ((call.kind == Call::RECV && !take(world, call, locked)) || (call.kind == Call::SUM && !sum(world, call, locked)))
            return ncclRemoteError;
    world.changed.wait(locked, [&] { return world.aborted || open == 0; });
    return world.aborted ? ncclRemoteError : ncclSuccess;
}

ncclResult_t add(const Call &call) {
    if (!cudart::on_device(call.data, call.bytes))
        die("NCCL: rank %d: %zu bytes that are not the device's", call.comm->rank, call.bytes);
    calls.push_back(call);
    return depth > 0 ? ncclSuccess : carry_out();
}

} // namespace

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : result == ncclRemoteError ? "remote process exited" : "unhandled error";
}
const char *ncclGetLastError(ncclComm_t) { return ""; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    std::lock_guard<std::mutex> locked(worlds_lock);
    uint64_t number = ++next_id;
    memset(id, 0, sizeof *id);
    memcpy(id->internal, &number, sizeof number);
    worlds[number] = std::make_shared<World>();
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    uint64_t number;
    memcpy(&number, id.internal, sizeof number);
    std::shared_ptr<World> world;
    {
        std::lock_guard<std::mutex> locked(worlds_lock);
        if (!worlds.count(number))
            return ncclInvalidArgument;
        world = worlds[number];
    }
    *comm = new ncclComm{world, rank};
    std::unique_lock<std::mutex> locked(world->lock);
    world->ranks = ranks;
    world->joined++;
    world->changed.notify_all();
    world->changed.wait(locked, [&] { return world->joined == ranks || world->aborted; });
    return world->aborted ? ncclRemoteError : ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    {
        std::lock_guard<std::mutex> locked(comm->world->lock);
        comm->world->aborted = true;
        comm->world->changed.notify_all();
    }
    delete comm;
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *state) {
    std::lock_guard<std::mutex> locked(comm->world->lock);
    *state = comm->world->aborted ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
    depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() { return --depth > 0 ? ncclSuccess : carry_out(); }

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
