/* Ranks as threads, on every shape of a world. Needs tests/check.h before it. */
#ifndef TESTS_LOOP_WORLD_H
#define TESTS_LOOP_WORLD_H

#include "tests/collective_cases.h"

#include "comm/transport/transport_loop.h"

#include <assert.h>
#include <pthread.h>

/* ---- worlds ---- */

/* Which node each rank is on. */
typedef struct Place {
    const char *name;
    int ranks, node[CASE_RANKS_MAX];
} Place;

static const Place places[] = {
    {"1 node of 1", 1, {0}},
    {"1 node of 2", 2, {0}},
    {"1 node of 3", 3, {0}},
    {"1 node of 4", 4, {0}},
    {"1 node of 5", 5, {0}},
    {"1 node of 6", 6, {0}},
    {"1 node of 7", 7, {0}},
    {"1 node of 8", 8, {0}},
    {"1 node of 9", 9, {0}},
    {"2 nodes of 1", 2, {0, 1}},
    {"3 nodes of 1", 3, {0, 1, 2}},
    {"4 nodes of 1", 4, {0, 1, 2, 3}},
    {"5 nodes of 1", 5, {4, 3, 2, 1, 0}},
    {"6 nodes of 1", 6, {0, 1, 2, 3, 4, 5}},
    {"7 nodes of 1", 7, {0, 1, 2, 3, 4, 5, 6}},
    {"8 nodes of 1", 8, {0, 1, 2, 3, 4, 5, 6, 7}},
    {"9 nodes of 1", 9, {0, 1, 2, 3, 4, 5, 6, 7, 8}},
    {"2 nodes of 2", 4, {0, 0, 1, 1}},
    {"2 nodes of 3", 6, {0, 0, 0, 1, 1, 1}},
    {"3 nodes of 2", 6, {0, 0, 1, 1, 2, 2}},
    {"3 nodes of 3", 9, {0, 0, 0, 1, 1, 1, 2, 2, 2}},
    {"2 nodes of 4", 8, {0, 0, 0, 0, 1, 1, 1, 1}},
    {"2 and 1", 3, {0, 0, 1}},
    {"3 and 2", 5, {0, 0, 0, 1, 1}},
    {"1 and 4", 5, {0, 1, 1, 1, 1}},
    {"4 and 3", 7, {0, 0, 0, 0, 1, 1, 1}},
    {"2 and 3, mixed", 5, {7, 3, 7, 3, 3}},
    {"3 and 2, second first", 5, {1, 0, 1, 0, 1}},
    {"4 nodes of 2, round robin", 8, {3, 2, 1, 0, 3, 2, 1, 0}},
    {"3, 3 and 3, mixed", 9, {-2, -2, 500, 500, 9, -2, 9, 9, 500}},
    {"1, 2 and 4", 7, {1, 2, 2, 4, 4, 4, 4}},
};
enum { PLACES = sizeof places / sizeof *places };

static inline const Place *place_named(const char *name) {
    int i = 0;
    while (i < PLACES && strcmp(places[i].name, name) != 0)
        i++;
    assert(i < PLACES);
    return &places[i];
}

static inline int count_nodes(const Place *place) {
    int nodes = 0;
    for (int rank = 0; rank < place->ranks; rank++) {
        bool first = true;
        for (int before = 0; before < rank; before++)
            first &= place->node[before] != place->node[rank];
        nodes += first;
    }
    return nodes;
}

static const int in_order[CASE_RANKS_MAX] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* ---- ranks as threads ---- */

typedef struct World World;
typedef Status RankBody(const World *world, Transport *transport);

struct World {
    const Place *place;
    RankBody *body;
    const void *user;
    Expected expected;
    LoopWorld *loop;
    pthread_t threads[CASE_RANKS_MAX];
};

typedef struct RankStart {
    World *world;
    int rank;
} RankStart;

static inline void *rank_thread(void *argument) {
    RankStart start = *(RankStart *)argument;
    World *world = start.world;
    Transport *transport = loop_transport(world->loop, start.rank);
    Status status = world->body(world, transport);
    if (status != OK)
        case_abandon(transport, status);
    loop_leave(world->loop, start.rank, status);
    return NULL;
}

/* Runs body in every rank, with the ranks' nodes set. The failure of the first rank that had one is the test's. */
static inline Status run_world(const Place *place, RankBody *body, const void *user, const LoopLinks *links, int64_t elems) {
    World world = {.place = place, .body = body, .user = user};
    RankStart starts[CASE_RANKS_MAX];
    bool all_left = false;
    expected_create(&world.expected, in_order, place->ranks, place->node, elems);
    assert_ok(loop_create(&world.loop, place->ranks, 30));
    if (links)
        loop_set_links(world.loop, links);
    for (int rank = 0; rank < place->ranks; rank++)
        memcpy(loop_transport(world.loop, rank)->node, place->node, (size_t)place->ranks * sizeof(int));
    for (int rank = 0; rank < place->ranks; rank++) {
        starts[rank] = (RankStart){&world, rank};
        assert_int_equal(pthread_create(&world.threads[rank], NULL, rank_thread, &starts[rank]), 0);
    }
    for (int rank = 0; rank < place->ranks; rank++)
        pthread_join(world.threads[rank], NULL);
    Status status = loop_wait(world.loop, 1, &all_left);
    loop_destroy(world.loop);
    expected_destroy(&world.expected);
    return status;
}

static inline void run_places(RankBody *body, const void *user, int64_t elems) {
    for (int i = 0; i < PLACES; i++)
        if (places[i].ranks <= CASE_PLACE_RANKS_MAX && run_world(&places[i], body, user, NULL, elems) != OK)
            fail_msg("%s: %s", places[i].name, error_line());
}

#endif
