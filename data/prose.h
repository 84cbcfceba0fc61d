/* Clean prose out of plain or marked-up text: one space between words, one newline between lines, one blank line
 * between paragraphs, nothing else. */
#ifndef DATA_PROSE_H
#define DATA_PROSE_H

#include <stddef.h>
#include <stdint.h>

/* What stands between two visible characters. The widest gap asked for wins. */
typedef enum Gap {
    GAP_NONE,
    GAP_WORD, /* a space, but none in front of closing punctuation: where a footnote was */
    GAP_SPACE,
    GAP_LINE,
    GAP_PARAGRAPH,
} Gap;

/* The text so far: zero it before the first use, free(bytes) after the last. */
typedef struct Prose {
    char *bytes;
    size_t size, capacity;
    Gap gap; /* owed before the next character; never written at the start or the end */
} Prose;

void prose_gap(Prose *prose, Gap gap);

/* Appends UTF-8 text u8[size]. A newline is a line, a blank line a paragraph. Controls and byte-order marks go,
 * no-break spaces become spaces; bytes that are not UTF-8 stay. */
void prose_plain(Prose *prose, const char *text, size_t size);

/* Appends OSIS XML: tags become gaps, entities characters, footnotes nothing. */
void prose_osis(Prose *prose, const char *text, size_t size);

#endif
