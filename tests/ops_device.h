/* Arrays for tests of operations on any device: numbers on the host as the device sees them, the same in its memory,
 * and what comes back held against float64. */
#ifndef TESTS_OPS_DEVICE_H
#define TESTS_OPS_DEVICE_H

#include "base/memory.h"
#include "base/random.h"
#include "comm/compress/bf16.h"
#include "model/ops.h"
#include "tests/check.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

/* A device under test. Errors are relative: half a unit in the last place of a format. */
typedef struct OpsDevice {
    const Ops *ops;
    const Allocator *memory;
    int threads;          /* that prepare shall find; 0: it does not look */
    float *weights;       /* f32[weight_elems], device memory: where weights lie */
    size_t weight_elems;
    void (*refresh)(const struct OpsDevice *device); /* makes the device's copy of the weights; NULL: it has none */
    void *user;
    double act_error;     /* of storing an activation, beyond f32 */
    double factor_error;  /* of a product's factor, beyond f32 */
} OpsDevice;

/* An array on the host, in f32, and on the device. */
typedef struct Array {
    float *host;
    void *device;
    size_t count;
    bool act; /* in the device's format */
} Array;

/* What an array should hold. An element may be off by 1e-5 (1 + |value|), by its own rounding, by act_error * rounding,
 * where values that it was computed from were rounded, and by factor_error * factors, the sum of |a b| over its
 * products. */
typedef struct Reference {
    double *value, *rounding, *factors;
} Reference;

/* One test's device, and all that it allocated. */
typedef struct Case {
    const OpsDevice *device;
    const Ops *ops;
    OpsContext context;
    size_t weights_used;
    void *host[128], *held[128];
    int host_count, held_count;
} Case;

static void *host_bytes(Case *c, size_t bytes) {
    void *memory = calloc(bytes + 1, 1);
    assert_non_null(memory);
    assert_true(c->host_count < 128);
    return c->host[c->host_count++] = memory;
}

static void *device_bytes(Case *c, size_t bytes) {
    void *memory = memory_alloc(c->device->memory, bytes + 1);
    assert_non_null(memory);
    assert_true(c->held_count < 128);
    return c->held[c->held_count++] = memory;
}

/* To the device's memory, which is filled with NaN. */
static void poison(Case *c, void *device, size_t bytes) {
    void *pattern = malloc(bytes + 1);
    assert_non_null(pattern);
    memset(pattern, 0xff, bytes);
    c->ops->upload(&c->context, device, pattern, bytes);
    free(pattern);
}

static Case case_begin(const OpsDevice *device, int rows, int T, int C, int NH) {
    Case c = {.device = device, .ops = device->ops};
    if (device->threads)
        omp_set_num_threads(device->threads);
    OpsLimits limits = {.rows = rows, .T = T, .C = C, .NH = NH};
    c.context.state = c.ops->state;
    c.ops->prepare(&c.context, &limits);
    if (device->threads)
        assert_int_equal(c.context.threads, device->threads);
    c.context.scratch = device_bytes(&c, c.context.scratch_bytes);
    poison(&c, c.context.scratch, c.context.scratch_bytes < (1 << 20) ? c.context.scratch_bytes : 1 << 20);
    return c;
}

static void case_end(Case *c) {
    for (int i = 0; i < c->host_count; i++)
        free(c->host[i]);
    for (int i = 0; i < c->held_count; i++)
        memory_free(c->device->memory, c->held[i]);
}

/* ---- arrays ---- */

static bool is_half(const Case *c, const Array *array) { return array->act && c->ops->act_bytes == sizeof(uint16_t); }

/* The host's numbers to the device, and what they become there back to the host. */
static void give(Case *c, Array *array) {
    if (!is_half(c, array)) {
        c->ops->upload(&c->context, array->device, array->host, array->count * sizeof(float));
        return;
    }
    uint16_t *halves = malloc((array->count + 1) * sizeof *halves);
    assert_non_null(halves);
    for (size_t i = 0; i < array->count; i++) {
        halves[i] = bf16_from_float(array->host[i]);
        array->host[i] = bf16_to_float(halves[i]);
    }
    c->ops->upload(&c->context, array->device, halves, array->count * sizeof *halves);
    free(halves);
}

