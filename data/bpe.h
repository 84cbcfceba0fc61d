/* Byte-pair encoding: a vocabulary in llm.c's tokenizer format, and the merges that follow from it. */
#ifndef DATA_BPE_H
#define DATA_BPE_H

#include "base/error.h"
#include "base/file.h"

#include <stddef.h>
#include <stdint.h>

typedef struct Vocabulary {
    FileMap map;            /* holds the tokens' bytes */
    const uint8_t **bytes;  /* [count] of each token */
    uint8_t *sizes;         /* [count] bytes of each token, at least 1 */
    int count, end_of_text;
    int size_max;           /* of the longest token that text can give */
    int32_t *slots;         /* open hash of bytes to id, -1 where free; slot_mask + 1 of them */
    uint32_t slot_mask;
} Vocabulary;

/* Refuses (BAD_INPUT) anything but a whole file of format version 2 in which every single byte is a token. */
Status vocabulary_open(Vocabulary *vocabulary, const char *path);
void vocabulary_close(Vocabulary *vocabulary); /* accepts a zeroed or half-opened one */

/* The token of just these bytes, or -1. The end-of-text token is never found. */
int vocabulary_find(const Vocabulary *vocabulary, const uint8_t *bytes, size_t size);

/* Working memory of bpe_encode, kept between calls. Zero it before the first use. */
typedef struct BpeScratch {
    struct BpeNode *nodes;
    uint64_t *heap;
    size_t capacity, heap_count;
} BpeScratch;

void bpe_scratch_free(BpeScratch *scratch);

/* Encodes one piece, 0 < size < 2^31, into ids[size at most]; returns how many. O(size log size). */
size_t bpe_encode(const Vocabulary *vocabulary, BpeScratch *scratch, const uint8_t *piece, size_t size, int32_t *ids);

#endif
