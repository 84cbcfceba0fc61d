/* GPT-2's first cut of a text: the pieces that merges never cross.
 *
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * \p{L}, \p{N} and \s are those of the PCRE2 library at hand. One exception: U+180E, which PCRE2 keeps among \s for
 * Perl's sake, has not been white space since Unicode 6.3 and is not for GPT-2.
 * Bytes that are not valid UTF-8 match nothing: a run of them is a piece, and \s+ before it takes all its white space,
 * as at the end of a text. */
#ifndef DATA_PRETOKENIZE_H
#define DATA_PRETOKENIZE_H

#include "base/error.h"

#include <stddef.h>

enum {
    /* Longer pieces (of one class of characters throughout) are cut here, at a character: bounds memory. */
    PIECE_BYTES_MAX = 8 << 20,
    /* A piece that ends at least so many bytes before the end of the text so far does not depend on what follows. */
    PIECE_LOOKAHEAD_BYTES = 8,
};

typedef struct Pretokenizer Pretokenizer;

Status pretokenizer_create(Pretokenizer **pretokenizer);
void pretokenizer_destroy(Pretokenizer *pretokenizer); /* accepts NULL */

/* Where the piece that starts at text[at] ends; at < size. It depends on nothing before `at`. */
size_t pretokenizer_piece_end(const Pretokenizer *pretokenizer, const char *text, size_t size, size_t at);

#endif
