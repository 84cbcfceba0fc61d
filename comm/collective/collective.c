#include "comm/collective/collective.h"

#include <stddef.h>
#include <string.h>

static const Collective *const collectives[] = {
    &collective_naive,          &collective_native,       &collective_iallreduce, &collective_ring, &collective_tree,
    &collective_reduce_scatter, &collective_hierarchical, &collective_leader,     &collective_ring_requantise};

const Collective *collective_find(const char *name) {
    for (size_t i = 0; i < sizeof collectives / sizeof *collectives; i++)
        if (strcmp(collectives[i]->name, name) == 0)
            return collectives[i];
    return NULL;
}

int64_t chunk_start(int64_t offset, int64_t elems, int parts, int i) {
    int64_t before = offset % CHUNK_ALIGN_ELEMS; /* of the first block, outside */
    int64_t blocks = (before + elems + CHUNK_ALIGN_ELEMS - 1) / CHUNK_ALIGN_ELEMS;
    int64_t start = blocks * i / parts * CHUNK_ALIGN_ELEMS - before;
    return start < 0 ? 0 : start < elems ? start : elems;
}
