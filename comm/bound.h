/* What overlap can reach at best, to be shown beside what it does reach. Pure functions. */
#ifndef COMM_BOUND_H
#define COMM_BOUND_H

#include <stdint.h>

typedef struct BoundBucket {
    double ready_ms;    /* the last rank's gradient is final, since the start of backward */
    double duration_ms; /* of the slowest link, for this bucket alone */
    double finish_ms;   /* filled by bound_exposed_ms */
} BoundBucket;

/* The list schedule: one link serves bucket after bucket in the order given, each as soon as it is ready and the link
 * free. Returns for how long it goes on after backward_ms, the end of backward; no engine with that order and link
 * exposes less. */
double bound_exposed_ms(BoundBucket *buckets, int count, double backward_ms);

/* An all-reduce as the slowest link sees it. */
typedef struct LinkLoad {
    double bytes;  /* that a node's link to others carries each way, per byte of gradient */
    double hops;   /* latencies, one after the other */
} LinkLoad;

/* Of `nodes` >= 2 equal nodes, for ring, reduce_scatter and hierarchical (docs/comm.md); bytes 0 for other names. */
LinkLoad bound_link_load(const char *algorithm, int ranks, int nodes);

#endif
