/* What the files of comm/ itself share; everybody else includes comm.h. */
#ifndef COMM_INTERNAL_H
#define COMM_INTERNAL_H

#include "comm/collective/collective.h"
#include "comm/comm.h"
#include "comm/engine.h"
#include "comm/transport/transport.h"

struct Comm {
    /* set once */
    Transport *transport; /* borrowed */
    Group world;          /* over the transport that moves gradients: `transport`, or `device` */
    Transport *device;    /* owned; NULL where gradients are in the host's memory */
    const Allocator *scratch_memory; /* of the kind in which gradients are */
    int local_rank, local_ranks, node, nodes;
    int host, host_rank, host_ranks; /* whatever counts as a node */
    CommNodes nodes_are;
    Engine *engine; /* owned; NULL with a single rank */
    Allocator memory; /* what comm_memory returns */
    Gpu *gpu;             /* borrowed; NULL without */
    const char *gpu_note; /* a constant, or NULL */
    /* of the rank */
    double *gathered;    /* f64[ranks][COMM_REDUCE_COUNT], owned */
    bool outcome_shared; /* the last failure is known to every rank, which returns the same one */
};

enum { COMM_REDUCE_COUNT = 64 }; /* values that comm_reduce moves at a time */

/* The choices of [comm] algorithm: auto, and the names of collectives. */
extern const char comm_transports[];
extern const char comm_algorithms[];
extern const char comm_groups[];
extern const char comm_compressors[], comm_requantisations[];

/* `transport` is borrowed and must outlive the comm. */
Status comm_create(Comm **comm, Transport *transport);

/* Overrides which ranks share a node, as [comm] says. Every rank alike; BAD_INPUT too. */
Status comm_set_nodes(Comm *comm, const CommConfig *config);
/* Counts nodes and their ranks anew, as the transport has them now. */
void comm_count_nodes(Comm *comm);
void comm_destroy(Comm *comm); /* not collective; accepts NULL and half-built ones */

/* 64 bits of data u8[bytes]; any change of a single word changes it. */
uint64_t comm_hash(const void *data, size_t bytes);

#endif
