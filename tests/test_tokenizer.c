/* data/tokenizer.c, pretokenize.c, bpe.c against the recorded ids, PCRE2 with GPT-2's whole pattern, and merges by
 * repeated search. */
#define _POSIX_C_SOURCE 200809L
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tests/check.h"

#include "base/file.h"
#include "base/random.h"
#include "data/pretokenize.h"
#include "data/tokenizer.h"

#include <cJSON.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TEXT_MAX = 4096 };

/* The pattern as it stands in pretokenize.h, U+180E taken out of \s. */
static const char pattern[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?(?:[^\\s\\p{L}\\p{N}]|\\x{180E})+"
                              "|[^\\S\\x{180E}]+(?![\\S\\x{180E}])|[^\\S\\x{180E}]+";

typedef struct Reference {
    pcre2_code *regex;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack; /* long runs need more than the default */
    int *by_bytes; /* ids sorted by their bytes, the end of text left out */
    int count;
} Reference;

typedef struct Fixture {
    Tokenizer *gpt2, *bytes;
    Pretokenizer *pretokenizer;
    Reference reference;
} Fixture;

static Fixture fixture;

/* ---- the reference ---- */

static int compare_bytes(const char *a, size_t a_size, const char *b, size_t b_size) {
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    return order ? order : (a_size > b_size) - (a_size < b_size);
}

static int compare_ids(const void *a, const void *b) {
    size_t a_size, b_size;
    const char *a_bytes = tokenizer_decode(fixture.gpt2, *(const int *)a, &a_size);
    const char *b_bytes = tokenizer_decode(fixture.gpt2, *(const int *)b, &b_size);
    return compare_bytes(a_bytes, a_size, b_bytes, b_size);
}

static int reference_find(const char *bytes, size_t size) {
    int low = 0, high = fixture.reference.count;
    while (low < high) {
        int middle = (low + high) / 2, id = fixture.reference.by_bytes[middle];
        size_t token_size;
        const char *token = tokenizer_decode(fixture.gpt2, id, &token_size);
        int order = compare_bytes(token, token_size, bytes, size);
        if (order == 0)
            return id;
        low = order < 0 ? middle + 1 : low;
        high = order > 0 ? middle : high;
    }
    return -1;
}

static void push(TokenArray *out, int id) {
    if (out->count == out->capacity) {
        out->capacity = 2 * out->capacity + 16;
        out->ids = realloc(out->ids, out->capacity * sizeof *out->ids);
    }
    out->ids[out->count++] = id;
}

/* Merges by the book: look at all pairs, join the first of those with the lowest id, start again. */
static void reference_merge(const char *piece, size_t size, TokenArray *out) {
    size_t *ends = malloc(size * sizeof *ends), count = size;
    for (size_t i = 0; i < size; i++)
        ends[i] = i + 1;
    for (;;) {
        size_t best = count;
        int best_id = -1;
        for (size_t i = 0; i + 1 < count; i++) {
            size_t start = i ? ends[i - 1] : 0;
            int id = reference_find(piece + start, ends[i + 1] - start);
            if (id >= 0 && (best_id < 0 || id < best_id)) {
                best = i;
                best_id = id;
            }
        }
        if (best_id < 0)
            break;
        memmove(ends + best, ends + best + 1, (count - best - 1) * sizeof *ends);
        count--;
    }
    for (size_t i = 0; i < count; i++)
        push(out, reference_find(piece + (i ? ends[i - 1] : 0), ends[i] - (i ? ends[i - 1] : 0)));
    free(ends);
}

/* The end of the piece that PCRE2 finds at text[at]; bytes in front of the next match are a piece of their own. */
static size_t reference_piece_end(const char *text, size_t size, size_t at) {
    Reference *r = &fixture.reference;
    int rc = pcre2_match(r->regex, (PCRE2_SPTR)text, size, at, 0, r->match, r->context);
    if (rc == PCRE2_ERROR_NOMATCH)
        return size;
    assert_true(rc > 0);
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(r->match);
    return range[0] > at ? range[0] : range[1];
}

static void reference_encode(const char *text, size_t size, TokenArray *out) {
    for (size_t at = 0, end; at < size; at = end) {
        end = reference_piece_end(text, size, at);
        reference_merge(text + at, end - at, out);
    }
}

static int set_up(void **state) {
    (void)state;
    int error;
    size_t where;
    Reference *r = &fixture.reference;
    if (tokenizer_open(&fixture.gpt2, "gpt2") != OK || tokenizer_open(&fixture.bytes, "bytes") != OK ||
        pretokenizer_create(&fixture.pretokenizer) != OK) {
        fprintf(stderr, "%s\n", error_line());
        return 1;
    }
    r->regex = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF, &error, &where, NULL);
    pcre2_jit_compile(r->regex, PCRE2_JIT_COMPLETE);
    r->match = pcre2_match_data_create(4, NULL);
    r->context = pcre2_match_context_create(NULL);
    r->stack = pcre2_jit_stack_create(1 << 16, 1 << 28, NULL);
    pcre2_jit_stack_assign(r->context, NULL, r->stack);
    r->by_bytes = malloc((size_t)tokenizer_vocab(fixture.gpt2) * sizeof(int));
    for (int id = 0; id < tokenizer_vocab(fixture.gpt2); id++)
        if (id != tokenizer_end_of_text(fixture.gpt2))
            r->by_bytes[r->count++] = id;
    qsort(r->by_bytes, (size_t)r->count, sizeof(int), compare_ids);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    tokenizer_close(fixture.gpt2);
    tokenizer_close(fixture.bytes);
    pretokenizer_destroy(fixture.pretokenizer);
    pcre2_jit_stack_free(fixture.reference.stack);
    pcre2_match_context_free(fixture.reference.context);
    pcre2_match_data_free(fixture.reference.match);
    pcre2_code_free(fixture.reference.regex);
    free(fixture.reference.by_bytes);
    return 0;
}

