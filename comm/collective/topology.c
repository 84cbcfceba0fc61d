#include "comm/collective/topology.h"

bool same_node(const Group *group, int member, int other) {
    const int *node = group->transport->node;
    return node[group->members[member]] == node[group->members[other]];
}

/* Backwards, because the members of a node mostly stand side by side: then only the first ones look far. */
bool first_in_node(const Group *group, int member) {
    for (int i = member - 1; i >= 0; i--)
        if (same_node(group, i, member))
            return false;
    return true;
}

int place_in_node(const Group *group, int member) {
    int place = 0;
    for (int i = 0; i < member; i++)
        place += same_node(group, i, member);
    return place;
}

int member_at_place(const Group *group, int first, int place) {
    for (int i = first; i < group->size; i++)
        if (same_node(group, i, first) && place-- == 0)
            return i;
    return -1;
}

int members_of_node(const Group *group, int member) {
    int count = 0;
    for (int i = 0; i < group->size; i++)
        count += same_node(group, i, member);
    return count;
}

Topology topology_of(const Group *group) {
    Topology topology = {.nodes = 0, .smallest = group->size, .largest = 0};
    for (int i = 0; i < group->size; i++) {
        if (!first_in_node(group, i))
            continue;
        int count = members_of_node(group, i);
        topology.nodes++;
        topology.smallest = count < topology.smallest ? count : topology.smallest;
        topology.largest = count > topology.largest ? count : topology.largest;
    }
    return topology;
}

int node_index(const Group *group, int member) {
    int nodes = 0;
    for (int i = 0; i < group->size && !same_node(group, i, member); i++)
        nodes += first_in_node(group, i);
    return nodes;
}
