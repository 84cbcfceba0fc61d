#include "comm/plan.h"

#include "comm/collective/topology.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* auto: up to these sizes latency decides and tree is used; measured, docs/comm.md */
enum { SMALL_INSIDE_BYTES = 4 << 10, SMALL_BETWEEN_BYTES = 64 << 10 };

const Compressor *plan_compressor(const CommConfig *config) {
    const char *name = option_choice(comm_compressors, config->compress);
    return strcmp(name, "none") == 0 ? NULL : compressor_find(name);
}

static bool requantises(const CommConfig *config) {
    return plan_compressor(config) && strcmp(option_choice(comm_requantisations, config->requantise), "ring") == 0;
}

bool plan_compresses(const Comm *comm, const CommConfig *config) {
    bool inside = config->compress_scope == 1 || requantises(config);
    return plan_compressor(config) && comm_ranks(comm) > 1 && (inside || comm->nodes > 1);
}

typedef struct Algorithm {
    char name[32];
} Algorithm;

static Algorithm algorithm_of(const CommConfig *config) {
    Algorithm algorithm;
    snprintf(algorithm.name, sizeof algorithm.name, "%s", option_choice(comm_algorithms, config->algorithm));
    return algorithm;
}

static bool by_pipeline(const char *name) {
    return strcmp(name, "auto") == 0 || strcmp(name, "reduce_scatter") == 0 || strcmp(name, "hierarchical") == 0;
}

Status plan_check(const Comm *comm, const CommConfig *config, bool sharded) {
    const Algorithm algorithm = algorithm_of(config);
    const char *name = algorithm.name;
    bool ring = strcmp(name, "ring") == 0;
    if (config->requantise != 0 && !plan_compressor(config))
        return bad_input("comm.requantise = ring: needs comm.compress, found none: there is nothing to quantise");
    if (requantises(config) && !ring)
        return bad_input("comm.requantise = ring: needs comm.algorithm = ring, found %s", name);
    if (plan_compressor(config) && !by_pipeline(name) && !requantises(config))
        return bad_input("comm.compress = %s: needs comm.algorithm = reduce_scatter or hierarchical, found %s%s",
                         plan_compressor(config)->name, name,
                         ring ? ", whose error grows with the ranks (to see it: comm.requantise = ring)"
                              : ", which would quantise sums again and again");
    if (sharded && (!by_pipeline(name) || config->leader))
        return bad_input("optim.zero = 1: needs comm.algorithm = reduce_scatter or hierarchical, found %s%s", name,
                         config->leader ? " with comm.leader" : "");
    if (sharded && config->bucket_bytes < CHUNK_ALIGN_ELEMS * (int64_t)sizeof(float))
        return bad_input("optim.zero = 1: expected comm.bucket_bytes of at least %d, found %lld",
                         CHUNK_ALIGN_ELEMS * (int)sizeof(float), (long long)config->bucket_bytes);
    const Collective *collective = collective_find(name); /* of auto there is none */
    return comm_ranks(comm) > 1 && collective && collective->check ? collective->check(&comm->world) : OK;
}

/* What needs the halves of an all-reduce, or its quantisations counted, goes through a pipeline. */
static const Collective *choose(const Comm *comm, const CommConfig *config, bool pipeline, int64_t elems) {
    const Algorithm algorithm = algorithm_of(config);
    const char *name = algorithm.name;
    int nodes = comm->nodes, ranks = comm_ranks(comm);
    bool small = elems * (int64_t)sizeof(float) <= (nodes == 1 ? SMALL_INSIDE_BYTES : SMALL_BETWEEN_BYTES);
    if (strcmp(name, "auto") == 0)
        name = comm_on_gpu(comm) && !pipeline ? "native"
               : nodes > 1 && nodes < ranks ? "hierarchical"
               : pipeline                 ? "reduce_scatter"
               : small                    ? "tree"
               : nodes == 1               ? "reduce_scatter"
                                          : "ring";
    if (config->leader && strcmp(name, "hierarchical") == 0)
        name = "leader";
    if (pipeline && requantises(config))
        name = "ring_requantise";
    return collective_find(name);
}

static void add_collective(Plan *plan, const Comm *comm, const Collective *collective, int64_t elems,
                           const Codec *codec) {
    assert(collective); /* every choice but auto names one */
    int64_t scratch = collective->scratch_elems(&comm->world, elems, collective->compresses ? codec : NULL);
    plan->scratch_elems = scratch > plan->scratch_elems ? scratch : plan->scratch_elems;
}

