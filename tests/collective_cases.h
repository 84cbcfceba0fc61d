/* Cases for the collectives, on any Transport: test_collective.c runs them on threads, test_comm_mpi.c on processes.
 * What a case finds wrong it returns as FAULT with a line, because a test framework's assertions cannot leave another
 * thread.
 *
 * Expected sums are formed here, element by element, in the order that a collective promises, and compared bit by bit:
 * so replicas, runs, sizes, memories and timings that agree with them agree with each other. */
#ifndef TESTS_COLLECTIVE_CASES_H
#define TESTS_COLLECTIVE_CASES_H

#include "base/random.h"
#include "comm/collective/collective.h"

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

typedef enum CaseOrder { BY_RANK, BY_NODE, BY_PAIRS, CASE_ORDERS, UNTOLD = CASE_ORDERS } CaseOrder;

/* Every collective, in the order of comm.algorithm, and how it adds. */
static const struct CaseCollective {
    const char *name;
    CaseOrder order;
} case_collectives[] = {
    {"naive", BY_RANK},   {"native", UNTOLD},          {"iallreduce", UNTOLD},    {"ring", UNTOLD},
    {"tree", BY_PAIRS},   {"reduce_scatter", BY_RANK}, {"hierarchical", BY_NODE}, {"leader", BY_NODE},
};
enum { CASE_COLLECTIVES = sizeof case_collectives / sizeof *case_collectives, CASE_RANKS_MAX = 16, CASE_GUARD = 16 };

static inline const Collective *case_collective(int i) { return collective_find(case_collectives[i].name); }

static inline bool case_runs(const Group *group, const Collective *collective) {
    return !collective->check || collective->check(group) == OK;
}

static inline void case_delay(int rank, uint64_t seed) {
    struct timespec pause = {0, (long)(random_bits(seed, (uint64_t)rank, 0) % 300000)};
    nanosleep(&pause, NULL);
}

/* ---- data ---- */

static inline uint64_t case_bits(int rank, int64_t i) {
    uint64_t bits = ((uint64_t)i * CASE_RANKS_MAX + (uint64_t)rank + 1) * 0x9e3779b97f4a7c15u;
    return (bits ^ bits >> 29) * 0xbf58476d1ce4e5b9u;
}

/* Small integers, so that any order of adding gives the same, exact sum. */
static inline float case_integer(int rank, int64_t i) { return (float)((int)(case_bits(rank, i) >> 40) % 2001 - 1000); }

/* Of many magnitudes and both signs: the order of adding shows in the last bits of the sum. */
static inline float case_random_value(int rank, int64_t i) {
    static const float magnitudes[] = {1, 0.25f, 3e-3f, 40};
    uint64_t bits = case_bits(rank, i);
    return ((float)(bits >> 40) * 0x1p-23f - 1) * magnitudes[bits >> 20 & 3];
}

/* Each rank has its own. */
static inline float case_scale(int rank) { return 0.1f + 0.07f * (float)rank; }

/* Filled with 0xFF, a NaN, wherever nobody wrote yet. */
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

/* ---- expected sums: independent of what is tested ---- */

typedef struct CaseTerms {
    float value[CASE_RANKS_MAX];
    int node[CASE_RANKS_MAX]; /* of each member */
    int size;
} CaseTerms;

static inline float case_sum_by_rank(const CaseTerms *terms) {
    float sum = terms->value[0];
    for (int i = 1; i < terms->size; i++)
        sum += terms->value[i];
    return sum;
}

static inline float case_sum_by_node(const CaseTerms *terms) {
    float sum = 0;
    bool seen[CASE_RANKS_MAX] = {false};
    for (int first = 0; first < terms->size; first++) {
        if (seen[first])
            continue;
        float node_sum = terms->value[first];
        for (int i = first + 1; i < terms->size; i++)
            if (terms->node[i] == terms->node[first]) {
                node_sum += terms->value[i];
                seen[i] = true;
            }
        sum = first == 0 ? node_sum : sum + node_sum;
    }
    return sum;
}

