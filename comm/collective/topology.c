#include "comm/collective/topology.h"

bool same_node(const Group *group, int member, int other) {
    const int *node = group->transport->node;
    return node[group->members[member]] == node[group->members[other]];
}

int place_in_node(const Group *group, int member) {
    int place = 0;
    for (int i = 0; i < member; i++)
        place += same_node(group, i, member);
    return place;
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
        if (place_in_node(group, i) > 0)
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
        nodes += place_in_node(group, i) == 0;
    return nodes;
}
