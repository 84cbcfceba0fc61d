/* Batches out of token shards (llm.c's formats), the same for any number of ranks.
 *
 * The shards of a glob, in the order of their names, are cut into sequences: sequence i of a shard is tokens
 * i*T .. i*T+T (T inputs, and the same shifted by one as targets); what is left at a shard's end is not read.
 * Global position p counts sequences over all epochs and ranks:
 *     epoch e = p / n, sequence = order_e(p % n)          n = sequences of the whole set
 * where order_e is the identity or a permutation keyed by (seed, e). A loader holds nothing but the shards, so resume
 * is a matter of asking for the position, with any number of ranks. */
#ifndef DATA_LOADER_H
#define DATA_LOADER_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct Loader Loader;

typedef struct LoaderOptions {
    const char *glob; /* of shards, e.g. "data/fineweb_train_*.bin"; several are separated by spaces; '\ ' is a space */
    int seq_len;      /* T */
    int vocab;        /* tokens must be below: else BAD_INPUT with file and position */
    bool shuffle;     /* reshuffle the sequences each epoch */
    uint64_t seed;
    const char *hint; /* the command that makes the data, for the message when no file matches; may be NULL */
} LoaderOptions;

/* Maps every shard and checks magic, version and that count fits the file's size. Sets of up to 100 M tokens are
 * checked against `vocab` at once, larger ones as they are read. A file that two patterns match counts once. */
Status loader_open(Loader **loader, const LoaderOptions *options); /* on failure *loader is NULL */
void loader_close(Loader *loader); /* accepts NULL */

int64_t loader_tokens(const Loader *loader);
int loader_shards(const Loader *loader);
const char *loader_shard(const Loader *loader, int i); /* its file */
int64_t loader_sequences(const Loader *loader); /* n, per epoch; at least 1 */

/* Copies the sequences at global positions position .. position+count-1 into inputs and targets, i32[count*T] each.
 * Ranks get disjoint data by asking for disjoint positions. Thread-safe. */
Status loader_read(const Loader *loader, int64_t position, int count, int *inputs, int *targets);

#endif
