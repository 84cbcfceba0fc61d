/* log.trace: the JSON of a few steps, by every collective. Each bucket's phases are there, named after its collective,
 * on rows of their own, and lie inside their bucket. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"
#include "tests/sync_world.h"

#include "base/clock.h"
#include "run/trace.h"

#include <cJSON.h>
#include <unistd.h>

enum { STEPS = 3, TEXT_MAX = 1 << 20 };

static const char path[] = "test_trace.json";

/* ---- writing ---- */

static Status run_steps(Comm *comm, Sync *sync, Trace *trace, const ParamTable *table, float *grads, int *buckets) {
    for (int step = 1; step <= STEPS; step++) {
        TRY(sync_random_step(sync, table, grads, comm_rank(comm), step, 0));
        trace_sync(trace, sync, table, sync_begin_s(sync), clock_s());
    }
    if (comm_rank(comm) == 0)
        *buckets = sync_bucket_count(sync);
    return trace_write(trace, comm, path);
}

typedef struct Job {
    const CommConfig *config;
    int buckets; /* set by rank 0 */
} Job;

static Status write_trace(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    Job *job = user;
    Trace *trace;
    TRY(trace_open(&trace, comm, 10000));
    Status status = run_steps(comm, sync, trace, table, grads, &job->buckets);
    trace_close(trace);
    return status;
}

static Status traced_rank(Comm *comm, void *user) {
    const Job *job = user;
    ParamTable table;
    sync_table_make(&table);
    return with_sync(comm, job->config, &table, write_trace, user);
}

/* ---- reading ---- */

static cJSON *read_json(void) {
    static char text[TEXT_MAX];
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    text[bytes] = '\0';
    fclose(file);
    cJSON *json = cJSON_Parse(text);
    assert_true(bytes < sizeof text - 1);
    assert_non_null(json);
    return json;
}

static double number(const cJSON *event, const char *key) {
    const cJSON *item = cJSON_GetObjectItem(event, key);
    assert_true(cJSON_IsNumber(item));
    return item->valuedouble;
}

static const char *name_of(const cJSON *event) { return cJSON_GetObjectItem(event, "name")->valuestring; }
static bool is_span(const cJSON *event) { return strcmp(cJSON_GetObjectItem(event, "ph")->valuestring, "X") == 0; }

/* Times are rounded to a nanosecond. */
static bool lies_inside(const cJSON *inner, const cJSON *outer) {
    double start_us = number(inner, "ts"), end_us = start_us + number(inner, "dur");
    return start_us >= number(outer, "ts") - 0.01 && end_us <= number(outer, "ts") + number(outer, "dur") + 0.01;
}

/* The span on that row inside the bucket, NULL when there is none; more than one is a failure. */
static const cJSON *phase_inside(const cJSON *events, const cJSON *bucket, int row) {
    const cJSON *event, *found = NULL;
    cJSON_ArrayForEach(event, events) {
        if (!is_span(event) || number(event, "tid") != row || number(event, "pid") != number(bucket, "pid") ||
            !lies_inside(event, bucket))
            continue;
        assert_null(found);
        found = event;
    }
    return found;
}

static void check_bucket(const cJSON *events, const cJSON *event, int bucket, const char *const *names, bool overlap) {
    const cJSON *before = NULL;
    for (int i = 0; i < PHASES_MAX; i++) {
        const cJSON *phase = phase_inside(events, event, TRACE_PHASES + i);
        char name[64];
        snprintf(name, sizeof name, "%s, bucket %d", names[i] ? names[i] : "", bucket);
        assert_true((phase != NULL) == (names[i] != NULL));
        if (!phase)
            continue;
        assert_string_equal(name_of(phase), name);
        assert_true(!before || number(before, "ts") <= number(phase, "ts"));
        assert_true(!before || !overlap || number(before, "ts") + number(before, "dur") > number(phase, "ts"));
        before = phase;
    }
}

/* Of one rank. */
static void check_buckets(const cJSON *events, int rank, int buckets, const char *const *names, bool overlap) {
    const cJSON *event;
    int seen = 0, bucket;
    cJSON_ArrayForEach(event, events) {
        if (!is_span(event) || sscanf(name_of(event), "bucket %d", &bucket) != 1 || number(event, "pid") != rank)
            continue;
        check_bucket(events, event, bucket, names, overlap && bucket == 0);
        seen++;
    }
    assert_int_equal(seen, STEPS * buckets);
}

