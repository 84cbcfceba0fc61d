/* base/config.c and base/report.c: what is accepted, and the one line for what is not. */
#define _POSIX_C_SOURCE 200809L
#include "tests/check.h"

#include "base/config.h"
#include "base/report.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Target {
    int64_t count;
    double rate;
    bool flag;
    char name[OPTION_TEXT], file[OPTION_TEXT];
    int kind;
} Target;

static const Option options[] = {
    {"count", OPTION_INT, offsetof(Target, count), "3", 1, 4096, NULL, "a number"},
    {"rate", OPTION_FLOAT, offsetof(Target, rate), "0.5", 0, 1, NULL, "a share"},
    {"flag", OPTION_BOOL, offsetof(Target, flag), "no", 0, 0, NULL, "a switch"},
    {"name", OPTION_STRING, offsetof(Target, name), "x", 0, 0, NULL, "a text"},
    {"file", OPTION_STRING, offsetof(Target, file), "f", 1, 0, NULL, "a name"},
    {"big_kind", OPTION_CHOICE, offsetof(Target, kind), "red", 0, 0, "red|green|blue", "a colour"},
};

static Target target;
static const ConfigSection section = {"part", options, 6, &target};

static Status read_bytes(Config *config, const char *text, size_t size) {
    char path[] = "/tmp/tandem_config_XXXXXX";
    int file = mkstemp(path);
    assert_true(file >= 0);
    assert_int_equal(write(file, text, size), size);
    close(file);
    Status status = config_read_file(config, path);
    unlink(path);
    return status;
}

static Status read_text(Config *config, const char *text) { return read_bytes(config, text, strlen(text)); }

static void test_values(void **state) {
    (void)state;
    Config *config = config_create(&section, 1);
    assert_int_equal(target.count, 3);
    assert_string_equal(target.name, "x");
    assert_ok(read_text(config, "# comment\n[part]\ncount = 2K ; inline\nrate=0.25\nflag = on\nname = a b c\nbig_kind = blue\n"));
    assert_int_equal(target.count, 2048);
    assert_close(target.rate, 0.25, 0);
    assert_true(target.flag);
    assert_string_equal(target.name, "a b c");
    assert_int_equal(target.kind, 2);
    assert_ok(config_assign(config, "part.count=7"));
    assert_int_equal(target.count, 7);
    /* indented keys and sections, no line's end at the file's end; an empty text is one */
    assert_ok(read_text(config, "  [part]\r\n name = a\n\tcount = 8\n   \n  ; comment\n\n    rate = 0.125"));
    assert_string_equal(target.name, "a");
    assert_int_equal(target.count, 8);
    assert_close(target.rate, 0.125, 0);
    assert_ok(read_text(config, "\xef\xbb\xbf[part]\nname =\n"));
    assert_string_equal(target.name, "");
    char longest[300] = "[part]\nname = ";
    memset(longest + strlen(longest), 'a', 198 - strlen("name = "));
    assert_ok(read_text(config, strcat(longest, "\n")));
    assert_int_equal(strlen(target.name), 198 - strlen("name = "));
    config_destroy(config);
}

