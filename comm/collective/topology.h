/* Which members of a group share a node. transport->node may hold any numbers, and the members of a node may stand
 * anywhere in the group: nodes are ordered by their first member, the members of a node as in the group. */
#ifndef COMM_COLLECTIVE_TOPOLOGY_H
#define COMM_COLLECTIVE_TOPOLOGY_H

#include "comm/collective/collective.h"

typedef struct Topology {
    int nodes;
    int smallest, largest; /* members of a node */
} Topology;

Topology topology_of(const Group *group); /* O(size^2) */

bool same_node(const Group *group, int member, int other);
int place_in_node(const Group *group, int member); /* members of its node that stand before it */
int members_of_node(const Group *group, int member);
int node_index(const Group *group, int member); /* of its node */

#endif
