/* Options are looked up by name in the tables of their sections; every assignment, from a file, a command line or the
 * defaults, goes through assign(), so that checks and messages are the same everywhere. `origin` remembers who gave
 * each key its value, for messages about combinations of keys. */
#define _GNU_SOURCE
#include "base/config.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef struct Origin {
    char path[OPTION_TEXT]; /* "" until a file or the command line sets the key */
    int line;               /* 0: no line, as on the command line */
} Origin;

struct Config {
    const ConfigSection *sections;
    int section_count;
    Origin **origins; /* [section][option] */
};

static void *field(const Option *option, void *target) { return (char *)target + option->offset; }

const char *option_choice(const char *choices, int index) {
    static _Thread_local char name[64];
    while (index-- > 0) {
        choices = strchr(choices, '|');
        assert(choices);
        choices++;
    }
    snprintf(name, sizeof name, "%.*s", (int)strcspn(choices, "|"), choices);
    return name;
}

/* ---- text to value. Each returns false when the text is not such a value; `expected` then says what is. ---- */

static bool parse_int(const Option *option, const char *text, int64_t *value) {
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || errno)
        return false;
    int64_t unit = *end == 'K' ? 1 << 10 : *end == 'M' ? 1 << 20 : *end == 'G' ? 1 << 30 : 1;
    if (unit > 1)
        end++;
    double scaled = (double)number * (double)unit;
    if (*end || scaled < option->min || scaled > option->max)
        return false;
    *value = number * unit;
    return true;
}

static bool parse_float(const Option *option, const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    return end != text && !*end && isfinite(*value) && *value >= option->min && *value <= option->max;
}

static bool parse_bool(const char *text, bool *value) {
    static const char *const names[] = {"0", "no", "false", "off", "1", "yes", "true", "on"};
    for (int i = 0; i < 8; i++)
        if (strcasecmp(text, names[i]) == 0) {
            *value = i >= 4;
            return true;
        }
    return false;
}

static bool parse_choice(const char *choices, const char *text, int *value) {
    for (int i = 0; choices; i++) {
        size_t length = strcspn(choices, "|");
        if (strlen(text) == length && strncmp(text, choices, length) == 0) {
            *value = i;
            return true;
        }
        choices = choices[length] ? choices + length + 1 : NULL;
    }
    return false;
}

static bool parse_value(const Option *option, const char *text, void *target) {
    void *value = field(option, target);
    switch (option->type) {
    case OPTION_INT: return parse_int(option, text, value);
    case OPTION_FLOAT: return parse_float(option, text, value);
    case OPTION_BOOL: return parse_bool(text, value);
    case OPTION_CHOICE: return parse_choice(option->choices, text, value);
    case OPTION_STRING:
        if (strlen(text) >= OPTION_TEXT || (double)strlen(text) < option->min)
            return false;
        memcpy(value, text, strlen(text) + 1);
        return true;
    }
    return false;
}

/* What the option takes, e.g. "an integer in [1, 4096]". */
static void describe(const Option *option, char *text, size_t size) {
    switch (option->type) {
    case OPTION_INT: snprintf(text, size, "an integer in [%.0f, %.0f]", option->min, option->max); break;
    case OPTION_FLOAT: snprintf(text, size, "a number in [%g, %g]", option->min, option->max); break;
    case OPTION_BOOL: snprintf(text, size, "yes or no"); break;
    case OPTION_CHOICE: snprintf(text, size, "one of %s", option->choices); break;
    case OPTION_STRING:
        snprintf(text, size, option->min > 0 ? "a name of at most %d bytes" : "at most %d bytes of text",
                 OPTION_TEXT - 1);
        break;
    }
}

static void value_text(const Option *option, void *target, char *text, size_t size) {
    void *value = field(option, target);
    switch (option->type) {
    case OPTION_INT: snprintf(text, size, "%lld", (long long)*(int64_t *)value); break;
    case OPTION_FLOAT: snprintf(text, size, "%.9g", *(double *)value); break;
    case OPTION_BOOL: snprintf(text, size, "%s", *(bool *)value ? "yes" : "no"); break;
    case OPTION_CHOICE: snprintf(text, size, "%s", option_choice(option->choices, *(int *)value)); break;
    case OPTION_STRING: snprintf(text, size, "%s", (char *)value); break;
    }
}

/* Equal, where '-' in what the user typed may stand for '_'. */
static bool same_key(const char *typed, size_t length, const char *key) {
    if (strlen(key) != length)
        return false;
    for (size_t i = 0; i < length; i++)
        if ((typed[i] == '-' ? '_' : typed[i]) != key[i])
            return false;
    return true;
}

