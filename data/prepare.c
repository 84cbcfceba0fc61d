/* build/prepare: texts to token shards.
 *
 *     text (mapped) --- windows of 1 MiB ---> tokenizer ---> shard writers --- all renamed at the very end ---> DIR
 *        | the first part, up to a line's end near 1 - val        train
 *        | the rest                                               val
 *
 * Texts are mapped and their pages given back behind the encoder, so a text of any size needs little memory. Standard
 * input and pipes are first written to a file without a name in DIR, since what is held out depends on where they end.
 * Shards keep temporary names until every one is complete: an error or a signal leaves DIR as it was, and what a killed
 * program could not remove, the next one of the same NAME does. */
#define _GNU_SOURCE
#include "base/clock.h"
#include "base/config.h"
#include "base/file.h"
#include "base/progress.h"
#include "base/report.h"
#include "data/shard.h"
#include "data/tokenizer.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WINDOW_BYTES = 1 << 20, PATH_SIZE = 512 };

typedef struct Arguments {
    char tokenizer[OPTION_TEXT], out[OPTION_TEXT];
    int64_t shard_tokens;
    double val;
    bool json;
} Arguments;

static const Option options[] = {
    {"tokenizer", OPTION_STRING, offsetof(Arguments, tokenizer), "gpt2", 1, 0, NULL,
     "gpt2, bytes, or a tokenizer file in llm.c's format"},
    {"out", OPTION_STRING, offsetof(Arguments, out), "data", 1, 0, NULL, "folder for the shards; made if missing"},
    {"shard_tokens", OPTION_INT, offsetof(Arguments, shard_tokens), "100000000", 1, SHARD_TOKENS_MAX, NULL,
     "tokens per shard; the last one is shorter"},
    {"val", OPTION_FLOAT, offsetof(Arguments, val), "0.02", 0, 1, NULL,
     "share of each text that is held out for validation"},
    {"json", OPTION_BOOL, offsetof(Arguments, json), "no", 0, 0, NULL, "the closing table as one JSON object per row"},
};
enum { OPTION_COUNT = sizeof options / sizeof options[0] };

static const char usage[] =
    "prepare [options] NAME [TEXT...]\n"
    "Turns texts into DIR/NAME_train_000000.bin ... and DIR/NAME_val_000000.bin ..., llm.c's token shards.\n"
    "Each TEXT is one document, an end-of-text token in front; '-', or none at all, is standard input.\n"
    "The last part of each text, --val of its bytes from the start of a line on, is the validation set, as a document\n"
    "of its own. So the same texts always give the same shards, and no validation text is trained on.";

typedef struct Split {
    const char *name;
    ShardWriter *writers; /* the last one is being written, the others are complete but not yet renamed */
    int writer_count;
    int64_t tokens, bytes;
    double seconds;
} Split;

typedef enum SplitIndex { TRAIN, VAL, SPLITS } SplitIndex;

typedef struct Prepare {
    Arguments arguments;
    const char *name;
    const char **texts;
    int text_count;
    Tokenizer *tokenizer;
    TokenArray ids; /* of one window */
    Split splits[SPLITS];
    Progress progress;
    int64_t bytes_done;
} Prepare;

static volatile sig_atomic_t signal_caught; /* checked between windows */

static void on_signal(int number) { signal_caught = number; }

static void catch_signals(void) {
    struct sigaction action = {.sa_handler = on_signal}; /* no SA_RESTART: reading a pipe must end too */
    const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        sigaction(numbers[i], &action, NULL);
}

static Status check_signal(void) { return signal_caught ? fault("interrupted; nothing was written") : OK; }

/* ---- texts ---- */

static bool is_standard_input(const char *path) { return strcmp(path, "-") == 0; }

static Status read_into(int from, const char *name, FILE *to) {
    enum { POLL_MS = 100 }; /* a signal just before a read that blocks would wait for ever */
    char chunk[65536];
    struct pollfd source = {.fd = from, .events = POLLIN};
    for (ssize_t n = 1; n != 0;) {
        TRY(check_signal());
        if (poll(&source, 1, POLL_MS) <= 0)
            continue;
        n = read(from, chunk, sizeof chunk);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            continue;
        if (n < 0)
            return bad_input("%s: cannot read: %s", name, strerror(errno));
        if (fwrite(chunk, 1, (size_t)n, to) != (size_t)n)
            return fault("%s: cannot store it in the output folder: %s", name, strerror(errno));
    }
    return fflush(to) == 0 ? OK : fault("%s: cannot store it in the output folder: %s", name, strerror(errno));
}

/* A file in the output folder that never had a name, so it goes away with the program, however and whenever that ends.
 * Where the file system only has files with names, it loses its name at once. */
