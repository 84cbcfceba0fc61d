/* Fibers: a stack each, switched by hand in some ten instructions. Home is where a thread of the system runs them
 * from. */
#ifndef TESTS_CUDA_FIBER_H
#define TESTS_CUDA_FIBER_H

#include <cstddef>
#include <cstdint>

#ifndef __x86_64__
#error "kernels run on the CPU only where fiber_switch knows it: add this processor's"
#endif

namespace emulator {

/* An odd number of cache lines beyond a power of two, so that neighbours' tops lie in different cache sets. */
enum { STACK_BYTES = (64 << 10) + 9 * 64 };

struct Fiber {
    void *stack_pointer;
    char *stack;
    void *fake_stack; /* AddressSanitizer's */
};

/* Saves what a function call must leave alone, and the stack pointer in *save; goes on where `load` was saved. */
extern "C" void fiber_switch(void **save, void *load);

struct Home {
    void *stack_pointer, *fake_stack;
    const void *stack_bottom; /* AddressSanitizer's */
    size_t stack_bytes;
};

#ifdef __SANITIZE_ADDRESS__
extern "C" void __sanitizer_start_switch_fiber(void **fake_stack, const void *bottom, size_t bytes);
extern "C" void __sanitizer_finish_switch_fiber(void *fake_stack, const void **bottom, size_t *bytes);
#else
inline void __sanitizer_start_switch_fiber(void **, const void *, size_t) {}
inline void __sanitizer_finish_switch_fiber(void *, const void **, size_t *) {}
#endif

/* The first fiber_resume calls entry, which must not return and calls fiber_entered first. */
inline void fiber_init(Fiber *fiber, char *stack, void (*entry)()) {
    enum { SAVED_REGISTERS = 6 };
    void **top = (void **)((uintptr_t)(stack + STACK_BYTES) & ~(uintptr_t)63);
    *--top = nullptr; /* entry's return address: backtraces end here */
    *--top = (void *)entry;
    for (int i = 0; i < SAVED_REGISTERS; i++)
        *--top = nullptr;
    *fiber = {top, stack, nullptr};
}

inline void fiber_resume(Home *home, Fiber *fiber) {
    __sanitizer_start_switch_fiber(&home->fake_stack, fiber->stack, STACK_BYTES);
    fiber_switch(&home->stack_pointer, fiber->stack_pointer);
    __sanitizer_finish_switch_fiber(home->fake_stack, nullptr, nullptr);
}
inline void fiber_entered(Home *home) {
    __sanitizer_finish_switch_fiber(nullptr, &home->stack_bottom, &home->stack_bytes);
}
inline void fiber_leave(Home *home, Fiber *fiber, bool for_good) {
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber->fake_stack, home->stack_bottom, home->stack_bytes);
    fiber_switch(&fiber->stack_pointer, home->stack_pointer);
    __sanitizer_finish_switch_fiber(fiber->fake_stack, &home->stack_bottom, &home->stack_bytes);
}

} // namespace emulator
#endif
