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
 * Each value is scaled when its own member first touches it: on sending (step 0) or on adding.
 *
 * Chunks travel in segments, and unit u is segment u % K of step u / K. Unit u leaves once unit u - window is complete,
 * so up to `window` units travel while one is added, across the ends of steps: the links do not wait for sums. What unit
 * u sends is what unit u - K left; window <= K, so it is there. A place for what arrives is named earlier, once unit
 * u - places is complete: a member that is ahead sends before this one has come as far, and MPI copies twice what it has
 * no place for. places <= K too, so what is gathered overwrites only what has left. A device does one group after the
 * other: there what a unit sends and receives is one group, or all would wait for what nobody has sent yet. */
#include "comm/collective/collective.h"
#include "comm/collective/cost.h"
#include "comm/collective/topology.h"
#include "comm/transport/vector.h"

enum {
    SEGMENT_ELEMS = 64 << 10, /* a piece of the mpi transport; shorter ones cost more than their overlap gains */
    WINDOW_MAX = 4,        /* units under way */
    PLACES_MAX = 6,        /* units that have a place to arrive in */
    POLL_ELEMS = 16 << 10, /* added between two looks at the transport */
};

enum { REDUCE_SCATTER, ALL_GATHER }; /* phases */

typedef struct Ring {
    Transport *transport;
    int size, self, to, from;
    float *data, *arrivals; /* f32[places][segment_elems] */
    int64_t elems, segment_elems, segments, window, places;
    bool together; /* a unit is one group */
    float scale;
    Phases *phases;
    Ticket sends[WINDOW_MAX], receives[PLACES_MAX];
} Ring;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t longest_chunk(int size, int64_t elems) {
    int64_t longest = 0;
    for (int c = 0; c < size; c++)
        longest = most(longest, chunk_start(0, elems, size, c + 1) - chunk_start(0, elems, size, c));
    return longest;
}

static int64_t segment_elems_of(const Group *group, int64_t chunk) {
    bool on_host = group->transport->vector->on_host;
    return least(chunk, on_host ? SEGMENT_ELEMS : most(SEGMENT_ELEMS, chunk / WINDOW_MAX)); /* a device: few and large */
}

static int64_t segments_of(const Group *group, int64_t chunk) {
    return chunk > 0 ? (chunk - 1) / segment_elems_of(group, chunk) + 1 : 0;
}

static int64_t places_of(const Group *group, int64_t chunk) {
    return least(segments_of(group, chunk), group->transport->vector->on_host ? PLACES_MAX : WINDOW_MAX);
}

static Ring ring_of(const Group *group, const Payload *payload) {
    int64_t chunk = longest_chunk(group->size, payload->elems);
    return (Ring){.transport = group->transport,
                  .size = group->size,
                  .self = group->self,
                  .to = group->members[(group->self + 1) % group->size],
                  .from = group->members[(group->self + group->size - 1) % group->size],
                  .data = payload->data,
                  .arrivals = payload->scratch,
                  .elems = payload->elems,
                  .segment_elems = segment_elems_of(group, chunk),
                  .segments = segments_of(group, chunk),
                  .window = least(segments_of(group, chunk), WINDOW_MAX),
                  .places = places_of(group, chunk),
                  .together = !group->transport->vector->on_host,
                  .scale = payload->scale,
                  .phases = payload->phases};
}

/* Of the chunk that lies `back` chunks before this member's own. */
static Slice segment_of(const Ring *ring, int64_t unit, int64_t back) {
    int c = (int)((ring->self + 2 * ring->size - back) % ring->size);
    int64_t end = chunk_start(0, ring->elems, ring->size, c + 1);
    int64_t at = chunk_start(0, ring->elems, ring->size, c) + unit % ring->segments * ring->segment_elems;
    int64_t start = least(at, end);
    return (Slice){start, least(end - start, ring->segment_elems)};
}

static Slice leaving(const Ring *ring, int64_t unit) { return segment_of(ring, unit, unit / ring->segments); }
static Slice arriving(const Ring *ring, int64_t unit) { return segment_of(ring, unit, unit / ring->segments + 1); }

static bool is_added(const Ring *ring, int64_t unit) { return unit < (ring->size - 1) * ring->segments; }

/* What is added arrives beside data, what is gathered in its place. */
static float *arrival(const Ring *ring, int64_t unit) {
    return is_added(ring, unit) ? ring->arrivals + unit % ring->places * ring->segment_elems
                                : ring->data + arriving(ring, unit).start;
}

