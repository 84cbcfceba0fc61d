/* build/allreduce: the all-reduces side by side, with the flags and columns of nccl-tests.
 *
 *     mpirun -n 4 build/allreduce -b 8 -e 128M -f 2 -n 20 -w 5 -c 1 --algorithm all
 *
 * For every size the algorithms take turns, iteration by iteration, so that all see the same machine; each turn has an
 * order of its own. An iteration: fill, barrier, all-reduce in the calling thread, on memory that the node's ranks
 * share, compare every element. --help explains the columns; the cost model predicts from the links as calibrated
 * before each size, on arrays of that size; with --compress once more, by the codec.
 *
 * native is bare MPI_Allreduce, without the barrier that goes ahead of it in training. link goes in one large message
 * per rank. Between nodes it is part of "all", and is measured once more ahead of everything, at the largest size and
 * without pause: the bound of an all-reduce is what it sends through the busiest node's NIC, as counted, at that rate.
 * The bars at the end only say what was measured; the exit code does not depend on them. */
#define _POSIX_C_SOURCE 200809L
#include "base/clock.h"
#include "base/machine.h"
#include "base/random.h"
#include "base/report.h"
#include "bench/exact.h"
#include "comm/calibrate.h"
#include "comm/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { WORDS_MAX = 16, CONTENDERS_MAX = 16, NAME_BYTES = 32, BINDING_BYTES = 48, CORES_BYTES = 1024 };

#define ALGORITHMS "naive, native, iallreduce, ring, tree, reduce_scatter, hierarchical or leader"

typedef struct BenchOptions {
    bool help;
    int64_t minbytes, maxbytes, stepfactor, iters, warmup_iters, check, loop_ranks;
    char algorithm[OPTION_TEXT], ranks_per_node[OPTION_TEXT];
    int group, compress, compress_scope;
    double density;
    bool leader, json;
} BenchOptions;

/* What is measured. Fields of one size, which begins anew: time_s f64[iters] is owned. */
typedef struct Contender {
    char name[NAME_BYTES];
    const Collective *collective; /* NULL: the link */
    double *time_s, cpu_s, wrong;
    int64_t bytes_inter; /* that this rank sends to other nodes in one iteration */
    double nic_bytes;    /* the same of all ranks of the busiest node */
} Contender;

/* What is judged at the end, where there are several nodes: the lowest value of all sizes. */
enum { BAR_LARGE, BAR_MIB, BAR_NATIVE, BAR_NATIVE_SMALL, BAR_INT8, BARS };
static const struct {
    const char *text;
    double least;
} bars[BARS] = {{"hierarchical and ring, of bound, from 4 MiB", 0.95},
                {"hierarchical and ring, of bound, from 1 MiB to 4 MiB", 0.85},
                {"native's time over that of the fastest of ours, from 1 MiB", 1},
                {"native's time over that of the fastest of ours, below 1 MiB", 0.8},
                {"f32's bound over the time of hierarchical with int8, from 16 MiB", 3.3}};

typedef struct Bench {
    /* set once */
    const BenchOptions *options;
    Comm *comm;
    Contender contenders[CONTENDERS_MAX];
    int count;
    bool skipped; /* all-reduces that do not compress were left out of "all" */
    LinkCosts costs, coded_costs; /* without and with the codec, where there is one */
    const Compressor *compressor; /* NULL: all that travels is f32 */
    Codec *codec;  /* owned, over one large matrix; NULL: nothing is compressed */
    LinkRing ring; /* of the link that is measured: between nodes, on one node between ranks */
    /* memory, owned */
    float *data;    /* f32[elems_max], shared with the node's ranks */
    float *scratch; /* f32[scratch_elems] */
    double *of_node; /* f64[nodes] */
    int64_t elems_max, scratch_elems;
    double link_bytes_per_s; /* of a NIC, both ways at once; NAN: one node, or link takes no part */
    /* of all sizes and ranks so far */
    double wrong, lowest[BARS]; /* INFINITY: nothing to judge */
} Bench;

/* ---- who takes part ---- */

