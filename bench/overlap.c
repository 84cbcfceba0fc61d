/* build/overlap [FILE.cfg] [section.key=value ...]: how much of the communication hides behind backward, against the
 * best that any schedule with that order of buckets and that link could hide.
 *
 *   ready     of a bucket: when its last gradient was final on the last rank, ms since backward began
 *   link      what the bucket needs on the slowest link, alone: its bytes there / the link's rate + latencies. Where
 *             the rate is not known (loop.gb_per_s_between = 0, or mpi): the time that was measured without overlap
 *   bound     finish = max(finish, ready) + link, bucket after bucket; what is left of it after backward (comm/bound.h)
 *   exposed   how long sync_wait waited, on the rank that waited longest
 *
 * Backward is replayed (model/ops_replay.h) or, with --real, computed: then its slow-down by the communication beside it
 * is shown, backward with overlap over backward without. Steps with and without overlap take turns on the
 * same memory; medians over steps are shown. With --comm_share S the rate between nodes is set so that all buckets
 * together need S of backward there. The embedding keeps one gradient, whatever comm.split_embedding says. */
#include "base/clock.h"
#include "base/random.h"
#include "base/report.h"
#include "comm/bound.h"
#include "comm/collective/topology.h"
#include "comm/internal.h"
#include "model/ops_replay.h"
#include "run/settings.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { ARGS_MAX = 64, STEPS_MAX = 100, MODES = 2 };

static const char *const mode_names[MODES] = {"overlap", "blocking"};

typedef struct OverlapOptions {
    int64_t steps;
    double comm_share;
    ReplayConfig replay;
    bool real, json, help;
} OverlapOptions;

/* What all ranks share; nobody writes it while they run. */
typedef struct Bench {
    OverlapOptions options;
    Settings settings;
    Gpt2Config model;
    const char *algorithm;
} Bench;

/* Of one bucket in one mode, by step; the latest rank's. */
typedef struct BucketTimes {
    double ready_ms[STEPS_MAX], start_ms[STEPS_MAX], done_ms[STEPS_MAX];
} BucketTimes;

typedef struct ModeTimes {
    double backward_ms[STEPS_MAX], comm_ms[STEPS_MAX], exposed_ms[STEPS_MAX];
    BucketTimes *buckets; /* owned */
} ModeTimes;

typedef struct Runner {
    const Bench *bench;
    Comm *comm;
    ParamTable table;
    float *grads, *params; /* params NULL when replaying */
    int *tokens;
    Replay *replay;
    Gpt2 *model;
    Sync *syncs[MODES];
    double *values; /* f64[3 + 3 * buckets], for comm_reduce */
    double bytes_inter; /* sent by all ranks in a step */
    ModeTimes times[MODES];
} Runner;

/* ---- setting up ---- */

static Status create_model(Runner *r) {
    const Bench *bench = r->bench;
    int rank = comm_rank(r->comm);
    Gpt2Options options = {.max_B = (int)bench->settings.train.batch, .max_T = (int)bench->settings.train.seq_len,
                           .train = true};
    const Ops *ops = &ops_cpu;
    const Allocator *memory = &host_memory;
    if (!bench->options.real) {
        TRY(replay_create(&r->replay, &bench->options.replay, &bench->model, &options, rank, 1));
        ops = replay_ops(r->replay);
        memory = &replay_memory;
    } else {
        r->params = memory_alloc(&host_memory, (size_t)r->table.elems * sizeof(float));
        if (!r->params)
            return fault("no memory for parameters");
        gpt2_init_random(&bench->model, &r->table, 1, r->params);
    }
    return gpt2_create(&r->model, &bench->model, &r->table, r->params ? r->params : r->grads, r->grads, &options, ops,
                       memory);
}