/* ---- random texts ---- */

/* What pieces begin, end and stumble on: classes, contractions, white space of 1 to 3 bytes, invalid UTF-8. */
static const char *const atoms[] = {
    "a", "b", "e", "s", "t", "Z", "the", "ing", "lower", "don't", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S",
    "'", "''", "0", "1", "42", " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\v", "\f", "\x1c", ".", ",", "!", "--",
    "_", "$", "\x7f", "\u00a0", "\xc2\x85" /* U+0085 */, "\u3000", "\u2028", "\u1680", "\u180e", "\u200b", "\u00e9",
    "e\u0301", "\u00b2", "\u00bd", "\u2160", "\u0660", "\u65e5\u672c", "\u043f\u0440", "\u05d0", "\U0001f600", "\u2019",
    "\u201c", "\u2014", "\U00010400", "\U0001d7ce", "\U000e0001", "\uffff",
    /* the last ten are not UTF-8 */
    "\x80", "\xbf", "\xc0\xaf", "\xc3", "\xe2\x82", "\xed\xa0\x80", "\xf0\x9f\x98", "\xf4\x90\x80\x80", "\xf5", "\xff",
};
enum { ATOM_COUNT = sizeof atoms / sizeof atoms[0], VALID_ATOMS = ATOM_COUNT - 10 };

static uint64_t draw(uint64_t stream, uint64_t *counter) { return random_bits(7, stream, (*counter)++) >> 8; }

/* A text of about `size` bytes out of atoms; few different ones per text, so that runs and repetitions are common. */
static size_t random_text(uint64_t stream, size_t size, int atom_count, char text[TEXT_MAX]) {
    uint64_t counter = 0;
    uint64_t palette[6];
    for (int i = 0; i < 6; i++)
        palette[i] = draw(stream, &counter) % (uint64_t)atom_count;
    size_t length = 0;
    while (length < size) {
        uint64_t pick = draw(stream, &counter);
        const char *atom = atoms[pick % 8 ? palette[pick / 8 % 6] : pick / 8 % (uint64_t)atom_count];
        memcpy(text + length, atom, strlen(atom));
        length += strlen(atom);
    }
    return length;
}

