/* hierarchical: most bytes stay inside nodes. The data is cut into columns, as many as the smallest node has ranks; the
 * j-th rank of each node owns column j there. Two stages of pipeline.h: inside each node all its ranks and the columns'
 * owners, then between nodes the owners of the same column.
 *
 *   {3, 2}     node 0: ranks 0 1 2        node 1: ranks 3 4       2 columns a, b
 *   scatter 0  0 <- a of 1, 2             3 <- a of 4
 *              1 <- b of 0, 2             4 <- b of 3
 *   sum 0      0 has a, 1 has b of node 0; 3 has a, 4 has b of node 1
 *   scatter 1  0 <-> 3 halves of a,   1 <-> 4 halves of b
 *   sum 1      each has half a column's sum over nodes
 *   gather 1   0 <-> 3,   1 <-> 4
 *   gather 0   0 gives a to 1, 2; 1 gives b to 0, 2            3 gives a to 4, 4 gives b to 3
 *
 * Each NIC carries 2 (m-1)/m S for m nodes, whatever the ranks per node, in two steps. The order of a sum: the ranks of
 * a node as in the group, then nodes by their first rank; independent of size. One node, or one rank per node, leaves
 * one stage.
 *
 * leader: the same with one column, so that only the first rank of each node talks to other nodes. */
#include "comm/collective/collective.h"
#include "comm/collective/cost.h"
#include "comm/collective/pipeline.h"
#include "comm/collective/topology.h"
#include "comm/transport/vector.h"

#include <assert.h>

enum { COLUMNS_ALL = 0, COLUMNS_ONE = 1 };

/* coded: with a codec; every_hop: inside nodes too. */
static Shape shape_of(const Group *group, bool coded, bool every_hop, int columns_max) {
    Topology topology = topology_of(group);
    int columns = columns_max == COLUMNS_ONE ? 1 : topology.smallest;
    Shape shape = {.on_host = group->transport->vector->on_host};
    if (topology.largest > 1) {
        shape.members[shape.stages] = topology.largest;
        shape.coded[shape.stages] = coded && every_hop;
        shape.owners[shape.stages++] = columns;
    }
    if (topology.nodes > 1) {
        shape.members[shape.stages] = topology.nodes;
        shape.coded[shape.stages] = coded;
        shape.owners[shape.stages++] = topology.nodes;
    }
    return shape;
}

/* The members that share a node with this rank. */
static Group local_group(const Group *world, int *members) {
    Group group = {world->transport, members, 0, place_in_node(world, world->self)};
    for (int i = 0; i < world->size; i++)
        if (same_node(world, i, world->self))
            members[group.size++] = world->members[i];
    return group;
}

/* In each node the member that stands where this one stands in its own, in the order of nodes. */
static Group column_group(const Group *world, int *members) {
    Group group = {world->transport, members, 0, -1};
    int place = place_in_node(world, world->self);
    for (int first = 0; first < world->size; first++) {
        int member = first_in_node(world, first) ? member_at_place(world, first, place) : -1;
        if (member < 0)
            continue;
        group.self = member == world->self ? group.size : group.self;
        members[group.size++] = world->members[member];
    }
    return group;
}

static int64_t scratch_elems(const Group *group, int64_t elems, const Codec *codec, int columns_max) {
    Shape shape = shape_of(group, codec, codec && codec->every_hop, columns_max);
    return pipeline_scratch_elems(&shape, elems, codec);
}

static Status run(const Group *world, const Payload *payload, PipelinePart part, int columns_max) {
    Topology topology = topology_of(world);
    const Codec *codec = payload->codec;
    Shape shape = shape_of(world, codec, codec && codec->every_hop, columns_max);
    Stage stages[STAGES_MAX];
    int *members = world->transport->places, count = 0;
    if (topology.largest > 1) {
        stages[count] = (Stage){local_group(world, members), shape.owners[count]};
        count++;
    }
    if (topology.nodes > 1) {
        stages[count] = (Stage){column_group(world, members + world->size), shape.owners[count]};
        if (count > 0 && stages[0].group.self >= stages[0].owners)
            stages[count].group.self = -1; /* owns no column */
        count++;
    }
    assert(count == shape.stages);
    return pipeline_run(world->transport, &shape, stages, payload, part);
}

/* Seconds of one stage: of its owners' work, of messages inside a node, and of a NIC. */
typedef struct StageCosts {
    double work_s, inside_s, nic_s;
} StageCosts;

static int halves_of(PipelinePart part) { return part == PIPELINE_ALL ? 2 : 1; }

static bool shares_memory(const LinkCosts *costs, bool coded) { return !coded && costs->copy_s_per_byte > 0; }

