/* A stand-in for the CUDA runtime, linked in its place: devices, errors, memory. The device's memory is the host's,
 * with 0xFF in it when it is new; copies must lie within what was allocated, and on the side that their kind says.
 * cudart_stream.cpp has the streams. Ranks may be threads. */
#include "tests/cuda/machine.h"
#include "tests/cuda/runtime.h"
#include "tests/cuda/stand_ins.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

using emulator::die;

namespace cudart {

enum { PCI_BUS = 0x10 }; /* of the first device; the others' follow */

static long long from_environment(const char *name, long long otherwise) {
    const char *value = getenv(name);
    return value ? atoll(value) : otherwise;
}

struct Allocation {
    size_t bytes;
    int device;
};

struct Runtime {
    std::mutex lock;
    /* devices */
    int devices = (int)from_environment("CUDART_DEVICES", 1);
    int major = (int)from_environment("CUDART_ARCH", 90) / 10, minor = (int)from_environment("CUDART_ARCH", 90) % 10;
    int driver_version = (int)from_environment("CUDART_DRIVER", CUDART_VERSION);
    size_t memory_bytes = (size_t)from_environment("CUDART_MEMORY_MIB", 16 << 10) << 20;
    /* memory, by its first byte */
    std::map<const char *, Allocation> device_memory;
    std::map<const char *, size_t> pinned;
    size_t dynamic_shared_allowed = 0;
    /* errors to come, and those that stick */
    char failing[64] = ""; /* a function's name, with "@1": of device 1 */
    int calls_left = 0;
    cudaError_t injected = cudaSuccess;
    std::map<int, cudaError_t> stuck; /* by device */

