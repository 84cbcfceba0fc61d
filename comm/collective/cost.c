#include "comm/collective/cost.h"

#include "comm/collective/topology.h"

#include <math.h>

double cost_step_s(const LinkCosts *costs, double inside_bytes, double nic_bytes) {
    double inside_s = inside_bytes * costs->s_per_byte[0], nic_s = nic_bytes * costs->s_per_byte[1];
    double latency_s = nic_bytes > 0 ? costs->latency_s[1] : inside_bytes > 0 ? costs->latency_s[0] : 0;
    return latency_s + (inside_s > nic_s ? inside_s : nic_s);
}

/* Messages that leave and that enter the node of `member`, whichever are more. */
static int crossing(const Group *group, CostPeerFn *peer, int step, int member) {
    int out = 0, in = 0;
    for (int i = 0; i < group->size; i++) {
        int to = peer(group, i, step);
        if (to >= 0 && !same_node(group, i, to)) {
            out += same_node(group, i, member);
            in += same_node(group, to, member);
        }
    }
    return out > in ? out : in;
}

double cost_shift_s(const Group *group, const LinkCosts *costs, CostPeerFn *peer, int step, double bytes) {
    int inside = 0, nic = 0;
    for (int i = 0; i < group->size; i++) {
        int to = peer(group, i, step), count = first_in_node(group, i) ? crossing(group, peer, step, i) : 0;
        inside |= to >= 0 && same_node(group, i, to);
        nic = count > nic ? count : nic;
    }
    return cost_step_s(costs, inside * bytes, nic * bytes);
}

static double larger(double a, double b) { return a > b ? a : b; }

double cost_work_s(const LinkCosts *costs, double rank_s, double node_s) {
    if (costs->cores <= 0 || node_s <= rank_s * costs->cores)
        return rank_s;
    return node_s / costs->cores + larger(1 - 1 / costs->cores, 0) * rank_s;
}

double cost_overlap_s(double a_s, double b_s, double pieces) {
    double longer_s = larger(a_s, b_s);
    return longer_s + (a_s + b_s - longer_s) / larger(pieces, 1);
}

double cost_sum_s(const LinkCosts *costs, double members, double owners, double bytes) {
    return members / 2 * bytes / owners * costs->add_s_per_byte;
}

double cost_spread_s(const LinkCosts *costs, double members, double owners, double bytes) {
    return members / 2 * bytes / owners * costs->copy_s_per_byte;
}

double cost_coded_sum_s(const LinkCosts *costs, double members, double owners, double bytes) {
    return bytes * costs->encode_s_per_byte + members * bytes / owners * costs->decode_add_s_per_byte;
}

double cost_coded_spread_s(const LinkCosts *costs, bool last, double owners, double bytes) {
    double part = bytes / owners, result = last ? part : 0;
    return result * costs->encode_s_per_byte + (bytes - part + result) * costs->decode_add_s_per_byte;
}

double cost_timed_s(const LinkCosts *costs, int64_t elems) {
    const double *sizes = costs->timed_bytes, *time_s = costs->timed_s, bytes = (double)elems * sizeof(float);
    int count = costs->timed_count, i = 1;
    if (count < 2 || bytes <= sizes[0])
        return count > 0 ? time_s[0] : NAN;
    while (i < count - 1 && sizes[i] < bytes)
        i++;
    double slope = (time_s[i] - time_s[i - 1]) / (sizes[i] - sizes[i - 1]), rest = bytes - sizes[i];
    return time_s[i] + (rest > 0 ? larger(slope, 0) : slope) * rest;
}

bool cost_coded(const LinkCosts *costs) { return costs->encode_s_per_byte > 0; }

LinkCosts cost_dense(const LinkCosts *costs) {
    LinkCosts dense = *costs;
    dense.wire_ratio = 1;
    dense.encode_s_per_byte = dense.decode_add_s_per_byte = 0;
    dense.every_hop = false;
    return dense;
}