/* Empty segments do not travel. */
static void name_receive(Ring *ring, int64_t unit) {
    Slice in = arriving(ring, unit);
    if (in.elems > 0)
        transport_recv(ring->transport, ring->from, arrival(ring, unit), (size_t)in.elems * sizeof(float));
}

static void receive_unit(Ring *ring, int64_t unit) {
    if (ring->together)
        return;
    transport_group_begin(ring->transport);
    name_receive(ring, unit);
    ring->receives[unit % ring->places] = transport_group_start(ring->transport);
}

static void send_unit(Ring *ring, int64_t unit) {
    Slice out = leaving(ring, unit);
    bool added = is_added(ring, unit);
    phase_begin(ring->transport, ring->phases, added ? REDUCE_SCATTER : ALL_GATHER, added ? "reduce-scatter" : "all-gather");
    if (unit < ring->segments && ring->scale != 1)
        vector_scale(ring->transport, ring->data + out.start, out.elems, ring->scale);
    transport_group_begin(ring->transport);
    if (out.elems > 0)
        transport_send(ring->transport, ring->to, ring->data + out.start, (size_t)out.elems * sizeof(float));
    if (ring->together)
        name_receive(ring, unit);
    Ticket ticket = ring->sends[unit % ring->window] = transport_group_start(ring->transport);
    if (ring->together)
        ring->receives[unit % ring->places] = ticket;
}

/* The youngest unit keeps the transport moving. */
static Status add_unit(Ring *ring, int64_t unit) {
    Slice sum = arriving(ring, unit);
    Ticket youngest = ring->receives[(unit + ring->places - 1) % ring->places];
    for (int64_t at = 0; at < sum.elems; at += POLL_ELEMS) {
        bool complete;
        vector_scale_add(ring->transport, ring->data + sum.start + at, ring->scale, arrival(ring, unit) + at,
                         least(sum.elems - at, POLL_ELEMS));
        if (ring->places > 1)
            TRY(transport_group_test(ring->transport, youngest, &complete));
    }
    return OK;
}

static int next_of(const Group *group, int member, int step) {
    (void)step;
    return (member + 1) % group->size;
}

static int64_t ring_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    (void)codec;
    int64_t chunk = longest_chunk(group->size, elems);
    return places_of(group, chunk) * segment_elems_of(group, chunk);
}

static double ring_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    const double chunk = (double)elems * sizeof(float) / group->size, steps = group->size - 1;
    Topology topology = topology_of(group);
    if (group->size == 1 || elems == 0)
        return 0;
    double shifts_s = steps * cost_shift_s(group, costs, next_of, 0, chunk), add_s = chunk * costs->add_s_per_byte;
    double adds_s = steps * cost_work_s(costs, add_s, topology.largest * add_s);
    double pieces = topology.nodes > 1 ? steps * (double)segments_of(group, longest_chunk(group->size, elems)) : 1;
    return shifts_s + cost_overlap_s(shifts_s, adds_s, pieces);
}

static Status ring_allreduce(const Group *group, const Payload *payload) {
    Ring ring = ring_of(group, payload);
    int64_t units = 2 * (int64_t)(group->size - 1) * ring.segments;
    if (units == 0)
        vector_scale(group->transport, payload->data, payload->elems, payload->scale);
    for (int64_t unit = 0; unit < least(units, ring.places); unit++)
        receive_unit(&ring, unit);
    for (int64_t unit = 0; unit < least(units, ring.window); unit++)
        send_unit(&ring, unit);
    for (int64_t unit = 0; unit < units; unit++) {
        TRY(transport_group_wait(ring.transport, ring.receives[unit % ring.places]));
        if (is_added(&ring, unit))
            TRY(add_unit(&ring, unit));
        TRY(transport_group_wait(ring.transport, ring.sends[unit % ring.window]));
        phase_end(ring.transport, ring.phases, is_added(&ring, unit) ? REDUCE_SCATTER : ALL_GATHER);
        if (unit + ring.places < units)
            receive_unit(&ring, unit + ring.places);
        if (unit + ring.window < units)
            send_unit(&ring, unit + ring.window);
    }
    return OK;
}

const Collective collective_ring = {
    .name = "ring", .scratch_elems = ring_scratch_elems, .predict_s = ring_predict_s, .allreduce = ring_allreduce};
