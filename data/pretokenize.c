/* Cutting text into pieces, by hand.
 *
 * The pattern only asks for the class of a character, so PCRE2 is asked once, at creation: it finds the runs of
 * letters, numbers and white space in a text of all code points (13 ms), and the answers fill a table of a byte per
 * code point. A piece then costs a table look-up per character, ASCII without decoding. Tests hold the result against
 * PCRE2 with the whole pattern.
 *
 * Of the pattern's alternatives only \s+(?!\S) needs a second look: a run of white space gives its last character
 * back when something follows, unless it has only one. Nothing ever goes back further, so time is linear. */
#define _POSIX_C_SOURCE 200809L
#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/pretokenize.h"

#include <pcre2.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { CODE_POINTS = 0x110000, SURROGATES = 0xD800, SURROGATES_END = 0xE000 };

typedef enum Class { OTHER, LETTER, NUMBER, SPACE, INVALID } Class; /* LETTER..SPACE number the groups below */

static const char class_pattern[] = "(\\p{L}+)|(\\p{N}+)|([^\\S\\x{180E}]+)";

struct Pretokenizer {
    uint8_t class_of[CODE_POINTS];
};

static size_t utf8_put(uint8_t *out, uint32_t code) {
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    size_t length = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; code >>= 6)
        out[i] = (uint8_t)(0x80 | (code & 0x3F));
    out[0] = (uint8_t)(lead[length] | code);
    return length;
}

static bool is_continuation(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/* Length of the valid UTF-8 sequence at text[0], size > 0, and its code point; 0 if there is none. */
static size_t utf8_get(const uint8_t *text, size_t size, uint32_t *code) {
    uint8_t lead = text[0];
    *code = lead;
    if (lead < 0x80)
        return 1;
    size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0 || length > size)
        return 0;
    *code = lead & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) {
        if (!is_continuation(text[i]))
            return 0;
        *code = *code << 6 | (text[i] & 0x3F);
    }
    bool overlong = (length == 3 && *code < 0x800) || (length == 4 && *code < 0x10000);
    bool surrogate = *code >= SURROGATES && *code < SURROGATES_END;
    return overlong || surrogate || *code >= CODE_POINTS ? 0 : length;
}

/* Every code point but the surrogates, in order. */
static uint8_t *all_code_points(size_t *size) {
    uint8_t *text = malloc((size_t)4 * CODE_POINTS);
    *size = 0;
    for (uint32_t code = 0; text && code < CODE_POINTS; code++)
        if (code < SURROGATES || code >= SURROGATES_END)
            *size += utf8_put(text + *size, code);
    return text;
}

/* Marks the code points of text[from..to), a run of consecutive ones. */
static void mark_run(Pretokenizer *pretokenizer, const uint8_t *text, size_t from, size_t to, Class class) {
    while (from < to) {
        uint32_t code;
        from += utf8_get(text + from, to - from, &code);
        pretokenizer->class_of[code] = (uint8_t)class;
    }
}

static Status fill_classes(Pretokenizer *pretokenizer, const pcre2_code *regex, const uint8_t *text, size_t size) {
    pcre2_match_data *match = pcre2_match_data_create_from_pattern(regex, NULL);
    int group = match ? 0 : PCRE2_ERROR_NOMEMORY;
    for (size_t at = 0; match;) {
        group = pcre2_match(regex, text, size, at, PCRE2_NO_UTF_CHECK, match, NULL);
        if (group < 0)
            break;
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match);
        mark_run(pretokenizer, text, range[0], range[1], (Class)(group - 1));
        at = range[1];
    }
    pcre2_match_data_free(match);
    return group == PCRE2_ERROR_NOMATCH ? OK : fault("PCRE2 cannot classify characters: error %d", group);
}

Status pretokenizer_create(Pretokenizer **pretokenizer) {
    int error;
    size_t size, where;
    *pretokenizer = calloc(1, sizeof **pretokenizer);
    uint8_t *text = all_code_points(&size);
    pcre2_code *regex = pcre2_compile((PCRE2_SPTR)class_pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error,
                                      &where, NULL);
    Status status;
    if (!*pretokenizer || !text) {
        status = fault("out of memory for the table of characters");
    } else if (!regex) {
        status = fault("PCRE2 lacks Unicode: error %d", error);
    } else {
        pcre2_jit_compile(regex, PCRE2_JIT_COMPLETE); /* without JIT it works too, at a tenth of the speed */
        status = fill_classes(*pretokenizer, regex, text, size);
    }
    pcre2_code_free(regex);
    free(text);
    if (status != OK) {
        pretokenizer_destroy(*pretokenizer);
        *pretokenizer = NULL;
    }
    return status;
}

void pretokenizer_destroy(Pretokenizer *pretokenizer) { free(pretokenizer); }

/* Class of the character at text[at], and its length; an invalid byte stands alone. */
static inline Class class_at(const Pretokenizer *p, const uint8_t *text, size_t size, size_t at, size_t *length) {
    *length = 1;
    if (text[at] < 0x80)
        return (Class)p->class_of[text[at]];
    uint32_t code;
    size_t valid = utf8_get(text + at, size - at, &code);
    if (!valid)
        return INVALID;
    *length = valid;
    return (Class)p->class_of[code];
}

/* End of the run of that class from `at` on, or the first character at or behind `limit`. */
static inline size_t run_end(const Pretokenizer *p, const uint8_t *text, size_t size, size_t at, size_t limit,
                             Class class) {
    size_t length;
    while (at < limit && class_at(p, text, size, at, &length) == class)
        at += length;
    return at;
}

/* Length of 's 't 'm 'd 're 've or 'll at text, which is an apostrophe; 0 if there is none. */
static size_t contraction_length(const uint8_t *text, size_t size) {
    if (size >= 2 && (text[1] == 's' || text[1] == 't' || text[1] == 'm' || text[1] == 'd'))
        return 2;
    if (size >= 3 && ((text[2] == 'e' && (text[1] == 'r' || text[1] == 'v')) || (text[1] == 'l' && text[2] == 'l')))
        return 3;
    return 0;
}

/* \s+(?!\S)|\s+ at a white-space character. */
static size_t space_end(const Pretokenizer *p, const uint8_t *text, size_t size, size_t at, size_t limit) {
    size_t end = run_end(p, text, size, at, limit, SPACE), length;
    if (end >= limit || class_at(p, text, size, end, &length) == INVALID)
        return end;
    size_t last = end - 1;
    while (is_continuation(text[last]))
        last--;
    return last > at ? last : end;
}

size_t pretokenizer_piece_end(const Pretokenizer *p, const char *chars, size_t size, size_t at) {
    const uint8_t *text = (const uint8_t *)chars;
    size_t limit = size - at > PIECE_BYTES_MAX ? at + PIECE_BYTES_MAX : size, length;
    if (text[at] == '\'') {
        length = contraction_length(text + at, size - at);
        if (length)
            return at + length;
    }
    size_t start = at + (text[at] == ' ' && at + 1 < size);
    Class class = class_at(p, text, size, start, &length);
    if (class == LETTER || class == NUMBER || class == OTHER || (class == INVALID && start == at))
        return run_end(p, text, size, start + length, limit, class);
    return space_end(p, text, size, at, limit);
}
