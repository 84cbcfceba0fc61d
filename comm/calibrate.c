/* Calibration: a few repeats of everything, in turns, with all ranks at work at once as in a collective. Of each repeat
 * the slowest rank counts, and of the repeats the median.
 *
 *   alpha   a step of a ring with empty messages. In batches, so that ranks cannot just run ahead of each other; of
 *           those the lower quartile. Where ranks share cores most waits fall into a nap of the transport, and take 50
 *           times as long
 *   beta    steps with a large message. Inside a node the bytes are a rank's, both ways at once; between nodes those
 *           of a NIC, which all lanes use at once. There one step is taken from several: a shaped link gives away what
 *           it saved while the ranks met, 5 ms' worth of 400 Mbit/s, and that is in both
 *   gamma   sum += term over f32 of this rank's memory; a copy from the cache to the next rank's memory; with a codec
 *           its compressor, with residuals. In CPU seconds of the thread, while all ranks do the same
 *
 * How much a repeat moves follows from a first look at the links, so that slow ones take no longer: about ROUND_S for
 * each. Idle links give yet more away, so an untimed step goes ahead of each measurement.
 *
 * What MPI's own all-reduces take follows from none of these, and their algorithms change with the size: they
 * themselves are timed, at sizes that double, after an untimed one.
 *
 * Never compares two ranks' clocks, and keeps no memory. */
#define _POSIX_C_SOURCE 200809L
#include "comm/calibrate.h"

#include "base/clock.h"
#include "base/machine.h"
#include "comm/transport/vector.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUND_S 10e-3
#define TIMED_S 1.5 /* for all sizes of a collective together */

enum { TIMED_LOOKS = 3, TIMED_MIN_ELEMS = 1 << 10 };

enum { REPEATS = 5, LOOKS = 2, RATE_STEPS = 4, BATCH_STEPS = 4, BATCHES_MAX = 32, MESSAGE_MIN_BYTES = 64 << 10 };

/* Each measurement takes the next window of the buffers: like a bucket, it has long left the caches. For arrays that
 * are smaller than the buffers, and used again and again, there are fewer or smaller windows. */
enum {
    WINDOWS_MAX = 4,
    WINDOW_MIN_BYTES = 1 << 20, /* of less the clock is felt, and lines that change caches within one probe */
    WINDOW_MAX_BYTES = 4 << 20,
    BUFFER_BYTES = WINDOWS_MAX * WINDOW_MAX_BYTES,
    BUFFER_ELEMS = BUFFER_BYTES / (int)sizeof(float),
    BLOCK_BYTES = 8 << 10, /* stays in the inner cache */
};

typedef enum Probe {
    LATENCY, /* of each class */
    RATE_ONE = LATENCY + LINK_CLASSES, /* one step with a large message */
    RATE_ALL = RATE_ONE + LINK_CLASSES, /* RATE_STEPS of them */
    ADD = RATE_ALL + LINK_CLASSES,
    COPY,
    ENCODE,
    DECODE_ADD,
    PROBES
} Probe;

typedef struct Calibration {
    /* set once */
    Transport *transport;
    const Codec *codec; /* borrowed, or NULL */
    LinkRing rings[LINK_CLASSES];
    char *out, *in;   /* f32[BUFFER_ELEMS] each; `out` is shared with the node */
    int windows;
    int64_t window_bytes, window_elems;
    void *wire;       /* a window's */
    double *gathered; /* f64[ranks][REPEATS * PROBES] */
    /* alike on all ranks */
    bool shared; /* ranks of a node reach each other's `out` */
    int window;
    /* after the first look */
    int batches[LINK_CLASSES]; /* of empty messages */
    size_t message_bytes[LINK_CLASSES]; /* of one rank */
    /* results */
    double time_s[REPEATS][PROBES];
} Calibration;

/* ---- rings ---- */

/* How many ranks of its node come before it. */
static int place_of(const Transport *transport, int rank) {
    int place = 0;
    for (int before = 0; before < rank; before++)
        place += transport->node[before] == transport->node[rank];
    return place;
}

static bool same_ring(const Transport *transport, LinkClass class, int a, int b) {
    if (class == INSIDE)
        return transport->node[a] == transport->node[b];
    return place_of(transport, a) == place_of(transport, b);
}

