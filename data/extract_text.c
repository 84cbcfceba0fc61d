/* build/extract_text UNPACKED OUT: the public-domain prose of four Debian packages, unpacked into one folder, as text
 * files. data/get_text.sh fetches and unpacks them. */
#define _POSIX_C_SOURCE 200809L
#include "base/config.h"
#include "base/file.h"
#include "base/report.h"
#include "data/extract.h"

#include <glob.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_SIZE = 1024 };

typedef struct Arguments {
    bool json;
} Arguments;

static const Option options[] = {
    {"json", OPTION_BOOL, offsetof(Arguments, json), "no", 0, 0, NULL, "one JSON object per row"},
};

static const char usage[] = "extract_text [options] UNPACKED OUT\n"
                            "Writes OUT/NAME.txt for each text in UNPACKED, a folder with the unpacked packages\n"
                            "r-cran-janeaustenr, sword-comm-tdavid, sword-comm-mhcc and sword-text-web.";

/* Paths below the unpacked root; SWORD keeps a testament per file, the Old one first. */
static const struct {
    const char *name, *pattern;
    Status (*extract)(Prose *prose, const char *path);
} texts[] = {
    {"austen", "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb", extract_rdb},
    {"tdavid", "usr/share/sword/modules/*/*/tdavid/[on]t.?zs", extract_sword},
    {"mhcc", "usr/share/sword/modules/*/*/mhcc/[on]t.?zs", extract_sword},
    {"web", "usr/share/sword/modules/*/*/engWEB*/[on]t.?zs", extract_sword},
};
enum { TEXT_COUNT = sizeof texts / sizeof texts[0] };

/* Appends all files that match, the last name first: "ot" before "nt". */
static Status extract_all(int i, const char *root, Prose *prose) {
    char pattern[PATH_SIZE];
    if (snprintf(pattern, sizeof pattern, "%s/%s", root, texts[i].pattern) >= (int)sizeof pattern)
        return bad_input("%s: the name is too long", root);
    glob_t found = {0};
    Status status = glob(pattern, 0, NULL, &found) == 0 ? OK : bad_input("%s: no such file", pattern);
    for (size_t k = found.gl_pathc; status == OK && k-- > 0;)
        status = texts[i].extract(prose, found.gl_pathv[k]);
    globfree(&found);
    return status;
}

static Status write_text(const char *folder, const char *name, const Prose *prose) {
    char path[PATH_SIZE];
    if (snprintf(path, sizeof path, "%s/%s.txt", folder, name) >= (int)sizeof path)
        return bad_input("%s: the name is too long", folder);
    AtomicFile file;
    TRY(atomic_open(&file, path));
    fwrite(prose->bytes, 1, prose->size, file.stream);
    putc('\n', file.stream);
    return atomic_commit(&file);
}

static Status extract_one(int i, const char *root, const char *folder, Report *report) {
    Prose prose = {0};
    Status status = extract_all(i, root, &prose);
    if (status == OK && prose.size == 0)
        status = bad_input("%s: expected text in %s, found none", root, texts[i].pattern);
    if (status == OK)
        status = write_text(folder, texts[i].name, &prose);
    if (status == OK)
        report_row(report, (ReportValue[]){{.text = texts[i].name}, {.number = 1e-6 * (double)(prose.size + 1)}});
    free(prose.bytes);
    return status;
}

static Status run(const char *root, const char *folder, bool json) {
    static const ReportColumn columns[] = {{"text", "text", "%s"}, {"size_mb", "MB", "%.2f"}};
    Report report = {.out = stdout, .json = json, .columns = columns, .count = 2};
    TRY(folder_create(folder));
    for (int i = 0; i < TEXT_COUNT; i++)
        TRY(extract_one(i, root, folder, &report));
    return OK;
}

int main(int argc, char **argv) {
    Arguments arguments;
    const char *positional[2];
    int count;
    Status status = args_parse(usage, options, 1, &arguments, argc, argv, positional, 2, &count);
    if (status == OK && count != 2)
        status = bad_input("expected UNPACKED and OUT; --help explains");
    if (status == OK)
        status = run(positional[0], positional[1], arguments.json);
    return error_exit_code("extract_text", status);
}
