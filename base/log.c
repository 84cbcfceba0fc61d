#define _POSIX_C_SOURCE 200809L
#include "base/log.h"

#include "base/clock.h"
#include "base/progress.h"

#include <assert.h>
#include <cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct Log {
    int64_t steps, every, done; /* done: before this run */
    bool computes; /* there is a loss to show */
    FILE *jsonl;
    char path[512]; /* of jsonl, for the warning */
    cJSON *facts;       /* of the header, until log_start */
    Progress progress;
    double start_s;
    /* for the closing table */
    StepLog sum;        /* every field added up, over `count` steps */
    int64_t count;
    double tokens;
    StepLog shown; /* `sum` and `tokens` at the last line on the terminal */
    double shown_tokens;
    StepLog last;
    bool validated;
    double val_loss, val_bits_per_byte; /* the latest ones */
};

/* Fields of StepLog under their own names; those before `val_loss` are in every step, the others when validated. */
typedef struct StepField {
    const char *name;
    size_t offset;
} StepField;
#define FIELD(name) {#name, offsetof(StepLog, name)}
static const StepField fields[] = {
    FIELD(loss), FIELD(lr), FIELD(grad_norm), FIELD(tokens_per_s), FIELD(step_ms), FIELD(forward_ms),
    FIELD(backward_ms), FIELD(update_ms), FIELD(comm_ms), FIELD(comm_exposed_ms), FIELD(bytes_intra),
    FIELD(bytes_inter), FIELD(compress_error), FIELD(val_loss), FIELD(val_bits_per_byte)};
enum { FIELD_COUNT = sizeof fields / sizeof *fields, VAL_FIELDS = 2 };

static double *value_of(StepLog *step, int field) { return (double *)(void *)((char *)step + fields[field].offset); }

Log *log_open(int64_t steps, int64_t every, bool computes) {
    Log *log = calloc(1, sizeof *log);
    assert(log);
    log->steps = steps;
    log->every = every;
    log->computes = computes;
    log->facts = cJSON_CreateObject();
    return log;
}

/* A whole line, of a run's start or of a step up to `done`. */
static bool stays(const char *line, size_t length, int64_t done) {
    if (line[length - 1] != '\n' || strlen(line) != length)
        return false;
    cJSON *object = cJSON_ParseWithOpts(line, NULL, true);
    const cJSON *step = cJSON_GetObjectItemCaseSensitive(object, "step");
    bool kept = cJSON_IsNumber(step) ? step->valuedouble <= (double)done
                                     : cJSON_GetObjectItemCaseSensitive(object, "options") != NULL;
    cJSON_Delete(object);
    return kept;
}

/* Leaves the lines up to step `done`, so that a resumed run leaves the same lines as one that never stopped. They move
 * up where the end of a killed run, or a full disk, has left half a line in front of them. */
static void drop_later_steps(FILE *file, int64_t done) {
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    off_t start = 0, kept = 0;
    bool moved = true;
    for (; moved && (length = getline(&line, &capacity, file)) > 0; start += length)
        if (stays(line, (size_t)length, done)) {
            moved = kept == start || pwrite(fileno(file), line, (size_t)length, kept) == length;
            kept += length;
        }
    if (moved && ftruncate(fileno(file), kept) == 0)
        fseek(file, 0, SEEK_END);
    free(line);
}

Status log_jsonl(Log *log, const char *path, int64_t done) {
    log->done = done;
    if (!path[0])
        return OK;
    snprintf(log->path, sizeof log->path, "%s", path);
    /* For reading as well, even a new one: opening a pipe only to write would wait for who reads it. */
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | (done > 0 ? 0 : O_TRUNC), 0666);
    if (file < 0)
        return bad_input("%s: cannot write the log: %s", path, strerror(errno));
    struct stat info = {0};
    if (fstat(file, &info) != 0 || S_ISFIFO(info.st_mode)) {
        close(file);
        return bad_input("%s: expected a regular file", path);
    }
    log->jsonl = fdopen(file, "r+");
    assert(log->jsonl);
    if (done > 0 && S_ISREG(info.st_mode))
        drop_later_steps(log->jsonl, done);
    return OK;
}

