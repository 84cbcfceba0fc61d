/* Byte-pair encoding of one piece.
 *
 * The piece starts as a list of its bytes' tokens. The pair of neighbours whose joined bytes have the lowest id is
 * replaced by that token, the leftmost such pair first, until no pair joins to a token:
 *
 *     l o w e r      pairs: lo 5439, ow 322, we 732, er 263     -> er
 *     l o w er       lo 5439, ow 322, wer 15448                 -> ow
 *     l ow er        low 9319, ower 789                         -> ower
 *     l ower         lower 21037                                -> lower
 *
 * Tokens are nodes of a doubly linked list, a node sitting where its first byte is; candidate pairs are in a heap
 * ordered by (id, place). Entries are never removed from it: one is stale when its node is gone, or when node and
 * neighbour no longer add up to the token's size (they start at the same byte, so the same size means the same bytes).
 * Each merge adds at most two entries, so the heap stays below 2 * size and time is O(size log size) for any text. */
#include "data/bpe.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_BYTES = 1024, TOKENIZER_MAGIC = 20240328, TOKENIZER_VERSION = 2 };
enum { BYTE_VALUES = 256, TOKENS_MAX = 1 << 24 };

typedef struct BpeNode {
    uint32_t previous, next; /* places of the neighbours; `size of the piece` and up: none */
    uint32_t size;           /* bytes; 0 once merged into its left neighbour */
    int32_t id;
} BpeNode;