static Status nameless_file(const Prepare *prepare, FILE **file) {
    char path[PATH_SIZE];
    int descriptor = open(prepare->arguments.out, O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (descriptor < 0) {
        snprintf(path, sizeof path, "%s/%s.XXXXXX", prepare->arguments.out, "input");
        descriptor = mkstemp(path);
        if (descriptor < 0)
            return bad_input("%s: cannot write: %s", prepare->arguments.out, strerror(errno));
        unlink(path);
    }
    *file = fdopen(descriptor, "w+b");
    assert(*file);
    return OK;
}

static Status map_stream(const Prepare *prepare, int stream, const char *name, FileMap *map) {
    FILE *copy;
    TRY(nameless_file(prepare, &copy));
    Status status = read_into(stream, name, copy);
    off_t size = ftello(copy);
    if (status == OK && size == 0)
        status = bad_input("%s: expected text, found none", name);
    if (status == OK) {
        void *bytes = mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fileno(copy), 0);
        if (bytes == MAP_FAILED)
            status = fault("%s: cannot map: %s", name, strerror(errno));
        else
            *map = (FileMap){bytes, (size_t)size};
    }
    fclose(copy);
    return status;
}

static Status map_text(const Prepare *prepare, const char *path, FileMap *map) {
    *map = (FileMap){0};
    if (is_standard_input(path))
        return map_stream(prepare, STDIN_FILENO, "standard input", map);
    struct stat info;
    if (stat(path, &info) != 0 || !(S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode)))
        return file_map(map, path);
    int stream = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe that nobody writes yet is waited for below */
    if (stream < 0)
        return bad_input("%s: cannot open: %s", path, strerror(errno));
    Status status = map_stream(prepare, stream, path, map);
    close(stream);
    return status;
}

/* All texts are there; *bytes is their size, as far as it can be known (pipes count nothing). */
static Status check_texts(const Prepare *prepare, int64_t *bytes) {
    *bytes = 0;
    for (int i = 0; i < prepare->text_count; i++) {
        const char *path = prepare->texts[i];
        struct stat info = {0};
        if (is_standard_input(path))
            continue;
        if (stat(path, &info) != 0 || access(path, R_OK) != 0)
            return bad_input("%s: cannot open: %s", path, strerror(errno));
        if (S_ISDIR(info.st_mode))
            return bad_input("%s: expected a text file, found a folder", path);
        if (S_ISREG(info.st_mode) && info.st_size == 0)
            return bad_input("%s: expected text, found an empty file", path);
        *bytes += info.st_size;
    }
    return OK;
}

/* How many bytes come before the held-out part: up to the line that starts next after the share is reached, else the
 * one before, else up to a space; all of the text if it has none of these. */
static size_t train_bytes(const char *text, size_t size, double val) {
    if (val <= 0 || val >= 1)
        return val > 0 ? 0 : size;
    size_t target = (size_t)((double)size * (1 - val));
    const char *newline = memchr(text + target, '\n', size - target);
    if (newline && newline + 1 < text + size)
        return (size_t)(newline + 1 - text);
    newline = memrchr(text, '\n', target);
    if (newline)
        return (size_t)(newline + 1 - text);
    const char *space = memrchr(text, ' ', target);
    return space ? (size_t)(space - text) : size;
}

/* ---- shards ---- */

/* Path of a shard, in `path`, or BAD_INPUT when it is too long. */
static Status shard_path(const Prepare *prepare, const Split *split, int index, char path[PATH_SIZE]) {
    const char *folder = prepare->arguments.out;
    int length = snprintf(path, PATH_SIZE, "%s/%s_%s_%06d.bin", folder, prepare->name, split->name, index);
    return length < PATH_SIZE ? OK : bad_input("%s/%s: the name is too long", folder, prepare->name);
}

/* The process whose temporary file of this set that is, -1 for any other file. */
static long writer_of(const Prepare *prepare, const char *file) {
    size_t length = strlen(prepare->name);
    char split[6];
    long process = -1;
    int end = 0;
    if (strncmp(file, prepare->name, length) != 0)
        return -1;
    file += length;
    sscanf(file, "_%5[a-z]_%*d.bin.%ld.tmp%n", split, &process, &end);
    return end && !file[end] && (strcmp(split, "train") == 0 || strcmp(split, "val") == 0) ? process : -1;
}

/* Temporary files of the same set whose writer is gone; this process cannot have made one yet. */
static void remove_stale(const Prepare *prepare) {
    DIR *folder = opendir(prepare->arguments.out);
    for (struct dirent *entry; folder && (entry = readdir(folder)) != NULL;) {
        long process = writer_of(prepare, entry->d_name);
        if (process > 0 && (process == getpid() || (kill((pid_t)process, 0) != 0 && errno == ESRCH)))
            unlinkat(dirfd(folder), entry->d_name, 0);
    }
    if (folder)
        closedir(folder);
}