    Runtime() {
        int error = 0;
        const char *fail = getenv("CUDART_FAIL");
        if (fail && sscanf(fail, "%63[^:]:%d:%d", failing, &calls_left, &error) != 3)
            die("CUDART_FAIL: expected function:call:error, found '%s'", fail);
        injected = (cudaError_t)error;
    }
};

static Runtime &runtime() {
    static Runtime one;
    return one;
}
using Locked = std::lock_guard<std::mutex>;

static thread_local cudaError_t last_error;
static thread_local int current_device;

cudaError_t failed(cudaError_t error) {
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

/* What a call is that fails after a count. */
static bool is_failing(const Runtime &r, const char *function) {
    const char *at = strchr(r.failing, '@');
    size_t length = at ? (size_t)(at - r.failing) : strlen(r.failing);
    return strlen(function) == length && strncmp(function, r.failing, length) == 0 &&
           (!at || atoi(at + 1) == current_device);
}

int own_device() { return current_device; }
bool is_stuck(int device) {
    Locked locked(runtime().lock);
    return runtime().stuck[device] != cudaSuccess;
}

static cudaError_t fail_by_count(const char *function) {
    Runtime &r = runtime();
    Locked locked(r.lock);
    cudaError_t &stuck = r.stuck[current_device];
    if (stuck == cudaSuccess && r.calls_left > 0 && is_failing(r, function) && --r.calls_left == 0) {
        if (r.injected >= cudaErrorIllegalAddress && r.injected <= cudaErrorLaunchFailure)
            stuck = r.injected;
        return r.injected;
    }
    return stuck;
}

cudaError_t enter(const char *function) {
    cudaError_t error = fail_by_count(function);
    if (error != cudaSuccess && is_stuck(current_device))
        wait_for_running(current_device);
    return failed(error);
}

/* The part that begins at or before `at`, if it reaches over `bytes` from there. */
template <class Map, class Bytes>
static bool covered(const Map &parts, const volatile void *at, size_t bytes, Bytes bytes_of) {
    const char *begin = (const char *)at;
    auto part = parts.upper_bound(begin);
    if (part == parts.begin())
        return false;
    --part;
    return begin + bytes <= part->first + bytes_of(part->second);
}

bool on_device(const volatile void *at, size_t bytes) {
    Locked locked(runtime().lock);
    return covered(runtime().device_memory, at, bytes, [](const Allocation &a) { return a.bytes; });
}
static bool is_pinned(const volatile void *at) {
    Locked locked(runtime().lock);
    return covered(runtime().pinned, at, 0, [](size_t bytes) { return bytes; });
}
bool device_can_read(const volatile void *at) { return on_device(at, 0) || is_pinned(at); }
int pinned_parts() {
    Locked locked(runtime().lock);
    return (int)runtime().pinned.size();
}

size_t dynamic_shared_allowed() {
    Locked locked(runtime().lock);
    return runtime().dynamic_shared_allowed;
}

static size_t used(int device) {
    size_t bytes = 0;
    for (const auto &[at, allocation] : runtime().device_memory)
        if (device < 0 || allocation.device == device)
            bytes += allocation.bytes;
    return bytes;
}

} // namespace cudart

using namespace cudart;

/* Of calls that a capture forbids to the thread that captures. */
#define ENTER_UNSAFE()                                          \
    do {                                                        \
        ENTER();                                                \
        if (spoils_own())                                       \
            return failed(cudaErrorStreamCaptureUnsupported);   \
    } while (0)

/* ---- for tests ---- */

void cudart_devices(int count) { runtime().devices = count; }
void cudart_device(int major, int minor, size_t memory_bytes) {
    runtime().major = major;
    runtime().minor = minor;
    runtime().memory_bytes = memory_bytes;
}
void cudart_driver(int version) { runtime().driver_version = version; }
void cudart_fail(const char *function, int call, int error) {
    Runtime &r = runtime();
    Locked locked(r.lock);
    snprintf(r.failing, sizeof r.failing, "%s", function ? function : "");
    r.calls_left = function ? call : 0;
    r.injected = (cudaError_t)error;
    r.stuck.clear();
    last_error = cudaSuccess;
}
size_t cudart_memory_used(void) {
    Locked locked(runtime().lock);
    return used(-1);
}

/* ---- devices ---- */

cudaError_t cudaDriverGetVersion(int *version) {
    *version = runtime().driver_version;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    ENTER();
    if (runtime().driver_version < CUDART_VERSION / 1000 * 1000)
        return failed(cudaErrorInsufficientDriver);
    *count = runtime().devices;
    return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
    ENTER();
    if (device < 0 || device >= runtime().devices)
        return failed(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    ENTER();
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    ENTER();
    if (device < 0 || device >= runtime().devices)
        return failed(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "CPU as a GPU");
    properties->major = runtime().major;
    properties->minor = runtime().minor;
    properties->totalGlobalMem = runtime().memory_bytes;
    properties->pciBusID = PCI_BUS + device;
    properties->multiProcessorCount = 4;
    properties->warpSize = emulator::WARP_LANES;
    properties->maxThreadsPerBlock = emulator::BLOCK_THREADS_MAX;
    properties->sharedMemPerBlock = emulator::STATIC_SHARED_BYTES;
    properties->sharedMemPerBlockOptin = emulator::SHARED_BYTES_MAX;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp properties;
    ENTER();
    if (cudaError_t error = cudaGetDeviceProperties(&properties, device))
        return error;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)properties.sharedMemPerBlockOptin; break;
    default: die("cudaDeviceGetAttribute: the stand-in does not know attribute %d", (int)attribute);
    }
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute attribute, int value) {
    ENTER();
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout)
        return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        die("cudaFuncSetAttribute: the stand-in does not know attribute %d", (int)attribute);
    if (value > emulator::SHARED_BYTES_MAX)
        return failed(cudaErrorInvalidValue);
    Locked locked(runtime().lock);
    runtime().dynamic_shared_allowed = std::max(runtime().dynamic_shared_allowed, (size_t)value);
    return cudaSuccess;
}

/* ---- errors ---- */