static Status add_contender(Bench *bench, const char *name, bool required) {
    Contender contender = {.collective = NULL};
    bool is_link = strcmp(name, "link") == 0;
    const char *variant = bench->options->leader && strcmp(name, "hierarchical") == 0 ? "leader" : name;
    snprintf(contender.name, sizeof contender.name, "%s", variant);
    if (!is_link && !(contender.collective = collective_find(variant)))
        return bad_input("--algorithm: no all-reduce is called '%s'; expected all, link, " ALGORITHMS, name);
    if (is_link && bench->ring.lanes == 0)
        return bad_input("--algorithm link: needs two ranks");
    if (!is_link && contender.collective->check) {
        Status status = contender.collective->check(&bench->comm->world);
        if (status != OK)
            return required ? status : OK;
    }
    if (!is_link && bench->compressor && !contender.collective->compresses) {
        bench->skipped = true;
        return required ? bad_input("--compress %s: %s always sends f32; expected reduce_scatter, hierarchical or all",
                                    bench->compressor->name, name)
                        : OK;
    }
    for (int i = 0; i < bench->count; i++)
        if (strcmp(bench->contenders[i].name, contender.name) == 0)
            return OK;
    if (bench->count == CONTENDERS_MAX)
        return bad_input("--algorithm: at most %d at a time", CONTENDERS_MAX);
    contender.time_s = calloc((size_t)bench->options->iters, sizeof(double));
    bench->contenders[bench->count++] = contender;
    return contender.time_s ? OK : fault("no memory for the results");
}

/* Names between ',' or '|'. */
static Status add_list(Bench *bench, const char *list, bool required) {
    for (const char *at = list; *at; at += *at != '\0') {
        char name[NAME_BYTES];
        size_t length = strcspn(at, ",|");
        snprintf(name, sizeof name, "%.*s", (int)length, at);
        at += length;
        if (strcmp(name, "all") != 0) {
            TRY(add_contender(bench, name, required));
            continue;
        }
        TRY(add_contender(bench, "native", false));
        TRY(add_list(bench, strchr(comm_algorithms, '|') + 1, false)); /* all but auto */
        TRY(add_contender(bench, "leader", false));
        if (comm_nodes(bench->comm) > 1)
            TRY(add_contender(bench, "link", false));
    }
    return OK;
}

/* ---- one iteration ---- */

