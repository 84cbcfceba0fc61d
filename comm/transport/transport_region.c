/* transport_share: memory that the ranks of a node reach directly.
 *
 *   threads     own memory from the process's heap; peers are told its address
 *   processes   own memory in a file without a name (memfd), which has no place in /dev/shm and goes with its last
 *               user, however that one ends; peers are told process and descriptor, and map /proc/PID/fd/N
 *
 *     each rank   allocates | cards to its node | maps the others' | "all mapped" to its node | closes its file
 *
 * The rank that owns a page touches it first, so that it lies near the rank's cores; peers then map all pages at once
 * instead of one fault each. Large regions become huge pages where the system can (Linux 6.1: by MADV_COLLAPSE,
 * whatever its setting for shared memory): adding what a peer holds then runs 1.4 times as fast. Where one rank of a
 * node cannot share, none of them reaches another's memory. */
#define _GNU_SOURCE
#include "base/memory.h"
#include "comm/transport/transport.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* How peers reach a region. */
typedef struct Card {
    uint64_t can_share;
    uint64_t address;         /* threads */
    uint64_t process, file;   /* processes: /proc/PID/fd/N, */
    uint64_t device, inode;   /* and which file must be there, since process numbers are a container's own */
} Card;

/* ---- mapping ---- */

enum { HUGE_PAGE = 2 << 20 };
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* as the kernel has it; C libraries before 2023 do not know it */
#endif

static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

static size_t round_to_pages(size_t bytes) {
    size_t page = bytes >= HUGE_PAGE ? HUGE_PAGE : (size_t)sysconf(_SC_PAGESIZE);
    return round_up(bytes > 0 ? bytes : 1, page);
}