static uint32_t hash_bytes(const uint8_t *bytes, size_t size) {
    uint64_t hash = size;
    for (; size >= 8; bytes += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    uint64_t rest = 0;
    for (size_t i = 0; i < size; i++)
        rest = rest << 8 | bytes[i];
    hash = (hash ^ rest) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(hash >> 32 ^ hash >> 15);
}

/* The slot that holds these bytes, or the free one where they belong. */
static int32_t *find_slot(const Vocabulary *v, const uint8_t *bytes, size_t size) {
    for (uint32_t i = hash_bytes(bytes, size) & v->slot_mask;; i = (i + 1) & v->slot_mask) {
        int32_t id = v->slots[i];
        if (id < 0 || (v->sizes[id] == size && memcmp(v->bytes[id], bytes, size) == 0))
            return &v->slots[i];
    }
}

int vocabulary_find(const Vocabulary *v, const uint8_t *bytes, size_t size) {
    return size > (size_t)v->size_max ? -1 : *find_slot(v, bytes, size);
}

static Status check_header(const FileMap *map, const char *path, int32_t header[4]) {
    if (map->size < HEADER_BYTES)
        return bad_input("%s: expected a tokenizer file with a header of %d bytes, found %zu bytes", path, HEADER_BYTES,
                         map->size);
    memcpy(header, map->bytes, 4 * sizeof *header);
    if (header[0] != TOKENIZER_MAGIC)
        return bad_input("%s: expected a tokenizer file (magic %d), found magic %d", path, TOKENIZER_MAGIC, header[0]);
    if (header[1] != TOKENIZER_VERSION)
        return bad_input("%s: expected tokenizer version %d, found %d", path, TOKENIZER_VERSION, header[1]);
    if (header[2] <= BYTE_VALUES || header[2] > TOKENS_MAX)
        return bad_input("%s: expected %d to %d tokens, found %d in the header", path, BYTE_VALUES + 1, TOKENS_MAX,
                         header[2]);
    if (header[3] < 0 || header[3] >= header[2])
        return bad_input("%s: expected an end-of-text id in [0, %d), found %d", path, header[2], header[3]);
    return OK;
}

static Status read_tokens(Vocabulary *v, const char *path) {
    size_t at = HEADER_BYTES;
    for (int id = 0; id < v->count; id++) {
        if (at >= v->map.size || v->map.size - at - 1 < v->map.bytes[at])
            return bad_input("%s: expected %d tokens, found %d in its %zu bytes: truncated", path, v->count, id,
                             v->map.size);
        v->sizes[id] = v->map.bytes[at];
        v->bytes[id] = v->map.bytes + at + 1;
        if (v->sizes[id] == 0)
            return bad_input("%s: expected at least one byte per token, found none in token %d", path, id);
        at += 1 + (size_t)v->sizes[id];
    }
    if (at != v->map.size)
        return bad_input("%s: expected %zu bytes for %d tokens, found %zu", path, at, v->count, v->map.size);
    return OK;
}

/* Where bytes occur twice, the lower id counts. */
static void fill_slots(Vocabulary *v) {
    memset(v->slots, 0xFF, ((size_t)v->slot_mask + 1) * sizeof *v->slots);
    for (int id = 0; id < v->count; id++) {
        if (id == v->end_of_text)
            continue;
        int32_t *slot = find_slot(v, v->bytes[id], v->sizes[id]);
        if (*slot < 0)
            *slot = id;
        v->size_max = v->sizes[id] > v->size_max ? v->sizes[id] : v->size_max;
    }
}

static Status check_bytes(const Vocabulary *v, const char *path) {
    for (int value = 0; value < BYTE_VALUES; value++) {
        uint8_t byte = (uint8_t)value;
        if (vocabulary_find(v, &byte, 1) < 0)
            return bad_input("%s: expected a token for every byte, found none for byte %d", path, value);
    }
    return OK;
}

static Status load(Vocabulary *v, const char *path) {
    int32_t header[4];
    TRY(file_map(&v->map, path));
    TRY(check_header(&v->map, path, header));
    v->count = header[2];
    v->end_of_text = header[3];
    v->slot_mask = 1;
    while (v->slot_mask < 4 * (uint32_t)v->count) /* at most a quarter full */
        v->slot_mask = 2 * v->slot_mask + 1;
    v->bytes = malloc((size_t)v->count * sizeof *v->bytes);
    v->sizes = malloc((size_t)v->count);
    v->slots = malloc(((size_t)v->slot_mask + 1) * sizeof *v->slots);
    if (!v->bytes || !v->sizes || !v->slots)
        return fault("%s: out of memory for %d tokens", path, v->count);
    TRY(read_tokens(v, path));
    fill_slots(v);
    return check_bytes(v, path);
}

Status vocabulary_open(Vocabulary *v, const char *path) {
    *v = (Vocabulary){0};
    Status status = load(v, path);
    if (status != OK)
        vocabulary_close(v);
    return status;
}

void vocabulary_close(Vocabulary *v) {
    file_unmap(&v->map);
    free(v->bytes);
    free(v->sizes);
    free(v->slots);
    *v = (Vocabulary){0};
}

void bpe_scratch_free(BpeScratch *scratch) {
    free(scratch->nodes);
    free(scratch->heap);
    *scratch = (BpeScratch){0};
}

static void reserve(BpeScratch *scratch, size_t size) {
    if (size <= scratch->capacity)
        return;
    bpe_scratch_free(scratch);
    scratch->capacity = size < 256 ? 256 : size + size / 2;
    scratch->nodes = malloc(scratch->capacity * sizeof *scratch->nodes);
    scratch->heap = malloc(2 * scratch->capacity * sizeof *scratch->heap);
    assert(scratch->nodes && scratch->heap);
}

static void heap_push(BpeScratch *scratch, uint64_t entry) {
    size_t i = scratch->heap_count++;
    assert(scratch->heap_count <= 2 * scratch->capacity);
    for (; i > 0 && scratch->heap[(i - 1) / 2] > entry; i = (i - 1) / 2)
        scratch->heap[i] = scratch->heap[(i - 1) / 2];
    scratch->heap[i] = entry;
}

static uint64_t heap_pop(BpeScratch *scratch) {
    uint64_t *heap = scratch->heap, lowest = heap[0], last = heap[--scratch->heap_count];
    size_t i = 0;
    for (size_t child = 1; child < scratch->heap_count; child = 2 * i + 1) {
        if (child + 1 < scratch->heap_count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= last)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return lowest;
}

/* Enters the pair of the node at `place` and its right neighbour, if they join to a token. */
static void push_pair(const Vocabulary *v, BpeScratch *scratch, const uint8_t *piece, size_t size, uint32_t place) {
    const BpeNode *node = &scratch->nodes[place];
    if (node->next >= size)
        return;
    int id = vocabulary_find(v, piece + place, (size_t)node->size + scratch->nodes[node->next].size);
    if (id >= 0)
        heap_push(scratch, (uint64_t)id << 32 | place);
}

/* Joins the node at `place` with its right neighbour to token `id`. */
static void merge(BpeNode *nodes, size_t size, uint32_t place, int32_t id) {
    BpeNode *left = &nodes[place], *right = &nodes[left->next];
    left->size += right->size;
    left->id = id;
    left->next = right->next;
    right->size = 0;
    if (left->next < size)
        nodes[left->next].previous = place;
}

size_t bpe_encode(const Vocabulary *v, BpeScratch *scratch, const uint8_t *piece, size_t size, int32_t *ids) {
    reserve(scratch, size);
    BpeNode *nodes = scratch->nodes;
    const uint32_t none = UINT32_MAX;
    for (uint32_t i = 0; i < size; i++)
        nodes[i] = (BpeNode){i ? i - 1 : none, i + 1, 1, vocabulary_find(v, piece + i, 1)};
    scratch->heap_count = 0;
    for (uint32_t i = 0; i + 1 < size; i++)
        push_pair(v, scratch, piece, size, i);
    while (scratch->heap_count) {
        uint64_t entry = heap_pop(scratch);
        int32_t id = (int32_t)(entry >> 32);
        uint32_t place = (uint32_t)entry;
        BpeNode *node = &nodes[place];
        bool fresh = node->size && node->next < size && node->size + nodes[node->next].size == v->sizes[id];
        if (!fresh)
            continue;
        merge(nodes, size, place, id);
        push_pair(v, scratch, piece, size, place);
        if (node->previous != none)
            push_pair(v, scratch, piece, size, node->previous);
    }
    size_t count = 0;
    for (uint32_t i = 0; i < size; i = nodes[i].next)
        ids[count++] = nodes[i].id;
    return count;
}
