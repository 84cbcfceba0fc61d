/* Top-k with error feedback in the sync, against a simulation of plain loops in f64 that shares no code with it: sorts
 * each block, subtracts what it sends, and knows neither buckets, chunks nor messages.
 *
 * Gradients are heavy-tailed multiples of 2^-8 with bounds, and there are four ranks: every product, sum and residual
 * is then exact in f32, so results and residuals must be equal, not close. And equal magnitudes are frequent. */
#include "tests/check.h"
#include "tests/sync_world.h"

enum { RANKS = 4, NODES = 2, STEPS = 24, WARMUP = 3, REPLAN = 11, BLOCK = 4096, PIECE_MIN = 1024 };

typedef struct Case {
    const char *settings;
    double density;
    bool ranks_quantise, nodes_quantise; /* which of the quantisations before the result's there are */
    bool feedback;
    /* what rank 0 saw */
    float *results;   /* f32[STEPS][elems] */
    float *residuals; /* f32[1 + NODES + RANKS][elems]: of the result, of nodes, of ranks */
} Case;

/* The cube of a normal variate, in steps of 2^-8. */
static float draw(int rank, int step, int64_t i) {
    double normal = random_normal((uint64_t)rank + 1, (uint64_t)step, (uint64_t)i);
    double cube = nearbyint(256 * normal * normal * normal) / 256;
    return (float)(cube > 64 ? 64 : cube < -64 ? -64 : cube);
}

static float *gradients; /* f32[RANKS][STEPS][elems]: drawn before the first rank starts */

static float *draw_all(int64_t elems) {
    float *all = malloc((size_t)(RANKS * STEPS * elems) * sizeof *all);
    for (int64_t i = 0; i < RANKS * STEPS * elems; i++)
        all[i] = draw((int)(i / elems / STEPS), (int)(i / elems % STEPS), i % elems);
    return all;
}

static const float *gradient_of(int rank, int step, int64_t elems) {
    return gradients + (rank * STEPS + step) * elems;
}

/* ---- the simulation ---- */

typedef struct Simulation {
    const Case *test;
    const ParamTable *table;
    double *of_result, *of_node[NODES], *of_rank[RANKS]; /* f64[elems]: residuals */
} Simulation;

typedef struct Place {
    double magnitude;
    int index;
} Place;

static int compare_places(const void *a, const void *b) {
    const Place *x = a, *y = b;
    return x->magnitude != y->magnitude ? (x->magnitude < y->magnitude) - (x->magnitude > y->magnitude)
                                        : x->index - y->index;
}

/* p = C(p), and what that leaves. */
static void quantise_block(double density, double *p, double *residual, int n) {
    static Place places[BLOCK];
    int kept = (int)ceil(density * n);
    for (int i = 0; i < n; i++) {
        places[i] = (Place){fabs(p[i]), i};
        residual[i] = p[i];
    }
    qsort(places, (size_t)n, sizeof *places, compare_places);
    for (int i = 0; i < kept; i++)
        residual[places[i].index] = 0;
    for (int i = 0; i < n; i++)
        p[i] -= residual[i];
}

/* values = C(values + residual) in every matrix that is not small. */
static void quantise(const Simulation *self, double *values, double *residual) {
    for (int g = 0; g < self->table->gradient_count; g++) {
        const Gradient *piece = &self->table->gradients[g];
        int64_t stop = piece->offset + piece->elems;
        if (piece->dense || piece->elems < PIECE_MIN)
            continue;
        for (int64_t at = piece->offset, next; at < stop; at = next) {
            next = (at / BLOCK + 1) * BLOCK < stop ? (at / BLOCK + 1) * BLOCK : stop;
            for (int64_t i = at; self->test->feedback && i < next; i++)
                values[i] += residual[i];
            quantise_block(self->test->density, values + at, residual + at, (int)(next - at));
        }
    }
}

static void add(double *sum, const double *term, int64_t elems) {
    for (int64_t i = 0; i < elems; i++)
        sum[i] += term[i];
}

/* mean f64[elems] = what every rank should get. */
static void simulate_step(Simulation *self, int step, double *mean) {
    int64_t elems = self->table->elems;
    bool dense = step < WARMUP;
    double *term = calloc((size_t)elems, sizeof *term), *sum = calloc((size_t)elems, sizeof *sum);
    memset(mean, 0, (size_t)elems * sizeof *mean);
    for (int node = 0; node < NODES; node++) {
        memset(sum, 0, (size_t)elems * sizeof *sum);
        for (int rank = node * RANKS / NODES; rank < (node + 1) * RANKS / NODES; rank++) {
            for (int64_t i = 0; i < elems; i++)
                term[i] = (double)gradient_of(rank, step, elems)[i] / RANKS;
            if (self->test->ranks_quantise && !dense)
                quantise(self, term, self->of_rank[rank]);
            add(sum, term, elems);
        }
        if (self->test->nodes_quantise && !dense)
            quantise(self, sum, self->of_node[node]);
        add(mean, sum, elems);
    }
    if (!dense)
        quantise(self, mean, self->of_result);
    free(term);
    free(sum);
}