static Status open_next(const Prepare *prepare, Split *split) {
    char path[PATH_SIZE];
    TRY(shard_path(prepare, split, split->writer_count, path));
    split->writers = realloc(split->writers, ((size_t)split->writer_count + 1) * sizeof *split->writers);
    assert(split->writers);
    TRY(shard_writer_open(&split->writers[split->writer_count], path, tokenizer_vocab(prepare->tokenizer)));
    split->writer_count++;
    return OK;
}

static Status add_tokens(const Prepare *prepare, Split *split, const int32_t *ids, int64_t count) {
    const int64_t full = prepare->arguments.shard_tokens;
    while (count > 0) {
        if (split->writer_count == 0 || split->writers[split->writer_count - 1].count == full)
            TRY(open_next(prepare, split));
        ShardWriter *writer = &split->writers[split->writer_count - 1];
        int64_t n = count < full - writer->count ? count : full - writer->count;
        shard_writer_add(writer, ids, n);
        if (ferror(writer->file.stream))
            return fault("%s: not written: %s", writer->file.path, strerror(errno));
        split->tokens += n;
        ids += n;
        count -= n;
    }
    return OK;
}

/* Shards of an older, longer set of the same name would be read together with the new ones. */
static Status remove_older(const Prepare *prepare, const Split *split) {
    for (int i = split->writer_count; split->writer_count > 0; i++) {
        char path[PATH_SIZE];
        TRY(shard_path(prepare, split, i, path));
        if (unlink(path) != 0)
            break;
    }
    return OK;
}

static Status commit_split(Split *split, int *committed) {
    for (*committed = 0; *committed < split->writer_count; ++*committed)
        TRY(shard_writer_close(&split->writers[*committed]));
    return OK;
}

/* Gives all shards their names; if that fails half-way, none keeps it, since half a set would pass for a whole one. */
static Status commit_all(Prepare *prepare) {
    int committed[SPLITS] = {0};
    Status status = OK;
    for (int i = 0; i < SPLITS && status == OK; i++)
        status = commit_split(&prepare->splits[i], &committed[i]);
    for (int i = 0; i < SPLITS && status != OK; i++)
        for (int shard = 0; shard < committed[i]; shard++)
            unlink(prepare->splits[i].writers[shard].file.path);
    for (int i = 0; i < SPLITS && status == OK; i++)
        status = remove_older(prepare, &prepare->splits[i]);
    return status;
}

static void discard_split(Split *split) {
    for (int i = 0; i < split->writer_count; i++)
        shard_writer_discard(&split->writers[i]);
    free(split->writers);
}

/* ---- encoding ---- */

static void show_progress(Prepare *prepare) {
    char what[96];
    double seconds = clock_s() - prepare->progress.start_s;
    snprintf(what, sizeof what, "%.0f of %.0f MB  %.1f MB/s", 1e-6 * (double)prepare->bytes_done,
             1e-6 * prepare->progress.total, seconds > 0 ? 1e-6 * (double)prepare->bytes_done / seconds : 0);
    progress_update(&prepare->progress, (double)prepare->bytes_done, what);
}

/* Gives the mapped pages in front of `end` back. */
static void forget_pages(const char *start, const char *end) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = (uintptr_t)start / page * page, to = (uintptr_t)end / page * page;
    if (to > from)
        madvise((void *)from, to - from, MADV_DONTNEED);
}

/* Encodes one document into a split: the end-of-text token, then the text in windows. */
static Status encode_document(Prepare *prepare, Split *split, const char *text, size_t size) {
    const int32_t end_of_text = tokenizer_end_of_text(prepare->tokenizer);
    if (size == 0)
        return OK;
    double start_s = clock_s();
    TRY(add_tokens(prepare, split, &end_of_text, 1));
    size_t window = WINDOW_BYTES;
    for (size_t at = 0, used; at < size; at += used) {
        TRY(check_signal());
        bool last = size - at <= window;
        prepare->ids.count = 0;
        used = tokenizer_encode_part(prepare->tokenizer, text + at, last ? size - at : window, last, &prepare->ids);
        if (used == 0) { /* one piece fills the window */
            assert(window < tokenizer_part_max_bytes());
            window *= 2;
            continue;
        }
        window = WINDOW_BYTES;
        TRY(add_tokens(prepare, split, prepare->ids.ids, (int64_t)prepare->ids.count));
        forget_pages(text + at, text + at + used);
        prepare->bytes_done += (int64_t)used;
        show_progress(prepare);
    }
    split->bytes += (int64_t)size;
    split->seconds += clock_s() - start_s;
    return OK;
}