static char *map(char *place, size_t bytes, int protection, int flags, int file) {
    void *memory = mmap(place, bytes, protection, flags, file, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Address space that huge pages fit: as much as is needed is cut out of more. */
static char *reserve(size_t bytes) {
    char *all = map(NULL, bytes + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
    if (!all)
        return NULL;
    size_t before = round_up((uintptr_t)all, HUGE_PAGE) - (uintptr_t)all;
    if (before > 0)
        munmap(all, before);
    munmap(all + before + bytes, HUGE_PAGE - before);
    return all + before;
}

static char *map_aligned(size_t bytes, int flags, int file) {
    if (bytes < HUGE_PAGE)
        return map(NULL, bytes, PROT_READ | PROT_WRITE, flags, file);
    char *place = reserve(bytes), *memory = NULL;
    if (place)
        memory = map(place, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file);
    if (place && !memory)
        munmap(place, bytes);
    return memory;
}

static char *map_private(size_t bytes) {
    char *memory = map_aligned(bytes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (memory)
        madvise(memory, bytes, MADV_HUGEPAGE); /* advice only, like the others */
    return memory;
}

/* ---- files without a name ---- */

static void touch_pages(char *memory, size_t bytes) {
    madvise(memory, bytes, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
    if (madvise(memory, bytes, MADV_POPULATE_WRITE) != 0)
#endif
        memset(memory, 0, bytes);
    if (bytes >= HUGE_PAGE)
        madvise(memory, bytes, MADV_COLLAPSE);
}

/* Own memory and the card for it; *file stays open until the peers have mapped it. */
static char *offer_file(size_t bytes, Card *card, int *file) {
    struct stat identity;
    *file = memfd_create("tandem", MFD_CLOEXEC);
    if (*file < 0 || ftruncate(*file, (off_t)bytes) != 0 || fstat(*file, &identity) != 0)
        return NULL;
    char *memory = map_aligned(bytes, MAP_SHARED, *file);
    if (memory)
        touch_pages(memory, bytes);
    *card = (Card){.can_share = memory != NULL,
                   .process = (uint64_t)getpid(),
                   .file = (uint64_t)*file,
                   .device = (uint64_t)identity.st_dev,
                   .inode = (uint64_t)identity.st_ino};
    return memory;
}

static char *map_peer(const Card *card, size_t bytes) {
    char path[64];
    struct stat identity;
    snprintf(path, sizeof path, "/proc/%lld/fd/%lld", (long long)card->process, (long long)card->file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return NULL;
    bool same = fstat(file, &identity) == 0 && (uint64_t)identity.st_dev == card->device &&
                (uint64_t)identity.st_ino == card->inode && identity.st_size >= (off_t)bytes;
    char *memory = same ? map_aligned(bytes, MAP_SHARED | MAP_POPULATE, file) : NULL;
    close(file);
    return memory;
}

/* ---- between the ranks of a node ---- */

static bool is_neighbour(const Transport *transport, int rank) {
    return rank != transport->rank && transport->node[rank] == transport->node[transport->rank];
}

/* all u8[ranks][bytes]: what each rank of the node holds in its own place, on all of them. */
static Status exchange_in_node(Transport *transport, void *all, size_t bytes) {
    char *places = all;
    MessageLabel label = transport->label;
    transport->label = (MessageLabel){0};
    transport_group_begin(transport);
    for (int rank = 0; rank < transport->ranks; rank++)
        if (is_neighbour(transport, rank)) {
            transport_send(transport, rank, places + (size_t)transport->rank * bytes, bytes);
            transport_recv(transport, rank, places + (size_t)rank * bytes, bytes);
        }
    transport->label = label;
    return transport_group_end(transport);
}

static bool all_can_share(const Transport *transport, const Card *cards) {
    bool all = cards[transport->rank].can_share;
    for (int rank = 0; rank < transport->ranks; rank++)
        all &= !is_neighbour(transport, rank) || cards[rank].can_share;
    return all;
}

static void forget_peers(const Transport *transport, Region *region) {
    for (int rank = 0; rank < transport->ranks; rank++) {
        if (rank != transport->rank && region->peer[rank] && !transport->ops->one_process)
            munmap(region->peer[rank], region->mapped_bytes);
        region->peer[rank] = rank == transport->rank ? region->memory : NULL;
    }
}

/* Whether this rank reaches all of its node. */
static bool reach_peers(const Transport *transport, Region *region, const Card *cards) {
    bool all = all_can_share(transport, cards);
    for (int rank = 0; all && rank < transport->ranks; rank++)
        if (is_neighbour(transport, rank)) {
            region->peer[rank] = transport->ops->one_process ? (char *)(uintptr_t)cards[rank].address
                                                             : map_peer(&cards[rank], region->mapped_bytes);
            all = region->peer[rank] != NULL;
        }
    return all;
}

/* When ranks fail meanwhile, the memory is this rank's alone and the next message finds the failure. */
static void meet_peers(Transport *transport, Region *region, Card *cards) {
    if (exchange_in_node(transport, cards, sizeof *cards) != OK)
        return;
    cards[transport->rank].can_share = reach_peers(transport, region, cards);
    if (exchange_in_node(transport, cards, sizeof *cards) != OK || !all_can_share(transport, cards))
        forget_peers(transport, region);
}

/* ---- regions ---- */

static void create_memory(const Transport *transport, Region *region, Card *card, int *file) {
    if (transport->ops->one_process) {
        region->memory = memory_alloc(&host_memory, region->bytes);
        *card = (Card){.can_share = region->memory != NULL, .address = (uint64_t)(uintptr_t)region->memory};
        return;
    }
    region->memory = offer_file(region->mapped_bytes, card, file);
    if (!region->memory)
        region->memory = map_private(region->mapped_bytes);
}

static void destroy_region(const Transport *transport, Region *region) {
    forget_peers(transport, region);
    if (transport->ops->one_process)
        memory_free(&host_memory, region->memory);
    else if (region->memory)
        munmap(region->memory, region->mapped_bytes);
    free(region->peer);
}

static Region *add_region(Transport *transport, size_t bytes) {
    Region *longer = realloc(transport->regions, (size_t)(transport->region_count + 1) * sizeof *longer);
    char **peer = calloc((size_t)transport->ranks, sizeof *peer);
    if (longer)
        transport->regions = longer;
    if (!longer || !peer) {
        free(peer);
        return NULL;
    }
    Region *region = &transport->regions[transport->region_count++];
    *region = (Region){.bytes = bytes, .mapped_bytes = round_to_pages(bytes), .peer = peer};
    return region;
}

void *transport_share(Transport *transport, size_t bytes) {
    int file = -1;
    Card *cards = calloc((size_t)transport->ranks, sizeof *cards);
    Region *region = cards ? add_region(transport, bytes) : NULL;
    if (!region) {
        free(cards);
        return NULL;
    }
    create_memory(transport, region, &cards[transport->rank], &file);
    region->peer[transport->rank] = region->memory;
    meet_peers(transport, region, cards);
    if (file >= 0)
        close(file);
    free(cards);
    void *memory = region->memory;
    if (!memory) {
        destroy_region(transport, region);
        transport->region_count--;
    }
    return memory;
}

void transport_unshare(Transport *transport, void *memory) {
    if (transport->ops->one_process && transport->failed != OK)
        return;
    for (int i = 0; memory && i < transport->region_count; i++)
        if (transport->regions[i].memory == memory) {
            destroy_region(transport, &transport->regions[i]);
            transport->regions[i] = transport->regions[--transport->region_count];
            return;
        }
}

void *transport_peer_ptr(Transport *transport, const void *mine, int peer) {
    if (transport->node[peer] != transport->node[transport->rank])
        return NULL;
    for (int i = 0; i < transport->region_count; i++) {
        const Region *region = &transport->regions[i];
        uintptr_t offset = (uintptr_t)mine - (uintptr_t)region->memory;
        if (offset < region->bytes)
            return region->peer[peer] ? region->peer[peer] + offset : NULL;
    }
    return NULL;
}
