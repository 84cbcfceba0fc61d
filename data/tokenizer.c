/* Text to ids and back.
 *
 *     text -> pieces (pretokenize.c) -> word cache -> ids
 *                                        miss: merges (bpe.c)
 *
 * Most pieces are words seen before. Those of up to 15 bytes and up to 3 ids sit in a cache of fixed size: 2^16 entries
 * of 32 bytes, each word in one place only, the newest stays. A hit is one comparison of 16 bytes, the word's bytes and
 * length, padded with zeros. The cache never grows and never changes a result. */
#define _POSIX_C_SOURCE 200809L
#include "data/tokenizer.h"

#include "data/bpe.h"
#include "data/pretokenize.h"

#include <assert.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTE_VALUES = 256, CACHE_BITS = 16, CACHED_BYTES = 15, CACHED_IDS = 3, PATH_SIZE = 1024 };

typedef struct Word {
    uint64_t low, high; /* bytes 0..7 and 8..14, zero-padded; the top byte of `high` is the length */
} Word;

typedef struct CacheEntry {
    Word word; /* length 0: free */
    int32_t ids[CACHED_IDS];
    int32_t count;
} CacheEntry;

struct Tokenizer {
    bool plain_bytes; /* then nothing below is used but byte_texts */
    char byte_texts[BYTE_VALUES];
    Vocabulary vocabulary;
    Pretokenizer *pretokenizer;
    BpeScratch scratch;
    CacheEntry *cache;
};

static const char end_of_text[] = "<|endoftext|>";

/* Finds the vocabulary of GPT-2: DIR/data/ for the program's folder and the three above it (programs are in build/,
 * build/tests/ and the like), then the working folder. */
static Status find_gpt2(char *path, size_t size) {
    static const char name[] = "data/gpt2_tokenizer.bin";
    char program[PATH_SIZE];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    program[length > 0 ? length : 0] = 0;
    char *folder = program;
    for (int i = 0; length > 0 && i < 4; i++) {
        folder = dirname(folder);
        if (snprintf(path, size, "%s/%s", folder, name) < (int)size && access(path, F_OK) == 0)
            return OK;
    }
    snprintf(path, size, "%s", name);
    if (access(path, F_OK) == 0)
        return OK;
    return bad_input("tokenizer 'gpt2': expected %s above the program's folder or in the working folder, found none",
                     name);
}

static Status open_bpe(Tokenizer *tokenizer, const char *name) {
    char found[PATH_SIZE];
    if (strcmp(name, "gpt2") == 0) {
        TRY(find_gpt2(found, sizeof found));
        name = found;
    }
    TRY(vocabulary_open(&tokenizer->vocabulary, name));
    TRY(pretokenizer_create(&tokenizer->pretokenizer));
    tokenizer->cache = calloc((size_t)1 << CACHE_BITS, sizeof *tokenizer->cache);
    return tokenizer->cache ? OK : fault("out of memory for the word cache");
}

Status tokenizer_open(Tokenizer **tokenizer, const char *name) {
    *tokenizer = calloc(1, sizeof **tokenizer);
    assert(*tokenizer);
    (*tokenizer)->plain_bytes = strcmp(name, "bytes") == 0;
    for (int i = 0; i < BYTE_VALUES; i++)
        (*tokenizer)->byte_texts[i] = (char)i;
    Status status = (*tokenizer)->plain_bytes ? OK : open_bpe(*tokenizer, name);
    if (status != OK) {
        tokenizer_close(*tokenizer);
        *tokenizer = NULL;
    }
    return status;
}

void tokenizer_close(Tokenizer *tokenizer) {
    if (!tokenizer)
        return;
    vocabulary_close(&tokenizer->vocabulary);
    pretokenizer_destroy(tokenizer->pretokenizer);
    bpe_scratch_free(&tokenizer->scratch);
    free(tokenizer->cache);
    free(tokenizer);
}

int tokenizer_vocab(const Tokenizer *tokenizer) {
    return tokenizer->plain_bytes ? BYTE_VALUES + 1 : tokenizer->vocabulary.count;
}

int tokenizer_end_of_text(const Tokenizer *tokenizer) {
    return tokenizer->plain_bytes ? BYTE_VALUES : tokenizer->vocabulary.end_of_text;
}

