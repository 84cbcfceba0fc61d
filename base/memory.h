/* Memory for large arrays. Rooms that need some are handed an Allocator, so that gradients can be born in memory that
 * the node's ranks share, or on a device. */
#ifndef BASE_MEMORY_H
#define BASE_MEMORY_H

#include <stddef.h>

typedef struct Allocator {
    void *(*alloc)(void *context, size_t bytes); /* 64-byte aligned, zeroed; NULL when there is none left */
    void (*free)(void *context, void *memory);   /* NULL is allowed */
    void *context;
} Allocator;

/* The process's own memory: aligned to 2 MiB and advised to use huge pages from 4 MiB on. */
extern const Allocator host_memory;

void *memory_alloc(const Allocator *allocator, size_t bytes);

/* Whose memory this thread was refused last, and how much of it; NULL: never. */
const Allocator *memory_refused(size_t *bytes);

void memory_free(const Allocator *allocator, void *memory);

/* "1.50 GB", "12.00 MB", "4.10 kB": so much, in a unit that shows it. */
typedef struct BytesText {
    char text[24];
} BytesText;
BytesText bytes_text(double bytes);

#endif
