/* base/log.c: log.jsonl in a bad world, and what is shown of numbers that are none. */
#define _POSIX_C_SOURCE 200809L
#include "tests/folder.h"

#include "base/log.h"

#include <sys/stat.h>

static const char *path(void) { return in_folder("log.jsonl"); }

static const char *read_text(const char *name) {
    static char text[8192];
    FILE *file = fopen(name, "rb");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    return text;
}

/* Standard output or error go to a file from redirect() to restore(). */
typedef struct Redirect {
    int descriptor, saved;
    char name[96];
} Redirect;

static Redirect redirect(FILE *stream) {
    Redirect r = {.descriptor = fileno(stream)};
    snprintf(r.name, sizeof r.name, "%s/output", folder);
    fflush(stream);
    r.saved = dup(r.descriptor);
    FILE *file = fopen(r.name, "w");
    assert_non_null(file);
    dup2(fileno(file), r.descriptor);
    fclose(file);
    return r;
}

static const char *restore(const Redirect *r) {
    fflush(NULL);
    dup2(r->saved, r->descriptor);
    close(r->saved);
    return read_text(r->name);
}

/* A log of three steps on `path`; the second has a validation with that loss. */
static void run(int64_t done, double val_loss) {
    Log *log = log_open(done + 3, 1, true);
    Config *config = config_create(NULL, 0);
    assert_ok(log_jsonl(log, path(), done));
    log_start(log, config);
    for (int64_t step = done + 1; step <= done + 3; step++)
        log_step(log, &(StepLog){.step = step, .loss = -(double)NAN, .step_ms = 1, .validated = step == done + 2,
                                 .val_loss = val_loss, .val_bits_per_byte = NAN});
    log_summary(log);
    log_close(log);
    config_destroy(config);
}

static int count(const char *text, const char *what) {
    int found = 0;
    for (; (text = strstr(text, what)) != NULL; text += strlen(what))
        found++;
    return found;
}

static void test_what_is_no_number(void **state) {
    (void)state;
    Redirect out = redirect(stdout);
    run(0, NAN);
    const char *shown = restore(&out);
    assert_int_equal(count(shown, "loss nan"), 3);
    assert_int_equal(count(shown, "-nan"), 0);
    assert_int_equal(count(shown, "val nan"), 1);
    assert_int_equal(count(shown, "validation nan"), 1);
    const char *lines = read_text(path());
    assert_int_equal(count(lines, "\"loss\":null"), 3);
    assert_int_equal(count(lines, "\"val_loss\":null"), 1);
    assert_int_equal(count(lines, "val_bits_per_byte"), 0);
    run(0, 2.5);
    assert_int_equal(count(read_text(path()), "\"val_loss\":2.5"), 1);
}

static void test_full_disk(void **state) {
    (void)state;
    unlink(path());
    assert_int_equal(symlink("/dev/full", path()), 0);
    Redirect err = redirect(stderr);
    run(0, 1);
    const char *shown = restore(&err);
    assert_int_equal(count(shown, "warning: "), 1);
    assert_int_equal(count(shown, "log.jsonl: not written: No space left on device"), 1);
    unlink(path());
}

static void test_pipe_is_refused(void **state) {
    (void)state;
    assert_int_equal(mkfifo(path(), 0600), 0);
    Log *log = log_open(1, 1, true);
    alarm(10); /* waiting for a reader would be for ever */
    assert_refused(log_jsonl(log, path(), 0), "log.jsonl: expected a regular file");
    alarm(0);
    log_close(log);
    unlink(path());
}

#define HEAD "{\"options\":{},\"run\":{}}\n"
#define STEP(n) "{\"step\":" #n ",\"loss\":1}\n"

static void check_kept(const char *text, size_t size, const char *kept) {
    make_file("log.jsonl", text, size);
    Log *log = log_open(9, 1, true);
    assert_ok(log_jsonl(log, path(), 2));
    log_close(log);
    assert_string_equal(read_text(path()), kept);
}

static void test_resume_keeps_whole_lines(void **state) {
    (void)state;
    static const char *const tails[] = {"", STEP(3) STEP(4), "{\"st", "{\"step\":2,\"lo", "\n", "null\n",
                                        "{\"step\":2,\"loss\":1}", "{\"step\":2}garbage\n", "{\"other\":1}\n",
                                        STEP(3) "{\"step\":4"};
    char text[256];
    for (size_t i = 0; i < sizeof tails / sizeof tails[0]; i++) {
        snprintf(text, sizeof text, HEAD STEP(1) STEP(2) "%s", tails[i]);
        check_kept(text, strlen(text), HEAD STEP(1) STEP(2));
    }
    /* half a line, to which an earlier run was appended; zeros, as a power cut leaves them */
    const char middle[] = HEAD STEP(1) "{\"step\":2,\"lo" HEAD STEP(2) "\0\0\0\n" HEAD STEP(3);
    check_kept(middle, sizeof middle - 1, HEAD STEP(1) STEP(2) HEAD);
    run(2, 1);
    const char *lines = read_text(path());
    assert_int_equal(strncmp(lines, HEAD STEP(1) STEP(2) HEAD, strlen(HEAD STEP(1) STEP(2) HEAD)), 0);
    assert_int_equal(count(lines, "\n"), 4 + 4);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_what_is_no_number),
    cmocka_unit_test(test_full_disk),
    cmocka_unit_test(test_pipe_is_refused),
    cmocka_unit_test(test_resume_keeps_whole_lines),
};

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, set_up, tear_down) ? 1 : 0;
}