/* As many leading pairs as leave a power of two of terms; then neighbours, and sums of neighbours. */
static inline float case_sum_by_pairs(const CaseTerms *terms) {
    float sums[CASE_RANKS_MAX];
    int places = 1, count = 0;
    while (places * 2 <= terms->size)
        places *= 2;
    for (int i = 0; i < terms->size; count++)
        if (count < terms->size - places) {
            sums[count] = terms->value[i] + terms->value[i + 1];
            i += 2;
        } else {
            sums[count] = terms->value[i++];
        }
    for (; count > 1; count /= 2)
        for (int i = 0; i < count / 2; i++)
            sums[i] = sums[2 * i] + sums[2 * i + 1];
    return sums[0];
}

/* The sums of one group; an element's do not depend on how many there are. */
typedef struct Expected {
    int64_t elems;
    float *exact;               /* of case_integer */
    float *random[CASE_ORDERS]; /* of case_scale * case_random_value */
    double *random_f64, *error_bound;
} Expected;

static inline void expected_create(Expected *expected, const int *members, int size, const int *node, int64_t elems) {
    expected->elems = elems;
    expected->exact = malloc((size_t)elems * sizeof(float));
    expected->random_f64 = malloc((size_t)elems * sizeof(double));
    expected->error_bound = malloc((size_t)elems * sizeof(double));
    for (int order = 0; order < CASE_ORDERS; order++)
        expected->random[order] = malloc((size_t)elems * sizeof(float));
    CaseTerms terms = {.size = size};
    for (int member = 0; member < size; member++)
        terms.node[member] = node[members[member]];
    for (int64_t i = 0; i < elems; i++) {
        double exact = 0, sum = 0, magnitude = 0;
        for (int member = 0; member < size; member++) {
            int rank = members[member];
            terms.value[member] = case_scale(rank) * case_random_value(rank, i);
            exact += case_integer(rank, i);
            sum += (double)case_scale(rank) * case_random_value(rank, i);
            magnitude += fabs((double)terms.value[member]);
        }
        expected->exact[i] = (float)exact;
        expected->random[BY_RANK][i] = case_sum_by_rank(&terms);
        expected->random[BY_NODE][i] = case_sum_by_node(&terms);
        expected->random[BY_PAIRS][i] = case_sum_by_pairs(&terms);
        expected->random_f64[i] = sum;
        expected->error_bound[i] = size * magnitude * 0x1p-24 * 1.01; /* each product and each sum rounds once */
    }
}

static inline void expected_destroy(Expected *expected) {
    free(expected->exact);
    free(expected->random_f64);
    free(expected->error_bound);
    for (int order = 0; order < CASE_ORDERS; order++)
        free(expected->random[order]);
}

/* ---- one all-reduce ---- */

/* A group of one transport, and the memory it works on. */
typedef struct Arena {
    Group group;
    const Expected *expected;
    float *memory; /* f32[CASE_GUARD + expected->elems + CASE_GUARD + 1] */
} Arena;

/* Where data begins: aligned to a float and no more, with a guard before it. */
static inline float *arena_data(const Arena *arena) { return arena->memory + CASE_GUARD + 1; }

static inline int64_t arena_values(int64_t elems) { return 1 + elems + 2 * CASE_GUARD; }

/* In `shared` memory every rank of the transport takes part. */
static inline float *arena_memory(Transport *transport, int64_t elems, bool shared) {
    size_t bytes = (size_t)arena_values(elems) * sizeof(float);
    return shared ? transport_share(transport, bytes) : malloc(bytes);
}

static inline void arena_release(Transport *transport, float *memory, bool shared) {
    if (shared)
        transport_unshare(transport, memory);
    else
        free(memory);
}

/* After a failure memory may go; the line stays. */
static inline Status case_abandon(Transport *transport, Status status) {
    char line[512];
    snprintf(line, sizeof line, "%s", error_line());
    transport_abandon(transport);
    return error_restore(status, line);
}

static inline Status case_allreduce(const Group *group, const Collective *collective, float *data, int64_t elems,
                                    float scale) {
    int64_t scratch_elems = collective->scratch_elems(group, elems, NULL);
    float *scratch = case_floats(scratch_elems);
    Status status = collective->allreduce(
        group, &(Payload){.data = data, .elems = elems, .scale = scale, .scratch = scratch});
    bool intact = case_guard_intact(data - CASE_GUARD, 0) && case_guard_intact(data, elems) &&
                  case_guard_intact(scratch, scratch_elems);
    if (status == OK && !intact)
        status = fault("%s wrote behind its arrays", collective->name);
    if (status != OK)
        case_abandon(group->transport, status);
    free(scratch);
    return status;
}

