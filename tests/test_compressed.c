/* All-reduce with a codec: every collective that compresses, every compressor, both scopes, on every shape of a world.
 *
 * Blocks sit at global offsets and each value is quantised at known points only, so what must come out can be computed
 * here without any message, over the whole array at once: the bits must be those, on every rank, however the
 * collective cuts the array into parts, segments and messages. That takes the codec's word for what a value becomes;
 * beside it a bound of the error is computed from the wire formats alone, in float64, and the result must lie within
 * it of the float64 sum. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/loop_world.h"

#include "comm/compress/codec.h"

#include <assert.h>

static const struct Coder {
    const char *name;
    double density;
    bool bf16_values;
} coders[] = {{"bf16", 0, false}, {"int8", 0, false}, {"int4", 0, false}, {"topk", 0.01, false}, {"topk", 0.1, true}};
enum { CODERS = sizeof coders / sizeof *coders, PADDING = 777, ALIGNED = 8192, SMALL = 5000, ROUNDS = 3 };

/* Matrices and 1-D groups at odd places; `elems` values from `offset` on are reduced. Few values lie in one matrix. */
static void make_table(ParamTable *table, int64_t offset, int64_t elems) {
    *table = (ParamTable){0};
    if (elems >= SMALL) {
        param_add(table, "lnfw", -1, 1, offset / 2);
        param_add(table, "fcw", 1, 2, (elems + offset) / 4 + 1);
        param_add(table, "fcb", 1, 1, 1500);
        param_add(table, "small", 0, 2, 300);
    }
    param_add(table, "wte", -1, 2, elems + offset);
}

static Status make_codec(Codec **codec, const ParamTable *table, const struct Coder *coder, bool every_hop,
                         bool error_feedback) {
    CompressorOptions options = {coder->density, coder->bf16_values};
    return codec_create(codec, table, compressor_find(coder->name), &options, every_hop, error_feedback);
}

/* ---- what must come out ---- */

/* Values as the codec makes them, and what they would be without it: f32[elems]; f64[elems], off by at most error. */
typedef struct Array {
    float *coded;
    double *exact, *error; /* NULL: no bound is wanted */
} Array;

/* The codecs of an imagined run in which nothing is cut: one per rank, one per node, one for the result. */
typedef struct Oracle {
    const Place *place;
    const char *collective;
    bool every_hop, bounds, one_rank_each;
    int64_t offset, elems;
    Codec *of_rank[CASE_RANKS_MAX], *of_node[CASE_RANKS_MAX], *of_result;
    Array term, node_sum, sum;
    char *wire;
} Oracle;

static float value_of(bool one_rank_each, int ranks, int rank, int round, int64_t i) {
    bool zero = one_rank_each && (int)(case_bits(1, i) >> 33) % ranks != rank;
    return zero ? 0 : case_random_value(rank, i + 1000003 * round);
}