static Status allocate(Runner *r) {
    const Bench *bench = r->bench;
    size_t rows = (size_t)(bench->settings.train.batch * bench->settings.train.seq_len);
    gpt2_param_table(&bench->model, false, &r->table);
    r->grads = memory_alloc(comm_memory(r->comm), (size_t)r->table.elems * sizeof(float));
    r->tokens = calloc(rows, sizeof *r->tokens);
    if (!r->grads || !r->tokens)
        return fault("no memory for %lld gradients", (long long)r->table.elems);
    for (size_t i = 0; i < rows; i++)
        r->tokens[i] = (int)(random_bits(1, (uint64_t)comm_rank(r->comm), i) % (uint64_t)bench->model.vocab);
    int threads = omp_get_num_procs() / comm_local_ranks(r->comm);
    omp_set_num_threads(threads > 1 ? threads : 1);
    return create_model(r);
}

static Status create_syncs(Runner *r) {
    for (int mode = 0; mode < MODES; mode++) {
        CommConfig config = r->bench->settings.comm;
        config.overlap = mode == 0;
        SyncSetup setup = {.table = &r->table, .grads = r->grads};
        TRY(sync_create(&r->syncs[mode], r->comm, &config, &setup));
    }
    size_t buckets = (size_t)sync_bucket_count(r->syncs[0]);
    bool complete = (r->values = calloc(3 + 3 * buckets, sizeof *r->values)) != NULL;
    for (int mode = 0; mode < MODES; mode++)
        complete &= (r->times[mode].buckets = calloc(buckets + 1, sizeof(BucketTimes))) != NULL;
    return comm_agree(r->comm, complete ? OK : fault("no memory for the times of %zu buckets", buckets));
}

static void release(Runner *r) {
    for (int mode = 0; mode < MODES; mode++) {
        sync_destroy(r->syncs[mode]);
        free(r->times[mode].buckets);
    }
    gpt2_destroy(r->model);
    replay_destroy(r->replay);
    free(r->values);
    free(r->tokens);
    memory_free(&host_memory, r->params);
    memory_free(comm_memory(r->comm), r->grads);
    param_table_free(&r->table);
}

/* ---- measuring ---- */

/* Fills values with this rank's times: backward, communication, exposed; then ready, start, done of each bucket. */
static Status run_step(Runner *r, int mode) {
    const TrainSettings *shape = &r->bench->settings.train;
    Sync *sync = r->syncs[mode];
    TRY(comm_barrier(r->comm));
    gpt2_forward(r->model, r->tokens, (int)shape->batch, (int)shape->seq_len);
    double start_s = clock_s();
    sync_begin(sync);
    gpt2_backward(r->model, r->tokens, 1, false, sync_mark_ready, sync);
    double end_s = clock_s();
    TRY(sync_wait(sync));
    SyncStats stats = sync_stats(sync);
    double *value = r->values;
    *value++ = 1e3 * (end_s - start_s);
    *value++ = stats.comm_ms;
    *value++ = 1e3 * (clock_s() - end_s);
    for (int b = 0; b < sync_bucket_count(sync); b++) {
        BucketStats bucket = sync_bucket(sync, b);
        *value++ = bucket.ready_ms;
        *value++ = bucket.start_ms;
        *value++ = bucket.done_ms;
    }
    r->bytes_inter = (double)stats.bytes_inter;
    return OK;
}

static Status measure_step(Runner *r, int mode, int step) {
    TRY(run_step(r, mode));
    int buckets = sync_bucket_count(r->syncs[mode]);
    TRY(comm_reduce(r->comm, r->values, 3 + 3 * buckets, COMM_MAX));
    ModeTimes *times = &r->times[mode];
    const double *value = r->values;
    times->backward_ms[step] = *value++;
    times->comm_ms[step] = *value++;
    times->exposed_ms[step] = *value++;
    for (int b = 0; b < buckets; b++) {
        times->buckets[b].ready_ms[step] = *value++;
        times->buckets[b].start_ms[step] = *value++;
        times->buckets[b].done_ms[step] = *value++;
    }
    return comm_reduce(r->comm, &r->bytes_inter, 1, COMM_SUM);
}

static Status measure(Runner *r) {
    for (int mode = 0; mode < MODES; mode++)
        TRY(run_step(r, mode)); /* touches all memory, writes the gradients */
    for (int step = 0; step < r->bench->options.steps; step++)
        for (int mode = 0; mode < MODES; mode++)
            TRY(measure_step(r, mode, step));
    return OK;
}