static size_t random_bytes(uint64_t stream, size_t size, char *bytes) {
    for (size_t i = 0; i < size; i++)
        bytes[i] = (char)random_bits(11, stream, i);
    return size;
}

static void assert_same_ids(const TokenArray *actual, const TokenArray *expected, const char *what, size_t number) {
    if (actual->count != expected->count)
        fail_msg("%s %zu: expected %zu ids, found %zu", what, number, expected->count, actual->count);
    for (size_t i = 0; i < expected->count; i++)
        if (actual->ids[i] != expected->ids[i])
            fail_msg("%s %zu: id %zu: expected %d, found %d", what, number, i, expected->ids[i], actual->ids[i]);
}

static void assert_round_trip(Tokenizer *tokenizer, const char *text, size_t size) {
    TokenArray ids = {0};
    tokenizer_encode(tokenizer, text, size, &ids);
    size_t at = 0;
    for (size_t i = 0; i < ids.count; i++) {
        size_t token_size;
        const char *token = tokenizer_decode(tokenizer, ids.ids[i], &token_size);
        assert_non_null(token);
        assert_int_not_equal(ids.ids[i], tokenizer_end_of_text(tokenizer));
        assert_true(at + token_size <= size && memcmp(text + at, token, token_size) == 0);
        at += token_size;
    }
    assert_int_equal(at, size);
    free(ids.ids);
}

/* ---- tests ---- */

static void test_recorded_ids(void **state) {
    (void)state;
    FileMap map;
    assert_ok(file_map(&map, "tests/data/tokenizer_cases.json"));
    cJSON *cases = cJSON_ParseWithLength((const char *)map.bytes, map.size);
    assert_true(cJSON_GetArraySize(cases) >= 27);
    const cJSON *item;
    size_t number = 0;
    cJSON_ArrayForEach(item, cases) {
        const char *text = cJSON_GetObjectItem(item, "text")->valuestring;
        TokenArray actual = {0}, expected = {0};
        const cJSON *id;
        cJSON_ArrayForEach(id, cJSON_GetObjectItem(item, "ids")) push(&expected, id->valueint);
        tokenizer_encode(fixture.gpt2, text, strlen(text), &actual);
        assert_same_ids(&actual, &expected, "case", number++);
        free(actual.ids);
        free(expected.ids);
    }
    cJSON_Delete(cases);
    file_unmap(&map);
}

static void check_pieces(const char *text, size_t size, size_t number) {
    for (size_t at = 0; at < size;) {
        size_t end = pretokenizer_piece_end(fixture.pretokenizer, text, size, at);
        size_t expected = reference_piece_end(text, size, at);
        if (end != expected)
            fail_msg("text %zu: piece at %zu: expected its end at %zu, found %zu", number, at, expected, end);
        at = end;
    }
}

static void test_pieces_equal_pcre2(void **state) {
    (void)state;
    char text[TEXT_MAX];
    for (size_t i = 0; i < 20000; i++)
        check_pieces(text, random_text(i, 1 + i % 60, i % 2 ? ATOM_COUNT : VALID_ATOMS, text), i);
    for (size_t i = 0; i < 2000; i++)
        check_pieces(text, random_bytes(i, 1 + i % 200, text), i);
}

static size_t put_utf8(char *out, uint32_t code) {
    if (code < 0x80)
        return (size_t)(out[0] = (char)code, 1);
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; code >>= 6)
        out[i] = (char)(0x80 | (code & 63));
    out[0] = (char)(0xF00 >> length | code);
    return length;
}

