/* The file, in 8-byte words, little-endian:
 *
 *     | magic, version, count | count x {name, bytes} | sum |  array 0, padded | sum |  array 1, padded | sum | ...
 *
 * Sizes come first, so that a truncated file is refused when it is opened and no size is trusted that the file cannot
 * hold. Each array carries its own checksum, so that reading checks in one pass what is read and only that. */
#include "base/state.h"

#include "base/file.h"
#include "base/input.h"
#include "base/random.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char MAGIC[8] = "tandemst";
enum { VERSION = 1, WORD = 8 };

typedef struct Head {
    char magic[8];
    uint32_t version;
    uint32_t count;
} Head;

typedef struct Entry {
    char name[STATE_NAME]; /* zero-padded */
    uint64_t bytes;
} Entry;

struct State {
    InputFile input;
    Head head;
    Entry *entries; /* [head.count] */
};

static uint64_t padding(uint64_t bytes) { return (WORD - bytes % WORD) % WORD; }

/* Continues the sum over the words of data, the last one filled up with zeros. Each word enters by a bijection, so no
 * single damaged word goes unseen. */
static uint64_t checksum(uint64_t sum, const void *data, size_t bytes) {
    const char *from = data;
    for (size_t at = 0; at < bytes; at += WORD) {
        uint64_t word = 0;
        if (bytes - at >= WORD)
            memcpy(&word, from + at, WORD);
        else
            memcpy(&word, from + at, bytes - at);
        sum ^= word;
        sum = (sum << 27 | sum >> 37) * 0x9e3779b97f4a7c15u;
    }
    return sum;
}

/* Of the list of arrays, and of one array. */
static uint64_t head_checksum(const Head *head, const Entry *entries) {
    uint64_t sum = checksum(0, head, sizeof *head);
    return random_mix(checksum(sum, entries, head->count * sizeof *entries));
}
uint64_t state_checksum(const void *data, size_t bytes) { return random_mix(checksum(0, data, bytes)); }

static void write_array(FILE *out, const StateItem *item) {
    static const char zeros[WORD] = {0};
    uint64_t sum = state_checksum(item->data, item->bytes);
    if (item->bytes)
        fwrite(item->data, 1, item->bytes, out);
    fwrite(zeros, 1, padding(item->bytes), out);
    fwrite(&sum, sizeof sum, 1, out);
}

Status state_save(const char *path, const StateItem *items, int count) {
    assert(count >= 0 && count <= STATE_ITEMS_MAX);
    Head head = {.version = VERSION, .count = (uint32_t)count};
    memcpy(head.magic, MAGIC, sizeof head.magic);
    Entry *entries = calloc((size_t)count + 1, sizeof *entries);
    if (!entries)
        return fault("%s: out of memory", path);
    for (int i = 0; i < count; i++) {
        assert(strlen(items[i].name) < STATE_NAME);
        memcpy(entries[i].name, items[i].name, strlen(items[i].name));
        entries[i].bytes = items[i].bytes;
    }
    AtomicFile file;
    Status status = atomic_open(&file, path);
    if (status == OK) {
        uint64_t sum = head_checksum(&head, entries);
        fwrite(&head, sizeof head, 1, file.stream);
        fwrite(entries, sizeof *entries, (size_t)count, file.stream);
        fwrite(&sum, sizeof sum, 1, file.stream);
        for (int i = 0; i < count; i++)
            write_array(file.stream, &items[i]);
        status = atomic_commit(&file);
    }
    free(entries);
    return status;
}

static Status check_head(const State *state) {
    const char *path = state->input.path;
    const Head *head = &state->head;
    if (memcmp(head->magic, MAGIC, sizeof MAGIC) != 0) {
        uint64_t expected, found;
        memcpy(&expected, MAGIC, sizeof expected);
        memcpy(&found, head->magic, sizeof found);
        return bad_input("%s: expected a training state (magic 0x%016" PRIx64 "), found 0x%016" PRIx64, path,
                         expected, found);
    }
    if (head->version != VERSION)
        return bad_input("%s: expected a training state of version %d, found version %" PRIu32, path, VERSION,
                         head->version);
    if (head->count > STATE_ITEMS_MAX)
        return bad_input("%s: expected at most %d arrays, found %" PRIu32, path, STATE_ITEMS_MAX, head->count);
    return OK;
}

