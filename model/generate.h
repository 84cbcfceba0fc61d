/* Sampling text from a model. */
#ifndef MODEL_GENERATE_H
#define MODEL_GENERATE_H

#include "model/gpt2.h"

/* Draws an index from softmax(logits / temperature) over the top_k largest (0: all), with coin uniform in [0, 1).
 * temperature 0 is argmax. Ties go to the lowest index. The maximum is subtracted first, so {100,0,0,0} with coin
 * 0.5 is 0. scratch i32[count] is only used when top_k > 0, else may be NULL. */
int sample_token(const float *logits, int count, float temperature, int top_k, double coin, int *scratch);

typedef struct GenerateOptions {
    int max_tokens;
    float temperature;
    int top_k; /* 0: no limit */
    uint64_t seed;
    int stop_token; /* ends the text when drawn; -1: none */
} GenerateOptions;

/* Called with each new token; returns false to stop. */
typedef bool GenerateFn(void *user, int token);

/* Feeds prompt i32[count] (count >= 1; only its last context/2 tokens count if it is longer than the context) and
 * draws up to max_tokens. When the context is full, goes on from the last half of it. FAULT when memory runs out or
 * a logit is NaN or infinite; *drawn tokens may have come before. Returns the number drawn in *drawn (may be NULL). */
Status generate(Gpt2Cache *cache, const Gpt2Config *config, const int *prompt, int count,
                const GenerateOptions *options, GenerateFn *emit, void *user, int *drawn);

#endif