/* Of this rank: of its process, or of its thread where ranks are threads. */
static double cpu_s(const Bench *bench) {
    struct timespec used;
    bool threads = strcmp(comm_transport_name(bench->comm), "loop") == 0;
    clock_gettime(threads ? CLOCK_THREAD_CPUTIME_ID : CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}

static Codec *codec_of(const Bench *bench, const Collective *collective) {
    return collective && collective->compresses ? bench->codec : NULL;
}

/* What each lane of the link carries. */
static int64_t lane_elems(const Bench *bench, int64_t elems) {
    return (elems + bench->ring.lanes - 1) / bench->ring.lanes;
}

static Status run_contender(Bench *bench, const Contender *contender, int64_t elems) {
    Transport *transport = bench->comm->transport;
    if (!contender->collective)
        return link_shift(transport, &bench->ring, bench->data, bench->scratch,
                          (size_t)lane_elems(bench, elems) * sizeof(float));
    if (strcmp(contender->name, "native") == 0)
        return transport_allreduce_sum(transport, bench->data, bench->data, elems, true);
    return contender->collective->allreduce(
        &bench->comm->world,
        &(Payload){.data = bench->data, .elems = elems, .scale = 1, .scratch = bench->scratch,
                   .codec = codec_of(bench, contender->collective)});
}

/* Half a step of a value, over the largest of its block: what one quantisation may add to an error. 1: topk, which may
 * leave out anything, and adds nothing. */
static double half_step(const Compressor *compressor) {
    static const struct {
        const char *name;
        double share;
    } steps[] = {{"none", 0}, {"bf16", 1.0 / 256}, {"int8", 0.5 / 127},
                 {"int8_tensor", 0.5 / 127}, {"int4", 0.5 / 7}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (strcmp(steps[i].name, compressor->name) == 0)
            return steps[i].share;
    return 1;
}

/* All data are positive, so a block's largest value, summed over ranks, is at most that of all sums. Of CODEC_HOPS
 * quantisations, each sees what the ones before it left. */
static int64_t count_far(const Bench *bench, int64_t elems) {
    float shares = exact_shares(0, comm_ranks(bench->comm)), ranks = (float)comm_ranks(bench->comm);
    double step = half_step(bench->codec->compressor), largest = ranks * EXACT_PLACE_MAX + shares, error = 0;
    int64_t far = 0;
    for (int hop = 0; hop < CODEC_HOPS; hop++)
        error += (largest + error) * step;
    error += largest / (1 << 20); /* 16 roundings to f32 */
    for (int64_t i = 0; i < elems; i++) {
        double distance = (double)bench->data[i] - (double)(ranks * exact_place(i) + shares);
        far += step == 1 ? !(distance <= 0 && bench->data[i] >= 0) : !(fabs(distance) <= error);
    }
    return far;
}

static int64_t count_wrong(const Bench *bench, const Contender *contender, int64_t elems) {
    const LinkRing *ring = &bench->ring;
    if (codec_of(bench, contender->collective))
        return count_far(bench, elems);
    if (contender->collective)
        return exact_wrong(bench->data, elems, 0, comm_ranks(bench->comm));
    return ring->to < 0 ? 0 : exact_wrong(bench->scratch, lane_elems(bench, elems), ring->from, ring->from + 1);
}

static int64_t scratch_needed(const Bench *bench, const Contender *contender, int64_t elems) {
    const Collective *collective = contender->collective;
    return collective ? collective->scratch_elems(&bench->comm->world, elems, codec_of(bench, collective))
                      : lane_elems(bench, elems);
}

/* The first barrier wakes those that nap, so that all leave the second one at about the same time. */
static Status line_up(Transport *transport) {
    TRY(transport_barrier(transport));
    return transport_barrier(transport);
}

/* time_s NULL: to warm up. Scratch that holds NaN cannot pass for something received. Ranks that are through wait for
 * the others: where they share cores, comparing would slow those down. */
static Status iterate(Bench *bench, Contender *contender, int64_t elems, double *time_s) {
    exact_fill(bench->data, elems, comm_rank(bench->comm));
    if (bench->options->check)
        memset(bench->scratch, 0xFF, (size_t)scratch_needed(bench, contender, elems) * sizeof(float));
    TRY(line_up(bench->comm->transport));
    int64_t sent_before = bench->comm->transport->bytes_inter;
    double cpu_before_s = cpu_s(bench), start_s = clock_s();
    TRY(run_contender(bench, contender, elems));
    double end_s = clock_s(), cpu_after_s = cpu_s(bench);
    contender->bytes_inter = bench->comm->transport->bytes_inter - sent_before;
    if (time_s) {
        *time_s = end_s - start_s;
        contender->cpu_s += cpu_after_s - cpu_before_s;
    }
    TRY(transport_barrier(bench->comm->transport));
    if (bench->options->check)
        contender->wrong += (double)count_wrong(bench, contender, elems);
    if (bench->options->check && codec_of(bench, contender->collective))
        return comm_verify(bench->comm, bench->data, (size_t)elems * sizeof(float), contender->name);
    return OK;
}

/* ---- one size ---- */

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts values. */
static double median(double *values, int64_t count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

/* A new order in each turn, alike on all ranks, so that none always comes behind the same one. */
static void shuffle(int *order, int count, int64_t turn) {
    for (int i = 0; i < count; i++) {
        int j = (int)(random_bits(0, (uint64_t)turn, (uint64_t)i) % (uint64_t)(i + 1));
        order[i] = order[j];
        order[j] = i;
    }
}

static Status measure_size(Bench *bench, int64_t elems) {
    int64_t warmup = bench->options->warmup_iters;
    for (int i = 0; i < bench->count; i++)
        bench->contenders[i].cpu_s = bench->contenders[i].wrong = 0;
    for (int64_t turn = 0; turn < warmup + bench->options->iters; turn++) {
        int order[CONTENDERS_MAX];
        shuffle(order, bench->count, turn);
        for (int i = 0; i < bench->count; i++) {
            Contender *contender = &bench->contenders[order[i]];
            TRY(iterate(bench, contender, elems, turn < warmup ? NULL : &contender->time_s[turn - warmup]));
        }
    }
    return OK;
}

static Status find_nic_bytes(Bench *bench, Contender *contender) {
    const Transport *transport = bench->comm->transport;
    int nodes = comm_nodes(bench->comm);
    memset(bench->of_node, 0, (size_t)nodes * sizeof *bench->of_node);
    bench->of_node[transport->node[transport->rank]] = (double)contender->bytes_inter;
    TRY(comm_reduce(bench->comm, bench->of_node, nodes, COMM_SUM));
    contender->nic_bytes = 0;
    for (int node = 0; node < nodes; node++)
        contender->nic_bytes = fmax(contender->nic_bytes, bench->of_node[node]);
    return OK;
}

/* The slowest rank of each iteration; what all ranks used and found. */
static Status combine(Bench *bench, Contender *contender) {
    double sums[] = {contender->cpu_s, contender->wrong};
    TRY(comm_reduce(bench->comm, contender->time_s, (int)bench->options->iters, COMM_MAX));
    TRY(comm_reduce(bench->comm, sums, 2, COMM_SUM));
    contender->cpu_s = sums[0];
    contender->wrong = sums[1];
    bench->wrong += sums[1];
    return find_nic_bytes(bench, contender);
}

/* What the link sustains, message after message. One alone would look faster: ranks that share cores leave a barrier one
 * after the other, and the first lanes have the NIC to themselves meanwhile. */
static Status measure_link(Bench *bench) {
    int64_t iters = bench->options->iters;
    Transport *transport = bench->comm->transport;
    Contender *link = bench->contenders;
    while (link < bench->contenders + bench->count && link->collective)
        link++;
    if (comm_nodes(bench->comm) == 1 || link == bench->contenders + bench->count)
        return OK;
    for (int64_t turn = 0; turn < bench->options->warmup_iters; turn++)
        TRY(iterate(bench, link, bench->elems_max, NULL));
    TRY(line_up(transport));
    int64_t sent_before = transport->bytes_inter;
    double start_s = clock_s();
    for (int64_t turn = 0; turn < iters; turn++)
        TRY(run_contender(bench, link, bench->elems_max));
    TRY(transport_barrier(transport));
    double time_s = clock_s() - start_s;
    link->bytes_inter = transport->bytes_inter - sent_before;
    TRY(find_nic_bytes(bench, link));
    TRY(comm_reduce(bench->comm, &time_s, 1, COMM_MAX));
    bench->link_bytes_per_s = link->nic_bytes / time_s;
    return OK;
}

static double predict_s(const Bench *bench, const Contender *contender, int64_t elems) {
    LinkClass class = comm_nodes(bench->comm) > 1 ? BETWEEN : INSIDE;
    const LinkCosts *costs = codec_of(bench, contender->collective) ? &bench->coded_costs : &bench->costs;
    if (!contender->collective)
        return bench->costs.latency_s[class] + bench->costs.s_per_byte[class] * (double)elems * sizeof(float);
    return contender->collective->predict_s(&bench->comm->world, elems, costs);
}

/* MPI does not say what it sends. */
static bool is_of_mpi(const Contender *contender) {
    return strcmp(contender->name, "native") == 0 || strcmp(contender->name, "iallreduce") == 0;
}

static double of_bound(const Bench *bench, const Contender *contender, double time_s) {
    return is_of_mpi(contender) ? NAN : contender->nic_bytes / bench->link_bytes_per_s / time_s;
}

static void report_contender(const Bench *bench, Report *report, Contender *contender, int64_t elems) {
    double bytes = (double)elems * sizeof(float), ranks = comm_ranks(bench->comm);
    double time_s = median(contender->time_s, bench->options->iters), gb_per_s = 1e-9 * bytes / time_s;
    const Codec *codec = codec_of(bench, contender->collective);
    ReportValue name = {.text = contender->name}, compress = {.text = codec ? codec->compressor->name : "none"};
    ReportValue ratio = {.number = codec ? bytes / (double)codec_wire_bytes(codec, 0, elems) : 1};
    ReportValue size = {.number = bytes};
    ReportValue N = {.number = ranks}, nodes = {.number = comm_nodes(bench->comm)}, count = {.number = (double)elems};
    ReportValue time_us = {.number = 1e6 * time_s}, algbw = {.number = gb_per_s};
    ReportValue busbw = {.number = contender->collective ? gb_per_s * 2 * (ranks - 1) / ranks : gb_per_s};
    ReportValue wrong = {.number = bench->options->check ? contender->wrong : NAN};
    ReportValue predicted_us = {.number = 1e6 * predict_s(bench, contender, elems)};
    ReportValue cpu = {.number = contender->cpu_s / (1e-9 * bytes * (double)bench->options->iters)};
    ReportValue bound = {.number = of_bound(bench, contender, time_s)};
    const ReportValue json[] = {name,  compress, N,     nodes,        size, time_us,
                                algbw, busbw,    wrong, predicted_us, cpu,  bound};
    const ReportValue text[] = {size,  count, name,  compress,     ratio, time_us,
                                algbw, busbw, wrong, predicted_us, cpu,   bound};
    report_row(report, report->json ? json : text);
}

static void note(Bench *bench, int bar, double value) { bench->lowest[bar] = fmin(bench->lowest[bar], value); }

static void judge_size(Bench *bench, int64_t elems) {
    double bytes = (double)elems * sizeof(float), mib = bytes / (1 << 20), native_s = NAN, best_s = INFINITY;
    for (int i = 0; i < bench->count; i++) {
        Contender *contender = &bench->contenders[i];
        double time_s = median(contender->time_s, bench->options->iters);
        double share = of_bound(bench, contender, time_s);
        bool hierarchical = strcmp(contender->name, "hierarchical") == 0;
        const Codec *codec = codec_of(bench, contender->collective);
        if (strcmp(contender->name, "native") == 0)
            native_s = time_s;
        else if (contender->collective && !is_of_mpi(contender))
            best_s = fmin(best_s, time_s);
        if (mib >= 1 && !codec && (hierarchical || strcmp(contender->name, "ring") == 0))
            note(bench, mib >= 4 ? BAR_LARGE : BAR_MIB, share);
        if (mib >= 16 && hierarchical && codec && strcmp(codec->compressor->name, "int8") == 0)
            note(bench, BAR_INT8, share * bytes / (double)codec_wire_bytes(codec, 0, elems));
    }
    if (!bench->compressor && best_s < INFINITY)
        note(bench, mib >= 1 ? BAR_NATIVE : BAR_NATIVE_SMALL, native_s / best_s);
}

static void print_bars(const Bench *bench) {
    FILE *out = bench->options->json ? stderr : stdout;
    for (int bar = 0; bar < BARS; bar++)
        if (bench->lowest[bar] < INFINITY)
            fprintf(out, "# %s: at least %g | %.2f | %s\n", bars[bar].text, bars[bar].least, bench->lowest[bar],
                    bench->lowest[bar] >= bars[bar].least ? "ok" : "MISSED");
}

/* ---- all sizes ---- */

static Report open_report(bool json) {
    static const ReportColumn json_columns[] = {
        {"algorithm", "", "%s"},       {"compress", "", "%s"},           {"ranks", "", "%.0f"},
        {"nodes", "", "%.0f"},         {"bytes", "", "%.0f"},            {"time_us", "", "%.1f"},
        {"algbw_gb_per_s", "", "%.2f"}, {"busbw_gb_per_s", "", "%.2f"},  {"wrong", "", "%.0f"},
        {"predicted_us", "", "%.1f"},  {"cpu_s_per_gb", "", "%.3f"},
        {"of_bound", "", "%.3f"}};
    static const ReportColumn text_columns[] = {
        {"bytes", "size (B)", "%10.0f"},         {"count", "count", "%9.0f"},
        {"algorithm", "algorithm", "%s"},        {"compress", "compress", "%s"},
        {"ratio", "ratio", "%.2f"},              {"time_us", "time (us)", "%9.1f"},
        {"algbw", "algbw (GB/s)", "%.3f"},       {"busbw", "busbw (GB/s)", "%.3f"},
        {"wrong", "#wrong", "%.0f"},             {"predicted", "predicted (us)", "%.1f"},
        {"cpu", "CPU s/GB", "%.3f"},
        {"of_bound", "of bound", "%.2f"}};
    if (json)
        return (Report){.out = stdout, .json = true, .columns = json_columns, .count = 12};
    return (Report){.out = stdout, .columns = text_columns, .count = 12};
}

static Status measure_sizes(Bench *bench) {
    const BenchOptions *options = bench->options;
    Report report = open_report(options->json);
    for (int64_t bytes = options->minbytes; bytes <= options->maxbytes; bytes *= options->stepfactor) {
        int64_t elems = bytes / (int64_t)sizeof(float);
        TRY(calibrate(bench->comm->transport, NULL, bytes, &bench->costs));
        if (bench->codec)
            TRY(calibrate(bench->comm->transport, bench->codec, bytes, &bench->coded_costs));
        TRY(measure_size(bench, elems));
        for (int i = 0; i < bench->count; i++)
            TRY(combine(bench, &bench->contenders[i]));
        for (int i = 0; i < bench->count && comm_rank(bench->comm) == 0; i++)
            report_contender(bench, &report, &bench->contenders[i], elems);
        if (comm_nodes(bench->comm) > 1)
            judge_size(bench, elems);
    }
    if (comm_rank(bench->comm) == 0)
        print_bars(bench);
    return OK;
}

static Status create_codec(Bench *bench) {
    const BenchOptions *options = bench->options;
    Gradient matrix = {.elems = options->maxbytes / (int64_t)sizeof(float), .layer = -1};
    ParamTable table = {.gradients = &matrix, .gradient_count = 1, .elems = matrix.elems};
    CompressorOptions topk = {.density = options->density};
    return bench->compressor ? codec_create(&bench->codec, &table, bench->compressor, &topk,
                                            options->compress_scope == 1, false)
                             : OK;
}

static Status take_memory(Bench *bench) {
    const BenchOptions *options = bench->options;
    for (int64_t bytes = options->minbytes; bytes <= options->maxbytes; bytes *= options->stepfactor)
        for (int i = 0; i < bench->count; i++) {
            int64_t elems = bytes / (int64_t)sizeof(float);
            int64_t needed = scratch_needed(bench, &bench->contenders[i], elems);
            bench->elems_max = elems;
            bench->scratch_elems = needed > bench->scratch_elems ? needed : bench->scratch_elems;
        }
    bench->data = memory_alloc(comm_memory(bench->comm), (size_t)bench->elems_max * sizeof(float));
    bench->scratch = memory_alloc(&host_memory, (size_t)bench->scratch_elems * sizeof(float) + 1);
    bench->of_node = calloc((size_t)comm_nodes(bench->comm), sizeof(double));
    Status status = bench->data && bench->scratch && bench->of_node ? OK : fault("no memory for %lld bytes of data and %lld of scratch",
                                                               4LL * bench->elems_max, 4LL * bench->scratch_elems);
    return comm_agree(bench->comm, status);
}

/* "0 | 1" or, where all are alike, "0-1 for each". */
static Status cores_text(Comm *comm, char *text, size_t size) {
    char mine[BINDING_BYTES] = "", *all = malloc((size_t)comm_ranks(comm) * BINDING_BYTES);
    size_t used = 0;
    bool alike = true;
    if (!all)
        return fault("no memory for %d ranks", comm_ranks(comm));
    machine_binding(mine, BINDING_BYTES);
    Status status = comm_gather(comm, mine, all, BINDING_BYTES);
    for (int rank = 0; status == OK && rank < comm_ranks(comm); rank++)
        alike &= strcmp(all + rank * BINDING_BYTES, all) == 0;
    for (int rank = 0; status == OK && rank < (alike ? 1 : comm_ranks(comm)) && used < size; rank++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", rank ? " | " : "", all + rank * BINDING_BYTES);
    if (status == OK && alike && used < size)
        snprintf(text + used, size - used, " for each");
    free(all);
    return status;
}

/* On stderr when rows are JSON. */
static Status print_header(const Bench *bench) {
    Comm *comm = bench->comm;
    FILE *out = bench->options->json ? stderr : stdout;
    char cores[CORES_BYTES] = "", links[256];
    TRY(cores_text(comm, cores, sizeof cores));
    if (comm_rank(comm) != 0)
        return OK;
    calibrate_text(&bench->costs, links, sizeof links);
    fprintf(out, "# %d rank%s on %d node%s, cores %s; transport %s; %s\n# median of %lld iterations; f32, sum\n",
            comm_ranks(comm), comm_ranks(comm) > 1 ? "s" : "", comm_nodes(comm), comm_nodes(comm) > 1 ? "s" : "", cores,
            comm_transport_name(comm), links, (long long)bench->options->iters);
    if (bench->skipped)
        fprintf(out, "# left out, because they always send f32: naive, native, ring, tree\n");
    return OK;
}

static Status bench_run(Bench *bench) {
    Comm *comm = bench->comm;
    if (comm_ranks(comm) > EXACT_RANKS_MAX)
        return bad_input("at most %d ranks", EXACT_RANKS_MAX);
    bench->compressor = compressor_find(option_choice(comm_compressors, bench->options->compress));
    if (bench->compressor == &compressor_none)
        bench->compressor = NULL;
    if (bench->compressor && bench->options->compress_scope == 0 && comm_nodes(comm) == 1)
        return comm_agree(comm, bad_input("--compress %s: compresses between nodes, and all ranks are on one: expected "
                                          "--compress_scope all or --ranks_per_node",
                                          bench->compressor->name));
    bench->ring = link_ring(comm->transport, comm_nodes(comm) > 1 ? BETWEEN : INSIDE);
    TRY(comm_agree(comm, add_list(bench, bench->options->algorithm, true)));
    if (bench->count == 0)
        return bad_input("--algorithm: names none");
    TRY(comm_agree(comm, create_codec(bench)));
    TRY(take_memory(bench));
    TRY(calibrate(comm->transport, NULL, bench->options->maxbytes, &bench->costs));
    TRY(print_header(bench));
    TRY(measure_link(bench));
    TRY(measure_sizes(bench));
    if (bench->wrong == 0)
        return OK;
    comm->outcome_shared = true; /* every rank has the sum */
    return fault("%.0f elements are wrong", bench->wrong);
}

/* ---- the program's face ---- */

#define INTEGER(name, initial_text, least, most, text)                                                        \
    {.key = #name, .type = OPTION_INT, .offset = offsetof(BenchOptions, name), .initial = (initial_text),     \
     .min = (least), .max = (most), .help = (text)}

static const char usage[] =
    "allreduce [options] [loop.key=value ...]\n"
    "Measures all-reduces of the ranks that mpirun starts, or of --loop-ranks threads, whose links\n"
    "the keys of [loop] shape (train --help explains them). Short options are those of nccl-tests.\n"
    "\n"
    "time       of the slowest rank, after a barrier; the median of the iterations\n"
    "algbw      bytes / time\n"
    "busbw      algbw * 2 (N-1)/N, of N ranks; of link its algbw\n"
    "ratio      f32 bytes / bytes on the wire\n"
    "#wrong     wrong elements, on all ranks, in all iterations (with --compress: further off than its format allows)\n"
    "predicted  time by the cost model; of native and iallreduce no formula is known\n"
    "CPU s/GB   CPU seconds of all ranks for each GB reduced, waiting included\n"
    "link       no all-reduce: so many bytes leave and enter every node's NIC at once (on one node: every rank).\n"
    "of bound   the least time for what the all-reduce sends through the busiest node's NIC, as counted, at the rate\n"
    "           that link sustains at the largest size (measured first), over its time; n/a on one node, without link\n"
    "           and of native and iallreduce, which do not say what they send. Lines at the end: expected | measured";

static const Option table[] = {
    {.key = "help", .type = OPTION_BOOL, .offset = offsetof(BenchOptions, help), .initial = "no", .help = "this text"},
    INTEGER(minbytes, "8", 4, 1e12, "-b  smallest size in bytes, of f32"),
    INTEGER(maxbytes, "128M", 4, 1e12, "-e  largest size in bytes"),
    INTEGER(stepfactor, "2", 2, 1e6, "-f  from one size to the next"),
    INTEGER(iters, "20", 1, 1e6, "-n  measured iterations"),
    INTEGER(warmup_iters, "5", 0, 1e6, "-w  iterations to warm up"),
    INTEGER(check, "1", 0, 1, "-c  compare every element after every iteration: 1; 0: not at all"),
    {.key = "algorithm", .type = OPTION_STRING, .offset = offsetof(BenchOptions, algorithm), .initial = "all",
     .help = "all (between nodes with link), link, or names of all-reduces, separated by commas:\n"
             "                     " ALGORITHMS "\n"
             "                     (MPI_Allreduce and MPI_Iallreduce are native and iallreduce; leader is\n"
             "                     hierarchical with --leader, in training with comm.leader=yes)"},
    {.key = "compress", .type = OPTION_CHOICE, .offset = offsetof(BenchOptions, compress), .initial = "none",
     .choices = comm_compressors, .help = "what travels instead of f32, in the all-reduces that can"},
    {.key = "compress_scope", .type = OPTION_CHOICE, .offset = offsetof(BenchOptions, compress_scope),
     .initial = "between", .choices = "between|all", .help = "between nodes only, or on every hop"},
    {.key = "density", .type = OPTION_FLOAT, .offset = offsetof(BenchOptions, density), .initial = "0.01",
     .min = 1e-4, .max = 0.5, .help = "topk: share of the values that travel"},
    {.key = "ranks_per_node", .type = OPTION_STRING, .offset = offsetof(BenchOptions, ranks_per_node), .initial = "0",
     .help = "0: as found; 4: so many ranks in a row count as one node; 3,2: unequal nodes"},
    {.key = "group", .type = OPTION_CHOICE, .offset = offsetof(BenchOptions, group), .initial = "node",
     .choices = "node|numa", .help = "numa: each NUMA domain that ranks are bound to counts as a node of its own"},
    {.key = "leader", .type = OPTION_BOOL, .offset = offsetof(BenchOptions, leader), .initial = "no",
     .help = "hierarchical: one rank per node talks to other nodes"},
    INTEGER(loop_ranks, "1", 1, 256, "ranks as threads, when mpirun did not start the program"),
    {.key = "json", .type = OPTION_BOOL, .offset = offsetof(BenchOptions, json), .initial = "no",
     .help = "one JSON object per row; the header goes to stderr"},
};
enum { OPTIONS = sizeof table / sizeof *table };

static Status rank_main(Comm *comm, void *user) {
    Bench bench = {.options = user, .comm = comm, .link_bytes_per_s = NAN};
    for (int bar = 0; bar < BARS; bar++)
        bench.lowest[bar] = INFINITY;
    if (bench.options->help) {
        if (comm_rank(comm) == 0)
            args_help(usage, table, OPTIONS);
        return OK;
    }
    Status status = bench_run(&bench);
    codec_destroy(bench.codec);
    memory_free(comm_memory(comm), bench.data);
    memory_free(&host_memory, bench.scratch);
    free(bench.of_node);
    for (int i = 0; i < bench.count; i++)
        free(bench.contenders[i].time_s);
    return status;
}

/* nccl-tests' short flags become ours. */
static void lengthen_flags(int argc, char **argv) {
    static char *const flags[][2] = {{"-b", "--minbytes"}, {"-e", "--maxbytes"},     {"-f", "--stepfactor"},
                                     {"-n", "--iters"},    {"-w", "--warmup_iters"}, {"-c", "--check"}};
    for (int i = 1; i < argc; i++)
        for (size_t flag = 0; flag < sizeof flags / sizeof *flags; flag++)
            if (strcmp(argv[i], flags[flag][0]) == 0)
                argv[i] = flags[flag][1];
}

static Status read_arguments(BenchOptions *options, CommConfig *comm, LoopConfig *loop, int argc, char **argv) {
    const char *words[WORDS_MAX];
    int count;
    const ConfigSection comm_section = {"comm", comm_options, comm_option_count, comm};
    const ConfigSection loop_section = {"loop", loop_options, loop_option_count, loop};
    lengthen_flags(argc, argv);
    config_destroy(config_create(&comm_section, 1)); /* its defaults */
    Config *links = config_create(&loop_section, 1);
    Status status = args_parse(usage, table, OPTIONS, options, argc, argv, words, WORDS_MAX, &count);
    for (int i = 0; status == OK && i < count; i++)
        status = config_assign(links, words[i]);
    config_destroy(links);
    if (status == OK && options->minbytes > options->maxbytes)
        status = bad_input("--minbytes: expected at most --maxbytes, %lld, found %lld", (long long)options->maxbytes,
                           (long long)options->minbytes);
    if (status == OK && options->loop_ranks > 1)
        loop->ranks = options->loop_ranks;
    comm->group = status == OK ? options->group : 0;
    if (status == OK)
        snprintf(comm->ranks_per_node, sizeof comm->ranks_per_node, "%s", options->ranks_per_node);
    return status;
}

int main(int argc, char **argv) {
    BenchOptions options;
    CommConfig comm;
    LoopConfig loop;
    Status status = comm_start(&argc, &argv);
    if (status == OK)
        status = read_arguments(&options, &comm, &loop, argc, argv);
    status = comm_run(&comm, &loop, status, rank_main, &options);
    return comm_finish("allreduce", status);
}
