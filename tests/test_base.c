/* base: files that are complete or absent, folders, the parameter table, counter-based random numbers. */
#define _DEFAULT_SOURCE
#include "tests/folder.h"

#include "base/file.h"
#include "base/machine.h"
#include "base/memory.h"
#include "base/param.h"
#include "base/random.h"

#include <sys/stat.h>

static void write_file(const char *name, const char *text) {
    AtomicFile file;
    assert_ok(atomic_open(&file, in_folder(name)));
    fputs(text, file.stream);
    assert_ok(atomic_commit(&file));
}

static void assert_content(const char *name, const char *text) {
    FileMap map;
    assert_ok(file_map(&map, in_folder(name)));
    assert_int_equal(map.size, strlen(text));
    assert_memory_equal(map.bytes, text, map.size);
    file_unmap(&map);
}

static void test_atomic_replace(void **state) {
    (void)state;
    write_file("a", "old");
    AtomicFile file;
    assert_ok(atomic_open(&file, in_folder("a")));
    fputs("new, half writ", file.stream);
    fflush(file.stream);
    assert_content("a", "old");
    atomic_discard(&file);
    assert_content("a", "old");
    write_file("a", "new");
    assert_content("a", "new");
    assert_int_equal(access(file.temporary, F_OK), -1);
}

static void test_atomic_full_disk(void **state) {
    (void)state;
    AtomicFile file;
    write_file("full", "good");
    assert_ok(atomic_open(&file, in_folder("full")));
    FILE *temporary = file.stream;
    file.stream = fopen("/dev/full", "wb"); /* every write fails with "no space left" */
    assert_non_null(file.stream);
    fputs("x", file.stream);
    assert_int_equal(atomic_commit(&file), FAULT);
    fclose(temporary);
    assert_non_null(strstr(error_line(), "full: not written: No space left"));
    assert_content("full", "good");
    assert_int_equal(access(file.temporary, F_OK), -1);
}

static void test_map_refusals(void **state) {
    (void)state;
    FileMap map;
    assert_refused(file_map(&map, in_folder("missing")), "missing: cannot open: No such file");
    assert_refused(file_map(&map, folder), "expected a regular file");
    write_file("empty", "");
    assert_refused(file_map(&map, in_folder("empty")), "is empty");
    assert_int_equal(mkfifo(in_folder("pipe"), 0600), 0);
    alarm(10); /* waiting for a writer would be for ever */
    assert_refused(file_map(&map, in_folder("pipe")), "pipe: expected a regular file");
    alarm(0);
    file_unmap(&map);
}

static void test_folders(void **state) {
    (void)state;
    assert_ok(folder_check_writable(in_folder("x/y/z")));
    assert_int_equal(access(in_folder("x"), F_OK), -1);
    assert_ok(folder_create(in_folder("x/y/z")));
    assert_ok(folder_create(in_folder("x/y/z")));
    write_file("x/file", "1");
    assert_refused(folder_create(in_folder("x/file/z")), "x/file");
    assert_refused(folder_check_writable(in_folder("x/file/z")), "is a file");
    assert_refused(folder_create(in_folder("x/file")), "expected a folder");
    assert_refused(folder_check_writable("/proc/1/nowhere"), "/proc/1/nowhere: folder is not writable");
}

static void test_param_table(void **state) {
    (void)state;
    ParamTable table = {0};
    param_add(&table, "lnw", -1, 1, 5);
    param_add(&table, "w", 1, 4, 3);
    param_add(&table, "b", 1, 1, 4);
    param_add(&table, "c", 1, 1, 2);
    param_add(&table, "b", 0, 1, 4);
    assert_int_equal(table.elems, 5 + 12 + 4 + 2 + 4);
    assert_int_equal(table.gradient_count, 4); /* lnw | w | b c | b of the next layer */
    assert_int_equal(table.gradients[2].elems, 6);
    assert_true(table.gradients[2].dense && !table.gradients[1].dense);
    int64_t offset = 0;
    for (int i = 0; i < table.gradient_count; i++) {
        assert_int_equal(table.gradients[i].offset, offset);
        offset += table.gradients[i].elems;
    }
    assert_int_equal(offset, table.elems);
    assert_int_equal(param_find(&table, "b", 0)->offset, 23);
    assert_null(param_find(&table, "b", 2));
    assert_true(param_find(&table, "w", 1)->decay && !param_find(&table, "lnw", -1)->decay);
    param_table_free(&table);
}

static void test_random(void **state) {
    (void)state;
    enum { COUNT = 200000 };
    double sum = 0, squares = 0, cubes = 0, product = 0;
    for (uint64_t i = 0; i < COUNT; i++) {
        double x = random_normal(1, 2, i), other = random_normal(1, 3, i);
        sum += x, squares += x * x, cubes += x * x * x, product += x * other;
    }
    double sigma = 1 / sqrt((double)COUNT); /* five standard errors of each estimate */
    assert_close(sum / COUNT, 0, 5 * sigma);
    assert_close(squares / COUNT, 1, 5 * sqrt(2) * sigma);
    assert_close(cubes / COUNT, 0, 5 * sqrt(15) * sigma);
    assert_close(product / COUNT, 0, 5 * sigma);
    assert_true(random_bits(1, 2, 3) == random_bits(1, 2, 3) && random_bits(1, 2, 3) != random_bits(1, 3, 2));
}

static void test_memory(void **state) {
    (void)state;
    const size_t sizes[] = {0, 1, 100, (4 << 20) + 1};
    for (int i = 0; i < 4; i++) {
        unsigned char *memory = memory_alloc(&host_memory, sizes[i]);
        assert_non_null(memory);
        assert_int_equal((uintptr_t)memory % 64, 0);
        for (size_t k = 0; k < sizes[i]; k += 4096)
            assert_int_equal(memory[k], 0);
        memory_free(&host_memory, memory);
    }
    assert_null(memory_alloc(&host_memory, (size_t)1 << 60));
    memory_free(&host_memory, NULL);
    assert_true(machine_cores() >= 1 && machine_all_cores() >= machine_cores());
    assert_true(machine_memory_available() > 0 && machine_peak_rss() > 0);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_atomic_replace), cmocka_unit_test(test_atomic_full_disk), cmocka_unit_test(test_map_refusals),
    cmocka_unit_test(test_folders),        cmocka_unit_test(test_param_table),      cmocka_unit_test(test_random),
    cmocka_unit_test(test_memory),
};

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, set_up, tear_down) ? 1 : 0;
}
