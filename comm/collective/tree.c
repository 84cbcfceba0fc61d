/* tree: sums pair up like the branches of a balanced tree over ranks, neighbours first.
 *
 *   N = 6        fold       0+1, 2+3 (each even one gives its values to the odd one); 4, 5 stay: 4 places are left
 *                step 0     places 0 <-> 1, 2 <-> 3
 *                step 1     places 0 <-> 2, 1 <-> 3:   ((0+1) + (2+3)) + (4+5)  ...  each element, everywhere
 *                unfold     the odd ones give back the sum
 *
 * Small data (recursive doubling): at each step two places exchange all they have, and both add: log2 N steps, log2 N S
 * bytes. Large data (recursive halving and doubling, Rabenseifner 2004): each keeps one half of what it had, and gives
 * the other; afterwards the halves are exchanged back, the last one first: 2 log2 N steps, 2 (N-1)/N S bytes. The first
 * exchange, the largest, is between neighbours, who most likely share a node. Folding costs two more steps of S.
 *
 * Both pair ranks alike and a + b = b + a, so the size of the data does not change the bits. */
#include "comm/collective/collective.h"
#include "comm/collective/cost.h"
#include "comm/collective/exchange.h"
#include "comm/collective/topology.h"
#include "comm/transport/vector.h"

enum { SMALL_ELEMS = 16 << 10, STEPS_MAX = 31 };
enum { FOLD, HALVING, DOUBLING, UNFOLD }; /* phases */

typedef struct Range {
    int64_t start, end;
} Range;

/* ---- who ---- */

/* The largest power of two of places. */
static int places_of(int size) {
    int places = 1;
    while (places <= size / 2)
        places *= 2;
    return places;
}

/* -1: the member is folded into the next one. */
static int place_of(int size, int member) {
    int folded = size - places_of(size);
    if (member >= 2 * folded)
        return member - folded;
    return member % 2 ? member / 2 : -1;
}

static int member_at(int size, int place) {
    int folded = size - places_of(size);
    return place < folded ? 2 * place + 1 : place + folded;
}

/* The member with which this one exchanges in a step. */
static int partner_of(const Group *group, int member, int step) {
    int place = place_of(group->size, member);
    return place < 0 ? -1 : member_at(group->size, place ^ 1 << step);
}

static int steps_of(int size) {
    int steps = 0;
    while (1 << steps < places_of(size))
        steps++;
    return steps;
}

/* What fold does to this member: 1 it gives, -1 it receives, 0 neither. */
static int folds(const Group *group, int member) {
    int folded = group->size - places_of(group->size);
    return member >= 2 * folded ? 0 : member % 2 ? -1 : 1;
}

/* ---- steps ---- */

static Status fold(const Group *group, const Payload *payload, int role) {
    float *data = payload->data;
    Exchange exchange = {.out = data, .sum = data, .out_scale = payload->scale, .sum_scale = payload->scale};
    if (role > 0) {
        exchange.to = group->members[group->self + 1];
        exchange.out_elems = payload->elems;
    } else {
        exchange.from = group->members[group->self - 1];
        exchange.sum_elems = payload->elems;
    }
    phase_begin(group->transport, payload->phases, FOLD, "fold");
    TRY(exchange_add(group->transport, &exchange, payload->scratch));
    phase_end(group->transport, payload->phases, FOLD);
    return OK;
}

static Status unfold(const Group *group, const Payload *payload, int role) {
    size_t bytes = (size_t)payload->elems * sizeof(float);
    phase_begin(group->transport, payload->phases, UNFOLD, "unfold");
    transport_group_begin(group->transport);
    if (role > 0)
        transport_recv(group->transport, group->members[group->self + 1], payload->data, bytes);
    else
        transport_send(group->transport, group->members[group->self - 1], payload->data, bytes);
    TRY(transport_group_end(group->transport));
    phase_end(group->transport, payload->phases, UNFOLD);
    return OK;
}

static Status doubling(const Group *group, const Payload *payload, float scale) {
    float *data = payload->data, *scratch = payload->scratch;
    int64_t elems = payload->elems;
    phase_begin(group->transport, payload->phases, DOUBLING, "doubling");
    if (scale != 1)
        vector_scale(group->transport, data, elems, scale);
    for (int step = 0; step < steps_of(group->size); step++) {
        int partner = group->members[partner_of(group, group->self, step)];
        Exchange exchange = {.to = partner,
                             .from = partner,
                             .out = data,
                             .sum = data,
                             .out_elems = elems,
                             .sum_elems = elems,
                             .out_scale = 1,
                             .sum_scale = 1};
        TRY(exchange_add(group->transport, &exchange, scratch));
    }
    phase_end(group->transport, payload->phases, DOUBLING);
    return OK;
}