/* Every character behind a letter, a digit, a comma and a blank. */
static void test_every_character(void **state) {
    (void)state;
    static const char neighbours[] = "a1, ";
    char text[8];
    for (uint32_t code = 0; code < 0x110000; code += code == 0xD7FF ? 0x801 : 1) {
        text[0] = neighbours[code % 4];
        check_pieces(text, 1 + put_utf8(text + 1, code), code);
    }
}

static void test_ids_equal_reference(void **state) {
    (void)state;
    char text[TEXT_MAX];
    for (size_t i = 0; i < 3000; i++) {
        size_t size = i % 3 == 2 ? random_bytes(i, i % 100, text) : random_text(i, i % 150, ATOM_COUNT, text);
        TokenArray actual = {0}, expected = {0};
        tokenizer_encode(fixture.gpt2, text, size, &actual);
        reference_encode(text, size, &expected);
        assert_same_ids(&actual, &expected, "text", i);
        free(actual.ids);
        free(expected.ids);
    }
}

/* A token's own bytes, where they are one piece, come back as that token. */
static void test_every_token(void **state) {
    (void)state;
    int whole = 0;
    for (int id = 0; id < tokenizer_vocab(fixture.gpt2); id++) {
        size_t size;
        const char *bytes = tokenizer_decode(fixture.gpt2, id, &size);
        if (id == tokenizer_end_of_text(fixture.gpt2) ||
            pretokenizer_piece_end(fixture.pretokenizer, bytes, size, 0) != size)
            continue;
        TokenArray ids = {0};
        tokenizer_encode(fixture.gpt2, bytes, size, &ids);
        assert_int_equal(ids.count, 1);
        assert_int_equal(ids.ids[0], id);
        free(ids.ids);
        whole++;
    }
    assert_true(whole > 49000);
}

static void test_any_bytes_come_back(void **state) {
    (void)state;
    enum { SIZE = 100000 };
    char *bytes = malloc(SIZE), text[TEXT_MAX];
    for (size_t i = 0; i < 200; i++) {
        random_bytes(i, i * i, bytes);
        assert_round_trip(fixture.gpt2, bytes, i * i);
        assert_round_trip(fixture.bytes, bytes, i * i);
    }
    for (size_t i = 0; i < 500; i++)
        assert_round_trip(fixture.gpt2, text, random_text(i, i * 5, ATOM_COUNT, text));
    free(bytes);
}

/* A megabyte of one atom: must end in reasonable time, which quadratic work would not. */
static void test_long_pieces(void **state) {
    (void)state;
    enum { SIZE = 1 << 20, SHORT = 600 };
    char *text = malloc(SIZE + 16);
    static const char *const repeated[] = {"a", "ab", " ", "\n", "\u3000", "!", "7", "\xff", "\u00e9", "q", "\u65e5"};
    for (size_t i = 0; i < sizeof repeated / sizeof repeated[0]; i++) {
        size_t atom = strlen(repeated[i]), size = 0;
        for (; size < SIZE; size += atom)
            memcpy(text + size, repeated[i], atom);
        text[size] = 'x'; /* behind white space: one character goes back */
        check_pieces(text, size + 1, i);
        assert_round_trip(fixture.gpt2, text, size + 1);
        TokenArray actual = {0}, expected = {0};
        tokenizer_encode(fixture.gpt2, text, SHORT, &actual);
        reference_encode(text, SHORT, &expected);
        assert_same_ids(&actual, &expected, "repetition", i);
        free(actual.ids);
        free(expected.ids);
    }
    free(text);
}