static void test_refusals(void **state) {
    (void)state;
    Config *config = config_create(&section, 1);
    assert_refused(read_text(config, "[part]\n\ncount = many\n"), ":3: part.count: expected an integer in [1, 4096], found 'many'");
    assert_refused(read_text(config, "[part]\ncount = 5K\n"), "[1, 4096]");
    assert_refused(read_text(config, "[part]\ncount = 0\n"), "found '0'");
    assert_refused(read_text(config, "[part]\ncount = 3.5\n"), "found '3.5'");
    assert_refused(read_text(config, "[part]\nrate = nan\n"), "found 'nan'");
    assert_refused(read_text(config, "[part]\nrate = 2\n"), "[0, 1]");
    assert_refused(read_text(config, "[part]\nbig_kind = pink\n"), "one of red|green|blue");
    assert_refused(read_text(config, "[part]\nbig_kind = re\n"), "one of red|green|blue");
    assert_refused(read_text(config, "[part]\nflag = maybe\n"), "yes or no");
    assert_refused(read_text(config, "[part]\ncuont = 3\n"), ":2: unknown key 'cuont' in section [part]");
    assert_refused(read_text(config, "[prat]\ncount = 3\n"), "unknown section [prat]");
    assert_refused(read_text(config, "count = 3\n"), ":1: expected a section in front of 'count', such as [train]");
    assert_refused(read_text(config, "[part]\nnonsense\n"), ":2: expected 'key = value'");
    assert_refused(read_text(config, "[part\ncount = 0\n"), ":1: expected 'key = value' or '[section]'");
    assert_refused(read_text(config, "[part]\ncount = 0\n[part\n"), ":2: part.count");
    assert_refused(read_text(config, "[part]\ncount = 5\n\n[part]\nrate = 1\ncount = 5\n"),
                   ":6: part.count: expected once, found in line 2 already");
    assert_refused(read_text(config, "[part]\nfile =\n"), ":2: part.file: expected a name of at most 255 bytes, found");
    assert_refused(config_assign(config, "part.file="), "command line: part.file: expected a name");
    assert_refused(read_bytes(config, "[part]\ncount\0 = 4\n", 18), ":2: expected text, found a NUL byte");
    assert_refused(read_bytes(config, "\xff\xfe[\0p\0a\0r\0t\0]\0\n\0", 16), ":1: expected text");
    assert_refused(config_read_file(config, "/nonexistent/x.cfg"), "/nonexistent/x.cfg: cannot read");
    assert_refused(config_read_file(config, "/tmp"), "/tmp");
    assert_refused(config_assign(config, "count=3"), "section.key=value");
    assert_refused(config_assign(config, "part.count"), "section.key=value");
    char text[2000] = "[part]\nname = ";
    memset(text + strlen(text), 'a', 1000);
    assert_refused(read_text(config, text), ":2: expected a line of at most 198 bytes; longer values can be given on the");
    config_destroy(config);
}

static void test_error_names_the_line(void **state) {
    (void)state;
    Config *config = config_create(&section, 1);
    config_error(config, "part.rate", "too odd");
    assert_string_equal(error_line(), "default: part.rate: too odd");
    assert_ok(read_text(config, "[part]\nrate = 0.75\n"));
    config_error(config, "part.rate", "too odd");
    assert_non_null(strstr(error_line(), ":2: part.rate: too odd"));
    assert_ok(config_assign(config, "part.rate=0.5"));
    config_error(config, "part.rate", "too odd");
    assert_string_equal(error_line(), "command line: part.rate: too odd");
    config_destroy(config);
}

static Status parse(int argc, char **argv, int *count) {
    static const char *positional[2];
    return args_parse("x", options, 6, &target, argc, argv, positional, 2, count);
}

static void test_args(void **state) {
    (void)state;
    int count;
    char *good[] = {"x", "--count", "9", "one", "--rate=0.125", "--flag", "--big-kind", "green", "--", "--two", NULL};
    assert_ok(parse(10, good, &count));
    assert_int_equal(count, 2);
    assert_int_equal(target.count, 9);
    assert_int_equal(target.kind, 1);
    assert_true(target.flag);
    char *unknown[] = {"x", "--cuont", "9", NULL}, *nothing[] = {"x", "--count", NULL}, *many[] = {"x", "1", "2", "3", NULL};
    char *empty[] = {"x", "--file=", NULL};
    assert_refused(parse(2, empty, &count), "--file: expected a name of at most 255 bytes, found ''");
    assert_refused(parse(3, unknown, &count), "--cuont");
    assert_refused(parse(2, nothing, &count), "--count: expected an integer in [1, 4096], found nothing");
    assert_refused(parse(4, many, &count), "unexpected argument '3'");
}

static void test_report_json(void **state) {
    (void)state;
    static const ReportColumn columns[] = {{"name", "name", "%s"}, {"time_us", "time (us)", "%.1f"}, {"x", "x", "%.0f"}};
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);
    Report report = {.out = out, .json = true, .columns = columns, .count = 3};
    report_row(&report, (ReportValue[]){{.text = "a\"b\n"}, {.number = 1.5}, {.number = NAN}});
    fclose(out);
    assert_string_equal(text, "{\"name\": \"a\\\"b\\u000a\", \"time_us\": 1.5, \"x\": null}\n");
    free(text);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_values),      cmocka_unit_test(test_refusals), cmocka_unit_test(test_error_names_the_line),
    cmocka_unit_test(test_args),        cmocka_unit_test(test_report_json),
};
CHECK_MAIN(tests)
