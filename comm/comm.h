/* Ranks, and the gradient synchronisation between them. The only public header of comm.
 *
 * A program calls comm_run(): each rank then runs its `main` function, either as one of the processes that mpirun
 * started or as one of loop.ranks threads of this process (the loop transport). A Comm belongs to one rank.
 * Every call below is collective unless it says otherwise: all ranks make the same calls in the same order.
 *
 * Errors: a call that returns FAULT leaves the group unusable; the rank should return the Status from its main
 * function, and comm ends all other ranks. A BAD_INPUT that every rank may or may not see is turned into one outcome
 * for all by comm_agree(). */
#ifndef COMM_COMM_H
#define COMM_COMM_H

#include "base/config.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/param.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct CommConfig {
    int transport;          /* [comm] transport: auto|mpi|loop */
    int algorithm;          /* auto, or the name of a collective */
    bool leader;            /* hierarchical: one rank per node talks to other nodes, instead of each for its shard */
    bool overlap;           /* buckets leave during backward; no: all of them after it */
    int64_t bucket_bytes;   /* target; buckets are whole layers unless a layer is larger */
    int64_t ranks_per_node; /* 0: as found; else ranks r with equal r / ranks_per_node count as one node */
    bool calibrate;         /* measure the links at the start, for the predictions */
    int64_t verify_every;   /* every so many steps all ranks compare a hash of their parameters; 0: never */
    int64_t timeout_s;      /* a rank that waits longer for another one gives up, naming it */
} CommConfig;

typedef struct LoopConfig {
    int64_t ranks;                                /* [loop] ranks as threads when mpirun did not start us */
    double latency_inside_us, latency_between_us; /* every message arrives so much later */
    double gb_per_s_inside, gb_per_s_between;     /* of a rank in its node, of a node to others; 0: no limit */
    char faults[OPTION_TEXT];                     /* injected faults, for tests: see comm/transport/transport_loop.h */
} LoopConfig;

extern const Option comm_options[], loop_options[];
extern const int comm_option_count, loop_option_count;

typedef struct Comm Comm;

/* ---- life ---- */

/* Before anything else in main(), also before the config is read. Under mpirun or srun: starts MPI. From here on the
 * program should leave through comm_finish: an exit without it looks to mpirun like a crash. */
Status comm_start(int *argc, char ***argv);

typedef Status RankMain(Comm *comm, void *user);

/* Forms the group and runs rank_main in every rank. `status` is the outcome of what this process did before, reading
 * its config above all: if it failed in any process, rank_main is not run and every process returns that failure.
 * Returns the Status and error line of the first rank that failed. A failure that one rank alone knows gets "rank R: "
 * in front and ends the others: threads at their next wait; processes when this one calls comm_finish. */
Status comm_run(const CommConfig *config, const LoopConfig *loop, Status status, RankMain *rank_main, void *user);

/* Last thing in main(): stops MPI, prints the error line once per group ("PROGRAM: line"), returns the exit code. */
int comm_finish(const char *program, Status status);

/* ---- who and where ---- */
int comm_rank(const Comm *comm);
int comm_ranks(const Comm *comm);      /* world size */
int comm_local_rank(const Comm *comm); /* among the ranks of this node */
int comm_local_ranks(const Comm *comm);
int comm_nodes(const Comm *comm);
int comm_node(const Comm *comm); /* 0..nodes-1: the node of this rank */
const char *comm_transport_name(const Comm *comm);

/* ---- memory in which gradients should be born: shared by the node's ranks. alloc is collective (same order and
 * sizes), free is not ---- */
const Allocator *comm_memory(Comm *comm);

/* ---- scalars and small things; identical results on every rank ---- */
typedef enum CommOp { COMM_SUM, COMM_MAX } CommOp;
Status comm_reduce(Comm *comm, double *values, int count, CommOp op);      /* in place; summed in rank order */
Status comm_gather(Comm *comm, const void *mine, void *all, size_t bytes); /* all u8[ranks][bytes], on every rank */
Status comm_broadcast(Comm *comm, void *data, size_t bytes, int root);
Status comm_barrier(Comm *comm);

/* If any rank's status is not OK: the lowest such rank's status and error line on all ranks, led by "rank R: "
 * unless all ranks failed on their input. Call after steps that may fail on some ranks only. */
Status comm_agree(Comm *comm, Status status);

/* FAULT naming the ranks unless data u8[bytes] is identical on all ranks. */
Status comm_verify(Comm *comm, const void *data, size_t bytes, const char *what);

/* ---- gradient synchronisation ----
 *
 * The flat gradient is cut into buckets of whole layers, in the order in which backward finishes them. The comm
 * thread takes bucket after bucket, each as soon as all of it is marked ready, and leaves the mean over ranks in its
 * place: a picture is in docs/comm.md. The cut and the order are the same on every rank (compared by hash at the
 * start), whatever the order of marks. */
typedef struct Sync Sync;

typedef struct SyncStats { /* of the last step, this rank; bytes as counted at the transport */
    double comm_ms;         /* at least one bucket was in flight */
    double comm_exposed_ms; /* how long sync_wait waited: the part not covered by compute */
    int64_t bytes_intra, bytes_inter; /* sent by this rank inside the node and between nodes */
} SyncStats;

/* One bucket of the last step; times in ms since sync_begin. */
typedef struct BucketStats {
    int64_t offset, elems; /* of the flat gradient */
    double ready_ms;       /* its last gradient was marked */
    double start_ms, done_ms; /* in flight between these */
    double exposed_ms;     /* of that, while sync_wait waited */
    double predicted_ms;   /* by the cost model, from the links as measured at the start; NaN if they were not */
} BucketStats;

/* grads f32[table->elems], from comm_memory(); table and grads are borrowed. */
Status sync_create(Sync **sync, Comm *comm, const CommConfig *config, const ParamTable *table, float *grads);
void sync_destroy(Sync *sync); /* not collective; accepts NULL */

const char *sync_plan(const Sync *sync); /* one line for the run header: algorithm, buckets, overlap */

/* The backward whose gradients will be marked begins: with gradient accumulation the last micro-step's. Until
 * sync_wait no other call of this Comm is allowed. */
void sync_begin(Sync *sync);

/* A ReadyFn for gpt2_backward: user is the Sync. Not collective; any thread. Each gradient once per step. */
void sync_mark_ready(void *sync, int gradient);

/* Returns when every gradient holds the mean over ranks: identical bits on every rank. FAULT naming the gradient
 * when one was not marked. */
Status sync_wait(Sync *sync);

SyncStats sync_stats(const Sync *sync);
int sync_bucket_count(const Sync *sync);                   /* 0 with one rank */
BucketStats sync_bucket(const Sync *sync, int bucket);     /* of the last step */
BucketStats sync_bucket_mean(const Sync *sync, int bucket); /* over all steps but the first */
double sync_ready_ms(const Sync *sync, int gradient);      /* when it was marked in the last step, since sync_begin */
double sync_begin_s(const Sync *sync);                     /* of the last step, on clock_s()'s scale */

/* The links as measured by sync_create, as text: "inside a node 1.2 us, 8.10 GB/s; between nodes ...". */
const char *sync_links(const Sync *sync);
double sync_cpu_s(const Sync *sync); /* CPU seconds of the comm thread so far */

#endif
