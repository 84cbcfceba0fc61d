/* Cases for transports that run alike on ranks that are threads (test_transport.c) and on processes
 * (test_transport_mpi.c). What a case finds wrong it returns as FAULT with a line. */
#ifndef TESTS_TRANSPORT_CASES_H
#define TESTS_TRANSPORT_CASES_H

#include "base/random.h"
#include "comm/transport/transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPECT(condition)                                                       \
    do {                                                                        \
        if (!(condition))                                                       \
            return fault("%s:%d: expected %s", __FILE__, __LINE__, #condition); \
    } while (0)

typedef Status TransportCase(Transport *transport, void *user);

/* ---- many groups under way, waited for in any order ---- */

enum { CASE_MESSAGES = 24, CASE_GROUPS = 10 };

/* The k-th message of a pair: sizes around what transports treat differently. */
static inline size_t case_size(int from, int to, int k) {
    static const size_t sizes[] = {0, 1, 4095, 0, 65536, 65537, 17, 300000, 131072, 0, 1000003};
    return sizes[random_bits(1, (uint64_t)(from * 64 + to), (uint64_t)k) % (sizeof sizes / sizeof *sizes)];
}

static inline unsigned char case_byte(int from, int to, int k, size_t i) {
    return (unsigned char)((size_t)(from * 31 + to * 7 + k) + i * 5 + i / 251);
}

/* All messages between this rank and one peer, one way. */
typedef struct CaseStream {
    unsigned char *data[CASE_MESSAGES]; /* a guard byte behind each */
    int next;
} CaseStream;

static inline void case_stream_create(CaseStream *stream, int rank, int peer, bool outgoing) {
    stream->next = 0;
    for (int k = 0; k < CASE_MESSAGES; k++) {
        size_t bytes = outgoing ? case_size(rank, peer, k) : case_size(peer, rank, k);
        stream->data[k] = malloc(bytes + 1);
        memset(stream->data[k], 0xFF, bytes + 1);
        for (size_t i = 0; outgoing && i < bytes; i++)
            stream->data[k][i] = case_byte(rank, peer, k, i);
    }
}

static inline void case_stream_destroy(CaseStream *stream) {
    for (int k = 0; k < CASE_MESSAGES; k++)
        free(stream->data[k]);
}

static inline Status case_stream_check(const CaseStream *stream, int rank, int peer) {
    for (int k = 0; k < CASE_MESSAGES; k++) {
        size_t bytes = case_size(peer, rank, k), wrong = 0;
        for (size_t i = 0; i < bytes; i++)
            wrong += stream->data[k][i] != case_byte(peer, rank, k, i);
        if (wrong > 0 || stream->data[k][bytes] != 0xFF)
            return fault("rank %d: message %d from rank %d: %zu of %zu bytes are wrong", rank, k, peer, wrong, bytes);
    }
    return OK;
}

/* Names a random share of what is left, everything in the last group. Each rank cuts otherwise. */
static inline Ticket case_start_some(Transport *transport, CaseStream *streams, int group) {
    int rank = transport->rank, ranks = transport->ranks;
    transport_group_begin(transport);
    for (int peer = 0; peer < ranks; peer++)
        for (int outgoing = 0; outgoing < 2 && peer != rank; outgoing++) {
            CaseStream *stream = &streams[2 * peer + outgoing];
            uint64_t draw = random_bits(2, (uint64_t)(rank * 64 + peer), (uint64_t)(2 * group + outgoing));
            int count = group == CASE_GROUPS - 1 ? CASE_MESSAGES : (int)(draw % 5);
            for (; count > 0 && stream->next < CASE_MESSAGES; count--, stream->next++) {
                int k = stream->next;
                transport_label(transport, (MessageLabel){.step = 1000 + k, .bucket = k, .compressor = k % 5});
                if (outgoing)
                    transport_send(transport, peer, stream->data[k], case_size(rank, peer, k));
                else
                    transport_recv(transport, peer, stream->data[k], case_size(peer, rank, k));
            }
        }
    return transport_group_start(transport);
}

static inline Status case_wait_shuffled(Transport *transport, Ticket *tickets) {
    for (int left = CASE_GROUPS; left > 0; left--) {
        int chosen = (int)(random_bits(3, (uint64_t)transport->rank, (uint64_t)left) % (uint64_t)left);
        bool complete;
        TRY(transport_group_test(transport, tickets[left - 1], &complete));
        TRY(transport_group_wait(transport, tickets[chosen]));
        TRY(transport_group_test(transport, tickets[chosen], &complete));
        EXPECT(complete);
        TRY(transport_group_wait(transport, tickets[chosen])); /* again is allowed */
        tickets[chosen] = tickets[left - 1];
    }
    return OK;
}

static inline Status case_streams(Transport *transport, void *user) {
    (void)user;
    int rank = transport->rank, ranks = transport->ranks;
    CaseStream *streams = calloc(2 * (size_t)ranks, sizeof *streams);
    Ticket tickets[CASE_GROUPS];
    for (int i = 0; i < 2 * ranks; i++)
        case_stream_create(&streams[i], rank, i / 2, i % 2);
    for (int group = 0; group < CASE_GROUPS; group++)
        tickets[group] = case_start_some(transport, streams, group);
    Status status = case_wait_shuffled(transport, tickets);
    for (int peer = 0; peer < ranks && status == OK; peer++)
        if (peer != rank)
            status = case_stream_check(&streams[2 * peer], rank, peer);
    if (status != OK)
        transport_abandon(transport);
    for (int i = 0; i < 2 * ranks; i++)
        case_stream_destroy(&streams[i]);
    free(streams);
    return status;
}

/* Sends of the later group arrive although nobody has waited for the earlier one; by test alone. */
static inline Status case_polled(Transport *transport, void *user) {
    (void)user;
    int rank = transport->rank, ranks = transport->ranks, out[2] = {rank, rank + 100}, in[2] = {-1, -1};
    Ticket tickets[2];
    for (int group = 0; group < 2 && ranks > 1; group++) {
        transport_group_begin(transport);
        transport_send(transport, (rank + 1) % ranks, &out[group], sizeof(int));
        transport_recv(transport, (rank + ranks - 1) % ranks, &in[group], sizeof(int));
        tickets[group] = transport_group_start(transport);
    }
    for (int group = 1; group >= 0 && ranks > 1; group--)
        for (bool complete = false; !complete;)
            TRY(transport_group_test(transport, tickets[group], &complete));
    EXPECT(ranks == 1 || (in[0] == (rank + ranks - 1) % ranks && in[1] == in[0] + 100));
    return OK;
}

/* Places in the pool are used again, all of them may be taken at a time, and old tickets stay complete. */
static inline Status case_pool(Transport *transport, void *user) {
    (void)user;
    enum { EACH = 30 };
    int rank = transport->rank, ranks = transport->ranks, out[EACH], in[EACH];
    Ticket first = 0, tickets[EACH];
    bool complete = false;
    transport_group_begin(transport);
    EXPECT(transport_group_start(transport) == 0);
    TRY(transport_group_wait(transport, 0));
    TRY(transport_group_test(transport, 0, &complete));
    EXPECT(complete);
    for (int round = 0; round < 20 && ranks > 1; round++) {
        for (int i = 0; i < EACH; i++) {
            out[i] = round * EACH + i;
            in[i] = -1;
            transport_group_begin(transport);
            transport_send(transport, (rank + 1) % ranks, &out[i], sizeof(int));
            transport_recv(transport, (rank + ranks - 1) % ranks, &in[i], sizeof(int));
            tickets[i] = transport_group_start(transport);
            first = first ? first : tickets[i];
            TRY(transport_group_test(transport, first, &complete)); /* though its place is another group's by now */
            EXPECT(complete || round == 0);
        }
        for (int i = EACH - 1; i >= 0; i--)
            TRY(transport_group_wait(transport, tickets[i]));
        for (int i = 0; i < EACH; i++)
            EXPECT(in[i] == round * EACH + i);
        TRY(transport_group_test(transport, first, &complete));
        EXPECT(complete);
    }
    return OK;
}

/* ---- shared memory ---- */

/* Each rank writes into its own memory and, at a place of its own, into everybody's of its node. */
static inline Status case_share_once(Transport *transport, int64_t elems) {
    int rank = transport->rank, ranks = transport->ranks;
    int64_t *mine = transport_share(transport, (size_t)elems * sizeof *mine);
    EXPECT(mine && (uintptr_t)mine % 64 == 0);
    for (int64_t i = 0; i < elems; i++)
        EXPECT(mine[i] == 0);
    EXPECT(transport_peer_ptr(transport, mine, rank) == mine);
    EXPECT(transport_peer_ptr(transport, &rank, rank) == NULL);
    TRY(transport_barrier(transport));
    for (int peer = 0; peer < ranks; peer++) {
        int64_t *theirs = transport_peer_ptr(transport, mine + elems - ranks + rank, peer);
        EXPECT((theirs != NULL) == (transport->node[peer] == transport->node[rank]));
        if (theirs)
            *theirs = 100 * rank + peer + 1;
    }
    TRY(transport_barrier(transport));
    for (int peer = 0; peer < ranks; peer++) {
        bool same = transport->node[peer] == transport->node[rank];
        EXPECT(mine[elems - ranks + peer] == (same ? 100 * peer + rank + 1 : 0));
    }
    TRY(transport_barrier(transport));
    transport_unshare(transport, mine);
    EXPECT(transport_peer_ptr(transport, mine, rank) == NULL);
    return OK;
}

static inline Status case_share(Transport *transport, void *user) {
    (void)user;
    char *small = transport_share(transport, 1), *large = transport_share(transport, 5000000), *none;
    EXPECT(small && large);
    none = transport_share(transport, 0);
    TRY(case_share_once(transport, 64));
    TRY(case_share_once(transport, 1 << 18));
    TRY(transport_barrier(transport));
    transport_unshare(transport, small);
    transport_unshare(transport, NULL);
    large[0] = (char)(transport->rank + 1);
    large[4999999] = (char)(transport->rank + 1);
    TRY(transport_barrier(transport));
    for (int peer = 0; peer < transport->ranks; peer++) {
        const char *theirs = transport_peer_ptr(transport, large, peer);
        EXPECT(!theirs || (theirs[0] == peer + 1 && theirs[4999999] == peer + 1));
    }
    TRY(transport_barrier(transport));
    transport_unshare(transport, large);
    transport_unshare(transport, none);
    return OK;
}

/* ---- nodes ---- */

/* Memory that was shared before its peer came to count as on another node. */
static inline Status case_parted(Transport *transport) {
    int rank = transport->rank, peer = (rank + 1) % transport->ranks;
    char *memory = transport_share(transport, 100);
    EXPECT(memory && transport_peer_ptr(transport, memory, peer));
    TRY(transport_barrier(transport));
    transport_set_nodes(transport, 1);
    EXPECT(peer == rank || !transport_peer_ptr(transport, memory, peer));
    transport_unshare(transport, memory);
    return OK;
}

static inline Status case_nodes(Transport *transport, void *user) {
    TRY(case_parted(transport));
    int ranks = transport->ranks, rank = transport->rank, next = (rank + 1) % ranks;
    for (int per_node = 1; per_node <= ranks; per_node++) {
        int64_t intra = transport->bytes_intra, inter = transport->bytes_inter;
        char byte = 0, other = 0;
        TRY(transport_barrier(transport));
        transport_set_nodes(transport, per_node);
        transport_set_nodes(transport, 0); /* changes nothing */
        TRY(case_streams(transport, user));
        TRY(case_share(transport, user));
        transport_group_begin(transport);
        int64_t shared_intra = transport->bytes_intra, shared_inter = transport->bytes_inter;
        if (ranks > 1) {
            transport_send(transport, next, &byte, 1);
            transport_recv(transport, (rank + ranks - 1) % ranks, &other, 1);
        }
        TRY(transport_group_end(transport));
        bool same = next / per_node == rank / per_node;
        EXPECT(ranks == 1 || transport->bytes_intra - shared_intra == same);
        EXPECT(ranks == 1 || transport->bytes_inter - shared_inter == !same);
        EXPECT(per_node < ranks || transport->bytes_inter == inter);
        EXPECT(per_node > 1 || transport->bytes_intra == intra);
    }
    return OK;
}

/* Rank 0 waits 2 s for rank 1 and uses less than 5 % of them: CPU time, which does not grow with what else runs. */
static inline Status case_wait(Transport *transport, void *user) {
    (void)user;
    const double wait_s = 2;
    struct timespec pause = {(time_t)wait_s, 0}, before, after;
    TRY(transport_barrier(transport));
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
    if (transport->rank == 1)
        nanosleep(&pause, NULL);
    TRY(transport_barrier(transport));
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
    double used_s = (double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec);
    if (transport->rank != 0)
        return OK;
    printf("waited %g s with %.2f %% of a core\n", wait_s, 100 * used_s / wait_s);
    return used_s < 0.05 * wait_s ? OK : fault("a core for %g s of a wait of %g s", used_s, wait_s);
}

/* ---- what does not match: the transport is unusable afterwards ---- */

/* Two ranks swap a message that they name differently, each in its way. */
typedef struct CaseSwap {
    MessageLabel label[2];
    size_t bytes[2]; /* that each rank sends and expects */
} CaseSwap;

static inline Status case_swap(Transport *transport, void *user) {
    const CaseSwap *swap = user;
    static char out[400000], in[2][400000];
    int rank = transport->rank, peer = 1 - rank;
    transport_label(transport, swap->label[rank]);
    transport_group_begin(transport);
    transport_send(transport, peer, out, swap->bytes[rank]);
    transport_recv(transport, peer, in[rank], swap->bytes[rank]);
    return transport_group_end(transport);
}

#endif
