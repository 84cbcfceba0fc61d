#include "comm/lookup.h"

#include "comm/transport/vector.h"

#include <stdlib.h>
#include <string.h>

enum { WORD_BITS = 64 };

static Status take_shard(Lookup *lookup, const Shard *shard) {
    if (!shard)
        return OK;
    size_t bytes = (size_t)shard->count * sizeof *lookup->slices;
    lookup->slices = memory_alloc(lookup->memory, bytes);
    if (!lookup->slices)
        return fault("no memory for a shard of %d slices", shard->count);
    vector_bring(lookup->transport, lookup->slices, shard->slices, bytes);
    lookup->shard = (Shard){lookup->slices, shard->count};
    return OK;
}

Status lookup_create(Lookup *lookup, Comm *comm, const SyncSetup *setup, const Shard *shard) {
    int vocab = setup->vocab, ranks = comm_ranks(comm);
    int64_t rows_max = ranks * setup->tokens < vocab / 2 ? ranks * setup->tokens : vocab / 2;
    size_t words = ((size_t)vocab + WORD_BITS - 1) / WORD_BITS;
    *lookup = (Lookup){.vocab = vocab,
                       .channels = setup->channels,
                       .rows_max = rows_max,
                       .words = words,
                       .mine = calloc(words, sizeof(uint64_t)),
                       .all = calloc(words * (size_t)ranks, sizeof(uint64_t)),
                       .offset = setup->table->gradients[0].offset,
                       .transport = comm->world.transport,
                       .memory = comm->scratch_memory,
                       .row_memory = comm_on_gpu(comm) ? comm->scratch_memory : comm_memory(comm),
                       .slot_of_token = calloc((size_t)vocab, sizeof(int)),
                       .tokens = calloc((size_t)rows_max + 1, sizeof(int))};
    lookup->rows = memory_alloc(lookup->row_memory, ((size_t)rows_max * (size_t)setup->channels + 1) * sizeof(float));
    lookup->places = memory_alloc(lookup->memory, ((size_t)rows_max + 1) * sizeof(int));
    if (!lookup->mine || !lookup->all || !lookup->slot_of_token || !lookup->tokens || !lookup->rows || !lookup->places)
        return fault("no memory for %lld rows of the embedding", (long long)rows_max);
    return take_shard(lookup, shard);
}

void lookup_destroy(Lookup *lookup) {
    free(lookup->mine);
    free(lookup->all);
    free(lookup->slot_of_token);
    free(lookup->tokens);
    if (lookup->rows)
        memory_free(lookup->row_memory, lookup->rows);
    if (lookup->places)
        memory_free(lookup->memory, lookup->places);
    if (lookup->slices)
        memory_free(lookup->memory, lookup->slices);
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

Status lookup_exchange(Lookup *lookup, const Comm *comm) {
    TRY(transport_all_gather(comm->transport, lookup->mine, lookup->all, lookup->words * sizeof *lookup->mine));
    int64_t count = 0;
    for (int token = 0; token < lookup->vocab; token++) {
        lookup->slot_of_token[token] = -1;
        if (!anybody_has(lookup, comm_ranks(comm), token))
            continue;
        if (count < lookup->rows_max) {
            lookup->tokens[count] = token;
            lookup->slot_of_token[token] = (int)count;
        }
        count++;
    }
    lookup->count = count <= lookup->rows_max ? count : 0;
    vector_bring(lookup->transport, lookup->places, lookup->tokens, (size_t)lookup->count * sizeof *lookup->places);
    return OK;
}

static MatrixRows rows_of(const Lookup *lookup) {
    return (MatrixRows){lookup->places, lookup->count, lookup->offset, lookup->channels};
}

void lookup_add(const Lookup *lookup, float *grad) {
    MatrixRows rows = rows_of(lookup);
    vector_add_rows(lookup->transport, &rows, grad, lookup->rows);
}

void lookup_take(Lookup *lookup, const float *matrix) {
    MatrixRows rows = rows_of(lookup);
    vector_take_rows(lookup->transport, &rows, matrix, &lookup->shard, lookup->rows);
}

void lookup_put(const Lookup *lookup, float *matrix) {
    MatrixRows rows = rows_of(lookup);
    vector_put_rows(lookup->transport, &rows, matrix, lookup->rows);
}