/* With one of each inside each bucket: so none lies outside. */
static int count_phases(const cJSON *events, int rank) {
    const cJSON *event;
    int count = 0;
    cJSON_ArrayForEach(event, events)
        count += is_span(event) && number(event, "tid") >= TRACE_PHASES && number(event, "pid") == rank;
    return count;
}

static int count_names(const char *const *names) {
    int count = 0;
    for (int i = 0; i < PHASES_MAX; i++)
        count += names[i] != NULL;
    return count;
}

static const char *const reduce_broadcast[PHASES_MAX] = {"reduce", "broadcast"};
static const char *const two_halves[PHASES_MAX] = {"reduce-scatter", "all-gather"};
static const char *const folded[PHASES_MAX] = {"fold", NULL, NULL, "unfold"};
static const char *const doubled[PHASES_MAX] = {NULL, NULL, "doubling"};
static const char *const halved_and_doubled[PHASES_MAX] = {NULL, "halving", "doubling"};
static const char *const three_levels[PHASES_MAX] = {"reduce-scatter inside", "between nodes", "all-gather inside"};
static const char *const stays_inside[PHASES_MAX] = {"reduce-scatter inside", NULL, "all-gather inside"};

static const struct {
    const char *settings;
    int ranks;
    const char *const *first, *const *last; /* phases of rank 0 and of the last one */
    bool overlap; /* the first bucket has several segments: a phase begins before the one ahead of it has ended */
} cases[] = {
    {"comm.algorithm=naive", 3, reduce_broadcast, reduce_broadcast, false},
    {"comm.algorithm=ring", 4, two_halves, two_halves, false},
    {"comm.algorithm=ring comm.compress=int8 comm.requantise=ring", 3, two_halves, two_halves, false},
    {"comm.algorithm=tree comm.bucket_bytes=4K", 3, folded, doubled, false},
    {"comm.algorithm=tree comm.bucket_bytes=1G", 6, folded, halved_and_doubled, false},
    {"comm.algorithm=reduce_scatter", 3, two_halves, two_halves, false},
    {"comm.algorithm=hierarchical comm.ranks_per_node=2", 4, three_levels, three_levels, false},
    {"comm.algorithm=hierarchical comm.ranks_per_node=2 comm.compress=int8", 4, three_levels, three_levels, false},
    {"comm.algorithm=hierarchical comm.ranks_per_node=2 comm.bucket_bytes=1G", 4, three_levels, three_levels, true},
    {"comm.algorithm=hierarchical comm.leader=yes comm.ranks_per_node=2", 4, three_levels, stays_inside, false},
    {"comm.algorithm=hierarchical comm.ranks_per_node=1", 2, two_halves, two_halves, false},
};

static void check_rank(const cJSON *events, int rank, int buckets, const char *const *names, bool overlap) {
    check_buckets(events, rank, buckets, names, overlap);
    assert_int_equal(count_phases(events, rank), STEPS * buckets * count_names(names));
}

static void test_phases_lie_inside_their_bucket(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char settings[256];
        CommConfig config;
        LoopConfig loop;
        snprintf(settings, sizeof settings, "comm.bucket_bytes=40K %s loop.ranks=%d", cases[i].settings,
                 cases[i].ranks);
        sync_settings(settings, &config, &loop);
        Job job = {&config, 0};
        print_message("%s\n", cases[i].settings);
        assert_ok(comm_run(&config, &loop, OK, traced_rank, &job));
        cJSON *json = read_json();
        const cJSON *events = cJSON_GetObjectItem(json, "traceEvents");
        assert_true(cJSON_IsArray(events));
        check_rank(events, 0, job.buckets, cases[i].first, cases[i].overlap);
        check_rank(events, cases[i].ranks - 1, job.buckets, cases[i].last, cases[i].overlap);
        cJSON_Delete(json);
    }
}

/* ---- the folder ---- */

static int enter_folder(void **state) {
    static char folder[64];
    snprintf(folder, sizeof folder, "/tmp/tandem_test_XXXXXX");
    *state = folder;
    return mkdtemp(folder) && chdir(folder) == 0 ? 0 : -1;
}

static int leave_folder(void **state) {
    unlink(path);
    return chdir("/") == 0 ? rmdir(*state) : -1;
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test_setup_teardown(test_phases_lie_inside_their_bucket, enter_folder, leave_folder),
};

CHECK_MAIN(tests)
