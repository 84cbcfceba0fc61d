/* Collectives on device memory: NCCL's transport, in every shape of a world, gives the bits that the loop transport gives
 * on the host's memory, whatever the order in which the device does what may be done in any order. */
#include "base/gpu.h"
#include "comm/transport/vector.h"
#include "tests/check.h"
#include "tests/cuda/stand_ins.h"
#include "tests/loop_world.h"
#include "tests/sync_world.h"

enum { DEVICES = 16, ELEMS_MAX = 200003, PIPELINE_ELEMS = 4 * (512 << 10) + 77 /* a half is five segments */ };

/* One rank's GPU, with its transport beside the host's. */
typedef struct Rank {
    Gpu *gpu;
    Group host, device;
    float *data; /* f32[PIPELINE_ELEMS], of the device */
} Rank;

static void rank_close(Rank *rank) {
    if (rank->device.transport)
        device_transport()->destroy(rank->device.transport);
    if (rank->data)
        memory_free(gpu_memory(rank->gpu), rank->data);
    gpu_close(rank->gpu);
}

static Status rank_open(Rank *rank, Transport *transport) {
    *rank = (Rank){.host = {transport, in_order, transport->ranks, transport->rank}};
    TRY(gpu_open(&rank->gpu, transport->rank));
    rank->data = memory_alloc(gpu_memory(rank->gpu), PIPELINE_ELEMS * sizeof(float));
    EXPECT(rank->data);
    rank->device = rank->host;
    return device_transport()->create(&rank->device.transport, transport, rank->gpu);
}

/* values f32[elems] become their all-reduce, on the device. */
static Status on_device(const Rank *rank, const Collective *collective, float *values, int64_t elems, float scale) {
    int64_t scratch_elems = collective->scratch_elems(&rank->device, elems, NULL);
    float *scratch = memory_alloc(gpu_memory(rank->gpu), ((size_t)scratch_elems + 1) * sizeof(float));
    EXPECT(scratch);
    gpu_copy_in(rank->gpu, rank->data, values, (size_t)elems * sizeof(float));
    TRY(gpu_finish(rank->gpu));
    transport_mark(rank->device.transport, 3);
    transport_follow(rank->device.transport, 3);
    TRY(collective->allreduce(&rank->device,
                              &(Payload){.data = rank->data, .elems = elems, .scale = scale, .scratch = scratch}));
    TRY(transport_flush(rank->device.transport));
    gpu_copy_out(rank->gpu, values, rank->data, (size_t)elems * sizeof(float), NULL, NULL, 0);
    TRY(gpu_finish(rank->gpu));
    memory_free(gpu_memory(rank->gpu), scratch);
    return OK;
}

static void fill(float *values, int rank, int64_t elems) {
    for (int64_t i = 0; i < elems; i++)
        values[i] = case_random_value(rank, i);
}

static Status compare(const Rank *rank, const Collective *collective, int64_t elems) {
    int self = rank->host.self;
    float *guarded = case_floats(CASE_GUARD + elems), *here = guarded + CASE_GUARD, *there = case_floats(elems);
    fill(here, self, elems);
    fill(there, self, elems);
    TRY(case_allreduce(&rank->host, collective, here, elems, case_scale(self)));
    TRY(on_device(rank, collective, there, elems, case_scale(self)));
    for (int64_t i = 0; i < elems; i++)
        if (memcmp(&here[i], &there[i], sizeof(float)) != 0)
            return fault("%s of %lld: value %lld is %.9g on the device, %.9g on the host", collective->name,
                         (long long)elems, (long long)i, (double)there[i], (double)here[i]);
    free(guarded);
    free(there);
    return OK;
}

/* NCCL's own has an order of its own: near the sum in f64, and the same everywhere. */
static Status check_native(const Rank *rank, const Expected *expected, int64_t elems) {
    float *values = case_floats(elems);
    fill(values, rank->host.self, elems);
    TRY(on_device(rank, &collective_native, values, elems, case_scale(rank->host.self)));
    for (int64_t i = 0; i < elems; i++)
        EXPECT(fabs(values[i] - expected->random_f64[i]) <= expected->error_bound[i]);
    free(values);
    return OK;
}

static Status all_collectives(const World *world, const Rank *rank) {
    const Collective *const collectives[] = {&collective_naive, &collective_ring, &collective_tree,
                                             &collective_reduce_scatter, &collective_hierarchical, &collective_leader};
    const int64_t n = rank->host.size, sizes[] = {0, 1, n + 1, 997, 4097, 65537, ELEMS_MAX};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (size_t c = 0; c < sizeof collectives / sizeof *collectives; c++)
            TRY(compare(rank, collectives[c], sizes[s]));
        TRY(check_native(rank, &world->expected, sizes[s]));
    }
    return OK;
}

/* What each rank does on its GPU: world->user. */
typedef struct Work {
    Status (*run)(const World *world, const Rank *rank);
} Work;

static Status body(const World *world, Transport *transport) {
    Rank rank;
    Status status = rank_open(&rank, transport);
    if (status == OK)
        status = ((const Work *)world->user)->run(world, &rank);
    rank_close(&rank); /* also ends what the others wait for */
    return status;
}

static const char *const worlds[] = {"1 node of 2", "1 node of 3", "2 nodes of 1", "2 nodes of 2", "3 and 2",
                                     "1 and 4", "2 nodes of 4", "2 and 3, mixed"};

