/* One block at a time per thread of the system: its threads are fibers that a loop resumes, warp by warp, until all
 * have ended. A fiber that waits leaves to the loop; a barrier opens when every thread that has not ended waits at it,
 * a warp primitive when the last lane of its mask arrives, which then exchanges values for all. When nothing can go on
 * any more, threads wait for each other: the program ends and says where they stand. */
#include "tests/cuda/machine.h"

#include "tests/cuda/fiber.h"
#include "tests/cuda/runtime.h"
#include "tests/cuda/shared_memory.h"
#include "tests/cuda/stand_ins.h"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <sys/mman.h>

namespace emulator {

constinit thread_local Indices indices = {};

enum class State { RUNNABLE, AT_BARRIER, AT_WARP, ENDED };

struct Thread {
    Fiber fiber;
    uint3 id;
    int warp, lane;
    State state;
    Place place; /* where it waits */
    /* at a barrier */
    Vote vote;
    int predicate;
    /* at a warp primitive */
    WarpOp op;
    unsigned mask;
    int source;
    uint64_t value;
    /* what it waited for */
    uint64_t result;
};

struct Warp {
    unsigned alive, arrived; /* masks of lanes */
};

struct Block {
    /* set once for a thread of the system */
    Thread threads[BLOCK_THREADS_MAX];
    char *stacks;
    Home home;
    /* set for each block */
    const Launch *launch;
    const std::function<void()> *body;
    Warp warps[BLOCK_THREADS_MAX / WARP_LANES];
    int thread_count, warp_count;
    int warp_order[BLOCK_THREADS_MAX / WARP_LANES], lane_order[WARP_LANES];
    uint64_t random; /* 0: in order */
    int alive, waiting; /* threads that have not ended; those at the barrier */
    Thread *current;
};

static thread_local Block *block;

/* ---- the end of the program ---- */

void die(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (block && block->launch && block->current)
        fprintf(stderr, "emulator: kernel %s, block %u,%u,%u, thread %u,%u,%u: %s\n", block->launch->kernel,
                indices.block.x, indices.block.y, indices.block.z, block->current->id.x, block->current->id.y,
                block->current->id.z, text);
    else
        fprintf(stderr, "emulator: %s\n", text);
    abort();
}

static bool same(Place a, Place b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }

static void die_of_standstill() {
    for (int i = 0; i < block->thread_count; i++) {
        block->current = &block->threads[i];
        Thread *t = block->current;
        if (t->state == State::AT_WARP && (t->mask & ~block->warps[t->warp].alive))
            die("%s:%d: warp primitive with mask %08x: lanes %08x of it have ended or never were", t->place.file,
                t->place.line, t->mask, t->mask & ~block->warps[t->warp].alive);
    }
    for (int i = 0; i < block->thread_count; i++) {
        block->current = &block->threads[i];
        if (block->current->state == State::AT_WARP)
            die("%s:%d: divergent: this thread waits for lanes of mask %08x, %d of %d threads for the block",
                block->current->place.file, block->current->place.line, block->current->mask, block->waiting,
                block->alive);
    }
    die("standstill"); /* not reached: with all at the barrier it opens */
}

/* ---- waiting ---- */

static void leave(State state, Place place) {
    Thread *t = block->current;
    t->state = state;
    t->place = place;
    fiber_leave(&block->home, &t->fiber, state == State::ENDED);
}

int barrier(Vote vote, int predicate, Place place) {
    Thread *t = block->current;
    t->vote = vote;
    t->predicate = predicate;
    block->waiting++;
    leave(State::AT_BARRIER, place);
    return (int)t->result;
}

static void open_barrier() {
    int yes = 0;
    Thread *first = nullptr;
    for (int i = 0; i < block->thread_count; i++) {
        Thread *t = &block->threads[i];
        if (t->state != State::AT_BARRIER)
            continue;
        first = first ? first : t;
        yes += t->predicate != 0;
        block->current = t;
        if (t->vote != first->vote || !same(t->place, first->place))
            die("divergent: waits for the block at %s:%d, thread %u,%u,%u at %s:%d", t->place.file, t->place.line,
                first->id.x, first->id.y, first->id.z, first->place.file, first->place.line);
    }
    int result = first->vote == Vote::COUNT ? yes : first->vote == Vote::AND ? yes == block->waiting : yes > 0;
    for (int i = 0; i < block->thread_count; i++)
        if (block->threads[i].state == State::AT_BARRIER) {
            block->threads[i].state = State::RUNNABLE;
            block->threads[i].result = (uint64_t)result;
        }
    block->waiting = 0;
}

/* The last lane of `mask` has arrived. */
static void exchange(unsigned mask, Thread *lanes) {
    Thread *t = block->current;
    uint64_t ballot = 0;
    for (int lane = 0; lane < WARP_LANES; lane++)
        if (mask >> lane & 1) {
            Thread *other = &lanes[lane];
            if (other->mask != mask || other->op != t->op || !same(other->place, t->place))
                die("lanes of one warp primitive differ: mask %08x at %s:%d, lane %d mask %08x at %s:%d", mask,
                    t->place.file, t->place.line, lane, other->mask, other->place.file, other->place.line);
            ballot |= (uint64_t)(other->value != 0) << lane;
        }
    for (int lane = 0; lane < WARP_LANES; lane++)
        if (mask >> lane & 1) {
            Thread *other = &lanes[lane];
            if (other->source >= 0 && !(mask >> other->source & 1))
                die("%s:%d: lane %d reads lane %d, which is not in the mask %08x", t->place.file, t->place.line, lane,
                    other->source, mask);
            other->result = t->op == WarpOp::BALLOT ? ballot : lanes[other->source < 0 ? lane : other->source].value;
            other->state = State::RUNNABLE;
        }
}

uint64_t warp(WarpOp op, unsigned mask, uint64_t value, int source, Place place) {
    Thread *t = block->current;
    Warp *w = &block->warps[t->warp];
    if (!(mask >> t->lane & 1))
        die("%s:%d: lane %d is not in its own mask %08x", place.file, place.line, t->lane, mask);
    t->op = op;
    t->mask = mask;
    t->value = value;
    t->source = source;
    t->place = place;
    w->arrived |= 1u << t->lane;
    if ((w->arrived & mask) != mask) {
        leave(State::AT_WARP, place);
        return t->result;
    }
    w->arrived &= ~mask;
    exchange(mask, t - t->lane);
    return t->result;
}

/* ---- one block ---- */

static void run_thread() {
    fiber_entered(&block->home);
    (*block->body)();
    block->alive--;
    block->warps[block->current->warp].alive &= ~(1u << block->current->lane);
    leave(State::ENDED, Place{});
    __builtin_unreachable();
}

static uint64_t draw(uint64_t below) {
    block->random = block->random * 6364136223846793005u + 1442695040888963407u;
    return (block->random >> 33) % below;
}

static void shuffle(int *order, int count) {
    for (int i = count - 1; i > 0; i--)
        std::swap(order[i], order[draw((uint64_t)i + 1)]);
}

/* Each lane that can goes on until it waits; whether one could. */
static bool run_warp(int w) {
    bool ran = false;
    if (block->random)
        shuffle(block->lane_order, WARP_LANES);
    for (int i = 0; i < WARP_LANES; i++) {
        int index = w * WARP_LANES + block->lane_order[i];
        if (index >= block->thread_count || block->threads[index].state != State::RUNNABLE)
            continue;
        block->current = &block->threads[index];
        indices.thread = block->current->id;
        indices.lane = block->current->lane;
        fiber_resume(&block->home, &block->current->fiber);
        ran = true;
    }
    return ran;
}

/* Every warp goes on until it waits for the block, or, at random, only a part of the way. */
static bool run_round() {
    bool ran = false;
    if (block->random)
        shuffle(block->warp_order, block->warp_count);
    for (int i = 0; i < block->warp_count; i++)
        while (run_warp(block->warp_order[i])) {
            ran = true;
            if (block->random && draw(2))
                break;
        }
    return ran;
}

static void start_threads(dim3 size) {
    block->thread_count = block->alive = (int)(size.x * size.y * size.z);
    block->warp_count = (block->thread_count + WARP_LANES - 1) / WARP_LANES;
    block->waiting = 0;
    for (int i = 0; i < block->warp_count; i++) {
        block->warps[i] = Warp{0, 0};
        block->warp_order[i] = i;
    }
    for (int i = 0; i < WARP_LANES; i++)
        block->lane_order[i] = i;
    for (int i = 0; i < block->thread_count; i++) {
        Thread *t = &block->threads[i];
        fiber_init(&t->fiber, block->stacks + (size_t)i * STACK_BYTES, run_thread);
        t->id = uint3{(unsigned)i % size.x, (unsigned)i / size.x % size.y, (unsigned)i / (size.x * size.y)};
        t->warp = i / WARP_LANES;
        t->lane = i % WARP_LANES;
        t->state = State::RUNNABLE;
        block->warps[t->warp].alive |= 1u << t->lane;
    }
}

static void run_block(uint64_t seed) {
    start_threads(block->launch->block);
    block->random = seed;
    while (block->alive > 0) {
        bool ran = run_round();
        if (block->alive > 0 && block->waiting == block->alive)
            open_barrier();
        else if (!ran)
            die_of_standstill();
    }
    block->current = nullptr;
}

/* ---- grids ---- */

static std::atomic<uint64_t> schedule{getenv("EMULATOR_SEED") ? strtoull(getenv("EMULATOR_SEED"), nullptr, 0) : 0};

uint64_t schedule_seed() { return schedule; }

struct Owner {
    Block *block;
    ~Owner() {
        if (block)
            munmap(block->stacks, (size_t)BLOCK_THREADS_MAX * STACK_BYTES);
        delete block;
    }
};
static thread_local Owner owner;

/* The calling thread's, made at its first block. */
static Block *own_block() {
    if (!owner.block) {
        owner.block = new Block{};
        void *stacks = mmap(nullptr, (size_t)BLOCK_THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED)
            die("no memory for stacks");
        owner.block->stacks = (char *)stacks;
    }
    return owner.block;
}

static void run_grid(const Launch &launch, const std::function<void()> &body) {
    dim3 grid = launch.grid;
    int64_t blocks = (int64_t)grid.x * grid.y * grid.z;
    uint64_t seed = schedule_seed();
#pragma omp parallel for schedule(dynamic, 1) if (blocks > 1)
    for (int64_t i = 0; i < blocks; i++) {
        block = own_block();
        block->launch = &launch;
        block->body = &body;
        char *shared = shared_memory_open(launch.shared_bytes);
        indices = Indices{{}, uint3{(unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y),
                                    (unsigned)(i / ((int64_t)grid.x * grid.y))}, launch.block, grid, shared, 0};
        run_block(seed ? seed + (uint64_t)i * 0x9e3779b97f4a7c15u : 0);
        shared_memory_close();
        block = nullptr;
    }
}

static void check(const Launch &launch) {
    dim3 grid = launch.grid, size = launch.block;
    if ((int64_t)size.x * size.y * size.z < 1 || (int64_t)size.x * size.y * size.z > BLOCK_THREADS_MAX || size.z > 64)
        die("kernel %s: blocks of %u x %u x %u threads", launch.kernel, size.x, size.y, size.z);
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        die("kernel %s: a grid of %u x %u x %u blocks", launch.kernel, grid.x, grid.y, grid.z);
    if (launch.shared_bytes > SHARED_BYTES_MAX)
        die("kernel %s: %zu bytes of dynamic shared memory, a card has %d", launch.kernel, launch.shared_bytes,
            SHARED_BYTES_MAX);
    if (launch.shared_bytes > STATIC_SHARED_BYTES - OWN_SHARED_BYTES &&
        launch.shared_bytes > cudart::dynamic_shared_allowed())
        die("kernel %s: %zu bytes of dynamic shared memory without cudaFuncSetAttribute: the first %d are for static "
            "variables too", launch.kernel, launch.shared_bytes, STATIC_SHARED_BYTES);
}

void launch_in_stream(const Launch &launch, cudaStream_t stream, std::function<void()> thread) {
    if (cudart::enter("cudaLaunchKernel") != cudaSuccess)
        return; /* cudaGetLastError tells */
    check(launch);
    cudart::enqueue(stream, [launch, thread] { run_grid(launch, thread); });
}

void check_argument(const char *kernel, const volatile void *pointer) {
    if (pointer && !cudart::device_can_read(pointer))
        die("kernel %s: %p is not memory of the device", kernel, (const void *)pointer);
}

/* ---- switching fibers ---- */

asm(R"(
    .text
    .globl fiber_switch
    .type fiber_switch, @function
fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fiber_switch, . - fiber_switch
)");

} // namespace emulator

void emulator_seed(uint64_t seed) { emulator::schedule = seed; }
