/* A piece of text from the model as it stands, to show what it has learned. */
#ifndef RUN_SAMPLE_H
#define RUN_SAMPLE_H

#include "data/tokenizer.h"
#include "model/generate.h"

/* Continues `prompt` (none: end of text) and writes the new text into text[size], terminated. Takes the memory of a
 * KV cache while it runs. temperature 0.8, top-k 40: the same text for the same parameters and seed. */
Status sample_text(const Gpt2Config *config, const ParamTable *table, const float *params, Tokenizer *tokenizer,
                   const char *prompt, int max_tokens, uint64_t seed, char *text, size_t size);

#endif
