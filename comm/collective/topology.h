/* Which members of a group share a node. transport->node may hold any numbers, and the members of a node may stand
 * anywhere in the group: nodes are ordered by their first member, the members of a node as in the group. */
#ifndef COMM_COLLECTIVE_TOPOLOGY_H
#define COMM_COLLECTIVE_TOPOLOGY_H

#include "comm/collective/collective.h"

typedef struct Topology {
    int nodes;
    int smallest, largest; /* members of a node */
} Topology;

/* O(size * nodes) where the members of a node stand side by side. */
Topology topology_of(const Group *group);
int node_index(const Group *group, int member); /* of its node */

/* O(size) */
bool same_node(const Group *group, int member, int other);
bool first_in_node(const Group *group, int member);
int place_in_node(const Group *group, int member); /* members of its node that stand before it */
int member_at_place(const Group *group, int first, int place); /* in the node whose first member is `first`, or -1 */
int members_of_node(const Group *group, int member);

#endif
