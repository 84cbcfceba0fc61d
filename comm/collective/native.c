/* native: the transport's own all-reduce, such as MPI_Allreduce. The yardstick of the others.
 *
 * It cannot be timed out and spins while it waits, so all ranks meet in a barrier first, which does neither. */
#include "comm/collective/collective.h"
#include "comm/transport/vector.h"

static Status native_check(const Group *group) {
    if (!group->transport->ops->allreduce_sum)
        return bad_input("comm.algorithm = native: the %s transport has no all-reduce of its own",
                         group->transport->ops->name);
    if (group->size != group->transport->ranks)
        return bad_input("comm.algorithm = native: works over all ranks only");
    return OK;
}

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

static Status native_allreduce(const Group *group, const Payload *payload) {
    vector_scale(group->transport, payload->data, payload->elems, payload->scale);
    TRY(transport_barrier(group->transport));
    return group->transport->ops->allreduce_sum(group->transport, payload->data, payload->elems);
}

const Collective collective_native = {.name = "native",
                                      .check = native_check,
                                      .scratch_elems = native_scratch_elems,
                                      .predict_s = native_predict_s,
                                      .allreduce = native_allreduce};
