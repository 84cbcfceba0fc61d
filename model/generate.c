/* Sampling needs no sorted list: the top_k-th best token, found with a heap of top_k indices, splits the vocabulary in
 * one comparison per token, and the draw then walks the tokens in the order of their ids. So top_k = count gives
 * exactly what no limit gives. One token costs two exps per id, which is small beside the model's forward.
 *
 * Generation keeps the window of tokens that the cache holds. When it is full, the cache is cleared and filled with
 * the newest half in one pass: positions are learned and start at 0, so old keys and values cannot be moved down. */
#include "model/generate.h"

#include "base/random.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A total order of the tokens: larger logit first, then lower id. */
static bool better(const float *logits, int a, int b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static int argmax(const float *logits, int count) {
    int best = 0;
    for (int i = 1; i < count; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

/* Makes the heap (worst token on top) right again after heap[at] has changed. */
static void sift_down(const float *logits, int *heap, int size, int at) {
    for (int child = 2 * at + 1; child < size; at = child, child = 2 * at + 1) {
        if (child + 1 < size && better(logits, heap[child], heap[child + 1]))
            child++;
        if (!better(logits, heap[at], heap[child]))
            return;
        int swapped = heap[at];
        heap[at] = heap[child];
        heap[child] = swapped;
    }
}

/* The worst of the k best tokens; heap i32[k]. */
static int kth_best(const float *logits, int count, int k, int *heap) {
    for (int i = 0; i < k; i++)
        heap[i] = i;
    for (int i = k / 2 - 1; i >= 0; i--)
        sift_down(logits, heap, k, i);
    for (int i = k; i < count; i++)
        if (better(logits, i, heap[0])) {
            heap[0] = i;
            sift_down(logits, heap, k, 0);
        }
    return heap[0];
}

/* e^((logit - max) / temperature), 0 for tokens worse than the last one that is allowed (-1: all are). */
static double weight(const float *logits, int token, int best, int last_allowed, float temperature) {
    if (last_allowed >= 0 && better(logits, last_allowed, token))
        return 0;
    return exp(((double)logits[token] - logits[best]) / temperature);
}

int sample_token(const float *logits, int count, float temperature, int top_k, double coin, int *scratch) {
    assert(count > 0 && temperature >= 0 && top_k >= 0 && coin >= 0 && coin < 1);
    int best = argmax(logits, count);
    if (temperature == 0 || top_k == 1)
        return best;
    int last = top_k > 0 && top_k < count ? kth_best(logits, count, top_k, scratch) : -1;
    double total = 0, reached = 0;
    for (int i = 0; i < count; i++)
        total += weight(logits, i, best, last, temperature);
    for (int i = 0; i < count; i++) {
        reached += weight(logits, i, best, last, temperature);
        if (reached > coin * total)
            return i;
    }
    return best; /* a logit is not finite, or the product was rounded up to the total */
}

typedef struct Window {
    int *tokens; /* i32[context], what the cache holds */
    int length, context;
} Window;

static const float *append(Gpt2Cache *cache, Window *window, int token) {
    if (window->length < window->context) {
        window->tokens[window->length++] = token;
        return gpt2_cache_append(cache, &token, 1);
    }
    int kept = window->context / 2 > 1 ? window->context / 2 - 1 : 0; /* and the new token */
    memmove(window->tokens, window->tokens + window->length - kept, (size_t)kept * sizeof *window->tokens);
    window->tokens[kept] = token;
    window->length = kept + 1;
    gpt2_cache_clear(cache);
    return gpt2_cache_append(cache, window->tokens, window->length);
}

static const float *prefill(Gpt2Cache *cache, Window *window, const int *prompt, int count) {
    int length = count <= window->context ? count : window->context / 2 > 1 ? window->context / 2 : 1;
    memcpy(window->tokens, prompt + count - length, (size_t)length * sizeof *prompt);
    window->length = length;
    gpt2_cache_clear(cache);
    return gpt2_cache_append(cache, window->tokens, length);
}

static Status check_logits(const float *logits, int count) {
    for (int i = 0; i < count; i++)
        if (!isfinite(logits[i]))
            return fault("the model's logits are not finite");
    return OK;
}

static Status draw_tokens(Gpt2Cache *cache, const Gpt2Config *config, const int *prompt, int count,
                          const GenerateOptions *options, GenerateFn *emit, void *user, Window *window, int *scratch,
                          int *drawn) {
    const float *logits = prefill(cache, window, prompt, count);
    while (true) {
        TRY(check_logits(logits, config->vocab));
        double coin = random_uniform(options->seed, 0, (uint64_t)*drawn);
        int token = sample_token(logits, config->vocab, options->temperature, options->top_k, coin, scratch);
        if (token == options->stop_token)
            return OK;
        ++*drawn;
        if (!emit(user, token) || *drawn == options->max_tokens)
            return OK;
        logits = append(cache, window, token);
    }
}

Status generate(Gpt2Cache *cache, const Gpt2Config *config, const int *prompt, int count,
                const GenerateOptions *options, GenerateFn *emit, void *user, int *drawn) {
    assert(count >= 1 && options->max_tokens >= 0);
    Window window = {.tokens = malloc((size_t)config->context * sizeof(int)), .context = config->context};
    int *scratch = malloc((size_t)config->vocab * sizeof *scratch);
    Status status = OK;
    int tokens = 0;
    if (!window.tokens || !scratch)
        status = fault("out of memory: cannot hold a window of %d tokens", config->context);
    else if (options->max_tokens > 0)
        status = draw_tokens(cache, config, prompt, count, options, emit, user, &window, scratch, &tokens);
    free(scratch);
    free(window.tokens);
    if (drawn)
        *drawn = tokens;
    return status;
}
