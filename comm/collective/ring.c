/* ring: reduce-scatter, then all-gather, each N-1 steps round a ring (Patarasuk and Yuan, 2009). The data is cut into N
 * chunks; at every step each member sends one chunk to the next member and receives another from the one before.
 *
 *   N = 3, what member 0, 1, 2 holds of chunks | a | b | c |, and what it sends:
 *     reduce-scatter   step 0   0 sends a, 1 sends b, 2 sends c, each adds what it receives
 *                      step 1   0 sends c, 1 sends a, 2 sends b: now 0 has all of b, 1 of c, 2 of a
 *     all-gather       step 0   0 sends b, 1 sends c, 2 sends a, each stores what it receives
 *                      step 1   0 sends a, 1 sends b, 2 sends c
 *
 * Cost: 2 (N-1) (alpha + S/N beta) + (N-1)/N S gamma. Each member sends 2 (N-1)/N S, the least possible.
 * Chunk c is summed in the order c, c+1, ..., c-1, by one member each, and then copied: identical bits everywhere.
 *
 * Each value is scaled when its own member first touches it: on sending (step 0) or on adding. */
#include "comm/collective/collective.h"
#include "comm/collective/cost.h"
#include "comm/collective/exchange.h"
#include "comm/collective/vector.h"

typedef struct Chunk {
    float *data;
    int64_t elems;
} Chunk;

static Chunk chunk_of(const Group *group, float *data, int64_t elems, int index) {
    int c = (index % group->size + group->size) % group->size;
    int64_t start = chunk_start(0, elems, group->size, c);
    return (Chunk){data + start, chunk_start(0, elems, group->size, c + 1) - start};
}

static int next_of(const Group *group, int member, int step) {
    (void)step;
    return (member + 1) % group->size;
}

static Status reduce_step(const Group *group, Chunk out, Chunk sum, float out_scale, float scale, float *scratch) {
    Exchange exchange = {.to = group->members[next_of(group, group->self, 0)],
                         .out = out.data,
                         .out_elems = out.elems,
                         .out_scale = out_scale,
                         .from = group->members[(group->self + group->size - 1) % group->size],
                         .sum = sum.data,
                         .sum_elems = sum.elems,
                         .sum_scale = scale};
    return exchange_add(group->transport, &exchange, scratch);
}

/* Sends one chunk to the next member while another arrives from the one before. Empty ones do not travel. */
static Status gather_step(const Group *group, Chunk out, Chunk in) {
    Transport *transport = group->transport;
    transport_group_begin(transport);
    if (out.elems > 0)
        transport_send(transport, group->members[next_of(group, group->self, 0)], out.data,
                       (size_t)out.elems * sizeof(float));
    if (in.elems > 0)
        transport_recv(transport, group->members[(group->self + group->size - 1) % group->size], in.data,
                       (size_t)in.elems * sizeof(float));
    return transport_group_end(transport);
}

static int64_t ring_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    (void)group, (void)codec;
    return exchange_scratch_elems(elems);
}

static double ring_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    const double chunk = (double)elems * sizeof(float) / group->size, steps = group->size - 1;
    return steps > 0 ? steps * (2 * cost_shift_s(group, costs, next_of, 0, chunk) + chunk * costs->add_s_per_byte) : 0;
}

static Status ring_allreduce(const Group *group, const Payload *payload) {
    float *data = payload->data, *scratch = payload->scratch, scale = payload->scale;
    int64_t elems = payload->elems;
    int self = group->self, steps = group->size - 1;
    if (steps == 0)
        vector_scale(data, elems, scale);
    for (int step = 0; step < steps; step++) {
        Chunk out = chunk_of(group, data, elems, self - step), sum = chunk_of(group, data, elems, self - step - 1);
        TRY(reduce_step(group, out, sum, step == 0 ? scale : 1, scale, scratch));
    }
    for (int step = 0; step < steps; step++) {
        Chunk out = chunk_of(group, data, elems, self + 1 - step), in = chunk_of(group, data, elems, self - step);
        TRY(gather_step(group, out, in));
    }
    return OK;
}

const Collective collective_ring = {
    .name = "ring", .scratch_elems = ring_scratch_elems, .predict_s = ring_predict_s, .allreduce = ring_allreduce};
