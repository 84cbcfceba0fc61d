#include "comm/collective/pipeline.h"

#include "comm/collective/vector.h"

#include <assert.h>
#include <string.h>

enum {
    SLOTS = 2,                    /* segments that arrive at a time: one is added, the next one travels */
    SEGMENT_MIN_ELEMS = 16 << 10, /* below, latency costs more than the pipeline gains */
    SEGMENT_MAX_ELEMS = 128 << 10,
    ARRIVALS_ELEMS = 512 << 10, /* of all members together: stays in the outer cache */
    SEGMENTS_MIN = 4,           /* what a pipeline needs to fill */
    BLOCK_ELEMS = 2048,         /* its sum stays in the inner cache */
    BLOCKS_PER_POLL = 8,
};

typedef struct Slice {
    int64_t start, elems;
} Slice;

typedef struct Pipeline {
    /* set once */
    Transport *transport;
    const Shape *shape;
    const Stage *stages;
    float *data;
    int64_t elems, segment_elems, segments;
    bool direct[STAGES_MAX];     /* the stage's members share the memory of data */
    float *scales;               /* f32[members of stage 0] */
    float *arrivals[STAGES_MAX]; /* f32[SLOTS][members - 1][arrival_elems] */
    int64_t arrival_elems[STAGES_MAX];
    /* under way */
    Ticket tickets[2 * STAGES_MAX][SLOTS]; /* of each step's last segments */
    Ticket latest;                         /* the group that was started last */
} Pipeline;

/* ---- who has which part ---- */

