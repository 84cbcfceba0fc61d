#include "comm/bucket.h"

#include <assert.h>
#include <stdlib.h>

/* The gradient behind the last one of the layer that starts at `first`. */
static int layer_end(const ParamTable *table, int first) {
    int end = first + 1;
    while (table->gradients[first].layer >= 0 && end < table->gradient_count &&
           table->gradients[end].layer == table->gradients[first].layer)
        end++;
    return end;
}

enum { ALIGN_ELEMS = 4096 }; /* a compressor's largest block */

/* Appends slices of at most `max` elements that cover [offset, end). Without an array it only counts. */
static void add_slices(Bucket *buckets, int *count, int64_t offset, int64_t end, int64_t max) {
    for (int64_t stop; offset < end; offset = stop, (*count)++) {
        stop = offset + max < end ? offset + max : end;
        if (stop < end && max >= ALIGN_ELEMS)
            stop -= stop % ALIGN_ELEMS;
        if (buckets)
            buckets[*count] = (Bucket){.offset = offset, .elems = stop - offset};
    }
}

/* A layer that is larger than a bucket: whole tensors while they fit, slices of a tensor that does not. Covers
 * gradients first..end-1. */
static void add_large_layer(Bucket *buckets, int *count, const ParamTable *table, int first, int end, int64_t max) {
    int64_t open = table->gradients[first].offset, stop = open;
    for (int g = first; g < end; g++) {
        int64_t start = stop;
        stop = start + table->gradients[g].elems;
        if (stop - open <= max)
            continue;
        if (open < start)
            add_slices(buckets, count, open, start, start - open);
        open = start;
        if (stop - start > max) {
            add_slices(buckets, count, start, stop, max);
            open = stop;
        }
    }
    if (open < stop)
        add_slices(buckets, count, open, stop, stop - open);
}

/* Fills buckets, or with NULL only counts them. */
static int cut(const ParamTable *table, int64_t max, Bucket *buckets) {
    int count = 0;
    int64_t open = 0; /* where the bucket that is being filled begins */
    for (int first = 0, end; first < table->gradient_count; first = end) {
        end = layer_end(table, first);
        int64_t layer_start = table->gradients[first].offset;
        int64_t layer_stop = table->gradients[end - 1].offset + table->gradients[end - 1].elems;
        bool last = end == table->gradient_count;
        bool alone = first == 0 && table->gradients[0].layer < 0 && !table->gradients[0].dense;
        if (open < layer_start && (last || layer_stop - layer_start > max)) { /* what is open leaves alone */
            add_slices(buckets, &count, open, layer_start, layer_start - open);
            open = layer_start;
        }
        if (layer_stop - layer_start > max) {
            add_large_layer(buckets, &count, table, first, end, max);
            open = layer_stop;
        } else if (last || alone || layer_stop - open >= max) {
            add_slices(buckets, &count, open, layer_stop, layer_stop - open);
            open = layer_stop;
        }
    }
    return count;
}

static void find_gradients(const ParamTable *table, Bucket *bucket) {
    int gradient = 0;
    while (table->gradients[gradient].offset + table->gradients[gradient].elems <= bucket->offset)
        gradient++;
    bucket->first_gradient = gradient;
    while (gradient + 1 < table->gradient_count &&
           table->gradients[gradient + 1].offset < bucket->offset + bucket->elems)
        gradient++;
    bucket->last_gradient = gradient;
}

Bucket *bucket_cut(const ParamTable *table, int64_t bucket_bytes, int *count) {
    int64_t max = bucket_bytes / (int64_t)sizeof(float);
    assert(max >= 1);
    *count = cut(table, max, NULL);
    Bucket *buckets = calloc((size_t)*count + 1, sizeof *buckets);
    if (!buckets)
        return NULL;
    cut(table, max, buckets);
    for (int i = 0; i < *count; i++)
        find_gradients(table, &buckets[i]);
    return buckets;
}