static const Option *find_option(const Option *options, int count, const char *key, size_t length) {
    for (int i = 0; i < count; i++)
        if (same_key(key, length, options[i].key))
            return &options[i];
    return NULL;
}

static void set_defaults(const Option *options, int count, void *target) {
    for (int i = 0; i < count; i++) {
        bool valid = parse_value(&options[i], options[i].initial, target);
        assert(valid && "default outside its own range");
        (void)valid;
    }
}

/* ---- config ---- */

Config *config_create(const ConfigSection *sections, int count) {
    Config *config = calloc(1, sizeof *config);
    assert(config);
    config->sections = sections;
    config->section_count = count;
    config->origins = calloc((size_t)count, sizeof *config->origins);
    assert(config->origins);
    for (int i = 0; i < count; i++) {
        config->origins[i] = calloc((size_t)sections[i].count + 1, sizeof(Origin));
        assert(config->origins[i]);
        set_defaults(sections[i].options, sections[i].count, sections[i].target);
    }
    return config;
}

void config_destroy(Config *config) {
    if (!config)
        return;
    for (int i = 0; i < config->section_count; i++)
        free(config->origins[i]);
    free(config->origins);
    free(config);
}

static void where_text(const Origin *origin, char *text, size_t size) {
    if (!origin->path[0])
        snprintf(text, size, "default");
    else if (origin->line)
        snprintf(text, size, "%.*s:%d", OPTION_TEXT, origin->path, origin->line);
    else
        snprintf(text, size, "%.*s", OPTION_TEXT, origin->path);
}

static Status assign(Config *config, const Origin *origin, const char *section, size_t section_length, const char *key,
                     const char *value) {
    char where[OPTION_TEXT + 16];
    where_text(origin, where, sizeof where);
    for (int s = 0; s < config->section_count; s++) {
        const ConfigSection *known = &config->sections[s];
        if (strlen(known->name) != section_length || strncmp(known->name, section, section_length) != 0)
            continue;
        const Option *option = find_option(known->options, known->count, key, strlen(key));
        if (!option)
            return bad_input("%s: unknown key '%s' in section [%s]; --help lists the keys", where, key, known->name);
        char expected[128];
        Origin *before = &config->origins[s][option - known->options];
        if (before->line && strcmp(before->path, origin->path) == 0)
            return bad_input("%s: %s.%s: expected once, found in line %d already", where, known->name, key,
                             before->line);
        describe(option, expected, sizeof expected);
        if (!parse_value(option, value, known->target))
            return bad_input("%s: %s.%s: expected %s, found '%s'", where, known->name, key, expected, value);
        *before = *origin;
        return OK;
    }
    if (section_length == 0)
        return bad_input("%s: expected a section in front of '%s', such as [train]", where, key);
    return bad_input("%s: unknown section [%.*s]; --help lists the sections", where, (int)section_length, section);
}

typedef struct Reading {
    Config *config;
    FILE *file;
    Origin origin; /* the line that inih is looking at; Debian's inih does not pass it to the handler */
    Status status; /* of the first fault, the one to report */
} Reading;

/* The next line without the blanks it starts with, as fgets would give it; 0 bytes at the file's end. */
static Status get_line(Reading *reading, char *text, int size) {
    const char *path = reading->origin.path;
    int used = 0, line = reading->origin.line + 1;
    for (int c = 0; c != '\n' && (c = getc(reading->file)) != EOF;) {
        if (c == 0)
            return bad_input("%s:%d: expected text, found a NUL byte", path, line);
        if (used == size - 1)
            return bad_input("%s:%d: expected a line of at most %d bytes; longer values can be given on the command "
                             "line", path, line, size - 2);
        if (used > 0 || c == '\n' || !isspace(c))
            text[used++] = (char)c;
    }
    text[used] = 0;
    return OK;
}

/* inih's fgets. inih would read an indented line as more of the value above, the rest of a long one as another line,
 * and what follows a NUL byte not at all. */
static char *read_line(char *text, int size, void *user) {
    Reading *reading = user;
    if (reading->status != OK)
        return NULL;
    reading->status = get_line(reading, text, size);
    reading->origin.line++;
    return reading->status == OK && text[0] ? text : NULL;
}

static int read_pair(void *user, const char *section, const char *name, const char *value) {
    Reading *reading = user;
    if (reading->status == OK)
        reading->status = assign(reading->config, &reading->origin, section, strlen(section), name, value);
    return 1;
}

