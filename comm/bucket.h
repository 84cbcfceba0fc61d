/* The cut of the flat gradient into buckets: a pure function of the table and a size, so alike on every rank.
 *
 * Walking the table in the order in which gradients become final, whole layers join a bucket until it holds
 * bucket_bytes; tensors outside the layers count as layers of their own. A layer larger than that is cut
 * between its tensors, and a tensor larger than that into slices, at multiples of 4,096 values of
 * the flat gradient if they hold as many. The last unit (for GPT-2 the token embedding) never joins an earlier bucket,
 * so that what is final early leaves early; nor does a later one join the first unit if that is a matrix (the token
 * embedding again, where its head's gradient is one of its own).
 *
 *     table    | lnf | layer 11 ... | layer 10 ... | ... | layer 0 | wpe | wte |
 *     buckets  |      0             |      1       | ... |    n-2        | n-1 |            */
#ifndef COMM_BUCKET_H
#define COMM_BUCKET_H

#include "base/param.h"

#include <stdint.h>

typedef struct Bucket {
    int64_t offset, elems;
    int first_gradient, last_gradient; /* those that overlap the bucket */
} Bucket;

/* Returns an owned array of *count buckets that cover the table in order, without gaps; NULL: no memory.
 * bucket_bytes >= 4. */
Bucket *bucket_cut(const ParamTable *table, int64_t bucket_bytes, int *count);

#endif