static void clear_progress(Log *log) {
    if (log->progress.out)
        progress_clear(&log->progress);
}

void log_close(Log *log) {
    if (!log)
        return;
    clear_progress(log);
    if (log->jsonl)
        fclose(log->jsonl);
    cJSON_Delete(log->facts);
    free(log);
}

static void write_line(Log *log, cJSON *object) {
    char *text = log->jsonl ? cJSON_PrintUnformatted(object) : NULL;
    if (text && (fprintf(log->jsonl, "%s\n", text) < 0 || fflush(log->jsonl) != 0)) {
        log_warning(log, "%s: not written: %s; the run goes on without", log->path, strerror(errno));
        fclose(log->jsonl);
        log->jsonl = NULL;
    }
    free(text);
    cJSON_Delete(object);
}

void log_fact(Log *log, const char *name, const char *format, ...) {
    char value[512];
    va_list args;
    va_start(args, format);
    vsnprintf(value, sizeof value, format, args);
    va_end(args);
    printf("  %-12s %s\n", name, value);
    if (log->facts)
        cJSON_AddStringToObject(log->facts, name, value);
}

void log_warning(Log *log, const char *format, ...) {
    va_list args;
    clear_progress(log);
    fflush(stdout);
    fputs("warning: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

static void add_option(void *user, const char *section, const char *key, const char *value) {
    char name[96];
    snprintf(name, sizeof name, "%s.%s", section, key);
    cJSON_AddStringToObject(user, name, value);
}

void log_start(Log *log, const Config *config) {
    cJSON *object = cJSON_CreateObject(), *options = cJSON_AddObjectToObject(object, "options");
    config_visit(config, add_option, options);
    cJSON_AddItemToObject(object, "run", log->facts);
    log->facts = NULL;
    write_line(log, object);
    putchar('\n');
    fflush(stdout);
    progress_start(&log->progress, stdout, (double)(log->steps - log->done));
    log->start_s = clock_s();
}

/* Within 80 columns. Speed and exposed communication are means since the last line. */
static void print_step(Log *log, const StepLog *step) {
    double ms = log->sum.step_ms - log->shown.step_ms;
    printf("step %5lld", (long long)step->step);
    if (log->computes)
        printf("  loss %.4f  lr %.1e", step->loss, step->lr);
    printf("  %6.0f tok/s  comm %4.1f %%", (log->tokens - log->shown_tokens) / (1e-3 * ms),
           100 * (log->sum.comm_exposed_ms - log->shown.comm_exposed_ms) / ms);
    log->shown = log->sum;
    log->shown_tokens = log->tokens;
    if (step->validated && log->computes)
        printf("  val %.4f", step->val_loss);
    if (step->skipped)
        printf("  skipped %lld", (long long)step->skipped);
    putchar('\n');
}

static void write_step(Log *log, StepLog *step) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddNumberToObject(object, "step", (double)step->step);
    for (int i = 0; i < FIELD_COUNT - (step->validated ? 0 : VAL_FIELDS); i++)
        if (isfinite(*value_of(step, i)))
            cJSON_AddNumberToObject(object, fields[i].name, *value_of(step, i));
        else if (i + 1 < FIELD_COUNT) /* the last are bits per byte, which not every run can tell */
            cJSON_AddNullToObject(object, fields[i].name); /* JSON has no NaN */
    cJSON_AddNumberToObject(object, "skipped", (double)step->skipped);
    write_line(log, object);
}

void log_step(Log *log, const StepLog *step) {
    StepLog copy = *step;
    for (int i = 0; i < FIELD_COUNT; i++) {
        if (isnan(*value_of(&copy, i)))
            *value_of(&copy, i) = NAN; /* of either sign, which would be shown */
        *value_of(&log->sum, i) += *value_of(&copy, i);
    }
    write_step(log, &copy);
    log->count++;
    log->tokens += 1e-3 * step->step_ms * step->tokens_per_s;
    log->last = copy;
    if (copy.validated) {
        log->validated = true;
        log->val_loss = copy.val_loss;
        log->val_bits_per_byte = copy.val_bits_per_byte;
    }
    if (step->step % log->every == 0 || step->step == log->steps || log->count == 1 || step->validated) {
        progress_clear(&log->progress);
        print_step(log, &copy);
    }
    log_progress(log, (double)step->step);
}

void log_progress(Log *log, double steps_done) {
    char what[96], loss[32] = "";
    if (log->computes && log->count > 0)
        snprintf(loss, sizeof loss, "  loss %.3f", log->last.loss);
    snprintf(what, sizeof what, "step %.0f/%lld%s", floor(steps_done), (long long)log->steps, loss);
    progress_update(&log->progress, steps_done - (double)log->done, what);
}

/* Length of the UTF-8 character at text, 0 when there is none or it is a control character. */
static int printable(const unsigned char *text) {
    if (text[0] < 0x80)
        return (text[0] >= 0x20 && text[0] != 0x7f) || text[0] == '\n' || text[0] == '\t';
    int length = text[0] < 0xc2 ? 0 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : text[0] < 0xf5 ? 4 : 0;
    for (int i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    return length == 2 && text[0] == 0xc2 && text[1] < 0xa0 ? 0 : length; /* the last: C1 controls */
}

/* An untrained model writes any bytes: those that are no text would upset the terminal and show as '.'. */
static void print_text(const char *text) {
    while (*text) {
        int length = printable((const unsigned char *)text);
        if (length)
            fwrite(text, 1, (size_t)length, stdout);
        else
            putchar('.');
        text += length ? length : 1;
    }
}

void log_text(Log *log, const char *title, const char *prompt, const char *text) {
    clear_progress(log);
    printf("--- %s\n%s", title, prompt);
    print_text(text);
    puts("\n---");
    fflush(stdout);
}

static void print_share(const char *name, double sum_ms, const Log *log) {
    printf("  %-12s %10.1f ms  %5.1f %%\n", name, sum_ms / (double)log->count, 100 * sum_ms / log->sum.step_ms);
}

static void print_loss(const Log *log) {
    printf("  %-12s %.4f nats per token", "loss", log->last.loss);
    if (log->validated)
        printf(", validation %.4f", log->val_loss);
    if (log->validated && !isnan(log->val_bits_per_byte))
        printf(" = %.3f bits per byte", log->val_bits_per_byte);
    putchar('\n');
}

double log_summary(Log *log) {
    clear_progress(log);
    if (log->count == 0)
        return 0;
    char took[32];
    const StepLog *sum = &log->sum;
    double count = (double)log->count, total_ms = sum->step_ms;
    double tokens_per_s = log->tokens / (1e-3 * total_ms);
    printf("\n  %.0f step%s in %s, a step on average:\n", count, count > 1 ? "s" : "",
           duration_text(clock_s() - log->start_s, took, sizeof took));
    print_share("forward", sum->forward_ms, log);
    print_share("backward", sum->backward_ms, log);
    print_share("comm exposed", sum->comm_exposed_ms, log);
    print_share("update", sum->update_ms, log);
    print_share("other", total_ms - sum->forward_ms - sum->backward_ms - sum->update_ms - sum->comm_exposed_ms, log);
    print_share("total", total_ms, log);
    putchar('\n');
    if (log->computes)
        print_loss(log);
    printf("  %-12s %.0f tokens per second\n", "speed", tokens_per_s);
    if (sum->bytes_intra + sum->bytes_inter > 0)
        printf("  %-12s %.2f MB inside nodes, %.2f MB between nodes, per step, all ranks\n", "sent",
               1e-6 * sum->bytes_intra / count, 1e-6 * sum->bytes_inter / count);
    if (log->last.skipped)
        printf("  %-12s %lld step%s with a non-finite loss or gradient\n", "skipped", (long long)log->last.skipped,
               log->last.skipped > 1 ? "s" : "");
    return tokens_per_s;
}
