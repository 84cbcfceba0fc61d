/* Graphs of the stand-in for the CUDA runtime. A stream that is being captured gathers what is put in it, and does
 * nothing of it; a launch puts all of it in a stream, in that order. Captures are cudaStreamCaptureModeThreadLocal, of
 * one stream each: what such a capture forbids gives CUDA's error, and spoils it. */
#include "tests/cuda/machine.h"
#include "tests/cuda/runtime.h"

#include <map>
#include <memory>
#include <mutex>
#include <vector>

using emulator::die;

namespace cudart {

using Work = std::vector<std::function<void()>>;

struct Capture {
    bool spoilt = false;
    std::shared_ptr<Work> work = std::make_shared<Work>();
};

static std::mutex lock;
static std::map<cudaStream_t, std::shared_ptr<Capture>> captures;
static int graphs; /* and what can be launched of them */
static thread_local cudaStream_t own; /* stream that this thread captures */

static std::shared_ptr<Capture> capture_of(cudaStream_t stream) {
    auto found = captures.find(stream);
    return found == captures.end() ? nullptr : found->second;
}

bool is_captured(cudaStream_t stream) {
    std::lock_guard<std::mutex> locked(lock);
    return capture_of(stream) != nullptr;
}

bool gather(cudaStream_t stream, const std::function<void()> &work) {
    std::lock_guard<std::mutex> locked(lock);
    auto capture = capture_of(stream);
    if (capture)
        capture->work->push_back(work);
    return capture != nullptr;
}

bool spoils(cudaStream_t stream) {
    std::lock_guard<std::mutex> locked(lock);
    auto capture = capture_of(stream);
    if (capture)
        capture->spoilt = true;
    return capture != nullptr;
}

bool spoils_own() { return own && spoils(own); }

int graphs_kept() {
    std::lock_guard<std::mutex> locked(lock);
    return graphs;
}

static void *graph_new(const std::shared_ptr<Work> &work) {
    graphs++;
    return new std::shared_ptr<Work>(work);
}
static void graph_delete(void *graph) {
    std::lock_guard<std::mutex> locked(lock);
    graphs--;
    delete (std::shared_ptr<Work> *)graph;
}
static const std::shared_ptr<Work> &work_of(const void *graph) { return *(const std::shared_ptr<Work> *)graph; }

} // namespace cudart

using namespace cudart;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    ENTER();
    if (mode != cudaStreamCaptureModeThreadLocal || own)
        die("cudaStreamBeginCapture: the stand-in knows a capture of one stream, local to its thread");
    std::lock_guard<std::mutex> locked(lock);
    if (!stream)
        return failed(cudaErrorStreamCaptureUnsupported);
    if (!captures.insert({stream, std::make_shared<Capture>()}).second)
        return failed(cudaErrorIllegalState);
    own = stream;
    return cudaSuccess;
}

/* The capture is over, whatever it returns. */
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = nullptr;
    std::shared_ptr<Capture> capture;
    {
        std::lock_guard<std::mutex> locked(lock);
        capture = capture_of(stream);
        if (!capture)
            return failed(cudaErrorIllegalState);
        if (stream != own)
            return failed(cudaErrorStreamCaptureWrongThread);
        captures.erase(stream);
        own = nullptr;
    }
    ENTER();
    if (capture->spoilt)
        return failed(cudaErrorStreamCaptureInvalidated);
    std::lock_guard<std::mutex> locked(lock);
    *graph = (cudaGraph_t)graph_new(capture->work);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    ENTER();
    std::lock_guard<std::mutex> locked(lock);
    *exec = (cudaGraphExec_t)graph_new(work_of(graph));
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    ENTER();
    if (is_captured(stream))
        die("cudaGraphLaunch: the stand-in knows no graphs within graphs");
    for (const auto &work : *work_of(exec))
        enqueue(stream, work);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    graph_delete(graph);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    graph_delete(exec);
    return cudaSuccess;
}
