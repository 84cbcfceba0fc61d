/* The transport's own all-reduces: the yardsticks of the others. They work in one step, over all ranks.
 *
 * native: MPI_Allreduce. It cannot be timed out and spins while it waits, so all ranks meet in a barrier first, which
 * does neither.
 *
 * iallreduce: MPI_Iallreduce, the baseline for overlap. No barrier: it waits as all messages do, and leaves the core to
 * backward. Open MPI runs other algorithms for it than for MPI_Allreduce. */
#include "comm/collective/collective.h"
#include "comm/transport/vector.h"

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

static int64_t native_scratch_elems(const Group *group, int64_t elems, const Codec *codec) {
    (void)group, (void)elems, (void)codec;
    return 0;
}

/* Whatever MPI does: taken for a tree below, where latency counts, and for a ring above. */
static double native_predict_s(const Group *group, int64_t elems, const LinkCosts *costs) {
    double tree_s = collective_tree.predict_s(group, elems, costs);
    double ring_s = collective_ring.predict_s(group, elems, costs);
    return tree_s < ring_s ? tree_s : ring_s;
}

static Status sum(const Group *group, const Payload *payload, int phase, bool may_spin) {
    phase_begin(group->transport, payload->phases, phase, "all-reduce");
    TRY(transport_allreduce_sum(group->transport, payload->data, payload->elems, may_spin));
    phase_end(group->transport, payload->phases, phase);
    return OK;
}

static Status native_allreduce(const Group *group, const Payload *payload) {
    vector_scale(group->transport, payload->data, payload->elems, payload->scale);
    phase_begin(group->transport, payload->phases, 0, "barrier");
    TRY(transport_barrier(group->transport));
    phase_end(group->transport, payload->phases, 0);
    return sum(group, payload, 1, true);
}

static Status iallreduce_allreduce(const Group *group, const Payload *payload) {
    vector_scale(group->transport, payload->data, payload->elems, payload->scale);
    return sum(group, payload, 0, false);
}

const Collective collective_native = {.name = "native",
                                      .check = native_check,
                                      .scratch_elems = native_scratch_elems,
                                      .predict_s = native_predict_s,
                                      .allreduce = native_allreduce};
const Collective collective_iallreduce = {.name = "iallreduce",
                                          .check = iallreduce_check,
                                          .scratch_elems = native_scratch_elems,
                                          .predict_s = native_predict_s,
                                          .allreduce = iallreduce_allreduce};
