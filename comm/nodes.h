/* Who counts as sharing a node, besides what the transport has found: [comm] ranks_per_node and group. */
#ifndef COMM_NODES_H
#define COMM_NODES_H

#include "comm/transport/transport.h"

/* `text` is the key's value: "0" or "" leaves what was found; "4" makes nodes of four ranks in a row; "3,2" makes one
 * of three and one of two. BAD_INPUT unless it is one of these and a list adds up to `ranks`. */
Status nodes_check(const char *text, int ranks);

/* Places the transport's ranks as `text`, which was checked, says. Every rank calls it alike, with no message under
 * way. */
void nodes_place(Transport *transport, const char *text);

/* Makes a node of each domain: int[ranks], alike on all ranks; those of different nodes have nothing in common. */
void nodes_split(Transport *transport, const int *domain);

#endif
