/* build/generate MODEL "prompt": text from a model file, streamed as it is drawn. */
#include "base/clock.h"
#include "base/config.h"
#include "base/error.h"
#include "base/machine.h"
#include "base/memory.h"
#include "base/utf8.h"
#include "data/tokenizer.h"
#include "model/checkpoint.h"
#include "model/generate.h"
#include "model/gpt2.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Arguments {
    char tokenizer[OPTION_TEXT];
    double temperature;
    int64_t top_k, seed, max_tokens, threads;
    bool stats;
} Arguments;

static const char usage[] =
    "generate [options] MODEL [\"PROMPT\"]\n"
    "Continues a text with a model file (llm.c's .bin or .safetensors) and prints prompt and continuation.\n"
    "PROMPT - is read from standard input; without PROMPT the model begins a text of its own.";

#define FIELD(name) offsetof(Arguments, name)
static const Option options[] = {
    {"tokenizer", OPTION_STRING, FIELD(tokenizer), "", 0, 0, NULL,
     "gpt2, bytes or a tokenizer file; default: by the model's vocabulary"},
    {"temperature", OPTION_FLOAT, FIELD(temperature), "0.8", 0, 100, NULL, "0: always the likeliest token"},
    {"top_k", OPTION_INT, FIELD(top_k), "40", 0, 1e9, NULL, "draw from the likeliest so many tokens; 0: from all"},
    {"seed", OPTION_INT, FIELD(seed), "1", 0, 9e15, NULL, "of the random draws"},
    {"max_tokens", OPTION_INT, FIELD(max_tokens), "256", 0, 1e9, NULL, "stop after so many tokens"},
    {"threads", OPTION_INT, FIELD(threads), "0", 0, 1024, NULL, "0: one per core"},
    {"stats", OPTION_BOOL, FIELD(stats), "no", 0, 0, NULL, "print tokens per second on standard error at the end"},
};
enum { OPTIONS = sizeof options / sizeof options[0] };

typedef struct App {
    Arguments arguments;
    const char *model, *prompt;
    Tokenizer *tokenizer;
    Gpt2Config config;
    ParamTable table;
    float *params;
    Gpt2Cache *cache;
    TokenArray tokens; /* the prompt's */
    char pending[512]; /* bytes of a character that is not complete yet, then a token's */
    size_t pending_size;
} App;

static Status open_tokenizer(App *app) {
    const char *name = app->arguments.tokenizer;
    if (!*name)
        name = app->config.vocab == 257 ? "bytes" : app->config.vocab == 50257 ? "gpt2" : NULL;
    if (!name)
        return bad_input("%s: no tokenizer is known for its vocabulary of %d tokens: name one with --tokenizer",
                         app->model, app->config.vocab);
    TRY(tokenizer_open(&app->tokenizer, name));
    if (tokenizer_vocab(app->tokenizer) != app->config.vocab)
        return bad_input("%s: its vocabulary has %d tokens, tokenizer '%s' has %d", app->model, app->config.vocab, name,
                         tokenizer_vocab(app->tokenizer));
    return OK;
}

static Status load_model(App *app) {
    const Gpt2Config *config = &app->config;
    gpt2_param_table(config, false, &app->table);
    int64_t cached = 2 * (int64_t)config->layers * config->context * config->channels;
    int64_t need_bytes = (app->table.elems + cached) * (int64_t)sizeof(float), free_bytes = machine_memory_available();
    if (need_bytes > free_bytes)
        return bad_input("%s: takes %.1f GiB of memory, %.1f GiB are free", app->model, (double)need_bytes / (1 << 30),
                         (double)free_bytes / (1 << 30));
    app->params = memory_alloc(&host_memory, (size_t)app->table.elems * sizeof(float));
    if (!app->params)
        return fault("out of memory: cannot hold the parameters of %s", app->model);
    TRY(checkpoint_read_params(app->model, config, &app->table, app->params));
    return gpt2_cache_create(&app->cache, config, &app->table, app->params, &ops_cpu, &host_memory);
}

