#include "comm/collective/exchange.h"

#include "comm/transport/vector.h"

enum {
    SEGMENT_ELEMS = 128 << 10,
    SLOTS = 2,             /* segments under way: one is added, the next one travels */
    POLL_ELEMS = 16 << 10, /* added between two looks at the transport */
};

int64_t exchange_scratch_elems(int64_t elems) { return elems <= SEGMENT_ELEMS ? elems : SLOTS * SEGMENT_ELEMS; }

static int64_t segment_elems(int64_t elems, int64_t start) {
    int64_t rest = elems - start;
    return rest <= 0 ? 0 : rest < SEGMENT_ELEMS ? rest : SEGMENT_ELEMS;
}

static float *slot_of(float *scratch, int64_t start) { return scratch + start / SEGMENT_ELEMS % SLOTS * SEGMENT_ELEMS; }

/* Empty segments do not travel. */
static Ticket start_segment(Transport *transport, const Exchange *exchange, int64_t start, float *scratch) {
    int64_t out_elems = segment_elems(exchange->out_elems, start), in_elems = segment_elems(exchange->sum_elems, start);
    if (exchange->out_scale != 1 && out_elems > 0)
        vector_scale(transport, exchange->out + start, out_elems, exchange->out_scale);
    transport_group_begin(transport);
    if (out_elems > 0)
        transport_send(transport, exchange->to, exchange->out + start, (size_t)out_elems * sizeof(float));
    if (in_elems > 0)
        transport_recv(transport, exchange->from, slot_of(scratch, start), (size_t)in_elems * sizeof(float));
    return transport_group_start(transport);
}

static Status add_segment(Transport *transport, const Exchange *exchange, int64_t start, const float *arrived,
                          Ticket next) {
    int64_t elems = segment_elems(exchange->sum_elems, start);
    for (int64_t at = 0; at < elems; at += POLL_ELEMS) {
        int64_t count = elems - at < POLL_ELEMS ? elems - at : POLL_ELEMS;
        bool complete;
        vector_scale_add(transport, exchange->sum + start + at, exchange->sum_scale, arrived + at, count);
        if (next)
            TRY(transport_group_test(transport, next, &complete));
    }
    return OK;
}

Status exchange_add(Transport *transport, const Exchange *exchange, float *scratch) {
    int64_t elems = exchange->out_elems > exchange->sum_elems ? exchange->out_elems : exchange->sum_elems;
    if (elems == 0)
        return OK;
    Ticket ticket = start_segment(transport, exchange, 0, scratch);
    for (int64_t start = 0; start < elems; start += SEGMENT_ELEMS) {
        Ticket next = 0;
        if (start + SEGMENT_ELEMS < elems)
            next = start_segment(transport, exchange, start + SEGMENT_ELEMS, scratch);
        TRY(transport_group_wait(transport, ticket));
        TRY(add_segment(transport, exchange, start, slot_of(scratch, start), next));
        ticket = next;
    }
    return OK;
}