/* Poisons what lies around the data as well. Peers may still be at work on the last all-reduce of other memory only. */
static inline void arena_fill(const Arena *arena, int64_t elems, float (*value)(int rank, int64_t i)) {
    float *data = arena_data(arena);
    int rank = arena->group.members[arena->group.self];
    memset(arena->memory, 0xFF, (CASE_GUARD + 1) * sizeof(float));
    memset(data + elems, 0xFF, CASE_GUARD * sizeof(float));
    for (int64_t i = 0; i < elems; i++)
        data[i] = value(rank, i);
}

static inline Status case_same_bits(const Arena *arena, const char *name, const char *what, const float *sums,
                                    int64_t elems) {
    const float *data = arena_data(arena);
    if (memcmp(data, sums, (size_t)elems * sizeof(float)) == 0)
        return OK;
    int64_t first = 0, wrong = 0;
    for (int64_t i = elems - 1; i >= 0; i--)
        if (memcmp(&data[i], &sums[i], sizeof(float)) != 0) {
            first = i;
            wrong++;
        }
    return fault("%s, %s, %d members, %lld values: %lld differ, the first is %lld: %.9g, expected %.9g", name, what,
                 arena->group.size, (long long)elems, (long long)wrong, (long long)first, (double)data[first],
                 (double)sums[first]);
}

/* ---- cases: each for one collective and size ---- */

static inline Status case_exact_size(const Arena *arena, int which, int64_t elems) {
    arena_fill(arena, elems, case_integer);
    TRY(case_allreduce(&arena->group, case_collective(which), arena_data(arena), elems, 1));
    return case_same_bits(arena, case_collectives[which].name, "integers", arena->expected->exact, elems);
}

static inline Status case_random_size(const Arena *arena, int which, int64_t elems) {
    const struct CaseCollective *known = &case_collectives[which];
    const float *data = arena_data(arena);
    float scale = case_scale(arena->group.members[arena->group.self]);
    arena_fill(arena, elems, case_random_value);
    TRY(case_allreduce(&arena->group, case_collective(which), arena_data(arena), elems, scale));
    if (known->order != UNTOLD)
        TRY(case_same_bits(arena, known->name, "random values", arena->expected->random[known->order], elems));
    for (int64_t i = 0; i < elems; i++)
        if (!(fabs(data[i] - arena->expected->random_f64[i]) <= arena->expected->error_bound[i]))
            return fault("%s, random values: %lld is %.9g, expected %.12g +- %.2g", known->name, (long long)i,
                         (double)data[i], arena->expected->random_f64[i], arena->expected->error_bound[i]);
    return OK;
}

/* Member 0's bits are everybody's. */
static inline Status case_replicas(const Arena *arena, const char *name, int64_t elems) {
    const Group *group = &arena->group;
    size_t bytes = (size_t)elems * sizeof(float);
    float *first = case_floats(elems);
    transport_group_begin(group->transport);
    for (int i = 1; i < group->size && group->self == 0; i++)
        transport_send(group->transport, group->members[i], arena_data(arena), bytes);
    if (group->self > 0)
        transport_recv(group->transport, group->members[0], first, bytes);
    Status status = transport_group_end(group->transport);
    if (status == OK && group->self > 0)
        status = case_same_bits(arena, name, "replicas", first, elems);
    free(first);
    return status;
}

/* Two runs, with ranks that come at other times: the same bits, on every rank. */
static inline Status case_runs_agree(const Arena *arena, int which, int64_t elems) {
    const char *name = case_collectives[which].name;
    float *first = case_floats(elems);
    Status status = case_random_size(arena, which, elems);
    if (status == OK)
        status = case_replicas(arena, name, elems);
    memcpy(first, arena_data(arena), (size_t)elems * sizeof(float));
    case_delay(arena->group.members[arena->group.self], (uint64_t)which);
    if (status == OK)
        status = case_random_size(arena, which, elems);
    if (status == OK)
        status = case_same_bits(arena, name, "second run", first, elems);
    free(first);
    return status;
}

