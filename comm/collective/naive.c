/* naive: everybody sends to the first member, which adds in rank order and sends the sum back. It carries (N-1) S in
 * and as much out through one rank, 2 (N-1)/N times what a ring needs on its busiest link, and is here to be obviously
 * right.
 *
 * Works through the data in segments, so that the others' values need little room. */
#include "comm/collective/collective.h"
#include "comm/collective/cost.h"
#include "comm/collective/topology.h"
#include "comm/transport/vector.h"

enum { SEGMENT_ELEMS = 64 << 10 };

static int64_t naive_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    (void)codec;
    int64_t segment = elems < SEGMENT_ELEMS ? elems : SEGMENT_ELEMS;
    return (group->size - 1) * segment;
}

static double naive_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    const double S = (double)elems * sizeof(float), others = group->size - 1;
    double inside = members_of_node(group, 0) - 1, segments = (double)((elems + SEGMENT_ELEMS - 1) / SEGMENT_ELEMS);
    if (group->size == 1 || elems == 0)
        return 0;
    return 2 * segments * cost_step_s(costs, inside * S / segments, (others - inside) * S / segments) +
           others * S * costs->add_s_per_byte;
}

enum { REDUCE, BROADCAST }; /* phases */

static Status sum_at_first(const Group *group, float *data, int64_t elems, float *others, Phases *phases) {
    Transport *transport = group->transport;
    size_t bytes = (size_t)elems * sizeof(float);
    transport_group_begin(transport);
    for (int i = 1; i < group->size; i++)
        transport_recv(transport, group->members[i], others + (i - 1) * elems, bytes);
    TRY(transport_group_end(transport));
    for (int i = 1; i < group->size; i++)
        vector_add(group->transport, data, others + (i - 1) * elems, elems);
    phase_end(transport, phases, REDUCE);
    phase_begin(transport, phases, BROADCAST, "broadcast");
    transport_group_begin(transport);
    for (int i = 1; i < group->size; i++)
        transport_send(transport, group->members[i], data, bytes);
    return transport_group_end(transport);
}

static Status sum_at_others(const Group *group, float *data, int64_t elems, Phases *phases) {
    Transport *transport = group->transport;
    size_t bytes = (size_t)elems * sizeof(float);
    transport_group_begin(transport);
    transport_send(transport, group->members[0], data, bytes);
    TRY(transport_group_end(transport));
    phase_end(transport, phases, REDUCE);
    phase_begin(transport, phases, BROADCAST, "broadcast");
    transport_group_begin(transport);
    transport_recv(transport, group->members[0], data, bytes);
    return transport_group_end(transport);
}

static Status naive_allreduce(const Group *group, const Payload *payload) {
    float *data = payload->data, *scratch = payload->scratch, scale = payload->scale;
    int64_t elems = payload->elems;
    for (int64_t start = 0; start < elems; start += SEGMENT_ELEMS) {
        int64_t segment = elems - start < SEGMENT_ELEMS ? elems - start : SEGMENT_ELEMS;
        phase_begin(group->transport, payload->phases, REDUCE, "reduce");
        vector_scale(group->transport, data + start, segment, scale);
        TRY(group->self == 0 ? sum_at_first(group, data + start, segment, scratch, payload->phases)
                             : sum_at_others(group, data + start, segment, payload->phases));
        phase_end(group->transport, payload->phases, BROADCAST);
    }
    return OK;
}

const Collective collective_naive = {
    .name = "naive", .scratch_elems = naive_scratch_elems, .predict_s = naive_predict_s, .allreduce = naive_allreduce};
