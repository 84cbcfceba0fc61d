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
#include "comm/transport/vector.h"

static Shape shape_of(const Group *group, const Codec *codec) {
    bool coded = codec && (codec->every_hop || topology_of(group).nodes > 1);
    return (Shape){.on_host = group->transport->vector->on_host, .stages = group->size > 1, .members = {group->size},
                   .owners = {group->size}, .coded = {coded}};
}

static int64_t reduce_scatter_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    Shape shape = shape_of(group, codec);
    return pipeline_scratch_elems(&shape, elems, codec);
}

/* Messages of a step that leave a node, n (N-n), of the busiest one. */
static double busiest_nic(const Group *group) {
    double most = 0;
    for (int i = 0; i < group->size; i++) {
        double here = first_in_node(group, i) ? members_of_node(group, i) : 0, messages = here * (group->size - here);
        most = messages > most ? messages : most;
    }
    return most;
}

/* Of a member. */
static double rank_work_s(const LinkCosts *costs, PipelinePart part, double N, double S, bool coded, bool shared) {
    double work_s = 0;
    if (part != PIPELINE_ALL_GATHER)
        work_s += (coded ? cost_coded_sum_s : cost_sum_s)(costs, N, N, S);
    if (part != PIPELINE_REDUCE_SCATTER && coded)
        work_s += cost_coded_spread_s(costs, true, N, S);
    else if (part != PIPELINE_REDUCE_SCATTER && shared)
        work_s += cost_spread_s(costs, N, N, S);
    return work_s;
}

static double predict_s(const Group *group, int64_t elems, const LinkCosts *costs, PipelinePart part) {
    const double N = group->size, S = (double)elems * sizeof(float), halves = part == PIPELINE_ALL ? 2 : 1;
    Topology topology = topology_of(group);
    bool coded = cost_coded(costs) && (costs->every_hop || topology.nodes > 1) && part != PIPELINE_ALL_GATHER;
    bool shared = !coded && topology.nodes == 1 && costs->copy_s_per_byte > 0;
    Shape shape = shape_of(group, NULL);
    if (group->size == 1 || elems == 0)
        return 0;
    double rank_s = rank_work_s(costs, part, N, S, coded, shared);
    double work_s = cost_work_s(costs, rank_s, topology.largest * rank_s);
    double latency_s = costs->latency_s[topology.nodes > 1];
    if (shared) /* "mine is there", "yours is done" */
        return 2 * latency_s + work_s;
    double chunk = S / N * (coded ? costs->wire_ratio : 1);
    double steps_s = halves * cost_step_s(costs, (topology.largest - 1) * chunk, busiest_nic(group) * chunk);
    double pieces = topology.nodes > 1 ? (double)pipeline_segments(&shape, elems) : 1;
    return halves * latency_s + cost_overlap_s(steps_s - halves * latency_s, work_s, pieces);
}

static double reduce_scatter_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    return predict_s(group, elems, costs, PIPELINE_ALL);
}
static double reduce_scatter_predict_half_s(const Group *group, int64_t elems, const LinkCosts *costs, bool gather) {
    return predict_s(group, elems, costs, gather ? PIPELINE_ALL_GATHER : PIPELINE_REDUCE_SCATTER);
}

static Status run(const Group *group, const Payload *payload, PipelinePart part) {
    Shape shape = shape_of(group, payload->codec);
    Stage stage = {*group, group->size};
    return pipeline_run(group->transport, &shape, &stage, payload, part);
}

static Status reduce_scatter_allreduce(const Group *group, const Payload *payload) {
    return run(group, payload, PIPELINE_ALL);
}
static Status reduce_scatter_reduce_scatter(const Group *group, const Payload *payload) {
    return run(group, payload, PIPELINE_REDUCE_SCATTER);
}
static Status reduce_scatter_all_gather(const Group *group, const Payload *payload) {
    return run(group, payload, PIPELINE_ALL_GATHER);
}
static int64_t reduce_scatter_owned(const Group *group, int member, int64_t offset, int64_t elems, Slice *slices) {
    Shape shape = shape_of(group, NULL);
    return pipeline_owned(&shape, &member, offset, elems, slices);
}

const Collective collective_reduce_scatter = {.name = "reduce_scatter",
                                              .compresses = true,
                                              .scratch_elems = reduce_scatter_scratch_elems,
                                              .predict_s = reduce_scatter_predict_s,
                                              .allreduce = reduce_scatter_allreduce,
                                              .reduce_scatter = reduce_scatter_reduce_scatter,
                                              .all_gather = reduce_scatter_all_gather,
                                              .predict_half_s = reduce_scatter_predict_half_s,
                                              .owned = reduce_scatter_owned};
