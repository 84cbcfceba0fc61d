/* What the cost models of the collectives share. A step takes the latency of the slowest kind of link in it, plus the
 * time of whichever is busier: a rank's own link inside its node, or a node's NIC, over which go all messages of its
 * ranks to other nodes. */
#ifndef COMM_COLLECTIVE_COST_H
#define COMM_COLLECTIVE_COST_H

#include "comm/collective/collective.h"

/* The bytes are the largest that any rank sends or receives inside its node, and any NIC either way. */
double cost_step_s(const LinkCosts *costs, double inside_bytes, double nic_bytes);

/* The member to which a member sends in a step, or -1. */
typedef int CostPeerFn(const Group *group, int member, int step);

/* A step in which each member sends `bytes` to one other. */
double cost_shift_s(const Group *group, const LinkCosts *costs, CostPeerFn *peer, int step, double bytes);

#endif
