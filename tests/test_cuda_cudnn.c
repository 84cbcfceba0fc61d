/* Without a card: cuDNN accepts the graphs of attention for the cards that are described in tests/data/cudnn_*.json, at
 * every head size that we promise, and refuses other head sizes, and graphs with a wrong operation in them. In emulated
 * builds the stand-in is asked, which knows no wrong operation from a right one. */
#include "base/file.h"
#include "model/cudnn_graph.h"
#include "tests/check.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* The formulas once more, so that a test can put a wrong operation into them: the spoilt-th, -1 for none. */
static int spoilt = -1, operations;
static bool spoil(void) { return operations++ == spoilt; }

#define cudnn_binary(g, operation, ...) \
    cudnn_binary(g, spoil() ? (operation) == BINARY_SUB ? BINARY_ADD : BINARY_SUB : (operation), __VA_ARGS__)
#define cudnn_unary(g, operation, ...) \
    cudnn_unary(g, spoil() ? (operation) == UNARY_EXP ? UNARY_LOG : UNARY_EXP : (operation), __VA_ARGS__)
#define cudnn_reduce(g, operation, ...) \
    cudnn_reduce(g, spoil() ? (operation) == REDUCTION_MAX ? REDUCTION_SUM : REDUCTION_MAX : (operation), __VA_ARGS__)
#define cudnn_index(g, x, axis, ...) cudnn_index(g, x, spoil() ? 5 - (axis) : (axis), __VA_ARGS__)
#include "model/attention_cudnn.c"

/* cuDNN asks for the driver's library even where it needs no device: the toolkit's stub will do. */
static bool load_driver(void) {
    static const char *const folders[] = {"lib/stubs", "lib64/stubs"};
    const char *home = getenv("CUDA_HOME");
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL))
        return true;
    for (int i = 0; i < 2; i++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s/libcuda.so", home ? home : "/usr/local/cuda", folders[i]);
        if (dlopen(path, RTLD_NOW | RTLD_GLOBAL))
            return true;
    }
    return false;
}

/* NUL-terminated; to be freed. */
static char *properties_of(const char *card) {
    char path[64];
    FileMap map;
    snprintf(path, sizeof path, "tests/data/cudnn_%s.json", card);
    assert_ok(file_map(&map, path));
    char *text = calloc(map.size + 1, 1);
    assert_non_null(text);
    memcpy(text, map.bytes, map.size);
    file_unmap(&map);
    return text;
}

static const char *const cards[] = {"sm80", "sm90"};
static const char *const passes[] = {"forward", "backward", "deterministic backward"};

static void skip_because(const char *why) {
    print_message("skipped: %s\n", why);
    skip();
}

/* What is said about a graph that is beyond doubt. */
static int engines(void) {
    char why[256], *properties = properties_of("sm90");
    int count = cudnn_attention_engines(properties, CUDNN_FORWARD, 1, 64, 64, 1, why, sizeof why);
    free(properties);
    return count;
}

static void skip_without_driver(void) {
    if (!load_driver() && engines() == 0)
        skip_because("no libcuda, nor the toolkit's stub of it in CUDA_HOME");
}

static void test_accepted(void **state) {
    (void)state;
    static const int sizes[] = {64, 80, 96, 128}, lengths[] = {1024, 1000, 37};
    skip_without_driver();
    for (int card = 0; card < 2; card++) {
        char *properties = properties_of(cards[card]), why[256];
        for (int i = 0; i < 4 * 3 * 3; i++) {
            int size = sizes[i / 9], length = lengths[i / 3 % 3];
            CudnnPass pass = (CudnnPass)(i % 3);
            if (cudnn_attention_engines(properties, pass, 4, length, 12 * size, 12, why, sizeof why) == 0)
                fail_msg("%s, %s, T %d, head size %d: %s", cards[card], passes[pass], length, size, why);
        }
        free(properties);
    }
}

static void test_refused(void **state) {
    (void)state;
    skip_without_driver();
    for (int card = 0; card < 2; card++) {
        char *properties = properties_of(cards[card]), why[256];
        for (int pass = 0; pass < 3; pass++) {
            assert_int_equal(
                cudnn_attention_engines(properties, (CudnnPass)pass, 4, 1024, 240, 12, why, sizeof why), 0);
            assert_non_null(strstr(why, "no engine for this shape"));
        }
        free(properties);
    }
}

/* cuDNN knows attention by its softmax and takes any function of the scores around it. So what it must refuse are wrong
 * operations in the softmax; of the others test_cuda_cudnn_results says that they are right. */
static void test_spoilt_graphs(void **state) {
    (void)state;
    /* per pass and operation; x must be refused */
    static const char *const refused[] = {"....xxxxxxx", "x.......x....", "x.......x..."};
    skip_without_driver();
    if (engines() < 0)
        skip_because("an emulated build has no cuDNN to ask");
    char *properties = properties_of("sm90"), why[256];
    for (int pass = 0; pass < 3; pass++)
        for (spoilt = 0; refused[pass][spoilt]; spoilt++) {
            operations = 0;
            int count = cudnn_attention_engines(properties, (CudnnPass)pass, 4, 1024, 768, 12, why, sizeof why);
            assert_int_equal(operations, strlen(refused[pass]));
            if (refused[pass][spoilt] == 'x' && count != 0)
                fail_msg("%s with operation %d spoilt is taken", passes[pass], spoilt);
        }
    spoilt = -1;
    free(properties);
}

static const struct CMUnitTest tests[] = {cmocka_unit_test(test_accepted), cmocka_unit_test(test_refused),
                                          cmocka_unit_test(test_spoilt_graphs)};

CHECK_MAIN(tests)
