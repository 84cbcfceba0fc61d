/* base/gpu_graph on the stand-in for the CUDA runtime: what is recorded is done at each launch and not before, also where
 * streams are late; what a capture forbids, and each call that fails, is a fault of the Gpu; other threads do not
 * disturb. */
#define _GNU_SOURCE
#include "tests/check.h"

#include "base/gpu_graph.h"
#include "base/gpu_stamps.h"
#include "tests/cuda/sample_kernels.h"
#include "tests/cuda/stand_ins.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { OUT_OF_MEMORY = 2, MANY = 3000 };

typedef struct Fixture {
    Gpu *gpu;
    GpuGraphs *graphs;
    float *a, *b; /* on the device, [SAMPLE_ELEMS] */
    float in[SAMPLE_ELEMS], out[SAMPLE_ELEMS];
} Fixture;

static void set_up(Fixture *f) {
    assert_ok(gpu_open(&f->gpu, 0));
    assert_ok(gpu_graphs_create(&f->graphs, f->gpu));
    f->a = memory_alloc(gpu_memory(f->gpu), sizeof f->in);
    f->b = memory_alloc(gpu_memory(f->gpu), sizeof f->in);
}

static void tear_down(Fixture *f) {
    cudart_fail(NULL, 0, 0);
    gpu_graphs_destroy(f->graphs);
    memory_free(gpu_memory(f->gpu), f->a);
    memory_free(gpu_memory(f->gpu), f->b);
    gpu_close(f->gpu);
    cudart_late(false);
    assert_int_equal(cudart_memory_used(), 0);
    assert_int_equal(cudart_objects(), 0);
}

/* b becomes a, each block backwards: a stretch of its own for each key, with what must not be part of it before it. */
static bool reverse(Fixture *f, int key, float first) {
    for (int i = 0; i < SAMPLE_ELEMS; i++)
        f->in[i] = first + (float)(i % SAMPLE_THREADS);
    gpu_copy_in(f->gpu, f->a, f->in, sizeof f->in);
    bool asked = gpu_graphs_begin(f->graphs, &(GpuGraphKey){f, {key}});
    if (asked) {
        sample_kernel_reverse(gpu_stream(f->gpu), f->b, f->a);
        gpu_graphs_end(f->graphs);
    }
    return asked;
}

static void check_reversed(Fixture *f, float first) {
    gpu_copy_out(f->gpu, f->out, f->b, sizeof f->out, NULL, NULL, 0);
    assert_ok(gpu_finish(f->gpu));
    for (int i = 0; i < SAMPLE_ELEMS; i++)
        assert_true(f->out[i] == first + (float)(SAMPLE_THREADS - 1 - i % SAMPLE_THREADS));
}

static void test_each_launch_does_it(void **state) {
    (void)state;
    for (int late = 0; late < 2; late++) {
        Fixture f;
        cudart_late(late);
        set_up(&f);
        for (int time = 0; time < 5; time++)
            for (int key = 0; key < 2; key++) {
                assert_int_equal(reverse(&f, key, (float)(10 * time + key)), time < 2);
                check_reversed(&f, (float)(10 * time + key));
            }
        gpu_graphs_clear(f.graphs);
        assert_true(reverse(&f, 0, 3) && reverse(&f, 0, 4) && !reverse(&f, 0, 5));
        check_reversed(&f, 5);
        tear_down(&f);
    }
}

/* Far more keys than there is room for, each three times in a row: they are still told apart. */
static void test_many_keys(void **state) {
    (void)state;
    Fixture f;
    set_up(&f);
    int asked = 0;
    for (int key = 0; key < MANY; key++)
        for (int time = 0; time < 3; time++)
            asked += reverse(&f, key, (float)key);
    check_reversed(&f, MANY - 1);
    assert_in_range(asked, 2 * MANY, 2 * MANY + MANY / 100);
    tear_down(&f);
}

/* The third of three times fails in `function`. */
static void check_failure(const char *function) {
    Fixture f;
    set_up(&f);
    reverse(&f, 0, 1);
    cudart_fail(function, 1, OUT_OF_MEMORY);
    reverse(&f, 0, 2);
    reverse(&f, 0, 3);
    assert_int_equal(gpu_finish(f.gpu), FAULT);
    assert_non_null(strstr(error_line(), "run.cuda_graphs=no does without"));
    assert_non_null(strstr(error_line(), function));
    assert_non_null(strstr(error_line(), "out of memory"));
    tear_down(&f);
}

static void test_failures(void **state) {
    (void)state;
    static const char *const functions[] = {"cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate",
                                            "cudaGraphLaunch"};
    for (int i = 0; i < 4; i++)
        check_failure(functions[i]);
}

typedef void ForbiddenFn(Fixture *f);
static void allocates(Fixture *f) { memory_free(gpu_memory(f->gpu), memory_alloc(gpu_memory(f->gpu), 64)); }
static void waits(Fixture *f) { assert_int_equal(gpu_finish(f->gpu), FAULT); }

/* What a capture forbids within a stretch spoils it: nothing is launched, and the Gpu has a fault. */
static void test_forbidden(void **state) {
    (void)state;
    ForbiddenFn *const forbidden[] = {allocates, waits};
    for (int i = 0; i < 2; i++) {
        Fixture f;
        set_up(&f);
        GpuGraphKey key = {&f, {i}};
        assert_true(gpu_graphs_begin(f.graphs, &key));
        gpu_graphs_end(f.graphs);
        assert_true(gpu_graphs_begin(f.graphs, &key));
        forbidden[i](&f);
        gpu_graphs_end(f.graphs);
        assert_true(gpu_graphs_begin(f.graphs, &key)); /* no graph has come of it */
        gpu_graphs_end(f.graphs);
        assert_int_equal(gpu_finish(f.gpu), FAULT);
        tear_down(&f);
    }
}

typedef struct Reader {
    Gpu *gpu;
    _Atomic bool done;
} Reader;

static void *read_stamps(void *argument) {
    Reader *reader = argument;
    gpu_use(reader->gpu);
    gpu_read_stamps(reader->gpu);
    reader->done = true;
    return NULL;
}

/* The comm thread reads stamps while a stretch is recorded, and would ask whether the computing stream is idle: it waits. */
static void test_another_thread_reads_stamps(void **state) {
    (void)state;
    Fixture f;
    pthread_t thread;
    set_up(&f);
    Reader reader = {.gpu = f.gpu};
    reverse(&f, 0, 1);
    reverse(&f, 1, 2);
    assert_true(gpu_graphs_begin(f.graphs, &(GpuGraphKey){&f, {1}}));
    assert_int_equal(pthread_create(&thread, NULL, read_stamps, &reader), 0);
    for (int i = 0; i < 50 && !reader.done; i++)
        usleep(1000);
    sample_kernel_reverse(gpu_stream(f.gpu), f.b, f.a);
    gpu_graphs_end(f.graphs);
    pthread_join(thread, NULL);
    check_reversed(&f, 2);
    assert_false(reverse(&f, 1, 3));
    check_reversed(&f, 3);
    tear_down(&f);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_launch_does_it), cmocka_unit_test(test_many_keys),
                                          cmocka_unit_test(test_failures), cmocka_unit_test(test_forbidden),
                                          cmocka_unit_test(test_another_thread_reads_stamps)};

CHECK_MAIN(tests)
