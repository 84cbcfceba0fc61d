#include "comm/nodes.h"

#include <ctype.h>
#include <stdlib.h>

enum { COUNT_MAX = 1000000 };

/* The number at *text, which then points behind it; -1 where there is none. */
static long read_count(const char **text) {
    char *end = (char *)*text;
    long count = isdigit((unsigned char)**text) ? strtol(*text, &end, 10) : -1;
    *text = end;
    return count <= COUNT_MAX ? count : -1;
}

Status nodes_check(const char *text, int ranks) {
    const char *at = text;
    long least = COUNT_MAX, sum = 0, nodes = 0;
    if (!*text)
        return OK;
    do {
        at += nodes > 0; /* the comma */
        long count = read_count(&at);
        least = count < least ? count : least;
        sum += count;
        nodes++;
    } while (*at == ',');
    if (*at || least < (nodes > 1))
        return bad_input("comm.ranks_per_node: expected a number or a list of them such as 3,2, found '%s'", text);
    if (nodes > 1 && sum != ranks)
        return bad_input("comm.ranks_per_node = %s: expected %d in all, the number of ranks, found %ld", text, ranks,
                         sum);
    return OK;
}

void nodes_place(Transport *transport, const char *text) {
    const char *at = text;
    long count = *text ? read_count(&at) : 0;
    if (*at != ',') {
        transport_set_nodes(transport, (int)count);
        return;
    }
    for (int rank = 0, node = 0; rank < transport->ranks; rank++, count--) {
        if (count == 0) {
            at++; /* the comma */
            count = read_count(&at);
            node++;
        }
        transport->node[rank] = node;
    }
}

/* A part is numbered by its first rank. Backwards, so that the ranks before this one still have their old numbers. */
void nodes_split(Transport *transport, const int *domain) {
    int *node = transport->node;
    for (int rank = transport->ranks - 1; rank >= 0; rank--) {
        int first = 0;
        while (node[first] != node[rank] || domain[first] != domain[rank])
            first++;
        node[rank] = first;
    }
}
