/* Ranks, and small things between them: everything here is a handful of messages, so each rank sends its part to all
 * others at once (one step) and computes the result itself, in rank order. Only broadcast, which may be large, is a
 * tree. Gradients go through sync.c.
 *
 * All messages are sent by the comm thread: a call here is a job of it, and the caller waits. */
#include "comm/internal.h"
#include "comm/nodes.h"

#include "base/machine.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_BYTES = 1024 };

const char comm_transports[] = "auto|mpi|loop|nccl";
const char comm_algorithms[] = "auto|naive|native|iallreduce|ring|tree|reduce_scatter|hierarchical";
const char comm_groups[] = "node|numa|pcie"; /* in the order of CommNodes */
const char comm_compressors[] = "none|bf16|int8|int4|topk|int8_tensor";
const char comm_requantisations[] = "no|ring";

const Option comm_options[] = {
    {"transport", OPTION_CHOICE, offsetof(CommConfig, transport), "auto", .choices = comm_transports,
     .help = "how ranks talk; auto: mpi under mpirun, else loop (ranks are threads); gradients on GPUs: nccl"},
    {"algorithm", OPTION_CHOICE, offsetof(CommConfig, algorithm), "auto", .choices = comm_algorithms,
     .help = "all-reduce of gradients; native: the library's own (MPI's, on GPUs NCCL's); iallreduce: MPI_Iallreduce"},
    {"leader", OPTION_BOOL, offsetof(CommConfig, leader), "no",
     .help = "hierarchical: one rank per node talks to other nodes, instead of each for its share"},
    {"overlap", OPTION_BOOL, offsetof(CommConfig, overlap), "yes",
     .help = "reduce gradients during backward; no: after it"},
    {"bucket_bytes", OPTION_INT, offsetof(CommConfig, bucket_bytes), "25M", 4, 1e15,
     .help = "gradients reduced at a time: whole layers, or slices of a larger one"},
    {"ranks_per_node", OPTION_STRING, offsetof(CommConfig, ranks_per_node), "0",
     .help = "0: as found; 4: so many ranks in a row count as one node; 3,2: unequal nodes"},
    {"group", OPTION_CHOICE, offsetof(CommConfig, group), "node", .choices = comm_groups,
     .help = "numa: each NUMA domain that ranks are bound to counts as a node; pcie: GPUs below one PCIe switch do"},
    {"calibrate", OPTION_BOOL, offsetof(CommConfig, calibrate), "yes",
     .help = "measure the links at the start (half a second, with MPI's own all-reduces two), to predict each bucket"},
    {"verify_every", OPTION_INT, offsetof(CommConfig, verify_every), "0", 0, 1e9,
     .help = "steps between comparisons of the ranks' parameters; 0: never"},
    {"timeout_s", OPTION_INT, offsetof(CommConfig, timeout_s), "300", 1, 1e6,
     .help = "a rank gives up when nothing arrives from another for so long: more than a step or saving takes"},
    {"compress", OPTION_CHOICE, offsetof(CommConfig, compress), "none", .choices = comm_compressors,
     .help = "what gradients travel as, instead of f32; int8_tensor: one scale per tensor, a baseline to compare with"},
    {"compress_scope", OPTION_CHOICE, offsetof(CommConfig, compress_scope), "between", .choices = "between|all",
     .help = "between nodes only, or on every hop"},
    {"topk_density", OPTION_FLOAT, offsetof(CommConfig, topk_density), "0.01", 1e-4, 0.5,
     .help = "topk: share of the values that travel"},
    {"topk_values", OPTION_CHOICE, offsetof(CommConfig, topk_values), "f32", .choices = "f32|bf16",
     .help = "topk: what they travel as"},
    {"error_feedback", OPTION_BOOL, offsetof(CommConfig, error_feedback), "yes",
     .help = "add what a quantisation dropped to the next step's gradient"},
    {"requantise", OPTION_CHOICE, offsetof(CommConfig, requantise), "no", .choices = comm_requantisations,
     .help = "ring: quantise sums at each hop of a ring, a baseline to compare with"},
    {"warmup_steps", OPTION_INT, offsetof(CommConfig, warmup_steps), "-1", -1, 1e12,
     .help = "steps before compression begins; -1: as many as the learning rate warms up (optim.warmup)"},
    {"split_embedding", OPTION_BOOL, offsetof(CommConfig, split_embedding), "yes",
     .help = "send the head's gradient of the tied embedding first and the lookup's rows last"},
};
const int comm_option_count = sizeof comm_options / sizeof *comm_options;