/* The next rank of this rank's ring in the given direction, 1 or -1; this rank if it is alone there. */
static int neighbour(const Transport *transport, LinkClass class, int direction) {
    int ranks = transport->ranks, rank = transport->rank;
    do
        rank = (rank + ranks + direction) % ranks;
    while (!same_ring(transport, class, rank, transport->rank));
    return rank;
}

/* Places that every node has, if there is more than one node. */
static int lanes_between(const Transport *transport) {
    int ranks = transport->ranks, nodes = 0, lanes = 0, at_place;
    for (int rank = 0; rank < ranks; rank++)
        nodes += place_of(transport, rank) == 0;
    do {
        at_place = 0;
        for (int rank = 0; rank < ranks; rank++)
            at_place += place_of(transport, rank) == lanes;
        lanes += at_place == nodes;
    } while (at_place == nodes);
    return nodes > 1 ? lanes : 0;
}

static bool any_shared_node(const Transport *transport) {
    for (int rank = 0; rank < transport->ranks; rank++)
        if (place_of(transport, rank) > 0)
            return true;
    return false;
}

LinkRing link_ring(const Transport *transport, LinkClass class) {
    int lanes = class == INSIDE ? any_shared_node(transport) : lanes_between(transport);
    int to = neighbour(transport, class, 1), from = neighbour(transport, class, -1);
    if (lanes == 0 || to == transport->rank || (class == BETWEEN && place_of(transport, transport->rank) >= lanes))
        return (LinkRing){-1, -1, lanes};
    return (LinkRing){to, from, lanes};
}

Status link_shift(Transport *transport, const LinkRing *ring, const void *out, void *in, size_t bytes) {
    if (ring->to < 0)
        return OK;
    transport_group_begin(transport);
    transport_send(transport, ring->to, out, bytes);
    transport_recv(transport, ring->from, in, bytes);
    return transport_group_end(transport);
}

/* ---- one measurement ---- */

static ptrdiff_t next_window(Calibration *self) { return ++self->window % self->windows * self->window_bytes; }

static Status shift(Calibration *self, LinkClass class, size_t bytes) {
    ptrdiff_t at = next_window(self);
    return link_shift(self->transport, &self->rings[class], self->out + at, self->in + at, bytes);
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The value above a share of them. Sorts values. */
static double quantile(double *values, int count, double share) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return values[(int)(share * count)];
}

/* step_s f64[batches]: of a step in each. All ranks begin together, after an untimed step: one that went on while
 * others were still in that step would share its links with them. */
static Status time_batches(Calibration *self, LinkClass class, size_t bytes, int batches, int steps, double *step_s) {
    TRY(shift(self, class, bytes));
    TRY(transport_barrier(self->transport));
    for (int batch = 0; batch < batches; batch++) {
        double start_s = clock_s();
        for (int step = 0; step < steps; step++)
            TRY(shift(self, class, bytes));
        step_s[batch] = (clock_s() - start_s) / steps;
    }
    return OK;
}

static Status time_rate(Calibration *self, LinkClass class, double *one_s, double *all_s) {
    size_t bytes = self->message_bytes[class];
    TRY(time_batches(self, class, bytes, 1, 1, one_s));
    TRY(transport_barrier(self->transport));
    double start_s = clock_s();
    for (int step = 0; step < RATE_STEPS; step++)
        TRY(shift(self, class, bytes));
    *all_s = clock_s() - start_s;
    return OK;
}

static float *floats(char *buffer, ptrdiff_t at) { return (float *)(void *)(buffer + at); }

