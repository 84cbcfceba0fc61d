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
#include "base/gpu.h"
#include "base/memory.h"
#include "base/param.h"
#include "base/phases.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct CommConfig {
    int transport;          /* [comm] transport: auto|mpi|loop|nccl */
    int algorithm;          /* auto, or the name of a collective */
    bool leader;            /* hierarchical: one rank per node talks to other nodes, instead of each for its shard */
    bool overlap;           /* buckets leave during backward; no: all of them after it */
    int64_t bucket_bytes;   /* target; buckets are whole layers unless a layer is larger */
    char ranks_per_node[OPTION_TEXT]; /* which ranks count as one node: comm/nodes.h */
    int group;              /* node|numa|pcie: what counts as a node, a CommNodes */
    bool calibrate;         /* measure the links at the start, for the predictions */
    int64_t verify_every;   /* every so many steps all ranks compare a hash of their parameters; 0: never */
    int64_t timeout_s;      /* a rank that waits longer for another one gives up, naming it */
    int compress;           /* none, or the name of a compressor (comm/compress/compressor.h) */
    int compress_scope;     /* between nodes only, or all: on every hop */
    double topk_density;    /* topk: share of values that travel */
    int topk_values;        /* f32|bf16 */
    bool error_feedback;    /* what a quantisation drops is added to the next step's */
    int requantise;         /* no|ring: the baseline that quantises at each hop of a ring, to show why not */
    int64_t warmup_steps;   /* dense ones, before compression begins; -1: as many as the learning rate's warm-up, which
                             * the program puts in: for comm itself it means none */
    bool split_embedding;   /* the tied embedding has two gradients: the head's leaves first, the lookup's is small */
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
/* What counts as a node, by [comm] group: hosts; NUMA domains that ranks are bound to; GPUs below one PCIe switch. */
typedef enum CommNodes { COMM_NODES_HOSTS, COMM_NODES_NUMA, COMM_NODES_PCIE } CommNodes;
CommNodes comm_nodes_are(const Comm *comm);
int comm_host(const Comm *comm);      /* from 0: the host of this rank, whatever counts as a node */
int comm_host_rank(const Comm *comm); /* among the ranks of this host */
int comm_host_ranks(const Comm *comm);
int comm_node(const Comm *comm); /* 0..nodes-1: the node of this rank */
bool comm_same_node(const Comm *comm, int a, int b); /* of any two ranks */
const char *comm_transport_name(const Comm *comm);

/* ---- gradients on GPUs ---- */

/* From now on the sync works on arrays in this Gpu's memory, by NCCL, if comm.transport is auto or nccl and can do
 * that: comm_on_gpu tells. Where it cannot, and for comm.transport = mpi or loop, the sync goes on to work on the
 * host's memory. FAULT where nccl is asked for and impossible, as it is without a Gpu (NULL). comm.group = pcie finds
 * its nodes here: BAD_INPUT where a rank has no GPU, or one that hwloc does not see. Collective; before sync_create. */
Status comm_use_gpu(Comm *comm, const CommConfig *config, Gpu *gpu);
bool comm_on_gpu(const Comm *comm);

/* Before the Gpu is closed, and after sync_destroy. Not collective. */
void comm_leave_gpu(Comm *comm);

/* Why not, in a few words, "" where there is nothing to say. */
const char *comm_gpu_note(const Comm *comm);

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

/* Whether every rank returns the last failure, so that none is left to say more. */
bool comm_outcome_shared(const Comm *comm);

/* FAULT naming the ranks unless data u8[bytes] is identical on all ranks. */
Status comm_verify(Comm *comm, const void *data, size_t bytes, const char *what);