/* ---- reporting, rank 0 ---- */

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const Runner *r, const double *values) {
    double sorted[STEPS_MAX];
    size_t count = (size_t)r->bench->options.steps;
    memcpy(sorted, values, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_doubles);
    return count % 2 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
}

static bool rate_known(const Runner *r) {
    Topology topology = topology_of(&r->comm->world);
    bool equal = topology.nodes > 1 && topology.smallest == topology.largest;
    return equal && r->bench->settings.loop.gb_per_s_between > 0 &&
           strcmp(comm_transport_name(r->comm), "loop") == 0 &&
           bound_link_load(r->bench->algorithm, comm_ranks(r->comm), comm_nodes(r->comm)).bytes > 0;
}

/* What the bucket needs of the slowest link. */
static double link_ms(const Runner *r, int b) {
    if (!rate_known(r)) {
        const BucketTimes *bucket = &r->times[1].buckets[b];
        return median(r, bucket->done_ms) - median(r, bucket->start_ms);
    }
    const LoopConfig *loop = &r->bench->settings.loop;
    LinkLoad load = bound_link_load(r->bench->algorithm, comm_ranks(r->comm), comm_nodes(r->comm));
    double bytes = load.bytes * (double)sync_bucket(r->syncs[0], b).elems * sizeof(float);
    return 1e-6 * bytes / loop->gb_per_s_between + 1e-3 * load.hops * loop->latency_between_us;
}

/* Fills buckets; returns the bound on what is exposed. Without overlap every bucket is ready at the end of backward. */
static double bound(const Runner *r, int mode, BoundBucket *buckets) {
    int count = sync_bucket_count(r->syncs[mode]);
    double backward_ms = median(r, r->times[mode].backward_ms);
    for (int b = 0; b < count; b++)
        buckets[b] = (BoundBucket){.ready_ms = mode ? backward_ms : median(r, r->times[mode].buckets[b].ready_ms),
                                   .duration_ms = link_ms(r, b)};
    return bound_exposed_ms(buckets, count, backward_ms);
}

static void report_buckets(const Runner *r, const BoundBucket *bounds) {
    static const ReportColumn columns[] = {{"bucket", "bucket", "%.0f"},
                                           {"bytes", "bytes", "%.0f"},
                                           {"ready_ms", "ready (ms)", "%.1f"},
                                           {"start_ms", "start", "%.1f"},
                                           {"done_ms", "done", "%.1f"},
                                           {"bound_done_ms", "bound", "%.1f"},
                                           {"link_ms", "link (ms)", "%.1f"},
                                           {"predicted_ms", "predicted", "%.1f"}};
    Report report = {.out = stdout, .json = r->bench->options.json, .columns = columns, .count = 8};
    for (int b = 0; b < sync_bucket_count(r->syncs[0]); b++) {
        const BucketTimes *times = &r->times[0].buckets[b];
        BucketStats bucket = sync_bucket(r->syncs[0], b);
        const ReportValue row[] = {{.number = b},
                                   {.number = (double)bucket.elems * sizeof(float)},
                                   {.number = median(r, times->ready_ms)},
                                   {.number = median(r, times->start_ms)},
                                   {.number = median(r, times->done_ms)},
                                   {.number = bounds[b].finish_ms},
                                   {.number = bounds[b].duration_ms},
                                   {.number = bucket.predicted_ms}};
        report_row(&report, row);
    }
}

