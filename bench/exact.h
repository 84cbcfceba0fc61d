/* Data whose all-reduce is known exactly: small integers, so that any order of adding gives the same f32. Wrong is an
 * element that nobody reduced, that was reduced with another place's, or that holds one rank's part twice and lacks
 * another's. */
#ifndef BENCH_EXACT_H
#define BENCH_EXACT_H

#include <stdint.h>

enum { EXACT_RANKS_MAX = 8192 }; /* beyond, sums might pass 2^24 */

/* Differs from place to place: 0..EXACT_PLACE_MAX. */
enum { EXACT_PLACE_MAX = 63 };
static inline float exact_place(int64_t i) { return (float)((uint32_t)i * 2654435761u >> 26); }

/* Squares, so that no rank's share is the mean of two others'. */
static inline float exact_share(int rank) { return (float)((int64_t)rank * rank % 1009 + 1); }

/* What rank contributes: always below the sum of two ranks or more. */
static inline void exact_fill(float *data, int64_t elems, int rank) {
    float share = exact_share(rank);
    for (int64_t i = 0; i < elems; i++)
        data[i] = exact_place(i) + share;
}

/* What ranks first..end-1 add to every place. */
static inline float exact_shares(int first, int end) {
    float shares = 0;
    for (int rank = first; rank < end; rank++)
        shares += exact_share(rank);
    return shares;
}

/* How many of data f32[elems] are not the sum over ranks first..end-1. NaN is wrong. */
static inline int64_t exact_wrong(const float *data, int64_t elems, int first, int end) {
    float shares = exact_shares(first, end), ranks = (float)(end - first);
    int64_t wrong = 0;
    for (int64_t i = 0; i < elems; i++)
        wrong += !(data[i] == ranks * exact_place(i) + shares);
    return wrong;
}

#endif