/* ---- gradient synchronisation ----
 *
 * The flat gradient is cut into buckets of whole layers, in the order in which backward finishes them. The comm
 * thread takes bucket after bucket, each as soon as all of it is marked ready, and leaves the mean over ranks in its
 * place: a picture is in docs/comm.md. The cut and the order are the same on every rank (compared by hash at the
 * start), whatever the order of marks.
 *
 *     sync_forward_begin(tokens)   token ids travel; sharded parameters are gathered
 *       forward                    sync_need(gradient): waits until those parameters are here
 *     sync_forward_end
 *     sync_begin
 *       backward                   sync_mark_ready(gradient)
 *     sync_wait                    every gradient is the mean
 *       update
 *     sync_commit                  unless the step was skipped
 *
 * Between a begin and its end no other call of this Comm is allowed. With gradient accumulation sync_forward_* stand
 * round the first micro-step's forward, and only the last micro-step's backward communicates. Without a split
 * embedding and without shards sync_forward_* may be left out. */
typedef struct Sync Sync;

/* What is synchronised; arrays are borrowed. */
typedef struct SyncSetup {
    const ParamTable *table;
    float *grads;  /* f32[table->elems], from comm_memory(), or from the Gpu's memory if comm_on_gpu(). sync_create may
                    * overwrite them */
    bool sharded;  /* ZeRO-1 (Rajbhandari et al., 2020): each rank gets the mean of its shard only, updates that, and
                    * the parameters are gathered under the next forward pass */
    float *params; /* f32[table->elems], of the same memory; only if sharded */
    /* Split embedding: gradients[0] is the head's, f32[>= vocab][channels], and sync_lookup() tells where the lookup's
     * belongs. vocab 0: the embedding has one gradient. */
    int vocab, channels;
    int64_t tokens; /* that a rank looks up in a step, at most */
} SyncSetup;

typedef struct SyncStats { /* of the last step, this rank; bytes as counted at the transport */
    double comm_ms;         /* at least one bucket was in flight, gathering of parameters included */
    double comm_exposed_ms; /* how long sync_wait, and for sharded parameters sync_need and sync_forward_end, waited:
                             * the part not covered by compute */
    double gather_exposed_ms; /* of that, in sync_need and sync_forward_end */
    double compress_error;  /* relative RMS error of what this rank quantised, from a sample; 0: nothing */
    int64_t bytes_intra, bytes_inter; /* sent by this rank inside the node and between nodes */
} SyncStats;

/* One bucket of the last step; times in ms since sync_begin. */
typedef struct BucketStats {
    int64_t offset, elems; /* of the flat gradient; of the lookup's rows, which are the last bucket: 0 and their size */
    double ready_ms;       /* its last gradient was marked; for the lookup's rows: sync_wait was called */
    double start_ms, done_ms; /* in flight between these */
    double exposed_ms;     /* of that, while sync_wait waited */
    double predicted_ms;   /* by the cost model, from the links as measured at the start; NaN if they were not */
    /* Of sharded parameters, under forward. Of the lookup's rows: with the exchange of token ids ahead of them */
    double needed_ms;      /* forward asked for them: since sync_forward_begin, its waits left out */
    double gather_ms, gather_predicted_ms; /* what gathering took, and should take */
    Phases phases;         /* of the collective; on clock_s()'s scale */
} BucketStats;

/* BAD_INPUT when the configuration asks for what does not go together, or not over these ranks: after comm_use_gpu. Not
 * collective; sync_create checks it too. */
Status sync_check(const Comm *comm, const CommConfig *config, bool sharded);

Status sync_create(Sync **sync, Comm *comm, const CommConfig *config, const SyncSetup *setup);

/* What sync_create will do, before there are arrays: grads and params of setup may be NULL. Not collective. */
typedef struct SyncOutline {
    size_t bytes; /* large arrays of this rank's: of the Gpu if comm_on_gpu(), else of the host, where residuals of
                   * error feedback are estimated from above, and a split embedding's rows come on top */
    Shard shard;  /* as sync_shard() of this rank; its slices are the caller's to free. Without any: not sharded */
    char plan[288];    /* as sync_plan() */
    char warning[224]; /* one line on what the plan is likely to cost; empty: nothing to say */
} SyncOutline;
Status sync_outline(SyncOutline *outline, Comm *comm, const CommConfig *config, const SyncSetup *setup);
void sync_destroy(Sync *sync); /* not collective; accepts NULL, and one in the middle of a step */

