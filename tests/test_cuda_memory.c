/* What a run on a GPU says that it will take is what it takes, to the byte; the batch that it says fits does, and one
 * more is refused. On the stand-in for the CUDA runtime, which counts. */
#define _DEFAULT_SOURCE
#include "tests/cuda/stand_ins.h"
#include "tests/run_memory.h"

enum { CASES_GPUS = 4 };

/* All ranks' together. */
static Status check_sum(Trainer *t) {
    TRY(trainer_check(t));
    TRY(comm_barrier(t->comm));
    size_t before = cudart_memory_used();
    double expected = (double)memory_total(&t->memory);
    TRY(comm_reduce(t->comm, &expected, 1, COMM_SUM));
    TRY(trainer_build(t));
    TRY(comm_barrier(t->comm));
    double taken = (double)(cudart_memory_used() - before);
    TRY(comm_barrier(t->comm));
    return taken == expected ? OK : fault("%.0f bytes taken, %.0f expected", taken, expected);
}

static void test_sum(void **state) {
    (void)state;
    static const char *const cases[] = {
        "run.device=cuda",
        "run.device=cuda train.recompute=gelu train.dtype=bf16",
        "run.device=cuda train.recompute=norms train.dtype=bf16 train.batch=7",
        "run.device=cuda train.recompute=layers optim.zero=1",
        "run.device=cuda loop.ranks=3 comm.transport=loop train.dtype=bf16",
        "run.device=cuda loop.ranks=3 comm.transport=loop optim.zero=1 comm.split_embedding=no",
        "run.device=cuda loop.ranks=4 comm.split_embedding=no",
        "run.device=cuda loop.ranks=4 comm.split_embedding=no optim.zero=1 train.dtype=bf16",
        "run.device=cuda loop.ranks=4 comm.ranks_per_node=2 comm.split_embedding=no comm.compress=int8",
        "run.device=cuda model.vocab=50257 train.batch=140 train.dtype=bf16", /* the head in two chunks */
    };
    cudart_devices(CASES_GPUS);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (run_watched(cases[i], check_sum) != OK)
            fail_msg("%s: %s", cases[i], error_line());
    assert_int_equal(cudart_memory_used(), 0);
}

/* ---- the largest batch ---- */

static Status build_only(Trainer *t) {
    TRY(trainer_check(t));
    return trainer_build(t);
}

/* The N of "train.batch=N fits" in the line of why not. */
static int refused_batch(const char *arguments) {
    int batch = 0;
    assert_int_equal(run_watched(arguments, build_only), BAD_INPUT);
    assert_non_null(strstr(error_line(), "GB of its GPU's memory, "));
    const char *at = strstr(error_line(), "train.batch=");
    assert_non_null(at);
    assert_int_equal(sscanf(at, "train.batch=%d fits", &batch), 1);
    assert_int_equal(cudart_memory_used(), 0);
    return batch;
}

static void check_largest(const char *arguments) {
    char with_batch[160];
    snprintf(with_batch, sizeof with_batch, "%s train.batch=60000", arguments);
    int fits = refused_batch(with_batch);
    snprintf(with_batch, sizeof with_batch, "%s train.batch=%d", arguments, fits);
    assert_ok(run_watched(with_batch, build_only));
    snprintf(with_batch, sizeof with_batch, "%s train.batch=%d", arguments, fits + 1);
    assert_int_equal(refused_batch(with_batch), fits);
}

static void test_largest_batch(void **state) {
    (void)state;
    cudart_devices(1);
    cudart_device(9, 0, (size_t)700 << 20);
    check_largest("run.device=cuda train.recompute=layers");
    check_largest("run.device=cuda train.dtype=bf16");
    check_largest("run.device=cuda loop.ranks=2 train.recompute=gelu"); /* which share the card */
    check_largest("run.device=cuda model.vocab=50257 train.dtype=bf16"); /* in the head's first chunk */
    cudart_device(9, 0, (size_t)900 << 20);
    check_largest("run.device=cuda model.vocab=50257 train.dtype=bf16"); /* behind it */
    cudart_device(9, 0, (size_t)290 << 20);
    assert_refused(run_watched("run.device=cuda", build_only),
                   "train.batch=1 does not fit either; lower train.seq_len or set train.recompute=layers");
    cudart_device(9, 0, (size_t)16 << 30);
}

/* ---- when it is gone all the same ---- */

static Status run_out(Trainer *t) {
    TRY(trainer_check(t));
    cudart_device(9, 0, cudart_memory_used() + t->memory.params + t->memory.grads + ((size_t)33 << 20));
    Status status = trainer_build(t);
    cudart_device(9, 0, (size_t)16 << 30);
    return status;
}

static void test_run_out(void **state) {
    (void)state;
    cudart_devices(1);
    assert_int_equal(run_watched("run.device=cuda train.batch=500 train.recompute=layers", run_out), FAULT);
    const char *line = error_line(), *at = strstr(line, "train.batch=");
    if (!strstr(line, "out of memory on the GPU: ") || !strstr(line, "B asked for, ") || strstr(line, " 0.00 ") ||
        !at || !(atoi(at + strlen("train.batch=")) < 500))
        fail_msg("found '%s'", line);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_sum), cmocka_unit_test(test_largest_batch),
                                          cmocka_unit_test(test_run_out)};

CHECK_MAIN(tests)