/* Cut at arbitrary points, for the collectives that promise the order of each sum. */
static inline Status case_pieces(const Arena *arena, int which, int64_t elems) {
    const struct CaseCollective *known = &case_collectives[which];
    float scale = case_scale(arena->group.members[arena->group.self]), *data = arena_data(arena);
    if (known->order == UNTOLD)
        return OK;
    float *all = case_floats(elems);
    Status status = OK;
    for (int64_t start = 0, piece = 0; start < elems && status == OK; piece++) {
        int64_t most = piece % 3 == 0 ? 9 : piece % 3 == 1 ? 9000 : 120000;
        int64_t length = 1 + (int64_t)(random_bits(5, (uint64_t)which, (uint64_t)piece) % (uint64_t)most);
        length = length < elems - start ? length : elems - start;
        arena_fill(arena, 0, case_random_value);
        for (int64_t i = 0; i < length; i++)
            data[i] = case_random_value(arena->group.members[arena->group.self], start + i);
        memset(data + length, 0xFF, CASE_GUARD * sizeof(float));
        status = case_allreduce(&arena->group, case_collective(which), data, length, scale);
        memcpy(all + start, data, (size_t)length * sizeof(float));
        start += length;
    }
    memcpy(data, all, (size_t)elems * sizeof(float));
    free(all);
    return status == OK ? case_same_bits(arena, known->name, "pieces", arena->expected->random[known->order], elems)
                        : status;
}

/* One member's NaN and one's Inf reach all of them, and nothing else changes. */
static inline Status case_not_finite(const Arena *arena, int which, int64_t elems) {
    float *data = arena_data(arena);
    int self = arena->group.self, last = arena->group.size - 1;
    const int64_t nans[] = {0, elems / 2 + 1}, infs[] = {1, elems - 1};
    arena_fill(arena, elems, case_integer);
    for (int i = 0; i < 2; i++) {
        data[nans[i]] = self == (i ? last : 0) ? NAN : data[nans[i]];
        data[infs[i]] = self == (i ? 0 : last) ? -INFINITY : data[infs[i]];
    }
    TRY(case_allreduce(&arena->group, case_collective(which), data, elems, 0.5f));
    for (int64_t i = 0; i < elems; i++)
        if (i == nans[0] || i == nans[1])
            EXPECT(isnan(data[i]));
        else if (i == infs[0] || i == infs[1])
            EXPECT(data[i] == -INFINITY);
        else
            EXPECT(data[i] == 0.5f * arena->expected->exact[i]);
    return OK;
}

/* ---- all of them ---- */

/* FEWER_CASES is for make tsan, under which they take twenty times as long: fewer sizes and worlds, that still
 * lead along every path through the code. Half a million is several segments in every phase too. */
#ifdef FEWER_CASES
enum { CASE_ELEMS = 100003, CASE_LARGE = 500009, CASE_PLACE_RANKS_MAX = 4 };
#else
enum { CASE_ELEMS = 150001, CASE_LARGE = 1000003, CASE_PLACE_RANKS_MAX = CASE_RANKS_MAX };
#endif

/* Trap: size not divisible by world or group (DeepSpeed PR#5056, Megatron#561). */
static inline Status case_sizes(const Arena *arena, int which) {
    const int64_t n = arena->group.size;
#ifdef FEWER_CASES
    const int64_t sizes[] = {0, 1, n + 1, 4096 * n + 1, CASE_ELEMS};
#else
    const int64_t sizes[] = {0,    1,    n - 1, n,     n + 1,        31,           997,
                             4095, 4096, 4097,  65537, 4096 * n - 1, 4096 * n + 1, CASE_ELEMS};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        TRY(case_exact_size(arena, which, sizes[i]));
#endif
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        TRY(case_random_size(arena, which, sizes[i]));
    return OK;
}

static inline Status case_collective_of(const Arena *arena, int which) {
    const Collective *collective = case_collective(which);
    EXPECT(collective && strcmp(collective->name, case_collectives[which].name) == 0);
    if (!case_runs(&arena->group, collective))
        return OK;
    TRY(case_sizes(arena, which));
    TRY(case_runs_agree(arena, which, 99991));
    TRY(case_pieces(arena, which, CASE_ELEMS));
    return case_not_finite(arena, which, 40961);
}

static inline Status case_all_collectives(const Arena *arena) {
    for (int which = 0; which < CASE_COLLECTIVES; which++)
        TRY(case_collective_of(arena, which));
    return OK;
}

#endif