/* bounds: of the blocking mode on entry. */
static void report_modes(const Runner *r, BoundBucket *bounds) {
    static const ReportColumn columns[] = {{"mode", "mode", "%-9s"},
                                           {"algorithm", "algorithm", "%-14s"},
                                           {"ranks", "ranks", "%.0f"},
                                           {"nodes", "nodes", "%.0f"},
                                           {"backward_ms", "backward (ms)", "%.1f"},
                                           {"comm_share", "link/backward", "%.3f"},
                                           {"comm_ms", "comm (ms)", "%.1f"},
                                           {"exposed_ms", "exposed (ms)", "%.1f"},
                                           {"bound_ms", "bound (ms)", "%.1f"},
                                           {"exposed_over_backward", "exposed/backward", "%.4f"},
                                           {"excess_over_backward", "(exposed - bound)/backward", "%.4f"},
                                           {"inter_bytes", "bytes between nodes", "%.0f"},
                                           {"backward_slowdown", "backward/blocking's", "%.3f"}};
    Report report = {.out = stdout, .json = r->bench->options.json, .columns = columns,
                     .count = r->bench->options.real ? 13 : 12};
    for (int mode = 0; mode < MODES; mode++) {
        const ModeTimes *times = &r->times[mode];
        double backward_ms = median(r, times->backward_ms), exposed_ms = median(r, times->exposed_ms), link = 0;
        double bound_ms = bound(r, mode, bounds);
        for (int b = 0; b < sync_bucket_count(r->syncs[mode]); b++)
            link += bounds[b].duration_ms;
        const ReportValue row[] = {{.text = mode_names[mode]},
                                   {.text = r->bench->algorithm},
                                   {.number = comm_ranks(r->comm)},
                                   {.number = comm_nodes(r->comm)},
                                   {.number = backward_ms},
                                   {.number = link / backward_ms},
                                   {.number = median(r, times->comm_ms)},
                                   {.number = exposed_ms},
                                   {.number = bound_ms},
                                   {.number = exposed_ms / backward_ms},
                                   {.number = (exposed_ms - bound_ms) / backward_ms},
                                   {.number = r->bytes_inter},
                                   {.number = backward_ms / median(r, r->times[1].backward_ms)}};
        report_row(&report, row);
    }
}

static Status report_all(const Runner *r) {
    BoundBucket *bounds = calloc((size_t)sync_bucket_count(r->syncs[0]), sizeof *bounds);
    if (!bounds)
        return fault("no memory for the bound");
    fprintf(r->bench->options.json ? stderr : stdout,
            "%s on %s; a link's time %s\nThe embedding keeps one gradient%s\n\n",
            sync_plan(r->syncs[0]), comm_transport_name(r->comm),
            rate_known(r) ? "follows from its rate" : "is as measured without overlap",
            r->bench->settings.comm.split_embedding ? ", as with comm.split_embedding=no" : "");
    bound(r, 0, bounds);
    report_buckets(r, bounds);
    if (!r->bench->options.json)
        putchar('\n');
    report_modes(r, bounds);
    free(bounds);
    return OK;
}

static Status overlap(Runner *r) {
    if (comm_ranks(r->comm) == 1)
        return bad_input("one rank alone does not communicate: try loop.ranks=4 comm.ranks_per_node=2");
    TRY(comm_agree(r->comm, allocate(r)));
    TRY(create_syncs(r));
    TRY(measure(r));
    return comm_agree(r->comm, comm_rank(r->comm) == 0 ? report_all(r) : OK);
}

static const char usage[] = "overlap [options] [FILE.cfg] [section.key=value ...]\n"
                            "Exposed communication against the list-schedule bound, with and without overlap.\n"
                            "  overlap --comm_share 0.8 loop.ranks=8 comm.ranks_per_node=4";

#define AT(field) .offset = offsetof(OverlapOptions, field)

static const Option options_table[] = {
    {.key = "help", .type = OPTION_BOOL, AT(help), .initial = "no", .help = "this text"},
    {.key = "steps", .type = OPTION_INT, AT(steps), .initial = "3", .min = 1, .max = STEPS_MAX,
     .help = "measured steps of each mode, after one to warm up; medians are shown"},
    {.key = "comm_share", .type = OPTION_FLOAT, AT(comm_share), .initial = "0", .min = 0, .max = 100,
     .help = "communication between nodes as a share of backward sets the link's rate; 0: loop.gb_per_s_between"},
    {.key = "backward_ms", .type = OPTION_FLOAT, AT(replay.backward_ms), .initial = "2000", .min = 0, .max = 1e7,
     .help = "replayed backward, spread over head and layers by FLOPs"},
    {.key = "forward_ms", .type = OPTION_FLOAT, AT(replay.forward_ms), .initial = "0", .min = 0, .max = 1e7,
     .help = "replayed forward, not measured"},
    {.key = "profile", .type = OPTION_STRING, AT(replay.profile), .initial = "",
     .help = "replay what log.profile recorded instead"},
    {.key = "real", .type = OPTION_BOOL, AT(real), .initial = "no", .help = "compute instead of replaying"},
    {.key = "json", .type = OPTION_BOOL, AT(json), .initial = "no", .help = "one JSON object per row"},
};
enum { OPTIONS = sizeof options_table / sizeof *options_table };

