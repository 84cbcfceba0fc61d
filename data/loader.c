/* Any sequence of a set of shards, by its global position.
 *
 * Shards are mapped, so opening a large set costs nothing but its headers. A running sum of sequences per shard finds
 * the shard of a sequence by bisection.
 *
 * The shuffle is a permutation of 0..n-1 that is computed, not stored: a Feistel network over the smallest even number
 * of bits that holds n is a permutation of a power of four, and a value that falls at or above n goes through it
 * again until it falls below ("cycle walking"; fewer than four rounds on average but for tiny n). */
#define _POSIX_C_SOURCE 200809L
#include "data/loader.h"

#include "base/random.h"
#include "data/shard.h"

#include <assert.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>

enum { CHECK_AT_ONCE_TOKENS = 100000000, FEISTEL_ROUNDS = 6 };

struct Loader {
    Shard *shards;
    int64_t *first; /* [shard_count + 1] the sequences in front of each shard; the last one is n */
    int shard_count;
    int half_bits; /* the Feistel network permutes 2^(2 * half_bits) >= n values */
    int64_t tokens;
    int seq_len, vocab;
    bool shuffle;
    uint64_t seed;
};

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Sorts the names and drops repetitions; returns how many are left. */
static size_t unique_names(char **names, size_t count) {
    qsort(names, count, sizeof *names, compare_names);
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        if (kept == 0 || strcmp(names[kept - 1], names[i]) != 0)
            names[kept++] = names[i];
    return kept;
}

/* Cuts the first pattern off *rest; NULL when none is left. Backslashes stay: glob() takes them away. */
static char *next_pattern(char **rest) {
    char *pattern = *rest + strspn(*rest, " "), *end = pattern;
    while (*end && *end != ' ')
        end += end[0] == '\\' && end[1] ? 2 : 1;
    *rest = *end ? end + 1 : end;
    *end = 0;
    return *pattern ? pattern : NULL;
}

/* All files that match one of the patterns; globfree() after success and failure. */
static Status find_files(const LoaderOptions *options, glob_t *found) {
    char *patterns = strdup(options->glob), *rest = patterns;
    assert(patterns);
    Status status = OK;
    for (char *p; status == OK && (p = next_pattern(&rest)) != NULL;) {
        int error = glob(p, GLOB_APPEND, NULL, found);
        if (error == GLOB_NOMATCH)
            status = bad_input("%s: no file matches%s%s", p, options->hint ? "; make token shards with: " : "",
                               options->hint ? options->hint : "");
        else if (error != 0)
            status = fault("%s: cannot list the files", p);
    }
    free(patterns);
    if (status == OK && found->gl_pathc == 0)
        status = bad_input("expected a pattern of token shards, found '%s'", options->glob);
    return status;
}

static Status open_shards(Loader *loader, const glob_t *found) {
    /* A copy of the list: globfree wants its own untouched. */
    char **names = calloc(found->gl_pathc, sizeof *names);
    assert(names);
    memcpy(names, found->gl_pathv, found->gl_pathc * sizeof *names);
    size_t count = unique_names(names, found->gl_pathc);
    loader->shards = calloc(count, sizeof *loader->shards);
    loader->first = calloc(count + 1, sizeof *loader->first);
    assert(loader->shards && loader->first);
    Status status = OK;
    for (size_t i = 0; i < count && status == OK; i++) {
        status = shard_open(&loader->shards[i], names[i]);
        loader->shard_count += status == OK;
    }
    free(names);
    return status;
}

/* A sequence needs one token more than its length, which the next sequence starts with. */
static int64_t sequences_in(int64_t tokens, int seq_len) { return tokens > 0 ? (tokens - 1) / seq_len : 0; }

static Status count_sequences(Loader *loader, const char *pattern) {
    int64_t longest = 0;
    for (int i = 0; i < loader->shard_count; i++) {
        int64_t count = loader->shards[i].count;
        loader->tokens += count;
        loader->first[i + 1] = loader->first[i] + sequences_in(count, loader->seq_len);
        longest = count > longest ? count : longest;
    }
    int64_t n = loader_sequences(loader);
    if (n == 0)
        return bad_input("%s: expected a shard of at least %d tokens (one sequence of %d), the longest of %d has %lld",
                         pattern, loader->seq_len + 1, loader->seq_len, loader->shard_count, (long long)longest);
    while ((int64_t)1 << (2 * loader->half_bits) < n)
        loader->half_bits++;
    return OK;
}

