/* Streams and events of the stand-in for the CUDA runtime. A stream is a queue of work. Where nothing is late, work is
 * done as soon as it is queued. Else a thread, the driver, takes it from there:
 *
 *   when a call waits for a stream   what that stream needs, through the events it waits for, and nothing else
 *   when nothing happens for 2 ms    anything that may run. One stream goes before another for a while, by the emulator's
 *                                    seed, so that each comes to be far ahead of the others and far behind
 *
 * A stream can also wait for what other devices do (enqueue_until), and that may need any stream.
 * So a copy whose result is read too early, or whose source is overwritten too early, shows. A device with an error that
 * sticks does nothing any more.
 * The default stream (and calls without a stream) waits for those streams that were not made cudaStreamNonBlocking. */
#include "tests/cuda/machine.h"
#include "tests/cuda/runtime.h"
#include "tests/cuda/stand_ins.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

using emulator::die;

namespace cudart {

struct Stream;

struct Event {
    uint64_t recorded = 0, passed = 0; /* how many records were queued, and how many of them were reached */
    Stream *stream = nullptr;          /* of the last one */
    double passed_s = 0;
    bool captured = false; /* the last one, by a capture: it is no event of the stream */
};

struct Item {
    std::function<void()> work;   /* of the device, unless that has failed; or of the stream itself; or: */
    std::shared_ptr<Event> event; /* to wait for, until `record` records have been reached; or: */
    uint64_t record;
    Stream *recorder;
    bool of_device = false;
    std::function<bool()> ready = nullptr; /* to wait for */
};

struct Stream {
    int device = 0;
    bool blocking = true, running = false;
    std::deque<Item> queue;
};

struct Driver {
    std::mutex lock;
    std::condition_variable changed;
    std::vector<std::shared_ptr<Stream>> streams;
    int events = 0;
    bool late = getenv("CUDART_LATE") && atoi(getenv("CUDART_LATE"));
    std::vector<Stream *> awaited; /* by calls, one entry each */
    uint64_t queued = 0;           /* items so far */
    uint64_t random = 1, order = 0;
    bool started = false;
};
using Lock = std::unique_lock<std::mutex>;

static Driver &driver() {
    static Driver *one = new Driver; /* its thread may outlive main */
    return *one;
}

static double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/* ---- the driver's thread ---- */

static bool can_run(const Stream *s) {
    if (s->running || s->queue.empty())
        return false;
    const Item &item = s->queue.front();
    if (item.ready)
        return item.ready() || is_stuck(s->device);
    return item.work || item.event->passed >= item.record;
}

static uint64_t draw(uint64_t &state) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
}

static Stream *any_stream(Driver &d) {
    if (draw(d.random) % 32 == 0)
        d.order = draw(d.random);
    Stream *first = nullptr;
    uint64_t number = 0, highest = 0;
    for (const auto &s : d.streams) {
        uint64_t state = (d.order + emulator::schedule_seed()) * 1000003 + ++number, rank = draw(state) ^ draw(state);
        if (can_run(s.get()) && (!first || rank > highest)) {
            first = s.get();
            highest = rank;
        }
    }
    return first;
}

/* The stream that must go on so that `s` can; NULL: nothing is left for it, or none can. */
static Stream *needed_for(Driver &d, Stream *s) {
    while (!s->queue.empty() && !can_run(s) && !s->running) {
        if (s->queue.front().ready)
            return any_stream(d);
        s = s->queue.front().recorder;
    }
    return s->queue.empty() ? nullptr : s;
}

static void run_first(Driver &d, Stream *s, Lock &locked) {
    Item item = std::move(s->queue.front());
    s->queue.pop_front();
    if (item.work && !(item.of_device && is_stuck(s->device))) {
        s->running = true;
        locked.unlock();
        item.work();
        locked.lock();
        s->running = false;
    }
    d.changed.notify_all();
}

static void drive() {
    Driver &d = driver();
    Lock locked(d.lock);
    uint64_t seen = 0;
    for (;;) {
        Stream *s = nullptr;
        for (Stream *awaited : d.awaited)
            s = s ? s : needed_for(d, awaited);
        if (!s && seen == d.queued)
            s = any_stream(d);
        if (s) {
            run_first(d, s, locked);
            continue;
        }
        uint64_t before = d.queued;
        bool idle = d.changed.wait_for(locked, std::chrono::milliseconds(2)) == std::cv_status::timeout;
        seen = idle && d.awaited.empty() ? before : 0;
    }
}

static void wait_for(Driver &d, Stream *s, Lock &locked) {
    d.awaited.push_back(s);
    d.changed.notify_all();
    d.changed.wait(locked, [&] { return s->queue.empty() && !s->running; });
    d.awaited.erase(std::find(d.awaited.begin(), d.awaited.end(), s));
}

template <class Choice> static void wait_for_all(Choice chosen) {
    Driver &d = driver();
    Lock locked(d.lock);
    auto streams = d.streams; /* others may end theirs meanwhile */
    for (const auto &s : streams)
        if (chosen(*s))
            wait_for(d, s.get(), locked);
}
static bool blocks(const Stream &s) { return s.blocking; }
void drain() {
    wait_for_all([](const Stream &s) { return s.device == own_device(); });
}

void wait_for_running(int device) {
    Driver &d = driver();
    Lock locked(d.lock);
    d.changed.wait(locked, [&] {
        return std::none_of(d.streams.begin(), d.streams.end(),
                            [=](const auto &s) { return s->device == device && s->running; });
    });
}