static Range half_of(Range range, int which) {
    int64_t middle = range.start + chunk_start(0, range.end - range.start, 2, 1);
    return which ? (Range){middle, range.end} : (Range){range.start, middle};
}

static size_t bytes_of(Range range) { return (size_t)(range.end - range.start) * sizeof(float); }

static Status swap(const Group *group, int partner, float *data, Range out, Range in) {
    transport_group_begin(group->transport);
    if (bytes_of(out) > 0)
        transport_send(group->transport, partner, data + out.start, bytes_of(out));
    if (bytes_of(in) > 0)
        transport_recv(group->transport, partner, data + in.start, bytes_of(in));
    return transport_group_end(group->transport);
}

static Status halving_doubling(const Group *group, const Payload *payload, float scale) {
    Range kept[STEPS_MAX + 1] = {{0, payload->elems}}, given[STEPS_MAX];
    int steps = steps_of(group->size), place = place_of(group->size, group->self);
    float *data = payload->data;
    phase_begin(group->transport, payload->phases, HALVING, "halving");
    if (steps == 0)
        vector_scale(group->transport, data, payload->elems, scale);
    for (int step = 0; step < steps; step++) {
        int upper = place >> step & 1, partner = group->members[partner_of(group, group->self, step)];
        given[step] = half_of(kept[step], !upper);
        kept[step + 1] = half_of(kept[step], upper);
        Exchange exchange = {.to = partner,
                             .out = data + given[step].start,
                             .out_elems = given[step].end - given[step].start,
                             .out_scale = step == 0 ? scale : 1,
                             .from = partner,
                             .sum = data + kept[step + 1].start,
                             .sum_elems = kept[step + 1].end - kept[step + 1].start,
                             .sum_scale = step == 0 ? scale : 1};
        TRY(exchange_add(group->transport, &exchange, payload->scratch));
    }
    phase_end(group->transport, payload->phases, HALVING);
    phase_begin(group->transport, payload->phases, DOUBLING, "doubling");
    for (int step = steps - 1; step >= 0; step--)
        TRY(swap(group, group->members[partner_of(group, group->self, step)], data, kept[step + 1], given[step]));
    phase_end(group->transport, payload->phases, DOUBLING);
    return OK;
}

/* ---- the collective ---- */

static int64_t tree_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    (void)group, (void)codec;
    return exchange_scratch_elems(elems);
}

static Status tree_allreduce(const Group *group, const Payload *payload) {
    int role = folds(group, group->self);
    float scale = role < 0 ? 1 : payload->scale; /* while folding */
    if (payload->elems == 0)
        return OK;
    if (role != 0)
        TRY(fold(group, payload, role));
    if (role <= 0)
        TRY((payload->elems <= SMALL_ELEMS ? doubling : halving_doubling)(group, payload, scale));
    return role != 0 ? unfold(group, payload, role) : OK;
}

static int fold_peer(const Group *group, int member, int step) {
    (void)step;
    return folds(group, member) > 0 ? member + 1 : -1;
}
static int unfold_peer(const Group *group, int member, int step) {
    (void)step;
    return folds(group, member) < 0 ? member - 1 : -1;
}

static double tree_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    double bytes = (double)elems * sizeof(float), time_s = 0, largest = topology_of(group).largest;
    if (group->size > places_of(group->size))
        time_s = cost_shift_s(group, costs, fold_peer, 0, bytes) + cost_shift_s(group, costs, unfold_peer, 0, bytes) +
                 bytes * costs->add_s_per_byte;
    for (int step = 0; step < steps_of(group->size); step++) {
        if (elems > SMALL_ELEMS)
            bytes /= 2;
        double step_s = cost_shift_s(group, costs, partner_of, step, bytes), add_s = bytes * costs->add_s_per_byte;
        time_s += (elems > SMALL_ELEMS ? 2 : 1) * step_s + cost_work_s(costs, add_s, largest * add_s);
    }
    return time_s;
}

const Collective collective_tree = {
    .name = "tree", .scratch_elems = tree_scratch_elems, .predict_s = tree_predict_s, .allreduce = tree_allreduce};
