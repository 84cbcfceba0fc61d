/* build/tokenize: text on standard input to ids on standard output, or back. */
#include "base/config.h"
#include "data/tokenizer.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

typedef struct Arguments {
    char tokenizer[OPTION_TEXT];
    bool decode;
} Arguments;

static const Option options[] = {
    {"tokenizer", OPTION_STRING, offsetof(Arguments, tokenizer), "gpt2", 1, 0, NULL,
     "gpt2, bytes, or a tokenizer file in llm.c's format"},
    {"decode", OPTION_BOOL, offsetof(Arguments, decode), "no", 0, 0, NULL,
     "turn ids on standard input, separated by white space, back into bytes"},
};
enum { OPTION_COUNT = sizeof options / sizeof options[0] };

static const char usage[] = "tokenize [options] < TEXT > IDS\n"
                            "Prints the ids of standard input on one line.";

typedef struct Text {
    char *bytes; /* owned; terminated by 0 */
    size_t size, capacity;
} Text;

static Status text_append(Text *text, const char *bytes, size_t size) {
    if (text->capacity - text->size <= size) {
        text->capacity = 2 * text->capacity + size + 1;
        char *grown = realloc(text->bytes, text->capacity);
        if (!grown)
            return fault("out of memory for %zu bytes", text->capacity);
        text->bytes = grown;
    }
    memcpy(text->bytes + text->size, bytes, size);
    text->size += size;
    text->bytes[text->size] = 0;
    return OK;
}

static Status read_all(FILE *in, Text *text) {
    char chunk[65536];
    TRY(text_append(text, "", 0));
    for (size_t n; (n = fread(chunk, 1, sizeof chunk, in)) > 0;)
        TRY(text_append(text, chunk, n));
    return ferror(in) ? bad_input("standard input: cannot read: %s", strerror(errno)) : OK;
}

static void encode(Tokenizer *tokenizer, const Text *in) {
    TokenArray ids = {0};
    tokenizer_encode(tokenizer, in->bytes, in->size, &ids);
    for (size_t i = 0; i < ids.count; i++)
        printf("%s%d", i ? " " : "", (int)ids.ids[i]);
    putchar('\n');
    free(ids.ids);
}

/* Appends the bytes of the id at *at and steps behind it. */
static Status decode_id(const Tokenizer *tokenizer, const char **at, const char *in_end, int index, Text *out) {
    const char *word = *at;
    size_t length = 0;
    while (word + length < in_end && !isspace((unsigned char)word[length]))
        length++;
    if (memchr(word, 0, length))
        return bad_input("id %d: expected a number, found a NUL byte", index);
    char *end;
    errno = 0;
    long value = strtol(word, &end, 10);
    if (end != word + length)
        return bad_input("id %d: expected a number, found '%.*s'", index, (int)(length < 40 ? length : 40), word);
    size_t size;
    const char *bytes = errno || labs(value) > INT_MAX ? NULL : tokenizer_decode(tokenizer, (int)value, &size);
    if (!bytes)
        return bad_input("id %d: expected 0 to %d, found %.*s", index, tokenizer_vocab(tokenizer) - 1,
                         (int)(length < 40 ? length : 40), word);
    *at = end;
    return text_append(out, bytes, size);
}

/* All ids first, then the bytes: bad input writes nothing. */
static Status decode_into(const Tokenizer *tokenizer, const Text *in, Text *out) {
    const char *end = in->bytes + in->size;
    int index = 1;
    for (const char *at = in->bytes;; index++) {
        while (at < end && isspace((unsigned char)*at))
            at++;
        if (at == end)
            return OK;
        TRY(decode_id(tokenizer, &at, end, index, out));
    }
}

static Status decode(const Tokenizer *tokenizer, const Text *in) {
    Text out = {0};
    Status status = decode_into(tokenizer, in, &out);
    if (status == OK && out.size)
        fwrite(out.bytes, 1, out.size, stdout);
    free(out.bytes);
    return status;
}

int main(int argc, char **argv) {
    Arguments arguments;
    int positional_count;
    Tokenizer *tokenizer = NULL;
    Text in = {0};
    Status status = args_parse(usage, options, OPTION_COUNT, &arguments, argc, argv, NULL, 0, &positional_count);
    if (status == OK)
        status = tokenizer_open(&tokenizer, arguments.tokenizer);
    if (status == OK)
        status = read_all(stdin, &in);
    if (status == OK && arguments.decode)
        status = decode(tokenizer, &in);
    else if (status == OK)
        encode(tokenizer, &in);
    tokenizer_close(tokenizer);
    free(in.bytes);
    return error_exit_code("tokenize", status);
}