/* All of standard input; *text is to be freed, also after an error. */
static Status read_standard_input(char **text, size_t *size) {
    size_t capacity = 0;
    do {
        if (*size == capacity) {
            capacity = capacity ? 2 * capacity : 65536;
            char *larger = realloc(*text, capacity);
            if (!larger)
                return fault("out of memory: cannot hold the prompt");
            *text = larger;
        }
        *size += fread(*text + *size, 1, capacity - *size, stdin);
    } while (!feof(stdin) && !ferror(stdin));
    return ferror(stdin) ? fault("standard input: cannot read") : OK;
}

/* Fills app->tokens and prints the prompt. An empty one is the end of some other text. */
static Status encode_prompt(App *app) {
    char *input = NULL;
    const char *text = app->prompt ? app->prompt : "";
    size_t size = strlen(text);
    Status status = OK;
    if (strcmp(text, "-") == 0) {
        size = 0;
        status = read_standard_input(&input, &size);
        text = input;
    }
    if (status == OK && size > 0) {
        tokenizer_encode(app->tokenizer, text, size, &app->tokens);
        fwrite(text, 1, size, stdout);
        fflush(stdout);
    }
    free(input);
    return status;
}

static void write_pending(App *app, size_t size) {
    fwrite(app->pending, 1, size, stdout);
    fflush(stdout);
    app->pending_size -= size;
    memmove(app->pending, app->pending + size, app->pending_size);
}

static bool show_token(void *user, int token) {
    App *app = user;
    size_t size = 0;
    const char *bytes = tokenizer_decode(app->tokenizer, token, &size);
    for (size_t done = 0; done < size;) {
        size_t room = sizeof app->pending - app->pending_size, part = size - done < room ? size - done : room;
        memcpy(app->pending + app->pending_size, bytes + done, part);
        app->pending_size += part;
        done += part;
        write_pending(app, utf8_complete(app->pending, app->pending_size));
    }
    return !ferror(stdout);
}

static Status run(App *app) {
    const Arguments *arguments = &app->arguments;
    omp_set_num_threads(arguments->threads ? (int)arguments->threads : machine_cores());
    TRY(checkpoint_read_config(app->model, &app->config));
    TRY(open_tokenizer(app));
    TRY(load_model(app));
    TRY(encode_prompt(app));
    int end_of_text = tokenizer_end_of_text(app->tokenizer), drawn;
    bool empty = app->tokens.count == 0;
    const GenerateOptions generation = {
        .max_tokens = (int)arguments->max_tokens,
        .temperature = (float)arguments->temperature,
        .top_k = (int)arguments->top_k,
        .seed = (uint64_t)arguments->seed,
        .stop_token = end_of_text,
    };
    double start_s = clock_s();
    TRY(generate(app->cache, &app->config, empty ? &end_of_text : app->tokens.ids,
                 empty ? 1 : (int)app->tokens.count, &generation, show_token, app, &drawn));
    double time_s = clock_s() - start_s;
    write_pending(app, app->pending_size);
    putchar('\n');
    fflush(stdout);
    if (arguments->stats)
        fprintf(stderr, "%d tokens in %.2f s, %.1f tokens/s, the prompt's %d tokens included in the time\n", drawn,
                time_s, drawn / time_s, empty ? 1 : (int)app->tokens.count);
    return OK;
}

static void close_app(App *app) {
    free(app->tokens.ids);
    gpt2_cache_destroy(app->cache);
    memory_free(&host_memory, app->params);
    param_table_free(&app->table);
    tokenizer_close(app->tokenizer);
}

int main(int argc, char **argv) {
    App app = {0};
    const char *positional[2];
    int count = 0;
    Status status = args_parse(usage, options, OPTIONS, &app.arguments, argc, argv, positional, 2, &count);
    if (status == OK && count == 0)
        status = bad_input("expected a model file; --help tells the usage");
    if (status == OK) {
        app.model = positional[0];
        app.prompt = count > 1 ? positional[1] : NULL;
        status = run(&app);
    }
    close_app(&app);
    return error_exit_code("generate", status);
}