const char *sync_plan(const Sync *sync); /* one line for the run header: algorithm, wire, buckets, overlap */

/* Another plan between two steps: bucket size, algorithm. Residuals stay with their places. Not with shards. */
Status sync_replan(Sync *sync, const CommConfig *config);

/* The step begins: tokens i32[count] is all that this rank looks up in it. */
void sync_forward_begin(Sync *sync, const int *tokens, int64_t count);

/* A NeedFn for the model: returns when that gradient's parameters are here; of a split embedding's gradients[0], the
 * rows that this rank looks up, and all of it only after sync_forward_end. After a failure it returns at once, and
 * sync_forward_end tells. */
void sync_need(void *sync, int gradient);
Status sync_forward_end(Sync *sync);

/* Until the next sync_forward_begin: the gradient of token t's lookup belongs to rows[slot_of_token[t]], f32[channels]
 * each. rows NULL: to gradients[0], which then is final last. */
typedef struct SyncLookup {
    float *rows;
    int slots;
    const int *slot_of_token;
} SyncLookup;
SyncLookup sync_lookup(const Sync *sync);

/* The backward whose gradients will be marked begins. */
void sync_begin(Sync *sync);

/* A ReadyFn for gpt2_backward: user is the Sync. Not collective; any thread. Each gradient once per step. */
void sync_mark_ready(void *sync, int gradient);

/* Returns when every gradient (of a sharded one: this rank's shard) holds the mean over ranks: identical bits on every
 * rank. FAULT naming the gradient when one was not marked. */
Status sync_wait(Sync *sync);

/* The parameters were updated with what sync_wait left: new residuals become current, and sharded parameters will be
 * gathered. Without this call the step has changed nothing. */
void sync_commit(Sync *sync);

/* What `rank` owns; NULL when the sync is not sharded. */
const Shard *sync_shard(const Sync *sync, int rank);

/* Collective: returns when the parameters are whole on every rank, for whoever reads them outside of a step. */
Status sync_gather_params(Sync *sync);

/* Steps done before, by a run that is resumed: compression begins after warmup_steps. */
void sync_resume(Sync *sync, int64_t step);

/* Residuals for a checkpoint: rank 0 reads or gives array i, f32[table->elems], of sync_residuals(); elsewhere data is
 * not used. Collective. */
int sync_residuals(const Sync *sync);
const char *sync_residual_name(const Sync *sync, int i, char name[32]);
Status sync_residual_fetch(Sync *sync, int i, float *data);
Status sync_residual_restore(Sync *sync, int i, const float *data);

SyncStats sync_stats(const Sync *sync);
int sync_bucket_count(const Sync *sync);                   /* 0 with one rank */
BucketStats sync_bucket(const Sync *sync, int bucket);     /* of the last step */
BucketStats sync_bucket_mean(const Sync *sync, int bucket); /* over all steps but the first */

/* A step, as the cost model expects it from the links as measured at the start, and from when buckets were ready and
 * needed on average, the first step left out. NaN if links were not measured. */
typedef struct SyncPrediction {
    double compute_ms;        /* as measured: from sync_forward_begin, or sync_begin, to sync_wait, without waits */
    double gather_exposed_ms; /* of sharded parameters: what forward waits for */
    double reduce_exposed_ms; /* of gradients: what sync_wait waits for */
} SyncPrediction;
SyncPrediction sync_predict(const Sync *sync);

double sync_ready_ms(const Sync *sync, int gradient);      /* when it was marked in the last step, since sync_begin */
double sync_begin_s(const Sync *sync);                     /* of the last step, on clock_s()'s scale */

/* The links as measured by sync_create, as text: "inside a node 1.2 us, 8.10 GB/s; between nodes ...". */
const char *sync_links(const Sync *sync);

#endif