static void test_bits(void **state) {
    (void)state;
    cudart_devices(DEVICES);
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
        if (run_world(place_named(worlds[w]), body, &(Work){all_collectives}, NULL, ELEMS_MAX) != OK)
            fail_msg("%s: %s", worlds[w], error_line());
}

static void run_late(const char *place, const Work *work, int64_t elems) {
    cudart_devices(DEVICES);
    cudart_late(true);
    Status status = run_world(place_named(place), body, work, NULL, elems);
    cudart_late(false);
    if (status != OK)
        fail_msg("%s", error_line());
}

static void test_late(void **state) {
    (void)state;
    run_late("2 nodes of 2", &(Work){all_collectives}, ELEMS_MAX);
}

/* Several segments at a time, in all lanes at once. */
static Status large_hierarchical(const World *world, const Rank *rank) {
    (void)world;
    return compare(rank, &collective_hierarchical, PIPELINE_ELEMS);
}

static void test_pipeline(void **state) {
    (void)state;
    run_late("2 nodes of 2", &(Work){large_hierarchical}, 1);
}

/* What a mark is for: the lane may not read what the computing stream has not written yet. */
static Status follow_marks(const World *world, const Rank *rank) {
    enum { ELEMS = 5000 };
    (void)world;
    float values[ELEMS], sums[ELEMS];
    for (int round = 1; round <= 5; round++) {
        for (int i = 0; i < ELEMS; i++)
            values[i] = (float)(round * (rank->host.self + 1));
        gpu_copy_in(rank->gpu, rank->data, values, sizeof values); /* computing waits for it, and so does the mark */
        transport_mark(rank->device.transport, round);
        transport_follow(rank->device.transport, round);
        TRY(collective_native.allreduce(&rank->device, &(Payload){.data = rank->data, .elems = ELEMS, .scale = 1}));
        TRY(transport_flush(rank->device.transport));
        gpu_copy_out(rank->gpu, sums, rank->data, sizeof sums, NULL, NULL, 0);
        TRY(gpu_finish(rank->gpu));
        for (int i = 0; i < ELEMS; i++)
            EXPECT(sums[i] == (float)(3 * round));
    }
    return OK;
}

static void test_follow(void **state) {
    (void)state;
    run_late("1 node of 2", &(Work){follow_marks}, 1);
}

/* The rows of a split embedding are written when all gradients are marked: they leave no earlier. */
static Status lookup_step(Gpu *gpu, Sync *sync, const ParamTable *table, float *grads, int rank, int step) {
    enum { TOKEN = 3, CHANNELS = 130 };
    float row[CHANNELS];
    sync_forward_begin(sync, (int[]){TOKEN}, 1);
    TRY(sync_forward_end(sync));
    SyncLookup lookup = sync_lookup(sync);
    EXPECT(lookup.slots == 1 && lookup.slot_of_token[TOKEN] == 0);
    sync_begin(sync);
    for (int g = 0; g < table->gradient_count; g++)
        sync_mark_ready(sync, g);
    for (int c = 0; c < CHANNELS; c++)
        row[c] = (float)(step * (2 * rank + 1));
    gpu_copy_in(gpu, lookup.rows, row, sizeof row);
    TRY(sync_wait(sync));
    gpu_copy_out(gpu, row, grads + TOKEN * CHANNELS, sizeof row, NULL, NULL, 0);
    TRY(gpu_finish(gpu));
    for (int c = 0; c < CHANNELS; c++)
        EXPECT(row[c] == (float)(step * (step + 1))); /* the mean of 1 and 3, of all steps so far */
    sync_commit(sync);
    return OK;
}

static Status lookup_steps(Comm *comm, const CommConfig *config, Gpu *gpu) {
    ParamTable table = {0};
    param_add(&table, "wte", -1, 64, 130);
    param_add(&table, "fcw", 0, 61, 130);
    TRY(comm_use_gpu(comm, config, gpu));
    float *grads = memory_alloc(gpu_memory(gpu), (size_t)table.elems * sizeof(float));
    Sync *sync = NULL;
    Status status = sync_create(&sync, comm, config, &(SyncSetup){.table = &table, .grads = grads, .vocab = 64,
                                                                  .channels = 130, .tokens = 1});
    for (int step = 1; step <= 5 && status == OK; step++)
        status = lookup_step(gpu, sync, &table, grads, comm_rank(comm), step);
    sync_destroy(sync);
    memory_free(gpu_memory(gpu), grads);
    param_table_free(&table);
    return status;
}

static Status lookup_body(Comm *comm, void *config) {
    Gpu *gpu;
    TRY(gpu_open(&gpu, comm_rank(comm)));
    Status status = lookup_steps(comm, config, gpu);
    comm_leave_gpu(comm);
    gpu_close(gpu);
    return status;
}

static void test_lookup(void **state) {
    (void)state;
    CommConfig config;
    LoopConfig loop;
    sync_settings("loop.ranks=2 comm.transport=nccl comm.bucket_bytes=1M", &config, &loop);
    cudart_devices(DEVICES);
    cudart_late(true);
    Status status = comm_run(&config, &loop, OK, lookup_body, &config);
    cudart_late(false);
    if (status != OK)
        fail_msg("%s", error_line());
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bits), cmocka_unit_test(test_late),
                                       cmocka_unit_test(test_pipeline), cmocka_unit_test(test_follow),
                                       cmocka_unit_test(test_lookup)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