static int64_t round_up(int64_t elems, int64_t unit) { return (elems + unit - 1) / unit * unit; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static Slice slice_of(Slice whole, int parts, int i) {
    int64_t start = chunk_start(whole.elems, parts, i);
    return (Slice){whole.start + start, chunk_start(whole.elems, parts, i + 1) - start};
}

/* Of one owner of stage 0. Whole blocks of CHUNK_ALIGN_ELEMS for each owner of stage 1, so that they share alike. */
static int64_t segment_elems_of(const Shape *shape, int64_t elems) {
    int64_t part = (elems + shape->owners[0] - 1) / shape->owners[0];
    int64_t unit = (int64_t)CHUNK_ALIGN_ELEMS * (shape->stages > 1 ? shape->owners[1] : 1);
    int64_t wanted = least(part / SEGMENTS_MIN, SEGMENT_MAX_ELEMS);
    wanted = least(wanted, ARRIVALS_ELEMS / most(shape->members[0] - 1, 1));
    return least(round_up(most(wanted, SEGMENT_MIN_ELEMS), unit), round_up(part, unit));
}

int64_t pipeline_segments(const Shape *shape, int64_t elems) {
    int64_t part = 0, segment = segment_elems_of(shape, elems);
    for (int i = 0; i < shape->owners[0]; i++)
        part = most(part, slice_of((Slice){0, elems}, shape->owners[0], i).elems);
    return segment > 0 ? (part + segment - 1) / segment : 0;
}

static bool takes_part(const Pipeline *self, int stage) { return self->stages[stage].group.self >= 0; }

static bool owns(const Pipeline *self, int stage) {
    return takes_part(self, stage) && self->stages[stage].group.self < self->stages[stage].owners;
}

static Slice part_of(const Pipeline *self, int stage, int64_t segment, int owner) {
    if (stage > 0)
        return slice_of(part_of(self, 0, segment, self->stages[0].group.self), self->stages[stage].owners, owner);
    Slice whole = slice_of((Slice){0, self->elems}, self->stages[0].owners, owner);
    int64_t start = least(segment * self->segment_elems, whole.elems);
    return (Slice){whole.start + start, least(whole.elems - start, self->segment_elems)};
}

static float *arrival(const Pipeline *self, int stage, int64_t segment, int member) {
    const Group *group = &self->stages[stage].group;
    int place = member < group->self ? member : member - 1;
    int64_t row = segment % SLOTS * (self->shape->members[stage] - 1) + place;
    return self->arrivals[stage] + row * self->arrival_elems[stage];
}

static float *at_peer(const Pipeline *self, int stage, int member, int64_t start) {
    return transport_peer_ptr(self->transport, self->data + start, self->stages[stage].group.members[member]);
}

/* ---- what travels: every message of a pipeline is named here ---- */

/* Empty parts do not travel; in shared memory none does, but it counts. */
static void give(Pipeline *self, int stage, int member, Slice part) {
    int peer = self->stages[stage].group.members[member];
    size_t bytes = (size_t)part.elems * sizeof(float);
    if (self->direct[stage])
        transport_count_sent(self->transport, peer, bytes);
    else if (bytes > 0)
        transport_send(self->transport, peer, self->data + part.start, bytes);
}

static void take(Pipeline *self, int stage, int member, float *into, Slice part) {
    if (!self->direct[stage] && part.elems > 0)
        transport_recv(self->transport, self->stages[stage].group.members[member], into,
                       (size_t)part.elems * sizeof(float));
}

static void name_scales(Pipeline *self) {
    const Group *group = &self->stages[0].group;
    for (int i = 0; i < group->size; i++) {
        if (i != group->self && i < self->stages[0].owners)
            transport_send(self->transport, group->members[i], &self->scales[group->self], sizeof(float));
        if (i != group->self && owns(self, 0))
            transport_recv(self->transport, group->members[i], &self->scales[i], sizeof(float));
    }
}

static void name_scatter(Pipeline *self, int stage, int64_t segment) {
    const Group *group = &self->stages[stage].group;
    if (stage == 0 && segment == 0)
        name_scales(self);
    for (int i = 0; i < group->size; i++) {
        if (i != group->self && i < self->stages[stage].owners)
            give(self, stage, i, part_of(self, stage, segment, i));
        if (i != group->self && owns(self, stage))
            take(self, stage, i, arrival(self, stage, segment, i), part_of(self, stage, segment, group->self));
    }
}

static void name_gather(Pipeline *self, int stage, int64_t segment) {
    const Group *group = &self->stages[stage].group;
    for (int i = 0; i < group->size; i++) {
        if (i != group->self && owns(self, stage))
            give(self, stage, i, part_of(self, stage, segment, group->self));
        if (i != group->self && i < self->stages[stage].owners) {
            Slice part = part_of(self, stage, segment, i);
            take(self, stage, i, self->data + part.start, part);
        }
    }
}

/* In shared memory: each owner has written its last. */
static Status name_done(Pipeline *self) {
    const Group *group = &self->stages[0].group;
    transport_group_begin(self->transport);
    for (int i = 0; i < group->size; i++) {
        if (i != group->self && owns(self, 0))
            transport_send(self->transport, group->members[i], NULL, 0);
        if (i != group->self && i < self->stages[0].owners)
            transport_recv(self->transport, group->members[i], NULL, 0);
    }
    return transport_group_end(self->transport);
}

/* ---- what is added and copied: in blocks, looking at the transport now and then ---- */

static Status poll(Pipeline *self, int64_t block) {
    bool complete;
    if (self->latest && block % BLOCKS_PER_POLL == BLOCKS_PER_POLL - 1)
        return transport_group_test(self->transport, self->latest, &complete);
    return OK;
}

/* A member's values of a block that begins `offset` into this rank's part. */
static const float *values_of(const Pipeline *self, int stage, int64_t segment, int member, int64_t start,
                              int64_t offset) {
    if (member == self->stages[stage].group.self)
        return self->data + start;
    return self->direct[stage] ? at_peer(self, stage, member, start) : arrival(self, stage, segment, member) + offset;
}

static void sum_block(const Pipeline *self, int stage, int64_t segment, int64_t start, int64_t offset, int64_t elems,
                      float *sum) {
    for (int i = 0; i < self->stages[stage].group.size; i++) {
        const float *values = values_of(self, stage, segment, i, start, offset);
        float scale = stage == 0 ? self->scales[i] : 1;
        if (i == 0)
            vector_set_scaled(sum, scale, values, elems);
        else
            vector_add_scaled(sum, scale, values, elems);
    }
}

static void spread_block(const Pipeline *self, int stage, const float *sum, int64_t start, int64_t elems) {
    for (int i = 0; i < self->stages[stage].group.size; i++)
        if (i != self->stages[stage].group.self)
            memcpy(at_peer(self, stage, i, start), sum, (size_t)elems * sizeof(float));
}

/* The last stage's sum goes to shared memory while it is in the cache: then gather has nothing left to do. */
static bool spreads_at_once(const Pipeline *self, int stage) {
    return self->direct[stage] && stage == self->shape->stages - 1;
}

static Status sum(Pipeline *self, int stage, int64_t segment) {
    if (!owns(self, stage))
        return OK;
    Slice part = part_of(self, stage, segment, self->stages[stage].group.self);
    float block_sum[BLOCK_ELEMS];
    for (int64_t at = 0; at < part.elems; at += BLOCK_ELEMS) {
        int64_t elems = least(part.elems - at, BLOCK_ELEMS), start = part.start + at;
        sum_block(self, stage, segment, start, at, elems, block_sum);
        memcpy(self->data + start, block_sum, (size_t)elems * sizeof(float));
        if (spreads_at_once(self, stage))
            spread_block(self, stage, block_sum, start, elems);
        TRY(poll(self, at / BLOCK_ELEMS));
    }
    return OK;
}

static Status spread(Pipeline *self, int stage, int64_t segment) {
    if (!owns(self, stage) || !self->direct[stage] || spreads_at_once(self, stage))
        return OK;
    Slice part = part_of(self, stage, segment, self->stages[stage].group.self);
    for (int64_t at = 0; at < part.elems; at += BLOCK_ELEMS) {
        int64_t elems = least(part.elems - at, BLOCK_ELEMS), start = part.start + at;
        spread_block(self, stage, self->data + start, start, elems);
        TRY(poll(self, at / BLOCK_ELEMS));
    }
    return OK;
}

/* ---- the pipeline ---- */

static Status wait_for(Pipeline *self, Ticket ticket) {
    if (ticket == self->latest)
        self->latest = 0;
    return transport_group_wait(self->transport, ticket);
}

/* Steps 0..stages-1 scatter, the others gather, from the last stage back to the first. Each waits for the segment's
 * step before, and sums what that brought; one more only waits. */
static Status step(Pipeline *self, int index, int64_t segment) {
    int stages = self->shape->stages, stage = index < stages ? index : 2 * stages - 1 - index;
    if (index > 0)
        TRY(wait_for(self, self->tickets[index - 1][segment % SLOTS]));
    if (index > 0 && index <= stages)
        TRY(sum(self, index - 1, segment));
    if (index == 2 * stages)
        return OK;
    if (index >= stages)
        TRY(spread(self, stage, segment));
    transport_group_begin(self->transport);
    if (takes_part(self, stage) && index < stages)
        name_scatter(self, stage, segment);
    else if (takes_part(self, stage))
        name_gather(self, stage, segment);
    self->latest = self->tickets[index][segment % SLOTS] = transport_group_start(self->transport);
    return OK;
}

static bool shares_memory(const Pipeline *self, int stage) {
    const Group *group = &self->stages[stage].group;
    for (int i = 0; i < group->size; i++)
        if (i != group->self && !at_peer(self, stage, i, 0))
            return false;
    return true;
}

static int64_t arrival_elems_of(const Shape *shape, int stage, int64_t segment_elems) {
    return stage == 0 ? segment_elems : segment_elems / shape->owners[stage];
}

int64_t pipeline_scratch_elems(const Shape *shape, int64_t elems) {
    if (shape->stages == 0)
        return 0;
    int64_t segment = segment_elems_of(shape, elems), total = round_up(shape->members[0], 16);
    for (int stage = 0; stage < shape->stages; stage++)
        total += SLOTS * (shape->members[stage] - 1) * arrival_elems_of(shape, stage, segment);
    return total;
}

static void carve(Pipeline *self, float scale, float *scratch) {
    self->scales = scratch;
    scratch += round_up(self->shape->members[0], 16);
    for (int stage = 0; stage < self->shape->stages; stage++) {
        self->arrival_elems[stage] = arrival_elems_of(self->shape, stage, self->segment_elems);
        self->arrivals[stage] = scratch;
        scratch += SLOTS * (self->shape->members[stage] - 1) * self->arrival_elems[stage];
    }
    self->scales[self->stages[0].group.self] = scale;
    self->direct[0] = shares_memory(self, 0); /* stage 1 stands between nodes */
}

Status pipeline_run(const Shape *shape, const Stage *stages, float *data, int64_t elems, float scale, float *scratch) {
    if (shape->stages == 0)
        vector_scale(data, elems, scale);
    if (shape->stages == 0 || elems == 0)
        return OK;
    Pipeline self = {.transport = stages[0].group.transport,
                     .shape = shape,
                     .stages = stages,
                     .data = data,
                     .elems = elems,
                     .segment_elems = segment_elems_of(shape, elems),
                     .segments = pipeline_segments(shape, elems)};
    carve(&self, scale, scratch);
    int steps = 2 * shape->stages + 1;
    for (int64_t tick = 0; tick < self.segments + steps - 1; tick++)
        for (int index = 0; index < steps; index++)
            if (tick >= index && tick - index < self.segments)
                TRY(step(&self, index, tick - index));
    return self.direct[0] ? name_done(&self) : OK;
}
