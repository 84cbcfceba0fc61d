/* The loop transport's model of links: when a message would arrive, were it sent over real ones. See loop_links.c. */
#ifndef COMM_TRANSPORT_LOOP_LINKS_H
#define COMM_TRANSPORT_LOOP_LINKS_H

#include <stdbool.h>
#include <stddef.h>

/* Every latency is added to every message; 10^9 bytes per second each way; 0: no limit. */
typedef struct LoopLinks {
    double latency_inside_us, latency_between_us;
    double gb_per_s_inside, gb_per_s_between;
} LoopLinks;

typedef struct LinkModel LinkModel;

LinkModel *link_model_create(const LoopLinks *links, int ranks); /* NULL: no memory */
void link_model_destroy(LinkModel *model);                       /* accepts NULL */

/* When a message that leaves at now_s arrives, by the same clock; it holds its links meanwhile. node int[ranks] says
 * where ranks are. */
double link_model_send(LinkModel *model, const int *node, int from, int to, size_t bytes, double now_s);

#endif