const Option loop_options[] = {
    {"ranks", OPTION_INT, offsetof(LoopConfig, ranks), "1", 1, 256,
     .help = "ranks as threads of this process, when mpirun did not start it"},
    {"latency_inside_us", OPTION_FLOAT, offsetof(LoopConfig, latency_inside_us), "0", 0, 1e7,
     .help = "every message inside a node arrives so much later"},
    {"latency_between_us", OPTION_FLOAT, offsetof(LoopConfig, latency_between_us), "0", 0, 1e7,
     .help = "the same between nodes"},
    {"gb_per_s_inside", OPTION_FLOAT, offsetof(LoopConfig, gb_per_s_inside), "0", 0, 1e6,
     .help = "of a rank's link in its node; 0: no limit"},
    {"gb_per_s_between", OPTION_FLOAT, offsetof(LoopConfig, gb_per_s_between), "0", 0, 1e6,
     .help = "of a node's link to the others; 0: no limit"},
    {"faults", OPTION_STRING, offsetof(LoopConfig, faults), "",
     .help = "injected faults, for tests: comm/transport/transport_loop.h"},
};
const int loop_option_count = sizeof loop_options / sizeof *loop_options;

/* ---- life ---- */

void comm_count_nodes(Comm *comm) {
    const Transport *transport = comm->transport;
    int own = transport->node[transport->rank];
    comm->nodes = comm->node = comm->local_rank = comm->local_ranks = 0;
    for (int rank = 0; rank < transport->ranks; rank++) {
        bool first_of_node = true;
        for (int before = 0; before < rank; before++)
            first_of_node &= transport->node[before] != transport->node[rank];
        comm->nodes += first_of_node;
        if (transport->node[rank] == own && first_of_node)
            comm->node = comm->nodes - 1;
        if (transport->node[rank] == own) {
            comm->local_ranks++;
            comm->local_rank += rank < transport->rank;
        }
    }
}

/* Also where nodes stay whole: a rank with another configuration is found out by the next message, not waited for. */
static Status find_domains(Comm *comm) {
    int mine = machine_numa_domain(), *domains = calloc((size_t)comm_ranks(comm), sizeof *domains);
    if (!domains)
        return fault("no memory for the domains of %d ranks", comm_ranks(comm));
    Status status = comm_gather(comm, &mine, domains, sizeof mine);
    if (status == OK && comm->nodes_are == COMM_NODES_NUMA)
        nodes_split(comm->transport, domains);
    free(domains);
    return status;
}

Status comm_set_nodes(Comm *comm, const CommConfig *config) {
    comm->nodes_are = (CommNodes)config->group;
    TRY(nodes_check(config->ranks_per_node, comm_ranks(comm)));
    nodes_place(comm->transport, config->ranks_per_node);
    comm_count_nodes(comm);
    TRY(find_domains(comm));
    comm_count_nodes(comm);
    return OK;
}

/* ---- memory ---- */

typedef struct ShareJob {
    Transport *transport;
    size_t bytes;
    void *memory;
} ShareJob;

static Status share_job(void *argument) {
    ShareJob *job = argument;
    job->memory = transport_share(job->transport, job->bytes);
    return OK;
}

static void *share(void *context, size_t bytes) {
    Comm *comm = context;
    ShareJob job = {.transport = comm->transport, .bytes = bytes};
    return engine_call(comm->engine, share_job, &job) == OK ? job.memory : NULL;
}

static void unshare(void *context, void *memory) { transport_unshare(((Comm *)context)->transport, memory); }

const Allocator *comm_memory(Comm *comm) { return &comm->memory; }

/* ---- life ---- */