/* Of a stage of `bytes`, `lanes` times side by side on each node. */
static StageCosts stage_costs(const LinkCosts *costs, const Shape *shape, int stage, PipelinePart part, bool inside,
                              double bytes, double lanes) {
    const double members = shape->members[stage], owners = shape->owners[stage];
    bool coded = shape->coded[stage], last = stage == shape->stages - 1;
    bool shared = inside && shares_memory(costs, coded);
    double moved = halves_of(part) * (members - 1) / owners * bytes * (coded ? costs->wire_ratio : 1);
    StageCosts result = {0};
    if (part != PIPELINE_ALL_GATHER)
        result.work_s += (coded ? cost_coded_sum_s : cost_sum_s)(costs, members, owners, bytes);
    if (part != PIPELINE_REDUCE_SCATTER && coded)
        result.work_s += cost_coded_spread_s(costs, last, owners, bytes);
    else if (part != PIPELINE_REDUCE_SCATTER && shared)
        result.work_s += cost_spread_s(costs, members, owners, bytes);
    if (inside && !shared)
        result.inside_s = moved * costs->s_per_byte[0];
    else if (!inside)
        result.nic_s = moved * lanes * costs->s_per_byte[1];
    return result;
}

/* In shared memory two messages stand at the ends of each half as of the whole: "mine is there", "yours is done". */
static double predict_s(const Group *group, int64_t elems, const LinkCosts *costs, PipelinePart part, int columns_max) {
    Topology topology = topology_of(group);
    Shape shape = shape_of(group, cost_coded(costs) && part != PIPELINE_ALL_GATHER, costs->every_hop, columns_max);
    if (shape.stages == 0 || elems == 0)
        return 0;
    const double S = (double)elems * sizeof(float), columns = topology.largest > 1 ? shape.owners[0] : 1;
    StageCosts inside = {0}, between = {0};
    double latency_s = 0;
    if (topology.largest > 1) {
        inside = stage_costs(costs, &shape, 0, part, true, S, 1);
        latency_s += (shares_memory(costs, shape.coded[0]) ? 2 : halves_of(part)) * costs->latency_s[0];
    }
    if (topology.nodes > 1) {
        between = stage_costs(costs, &shape, shape.stages - 1, part, false, S / columns, columns);
        latency_s += halves_of(part) * costs->latency_s[1];
    }
    double rank_s = inside.work_s + between.work_s;
    double busy_s = inside.inside_s + cost_work_s(costs, rank_s, columns * rank_s);
    return latency_s + cost_overlap_s(between.nic_s, busy_s, (double)pipeline_segments(&shape, elems));
}

static int64_t hierarchical_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    return scratch_elems(group, elems, codec, COLUMNS_ALL);
}
static double hierarchical_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    return predict_s(group, elems, costs, PIPELINE_ALL, COLUMNS_ALL);
}
static double hierarchical_predict_half_s(const Group *group, int64_t elems, const LinkCosts *costs, bool gather) {
    return predict_s(group, elems, costs, gather ? PIPELINE_ALL_GATHER : PIPELINE_REDUCE_SCATTER, COLUMNS_ALL);
}
static Status hierarchical_allreduce(const Group *group, const Payload *payload) {
    return run(group, payload, PIPELINE_ALL, COLUMNS_ALL);
}
static Status hierarchical_reduce_scatter(const Group *group, const Payload *payload) {
    return run(group, payload, PIPELINE_REDUCE_SCATTER, COLUMNS_ALL);
}
static Status hierarchical_all_gather(const Group *group, const Payload *payload) {
    return run(group, payload, PIPELINE_ALL_GATHER, COLUMNS_ALL);
}
static int64_t hierarchical_owned(const Group *group, int member, int64_t offset, int64_t elems, Slice *slices) {
    Topology topology = topology_of(group);
    Shape shape = shape_of(group, false, false, COLUMNS_ALL);
    int owner[STAGES_MAX], count = 0;
    if (topology.largest > 1)
        owner[count++] = place_in_node(group, member);
    if (topology.nodes > 1)
        owner[count++] = node_index(group, member);
    return pipeline_owned(&shape, owner, offset, elems, slices);
}

static int64_t leader_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    return scratch_elems(group, elems, codec, COLUMNS_ONE);
}
static double leader_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    return predict_s(group, elems, costs, PIPELINE_ALL, COLUMNS_ONE);
}
static Status leader_allreduce(const Group *group, const Payload *payload) {
    return run(group, payload, PIPELINE_ALL, COLUMNS_ONE);
}

const Collective collective_hierarchical = {.name = "hierarchical",
                                            .compresses = true,
                                            .scratch_elems = hierarchical_scratch_elems,
                                            .predict_s = hierarchical_predict_s,
                                            .allreduce = hierarchical_allreduce,
                                            .reduce_scatter = hierarchical_reduce_scatter,
                                            .all_gather = hierarchical_all_gather,
                                            .predict_half_s = hierarchical_predict_half_s,
                                            .owned = hierarchical_owned};
const Collective collective_leader = {.name = "leader",
                                      .compresses = true,
                                      .scratch_elems = leader_scratch_elems,
                                      .predict_s = leader_predict_s,
                                      .allreduce = leader_allreduce};
