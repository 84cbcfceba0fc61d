#include "comm/collective/pipeline.h"

#include "comm/transport/vector.h"

#include <assert.h>
#include <string.h>

enum {
    SLOTS = 2,                    /* segments that arrive at a time: one is added, the next one travels */
    RESULT_SLOTS = 3,             /* segments whose coded result is still on its way */
    SEGMENT_MIN_ELEMS = 16 << 10, /* below, latency costs more than the pipeline gains */
    SEGMENT_MAX_ELEMS = 64 << 10, /* the last one of a column travels alone */
    DEVICE_SEGMENTS_WANTED = 6,      /* a device starts each piece of work anew: few and large ones */
    DEVICE_SEGMENT_MIN_ELEMS = 256 << 10,
    DEVICE_SEGMENT_MAX_ELEMS = 4 << 20,
    ARRIVALS_ELEMS = 512 << 10,   /* of all members together: stays in the outer cache */
    SEGMENTS_WANTED = 12,         /* the shares of filling and emptying the pipeline are small then */
    BLOCK_ELEMS = 2048,           /* its sum stays in the inner cache */
    BLOCKS_PER_POLL = 8,
};
static_assert(CHUNK_ALIGN_ELEMS % BLOCK_ELEMS == 0, "");

/* Rows of bytes in scratch. */
typedef struct Rows {
    char *first;
    size_t row_bytes;
} Rows;

/* How elems are cut, alike on all ranks. */
typedef struct Cut {
    const Shape *shape;
    int64_t offset, elems, segment_elems, segments;
} Cut;

typedef struct Pipeline {
    /* set once */
    Transport *transport;
    const Stage *stages;
    const Shape *shape;
    Cut cut;
    float *data;
    Codec *codec;
    float scale;
    Phases *phases;
    int first, last;           /* steps */
    bool direct[STAGES_MAX];   /* the stage's members share the memory of data */
    float *scales;             /* f32[members of stage 0] */
    Rows arrivals[STAGES_MAX]; /* [SLOTS][members - 1], f32 or wire */
    Rows leaving[STAGES_MAX];  /* [SLOTS][owners], wire; of coded stages */
    Rows results;              /* [RESULT_SLOTS][owners of stage 0, or 1 if only stage 1 is coded], wire */
    Rows sums;                 /* [1], f32; of a device */
    /* under way */
    Ticket tickets[2 * STAGES_MAX][SLOTS]; /* of each step's last segments */
    Ticket latest;                         /* the group that was started last */
} Pipeline;

/* ---- who has which part ---- */

