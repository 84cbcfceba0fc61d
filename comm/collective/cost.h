/* What the cost models of the collectives share. A step takes the latency of the slowest kind of link in it, plus the
 * time of whichever is busier: a rank's own link inside its node, or a node's NIC, over which go all messages of its
 * ranks to other nodes. Inside a node it is the CPU that moves messages, so nothing hides behind them.
 *
 * A sum over n members reads n arrays and stores one; gamma is for two reads and a store. So it costs n/2 gamma, and in
 * shared memory, where the sum is stored n times, n/2 (gamma + copy).
 *
 * A coded stage of n members and k owners, S bytes: everybody encodes S; an owner decodes its part of S/k from n
 * members; everybody decodes the other owners' parts. In the last stage the owner encodes and decodes its result as
 * well. */
#ifndef COMM_COLLECTIVE_COST_H
#define COMM_COLLECTIVE_COST_H

#include "comm/collective/collective.h"

/* The bytes are the largest that any rank sends or receives inside its node, and any NIC either way. */
double cost_step_s(const LinkCosts *costs, double inside_bytes, double nic_bytes);

/* The member to which a member sends in a step, or -1. */
typedef int CostPeerFn(const Group *group, int member, int step);

/* A step in which each member sends `bytes` to one other. */
double cost_shift_s(const Group *group, const LinkCosts *costs, CostPeerFn *peer, int step, double bytes);

/* Work on a node: of its busiest rank, or, where its ranks outnumber the cores, of all of them. Ranks are then spread as
 * by a scheduler that does not know how long they take: up to (1 - 1/cores) of a rank's work comes last, on its own. */
double cost_work_s(const LinkCosts *costs, double rank_s, double node_s);

/* Two things at once, in so many pieces: the shorter one hides behind the longer but for one piece. */
double cost_overlap_s(double a_s, double b_s, double pieces);

/* Work of an owner in a stage of `bytes`: to sum them up, and to spread the sum, where all members share memory. */
double cost_sum_s(const LinkCosts *costs, double members, double owners, double bytes);
double cost_spread_s(const LinkCosts *costs, double members, double owners, double bytes);

/* The same of a coded stage. last: the last stage. */
double cost_coded_sum_s(const LinkCosts *costs, double members, double owners, double bytes);
double cost_coded_spread_s(const LinkCosts *costs, bool last, double owners, double bytes);

/* Of a collective that was timed: a line between the two nearest sizes, also beyond the largest; below the smallest
 * its time. NaN if it was not. */
double cost_timed_s(const LinkCosts *costs, int64_t elems);

/* Whether the costs are those with a compressor, and those of what travels without. */
bool cost_coded(const LinkCosts *costs);
LinkCosts cost_dense(const LinkCosts *costs);

#endif
