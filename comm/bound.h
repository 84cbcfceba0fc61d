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

typedef struct BoundArrival {
    double need_ms;     /* forward asks for it after so long of its own work */
    double duration_ms; /* as above */
    double finish_ms;   /* since forward began; filled by bound_gather_ms */
} BoundArrival;

/* The same under forward: one link brings parameters in the order in which they are needed, from the start on, and
 * forward stands still until those that it asks for are there. Returns for how long in all. */
double bound_gather_ms(BoundArrival *arrivals, int count);

/* An all-reduce as the slowest link sees it. */
typedef struct LinkLoad {
    double bytes;  /* that a node's link to others carries each way, per byte of gradient */
    double hops;   /* latencies, one after the other */
} LinkLoad;

/* Of `nodes` >= 2 equal nodes, for ring, reduce_scatter and hierarchical (docs/comm.md); bytes 0 for other names. */
LinkLoad bound_link_load(const char *algorithm, int ranks, int nodes);

#endif