/* ---- the sync ---- */

static void settings_of(const Case *test, CommConfig *config, LoopConfig *loop) {
    char text[512];
    snprintf(text, sizeof text, "loop.ranks=%d comm.ranks_per_node=%d comm.bucket_bytes=40K comm.compress=topk "
             "comm.warmup_steps=%d %s", RANKS, RANKS / NODES, WARMUP, test->settings);
    sync_settings(text, config, loop);
}

static Status run_steps(Comm *comm, Sync *sync, const ParamTable *table, float *grads, void *user) {
    Case *test = user;
    CommConfig other = {0};
    LoopConfig loop = {0};
    settings_of(test, &other, &loop);
    other.bucket_bytes = 150000;
    int64_t elems = table->elems;
    for (int step = 0; step < STEPS; step++) {
        TRY(step == REPLAN ? sync_replan(sync, &other) : OK);
        sync_begin(sync);
        memcpy(grads, gradient_of(comm_rank(comm), step, elems), (size_t)elems * sizeof(float));
        for (int g = 0; g < table->gradient_count; g++)
            sync_mark_ready(sync, g);
        TRY(sync_wait(sync));
        TRY(comm_verify(comm, grads, (size_t)elems * sizeof(float), "gradients"));
        if (comm_rank(comm) == 0)
            memcpy(test->results + step * elems, grads, (size_t)elems * sizeof(float));
        sync_commit(sync);
    }
    if (sync_residuals(sync) != (test->feedback ? 1 + NODES + RANKS : 0))
        return fault("%d arrays of residuals", sync_residuals(sync));
    for (int i = 0; i < sync_residuals(sync); i++)
        TRY(sync_residual_fetch(sync, i, comm_rank(comm) == 0 ? test->residuals + i * elems : grads));
    return OK;
}

static Status run_rank(Comm *comm, void *user) {
    Case *test = user;
    CommConfig config = {0};
    LoopConfig loop = {0};
    ParamTable table;
    settings_of(test, &config, &loop);
    sync_table_make(&table);
    return with_sync(comm, &config, &table, run_steps, test);
}

/* ---- both ---- */

static void compare(const Case *test, const char *what, int number, const float *found, const double *expected,
                    int64_t elems) {
    for (int64_t i = 0; i < elems; i++)
        if (!((double)found[i] == expected[i]))
            fail_msg("%s: %s %d: value %lld is %.9g, expected %.9g", test->settings, what, number, (long long)i,
                     (double)found[i], expected[i]);
}

static double *zeros(int64_t elems) { return calloc((size_t)elems, sizeof(double)); }

static void check(Case *test, const ParamTable *table) {
    int64_t elems = table->elems;
    Simulation simulation = {.test = test, .table = table, .of_result = zeros(elems)};
    for (int node = 0; node < NODES; node++)
        simulation.of_node[node] = zeros(elems);
    for (int rank = 0; rank < RANKS; rank++)
        simulation.of_rank[rank] = zeros(elems);
    test->results = calloc((size_t)(STEPS * elems), sizeof(float));
    test->residuals = calloc((size_t)((1 + NODES + RANKS) * elems), sizeof(float));
    CommConfig config = {0};
    LoopConfig loop = {0};
    settings_of(test, &config, &loop);
    if (comm_run(&config, &loop, OK, run_rank, test) != OK)
        fail_msg("%s: %s", test->settings, error_line());
    double *mean = zeros(elems);
    for (int step = 0; step < STEPS; step++) {
        simulate_step(&simulation, step, mean);
        compare(test, "step", step, test->results + step * elems, mean, elems);
    }
    double *expected[1 + NODES + RANKS] = {simulation.of_result};
    memcpy(expected + 1, simulation.of_node, sizeof simulation.of_node);
    memcpy(expected + 1 + NODES, simulation.of_rank, sizeof simulation.of_rank);
    for (int i = 0; i < 1 + NODES + RANKS; i++) {
        if (test->feedback)
            compare(test, "residual", i, test->residuals + i * elems, expected[i], elems);
        free(expected[i]);
    }
    free(mean);
    free(test->results);
    free(test->residuals);
}

static void test_against_a_simulation(void **state) {
    (void)state;
    Case cases[] = {
        {.settings = "comm.topk_density=0.1", .density = 0.1, .nodes_quantise = true, .feedback = true},
        {.settings = "comm.topk_density=0.01", .density = 0.01, .nodes_quantise = true, .feedback = true},
        {.settings = "comm.topk_density=0.05 comm.compress_scope=all", .density = 0.05, .ranks_quantise = true,
         .nodes_quantise = true, .feedback = true},
        {.settings = "comm.topk_density=0.05 comm.algorithm=reduce_scatter", .density = 0.05, .ranks_quantise = true,
         .feedback = true},
        {.settings = "comm.topk_density=0.05 comm.error_feedback=no", .density = 0.05, .nodes_quantise = true},
    };
    ParamTable table;
    sync_table_make(&table);
    gradients = draw_all(table.elems);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        check(&cases[c], &table);
    free(gradients);
    param_table_free(&table);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_a_simulation)};

CHECK_MAIN(tests)
