/* Cases for comm that run alike on ranks that are threads (test_comm.c) and on processes (test_comm_mpi.c). A case is a
 * RankMain: what it finds wrong it returns as FAULT with a line, because a test framework's assertions cannot leave
 * another thread. */
#ifndef TESTS_COMM_CASES_H
#define TESTS_COMM_CASES_H

#include "comm/internal.h"
#include "tests/collective_cases.h"
#include "tests/with_sync.h"

#include <stdio.h>

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
    EXPECT(strcmp(error_line(), "rank 1: no data in DIR") == 0);
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

/* Several steps, marked in a different order on each rank and step. Small integers, and ranks a power of two or not:
 * the mean is within one rounding per rank. */
static inline Status case_sync_steps(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    (void)user;
    int rank = comm_rank(comm), ranks = comm_ranks(comm);
    for (int step = 0; step < 4; step++) {
        for (int64_t i = 0; i < table->elems; i++)
            grads[i] = case_integer(rank, i + 100000 * step);
        sync_begin(sync);
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
        EXPECT(stats.comm_exposed_ms >= 0 && stats.bytes_inter == 0);
    }
    return OK;
}

static inline Status case_sync(Comm *comm, void *user) {
    ParamTable table;
    case_table(&table);
    return with_sync(comm, user, &table, case_sync_steps, NULL);
}

#endif
