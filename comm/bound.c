#include "comm/bound.h"

#include <string.h>

double bound_exposed_ms(BoundBucket *buckets, int count, double backward_ms) {
    double free_ms = 0;
    for (int i = 0; i < count; i++) {
        double start_ms = buckets[i].ready_ms > free_ms ? buckets[i].ready_ms : free_ms;
        buckets[i].finish_ms = free_ms = start_ms + buckets[i].duration_ms;
    }
    return free_ms > backward_ms ? free_ms - backward_ms : 0;
}

double bound_gather_ms(BoundArrival *arrivals, int count) {
    double free_ms = 0, waited_ms = 0;
    for (int i = 0; i < count; i++) {
        arrivals[i].finish_ms = free_ms += arrivals[i].duration_ms;
        double asked_ms = arrivals[i].need_ms + waited_ms;
        waited_ms += free_ms > asked_ms ? free_ms - asked_ms : 0;
    }
    return waited_ms;
}

LinkLoad bound_link_load(const char *algorithm, int ranks, int nodes) {
    double N = ranks, m = nodes, n = N / m;
    if (strcmp(algorithm, "ring") == 0) /* one rank of a node sends to the next node */
        return (LinkLoad){.bytes = 2 * (N - 1) / N, .hops = 2 * (N - 1)};
    if (strcmp(algorithm, "hierarchical") == 0) /* the shards of a node's ranks make up all of it */
        return (LinkLoad){.bytes = 2 * (m - 1) / m, .hops = 2 * (m - 1)};
    if (strcmp(algorithm, "reduce_scatter") == 0) /* n ranks, each 1/N to and from every rank outside */
        return (LinkLoad){.bytes = 2 * n * (N - n) / N, .hops = 2};
    return (LinkLoad){0};
}
