/* Cases for comm that run alike on ranks that are threads (test_comm.c) and on processes (test_comm_mpi.c). A case is a
 * RankMain: what it finds wrong it returns as FAULT with a line, because a test framework's assertions cannot leave
 * another thread. */
#ifndef TESTS_COMM_CASES_H
#define TESTS_COMM_CASES_H

#include "base/random.h"
#include "comm/internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPECT(condition)                                                       \
    do {                                                                        \
        if (!(condition))                                                       \
            return fault("%s:%d: expected %s", __FILE__, __LINE__, #condition); \
    } while (0)

static const char *const case_collectives[] = {"naive", "native", "ring"};
enum { CASE_COLLECTIVES = 3, CASE_GUARD = 8, CASE_MILLION = 1000003 };

/* Buffers are filled with 0xFF, a NaN, wherever nobody wrote yet. */
static inline float *case_floats(int64_t elems) {
    size_t bytes = (size_t)(elems + CASE_GUARD) * sizeof(float);
    return memset(malloc(bytes), 0xFF, bytes);
}

static inline bool case_guard_intact(const float *data, int64_t elems) {
    const unsigned char *guard = (const unsigned char *)(data + elems);
    for (size_t i = 0; i < CASE_GUARD * sizeof(float); i++)
        if (guard[i] != 0xFF)
            return false;
    return true;
}

static inline void case_delay(int rank, uint64_t seed) {
    struct timespec pause = {0, (long)(random_bits(seed, (uint64_t)rank, 0) % 300000)};
    nanosleep(&pause, NULL);
}

/* Small integers, so that any order of adding gives the same, exact sum. */
static inline int case_integer(int rank, int64_t i) {
    return (int)((((uint64_t)i * 64 + (uint64_t)rank + 1) * 0x9e3779b97f4a7c15u >> 40) % 2001) - 1000;
}

static inline Status case_allreduce(const Group *group, const Collective *collective, float *data, int64_t elems,
                                    float scale) {
    int64_t scratch_elems = collective->scratch_elems(group->size, elems);
    float *scratch = case_floats(scratch_elems);
    Status status = collective->allreduce(group, data, elems, scale, scratch);
    bool intact = case_guard_intact(data, elems) && case_guard_intact(scratch, scratch_elems);
    free(scratch);
    return status == OK && !intact ? fault("%s wrote behind its arrays", collective->name) : status;
}

static inline Status case_exact_size(const Group *group, const Collective *collective, int64_t elems, float scale) {
    float *data = case_floats(elems);
    int64_t wrong = 0;
    for (int64_t i = 0; i < elems; i++)
        data[i] = (float)case_integer(group->members[group->self], i);
    Status status = case_allreduce(group, collective, data, elems, scale);
    for (int64_t i = 0; i < elems; i++) {
        int sum = 0;
        for (int member = 0; member < group->size; member++)
            sum += case_integer(group->members[member], i);
        wrong += !(data[i] == scale * (float)sum);
    }
    free(data);
    if (status == OK && wrong)
        return fault("%s: %lld of %lld sums are wrong (%d members, scale %g)", collective->name, (long long)wrong,
                     (long long)elems, group->size, (double)scale);
    return status;
}

static inline Status case_exact_sizes(const Group *group, const Collective *collective) {
    const int64_t n = group->size, sizes[] = {0,    1,    n - 1, n,     n + 1,        31,           997,
                                              4095, 4096, 4097,  65537, 4096 * n - 1, 4096 * n + 1, 300007};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        TRY(case_exact_size(group, collective, sizes[i], i % 2 ? 1.0f : 0.25f));
    return case_exact_size(group, collective, CASE_MILLION, 0.5f);
}

/* Every collective that this transport has gives exact sums, in a group of all ranks. */
static inline Status case_exact(Comm *comm, void *user) {
    (void)user;
    for (int i = 0; i < CASE_COLLECTIVES; i++) {
        const Collective *collective = collective_find(case_collectives[i]);
        EXPECT(collective);
        if (!collective->check || collective->check(&comm->world) == OK)
            TRY(case_exact_sizes(&comm->world, collective));
    }
    return OK;
}

/* Two groups, unequal and out of order, at the same time. */
static inline Status case_subgroups(Comm *comm, void *user) {
    (void)user;
    static const int first[] = {2, 0}, second[] = {3, 1, 4};
    int rank = comm_rank(comm);
    if (comm_ranks(comm) != 5)
        return OK;
    static const int place[] = {1, 1, 0, 0, 2}; /* of each rank in its group */
    Group group = rank % 2 == 0 && rank < 4 ? (Group){comm->transport, first, 2, place[rank]}
                                            : (Group){comm->transport, second, 3, place[rank]};
    TRY(case_exact_sizes(&group, &collective_ring));
    return case_exact_sizes(&group, &collective_naive);
}

enum { CASE_RANDOM_ELEMS = 40961 };

static inline void case_fill_random(float *data, int rank) {
    for (int64_t i = 0; i < CASE_RANDOM_ELEMS; i++)
        data[i] = (float)random_normal(11, (uint64_t)rank, (uint64_t)i);
}

/* Values whose sum depends on the order: still the same bits on every rank and in every run, whatever the timing, and
 * near the sum in f64. */
static inline Status case_random_one(Comm *comm, const Collective *collective) {
    float *data = case_floats(CASE_RANDOM_ELEMS), *again = case_floats(CASE_RANDOM_ELEMS);
    int ranks = comm_ranks(comm);
    float scale = 1.0f / (float)ranks;
    case_fill_random(data, comm_rank(comm));
    case_fill_random(again, comm_rank(comm));
    TRY(case_allreduce(&comm->world, collective, data, CASE_RANDOM_ELEMS, scale));
    case_delay(comm_rank(comm), 1);
    TRY(case_allreduce(&comm->world, collective, again, CASE_RANDOM_ELEMS, scale));
    EXPECT(memcmp(data, again, CASE_RANDOM_ELEMS * sizeof(float)) == 0);
    TRY(comm_verify(comm, data, CASE_RANDOM_ELEMS * sizeof(float), collective->name));
    for (int64_t i = 0; i < CASE_RANDOM_ELEMS; i++) {
        double sum = 0, magnitude = 0;
        for (int rank = 0; rank < ranks; rank++) {
            double value = (float)random_normal(11, (uint64_t)rank, (uint64_t)i);
            sum += value;
            magnitude += value < 0 ? -value : value;
        }
        double difference = data[i] - sum / ranks; /* each of 2N operations rounds by at most 2^-24 of what it holds */
        EXPECT(difference <= 2 * magnitude * 0x1p-24 && difference >= -2 * magnitude * 0x1p-24);
    }
    free(data);
    free(again);
    return OK;
}

static inline Status case_random(Comm *comm, void *user) {
    (void)user;
    for (int i = 0; i < CASE_COLLECTIVES; i++) {
        const Collective *collective = collective_find(case_collectives[i]);
        if (!collective->check || collective->check(&comm->world) == OK)
            TRY(case_random_one(comm, collective));
    }
    return OK;
}

/* Messages of many sizes between one pair keep their order, which even and odd ranks cut into groups differently. */
static inline Status case_messages_once(Comm *comm) {
    enum { MESSAGES = 8 };
    const size_t sizes[MESSAGES] = {0, 1, 70000, 0, 9000001, 3, 65536, 0};
    int rank = comm_rank(comm), ranks = comm_ranks(comm);
    int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
    unsigned char *out[MESSAGES], *in[MESSAGES];
    for (int i = 0; i < MESSAGES; i++) {
        out[i] = malloc(sizes[i] + 1);
        in[i] = malloc(sizes[i] + 1);
        memset(out[i], 16 * rank + i, sizes[i] + 1);
        memset(in[i], 0xFF, sizes[i] + 1);
    }
    const int bounds[] = {0, rank % 2 ? 5 : 3, MESSAGES};
    for (int group = 0; group < 2; group++) {
        transport_group_begin(comm->transport);
        for (int i = bounds[group]; i < bounds[group + 1]; i++) {
            transport_send(comm->transport, next, out[i], sizes[i]);
            transport_recv(comm->transport, before, in[i], sizes[i]);
        }
        TRY(transport_group_end(comm->transport));
    }
    for (int i = 0; i < MESSAGES; i++) {
        for (size_t at = 0; at < sizes[i]; at++)
            EXPECT(in[i][at] == 16 * before + i);
        EXPECT(in[i][sizes[i]] == 0xFF);
        free(out[i]);
        free(in[i]);
    }
    return OK;
}

/* On one node, and as if every rank had a node of its own, where transports may cut messages otherwise. */
static inline Status case_messages(Comm *comm, void *user) {
    (void)user;
    if (comm_ranks(comm) == 1)
        return OK;
    TRY(case_messages_once(comm));
    for (int rank = 0; rank < comm_ranks(comm); rank++)
        comm->transport->node[rank] = rank;
    TRY(case_messages_once(comm));
    for (int rank = 0; rank < comm_ranks(comm); rank++)
        comm->transport->node[rank] = 0;
    return OK;
}

static inline Status case_scalars(Comm *comm, void *user) {
    (void)user;
    enum { COUNT = 2 * COMM_REDUCE_COUNT + 3 };
    int rank = comm_rank(comm), ranks = comm_ranks(comm), all[64];
    double values[COUNT], expected = 0;
    for (int i = 0; i < COUNT; i++)
        values[i] = 0.1 * (rank + 1) + i;
    TRY(comm_reduce(comm, values, COUNT, COMM_SUM));
    for (int r = 0; r < ranks; r++)
        expected = r ? expected + (0.1 * (r + 1) + (COUNT - 1)) : 0.1 + (COUNT - 1);
    EXPECT(values[COUNT - 1] == expected); /* same order, same bits */
    double worst[2] = {-rank, rank == ranks / 2 ? NAN : 1};
    TRY(comm_reduce(comm, worst, 2, COMM_MAX));
    EXPECT(worst[0] == 0 && worst[1] != worst[1]);
    TRY(comm_gather(comm, &rank, all, sizeof rank));
    for (int r = 0; r < ranks; r++)
        EXPECT(all[r] == r);
    for (int root = 0; root < ranks; root++) {
        int64_t word = rank == root ? 1000 + root : -1;
        TRY(comm_broadcast(comm, &word, sizeof word, root));
        EXPECT(word == 1000 + root);
    }
    return comm_barrier(comm);
}

/* One flipped bit, anywhere, on one rank: every rank learns which one. */
static inline Status case_verify(Comm *comm, void *user) {
    (void)user;
    enum { BYTES = 1003 };
    unsigned char data[BYTES];
    char named[64];
    memset(data, 0x5A, sizeof data);
    TRY(comm_verify(comm, data, sizeof data, "parameters"));
    if (comm_ranks(comm) < 3)
        return OK;
    int guilty = comm_ranks(comm) - 1;
    snprintf(named, sizeof named, "parameters: rank %d holds", guilty);
    for (int at = BYTES - 1; at >= 0; at -= 59) {
        unsigned char bit = (unsigned char)(1 << at % 8);
        data[at] ^= comm_rank(comm) == guilty ? bit : 0;
        EXPECT(comm_verify(comm, data, sizeof data, "parameters") == FAULT);
        EXPECT(strncmp(error_line(), named, strlen(named)) == 0);
        data[at] ^= comm_rank(comm) == guilty ? bit : 0;
    }
    comm->outcome_shared = false; /* those failures were ours to handle */
    return OK;
}

static inline Status case_agree(Comm *comm, void *user) {
    (void)user;
    int rank = comm_rank(comm), ranks = comm_ranks(comm);
    TRY(comm_agree(comm, OK));
    if (ranks < 3)
        return OK;
    Status mine = rank == 0 ? OK : rank == 1 ? bad_input("no data in DIR") : fault("disk full on %d", rank);
    EXPECT(comm_agree(comm, mine) == BAD_INPUT);
    EXPECT(strcmp(error_line(), "no data in DIR") == 0);
    EXPECT(comm_agree(comm, rank == 2 ? fault("disk full") : OK) == FAULT);
    EXPECT(strcmp(error_line(), "rank 2: disk full") == 0);
    comm->outcome_shared = false;
    return OK;
}

/* ---- gradient synchronisation ---- */

static inline void case_table(ParamTable *table) {
    *table = (ParamTable){0};
    param_add(table, "lnfw", -1, 1, 40);
    param_add(table, "lnfb", -1, 1, 40);
    param_add(table, "fcw", 0, 160, 40);
    param_add(table, "fcb", 0, 1, 160);
    param_add(table, "wte", -1, 211, 40);
}

/* Several steps, marked in a different order on each rank and step. Integers below 2^24 / ranks, and ranks a power of
 * two or not: the mean is within one rounding per rank. */
static inline Status case_sync_steps(Comm *comm, Sync *sync, const ParamTable *table, float *grads) {
    int rank = comm_rank(comm), ranks = comm_ranks(comm);
    for (int step = 0; step < 4; step++) {
        for (int64_t i = 0; i < table->elems; i++)
            grads[i] = (float)case_integer(rank, i + 100000 * step);
        case_delay(rank, 100 + (uint64_t)step);
        for (int i = 0; i < table->gradient_count; i++)
            sync_mark_ready(sync, (i + rank + step) % table->gradient_count);
        TRY(sync_wait(sync));
        TRY(comm_verify(comm, grads, (size_t)table->elems * sizeof(float), "gradients"));
        for (int64_t i = 0; i < table->elems; i++) {
            double sum = 0;
            for (int r = 0; r < ranks; r++)
                sum += case_integer(r, i + 100000 * step);
            EXPECT(fabs(grads[i] - sum / ranks) <= 1000 * ranks * 0x1p-23);
        }
        SyncStats stats = sync_stats(sync);
        EXPECT(ranks == 1 ? stats.bytes_intra == 0 && stats.comm_ms == 0 : stats.comm_ms > 0);
        EXPECT(stats.comm_exposed_ms == stats.comm_ms && stats.bytes_inter == 0);
    }
    return OK;
}

static inline Status case_sync(Comm *comm, void *user) {
    CommConfig config = *(const CommConfig *)user;
    ParamTable table;
    Sync *sync;
    case_table(&table);
    float *grads = memory_alloc(comm_memory(comm), (size_t)table.elems * sizeof(float));
    Status status = sync_create(&sync, comm, &config, &table, grads);
    if (status == OK)
        status = case_sync_steps(comm, sync, &table, grads);
    sync_destroy(sync);
    memory_free(comm_memory(comm), grads);
    param_table_free(&table);
    return status;
}

#endif