/* ---- queueing ---- */

static void put(Driver &d, Stream *s, Item item, Lock &locked) {
    if (!d.late) {
        locked.unlock();
        while (item.ready && !item.ready() && !is_stuck(s->device))
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        if (item.work)
            item.work();
        return;
    }
    if (!d.started)
        std::thread(drive).detach();
    d.started = true;
    d.queued++;
    s->queue.push_back(std::move(item));
    d.changed.notify_all();
}

void enqueue(cudaStream_t stream, std::function<void()> work) {
    if (gather(stream, work))
        return;
    if (!stream) {
        wait_for_all(blocks);
        work();
        return;
    }
    Driver &d = driver();
    Lock locked(d.lock);
    put(d, (Stream *)stream, Item{std::move(work), nullptr, 0, nullptr, true}, locked);
}

void enqueue_until(cudaStream_t stream, std::function<bool()> ready) {
    Driver &d = driver();
    Lock locked(d.lock);
    put(d, (Stream *)stream, Item{nullptr, nullptr, 0, nullptr, false, std::move(ready)}, locked);
}

} // namespace cudart

using namespace cudart;

static std::shared_ptr<Event> &event_of(cudaEvent_t event) { return *(std::shared_ptr<Event> *)event; }

/* ---- for tests ---- */

void cudart_late(bool late) {
    wait_for_all([](const Stream &) { return true; });
    Lock locked(driver().lock);
    driver().late = late;
}
int cudart_objects(void) {
    Lock locked(driver().lock);
    return (int)driver().streams.size() + driver().events + pinned_parts() + graphs_kept();
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    ENTER();
    Lock locked(driver().lock);
    auto s = std::make_shared<Stream>();
    s->device = own_device();
    s->blocking = !(flags & cudaStreamNonBlocking);
    driver().streams.push_back(s);
    *stream = (cudaStream_t)s.get();
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    ENTER();
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    ENTER();
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER();
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER();
    if (spoils(stream))
        return failed(cudaErrorStreamCaptureUnsupported);
    if (!stream) {
        wait_for_all(blocks);
        return cudaSuccess;
    }
    Lock locked(driver().lock);
    wait_for(driver(), (Stream *)stream, locked);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    ENTER();
    if (spoils_own())
        return failed(cudaErrorStreamCaptureUnsupported);
    drain();
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    Driver &d = driver();
    Lock locked(d.lock);
    wait_for(d, (Stream *)stream, locked);
    std::erase_if(d.streams, [=](const auto &s) { return s.get() == (Stream *)stream; });
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER();
    if (spoils(stream))
        return failed(cudaErrorStreamCaptureUnsupported);
    Lock locked(driver().lock);
    return ((Stream *)stream)->queue.empty() && !((Stream *)stream)->running ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user) {
    ENTER();
    enqueue(stream, [=] { function(user); });
    return cudaSuccess;
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    ENTER();
    Lock locked(driver().lock);
    driver().events++;
    *event = (cudaEvent_t) new std::shared_ptr<Event>(new Event);
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) {
    ENTER();
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    Lock locked(driver().lock);
    driver().events--;
    delete (std::shared_ptr<Event> *)event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ENTER();
    if (!stream)
        die("cudaEventRecord: the stand-in has no events of the default stream");
    Driver &d = driver();
    Lock locked(d.lock);
    std::shared_ptr<Event> e = event_of(event);
    e->captured = is_captured(stream);
    if (e->captured)
        return cudaSuccess;
    uint64_t record = ++e->recorded;
    e->stream = (Stream *)stream;
    auto reach = [e, record] {
        Lock reached(driver().lock);
        e->passed = record;
        e->passed_s = now_s();
    };
    put(d, e->stream, Item{reach, nullptr, 0, nullptr}, locked);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    ENTER();
    Driver &d = driver();
    Lock locked(d.lock);
    std::shared_ptr<Event> e = event_of(event);
    if (e->captured)
        die("cudaStreamWaitEvent: the stand-in knows captures of one stream only");
    if (spoils(stream))
        return failed(cudaErrorStreamCaptureIsolation);
    if (e->recorded > e->passed)
        put(d, (Stream *)stream, Item{nullptr, e, e->recorded, e->stream}, locked);
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ENTER();
    Driver &d = driver();
    Lock locked(d.lock);
    std::shared_ptr<Event> e = event_of(event);
    uint64_t record = e->recorded;
    if (e->captured || spoils_own())
        return failed(e->captured ? cudaErrorCapturedEvent : cudaErrorStreamCaptureUnsupported);
    if (e->passed >= record)
        return cudaSuccess;
    Stream *s = e->stream;
    d.awaited.push_back(s);
    d.changed.notify_all();
    d.changed.wait(locked, [&] { return e->passed >= record; });
    d.awaited.erase(std::find(d.awaited.begin(), d.awaited.end(), s));
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    ENTER();
    Lock locked(driver().lock);
    if (event_of(event)->captured || spoils_own())
        return failed(event_of(event)->captured ? cudaErrorCapturedEvent : cudaErrorStreamCaptureUnsupported);
    return event_of(event)->passed >= event_of(event)->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
    ENTER();
    Lock locked(driver().lock);
    if (!event_of(start)->passed || !event_of(end)->passed)
        return failed(cudaErrorInvalidResourceHandle);
    *ms = (float)(1e3 * (event_of(end)->passed_s - event_of(start)->passed_s));
    return cudaSuccess;
}