static void test_piece_limit(void **state) {
    (void)state;
    size_t size = (size_t)2 * PIECE_BYTES_MAX + 100;
    char *text = malloc(size);
    for (size_t i = 0; i < size; i++)
        text[i] = i % 2 ? '\xa9' : '\xc3';
    size_t first = pretokenizer_piece_end(fixture.pretokenizer, text, size, 0);
    assert_int_equal(first, PIECE_BYTES_MAX);
    memset(text, ' ', size);
    assert_int_equal(pretokenizer_piece_end(fixture.pretokenizer, text, size, 0), PIECE_BYTES_MAX);
    assert_int_equal(pretokenizer_piece_end(fixture.pretokenizer, text, size, first), 2 * PIECE_BYTES_MAX);
    size_t rest = pretokenizer_piece_end(fixture.pretokenizer, text, size, (size_t)2 * PIECE_BYTES_MAX);
    assert_int_equal(rest, size);
    free(text);
}

/* Encodes a text in parts of random sizes, as a stream would. */
static void encode_in_parts(Tokenizer *tokenizer, const char *text, size_t size, uint64_t stream, TokenArray *out) {
    uint64_t counter = 1000;
    for (size_t at = 0, known = 0; at < size || known < size;) {
        known += 1 + draw(stream, &counter) % 12;
        known = known < size ? known : size;
        char *copy = malloc(known - at); /* so that a look past its end is found out */
        memcpy(copy, text + at, known - at);
        size_t used = tokenizer_encode_part(tokenizer, copy, known - at, known == size, out);
        assert_true(used <= known - at);
        free(copy);
        at += used;
    }
}

static void test_parts_equal_whole(void **state) {
    (void)state;
    char text[TEXT_MAX];
    for (size_t i = 0; i < 4000; i++) {
        size_t size = i % 4 == 3 ? random_bytes(i, i % 90, text) : random_text(i, 1 + i % 120, ATOM_COUNT, text);
        for (int kind = 0; kind < 2; kind++) {
            Tokenizer *tokenizer = kind ? fixture.bytes : fixture.gpt2;
            TokenArray parts = {0}, whole = {0};
            tokenizer_encode(tokenizer, text, size, &whole);
            encode_in_parts(tokenizer, text, size, i, &parts);
            assert_same_ids(&parts, &whole, "text", i);
            free(parts.ids);
            free(whole.ids);
        }
    }
}

static void test_largest_part_is_never_refused(void **state) {
    (void)state;
    size_t size = tokenizer_part_max_bytes();
    char *text = malloc(size);
    memset(text, '\n', size);
    TokenArray ids = {0};
    assert_true(tokenizer_encode_part(fixture.gpt2, text, size, false, &ids) > 0);
    free(ids.ids);
    free(text);
}

/* More words than the cache has places: what was pushed out is encoded again, and alike. */
static void test_cache_never_changes_ids(void **state) {
    (void)state;
    enum { WORDS = 150000 };
    char *text = malloc((size_t)WORDS * 8);
    size_t size = 0;
    for (uint64_t i = 0; i < WORDS; i++) {
        uint64_t bits = random_bits(3, 5, i);
        text[size++] = ' ';
        for (uint64_t k = 0; k < 2 + bits % 6; k++)
            text[size++] = (char)('a' + (bits >> (8 + 5 * k)) % 26);
    }
    TokenArray first = {0}, again = {0};
    tokenizer_encode(fixture.gpt2, text, size, &first);
    tokenizer_encode(fixture.gpt2, text, size, &again);
    assert_same_ids(&again, &first, "pass", 2);
    assert_round_trip(fixture.gpt2, text, size);
    free(first.ids);
    free(again.ids);
    free(text);
}

static void test_plain_bytes(void **state) {
    (void)state;
    assert_int_equal(tokenizer_vocab(fixture.bytes), 257);
    assert_int_equal(tokenizer_end_of_text(fixture.bytes), 256);
    assert_int_equal(tokenizer_vocab(fixture.gpt2), 50257);
    assert_int_equal(tokenizer_end_of_text(fixture.gpt2), 50256);
    TokenArray ids = {0};
    tokenizer_encode(fixture.bytes, "A\xff", 2, &ids);
    assert_int_equal(ids.count, 2);
    assert_int_equal(ids.ids[0], 65);
    assert_int_equal(ids.ids[1], 255);
    free(ids.ids);
    size_t size;
    assert_null(tokenizer_decode(fixture.bytes, 257, &size));
    assert_null(tokenizer_decode(fixture.gpt2, 50257, &size));
    assert_null(tokenizer_decode(fixture.gpt2, -1, &size));
}