Status config_read_file(Config *config, const char *path) {
    Reading reading = {.config = config, .file = fopen(path, "r")};
    if (!reading.file)
        return bad_input("%s: cannot read config file: %s", path, strerror(errno));
    snprintf(reading.origin.path, sizeof reading.origin.path, "%s", path);
    int line = ini_parse_stream(read_line, &reading, read_pair, &reading); /* 0, or the first line it cannot parse */
    bool unreadable = ferror(reading.file) != 0;
    fclose(reading.file);
    if (unreadable)
        return bad_input("%s: cannot read config file: expected a file of text", path);
    if (line && (reading.status == OK || line < reading.origin.line)) /* the first fault is the one to report */
        return bad_input("%s:%d: expected 'key = value' or '[section]'", path, line);
    return reading.status;
}

Status config_assign(Config *config, const char *assignment) {
    Origin origin = {.path = "command line"};
    const char *dot = strchr(assignment, '.'), *equals = strchr(assignment, '=');
    if (!dot || !equals || equals < dot)
        return bad_input("command line: expected section.key=value, found '%s'", assignment);
    char key[64];
    snprintf(key, sizeof key, "%.*s", (int)(equals - dot - 1), dot + 1);
    return assign(config, &origin, assignment, (size_t)(dot - assignment), key, equals + 1);
}

Status config_error(const Config *config, const char *key, const char *format, ...) {
    char where[OPTION_TEXT + 16] = "config", message[512];
    const char *dot = strchr(key, '.');
    for (int s = 0; dot && s < config->section_count; s++) {
        const ConfigSection *section = &config->sections[s];
        const Option *option = find_option(section->options, section->count, dot + 1, strlen(dot + 1));
        size_t length = (size_t)(dot - key);
        if (option && strlen(section->name) == length && strncmp(section->name, key, length) == 0)
            where_text(&config->origins[s][option - section->options], where, sizeof where);
    }
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return bad_input("%s: %s: %s", where, key, message);
}

static void option_help(FILE *out, const Option *option, const char *prefix) {
    char left[64], range[128];
    describe(option, range, sizeof range);
    if (option->type == OPTION_BOOL && prefix[0])
        snprintf(range, sizeof range, "alone: yes; or =yes, =no");
    snprintf(left, sizeof left, "%s%s", prefix, option->key);
    fprintf(out, "  %-18s %s\n", left, option->help);
    fprintf(out, "  %-18s   %s; default %s\n", "", range, option->initial[0] ? option->initial : "empty");
}

void config_help(const Config *config, FILE *out) {
    for (int s = 0; s < config->section_count; s++) {
        fprintf(out, "%s[%s]\n", s ? "\n" : "", config->sections[s].name);
        for (int i = 0; i < config->sections[s].count; i++)
            option_help(out, &config->sections[s].options[i], "");
    }
}

void config_visit(const Config *config, ConfigVisitFn *visit, void *user) {
    char text[OPTION_TEXT];
    for (int s = 0; s < config->section_count; s++) {
        const ConfigSection *section = &config->sections[s];
        for (int i = 0; i < section->count; i++) {
            value_text(&section->options[i], section->target, text, sizeof text);
            visit(user, section->name, section->options[i].key, text);
        }
    }
}

/* ---- arguments of small programs ---- */

void args_help(const char *usage, const Option *options, int count) {
    printf("usage: %s\n\noptions:\n", usage);
    for (int i = 0; i < count; i++)
        if (strcmp(options[i].key, "help") != 0)
            option_help(stdout, &options[i], "--");
    printf("  %-18s this text\n", "--help");
}

Status args_parse(const char *usage, const Option *options, int count, void *target, int argc, char **argv,
                  const char **positional, int positional_max, int *positional_count) {
    set_defaults(options, count, target);
    *positional_count = 0;
    bool only_positional = false;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (only_positional || strncmp(arg, "--", 2) != 0) {
            if (*positional_count == positional_max)
                return bad_input("unexpected argument '%s'; --help explains", arg);
            positional[(*positional_count)++] = arg;
            continue;
        }
        arg += 2;
        if (!*arg) {
            only_positional = true;
            continue;
        }
        if (strcmp(arg, "help") == 0 && !find_option(options, count, arg, strlen(arg))) {
            args_help(usage, options, count);
            exit(error_exit_code(program_invocation_short_name, OK));
        }
        size_t length = strcspn(arg, "=");
        const Option *option = find_option(options, count, arg, length);
        if (!option)
            return bad_input("unknown option '--%.*s'; --help lists the options", (int)length, arg);
        const char *value = arg[length] ? arg + length + 1 : option->type == OPTION_BOOL ? "yes" : argv[++i];
        char expected[128];
        describe(option, expected, sizeof expected);
        if (!value)
            return bad_input("--%s: expected %s, found nothing", option->key, expected);
        if (!parse_value(option, value, target))
            return bad_input("--%s: expected %s, found '%s'", option->key, expected, value);
    }
    return OK;
}