static int64_t round_up(int64_t elems, int64_t unit) { return (elems + unit - 1) / unit * unit; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static Slice slice_of(const Cut *cut, Slice whole, int parts, int i) {
    int64_t offset = cut->offset + whole.start, start = chunk_start(offset, whole.elems, parts, i);
    return (Slice){whole.start + start, chunk_start(offset, whole.elems, parts, i + 1) - start};
}

/* Of one owner of stage 0. Whole blocks of CHUNK_ALIGN_ELEMS for each owner of stage 1, so that they share alike. */
static int64_t segment_elems_of(const Shape *shape, int64_t elems) {
    int64_t part = (elems + shape->owners[0] - 1) / shape->owners[0];
    int64_t unit = (int64_t)CHUNK_ALIGN_ELEMS * (shape->stages > 1 ? shape->owners[1] : 1);
    int64_t wanted = least(part / SEGMENTS_WANTED, SEGMENT_MAX_ELEMS);
    wanted = least(wanted, ARRIVALS_ELEMS / most(shape->members[0] - 1, 1));
    if (!shape->on_host) { /* two stages have a lane each: they overlap */
        wanted = shape->stages > 1 ? most(part / DEVICE_SEGMENTS_WANTED, DEVICE_SEGMENT_MIN_ELEMS) : part;
        wanted = least(least(wanted, part), DEVICE_SEGMENT_MAX_ELEMS);
    }
    return least(round_up(most(wanted, SEGMENT_MIN_ELEMS), unit), round_up(part, unit));
}

/* Segments of a part lie between multiples of segment_elems, counted from the block in which the part begins. */
static int64_t blocks_start(const Cut *cut, Slice whole) {
    return whole.start - (cut->offset + whole.start) % CHUNK_ALIGN_ELEMS;
}

static Cut cut_of(const Shape *shape, int64_t offset, int64_t elems) {
    Cut cut = {shape, offset, elems, segment_elems_of(shape, elems), 0};
    for (int i = 0; i < shape->owners[0]; i++) {
        Slice whole = slice_of(&cut, (Slice){0, elems}, shape->owners[0], i);
        int64_t span = whole.start + whole.elems - blocks_start(&cut, whole);
        if (whole.elems > 0)
            cut.segments = most(cut.segments, (span + cut.segment_elems - 1) / cut.segment_elems);
    }
    return cut;
}

int64_t pipeline_segments(const Shape *shape, int64_t elems) {
    return elems > 0 ? cut_of(shape, 0, elems).segments : 0;
}

/* Of stage 0. */
static Slice segment_of(const Cut *cut, int64_t segment, int owner) {
    Slice whole = slice_of(cut, (Slice){0, cut->elems}, cut->shape->owners[0], owner);
    int64_t stop = whole.start + whole.elems, blocks = blocks_start(cut, whole);
    int64_t start = most(whole.start, least(blocks + segment * cut->segment_elems, stop));
    return (Slice){start, least(blocks + (segment + 1) * cut->segment_elems, stop) - start};
}

int64_t pipeline_owned(const Shape *shape, const int *owner, int64_t offset, int64_t elems, Slice *slices) {
    int64_t count = 0;
    for (int stage = 0; stage < shape->stages; stage++)
        if (owner[stage] < 0 || owner[stage] >= shape->owners[stage])
            return 0;
    Cut cut = cut_of(shape, offset, elems);
    for (int64_t segment = 0; segment < cut.segments; segment++) {
        Slice part = segment_of(&cut, segment, owner[0]);
        if (shape->stages > 1)
            part = slice_of(&cut, part, shape->owners[1], owner[1]);
        if (part.elems > 0 && slices)
            slices[count] = part;
        count += part.elems > 0;
    }
    return count;
}

static bool takes_part(const Pipeline *self, int stage) { return self->stages[stage].group.self >= 0; }

static bool owns(const Pipeline *self, int stage) {
    return takes_part(self, stage) && self->stages[stage].group.self < self->stages[stage].owners;
}

static Slice part_of(const Pipeline *self, int stage, int64_t segment, int owner) {
    Slice part = segment_of(&self->cut, segment, stage == 0 ? owner : self->stages[0].group.self);
    return stage == 0 ? part : slice_of(&self->cut, part, self->stages[stage].owners, owner);
}

static Slice own_part(const Pipeline *self, int stage, int64_t segment) {
    return part_of(self, stage, segment, self->stages[stage].group.self);
}

static size_t wire_bytes(const Pipeline *self, Slice slice) {
    return codec_wire_bytes(self->codec, self->cut.offset + slice.start, slice.elems);
}

static size_t message_bytes(const Pipeline *self, int stage, Slice part) {
    return self->shape->coded[stage] ? wire_bytes(self, part) : (size_t)part.elems * sizeof(float);
}

static char *row(Rows rows, int64_t index) { return rows.first + index * (int64_t)rows.row_bytes; }

/* Where a member's values of this rank's part are, after scatter: not of data itself. */
static char *arrival(const Pipeline *self, int stage, int64_t segment, int member) {
    const Group *group = &self->stages[stage].group;
    int place = member < group->self ? member : member - 1;
    return row(self->arrivals[stage], segment % SLOTS * (self->shape->members[stage] - 1) + place);
}

/* Of a coded stage: what this rank sends to an owner. */
static char *leaving(const Pipeline *self, int stage, int64_t segment, int owner) {
    return row(self->leaving[stage], segment % SLOTS * self->shape->owners[stage] + owner);
}

/* The result of an owner's part, coded. That of stage 1 lies in its place of that of stage 0. */
static char *result(const Pipeline *self, int stage, int64_t segment, int owner) {
    int rows = self->shape->coded[0] ? self->shape->owners[0] : 1;
    int column = stage == 0 ? owner : self->stages[0].group.self;
    char *wire = row(self->results, segment % RESULT_SLOTS * rows + (rows > 1 ? column : 0));
    if (stage == 0)
        return wire;
    Slice whole = part_of(self, 0, segment, column), part = part_of(self, stage, segment, owner);
    return wire + wire_bytes(self, (Slice){whole.start, part.start - whole.start});
}

static float *at_peer(const Pipeline *self, int stage, int member, int64_t start) {
    return transport_peer_ptr(self->transport, self->data + start, self->stages[stage].group.members[member]);
}

/* ---- what travels: every message of a pipeline is named here ---- */

static void label(Pipeline *self, bool coded) {
    MessageLabel mine = self->transport->label;
    mine.compressor = coded ? self->codec->compressor->id : 0;
    transport_label(self->transport, mine);
}

/* Empty parts do not travel; in shared memory none does, but it counts. */
static void give(Pipeline *self, int stage, int member, const void *data, Slice part) {
    int peer = self->stages[stage].group.members[member];
    size_t bytes = message_bytes(self, stage, part);
    if (self->direct[stage])
        transport_count_sent(self->transport, peer, bytes);
    else if (bytes > 0)
        transport_send(self->transport, peer, data, bytes);
}

static void take(Pipeline *self, int stage, int member, void *into, Slice part) {
    size_t bytes = message_bytes(self, stage, part);
    if (!self->direct[stage] && bytes > 0)
        transport_recv(self->transport, self->stages[stage].group.members[member], into, bytes);
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
    bool coded = self->shape->coded[stage];
    if (stage == 0 && segment == 0 && !coded && self->shape->on_host)
        name_scales(self);
    label(self, coded);
    for (int i = 0; i < group->size; i++) {
        if (i != group->self && i < self->stages[stage].owners) {
            Slice part = part_of(self, stage, segment, i);
            give(self, stage, i, coded ? (void *)leaving(self, stage, segment, i) : self->data + part.start, part);
        }
        if (i != group->self && owns(self, stage))
            take(self, stage, i, arrival(self, stage, segment, i), own_part(self, stage, segment));
    }
    label(self, false);
}

static void name_gather(Pipeline *self, int stage, int64_t segment) {
    const Group *group = &self->stages[stage].group;
    bool coded = self->shape->coded[stage];
    label(self, coded);
    for (int i = 0; i < group->size; i++) {
        if (i != group->self && owns(self, stage)) {
            Slice part = own_part(self, stage, segment);
            give(self, stage, i, coded ? (void *)result(self, stage, segment, group->self) : self->data + part.start,
                 part);
        }
        if (i != group->self && i < self->stages[stage].owners) {
            Slice part = part_of(self, stage, segment, i);
            take(self, stage, i, coded ? (void *)result(self, stage, segment, i) : self->data + part.start, part);
        }
    }
    label(self, false);
}

/* In shared memory. Each member tells the owners that they may write to its data, and each owner tells the members
 * that it has done so. */
static Status name_permission(Pipeline *self, bool owners_speak) {
    const Group *group = &self->stages[0].group;
    transport_group_begin(self->transport);
    for (int i = 0; i < group->size; i++) {
        bool to_me = i < self->stages[0].owners, to_it = owns(self, 0);
        if (i != group->self && (owners_speak ? to_it : to_me))
            transport_send(self->transport, group->members[i], NULL, 0);
        if (i != group->self && (owners_speak ? to_me : to_it))
            transport_recv(self->transport, group->members[i], NULL, 0);
    }
    return transport_group_end(self->transport);
}

/* ---- what is added, coded and copied: in blocks, looking at the transport now and then ---- */

typedef struct Block {
    int64_t start, elems; /* of data */
    int64_t done;         /* elements of the part before it */
    size_t wire_done;     /* bytes of the part's wire form before it */
    int64_t count;        /* blocks so far, this one included */
} Block;

/* The next block of a part; false: there is none. Blocks end at multiples of BLOCK_ELEMS, or of CHUNK_ALIGN_ELEMS where
 * they are coded, of the flat gradient; a device gets the whole part. */
static bool next_block(const Pipeline *self, Slice part, bool coded, Block *block) {
    if (block->count > 0 && coded)
        block->wire_done += wire_bytes(self, (Slice){block->start, block->elems});
    int64_t start = block->count > 0 ? block->start + block->elems : part.start;
    int64_t size = coded ? CHUNK_ALIGN_ELEMS : BLOCK_ELEMS, stop = part.start + part.elems;
    if (!self->shape->on_host)
        size = INT64_MAX / 2;
    block->start = start;
    block->elems = least(size - (self->cut.offset + start) % size, stop - start);
    block->done = start - part.start;
    block->count++;
    return start < stop;
}

static Status poll(Pipeline *self, const Block *block) {
    bool complete;
    if (self->latest && block->count % BLOCKS_PER_POLL == 0)
        return transport_group_test(self->transport, self->latest, &complete);
    return OK;
}

static CodecHop hop_of(int stage) { return stage == 0 ? HOP_FIRST : HOP_SECOND; }

static bool codes_by_message(const Pipeline *self) { return self->codec->compressor->by_message; }

static Status encode_part(Pipeline *self, CodecHop hop, Slice part, float scale, char *wire) {
    if (codes_by_message(self)) {
        codec_encode(self->codec, hop, self->cut.offset + part.start, part.elems, self->data + part.start, scale, wire);
        return OK;
    }
    for (Block block = {0}; next_block(self, part, true, &block);) {
        codec_encode(self->codec, hop, self->cut.offset + block.start, block.elems, self->data + block.start, scale,
                     wire + block.wire_done);
        TRY(poll(self, &block));
    }
    return OK;
}

/* A coded stage's values, each owner's part, the own one too. */
static Status encode(Pipeline *self, int stage, int64_t segment) {
    for (int i = 0; i < self->stages[stage].owners; i++)
        TRY(encode_part(self, hop_of(stage), part_of(self, stage, segment, i), stage == 0 ? self->scale : 1,
                        leaving(self, stage, segment, i)));
    return OK;
}

static Status decode(Pipeline *self, const char *wire, Slice part) {
    for (Block block = {0}; next_block(self, part, true, &block);) {
        codec_decode(self->codec, self->cut.offset + block.start, block.elems, wire + block.wire_done,
                     self->data + block.start);
        TRY(poll(self, &block));
    }
    return OK;
}

/* What a coded stage's gather brought. */
static Status decode_results(Pipeline *self, int stage, int64_t segment) {
    const Stage *at = &self->stages[stage];
    for (int i = 0; takes_part(self, stage) && i < at->owners; i++)
        if (i != at->group.self)
            TRY(decode(self, result(self, stage, segment, i), part_of(self, stage, segment, i)));
    return OK;
}

static void add_coded(const Pipeline *self, int stage, int64_t segment, int member, const Block *block, float *sum) {
    int own = self->stages[stage].group.self;
    const char *wire = member == own ? leaving(self, stage, segment, own) : arrival(self, stage, segment, member);
    int64_t offset = self->cut.offset + block->start;
    if (member == 0)
        codec_decode(self->codec, offset, block->elems, wire + block->wire_done, sum);
    else
        codec_decode_add(self->codec, offset, block->elems, wire + block->wire_done, sum);
}

static void add_plain(const Pipeline *self, int stage, int64_t segment, int member, const Block *block, float *sum) {
    const float *values = self->data + block->start;
    if (member != self->stages[stage].group.self)
        values = self->direct[stage] ? at_peer(self, stage, member, block->start)
                                     : (const float *)(void *)arrival(self, stage, segment, member) + block->done;
    float scale = stage == 0 && self->shape->on_host ? self->scales[member] : 1;
    if (member == 0)
        vector_set_scaled(self->transport, sum, scale, values, block->elems);
    else
        vector_add_scaled(self->transport, sum, scale, values, block->elems);
}

static void spread_block(const Pipeline *self, int stage, const float *sum, const Block *block) {
    for (int i = 0; i < self->stages[stage].group.size; i++)
        if (i != self->stages[stage].group.self)
            vector_copy(self->transport, at_peer(self, stage, i, block->start), sum, block->elems);
}

static bool is_last(const Pipeline *self, int stage) { return stage == self->shape->stages - 1; }

/* The last stage's sum goes to shared memory while it is in the cache: then gather has nothing left to do. */
static bool spreads_at_once(const Pipeline *self, int stage) {
    return self->direct[stage] && is_last(self, stage) && self->first == 0 && self->last == 2 * self->shape->stages;
}

/* The owner goes on with what everybody else will decode. */
static void code_result(const Pipeline *self, int stage, int64_t segment, const Block *block, float *sum) {
    char *wire = result(self, stage, segment, self->stages[stage].group.self) + block->wire_done;
    int64_t offset = self->cut.offset + block->start;
    codec_encode(self->codec, HOP_RESULT, offset, block->elems, sum, 1, wire);
    codec_decode(self->codec, offset, block->elems, wire, sum);
}

/* The same for a part whose sum is in data. */
static Status code_message(Pipeline *self, int stage, int64_t segment) {
    Slice part = own_part(self, stage, segment);
    char *wire = result(self, stage, segment, self->stages[stage].group.self);
    TRY(encode_part(self, HOP_RESULT, part, 1, wire));
    return decode(self, wire, part);
}

static Status sum(Pipeline *self, int stage, int64_t segment) {
    if (!owns(self, stage))
        return OK;
    bool coded = self->shape->coded[stage], gathers = self->last > self->shape->stages;
    bool codes_result = coded && is_last(self, stage) && gathers;
    bool at_once = codes_result && codes_by_message(self);
    float inner[CHUNK_ALIGN_ELEMS];
    float *block_sum = self->shape->on_host ? inner : (float *)(void *)row(self->sums, 0);
    for (Block block = {0}; next_block(self, own_part(self, stage, segment), coded, &block);) {
        for (int i = 0; i < self->stages[stage].group.size; i++)
            (coded ? add_coded : add_plain)(self, stage, segment, i, &block, block_sum);
        if (codes_result && !at_once)
            code_result(self, stage, segment, &block, block_sum);
        vector_copy(self->transport, self->data + block.start, block_sum, block.elems);
        if (spreads_at_once(self, stage))
            spread_block(self, stage, block_sum, &block);
        TRY(poll(self, &block));
    }
    return at_once ? code_message(self, stage, segment) : OK;
}

static Status spread(Pipeline *self, int stage, int64_t segment) {
    if (!owns(self, stage) || !self->direct[stage] || spreads_at_once(self, stage))
        return OK;
    for (Block block = {0}; next_block(self, own_part(self, stage, segment), false, &block);) {
        spread_block(self, stage, self->data + block.start, &block);
        TRY(poll(self, &block));
    }
    return OK;
}

/* ---- the pipeline ---- */

static Status wait_for(Pipeline *self, Ticket ticket) {
    if (ticket == self->latest)
        self->latest = 0;
    return transport_group_wait(self->transport, ticket);
}

/* What the segment's step before has brought. */
static Status complete(Pipeline *self, int index, int64_t segment) {
    int stages = self->shape->stages;
    TRY(wait_for(self, self->tickets[index][segment % SLOTS]));
    if (index < stages)
        return sum(self, index, segment);
    int stage = 2 * stages - 1 - index;
    return self->shape->coded[stage] ? decode_results(self, stage, segment) : OK;
}

/* Of a step: scatter and sum of stage 0, all of stage 1, gather of stage 0. None where this rank has no part. */
static int phase_of(const Pipeline *self, int index) {
    return self->shape->stages == 1 || index == 0 ? index : index == 3 ? 2 : 1;
}
static Phases *phases_of(const Pipeline *self, int index) {
    return takes_part(self, index == 0 || index == 2 * self->shape->stages - 1 ? 0 : 1) ? self->phases : NULL;
}
static const char *phase_name(const Pipeline *self, int index) {
    static const char *const names[STAGES_MAX][3] = {{"reduce-scatter", "all-gather"},
                                                     {"reduce-scatter inside", "between nodes", "all-gather inside"}};
    return names[self->shape->stages - 1][phase_of(self, index)];
}

/* Steps 0..stages-1 scatter, the others gather, from the last stage back to the first; one more only completes. */
static Status step(Pipeline *self, int index, int64_t segment) {
    int stages = self->shape->stages, stage = index < stages ? index : 2 * stages - 1 - index;
    if (index > self->first) {
        TRY(complete(self, index - 1, segment));
        phase_end(self->transport, phases_of(self, index - 1), phase_of(self, index - 1));
    }
    if (index == self->last)
        return OK;
    phase_begin(self->transport, phases_of(self, index), phase_of(self, index), phase_name(self, index));
    if (index >= stages)
        TRY(spread(self, stage, segment));
    else if (takes_part(self, stage) && self->shape->coded[stage])
        TRY(encode(self, stage, segment));
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

/* Hands scratch out, or only counts, in f32 values. */
typedef struct Carver {
    float *at; /* NULL: counts */
    int64_t elems;
} Carver;

static Rows carve_rows(Carver *carver, int64_t rows, size_t row_bytes) {
    size_t padded = (row_bytes + 63) / 64 * 64;
    Rows result = {carver->at ? (char *)(carver->at + carver->elems) : NULL, padded};
    carver->elems += rows * (int64_t)(padded / sizeof(float));
    return result;
}

static void carve(Pipeline *self, Carver *carver) {
    const Shape *shape = self->shape;
    self->scales = (float *)(void *)carve_rows(carver, 1, (size_t)shape->members[0] * sizeof(float)).first;
    bool any_coded = false;
    for (int stage = 0; stage < shape->stages; stage++) {
        int64_t elems = self->cut.segment_elems;
        if (stage > 0)
            elems = round_up(elems / shape->owners[stage], CHUNK_ALIGN_ELEMS);
        size_t bytes = (size_t)elems * sizeof(float);
        if (shape->coded[stage])
            bytes = codec_wire_bytes_max(self->codec, elems);
        self->arrivals[stage] = carve_rows(carver, SLOTS * (shape->members[stage] - 1), bytes);
        if (shape->coded[stage])
            self->leaving[stage] = carve_rows(carver, SLOTS * shape->owners[stage], bytes);
        any_coded |= shape->coded[stage];
    }
    if (any_coded)
        self->results = carve_rows(carver, RESULT_SLOTS * (shape->coded[0] ? shape->owners[0] : 1),
                                   codec_wire_bytes_max(self->codec, self->cut.segment_elems));
    if (!shape->on_host)
        self->sums = carve_rows(carver, 1, (size_t)self->cut.segment_elems * sizeof(float));
}

int64_t pipeline_scratch_elems(const Shape *shape, int64_t elems, const Codec *codec) {
    if (shape->stages == 0)
        return 0;
    Pipeline self = {.shape = shape, .codec = (Codec *)codec, .cut = cut_of(shape, 0, elems)};
    Carver carver = {0};
    carve(&self, &carver);
    return carver.elems;
}

Status pipeline_run(Transport *transport, const Shape *shape, const Stage *stages, const Payload *payload,
                    PipelinePart part) {
    if (shape->stages == 0 && part != PIPELINE_ALL_GATHER)
        vector_scale(transport, payload->data, payload->elems, payload->scale);
    if (shape->stages == 0 || payload->elems == 0)
        return OK;
    Pipeline self = {.transport = transport,
                     .stages = stages,
                     .shape = shape,
                     .cut = cut_of(shape, payload->offset, payload->elems),
                     .data = payload->data,
                     .codec = payload->codec,
                     .scale = payload->scale,
                     .phases = payload->phases,
                     .first = part == PIPELINE_ALL_GATHER ? shape->stages : 0,
                     .last = part == PIPELINE_REDUCE_SCATTER ? shape->stages : 2 * shape->stages};
    Carver carver = {payload->scratch, 0};
    carve(&self, &carver);
    if (shape->on_host)
        self.scales[stages[0].group.self] = payload->scale;
    else if (!shape->coded[0] && self.first == 0) /* its sums take no scale from another rank */
        vector_scale(transport, payload->data, payload->elems, payload->scale);
    self.direct[0] = !shape->coded[0] && shares_memory(&self, 0); /* stage 1 stands between nodes */
    if (self.direct[0] && part == PIPELINE_ALL_GATHER)
        TRY(name_permission(&self, false));
    int steps = self.last - self.first + 1;
    for (int64_t tick = 0; tick < self.cut.segments + steps - 1; tick++)
        for (int index = 0; index < steps; index++)
            if (tick >= index && tick - index < self.cut.segments)
                TRY(step(&self, self.first + index, tick - index));
    if (self.direct[0])
        TRY(name_permission(&self, true));
    phase_end(transport, phases_of(&self, self.last - 1), phase_of(&self, self.last - 1));
    return OK;
}
