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
 * While reducing, a chunk moves in segments that fit the cache, because what arrives is read again at once to be
 * added. Each value is scaled when its own member first touches it: on sending (step 0) or on adding. */
#include "comm/collective/collective.h"
#include "comm/collective/vector.h"

enum { SEGMENT_ELEMS = 128 << 10 };

typedef struct Chunk {
    float *data;
    int64_t elems;
} Chunk;

static Chunk chunk_of(const Group *group, float *data, int64_t elems, int index) {
    int c = (index % group->size + group->size) % group->size;
    int64_t start = chunk_start(elems, group->size, c);
    return (Chunk){data + start, chunk_start(elems, group->size, c + 1) - start};
}

static Chunk segment_of(Chunk chunk, int64_t start) {
    int64_t rest = chunk.elems - start;
    if (rest <= 0)
        return (Chunk){chunk.data, 0};
    return (Chunk){chunk.data + start, rest < SEGMENT_ELEMS ? rest : SEGMENT_ELEMS};
}

/* Sends one slice to the next member while another arrives from the one before. Empty ones do not travel. */
static Status shift(const Group *group, Chunk out, float *in, int64_t in_elems) {
    Transport *transport = group->transport;
    transport_group_begin(transport);
    if (out.elems > 0)
        transport_send(transport, group->members[(group->self + 1) % group->size], out.data,
                       (size_t)out.elems * sizeof(float));
    if (in_elems > 0)
        transport_recv(transport, group->members[(group->self + group->size - 1) % group->size], in,
                       (size_t)in_elems * sizeof(float));
    return transport_group_end(transport);
}

static Status reduce_step(const Group *group, Chunk out, Chunk sum, float scale_out, float scale, float *scratch) {
    for (int64_t start = 0; start < out.elems || start < sum.elems; start += SEGMENT_ELEMS) {
        Chunk out_segment = segment_of(out, start), sum_segment = segment_of(sum, start);
        if (scale_out != 1)
            vector_scale(out_segment.data, out_segment.elems, scale_out);
        TRY(shift(group, out_segment, scratch, sum_segment.elems));
        vector_scale_add(sum_segment.data, scale, scratch, sum_segment.elems);
    }
    return OK;
}

static int64_t ring_scratch_elems(int size, int64_t elems) {
    (void)size;
    return elems < SEGMENT_ELEMS ? elems : SEGMENT_ELEMS;
}

static Status ring_allreduce(const Group *group, float *data, int64_t elems, float scale, float *scratch) {
    int self = group->self, steps = group->size - 1;
    if (steps == 0)
        vector_scale(data, elems, scale);
    for (int step = 0; step < steps; step++) {
        Chunk out = chunk_of(group, data, elems, self - step), sum = chunk_of(group, data, elems, self - step - 1);
        TRY(reduce_step(group, out, sum, step == 0 ? scale : 1, scale, scratch));
    }
    for (int step = 0; step < steps; step++) {
        Chunk in = chunk_of(group, data, elems, self - step);
        TRY(shift(group, chunk_of(group, data, elems, self + 1 - step), in.data, in.elems));
    }
    return OK;
}

const Collective collective_ring = {.name = "ring", .scratch_elems = ring_scratch_elems, .allreduce = ring_allreduce};