static void take(Case *c, Array *array) {
    if (array->act)
        c->ops->read(&c->context, array->host, array->device, array->count);
    else
        c->ops->download(&c->context, array->host, array->device, array->count * sizeof(float));
}

/* NaN throughout, on both sides. */
static Array empty(Case *c, size_t count, bool act) {
    Array array = {.count = count, .act = act};
    size_t bytes = count * (act ? c->ops->act_bytes : sizeof(float));
    array.host = host_bytes(c, count * sizeof(float));
    memset(array.host, 0xff, count * sizeof(float));
    array.device = device_bytes(c, bytes);
    poison(c, array.device, bytes);
    return array;
}

/* Uniform in [-range, range), another array for another stream. */
static float draw(uint64_t stream, size_t i, float range) {
    return range * (float)(2 * random_uniform(7, stream, i) - 1);
}

static Array drawn(Case *c, size_t count, uint64_t stream, float range, bool act) {
    Array array = empty(c, count, act);
    for (size_t i = 0; i < count; i++)
        array.host[i] = draw(stream, i, range);
    give(c, &array);
    return array;
}

static Array acts(Case *c, size_t count, uint64_t stream, float range) { return drawn(c, count, stream, range, true); }

/* What an output holds before the call: numbers to add to, or NaN. */
static Array before(Case *c, size_t count, bool accumulate, bool act) {
    return accumulate ? drawn(c, count, 99, 1, act) : empty(c, count, act);
}

/* `values` as weights: behind those that are there already, as products see them. */
static Array weights_of(Case *c, const float *values, size_t count) {
    const OpsDevice *device = c->device;
    assert_true(c->weights_used + count <= device->weight_elems);
    Array array = {.count = count, .device = device->weights + c->weights_used};
    array.host = host_bytes(c, count * sizeof(float));
    memcpy(array.host, values, count * sizeof(float));
    give(c, &array);
    c->weights_used += count;
    if (device->refresh)
        device->refresh(device);
    for (size_t i = 0; i < count && c->ops->act_bytes == sizeof(uint16_t); i++)
        array.host[i] = bf16_to_float(bf16_from_float(array.host[i]));
    return array;
}

static Array weights(Case *c, size_t count, uint64_t stream, float range) {
    float *values = host_bytes(c, count * sizeof *values);
    for (size_t i = 0; i < count; i++)
        values[i] = draw(stream, i, range);
    return weights_of(c, values, count);
}

static int *integers(Case *c, const int *values, size_t count) {
    int *device = device_bytes(c, count * sizeof *device);
    c->ops->upload(&c->context, device, values, count * sizeof *device);
    return device;
}

/* ---- what they should hold ---- */

static double *zeros(Case *c, size_t count) { return host_bytes(c, count * sizeof(double)); }

/* Zeros, or, under accumulation, the old contents. */
static Reference reference(Case *c, size_t count, const Array *old) {
    Reference ref = {zeros(c, count), zeros(c, count), zeros(c, count)};
    for (size_t i = 0; i < count && old; i++)
        ref.value[i] = (double)old->host[i];
    return ref;
}

/* Errors add up to first order; 1.1 is for what comes after that. */
static double allowed(const Case *c, const Array *array, const Reference *ref, size_t i, double exact) {
    double size = fabs(ref->value[i]), own = array->act ? size : 0;
    return exact * (1 + size) + 1.1 * (c->device->act_error * (own + ref->rounding[i]) +
                                       2 * c->device->factor_error * ref->factors[i]);
}

static void check_within(Case *c, double exact, const char *what, Array *array, const Reference *ref) {
    take(c, array);
    for (size_t i = 0; i < array->count; i++) {
        double bound = allowed(c, array, ref, i, exact);
        if (!(fabs((double)array->host[i] - ref->value[i]) <= bound))
            fail_msg("%s: %s[%zu]: expected %.9g +- %.3g, found %.9g", c->ops->name, what, i, ref->value[i], bound,
                     (double)array->host[i]);
    }
}

static void check(Case *c, const char *what, Array *array, const Reference *ref) {
    check_within(c, 1e-5, what, array, ref);
}

/* After check of both. */
static void check_same_bits(const char *what, const Array *a, const Array *b) {
    if (memcmp(a->host, b->host, a->count * sizeof *a->host) != 0)
        fail_msg("%s: two runs differ", what);
}

#endif