static void describe(Plan *plan, const Comm *comm, const CommConfig *config, const SyncSetup *setup,
                     const Collective *largest, int64_t least, int64_t most) {
    const double mib = sizeof(float) / 1048576.0;
    const Compressor *compressor = plan_compressor(config);
    char wire[128] = "f32", dense[48] = "";
    if (config->warmup_steps > 0)
        snprintf(dense, sizeof dense, " from step %lld on", (long long)config->warmup_steps + 1);
    if (compressor && !plan_compresses(comm, config))
        snprintf(wire, sizeof wire, "f32 (%s is for between nodes, and there is one: nothing is compressed)",
                 compressor->name);
    else if (compressor)
        snprintf(wire, sizeof wire, "%s %s%s%s", compressor->name,
                 requantises(config)           ? "at each hop"
                 : config->compress_scope == 0 ? "between nodes"
                                               : "everywhere",
                 config->error_feedback && !requantises(config) ? " with error feedback" : "", dense);
    snprintf(plan->text, sizeof plan->text, "%s, %s, %d bucket%s of %.3g to %.3g MiB, %s%s%s", largest->name, wire,
             plan->count, plan->count > 1 ? "s" : "", mib * (double)least, mib * (double)most,
             config->overlap ? "during backward" : "after backward", setup->sharded ? ", ZeRO-1" : "",
             setup->vocab ? ", embedding in two" : "");
}

/* Measured in docs/results.md: top-k 10 % from the first step on ends 9 to 22 % above f32, after the learning rate's
 * warm-up 2 %. */
static void warn(Plan *plan, const Comm *comm, const CommConfig *config) {
    if (plan_compresses(comm, config) && plan_compressor(config) == &compressor_topk && config->warmup_steps <= 0)
        snprintf(plan->warning, sizeof plan->warning, "comm.compress = topk from the first step on costs loss: the "
                 "steep first gradients arrive late; set optim.warmup, and leave comm.warmup_steps = -1");
}

static void hash_plan(Plan *plan, const Comm *comm, const CommConfig *config, const SyncSetup *setup) {
    int64_t summary[] = {setup->table->elems, plan->count,     config->bucket_bytes, config->algorithm, config->leader,
                         comm->nodes,         config->compress, config->compress_scope, config->requantise,
                         config->error_feedback, config->warmup_steps, (int64_t)(1e9 * config->topk_density),
                         config->topk_values, setup->sharded,  setup->vocab};
    plan->hash = comm_hash(summary, sizeof summary);
    for (int rank = 0; rank < comm_ranks(comm); rank++)
        plan->hash = plan->hash * 31 + (uint64_t)node_index(&comm->world, rank);
    for (int b = 0; b < plan->count; b++)
        plan->hash = plan->hash * 31 + (uint64_t)plan->buckets[b].offset;
}

static void choose_all(Plan *plan, const Comm *comm, const CommConfig *config, const SyncSetup *setup,
                       const Codec *codec) {
    int64_t least = INT64_MAX, most = 0;
    bool pipeline = codec || setup->sharded;
    for (int b = 0; b < plan->count; b++) {
        int64_t elems = plan->buckets[b].elems;
        plan->collectives[b] = choose(comm, config, pipeline, elems);
        add_collective(plan, comm, plan->collectives[b], elems, codec);
        least = elems < least ? elems : least;
        most = elems > most ? elems : most;
    }
    if (setup->vocab) {
        plan->lookup = choose(comm, config, false, (int64_t)setup->vocab / 2 * setup->channels);
        add_collective(plan, comm, plan->lookup, (int64_t)setup->vocab / 2 * setup->channels, NULL);
    }
    describe(plan, comm, config, setup, choose(comm, config, pipeline, most), least, most);
    warn(plan, comm, config);
}

Status plan_create(Plan *plan, const Comm *comm, const CommConfig *config, const SyncSetup *setup, const Codec *codec) {
    TRY(plan_check(comm, config, setup->sharded));
    plan->buckets = bucket_cut(setup->table, config->bucket_bytes, &plan->count);
    plan->collectives = calloc((size_t)plan->count + 1, sizeof *plan->collectives);
    if (!plan->buckets || !plan->collectives)
        return fault("no memory on the host for %d buckets", plan->count);
    while (setup->vocab && plan->head_buckets < plan->count && plan->buckets[plan->head_buckets].last_gradient == 0)
        plan->head_buckets++;
    hash_plan(plan, comm, config, setup);
    if (comm_ranks(comm) > 1)
        choose_all(plan, comm, config, setup, codec);
    else
        snprintf(plan->text, sizeof plan->text, "none: one rank");
    return OK;
}

void plan_destroy(Plan *plan) {
    free(plan->buckets);
    free(plan->collectives);
    *plan = (Plan){0};
}
