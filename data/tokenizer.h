/* Tokenizers: GPT-2's byte-level BPE, and plain bytes. */
#ifndef DATA_TOKENIZER_H
#define DATA_TOKENIZER_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Tokenizer Tokenizer;

/* name: "bytes" (ids 0..255, end of text 256), "gpt2" (the vocabulary that came with tandem: data/gpt2_tokenizer.bin
 * in the running program's folder or one above it, or in the working folder), or the path of a tokenizer file in
 * llm.c's format, version 2.
 * Ids are ranks of the byte-pair merges: the pair whose joined bytes have the lowest id merges first.
 * On failure *tokenizer is NULL. */
Status tokenizer_open(Tokenizer **tokenizer, const char *name);
void tokenizer_close(Tokenizer *tokenizer); /* accepts NULL */

int tokenizer_vocab(const Tokenizer *tokenizer); /* ids are 0..vocab-1: 50257 for GPT-2, 257 for bytes */
int tokenizer_end_of_text(const Tokenizer *tokenizer);

/* A growable array of ids; zero it before the first use, free(ids) after the last. */
typedef struct TokenArray {
    int32_t *ids;
    size_t count, capacity;
} TokenArray;

/* Appends the ids of text u8[size], any bytes, to `out`. Special tokens are never produced from text. Words are
 * cached in the tokenizer, so threads need tokenizers of their own. Time is linear in `size`, up to a logarithm, for
 * any text; a piece (of letters only, say) of more than 8 MiB is cut there. */
void tokenizer_encode(Tokenizer *tokenizer, const char *text, size_t size, TokenArray *out);

/* The same for a text that comes in parts: appends the ids that nothing behind text[size] can change, and returns how
 * many bytes they stand for. The caller offers the rest again, in front of what follows; with `last` nothing follows
 * and all is encoded. A part of tokenizer_part_max_bytes() or more is never refused whole. */
size_t tokenizer_encode_part(Tokenizer *tokenizer, const char *text, size_t size, bool last, TokenArray *out);
size_t tokenizer_part_max_bytes(void);

/* The bytes of one token: *size of them, owned by the tokenizer, not terminated. NULL if id is out of range. */
const char *tokenizer_decode(const Tokenizer *tokenizer, int id, size_t *size);

#endif
