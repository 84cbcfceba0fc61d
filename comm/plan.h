/* The plan of gradient synchronisation: what leaves in which order, by which collective. A pure function of the
 * table, the configuration and the topology, so alike on every rank; sync_create.c compares a hash of it first. */
#ifndef COMM_PLAN_H
#define COMM_PLAN_H

#include "comm/bucket.h"
#include "comm/internal.h"

typedef struct Plan {
    Bucket *buckets; /* owned */
    int count;
    int head_buckets; /* the first ones: of the tied embedding's head, when it stands first; else 0 */
    const Collective **collectives; /* of each bucket, owned */
    const Collective *lookup;       /* of the embedding's rows; NULL without a lookup of its own */
    int64_t scratch_elems;          /* enough for every bucket */
    uint64_t hash;
    char text[288], warning[224]; /* for the run header */
} Plan;

/* codec may be NULL. BAD_INPUT when the configuration asks for what does not go together. */
Status plan_create(Plan *plan, const Comm *comm, const CommConfig *config, const SyncSetup *setup, const Codec *codec);
void plan_destroy(Plan *plan); /* accepts a zeroed one */

/* What can be said before there is a table: combinations that no collective does, or not over these ranks. */
Status plan_check(const Comm *comm, const CommConfig *config, bool sharded);

/* The compressor's choice in [comm] compress; NULL: none. */
const Compressor *plan_compressor(const CommConfig *config);

/* Whether anything that travels is compressed: not with one rank, nor between nodes where there is only one. */
bool plan_compresses(const Comm *comm, const CommConfig *config);

#endif