const char *tokenizer_decode(const Tokenizer *tokenizer, int id, size_t *size) {
    if (id < 0 || id >= tokenizer_vocab(tokenizer))
        return NULL;
    if (!tokenizer->plain_bytes) {
        *size = tokenizer->vocabulary.sizes[id];
        return (const char *)tokenizer->vocabulary.bytes[id];
    }
    *size = id == BYTE_VALUES ? sizeof end_of_text - 1 : 1;
    return id == BYTE_VALUES ? end_of_text : &tokenizer->byte_texts[id];
}

/* Room for `more` ids behind the last one. */
static int32_t *reserve(TokenArray *out, size_t more) {
    if (out->capacity - out->count < more) {
        out->capacity = 2 * out->capacity + more + 64;
        out->ids = realloc(out->ids, out->capacity * sizeof *out->ids);
        assert(out->ids);
    }
    return out->ids + out->count;
}

static void encode_bytes(const char *text, size_t size, TokenArray *out) {
    int32_t *ids = reserve(out, size);
    for (size_t i = 0; i < size; i++)
        ids[i] = (uint8_t)text[i];
    out->count += size;
}

/* The word of text[0..size), 0 < size <= CACHED_BYTES; `readable` bytes may be read. */
static inline Word word_of(const char *text, size_t size, size_t readable) {
    Word word = {0};
    if (readable >= sizeof word) { /* a load of fixed size, then cut */
        memcpy(&word, text, sizeof word);
        if (size < 8)
            word = (Word){word.low & (((uint64_t)1 << 8 * size) - 1), 0};
        else
            word.high &= ((uint64_t)1 << 8 * (size - 8)) - 1;
    } else {
        memcpy(&word, text, size);
    }
    word.high |= (uint64_t)size << 56;
    return word;
}

static inline CacheEntry *cache_entry(const Tokenizer *tokenizer, Word word) {
    uint64_t hash = (word.low ^ word.high * 0xff51afd7ed558ccdu) * 0x9e3779b97f4a7c15u;
    return &tokenizer->cache[hash >> (64 - CACHE_BITS)];
}

static void encode_miss(Tokenizer *tokenizer, const char *piece, size_t size, TokenArray *out) {
    int32_t *ids = reserve(out, size);
    out->count += bpe_encode(&tokenizer->vocabulary, &tokenizer->scratch, (const uint8_t *)piece, size, ids);
}

static inline void encode_piece(Tokenizer *tokenizer, const char *piece, size_t size, size_t readable,
                                TokenArray *out) {
    if (size > CACHED_BYTES) {
        encode_miss(tokenizer, piece, size, out);
        return;
    }
    Word word = word_of(piece, size, readable);
    CacheEntry *entry = cache_entry(tokenizer, word);
    if (entry->word.low == word.low && entry->word.high == word.high) {
        memcpy(reserve(out, CACHED_IDS), entry->ids, sizeof entry->ids);
        out->count += (size_t)entry->count;
        return;
    }
    size_t before = out->count;
    encode_miss(tokenizer, piece, size, out);
    if (out->count - before > CACHED_IDS)
        return;
    *entry = (CacheEntry){.word = word, .count = (int32_t)(out->count - before)};
    memcpy(entry->ids, out->ids + before, (out->count - before) * sizeof *out->ids);
}

size_t tokenizer_encode_part(Tokenizer *tokenizer, const char *text, size_t size, bool last, TokenArray *out) {
    if (tokenizer->plain_bytes) {
        encode_bytes(text, size, out);
        return size;
    }
    size_t at = 0;
    while (at < size) {
        size_t end = pretokenizer_piece_end(tokenizer->pretokenizer, text, size, at);
        if (!last && size - end < PIECE_LOOKAHEAD_BYTES)
            break;
        encode_piece(tokenizer, text + at, end - at, size - at, out);
        at = end;
    }
    return at;
}

size_t tokenizer_part_max_bytes(void) { return PIECE_BYTES_MAX + 2 * PIECE_LOOKAHEAD_BYTES; }

void tokenizer_encode(Tokenizer *tokenizer, const char *text, size_t size, TokenArray *out) {
    tokenizer_encode_part(tokenizer, text, size, true, out);
}
