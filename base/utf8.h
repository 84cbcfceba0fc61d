/* Text that arrives in pieces, cut anywhere. */
#ifndef BASE_UTF8_H
#define BASE_UTF8_H

#include <stddef.h>

/* How many of text's first bytes end with a whole character: all of them, or up to three less when a character of
 * several bytes has only begun. Bytes that are not UTF-8 count as whole, so nothing is held back for good. */
static inline size_t utf8_complete(const char *text, size_t size) {
    for (size_t back = 1; back <= 3 && back <= size; back++) {
        unsigned char byte = (unsigned char)text[size - back];
        if (byte >= 0x80 && byte < 0xc0)
            continue; /* the character began before */
        size_t length = byte < 0xc0 || byte >= 0xf8 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
        return length > back ? size - back : size;
    }
    return size;
}

#endif