Status comm_create(Comm **result, Transport *transport) {
    Comm *comm = calloc(1, sizeof *comm);
    *result = comm;
    if (!comm)
        return fault("no memory for the ranks' group");
    int ranks = transport->ranks, *members = calloc((size_t)ranks, sizeof(int));
    comm->transport = transport;
    comm->world = (Group){transport, members, ranks, transport->rank};
    comm->scratch_memory = &host_memory;
    comm->gathered = calloc((size_t)ranks * COMM_REDUCE_COUNT, sizeof(double));
    if (!members || !comm->gathered)
        return fault("no memory for the ranks' group");
    for (int rank = 0; rank < ranks; rank++)
        members[rank] = rank;
    comm_count_nodes(comm);
    comm->host = comm->node;
    comm->host_rank = comm->local_rank;
    comm->host_ranks = comm->local_ranks;
    comm->memory = host_memory;
    if (ranks == 1)
        return OK;
    comm->memory = (Allocator){share, unshare, comm};
    return engine_create(&comm->engine);
}

void comm_destroy(Comm *comm) {
    if (!comm)
        return;
    engine_destroy(comm->engine);
    free((int *)comm->world.members);
    free(comm->gathered);
    free(comm);
}

int comm_rank(const Comm *comm) { return comm->transport->rank; }
int comm_ranks(const Comm *comm) { return comm->transport->ranks; }
int comm_local_rank(const Comm *comm) { return comm->local_rank; }
int comm_local_ranks(const Comm *comm) { return comm->local_ranks; }
int comm_nodes(const Comm *comm) { return comm->nodes; }
int comm_node(const Comm *comm) { return comm->node; }
bool comm_same_node(const Comm *comm, int a, int b) { return comm->transport->node[a] == comm->transport->node[b]; }
CommNodes comm_nodes_are(const Comm *comm) { return comm->nodes_are; }
int comm_host(const Comm *comm) { return comm->host; }
int comm_host_rank(const Comm *comm) { return comm->host_rank; }
int comm_host_ranks(const Comm *comm) { return comm->host_ranks; }
const char *comm_transport_name(const Comm *comm) { return comm->world.transport->ops->name; }

/* ---- small things ---- */

/* A message to or from the others, as a job of the comm thread. */
typedef struct SmallJob {
    Transport *transport;
    const void *mine;
    void *data;
    size_t bytes;
    int root;
} SmallJob;

static Status run_small(Comm *comm, EngineJob *job, SmallJob small) {
    small.transport = comm->transport;
    return comm->engine ? engine_call(comm->engine, job, &small) : job(&small);
}

static Status gather_job(void *argument) {
    const SmallJob *job = argument;
    return transport_all_gather(job->transport, job->mine, job->data, job->bytes);
}

Status comm_gather(Comm *comm, const void *mine, void *all, size_t bytes) {
    return run_small(comm, gather_job, (SmallJob){.mine = mine, .data = all, .bytes = bytes});
}

static Status reduce_some(Comm *comm, double *values, int count, CommOp op) {
    TRY(comm_gather(comm, values, comm->gathered, (size_t)count * sizeof(double)));
    memcpy(values, comm->gathered, (size_t)count * sizeof(double));
    for (int rank = 1; rank < comm_ranks(comm); rank++)
        for (int i = 0; i < count; i++) {
            double other = comm->gathered[rank * count + i];
            if (op == COMM_SUM)
                values[i] += other;
            else if (!(other <= values[i]) && !isnan(values[i])) /* a NaN stays */
                values[i] = other;
        }
    return OK;
}

Status comm_reduce(Comm *comm, double *values, int count, CommOp op) {
    for (int start = 0; start < count; start += COMM_REDUCE_COUNT) {
        int rest = count - start;
        TRY(reduce_some(comm, values + start, rest < COMM_REDUCE_COUNT ? rest : COMM_REDUCE_COUNT, op));
    }
    return OK;
}

/* Binomial tree: the rank that is `place` behind the root receives from the one with its lowest set bit cleared, then
 * serves those below it, the largest subtree first. */
static Status broadcast_job(void *argument) {
    const SmallJob *job = argument;
    Transport *transport = job->transport;
    int ranks = transport->ranks, place = (transport->rank - job->root + ranks) % ranks, bit = 1;
    while (bit < ranks && !(place & bit))
        bit *= 2;
    transport_group_begin(transport);
    if (place > 0)
        transport_recv(transport, (place - bit + job->root) % ranks, job->data, job->bytes);
    TRY(transport_group_end(transport));
    transport_group_begin(transport);
    for (bit /= 2; bit > 0; bit /= 2)
        if (place + bit < ranks)
            transport_send(transport, (place + bit + job->root) % ranks, job->data, job->bytes);
    return transport_group_end(transport);
}