static Status encode_text(Prepare *prepare, const char *path) {
    FileMap map;
    TRY(map_text(prepare, path, &map));
    const char *text = (const char *)map.bytes;
    int64_t known = prepare->bytes_done + (int64_t)map.size; /* a pipe's size was not */
    prepare->progress.total = fmax(prepare->progress.total, (double)known);
    size_t cut = train_bytes(text, map.size, prepare->arguments.val);
    Status status = encode_document(prepare, &prepare->splits[TRAIN], text, cut);
    if (status == OK)
        status = encode_document(prepare, &prepare->splits[VAL], text + cut, map.size - cut);
    file_unmap(&map);
    return status;
}

/* ---- the program ---- */

static void report_split(Report *report, const char *name, const Split *split) {
    const ReportValue row[] = {
        {.text = name},
        {.number = split->writer_count},
        {.number = (double)split->tokens},
        {.number = (double)split->bytes},
        {.number = split->tokens ? (double)split->bytes / (double)split->tokens : NAN},
        {.number = split->seconds > 0 ? 1e-6 * (double)split->bytes / split->seconds : NAN},
    };
    report_row(report, row);
}

static void print_report(const Prepare *prepare) {
    static const ReportColumn columns[] = {
        {"split", "split", "%s"},          {"shards", "shards", "%.0f"},
        {"tokens", "tokens", "%12.0f"},    {"text_bytes", "text bytes", "%12.0f"},
        {"bytes_per_token", "bytes/token", "%.3f"}, {"mb_per_s", "MB/s", "%.1f"},
    };
    Report report = {.out = stdout, .json = prepare->arguments.json, .columns = columns, .count = 6};
    Split all = {0};
    for (int i = 0; i < SPLITS; i++) {
        const Split *split = &prepare->splits[i];
        report_split(&report, split->name, split);
        all.writer_count += split->writer_count;
        all.tokens += split->tokens;
        all.bytes += split->bytes;
        all.seconds += split->seconds;
    }
    report_split(&report, "all", &all);
}

/* NAME and TEXT... out of the positional arguments; `standard_input` stands in for no TEXT. */
static Status take_arguments(Prepare *prepare, const char **positional, int count, const char **standard_input) {
    if (count == 0)
        return bad_input("expected NAME, the first part of the shards' names; --help explains");
    prepare->name = positional[0];
    if (!*prepare->name || strchr(prepare->name, '/'))
        return bad_input("NAME: expected the first part of a file's name, found '%s'; folders go into --out",
                         prepare->name);
    prepare->texts = count > 1 ? positional + 1 : standard_input;
    prepare->text_count = count > 1 ? count - 1 : 1;
    return OK;
}

/* Every shard stays open until the end, so a large set needs many descriptors. */
static void raise_file_limit(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static Status run(Prepare *prepare) {
    int64_t bytes;
    TRY(check_texts(prepare, &bytes));
    TRY(folder_check_writable(prepare->arguments.out));
    TRY(tokenizer_open(&prepare->tokenizer, prepare->arguments.tokenizer));
    TRY(folder_create(prepare->arguments.out));
    remove_stale(prepare);
    raise_file_limit();
    catch_signals();
    progress_start(&prepare->progress, stderr, (double)bytes);
    for (int i = 0; i < prepare->text_count; i++)
        TRY(encode_text(prepare, prepare->texts[i]));
    progress_clear(&prepare->progress);
    TRY(commit_all(prepare));
    print_report(prepare);
    if (prepare->arguments.val > 0 && prepare->splits[VAL].tokens == 0)
        fprintf(stderr, "prepare: no line or word ends where --val could cut: nothing is held out\n");
    return OK;
}

int main(int argc, char **argv) {
    Prepare prepare = {.splits = {[TRAIN] = {.name = "train"}, [VAL] = {.name = "val"}}};
    const char **positional = calloc((size_t)argc, sizeof *positional), *standard_input = "-";
    assert(positional);
    int count;
    Status status = args_parse(usage, options, OPTION_COUNT, &prepare.arguments, argc, argv, positional, argc, &count);
    if (status == OK)
        status = take_arguments(&prepare, positional, count, &standard_input);
    if (status == OK)
        status = run(&prepare);
    if (status != OK)
        progress_clear(&prepare.progress);
    for (int i = 0; i < SPLITS; i++)
        discard_split(&prepare.splits[i]);
    tokenizer_close(prepare.tokenizer);
    free(prepare.ids.ids);
    free(positional);
    int code = error_exit_code("prepare", status);
    if (signal_caught) { /* tell the shell how the program ended */
        signal(signal_caught, SIG_DFL);
        raise(signal_caught);
    }
    return code;
}
