/* The transport's own all-reduces: the yardsticks of the others. They work in one step, over all ranks. How, the
 * library does not tell, so what they take is measured at the start: calibrate_collective.
 *
 * native: MPI_Allreduce. It cannot be timed out and spins while it waits, so all ranks meet in a barrier first, which
 * does neither.
 *
 * iallreduce: MPI_Iallreduce, the baseline for overlap. No barrier: it waits as all messages do, and leaves the core to
 * backward. From scratch to data, piece by piece: Open MPI 4.1 reduces and broadcasts along a tree where it works in
 * place, and on 2 nodes of 4 a link then carries 5 S one after the other; else it halves and doubles, S each way. */
#include "comm/collective/collective.h"
#include "comm/collective/cost.h"
#include "comm/transport/vector.h"

enum { PIECE_ELEMS = 4 << 20 };

static Status check(const Group *group, const char *name) {
    if (!group->transport->ops->allreduce_sum)
        return bad_input("comm.algorithm = %s: the %s transport has no all-reduce of its own", name,
                         group->transport->ops->name);
    if (group->size != group->transport->ranks)
        return bad_input("comm.algorithm = %s: works over all ranks only", name);
    return OK;
}
static Status native_check(const Group *group) { return check(group, "native"); }
static Status iallreduce_check(const Group *group) { return check(group, "iallreduce"); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t native_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    (void)group, (void)elems, (void)codec;
    return 0;
}

static int64_t iallreduce_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    (void)group, (void)codec;
    return least(elems, PIECE_ELEMS);
}

static double predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    return group->size == 1 ? 0 : cost_timed_s(costs, elems);
}

static Status native_allreduce(const Group *group, const Payload *payload) {
    vector_scale(group->transport, payload->data, payload->elems, payload->scale);
    phase_begin(group->transport, payload->phases, 0, "barrier");
    TRY(transport_barrier(group->transport));
    phase_end(group->transport, payload->phases, 0);
    phase_begin(group->transport, payload->phases, 1, "all-reduce");
    TRY(transport_allreduce_sum(group->transport, payload->data, payload->data, payload->elems, true));
    phase_end(group->transport, payload->phases, 1);
    return OK;
}

static Status iallreduce_allreduce(const Group *group, const Payload *payload) {
    phase_begin(group->transport, payload->phases, 0, "all-reduce");
    for (int64_t start = 0; start < payload->elems; start += PIECE_ELEMS) {
        int64_t elems = least(payload->elems - start, PIECE_ELEMS);
        float *data = payload->data + start;
        vector_set_scaled(group->transport, payload->scratch, payload->scale, data, elems);
        TRY(transport_allreduce_sum(group->transport, payload->scratch, data, elems, false));
    }
    phase_end(group->transport, payload->phases, 0);
    return OK;
}

const Collective collective_native = {.name = "native",
                                      .check = native_check,
                                      .timed = true,
                                      .scratch_elems = native_scratch_elems,
                                      .predict_s = predict_s,
                                      .allreduce = native_allreduce};
const Collective collective_iallreduce = {.name = "iallreduce",
                                          .check = iallreduce_check,
                                          .timed = true,
                                          .scratch_elems = iallreduce_scratch_elems,
                                          .predict_s = predict_s,
                                          .allreduce = iallreduce_allreduce};
