/* Exchange: one array goes to a rank while another arrives from a rank and is added, in segments that fit the cache,
 * because what arrives is read again at once. The next segment travels while one is added. */
#ifndef COMM_COLLECTIVE_EXCHANGE_H
#define COMM_COLLECTIVE_EXCHANGE_H

#include "comm/transport/transport.h"

/* Either array may be empty; both may be the same. */
typedef struct Exchange {
    int to;
    float *out; /* multiplied by out_scale before it leaves */
    int64_t out_elems;
    float out_scale;
    int from;
    float *sum; /* becomes sum_scale * sum + what arrives */
    int64_t sum_elems;
    float sum_scale;
} Exchange;

/* A pure function of the largest sum_elems. */
int64_t exchange_scratch_elems(int64_t elems);

/* scratch f32[exchange_scratch_elems(sum_elems)] */
Status exchange_add(Transport *transport, const Exchange *exchange, float *scratch);

#endif
