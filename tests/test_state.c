/* Training state: what is saved comes back, and nothing else does. */
#define _POSIX_C_SOURCE 200809L
#include "base/state.h"

#include "base/random.h"
#include "tests/check.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Fixture {
    char folder[64], path[128];
    int64_t step;
    float moments[1001];
    char text[13];
} Fixture;

static int setup(void **state) {
    Fixture *f = calloc(1, sizeof *f);
    snprintf(f->folder, sizeof f->folder, "/tmp/tandem_test_XXXXXX");
    if (!mkdtemp(f->folder))
        return 1;
    snprintf(f->path, sizeof f->path, "%s/run.state", f->folder);
    f->step = 0x123456789abcdef;
    for (int i = 0; i < 1001; i++)
        f->moments[i] = (float)random_normal(1, 0, (uint64_t)i);
    memcpy(f->text, "thirteen byte", sizeof f->text);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    Fixture *f = *state;
    unlink(f->path);
    int left = rmdir(f->folder);
    free(f);
    return left;
}

static void save(const Fixture *f) {
    const StateItem items[] = {{"step", &f->step, sizeof f->step},
                               {"m", f->moments, sizeof f->moments},
                               {"none", NULL, 0},
                               {"text", f->text, sizeof f->text}};
    assert_ok(state_save(f->path, items, 4));
}

static uint8_t *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(*size + 8);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

static void write_file(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fwrite(bytes, 1, size, file);
    assert_int_equal(fclose(file), 0);
}

#define assert_line_names(path)                                                                                    \
    do {                                                                                                           \
        assert_non_null(strstr(error_line(), (path)));                                                             \
        assert_null(strchr(error_line(), '\n'));                                                                   \
    } while (0)

static void state_comes_back_in_any_order(void **test_state) {
    Fixture *f = *test_state, found = {0};
    save(f);
    State *state;
    assert_ok(state_open(&state, f->path));
    assert_true(state_has(state, "text") && state_has(state, "none") && !state_has(state, "tex"));
    assert_ok(state_read(state, "text", found.text, sizeof found.text));
    assert_ok(state_read(state, "m", found.moments, sizeof found.moments));
    assert_ok(state_read(state, "none", NULL, 0));
    assert_ok(state_read(state, "step", &found.step, sizeof found.step));
    assert_ok(state_read(state, "m", found.moments, sizeof found.moments));
    state_close(state);
    assert_int_equal(found.step, f->step);
    assert_memory_equal(found.moments, f->moments, sizeof found.moments);
    assert_memory_equal(found.text, f->text, sizeof found.text);
}

static void state_replaces_an_older_file(void **test_state) {
    Fixture *f = *test_state;
    save(f);
    f->step++;
    save(f);
    int64_t step;
    State *state;
    assert_ok(state_open(&state, f->path));
    assert_ok(state_read(state, "step", &step, sizeof step));
    state_close(state);
    assert_int_equal(step, f->step);
    assert_ok(state_save(f->path, NULL, 0));
    assert_ok(state_open(&state, f->path));
    assert_refused(state_read(state, "step", &step, sizeof step), "expected an array 'step'");
    state_close(state);
}

/* The bytes of docs/formats.md, with the checksum written down a second time. */
static uint64_t documented_checksum(const uint8_t *bytes, size_t size) {
    uint64_t sum = 0;
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        for (size_t i = 0; i < 8 && at + i < size; i++)
            word |= (uint64_t)bytes[at + i] << (8 * i);
        sum ^= word;
        sum = (sum << 27) + (sum >> 37);
        sum *= UINT64_C(11400714819323198485);
    }
    sum = (sum ^ sum >> 30) * UINT64_C(13787848793156543929);
    sum = (sum ^ sum >> 27) * UINT64_C(10723151780598845931);
    return sum ^ sum >> 31;
}

static void state_is_written_as_documented(void **test_state) {
    Fixture *f = *test_state;
    const StateItem items[] = {{"step", &f->step, 8}, {"text", f->text, 13}};
    assert_ok(state_save(f->path, items, 2));
    uint8_t expected[16 + 2 * 64 + 8 + 16 + 24] = "tandemst\1\0\0\0\2\0\0\0step";
    expected[16 + 56] = 8;
    memcpy(expected + 80, "text", 4);
    expected[80 + 56] = 13;
    uint64_t sums[3] = {documented_checksum(expected, 144)};
    memcpy(expected + 144, &sums[0], 8);
    memcpy(expected + 152, &f->step, 8);
    sums[1] = documented_checksum(expected + 152, 8);
    memcpy(expected + 160, &sums[1], 8);
    memcpy(expected + 168, f->text, 13);
    sums[2] = documented_checksum(expected + 168, 13);
    memcpy(expected + 184, &sums[2], 8);
    size_t size;
    uint8_t *written = read_file(f->path, &size);
    assert_int_equal(size, sizeof expected);
    assert_memory_equal(written, expected, size);
    free(written);
}