cudaError_t cudaPeekAtLastError() { return last_error; }
cudaError_t cudaGetLastError() {
    Locked locked(runtime().lock);
    cudaError_t error = last_error;
    last_error = runtime().stuck[current_device];
    return error;
}
const char *cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cudaError"; }
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorDevicesUnavailable: return "CUDA-capable device(s) is/are busy or unavailable";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    default: return "an error that the stand-in has no words for";
    }
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **at, size_t bytes) {
    ENTER_UNSAFE();
    Runtime &r = runtime();
    Locked locked(r.lock);
    *at = nullptr;
    if (bytes == 0)
        return cudaSuccess;
    if (used(current_device) + bytes > r.memory_bytes || posix_memalign(at, 256, bytes) != 0)
        return failed(cudaErrorMemoryAllocation);
    memset(*at, 0xFF, bytes);
    r.device_memory[(char *)*at] = {bytes, current_device};
    return cudaSuccess;
}
cudaError_t cudaFree(void *at) {
    ENTER_UNSAFE();
    drain();
    Locked locked(runtime().lock);
    if (at && !runtime().device_memory.erase((char *)at))
        die("cudaFree: %p was not allocated", at);
    free(at);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER();
    Locked locked(runtime().lock);
    *total_bytes = runtime().memory_bytes;
    *free_bytes = *total_bytes - used(current_device);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *at, size_t bytes, unsigned) {
    ENTER_UNSAFE();
    Locked locked(runtime().lock);
    return runtime().pinned.insert({(char *)at, bytes}).second ? cudaSuccess
                                                               : failed(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void *at) {
    ENTER_UNSAFE();
    drain();
    Locked locked(runtime().lock);
    return runtime().pinned.erase((char *)at) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostAlloc(void **at, size_t bytes, unsigned) {
    ENTER_UNSAFE();
    if (posix_memalign(at, 4096, bytes) != 0)
        return failed(cudaErrorMemoryAllocation);
    memset(*at, 0xFF, bytes);
    Locked locked(runtime().lock);
    runtime().pinned[(char *)*at] = bytes;
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **at, size_t bytes) {
    ENTER();
    return cudaHostAlloc(at, bytes, 0);
}
cudaError_t cudaFreeHost(void *at) {
    ENTER_UNSAFE();
    drain();
    Locked locked(runtime().lock);
    if (at && !runtime().pinned.erase((char *)at))
        die("cudaFreeHost: %p was not allocated", at);
    free(at);
    return cudaSuccess;
}

/* ---- copies ---- */

static void check_side(const char *function, const void *at, size_t bytes, bool device) {
    if (device && !on_device(at, bytes))
        die("%s: %zu bytes at %p do not lie within memory of the device", function, bytes, at);
    if (!device && on_device(at, 0))
        die("%s: %p is memory of the device, expected the host's", function, at);
}

static void check_copy(const char *function, void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDefault)
        return;
    check_side(function, to, bytes, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
    check_side(function, from, bytes, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER();
    if (bytes > 0) {
        check_copy(__func__, to, from, bytes, kind);
        enqueue(stream, [=] { memmove(to, from, bytes); });
    }
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    ENTER_UNSAFE();
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
    ENTER();
    if (width > to_pitch || width > from_pitch)
        return failed(cudaErrorInvalidValue);
    for (size_t row = 0; row < rows; row++)
        if (cudaError_t error = cudaMemcpyAsync((char *)to + row * to_pitch, (const char *)from + row * from_pitch,
                                                width, kind, stream))
            return error;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    ENTER();
    if (bytes > 0) {
        check_side(__func__, at, bytes, true);
        enqueue(stream, [=] { memset(at, value, bytes); });
    }
    return cudaSuccess;
}
cudaError_t cudaMemset(void *at, int value, size_t bytes) {
    ENTER_UNSAFE();
    return cudaMemsetAsync(at, value, bytes, nullptr);
}