static double thread_cpu_s(void) {
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

static void add_window(Calibration *self, ptrdiff_t at) {
    vector_add(self->transport, floats(self->in, at), floats(self->out, at), self->window_elems);
}

/* Nothing where no memory is shared. Each rank's memory has one writer, and nobody reads it meanwhile. */
static void copy_window(Calibration *self, ptrdiff_t at) {
    int to = self->rings[INSIDE].to;
    char *peer = to < 0 ? NULL : transport_peer_ptr(self->transport, self->out + at, to);
    for (ptrdiff_t done = 0; peer && done < self->window_bytes; done += BLOCK_BYTES)
        memcpy(peer + done, self->in, BLOCK_BYTES);
}

/* Residuals old and new are windows of `in`. */
static void encode_window(Calibration *self, ptrdiff_t at) {
    if (!self->codec)
        return;
    const Compressor *compressor = self->codec->compressor;
    float *residual = self->codec->error_feedback ? floats(self->in, at) : NULL;
    float *new_residual = residual ? floats(self->in, (at + self->window_bytes) % BUFFER_BYTES) : NULL;
    compressor->encode(&self->codec->options, 0, self->window_elems, floats(self->out, at), 1, residual, new_residual,
                       self->wire);
}

static void decode_window(Calibration *self, ptrdiff_t at) {
    if (self->codec)
        self->codec->compressor->decode_add(&self->codec->options, 0, self->window_elems, self->wire,
                                            floats(self->in, at));
}

static Status time_work(Calibration *self, void (*work)(Calibration *, ptrdiff_t), double *time_s) {
    ptrdiff_t at = next_window(self);
    TRY(transport_barrier(self->transport));
    double start_s = thread_cpu_s();
    work(self, at);
    *time_s = thread_cpu_s() - start_s;
    return OK;
}

static Status repeat(Calibration *self, double *time_s) {
    for (LinkClass class = INSIDE; class < LINK_CLASSES; class++) {
        if (self->rings[class].lanes == 0)
            continue;
        double step_s[BATCHES_MAX];
        TRY(time_batches(self, class, 0, self->batches[class], BATCH_STEPS, step_s));
        time_s[LATENCY + class] = quantile(step_s, self->batches[class], 0.25);
        TRY(time_rate(self, class, &time_s[RATE_ONE + class], &time_s[RATE_ALL + class]));
    }
    TRY(time_work(self, add_window, &time_s[ADD]));
    TRY(time_work(self, copy_window, &time_s[COPY]));
    TRY(time_work(self, encode_window, &time_s[ENCODE]));
    return time_work(self, decode_window, &time_s[DECODE_ADD]);
}

/* ---- all ranks ---- */

/* In place: the largest over all ranks. gathered f64[ranks][count] is overwritten. */
static Status largest(Transport *transport, double *gathered, double *values, int count) {
    TRY(transport_all_gather(transport, values, gathered, (size_t)count * sizeof *values));
    for (int i = 0; i < count * transport->ranks; i++)
        values[i % count] = gathered[i] > values[i % count] ? gathered[i] : values[i % count];
    return OK;
}

static Status slowest(Calibration *self, double *values, int count) {
    return largest(self->transport, self->gathered, values, count);
}

/* The better of a few tries, each as slow as its slowest rank. */
static Status look_at(Calibration *self, LinkClass class, size_t bytes, int steps, double *step_s) {
    double looks_s[LOOKS];
    TRY(time_batches(self, class, bytes, LOOKS, steps, looks_s));
    TRY(slowest(self, looks_s, LOOKS));
    qsort(looks_s, LOOKS, sizeof *looks_s, compare_doubles);
    *step_s = looks_s[0];
    return OK;
}

/* How much each repeat is to move over links of this class. Doubling goes past what a shaped link gives away. */
static Status look(Calibration *self, LinkClass class) {
    double step_s;
    size_t max_bytes = class == INSIDE ? (size_t)self->window_bytes : WINDOW_MAX_BYTES;
    if (self->rings[class].lanes == 0)
        return OK;
    TRY(look_at(self, class, 0, BATCH_STEPS, &step_s));
    double batches = ROUND_S / (BATCH_STEPS * step_s);
    self->batches[class] = batches < 1 ? 1 : batches < BATCHES_MAX ? (int)batches : BATCHES_MAX;
    self->message_bytes[class] = MESSAGE_MIN_BYTES / 2;
    do {
        self->message_bytes[class] *= 2;
        TRY(look_at(self, class, self->message_bytes[class], 1, &step_s));
    } while (step_s < ROUND_S && self->message_bytes[class] < max_bytes);
    return OK;
}

/* Of the repeats. */
static double median_s(const Calibration *self, int probe) {
    double values[REPEATS];
    for (int i = 0; i < REPEATS; i++)
        values[i] = self->time_s[i][probe];
    return quantile(values, REPEATS, 0.5);
}

/* With a large message. At least half of what the steps took: the first one may have been slow by chance. */
static double step_s(const Calibration *self, LinkClass class) {
    double all_s = median_s(self, RATE_ALL + class), one_s = median_s(self, RATE_ONE + class);
    double mean_s = all_s / RATE_STEPS, later_s = (all_s - one_s) / (RATE_STEPS - 1);
    return class == INSIDE ? mean_s : later_s > mean_s / 2 ? later_s : mean_s / 2;
}

static LinkCosts conclude(const Calibration *self) {
    const Codec *codec = self->codec;
    const double bytes_each = (double)self->window_bytes;
    LinkCosts costs = {.add_s_per_byte = median_s(self, ADD) / bytes_each, .wire_ratio = 1};
    if (self->rings[INSIDE].lanes > 0 && self->shared)
        costs.copy_s_per_byte = median_s(self, COPY) / bytes_each;
    if (codec) {
        size_t wire_bytes = codec->compressor->wire_bytes(&codec->options, 0, self->window_elems);
        costs.wire_ratio = (double)wire_bytes / bytes_each;
        costs.encode_s_per_byte = median_s(self, ENCODE) / bytes_each;
        costs.decode_add_s_per_byte = median_s(self, DECODE_ADD) / bytes_each;
        costs.every_hop = codec->every_hop;
    }
    for (int class = INSIDE; class < LINK_CLASSES; class++) {
        double latency_s = median_s(self, LATENCY + class), large_s = step_s(self, class);
        size_t bytes = self->message_bytes[class] * (size_t)self->rings[class].lanes;
        costs.latency_s[class] = latency_s;
        if (bytes > 0)
            costs.s_per_byte[class] = (large_s > 2 * latency_s ? large_s - latency_s : large_s / 2) / (double)bytes;
    }
    return costs;
}

/* Hardware threads for the ranks of this node; of the nodes the one that has least. Threads of one process stand for
 * nodes that share its machine. */
static Status count_cores(Calibration *self, double *cores) {
    const Transport *transport = self->transport;
    double here = 0, nodes = 0;
    for (int rank = 0; rank < transport->ranks; rank++) {
        here += transport->node[rank] == transport->node[transport->rank];
        nodes += place_of(transport, rank) == 0;
    }
    double least = transport->ops->one_process ? machine_cores() / nodes : here * machine_cores();
    least = least < machine_all_cores() ? least : machine_all_cores();
    double inverse = 1 / least;
    TRY(slowest(self, &inverse, 1));
    *cores = 1 / inverse;
    return OK;
}

static Status measure(Calibration *self, LinkCosts *costs) {
    for (LinkClass class = INSIDE; class < LINK_CLASSES; class++)
        TRY(look(self, class));
    for (int i = 0; i < REPEATS; i++)
        TRY(repeat(self, self->time_s[i]));
    TRY(slowest(self, self->time_s[0], REPEATS * PROBES));
    *costs = conclude(self);
    return count_cores(self, &costs->cores);
}

/* ---- life ---- */

/* Values as gradients have them: none denormal, none equal to its neighbours. */
static void fill(float *values, int64_t elems) {
    uint32_t state = 1;
    for (int64_t i = 0; i < elems; i++) {
        state = state * 1664525 + 1013904223;
        values[i] = (float)((double)state / (double)UINT32_MAX - 0.5);
    }
}

/* Whether all ranks of nodes reach each other's `out`: alike on every rank. */
static Status find_shared(Calibration *self) {
    int to = self->rings[INSIDE].to;
    double separate = to >= 0 && !transport_peer_ptr(self->transport, self->out, to);
    TRY(slowest(self, &separate, 1));
    self->shared = separate == 0;
    return OK;
}

/* Allocates on every rank or fails on every rank; only `gathered` must be there to say so. */
static Status take_memory(Calibration *self) {
    const Codec *codec = self->codec;
    self->gathered = malloc((size_t)self->transport->ranks * REPEATS * PROBES * sizeof(double));
    self->in = calloc(1, BUFFER_BYTES);
    self->wire = malloc(codec ? codec->compressor->wire_bytes_max(&codec->options, self->window_elems) : 1);
    self->out = transport_share(self->transport, BUFFER_BYTES);
    if (!self->gathered)
        return fault("no memory for the calibration of links");
    double missing = !self->in || !self->wire || !self->out;
    TRY(slowest(self, &missing, 1));
    if (missing > 0)
        return fault("no memory for the calibration of links");
    fill(floats(self->in, 0), BUFFER_ELEMS); /* the pages exist from now on */
    fill(floats(self->out, 0), BUFFER_ELEMS);
    return find_shared(self);
}

static int64_t clamp(int64_t value, int64_t least, int64_t most) {
    return value < least ? least : value < most ? value : most;
}

Status calibrate(Transport *transport, const Codec *codec, int64_t array_bytes, LinkCosts *costs) {
    Calibration self = {.transport = transport, .codec = codec};
    self.windows = (int)clamp(array_bytes / 2 / WINDOW_MAX_BYTES, 1, WINDOWS_MAX);
    self.window_elems = clamp(array_bytes, WINDOW_MIN_BYTES, WINDOW_MAX_BYTES) / (int)sizeof(float);
    self.window_bytes = self.window_elems * (int)sizeof(float);
    for (LinkClass class = INSIDE; class < LINK_CLASSES; class++)
        self.rings[class] = link_ring(transport, class);
    Status status = take_memory(&self);
    if (status == OK)
        status = measure(&self, costs);
    if (status == OK)
        status = transport_barrier(transport); /* the rank before may still write to `out` */
    transport_unshare(transport, self.out);
    free(self.wire);
    free(self.in);
    free(self.gathered);
    return status;
}

/* ---- collectives of which no formula is known ---- */

/* The median of a few, each as slow as its slowest rank. Arrays change places, as a step's buckets do. */
static Status time_collective(const Group *group, const Collective *collective, const Payload *array, int64_t elems,
                              double *gathered, double *time_s) {
    double looks_s[TIMED_LOOKS], spent_s = 0;
    int looks = 0;
    while (looks < TIMED_LOOKS && spent_s < TIMED_LOOKS * ROUND_S) {
        Payload payload = *array;
        payload.data += looks * elems % (array->elems - elems + 1);
        payload.elems = elems;
        TRY(transport_barrier(group->transport));
        double start_s = clock_s();
        TRY(collective->allreduce(group, &payload));
        looks_s[looks] = clock_s() - start_s;
        TRY(largest(group->transport, gathered, &looks_s[looks], 1));
        spent_s += looks_s[looks++];
    }
    *time_s = quantile(looks_s, looks, 0.5);
    return OK;
}

static Status time_sizes(const Group *group, const Collective *collective, const Payload *array, int64_t elems,
                         double *gathered, LinkCosts *costs) {
    int halvings = 0, i = 0;
    while (halvings < TIMED_MAX - 1 && elems >> (halvings + 1) >= TIMED_MIN_ELEMS)
        halvings++;
    double start_s = clock_s(), spent_s = 0, unused_s;
    TRY(time_collective(group, collective, array, elems >> halvings, gathered, &unused_s)); /* the first one connects */
    for (; i <= halvings && spent_s < TIMED_S; i++) {
        int64_t size = elems >> (halvings - i);
        costs->timed_bytes[i] = (double)size * sizeof(float);
        TRY(time_collective(group, collective, array, size, gathered, &costs->timed_s[i]));
        spent_s = clock_s() - start_s + 2 * costs->timed_s[i]; /* the next one's time is in it */
        TRY(largest(group->transport, gathered, &spent_s, 1));
    }
    costs->timed_count = i;
    return OK;
}

Status calibrate_collective(const Group *group, const Collective *collective, const Payload *array, int64_t elems,
                            LinkCosts *costs) {
    double *gathered = malloc((size_t)group->size * sizeof *gathered);
    if (!gathered)
        return fault("no memory for the calibration of %s", collective->name);
    Status status = time_sizes(group, collective, array, elems, gathered, costs);
    free(gathered);
    return status;
}

/* ---- as text ---- */

static size_t class_text(const LinkCosts *costs, LinkClass class, const char *name, char *text, size_t size) {
    int length = 0;
    if (costs->s_per_byte[class] > 0)
        length = snprintf(text, size, "%s %.1f us, %.3g GB/s; ", name, 1e6 * costs->latency_s[class],
                          1e-9 / costs->s_per_byte[class]);
    return (size_t)length < size ? (size_t)length : size;
}

static size_t work_text(double s_per_byte, const char *name, char *text, size_t size) {
    int length = s_per_byte > 0 ? snprintf(text, size, "%s %.3g GB/s", name, 1e-9 / s_per_byte) : 0;
    return (size_t)length < size ? (size_t)length : size;
}

void calibrate_text(const LinkCosts *costs, char *text, size_t size) {
    size_t used = class_text(costs, INSIDE, "inside a node", text, size);
    used += class_text(costs, BETWEEN, "between nodes", text + used, size - used);
    used += work_text(costs->add_s_per_byte, "add", text + used, size - used);
    used += work_text(costs->copy_s_per_byte, ", copy", text + used, size - used);
    used += work_text(costs->encode_s_per_byte, ", encode", text + used, size - used);
    work_text(costs->decode_add_s_per_byte, ", decode", text + used, size - used);
}