Status comm_broadcast(Comm *comm, void *data, size_t bytes, int root) {
    return run_small(comm, broadcast_job, (SmallJob){.data = data, .bytes = bytes, .root = root});
}

static Status barrier_job(void *argument) { return transport_barrier(((const SmallJob *)argument)->transport); }

Status comm_barrier(Comm *comm) { return run_small(comm, barrier_job, (SmallJob){0}); }

/* ---- one outcome for all ---- */

Status comm_agree(Comm *comm, Status status) {
    char line[LINE_BYTES];
    snprintf(line, sizeof line, "%s", error_line());
    double mine = status;
    TRY(comm_gather(comm, &mine, comm->gathered, sizeof mine));
    int first = 0, failed = 0;
    while (first < comm_ranks(comm) && comm->gathered[first] == OK)
        first++;
    for (int rank = 0; rank < comm_ranks(comm); rank++)
        failed += comm->gathered[rank] != OK;
    if (first == comm_ranks(comm))
        return OK;
    Status agreed = (Status)comm->gathered[first];
    TRY(comm_broadcast(comm, line, sizeof line, first));
    comm->outcome_shared = true;
    if (comm_ranks(comm) == 1 || (agreed == BAD_INPUT && failed == comm_ranks(comm)))
        return error_restore(agreed, line); /* what all ranks were given is wrong */
    char named[LINE_BYTES + 32];
    snprintf(named, sizeof named, "rank %d: %s", first, line);
    return error_restore(agreed, named);
}

bool comm_outcome_shared(const Comm *comm) { return comm->outcome_shared; }

/* Each lane is a chain of bijections, and so is their combination. */
uint64_t comm_hash(const void *data, size_t bytes) {
    enum { LANES = 4, WORD = 8 };
    const uint64_t odd = 0x9e3779b97f4a7c15u;
    uint64_t lane[LANES] = {1, 2, 3, 4}, hash = bytes, word;
    const char *at = data, *end = at + bytes;
    for (; end - at >= LANES * WORD; at += LANES * WORD)
        for (int i = 0; i < LANES; i++) {
            memcpy(&word, at + i * WORD, WORD);
            lane[i] = (lane[i] ^ word) * odd;
            lane[i] ^= lane[i] >> 32;
        }
    for (; at < end; at++)
        lane[0] = (lane[0] ^ (unsigned char)*at) * odd;
    for (int i = 0; i < LANES; i++) {
        hash = (hash ^ lane[i]) * odd;
        hash ^= hash >> 32;
    }
    return hash;
}

/* The index of the most frequent value, the first one of several. */
static int most_frequent(const uint64_t *values, int count) {
    int best = 0, best_count = 0;
    for (int i = 0; i < count; i++) {
        int same = 0;
        for (int j = 0; j < count; j++)
            same += values[j] == values[i];
        if (same > best_count) {
            best = i;
            best_count = same;
        }
    }
    return best;
}

/* "1, 3, 7", cut short where the room ends. */
static void list_differing(const uint64_t *values, int count, uint64_t right, char *text, size_t size) {
    size_t used = 0;
    for (int i = 0; i < count; i++)
        if (values[i] != right && used < size)
            used += (size_t)snprintf(text + used, size - used, "%s%d", used ? ", " : "", i);
}

Status comm_verify(Comm *comm, const void *data, size_t bytes, const char *what) {
    int ranks = comm_ranks(comm);
    uint64_t mine = comm_hash(data, bytes), *hashes = (uint64_t *)(void *)comm->gathered;
    static_assert(sizeof(uint64_t) == sizeof *comm->gathered, "hashes take the place of values");
    TRY(comm_gather(comm, &mine, hashes, sizeof mine));
    int reference = most_frequent(hashes, ranks);
    char differing[256] = "";
    list_differing(hashes, ranks, hashes[reference], differing, sizeof differing);
    if (!differing[0])
        return OK;
    comm->outcome_shared = true;
    return fault("%s: rank %s holds other bits than rank %d", what, differing, reference);
}
