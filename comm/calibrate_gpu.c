/* Calibration between GPUs. Everything joins a lane, so a round is a number of equal pieces of work, of which the host
 * times the last one's end. Rounds double until one takes ROUND_S on the slowest rank: then what the host adds, a
 * flush, is small, and that round counts.
 *
 *   alpha   a step of a ring with the smallest message; NCCL sends no empty ones
 *   beta    the same with a large one, less alpha. Between nodes the bytes are a NIC's, which all lanes use at once
 *   gamma   sum += term; the compressor, with residuals. All of a GPU's memory rate is one rank's
 *
 * A rank reaches no other's memory, and shares no cores: copy and cores are 0. */
#include "comm/calibrate_gpu.h"

#include "base/clock.h"
#include "comm/calibrate.h"
#include "comm/compress/compress_cuda.h"
#include "comm/transport/vector.h"

#include <stdlib.h>

#define ROUND_S 10e-3

enum { STEPS_MAX = 1024, ARRAY_MAX_BYTES = 16 << 20, LEAST_BYTES = 4 };

typedef struct Calibration {
    /* set once */
    const Comm *comm;
    Transport *transport;
    const Codec *codec; /* borrowed, or NULL */
    LinkRing rings[LINK_CLASSES];
    int64_t elems;
    float *a, *b, *c; /* f32[elems], of the GPU */
    void *wire;       /* of elems */
    double *gathered; /* f64[ranks] */
    /* of the probe under way */
    LinkClass class;
    size_t bytes;
} Calibration;

typedef Status WorkFn(Calibration *self);

static Status send_on(Calibration *self) {
    return link_shift(self->transport, &self->rings[self->class], self->a, self->b, self->bytes);
}

static Status add(Calibration *self) {
    vector_add(self->transport, self->a, self->b, self->elems);
    return OK;
}

static Status encode(Calibration *self) {
    const Codec *codec = self->codec;
    bool feedback = codec->error_feedback;
    cuda_compressor(codec->compressor)->encode(codec->gpu, codec->stream, &codec->options, 0, self->elems, self->a, 1,
                                               feedback ? self->b : NULL, feedback ? self->c : NULL, self->wire);
    return OK;
}

static Status decode(Calibration *self) {
    const Codec *codec = self->codec;
    cuda_compressor(codec->compressor)
        ->decode_add(codec->gpu, codec->stream, &codec->options, 0, self->elems, self->wire, self->a);
    return OK;
}

static Status slowest(const Calibration *self, double *value) {
    TRY(transport_all_gather(self->comm->transport, value, self->gathered, sizeof *value));
    for (int rank = 0; rank < comm_ranks(self->comm); rank++)
        *value = self->gathered[rank] > *value ? self->gathered[rank] : *value;
    return OK;
}

static Status time_round(Calibration *self, WorkFn *work, int steps, double *time_s) {
    TRY(transport_barrier(self->comm->transport));
    double start_s = clock_s();
    for (int step = 0; step < steps; step++)
        TRY(work(self));
    TRY(transport_flush(self->transport));
    *time_s = clock_s() - start_s;
    return slowest(self, time_s);
}

/* Seconds of one piece of work, alike on all ranks. */
static Status probe(Calibration *self, WorkFn *work, double *step_s) {
    double time_s;
    TRY(time_round(self, work, 1, &time_s)); /* the first one connects, and loads kernels */
    for (int steps = 1;; steps *= 2) {
        TRY(time_round(self, work, steps, &time_s));
        *step_s = time_s / steps;
        if (time_s >= ROUND_S || steps == STEPS_MAX)
            return OK;
    }
}

static Status measure_link(Calibration *self, LinkClass class, LinkCosts *costs) {
    double step_s;
    self->class = class;
    if (self->rings[class].lanes == 0)
        return OK;
    self->bytes = LEAST_BYTES;
    TRY(probe(self, send_on, &costs->latency_s[class]));
    self->bytes = (size_t)self->elems * sizeof(float);
    TRY(probe(self, send_on, &step_s));
    double sent_s = step_s > 2 * costs->latency_s[class] ? step_s - costs->latency_s[class] : step_s / 2;
    costs->s_per_byte[class] = sent_s / (double)self->bytes / self->rings[class].lanes;
    return OK;
}

static Status measure_codec(Calibration *self, LinkCosts *costs) {
    const Codec *codec = self->codec;
    double bytes = (double)self->elems * sizeof(float);
    costs->wire_ratio = 1;
    if (!codec)
        return OK;
    TRY(probe(self, encode, &costs->encode_s_per_byte));
    TRY(probe(self, decode, &costs->decode_add_s_per_byte));
    costs->encode_s_per_byte /= bytes;
    costs->decode_add_s_per_byte /= bytes;
    costs->wire_ratio = (double)codec->compressor->wire_bytes(&codec->options, 0, self->elems) / bytes;
    costs->every_hop = codec->every_hop;
    return OK;
}

static Status measure(Calibration *self, LinkCosts *costs) {
    for (LinkClass class = INSIDE; class < LINK_CLASSES; class++)
        TRY(measure_link(self, class, costs));
    TRY(probe(self, add, &costs->add_s_per_byte));
    costs->add_s_per_byte /= (double)self->elems * sizeof(float);
    return measure_codec(self, costs);
}

/* Allocates on every rank or fails on every rank; only `gathered` must be there to say so. */
static Status take_memory(Calibration *self) {
    const Allocator *memory = self->comm->scratch_memory;
    const Codec *codec = self->codec;
    size_t bytes = (size_t)self->elems * sizeof(float);
    self->gathered = malloc((size_t)comm_ranks(self->comm) * sizeof *self->gathered);
    self->a = memory_alloc(memory, bytes);
    self->b = memory_alloc(memory, bytes);
    self->c = memory_alloc(memory, bytes);
    self->wire = memory_alloc(memory, codec ? codec->compressor->wire_bytes_max(&codec->options, self->elems) : 1);
    if (!self->gathered)
        return fault("no memory for the calibration of links");
    double missing = !self->a || !self->b || !self->c || !self->wire;
    TRY(slowest(self, &missing));
    return missing > 0 ? fault("no memory on a GPU for the calibration of links") : OK;
}

static void give_memory(Calibration *self) {
    void *const arrays[] = {self->a, self->b, self->c, self->wire};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        if (arrays[i])
            memory_free(self->comm->scratch_memory, arrays[i]);
    free(self->gathered);
}

Status calibrate_gpu(const Comm *comm, const Codec *codec, int64_t array_bytes, LinkCosts *costs) {
    int64_t bytes = array_bytes < ARRAY_MAX_BYTES ? array_bytes : ARRAY_MAX_BYTES;
    Calibration self = {.comm = comm, .transport = comm->device, .codec = codec, .elems = bytes / (int)sizeof(float)};
    *costs = (LinkCosts){0};
    for (LinkClass class = INSIDE; class < LINK_CLASSES; class++)
        self.rings[class] = link_ring(self.transport, class);
    gpu_use(comm->gpu);
    Status status = take_memory(&self);
    if (status == OK)
        status = measure(&self, costs);
    give_memory(&self);
    return status;
}