/* ---- damaged vocabularies ---- */

typedef struct Damage {
    const char *expected; /* part of the message */
    int word, value;      /* header word to overwrite; -1: none */
    long size;            /* to cut (or, beyond the end, extend) the file to; 0: as it is */
    long offset;          /* byte to overwrite with `byte`; 0: none */
    int byte;
} Damage;

static const Damage damages[] = {
    {"expected a tokenizer file (magic 20240328), found magic 7", 0, 7, 0, 0, 0},
    {"expected tokenizer version 2, found 1", 1, 1, 0, 0, 0},
    {"expected 257 to 16777216 tokens, found 256", 2, 256, 0, 0, 0},
    {"expected 257 to 16777216 tokens, found -5", 2, -5, 0, 0, 0},
    {"expected an end-of-text id in [0, 50257), found 50257", 3, 50257, 0, 0, 0},
    {"expected a tokenizer file with a header of 1024 bytes, found 1023 bytes", -1, 0, 1023, 0, 0},
    {"expected 50257 tokens, found 0 in its 1024 bytes", -1, 0, 1024, 0, 0},
    {"expected 50257 tokens, found 50256", -1, 0, 372107, 0, 0},
    {"bytes for 50257 tokens, found 372109", -1, 0, 372109, 0, 0},
    {"expected 50258 tokens, found 50257", 2, 50258, 0, 0, 0},
    {"none in token 0", -1, 0, 0, 1024, 0},
    {"expected a token for every byte, found none for byte 33", -1, 0, 0, 1025, 'A'},
};

static void write_damaged(const char *path, const FileMap *good, const Damage *damage) {
    size_t size = damage->size ? (size_t)damage->size : good->size;
    uint8_t *bytes = calloc(1, size);
    memcpy(bytes, good->bytes, size < good->size ? size : good->size);
    if (damage->word >= 0)
        memcpy(bytes + 4 * damage->word, &damage->value, 4);
    if (damage->offset)
        bytes[damage->offset] = (uint8_t)damage->byte;
    FILE *file = fopen(path, "wb");
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    fclose(file);
    free(bytes);
}

static void test_damaged_vocabularies(void **state) {
    (void)state;
    char folder[] = "/tmp/tandem_tokenizer_XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/v.bin", folder);
    FileMap good;
    assert_ok(file_map(&good, "data/gpt2_tokenizer.bin"));
    Tokenizer *tokenizer;
    for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        write_damaged(path, &good, &damages[i]);
        assert_refused(tokenizer_open(&tokenizer, path), damages[i].expected);
        assert_non_null(strstr(error_line(), path));
        assert_null(tokenizer);
    }
    unlink(path);
    assert_refused(tokenizer_open(&tokenizer, path), path);
    assert_refused(tokenizer_open(&tokenizer, "README.md"), "README.md: expected a tokenizer file");
    file_unmap(&good);
    rmdir(folder);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_recorded_ids),
    cmocka_unit_test(test_pieces_equal_pcre2),
    cmocka_unit_test(test_every_character),
    cmocka_unit_test(test_ids_equal_reference),
    cmocka_unit_test(test_every_token),
    cmocka_unit_test(test_any_bytes_come_back),
    cmocka_unit_test(test_long_pieces),
    cmocka_unit_test(test_piece_limit),
    cmocka_unit_test(test_parts_equal_whole),
    cmocka_unit_test(test_largest_part_is_never_refused),
    cmocka_unit_test(test_cache_never_changes_ids),
    cmocka_unit_test(test_plain_bytes),
    cmocka_unit_test(test_damaged_vocabularies),
};

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, set_up, tear_down) ? 1 : 0;
}
