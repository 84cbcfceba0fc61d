#define _GNU_SOURCE
#include "base/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { CACHE_LINE = 64, HUGE_PAGE = 2 << 20 };

static void *host_alloc(void *context, size_t bytes) {
    (void)context;
    size_t align = bytes >= 2 * (size_t)HUGE_PAGE ? HUGE_PAGE : CACHE_LINE;
    size_t rounded = (bytes + align - 1) / align * align;
    void *memory = aligned_alloc(align, rounded ? rounded : align);
    if (!memory)
        return NULL;
    if (align == HUGE_PAGE)
        madvise(memory, rounded, MADV_HUGEPAGE); /* advice only: a refusal changes nothing but speed */
    return memset(memory, 0, rounded);
}

static void host_free(void *context, void *memory) {
    (void)context;
    free(memory);
}

const Allocator host_memory = {host_alloc, host_free, NULL};

static _Thread_local const Allocator *refuser;
static _Thread_local size_t refused_bytes;

void *memory_alloc(const Allocator *allocator, size_t bytes) {
    void *memory = allocator->alloc(allocator->context, bytes);
    if (!memory)
        refuser = allocator, refused_bytes = bytes;
    return memory;
}

const Allocator *memory_refused(size_t *bytes) {
    *bytes = refused_bytes;
    return refuser;
}

BytesText bytes_text(double bytes) {
    BytesText result;
    double unit = bytes >= 1e8 ? 1e9 : bytes >= 1e5 ? 1e6 : 1e3;
    snprintf(result.text, sizeof result.text, "%.2f %s", bytes / unit, unit > 1e6 ? "GB" : unit > 1e3 ? "MB" : "kB");
    return result;
}

void memory_free(const Allocator *allocator, void *memory) { allocator->free(allocator->context, memory); }
