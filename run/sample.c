#include "run/sample.h"

#include <stdlib.h>
#include <string.h>

typedef struct Sample {
    const Tokenizer *tokenizer;
    char *text;
    size_t used, size;
} Sample;

static bool add_token(void *user, int token) {
    Sample *sample = user;
    size_t bytes = 0;
    const char *text = tokenizer_decode(sample->tokenizer, token, &bytes);
    if (!text || sample->used + bytes >= sample->size)
        return false;
    memcpy(sample->text + sample->used, text, bytes);
    sample->used += bytes;
    return true;
}

Status sample_text(const Gpt2Config *config, const ParamTable *table, const float *params, Tokenizer *tokenizer,
                   const char *prompt, int max_tokens, uint64_t seed, char *text, size_t size) {
    Sample sample = {tokenizer, text, 0, size};
    GenerateOptions options = {.max_tokens = max_tokens, .temperature = 0.8f, .top_k = 40, .seed = seed,
                               .stop_token = tokenizer_end_of_text(tokenizer)};
    TokenArray ids = {0};
    tokenizer_encode(tokenizer, prompt, strlen(prompt), &ids);
    const int *start = ids.count ? ids.ids : &options.stop_token;
    int count = ids.count ? (int)ids.count : 1;
    Gpt2Cache *cache = NULL;
    Status status = gpt2_cache_create(&cache, config, table, params, &ops_cpu, &host_memory);
    if (status == OK)
        status = generate(cache, config, start, count, &options, add_token, &sample, NULL);
    text[sample.used] = 0;
    gpt2_cache_destroy(cache);
    free(ids.ids);
    return status;
}
