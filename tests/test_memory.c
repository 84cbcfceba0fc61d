/* What a run on the CPU says that it will take is what it takes. */
#define _DEFAULT_SOURCE
#include "tests/run_memory.h"

#include "base/machine.h"

/* ---- an allocator that counts ---- */

static void *count_alloc(void *bytes_so_far, size_t bytes) {
    *(size_t *)bytes_so_far += bytes;
    return memory_alloc(&host_memory, bytes);
}
static void count_free(void *context, void *memory) {
    (void)context;
    memory_free(&host_memory, memory);
}

static Status check_sum(Trainer *t) {
    size_t taken = 0;
    const Allocator counting = {count_alloc, count_free, &taken};
    TRY(trainer_check(t));
    assert_int_equal(t->memory.params, (size_t)t->table.elems * sizeof(float));
    assert_int_equal(t->memory.grads, t->memory.params);
    t->device.memory = &counting;
    TRY(trainer_build(t));
    if (taken != t->memory.activations + t->memory.moments)
        return fault("%zu bytes taken, %zu expected", taken, t->memory.activations + t->memory.moments);
    trainer_destroy(t);
    *t = (Trainer){.settings = t->settings, .comm = t->comm};
    return OK;
}

static void test_sum(void **state) {
    (void)state;
    static const char *const cases[] = {"run.device=cpu", "run.device=cpu train.recompute=gelu train.batch=5",
                                        "run.device=cpu train.recompute=norms", "run.device=cpu loop.ranks=2",
                                        "run.device=cpu train.recompute=layers loop.ranks=3 optim.zero=1"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (run_watched(cases[i], check_sum) != OK)
            fail_msg("%s: %s", cases[i], error_line());
}

/* ---- too little ---- */

static Status refuse_to_build(Trainer *t) {
    TRY(trainer_check(t));
    return fault("was not refused");
}

static void test_too_large(void **state) {
    (void)state;
    const char *large = "run.device=cpu model.layers=400 model.channels=9600 loop.ranks=2";
    assert_refused(run_watched(large, refuse_to_build), "GB are free; a rank's parameters, gradients and moments alone "
                   "take 7078.75 GB; fewer ranks here, a smaller model, or more hosts with optim.zero=1");
    assert_refused(run_watched("run.device=cpu model.layers=400 model.channels=9600", refuse_to_build),
                   "alone take 7078.75 GB; a smaller model, or more hosts");
    large = "run.device=cpu model.layers=60 model.channels=480 train.batch=65536 train.recompute=layers";
    assert_refused(run_watched(large, refuse_to_build), " GB are free; train.batch=");
    assert_null(strstr(error_line(), "recompute"));
}

static void *refuse(void *context, size_t bytes) {
    (void)context, (void)bytes;
    return NULL;
}

static Status an_eighth(Trainer *t) {
    TRY(trainer_check(t));
    return t->memory.available < (size_t)machine_memory_available() / 4 ? OK : fault("more than its share");
}

/* Nodes that there are not bring no memory. */
static void test_invented_nodes(void **state) {
    (void)state;
    assert_ok(run_watched("run.device=cpu loop.ranks=8 comm.ranks_per_node=1", an_eighth));
}

/* After the check memory is gone all the same. */
static Status run_out(Trainer *t) {
    const Allocator empty = {refuse, count_free, NULL};
    TRY(trainer_check(t));
    t->device.memory = &empty;
    Status status = trainer_build(t);
    gpt2_destroy(t->model);
    t->model = NULL;
    return status;
}

static void test_run_out(void **state) {
    (void)state;
    assert_int_equal(run_watched("run.device=cpu", run_out), FAULT);
    const char *line = error_line();
    if (!strstr(line, "out of memory on the host: ") || strstr(line, " 0.00 ") || !strstr(line, "B asked for, ") ||
        !strstr(line, "; end other processes"))
        fail_msg("found '%s'", error_line());
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_sum), cmocka_unit_test(test_too_large),
                                          cmocka_unit_test(test_invented_nodes), cmocka_unit_test(test_run_out)};

CHECK_MAIN(tests)