static Status run_rank(Comm *comm, void *user) {
    const Bench *bench = user;
    if (bench->options.help && comm_rank(comm) == 0)
        args_help(usage, options_table, OPTIONS);
    if (bench->options.help)
        return OK;
    Runner runner = {.bench = bench, .comm = comm};
    Status status = overlap(&runner);
    release(&runner);
    return status;
}

/* ---- arguments ---- */

/* Ranks of each node by [comm] ranks_per_node, 0 where they differ. */
static int equal_nodes(const CommConfig *config) {
    char *end;
    long first = strtol(config->ranks_per_node, &end, 10);
    while (*end == ',')
        if (strtol(end + 1, &end, 10) != first)
            return 0;
    return (int)first;
}

/* The rate between nodes at which all buckets need comm_share of backward. */
static Status set_rate(Bench *bench) {
    LoopConfig *loop = &bench->settings.loop;
    int ranks = (int)loop->ranks, per_node = equal_nodes(&bench->settings.comm);
    if (bench->options.real || bench->options.replay.backward_ms <= 0)
        return bad_input("--comm_share: the length of backward must be known: give --backward_ms");
    if (per_node < 1 || ranks % per_node != 0 || ranks / per_node < 2)
        return bad_input("--comm_share: expected loop.ranks = two or more times comm.ranks_per_node, found %d and %s",
                         ranks, bench->settings.comm.ranks_per_node);
    LinkLoad load = bound_link_load(bench->algorithm, ranks, ranks / per_node);
    if (load.bytes <= 0)
        return bad_input("--comm_share: expected comm.algorithm = ring, reduce_scatter or hierarchical, found %s",
                         bench->algorithm);
    ParamTable table = {0};
    gpt2_param_table(&bench->model, false, &table);
    double bytes = load.bytes * (double)table.elems * sizeof(float);
    param_table_free(&table);
    loop->gb_per_s_between = 1e-6 * bytes / (bench->options.comm_share * bench->options.replay.backward_ms);
    return OK;
}

/* What auto means for all but small buckets (comm/plan.c). */
static const char *algorithm_of(const Settings *settings) {
    const char *name = option_choice(comm_algorithms, settings->comm.algorithm);
    if (strcmp(name, "auto") != 0)
        return name;
    return equal_nodes(&settings->comm) == 1 ? "ring" : "hierarchical";
}

static Status read_arguments(Bench *bench, int argc, char **argv) {
    const char *words[ARGS_MAX];
    static char default_file[] = "configs/gpt2.cfg";
    char *arguments[ARGS_MAX + 2] = {"overlap", default_file};
    int count, file = 0;
    TRY(args_parse(usage, options_table, OPTIONS, &bench->options, argc, argv, words, ARGS_MAX, &count));
    if (bench->options.help) /* defaults only */
        return settings_read(&bench->settings, 2, (char *[]){"overlap", "--help", NULL});
    for (int i = 0; i < count; i++)
        file |= strchr(words[i], '=') == NULL;
    for (int i = 0; i < count; i++)
        arguments[1 + !file + i] = (char *)(uintptr_t)words[i];
    TRY(settings_read(&bench->settings, 1 + !file + count, arguments));
    TRY(settings_model(&bench->settings, &bench->model));
    if (bench->options.replay.profile[0])
        bench->options.replay.backward_ms = 0;
    bench->algorithm = algorithm_of(&bench->settings);
    return bench->options.comm_share > 0 ? set_rate(bench) : OK;
}

int main(int argc, char **argv) {
    static Bench bench;
    Status status = comm_start(&argc, &argv);
    if (status == OK)
        status = read_arguments(&bench, argc, argv);
    status = comm_run(&bench.settings.comm, &bench.settings.loop, status, run_rank, &bench);
    settings_free(&bench.settings);
    return comm_finish("overlap", status);
}