static void state_refuses_wrong_names_and_sizes(void **test_state) {
    Fixture *f = *test_state;
    save(f);
    State *state;
    float values[1002];
    assert_ok(state_open(&state, f->path));
    assert_refused(state_read(state, "v", values, 4), "expected an array 'v', found none");
    assert_refused(state_read(state, "m", values, sizeof values), "'m': expected 4008 bytes, found 4004");
    assert_line_names(f->path);
    assert_ok(state_read(state, "m", values, 4004));
    state_close(state);
}

static void state_refuses_other_files(void **test_state) {
    Fixture *f = *test_state;
    State *state;
    assert_refused(state_open(&state, f->path), "cannot open");
    assert_null(state);
    state_close(state);
    assert_refused(state_open(&state, f->folder), "regular file");
    write_file(f->path, "", 0);
    assert_refused(state_open(&state, f->path), "only 0 bytes");
    char text[100];
    memset(text, 'x', sizeof text);
    write_file(f->path, text, sizeof text);
    assert_refused(state_open(&state, f->path), "magic");
    memcpy(text, "tandemst\2\0\0\0", 12);
    write_file(f->path, text, sizeof text);
    assert_refused(state_open(&state, f->path), "version 1, found version 2");
    memcpy(text, "tandemst\1\0\0\0\377\377\377\377", 16);
    write_file(f->path, text, sizeof text);
    assert_refused(state_open(&state, f->path), "at most 65536 arrays");
    memcpy(text, "tandemst\1\0\0\0\377\0\0\0", 16);
    write_file(f->path, text, sizeof text);
    assert_refused(state_open(&state, f->path), "found 100: truncated");
    assert_line_names(f->path);
}

static Status read_all(const char *path) {
    Fixture found;
    State *state;
    TRY(state_open(&state, path));
    Status status = state_read(state, "step", &found.step, sizeof found.step);
    if (status == OK)
        status = state_read(state, "m", found.moments, sizeof found.moments);
    if (status == OK)
        status = state_read(state, "none", NULL, 0);
    if (status == OK)
        status = state_read(state, "text", found.text, sizeof found.text);
    state_close(state);
    return status;
}

static void state_refuses_every_truncation(void **test_state) {
    Fixture *f = *test_state;
    save(f);
    size_t size;
    uint8_t *bytes = read_file(f->path, &size);
    for (size_t kept = 0; kept < size; kept += kept < 300 || kept > size - 100 ? 1 : 97) {
        write_file(f->path, bytes, kept);
        assert_int_equal(read_all(f->path), BAD_INPUT);
        assert_line_names(f->path);
    }
    memset(bytes + size, 0, 8);
    write_file(f->path, bytes, size + 8);
    assert_refused(read_all(f->path), "expected");
    free(bytes);
}

/* One flipped bit anywhere is seen, in the padding too. */
static void state_refuses_every_flipped_bit(void **test_state) {
    Fixture *f = *test_state;
    save(f);
    size_t size;
    uint8_t *bytes = read_file(f->path, &size);
    assert_ok(read_all(f->path));
    for (size_t at = 0; at < size; at += at < 300 || at > size - 100 ? 1 : 13) {
        uint8_t bit = (uint8_t)(1 << at % 8);
        bytes[at] ^= bit;
        write_file(f->path, bytes, size);
        if (read_all(f->path) != BAD_INPUT)
            fail_msg("a flipped bit in byte %zu of %zu was not noticed", at, size);
        assert_line_names(f->path);
        bytes[at] ^= bit;
    }
    free(bytes);
}

static void state_save_leaves_nothing_when_it_fails(void **test_state) {
    Fixture *f = *test_state;
    char path[160];
    snprintf(path, sizeof path, "%s/none/run.state", f->folder);
    const StateItem item = {"step", &f->step, sizeof f->step};
    assert_int_not_equal(state_save(path, &item, 1), OK);
    assert_line_names(path);
}

#define STATE_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
static const struct CMUnitTest tests[] = {
    STATE_TEST(state_comes_back_in_any_order),
    STATE_TEST(state_replaces_an_older_file),
    STATE_TEST(state_is_written_as_documented),
    STATE_TEST(state_refuses_wrong_names_and_sizes),
    STATE_TEST(state_refuses_other_files),
    STATE_TEST(state_refuses_every_truncation),
    STATE_TEST(state_refuses_every_flipped_bit),
    STATE_TEST(state_save_leaves_nothing_when_it_fails),
};

CHECK_MAIN(tests)