/* Those of a larger set are found out when they are read. */
static Status check_tokens(const Loader *loader) {
    enum { CHUNK = 4096 };
    int ids[CHUNK];
    if (loader->tokens > CHECK_AT_ONCE_TOKENS)
        return OK;
    for (const Shard *shard = loader->shards; shard < loader->shards + loader->shard_count; shard++)
        for (int64_t at = 0; at < shard->count; at += CHUNK) {
            int64_t rest = shard->count - at;
            TRY(shard_read(shard, at, rest < CHUNK ? rest : CHUNK, loader->vocab, ids));
        }
    return OK;
}

static Status open_all(Loader *loader, const LoaderOptions *options) {
    glob_t found = {0};
    Status status = find_files(options, &found);
    if (status == OK)
        status = open_shards(loader, &found);
    globfree(&found);
    TRY(status);
    TRY(count_sequences(loader, options->glob));
    return check_tokens(loader);
}

Status loader_open(Loader **result, const LoaderOptions *options) {
    assert(options->seq_len > 0 && options->vocab > 0);
    Loader *loader = calloc(1, sizeof *loader);
    assert(loader);
    loader->half_bits = 3; /* fewer would leave too few permutations */
    loader->seq_len = options->seq_len;
    loader->vocab = options->vocab;
    loader->shuffle = options->shuffle;
    loader->seed = options->seed;
    Status status = open_all(loader, options);
    if (status != OK) {
        loader_close(loader);
        loader = NULL;
    }
    *result = loader;
    return status;
}

void loader_close(Loader *loader) {
    if (!loader)
        return;
    for (int i = 0; i < loader->shard_count; i++)
        shard_close(&loader->shards[i]);
    free(loader->shards);
    free(loader->first);
    free(loader);
}

int64_t loader_tokens(const Loader *loader) { return loader->tokens; }
int loader_shards(const Loader *loader) { return loader->shard_count; }
const char *loader_shard(const Loader *loader, int i) { return loader->shards[i].path; }
int64_t loader_sequences(const Loader *loader) { return loader->first[loader->shard_count]; }

/* One pass through the network: (left, right) -> (right, left ^ f(right)), a bijection whatever f is. */
static uint64_t feistel(const Loader *loader, uint64_t epoch, uint64_t value) {
    uint64_t mask = ((uint64_t)1 << loader->half_bits) - 1;
    uint64_t left = value >> loader->half_bits, right = value & mask;
    for (uint64_t round = 0; round < FEISTEL_ROUNDS; round++) {
        uint64_t mixed = left ^ (random_bits(loader->seed, epoch * FEISTEL_ROUNDS + round, right) & mask);
        left = right;
        right = mixed;
    }
    return left << loader->half_bits | right;
}

static int64_t sequence_at(const Loader *loader, int64_t position) {
    uint64_t n = (uint64_t)loader_sequences(loader);
    uint64_t epoch = (uint64_t)position / n, value = (uint64_t)position % n;
    if (!loader->shuffle)
        return (int64_t)value;
    do
        value = feistel(loader, epoch, value);
    while (value >= n);
    return (int64_t)value;
}

/* The shard that holds a sequence: the last one with first[shard] <= sequence. */
static int shard_of(const Loader *loader, int64_t sequence) {
    int low = 0, high = loader->shard_count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (loader->first[middle] <= sequence)
            low = middle;
        else
            high = middle;
    }
    return low;
}

Status loader_read(const Loader *loader, int64_t position, int count, int *inputs, int *targets) {
    assert(position >= 0 && count >= 0);
    const int T = loader->seq_len;
    for (int i = 0; i < count; i++, inputs += T, targets += T) {
        int64_t sequence = sequence_at(loader, position + i);
        int index = shard_of(loader, sequence);
        const Shard *shard = &loader->shards[index];
        int64_t start = (sequence - loader->first[index]) * T;
        TRY(shard_read(shard, start, T, loader->vocab, inputs));
        TRY(shard_read(shard, start + 1, T, loader->vocab, targets));
    }
    return OK;
}
