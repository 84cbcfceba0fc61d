/* The emulator of kernels: what is right computes right in any order, and each planted fault is seen. Faults that end
 * the program are run by a child: this program, with "--run KERNEL SEED". */
#define _GNU_SOURCE
#include "tests/check.h"

#include "tests/cuda/sample_kernels.h"
#include "tests/cuda/stand_ins.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SEEDS = 20 };

static void fill(float *in) {
    for (int i = 0; i < SAMPLE_ELEMS; i++)
        in[i] = (float)(i + 1);
}

/* How many elements differ from what `reverse` gives. */
static int wrong_reversed(const float *out) {
    int wrong = 0;
    for (int i = 0; i < SAMPLE_ELEMS; i++) {
        int first = i / SAMPLE_THREADS * SAMPLE_THREADS;
        wrong += !(out[i] == (float)(first + SAMPLE_THREADS - (i - first)));
    }
    return wrong;
}

static void test_right_in_any_order(void **state) {
    (void)state;
    float in[SAMPLE_ELEMS], out[SAMPLE_ELEMS];
    fill(in);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        emulator_seed(seed);
        assert_true(sample_kernel_run("reverse", out, in));
        assert_int_equal(wrong_reversed(out), 0);
        assert_true(sample_kernel_run("primitives", out, in));
        assert_memory_equal(out, in, sizeof in);
        assert_true(sample_kernel_run("block_sum", out, in));
        for (int i = 0; i < SAMPLE_ELEMS; i++) { /* of first+1 .. first+threads: exact in f32 */
            int first = i / SAMPLE_THREADS * SAMPLE_THREADS;
            assert_true(out[i] == (float)(SAMPLE_THREADS * first + SAMPLE_THREADS * (SAMPLE_THREADS + 1) / 2));
        }
    }
    emulator_seed(0);
    assert_int_equal(cudart_memory_used(), 0);
}

static void test_missing_barrier(void **state) {
    (void)state;
    float in[SAMPLE_ELEMS], out[SAMPLE_ELEMS];
    fill(in);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        emulator_seed(seed);
        assert_true(sample_kernel_run("missing_barrier", out, in));
        assert_true(wrong_reversed(out) > 0);
    }
    emulator_seed(0);
}

/* Seen only where lanes are not run in order. */
static void test_lockstep(void **state) {
    (void)state;
    float in[SAMPLE_ELEMS], out[SAMPLE_ELEMS];
    fill(in);
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        int wrong = 0;
        emulator_seed(seed);
        assert_true(sample_kernel_run("lockstep", out, in));
        for (int i = 0; i < SAMPLE_ELEMS; i++)
            wrong += !(out[i] == in[i % SAMPLE_THREADS % 32 ? i - 1 : i]);
        if ((seed == 0) != (wrong == 0))
            fail_msg("seed %d: %d elements are wrong", (int)seed, wrong);
    }
    emulator_seed(0);
}

static void test_unwritten_shared_memory(void **state) {
    (void)state;
    static const char *const kernels[] = {"unwritten_static", "unwritten_dynamic"};
    float in[SAMPLE_ELEMS], out[SAMPLE_ELEMS];
    fill(in);
    assert_true(sample_kernel_run("reverse", out, in)); /* leaves numbers behind */
    for (int k = 0; k < 2; k++) {
        assert_true(sample_kernel_run(kernels[k], out, in));
        for (int i = 0; i < SAMPLE_ELEMS; i++)
            assert_true(i % SAMPLE_THREADS == 5 ? isnan(out[i]) : out[i] == 1);
    }
}

/* The kernel ends a program that runs it, with a line that contains `text`. */
static void check_dies(const char *kernel, const char *text) {
    char line[64], output[8192];
    char program[4096] = {0};
    assert_true(readlink("/proc/self/exe", program, sizeof program - 1) > 0);
    for (int seed = 0; seed < 3; seed++) {
        char command[sizeof program + 64];
        snprintf(command, sizeof command, "'%s' --run %s %d 2>&1", program, kernel, seed);
        FILE *child = popen(command, "r");
        assert_non_null(child);
        size_t size = fread(output, 1, sizeof output - 1, child);
        while (fread(line, 1, sizeof line, child) > 0) {}
        output[size] = 0;
        assert_int_not_equal(pclose(child), 0);
        if (!strstr(output, text))
            fail_msg("%s: expected '%s', found '%s'", kernel, text, output);
    }
}

static void test_fatal_faults(void **state) {
    (void)state;
    check_dies("divergent", "divergent: waits for the block at ");
    check_dies("barrier_in_warp", "divergent: this thread waits for lanes");
    check_dies("dishonest_mask", "lanes ffff0000 of it have ended or never were");
    check_dies("outside_mask", "is not in its own mask 0000ffff");
    check_dies("reads_outside_mask", "reads lane 20, which is not in the mask 0000ffff");
    check_dies("large_block", "kernel reverse: blocks of 1025 x 1 x 1 threads");
    check_dies("large_shared", "kernel block_sum: 65536 bytes of dynamic shared memory without cudaFuncSetAttribute");
    check_dies("host_pointer", "is not memory of the device");
}

static void test_out_of_bounds(void **state) {
    (void)state;
#ifdef __SANITIZE_ADDRESS__
    check_dies("beyond_global", "heap-buffer-overflow");
    check_dies("beyond_dynamic", "use-after-poison");
#else
    skip(); /* make asan */
#endif
}

static int run(const char *kernel, const char *seed) {
    float in[SAMPLE_ELEMS], out[SAMPLE_ELEMS];
    fill(in);
    emulator_seed(strtoull(seed, NULL, 10));
    sample_kernel_run(kernel, out, in);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_in_any_order), cmocka_unit_test(test_missing_barrier),
        cmocka_unit_test(test_lockstep), cmocka_unit_test(test_unwritten_shared_memory),
        cmocka_unit_test(test_fatal_faults), cmocka_unit_test(test_out_of_bounds),
    };
    if (argc == 4 && strcmp(argv[1], "--run") == 0)
        return run(argv[2], argv[3]);
    return cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0;
}
