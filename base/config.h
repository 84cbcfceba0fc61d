/* One option table drives parsing, ranges, defaults, --help and the run header, for train's config files and for the
 * arguments of the small programs.
 *
 * Each room exports a table of its keys and the struct they fill; a program lists the sections that it takes:
 *     const ConfigSection sections[] = {{"optim", optim_options, optim_option_count, &run.optim}, ...};
 * Every error is one line: "configs/x.cfg:12: train.batch: expected an integer in [1, 65536], found 'many'". */
#ifndef BASE_CONFIG_H
#define BASE_CONFIG_H

#include "base/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { OPTION_TEXT = 256 }; /* size of an OPTION_STRING field */

typedef enum OptionType {
    OPTION_INT,    /* int64_t; digits may end in K, M or G (powers of 1024) */
    OPTION_FLOAT,  /* double */
    OPTION_BOOL,   /* bool; 0/1, no/yes, false/true, off/on. As a program's flag it may stand without value */
    OPTION_STRING, /* char[OPTION_TEXT] */
    OPTION_CHOICE, /* int: index into `choices` */
} OptionType;

typedef struct Option {
    const char *key;
    OptionType type;
    size_t offset;       /* of the field in the section's struct */
    const char *initial; /* default, as it would be written in a file */
    double min, max;     /* OPTION_INT, OPTION_FLOAT: inclusive range; OPTION_STRING: min 1 refuses an empty text */
    const char *choices; /* OPTION_CHOICE: "a|b|c" */
    const char *help;    /* one line */
} Option;

typedef struct ConfigSection {
    const char *name;
    const Option *options;
    int count;
    void *target;
} ConfigSection;

typedef struct Config Config;

/* Fills every target with the defaults. `sections` is borrowed and must outlive the config. */
Config *config_create(const ConfigSection *sections, int count);
void config_destroy(Config *config);

/* INI: [section], key = value, ';' or '#' comments; a key stands there once. */
Status config_read_file(Config *config, const char *path);
Status config_assign(Config *config, const char *assignment); /* "section.key=value", from the command line */

/* For checks across keys: stores "WHERE: KEY: message" where WHERE is the file and line (or "command line", or
 * "default") that gave `key` ("section.key") its value, and returns BAD_INPUT. */
Status config_error(const Config *config, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

void config_help(const Config *config, FILE *out);                 /* every key, default, range, help */

/* Calls `visit` for every key with its present value as text, for headers and logs. */
typedef void ConfigVisitFn(void *user, const char *section, const char *key, const char *value);
void config_visit(const Config *config, ConfigVisitFn *visit, void *user);

/* The name of the chosen alternative, copied into a per-thread buffer: option_choice("a|b|c", 1) is "b". */
const char *option_choice(const char *choices, int index);

/* Arguments of a small program: "--key value", "--key=value" or a bare "--flag", from the same kind of table ('_' in a
 * key may be written '-'); what is left are positional arguments. `usage` is the text after "usage: " and
 * may go on for several lines. --help prints usage and the table on stdout and exits with 0, unless the table has a
 * "help" of its own: of a program that several processes run, one calls args_help. */
void args_help(const char *usage, const Option *options, int count);
Status args_parse(const char *usage, const Option *options, int count, void *target, int argc, char **argv,
                  const char **positional, int positional_max, int *positional_count);

#endif
