#define _GNU_SOURCE
#include "data/prose.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

void prose_gap(Prose *prose, Gap gap) {
    if (gap > prose->gap)
        prose->gap = gap;
}

static void append(Prose *prose, const char *bytes, size_t size) {
    if (prose->capacity - prose->size < size) {
        prose->capacity = 2 * prose->capacity + size;
        prose->bytes = realloc(prose->bytes, prose->capacity);
        assert(prose->bytes);
    }
    memcpy(prose->bytes + prose->size, bytes, size);
    prose->size += size;
}

static bool starts_with_any(const char *text, size_t size, const char *const *alternatives) {
    for (; *alternatives; alternatives++) {
        size_t length = strlen(*alternatives);
        if (size >= length && memcmp(text, *alternatives, length) == 0)
            return true;
    }
    return false;
}

/* Appends one visible character behind the gap that is owed. */
static void append_visible(Prose *prose, const char *character, size_t size) {
    static const char *const closing[] = {",", ".", ";", ":", "!", "?", ")", "]", "'", "\"", "’", "”", "—", NULL};
    static const char *const gaps[] = {"", " ", " ", "\n", "\n\n"};
    if (prose->gap == GAP_WORD && starts_with_any(character, size, closing))
        prose->gap = GAP_NONE;
    if (prose->size > 0)
        append(prose, gaps[prose->gap], strlen(gaps[prose->gap]));
    prose->gap = GAP_NONE;
    append(prose, character, size);
}

/* Bytes of the character at text[0], going by its first byte; no more than there are. */
static size_t character_size(const char *text, size_t size) {
    uint8_t lead = (uint8_t)*text;
    size_t length = lead < 0xC0 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    return length < size ? length : size;
}

/* One character of text, white space in all its kinds included; `newline` is the gap of '\n'. */
static void append_character(Prose *prose, const char *text, size_t size, Gap newline) {
    static const char *const no_break_spaces[] = {"\u00A0", "\u202F", NULL};
    static const char *const byte_order_mark[] = {"\uFEFF", NULL};
    uint8_t lead = (uint8_t)text[0];
    bool c1_control = size == 2 && lead == 0xC2 && (uint8_t)text[1] < 0xA0;
    if (lead == '\n')
        prose_gap(prose, newline);
    else if (lead == ' ' || lead == '\t' || lead == '\r' || starts_with_any(text, size, no_break_spaces))
        prose_gap(prose, GAP_SPACE);
    else if (lead >= 0x20 && lead != 0x7F && !c1_control && !starts_with_any(text, size, byte_order_mark))
        append_visible(prose, text, size);
}

void prose_plain(Prose *prose, const char *text, size_t size) {
    for (size_t at = 0, length; at < size; at += length) {
        length = character_size(text + at, size - at);
        append_character(prose, text + at, length, prose->gap >= GAP_LINE ? GAP_PARAGRAPH : GAP_LINE);
    }
}

/* The gap that a tag, without its brackets, stands for. */
static Gap tag_gap(const char *tag, size_t size) {
    static const struct {
        const char *name;
        Gap gap;
    } known[] = {
        {"div", GAP_PARAGRAPH},   {"title", GAP_PARAGRAPH}, {"chapter", GAP_PARAGRAPH}, {"table", GAP_PARAGRAPH},
        {"list", GAP_PARAGRAPH},  {"lg", GAP_PARAGRAPH},    {"p", GAP_PARAGRAPH},       {"l", GAP_LINE},
        {"lb", GAP_LINE},         {"row", GAP_LINE},        {"item", GAP_LINE},         {"speaker", GAP_LINE},
        {"cell", GAP_SPACE},      {"note", GAP_WORD},
    };
    size_t start = size > 0 && tag[0] == '/', length = start;
    while (length < size && !strchr(" \t\r\n/", tag[length]))
        length++;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strlen(known[i].name) == length - start && memcmp(tag + start, known[i].name, length - start) == 0) {
            bool marker = known[i].gap == GAP_PARAGRAPH && memmem(tag, size, "x-milestone", 11);
            return marker ? GAP_NONE : known[i].gap; /* a marker between verses, in the middle of a sentence */
        }
    return GAP_NONE;
}

/* UTF-8 of a code point; 0 bytes if there is none. */
static size_t utf8(unsigned long code, char out[4]) {
    if (code == 0 || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000))
        return 0;
    static const uint8_t lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
    size_t length = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; code >>= 6)
        out[i] = (char)(0x80 | (code & 0x3F));
    out[0] = (char)(lead[length] | code);
    return length;
}

/* The character of the entity at text, "&...;", into out, its size into *length (0: nothing to write). Returns the
 * entity's size, 0 if it is none. */
static size_t entity(const char *text, size_t size, char out[4], size_t *length) {
    static const struct {
        const char *name;
        char character;
    } named[] = {{"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}};
    for (size_t i = 0; i < sizeof named / sizeof named[0]; i++)
        if (size >= strlen(named[i].name) && memcmp(text, named[i].name, strlen(named[i].name)) == 0) {
            out[0] = named[i].character;
            *length = 1;
            return strlen(named[i].name);
        }
    char digits[12] = {0}, *end;
    memcpy(digits, text, size < sizeof digits - 1 ? size : sizeof digits - 1);
    if (digits[1] != '#')
        return 0;
    bool hex = digits[2] == 'x' || digits[2] == 'X';
    unsigned long code = strtoul(digits + (hex ? 3 : 2), &end, hex ? 16 : 10);
    *length = utf8(code, out);
    return *end == ';' ? (size_t)(end + 1 - digits) : 0;
}

/* Where the markup behind the tag text[0..size) goes on: behind </note> if it opens a note, else right behind it. */
static size_t skip_note(const char *text, size_t tag_size, size_t size) {
    static const char open[] = "<note", close[] = "</note>";
    bool opens = tag_size > strlen(open) && memcmp(text, open, strlen(open)) == 0 && text[tag_size - 2] != '/';
    const char *end = opens ? memmem(text, size, close, strlen(close)) : NULL;
    return end ? (size_t)(end - text) + strlen(close) : tag_size;
}

void prose_osis(Prose *prose, const char *text, size_t size) {
    for (size_t at = 0, used; at < size; at += used) {
        const char *here = text + at, *close = *here == '<' ? memchr(here, '>', size - at) : NULL;
        char decoded[4];
        size_t length = 0;
        if (close) {
            size_t tag_size = (size_t)(close + 1 - here);
            prose_gap(prose, tag_gap(here + 1, tag_size - 2));
            used = skip_note(here, tag_size, size - at);
        } else if (*here == '&' && (used = entity(here, size - at, decoded, &length)) > 0) {
            if (length)
                append_character(prose, decoded, length, GAP_SPACE);
        } else {
            used = character_size(here, size - at);
            append_character(prose, here, used, GAP_SPACE);
        }
    }
}