static uint64_t list_bytes(const State *state) {
    return sizeof(Head) + state->head.count * sizeof(Entry) + sizeof(uint64_t);
}
static uint64_t array_bytes(const Entry *entry) { return entry->bytes + padding(entry->bytes) + sizeof(uint64_t); }

static Status truncated(const State *state, uint64_t expected) {
    return bad_input("%s: expected %s%" PRIu64 " bytes by its header, found %lld: truncated or damaged",
                     state->input.path, expected > list_bytes(state) ? "" : "at least ", expected,
                     (long long)state->input.size);
}

static Status read_list(State *state) {
    uint64_t size = (uint64_t)state->input.size, sum;
    if (size < sizeof(Head))
        return bad_input("%s: expected a training state, found a file of only %" PRIu64 " bytes", state->input.path,
                         size);
    TRY(input_read(&state->input, &state->head, sizeof(Head)));
    TRY(check_head(state));
    if (list_bytes(state) > size)
        return truncated(state, list_bytes(state));
    state->entries = calloc(state->head.count + 1, sizeof(Entry));
    if (!state->entries)
        return fault("%s: out of memory", state->input.path);
    TRY(input_read(&state->input, state->entries, state->head.count * sizeof(Entry)));
    TRY(input_read(&state->input, &sum, sizeof sum));
    if (sum != head_checksum(&state->head, state->entries))
        return bad_input("%s: checksum of the list of arrays does not match: the file is damaged", state->input.path);
    uint64_t expected = list_bytes(state);
    for (uint32_t i = 0; i < state->head.count; i++)
        expected += array_bytes(&state->entries[i]);
    return expected == size ? OK : truncated(state, expected);
}

Status state_open(State **state, const char *path) {
    *state = calloc(1, sizeof **state);
    if (!*state)
        return fault("%s: out of memory", path);
    Status status = input_open(&(*state)->input, path);
    if (status == OK)
        status = read_list(*state);
    if (status == OK)
        return OK;
    state_close(*state);
    *state = NULL;
    return status;
}

void state_close(State *state) {
    if (!state)
        return;
    input_close(&state->input);
    free(state->entries);
    free(state);
}

/* The number of arrays when there is none of that name. */
static uint32_t find_entry(const State *state, const char *name) {
    uint32_t i = 0;
    while (i < state->head.count && strncmp(state->entries[i].name, name, STATE_NAME) != 0)
        i++;
    return i;
}

bool state_has(const State *state, const char *name) { return find_entry(state, name) < state->head.count; }

Status state_read(State *state, const char *name, void *data, size_t bytes) {
    const char *path = state->input.path;
    uint64_t offset = list_bytes(state), sum;
    uint32_t i = find_entry(state, name);
    for (uint32_t before = 0; before < i; before++)
        offset += array_bytes(&state->entries[before]);
    if (i == state->head.count)
        return bad_input("%s: expected an array '%s', found none of that name", path, name);
    if (state->entries[i].bytes != bytes)
        return bad_input("%s: '%s': expected %zu bytes, found %" PRIu64, path, name, bytes, state->entries[i].bytes);
    uint64_t pad = 0;
    TRY(input_seek(&state->input, (int64_t)offset));
    TRY(input_read(&state->input, data, bytes));
    TRY(input_read(&state->input, &pad, padding(bytes)));
    TRY(input_read(&state->input, &sum, sizeof sum));
    if (pad != 0 || sum != state_checksum(data, bytes))
        return bad_input("%s: '%s': checksum does not match: the file is damaged", path, name);
    return OK;
}
