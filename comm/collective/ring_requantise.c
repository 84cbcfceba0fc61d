/* ring_requantise: a ring that compresses the partial sum anew at each hop. Here to show why not: a value is quantised
 * N times instead of twice, so the error grows with N; and nothing can be fed back, because a hop's error belongs to
 * many ranks.
 *
 *   reduce-scatter   step t: send C(own sum so far), decode what arrives and add the own scaled values
 *   all-gather       the owner encodes its sum once, everybody passes those bytes on and decodes them, the owner too
 *
 * In rounds of N short chunks, so that a chunk's wire form fits in scratch: latency counts in each, nothing overlaps.
 * Without a codec it is ring. */
#include "comm/collective/collective.h"
#include "comm/transport/vector.h"

enum { ROUND_ELEMS = 64 << 10, WIRE_ALIGN = 64 }; /* of a chunk */

typedef struct Round {
    const Group *group;
    Codec *codec;
    float *data, *decoded; /* decoded f32[chunk] */
    int64_t offset, elems;
    float scale;
    char *out, *in; /* wire forms */
} Round;

static int64_t round_elems(const Group *group, int64_t elems) {
    int64_t most = (int64_t)group->size * ROUND_ELEMS;
    return elems < most ? elems : most;
}

/* A round may begin anywhere in a block, so a chunk may be a block longer. */
static int64_t chunk_elems(const Group *group, int64_t elems) {
    return round_elems(group, elems) < ROUND_ELEMS + CHUNK_ALIGN_ELEMS ? round_elems(group, elems)
                                                                       : ROUND_ELEMS + CHUNK_ALIGN_ELEMS;
}

static int64_t wire_elems(const Group *group, int64_t elems, const Codec *codec) {
    size_t bytes = codec_wire_bytes_max(codec, chunk_elems(group, elems));
    return (int64_t)((bytes + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN / sizeof(float));
}

static int64_t requantise_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    if (!codec)
        return collective_ring.scratch_elems(group, elems, NULL);
    return 2 * wire_elems(group, elems, codec) + chunk_elems(group, elems);
}

static double requantise_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    return collective_ring.predict_s(group, elems, costs);
}

/* The chunk that lies `back` chunks before this member's own. */
static Slice chunk_of(const Round *round, int back) {
    int size = round->group->size, c = (round->group->self + 2 * size - back) % size;
    int64_t start = chunk_start(round->offset, round->elems, size, c);
    return (Slice){start, chunk_start(round->offset, round->elems, size, c + 1) - start};
}

static size_t wire_bytes(const Round *round, Slice chunk) {
    return codec_wire_bytes(round->codec, round->offset + chunk.start, chunk.elems);
}

static void encode(const Round *round, CodecHop hop, Slice chunk, float scale) {
    codec_encode(round->codec, hop, round->offset + chunk.start, chunk.elems, round->data + chunk.start, scale,
                 round->out);
}

/* Empty chunks do not travel. */
static Status pass_on(const Round *round, Slice out, Slice in) {
    const Group *group = round->group;
    Transport *transport = group->transport;
    MessageLabel plain = transport->label, coded = plain;
    coded.compressor = round->codec->compressor->id;
    transport_label(transport, coded);
    transport_group_begin(transport);
    if (out.elems > 0)
        transport_send(transport, group->members[(group->self + 1) % group->size], round->out, wire_bytes(round, out));
    if (in.elems > 0)
        transport_recv(transport, group->members[(group->self + group->size - 1) % group->size], round->in,
                       wire_bytes(round, in));
    Status status = transport_group_end(transport);
    transport_label(transport, plain);
    return status;
}

static Status reduce(const Round *round) {
    for (int step = 0; step < round->group->size - 1; step++) {
        Slice out = chunk_of(round, step), in = chunk_of(round, step + 1);
        encode(round, HOP_FIRST, out, step == 0 ? round->scale : 1);
        TRY(pass_on(round, out, in));
        codec_decode(round->codec, round->offset + in.start, in.elems, round->in, round->decoded);
        vector_scale_add(round->group->transport, round->data + in.start, round->scale, round->decoded, in.elems);
    }
    return OK;
}

static void decode(const Round *round, const char *wire, Slice chunk) {
    codec_decode(round->codec, round->offset + chunk.start, chunk.elems, wire, round->data + chunk.start);
}

static Status gather(Round *round) {
    int last = round->group->size - 1;
    encode(round, HOP_RESULT, chunk_of(round, last), 1);
    decode(round, round->out, chunk_of(round, last));
    for (int step = last; step < 2 * last; step++) {
        TRY(pass_on(round, chunk_of(round, step), chunk_of(round, step + 1)));
        decode(round, round->in, chunk_of(round, step + 1));
        char *passed = round->out;
        round->out = round->in;
        round->in = passed;
    }
    return OK;
}

static Status requantise_allreduce(const Group *group, const Payload *payload) {
    if (!payload->codec || group->size == 1)
        return collective_ring.allreduce(group, payload);
    int64_t wire = wire_elems(group, payload->elems, payload->codec), most = round_elems(group, payload->elems);
    for (int64_t start = 0; start < payload->elems; start += most) {
        Round round = {.group = group,
                       .codec = payload->codec,
                       .data = payload->data + start,
                       .decoded = payload->scratch + 2 * wire,
                       .offset = payload->offset + start,
                       .elems = payload->elems - start < most ? payload->elems - start : most,
                       .scale = payload->scale,
                       .out = (char *)payload->scratch,
                       .in = (char *)(payload->scratch + wire)};
        phase_begin(group->transport, payload->phases, 0, "reduce-scatter");
        TRY(reduce(&round));
        phase_end(group->transport, payload->phases, 0);
        phase_begin(group->transport, payload->phases, 1, "all-gather");
        TRY(gather(&round));
        phase_end(group->transport, payload->phases, 1);
    }
    return OK;
}

const Collective collective_ring_requantise = {.name = "ring_requantise",
                                               .compresses = true,
                                               .scratch_elems = requantise_scratch_elems,
                                               .predict_s = requantise_predict_s,
                                               .allreduce = requantise_allreduce};
