#include "comm/lookup.h"

#include "comm/transport/vector.h"

#include <stdlib.h>
#include <string.h>

enum { WORD_BITS = 64 };

Status lookup_create(Lookup *lookup, Comm *comm, int vocab, int channels, int64_t tokens) {
    int64_t rows_max = (int64_t)comm_ranks(comm) * tokens;
    rows_max = rows_max < vocab / 2 ? rows_max : vocab / 2;
    size_t words = ((size_t)vocab + WORD_BITS - 1) / WORD_BITS;
    *lookup = (Lookup){.vocab = vocab,
                       .channels = channels,
                       .rows_max = rows_max,
                       .words = words,
                       .mine = calloc(words, sizeof(uint64_t)),
                       .all = calloc(words * (size_t)comm_ranks(comm), sizeof(uint64_t)),
                       .slot_of_token = calloc((size_t)vocab, sizeof(int)),
                       .tokens = calloc((size_t)rows_max + 1, sizeof(int))};
    lookup->rows = memory_alloc(comm_memory(comm), ((size_t)rows_max * (size_t)channels + 1) * sizeof(float));
    if (!lookup->mine || !lookup->all || !lookup->slot_of_token || !lookup->tokens || !lookup->rows)
        return fault("no memory for %lld rows of the embedding", (long long)rows_max);
    return OK;
}

void lookup_destroy(Lookup *lookup, Comm *comm) {
    free(lookup->mine);
    free(lookup->all);
    free(lookup->slot_of_token);
    free(lookup->tokens);
    if (lookup->rows)
        memory_free(comm_memory(comm), lookup->rows);
    *lookup = (Lookup){0};
}

void lookup_mark(Lookup *lookup, const int *tokens, int64_t count) {
    memset(lookup->mine, 0, lookup->words * sizeof *lookup->mine);
    for (int64_t i = 0; i < count; i++)
        lookup->mine[tokens[i] / WORD_BITS] |= (uint64_t)1 << tokens[i] % WORD_BITS;
}

static bool anybody_has(const Lookup *lookup, int ranks, int token) {
    uint64_t word = 0;
    for (int rank = 0; rank < ranks; rank++)
        word |= lookup->all[(size_t)rank * lookup->words + (size_t)(token / WORD_BITS)];
    return word >> token % WORD_BITS & 1;
}

Status lookup_exchange(Lookup *lookup, Transport *transport) {
    TRY(transport_all_gather(transport, lookup->mine, lookup->all, lookup->words * sizeof *lookup->mine));
    int64_t count = 0;
    for (int token = 0; token < lookup->vocab; token++) {
        lookup->slot_of_token[token] = -1;
        if (!anybody_has(lookup, transport->ranks, token))
            continue;
        if (count < lookup->rows_max) {
            lookup->tokens[count] = token;
            lookup->slot_of_token[token] = (int)count;
        }
        count++;
    }
    lookup->count = count <= lookup->rows_max ? count : 0;
    return OK;
}

void lookup_add(const Lookup *lookup, float *grad) {
    for (int64_t i = 0; i < lookup->count; i++)
        vector_host.add(NULL, grad + (int64_t)lookup->tokens[i] * lookup->channels, lookup->rows + i * lookup->channels,
                   lookup->channels);
}

/* The first slice that ends behind `place`. */
static int slice_behind(const Shard *shard, int64_t place) {
    int low = 0, high = shard->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (shard->slices[middle].start + shard->slices[middle].elems <= place)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void take_row(float *row, const float *from, int64_t place, int channels, const Shard *shard) {
    for (int c = 0; c < channels; c++)
        row[c] = -0.0f;
    for (int s = slice_behind(shard, place); s < shard->count && shard->slices[s].start < place + channels; s++) {
        int64_t start = shard->slices[s].start - place, stop = start + shard->slices[s].elems;
        for (int64_t c = start > 0 ? start : 0; c < stop && c < channels; c++)
            row[c] = from[c];
    }
}

void lookup_take(Lookup *lookup, const float *matrix, int64_t offset, const Shard *shard) {
    for (int64_t i = 0; i < lookup->count; i++) {
        int64_t at = (int64_t)lookup->tokens[i] * lookup->channels;
        take_row(lookup->rows + i * lookup->channels, matrix + at, offset + at, lookup->channels, shard);
    }
}

void lookup_put(const Lookup *lookup, float *matrix) {
    for (int64_t i = 0; i < lookup->count; i++)
        memcpy(matrix + (int64_t)lookup->tokens[i] * lookup->channels, lookup->rows + i * lookup->channels,
               (size_t)lookup->channels * sizeof(float));
}
