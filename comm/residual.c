#include "comm/residual.h"

#include <stdio.h>
#include <stdlib.h>

enum { CHUNK_ELEMS = 1 << 20 };

static Status gather_hop(const Group *group, Codec *codec, CodecHop hop) {
    if (group->size == 1)
        return OK;
    const Collective *collective = &collective_reduce_scatter;
    int64_t scratch_elems = collective->scratch_elems(group, CHUNK_ELEMS, NULL);
    float *scratch = malloc((size_t)scratch_elems * sizeof(float));
    if (!scratch)
        return fault("no memory for residuals on their way");
    Status status = OK;
    for (int64_t start = 0; start < codec->elems && status == OK; start += CHUNK_ELEMS) {
        int64_t rest = codec->elems - start;
        Payload payload = {.data = codec->residual[hop] + start, .elems = rest < CHUNK_ELEMS ? rest : CHUNK_ELEMS,
                           .scale = 1, .scratch = scratch};
        status = collective->allreduce(group, &payload);
    }
    free(scratch);
    return status;
}

Status residual_gather(const Comm *comm, Codec *codec) {
    if (!codec->error_feedback)
        return OK;
    const Transport *transport = comm->transport;
    int *members = malloc((size_t)transport->ranks * sizeof *members);
    if (!members)
        return fault("no memory for a list of ranks");
    Group node = {comm->transport, members, 0, comm->local_rank};
    for (int rank = 0; rank < transport->ranks; rank++)
        if (transport->node[rank] == transport->node[transport->rank])
            members[node.size++] = rank;
    Status status = gather_hop(&node, codec, HOP_SECOND);
    free(members);
    Group world = comm->world;
    world.transport = comm->transport; /* residuals are held on the host */
    return status == OK ? gather_hop(&world, codec, HOP_RESULT) : status;
}

/* ---- checkpoints ---- */

int residual_arrays(const Comm *comm, const Codec *codec) {
    return codec->error_feedback ? 1 + comm->nodes + comm_ranks(comm) : 0;
}

static int first_of_node(const Comm *comm, int node) {
    const int *nodes = comm->transport->node;
    int rank = 0;
    for (int found = 0; rank < comm_ranks(comm); rank++) {
        bool first = true;
        for (int before = 0; before < rank; before++)
            first &= nodes[before] != nodes[rank];
        if (first && found++ == node)
            break;
    }
    return rank;
}

ResidualArray residual_array(const Comm *comm, const Codec *codec, int i) {
    ResidualArray array = {HOP_RESULT, 0, "residual"};
    (void)codec;
    if (i > comm->nodes) {
        array.hop = HOP_FIRST;
        array.holder = i - 1 - comm->nodes;
        snprintf(array.name, sizeof array.name, "residual_rank%d", array.holder);
    } else if (i > 0) {
        array.hop = HOP_SECOND;
        array.holder = first_of_node(comm, i - 1);
        snprintf(array.name, sizeof array.name, "residual_node%d", i - 1);
    }
    return array;
}

Status residual_fetch(const Comm *comm, const Codec *codec, int i, float *out) {
    ResidualArray array = residual_array(comm, codec, i);
    Transport *transport = comm->transport;
    size_t bytes = (size_t)codec->elems * sizeof(float);
    if (array.holder == 0 && transport->rank == 0) {
        for (int64_t e = 0; e < codec->elems; e++)
            out[e] = codec->residual[array.hop][e];
        return OK;
    }
    transport_group_begin(transport);
    if (transport->rank == 0)
        transport_recv(transport, array.holder, out, bytes);
    else if (transport->rank == array.holder)
        transport_send(transport, 0, codec->residual[array.hop], bytes);
    return transport_group_end(transport);
}

static bool belongs_here(const Comm *comm, const ResidualArray *array, int rank) {
    const int *node = comm->transport->node;
    return array->hop == HOP_RESULT || (array->hop == HOP_SECOND && node[rank] == node[array->holder]) ||
           rank == array->holder;
}

Status residual_restore(const Comm *comm, Codec *codec, int i, const float *in) {
    ResidualArray array = residual_array(comm, codec, i);
    Transport *transport = comm->transport;
    size_t bytes = (size_t)codec->elems * sizeof(float);
    transport_group_begin(transport);
    for (int rank = 1; transport->rank == 0 && rank < transport->ranks; rank++)
        if (belongs_here(comm, &array, rank))
            transport_send(transport, rank, in, bytes);
    if (transport->rank > 0 && belongs_here(comm, &array, transport->rank))
        transport_recv(transport, 0, codec->residual[array.hop], bytes);
    TRY(transport_group_end(transport));
    for (int64_t e = 0; transport->rank == 0 && belongs_here(comm, &array, 0) && e < codec->elems; e++)
        codec->residual[array.hop][e] = in[e];
    return OK;
}