static int fall(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* The k-th largest. */
static double largest_of(const double *values, int n, int k) {
    double sorted[4096];
    memcpy(sorted, values, (size_t)n * sizeof *values);
    qsort(sorted, (size_t)n, sizeof *sorted, fall);
    return sorted[k - 1];
}

/* What one quantisation adds to the error of a block: by its format, of values known as exact +- error, so that none
 * is larger than reach = |exact| + error and the block's largest not than M, the largest reach.
 *   bf16        8 significant bits, rounded: 2^-8 reach
 *   int8, int4  the scale is M / 127 or M / 7, rounding loses half of it; and 3 roundings to f32 of at most 2^-24 M
 *   topk        k values have at least the k-th largest magnitude, which is at most T, the k-th largest reach. Kept: as
 *               its format, f32 or bf16. Dropped: its magnitude, at most T; never if that is above T in any case
 * Nothing becomes nothing. */
static void widen_block(const Codec *codec, const double *exact, double *error, int n) {
    const char *name = codec->compressor->name;
    double reach[4096], half = strcmp(name, "int8") == 0 ? 0.5 / 127 : 0.5 / 7;
    bool topk = strcmp(name, "topk") == 0, rounds = topk ? codec->options.bf16_values : strcmp(name, "bf16") == 0;
    for (int i = 0; i < n; i++)
        reach[i] = fabs(exact[i]) + error[i];
    double bound = largest_of(reach, n, topk ? (int)ceil(codec->options.density * n) : 1);
    for (int i = 0; i < n; i++) {
        double rounding = rounds ? 0x1p-8 * reach[i] : 0;
        if (topk)
            error[i] += fabs(exact[i]) - error[i] > bound ? rounding : fmax(rounding, fmin(reach[i], bound));
        else if (reach[i] > 0)
            error[i] += rounds ? rounding : (half + 3 * 0x1p-24) * bound;
    }
}

/* Blocks sit on multiples of their size; pieces and the ends of the slice cut them. */
static void widen(const Oracle *self, const Array *array) {
    const Codec *codec = self->of_result;
    for (int p = 0; p < codec->piece_count; p++) {
        const CodecPiece *piece = &codec->pieces[p];
        int64_t size = strcmp(codec->compressor->name, "topk") == 0 ? 4096 : codec->compressor->block_elems;
        int64_t end = self->offset + self->elems < piece->stop ? self->offset + self->elems : piece->stop;
        int64_t at = self->offset > piece->start ? self->offset : piece->start;
        for (int64_t n; !piece->dense && at < end; at += n) {
            n = size - at % size < end - at ? size - at % size : end - at;
            widen_block(codec, array->exact + (at - self->offset), array->error + (at - self->offset), (int)n);
        }
    }
}

/* One quantisation with a residual, over all values at once. */
static void quantise(const Oracle *self, Codec *codec, CodecHop hop, const float *values, float scale, Array *out) {
    int messages = codec->compressor->by_message ? 2 : 1;
    for (int i = 0; i < messages; i++) {
        int64_t start = chunk_start(self->offset, self->elems, messages, i);
        int64_t stop = chunk_start(self->offset, self->elems, messages, i + 1);
        codec_encode(codec, hop, self->offset + start, stop - start, values + start, scale, self->wire);
        codec_decode(codec, self->offset + start, stop - start, self->wire, out->coded + start);
    }
    if (self->bounds)
        widen(self, out);
}

static int nodes_of(const Place *place, int *node_of_rank, int *sizes) {
    int nodes = 0;
    for (int rank = 0; rank < place->ranks; rank++) {
        int before = 0;
        while (before < rank && place->node[before] != place->node[rank])
            before++;
        node_of_rank[rank] = before < rank ? node_of_rank[before] : nodes++;
        sizes[node_of_rank[rank]] = before < rank ? sizes[node_of_rank[rank]] + 1 : 1;
    }
    return nodes;
}

static void add_term(const Oracle *self, Array *sum, bool first) {
    const Array *term = &self->term;
    for (int64_t i = 0; i < self->elems; i++)
        sum->coded[i] = first ? term->coded[i] : sum->coded[i] + term->coded[i];
    for (int64_t i = 0; i < self->elems && self->bounds; i++) {
        sum->exact[i] = first ? term->exact[i] : sum->exact[i] + term->exact[i];
        sum->error[i] = first ? term->error[i] : sum->error[i] + term->error[i];
        sum->error[i] += 0x1p-24 * (fabs(sum->exact[i]) + sum->error[i]); /* rounded to f32 */
    }
}

/* A rank's scaled values, quantised or not. */
static void rank_term(Oracle *self, int rank, int round, bool coded) {
    float scale = case_scale(rank), *values = malloc((size_t)self->elems * sizeof(float));
    for (int64_t i = 0; i < self->elems; i++)
        values[i] = value_of(self->one_rank_each, self->place->ranks, rank, round, i);
    for (int64_t i = 0; i < self->elems && self->bounds; i++) {
        self->term.exact[i] = (double)scale * (double)values[i];
        self->term.error[i] = 0x1p-24 * fabs(self->term.exact[i]);
    }
    if (coded)
        quantise(self, self->of_rank[rank], HOP_FIRST, values, scale, &self->term);
    else
        for (int64_t i = 0; i < self->elems; i++)
            self->term.coded[i] = scale * values[i];
    free(values);
}

/* Leaves the result in sum. */
static void oracle_round(Oracle *self, int round) {
    int node_of_rank[CASE_RANKS_MAX], sizes[CASE_RANKS_MAX], ranks = self->place->ranks;
    int nodes = nodes_of(self->place, node_of_rank, sizes), largest = 1;
    for (int node = 0; node < nodes; node++)
        largest = sizes[node] > largest ? sizes[node] : largest;
    bool flat = strcmp(self->collective, "reduce_scatter") == 0 || nodes == 1 || largest == 1;
    bool coded_result = ranks > 1 && (nodes > 1 || self->every_hop);
    bool coded_first = ranks > 1 && (self->every_hop || (flat && nodes > 1));
    if (flat) {
        for (int rank = 0; rank < ranks; rank++) {
            rank_term(self, rank, round, coded_first);
            add_term(self, &self->sum, rank == 0);
        }
    } else {
        for (int node = 0; node < nodes; node++) {
            bool first = true;
            for (int rank = 0; rank < ranks; rank++)
                if (node_of_rank[rank] == node) {
                    rank_term(self, rank, round, coded_first);
                    add_term(self, &self->node_sum, first);
                    first = false;
                }
            for (int64_t i = 0; i < self->elems && self->bounds; i++) {
                self->term.exact[i] = self->node_sum.exact[i];
                self->term.error[i] = self->node_sum.error[i];
            }
            quantise(self, self->of_node[node], HOP_SECOND, self->node_sum.coded, 1, &self->term);
            add_term(self, &self->sum, node == 0);
        }
    }
    if (coded_result)
        quantise(self, self->of_result, HOP_RESULT, self->sum.coded, 1, &self->sum);
}

static void oracle_each(Oracle *self, void (*body)(Codec *codec)) {
    for (int i = 0; i < self->place->ranks; i++) {
        body(self->of_rank[i]);
        body(self->of_node[i]);
    }
    body(self->of_result);
}

static Array array_create(const Oracle *self) {
    size_t count = (size_t)self->elems + 1;
    return (Array){malloc(count * sizeof(float)), self->bounds ? malloc(count * sizeof(double)) : NULL,
                   self->bounds ? malloc(count * sizeof(double)) : NULL};
}

static void array_destroy(Array *array) {
    free(array->coded);
    free(array->exact);
    free(array->error);
}

static void oracle_create(Oracle *self, const ParamTable *table, const struct Coder *coder) {
    for (int i = 0; i < self->place->ranks; i++) {
        assert_ok(make_codec(&self->of_rank[i], table, coder, false, true));
        assert_ok(make_codec(&self->of_node[i], table, coder, false, true));
    }
    assert_ok(make_codec(&self->of_result, table, coder, false, true));
    self->term = array_create(self);
    self->node_sum = array_create(self);
    self->sum = array_create(self);
    self->wire = malloc(codec_wire_bytes_max(self->of_result, self->elems));
}

static void oracle_destroy(Oracle *self) {
    oracle_each(self, codec_destroy);
    array_destroy(&self->term);
    array_destroy(&self->node_sum);
    array_destroy(&self->sum);
    free(self->wire);
}

/* Of the first round, in which no residual is fed back yet. */
static void check_bounds(const Oracle *self) {
    for (int64_t i = 0; i < self->elems; i++) {
        double error = fabs((double)self->sum.coded[i] - self->sum.exact[i]);
        if (!(error <= self->sum.error[i]))
            fail_msg("%s, %s, %s, %s: value %lld is %.9g, expected %.9g +- %.3g", self->collective,
                     self->of_result->compressor->name, self->every_hop ? "every hop" : "between nodes",
                     self->place->name, (long long)i, (double)self->sum.coded[i], self->sum.exact[i],
                     self->sum.error[i]);
    }
}

/* ---- runs ---- */

typedef struct Run {
    const char *collective;
    const struct Coder *coder;
    bool every_hop, shared;
    int64_t offset, elems;
    bool bounds, one_rank_each; /* the other ranks' values are 0: then the bound is tight */
    const ParamTable *table;
    const float *expected; /* f32[ROUNDS][elems] */
} Run;

static Status one_round(const Run *run, const Group *group, Codec *codec, float *data, float *scratch, int round) {
    int rank = group->members[group->self];
    for (int64_t i = 0; i < run->elems; i++)
        data[i] = value_of(run->one_rank_each, group->size, rank, round, i);
    case_delay(rank, (uint64_t)round);
    Payload payload = {.data = data, .elems = run->elems, .scale = case_scale(rank), .scratch = scratch,
                       .offset = run->offset, .codec = codec};
    TRY(collective_find(run->collective)->allreduce(group, &payload));
    codec_commit(codec);
    const float *expected = run->expected + round * run->elems;
    for (int64_t i = 0; i < run->elems; i++)
        if (memcmp(&data[i], &expected[i], sizeof(float)) != 0)
            return fault("round %d: value %lld is %.9g, expected %.9g", round, (long long)i, (double)data[i],
                         (double)expected[i]);
    return case_guard_intact(data, run->elems) ? OK : fault("wrote behind its array");
}

static Status run_rank(const World *world, Transport *transport) {
    const Run *run = world->user;
    Codec *codec = NULL;
    Group group = {transport, in_order, transport->ranks, transport->rank};
    size_t bytes = (size_t)(run->elems + CASE_GUARD) * sizeof(float);
    TRY(make_codec(&codec, run->table, run->coder, run->every_hop, true));
    int64_t scratch_elems = collective_find(run->collective)->scratch_elems(&group, run->elems, codec);
    float *scratch = case_floats(scratch_elems);
    float *data = run->shared ? transport_share(transport, bytes) : malloc(bytes);
    memset(data + run->elems, 0xFF, CASE_GUARD * sizeof(float));
    Status status = OK;
    for (int round = 0; round < ROUNDS && status == OK; round++)
        status = one_round(run, &group, codec, data, scratch, round);
    if (status == OK && !case_guard_intact(scratch, scratch_elems))
        status = fault("wrote behind its scratch");
    if (status != OK)
        case_abandon(transport, status);
    arena_release(transport, data, run->shared);
    free(scratch);
    codec_destroy(codec);
    return status;
}

static void check_run(const Place *place, Run *run) {
    ParamTable table;
    make_table(&table, run->offset, run->elems);
    Oracle oracle = {.place = place, .collective = run->collective, .every_hop = run->every_hop, .bounds = run->bounds,
                     .one_rank_each = run->one_rank_each, .offset = run->offset, .elems = run->elems};
    float *expected = malloc((size_t)(ROUNDS * run->elems + 1) * sizeof(float));
    oracle_create(&oracle, &table, run->coder);
    for (int round = 0; round < ROUNDS; round++) {
        oracle_round(&oracle, round);
        if (round == 0 && oracle.bounds)
            check_bounds(&oracle);
        oracle.bounds = false;
        memcpy(expected + round * run->elems, oracle.sum.coded, (size_t)run->elems * sizeof(float));
        oracle_each(&oracle, codec_commit);
    }
    oracle_destroy(&oracle);
    run->table = &table;
    run->expected = expected;
    if (run_world(place, run_rank, run, NULL, 1) != OK)
        fail_msg("%s, %s %g, %s, %s memory, %s, %lld values: %s", run->collective, run->coder->name,
                 run->coder->density, run->every_hop ? "every hop" : "between nodes",
                 run->shared ? "shared" : "private", place->name, (long long)run->elems, error_line());
    free(expected);
    param_table_free(&table);
}

static const char *const compressing[] = {"reduce_scatter", "hierarchical", "leader"};

/* Every compressor, collective and scope; memory takes turns. */
static void check_all(const char *place, int64_t offset, int64_t elems) {
    for (int turn = 0; turn < CODERS * 3 * 2; turn++)
        check_run(place_named(place), &(Run){.collective = compressing[turn / 2 % 3], .coder = &coders[turn / 6],
                                             .every_hop = turn % 2, .shared = turn / 2 % 2, .offset = offset,
                                             .elems = elems});
}

/* Sizes not divisible by anything (DeepSpeed PR#5056), odd local sizes and unequal nodes (horovod#1913), more than
 * 65,536 values (byteps PR#299). Each shape meets every collective, compressor and scope; sizes take turns. */
static void test_every_shape(void **state) {
    (void)state;
    const int64_t sizes[] = {70001, 0, 1, 255, 257, 4095, 4097, 31, 20011, 65537};
    int turn = 0;
    for (int p = 0; p < PLACES; p++)
        for (int c = 0; c < CODERS; c++)
            for (int a = 0; a < 3; a++)
                for (int every_hop = 0; every_hop < 2; every_hop++, turn++) {
                    Run run = {.collective = compressing[a], .coder = &coders[c], .every_hop = every_hop,
                               .shared = turn % 2, .offset = turn % 3 ? PADDING : ALIGNED};
                    run.elems = turn % 7 == 0 ? sizes[0] : sizes[turn % 10];
                    check_run(&places[p], &run);
                }
}

/* Blocks of 128, 256 and 4,096 values, one less and one more, from a block's first value and from within one. */
static void test_every_size(void **state) {
    (void)state;
    static const char *const shapes[] = {"2 nodes of 2", "3 and 2", "2 nodes of 4", "1 node of 9"};
    static const int64_t sizes[] = {1, 127, 128, 129, 255, 256, 257, 4095, 4096, 4097, 65536};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            check_all(shapes[s], ALIGNED, sizes[i]);
            if (sizes[i] < SMALL)
                check_all(shapes[s], PADDING, sizes[i]);
        }
}

