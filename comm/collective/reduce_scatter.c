/* reduce_scatter: chunk c of N goes to member c, which adds all members' values in member order; then everybody gets
 * every chunk. One stage of pipeline.h, in which every member owns a part:
 *
 *   N = 3      member 0      member 1      member 2
 *   scatter    a <- 1, 2     b <- 0, 2     c <- 0, 1      all at once
 *   gather     a -> 1, 2     b -> 0, 2     c -> 0, 1
 *
 * Each member sends 2 (N-1)/N S, like the ring's, in two steps instead of 2 (N-1); but all pairs talk, so across nodes
 * NICs carry more. In the order of members, whatever the size: the bits of naive.
 *
 * Inside a node, on shared memory, each member reads its chunk of all arrays and writes the sum to all of them: every
 * array is read once and written once, and nothing is copied elsewhere. */
#include "comm/collective/collective.h"
#include "comm/collective/cost.h"
#include "comm/collective/pipeline.h"
#include "comm/collective/topology.h"

static Shape shape_of(const Group *group) {
    return (Shape){.stages = group->size > 1, .members = {group->size}, .owners = {group->size}};
}

static int64_t reduce_scatter_scratch_elems(const Group *group, int64_t elems) {
    Shape shape = shape_of(group);
    return pipeline_scratch_elems(&shape, elems);
}

static double reduce_scatter_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    const double N = group->size, S = (double)elems * sizeof(float);
    Topology topology = topology_of(group);
    double nic = 0, adds_s = (N - 1) / N * S * costs->add_s_per_byte;
    if (topology.nodes == 1 && costs->copy_s_per_byte > 0)
        return group->size > 1 ? 2 * costs->latency_s[0] + adds_s + (N - 1) / N * S * costs->copy_s_per_byte : 0;
    for (int i = 0; i < group->size; i++) {
        int here = members_of_node(group, i);
        double bytes = here * (N - here) * S / N;
        nic = bytes > nic ? bytes : nic;
    }
    return 2 * cost_step_s(costs, (topology.largest - 1) * S / N, nic) + adds_s;
}

static Status reduce_scatter_allreduce(const Group *group, float *data, int64_t elems, float scale, float *scratch) {
    Shape shape = shape_of(group);
    Stage stage = {*group, group->size};
    return pipeline_run(&shape, &stage, data, elems, scale, scratch);
}

const Collective collective_reduce_scatter = {.name = "reduce_scatter",
                                              .scratch_elems = reduce_scatter_scratch_elems,
                                              .predict_s = reduce_scatter_predict_s,
                                              .allreduce = reduce_scatter_allreduce};