static void test_large(void **state) {
    (void)state;
    for (int c = 0; c < CODERS; c++)
        for (int a = 0; a < 3; a++)
            check_run(place_named("3 and 2"), &(Run){.collective = compressing[a], .coder = &coders[c],
                                                     .every_hop = c % 2, .shared = a % 2, .offset = PADDING,
                                                     .elems = 1 << 20});
}

static void test_error_bounds(void **state) {
    (void)state;
    static const char *const shapes[] = {"2 nodes of 1", "2 nodes of 2", "3 and 2"};
    static const int64_t sizes[] = {129, 4097, 20011};
    for (int turn = 0; turn < 3 * 3 * CODERS * 2 * 2; turn++)
        for (int s = 0; s < 3; s++)
            check_run(place_named(shapes[s]), &(Run){.collective = compressing[turn % 3],
                                                     .coder = &coders[turn / 3 % CODERS],
                                                     .every_hop = turn / (3 * CODERS) % 2, .offset = PADDING,
                                                     .elems = sizes[turn / (3 * CODERS * 4)], .bounds = true,
                                                     .one_rank_each = turn / (3 * CODERS * 2) % 2});
}

/* int8_tensor: each message has one scale per tensor. Two ranks in one segment, so the messages are the two chunks. */
static void test_one_scale_per_message(void **state) {
    (void)state;
    static const struct Coder tensor = {"int8_tensor", 0, false};
    for (int a = 0; a < 3; a++) {
        Run run = {.collective = compressing[a], .coder = &tensor, .every_hop = true, .shared = a % 2,
                   .offset = PADDING, .elems = 20011};
        check_run(place_named("2 nodes of 1"), &run);
        run.every_hop = false;
        check_run(place_named("2 nodes of 1"), &run);
    }
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_shape), cmocka_unit_test(test_every_size),
                                          cmocka_unit_test(test_large), cmocka_unit_test(test_error_bounds),
                                          cmocka_unit_test(test_one_scale_per_message)};

CHECK_MAIN(tests)
