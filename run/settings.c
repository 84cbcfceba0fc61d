#include "run/settings.h"

#include "model/checkpoint.h"

#include <stdlib.h>
#include <string.h>

#define KEY(section, name) .key = #name, .offset = offsetof(section, name)
#define INT(section, name, least, most, start, text) \
    {KEY(section, name), .type = OPTION_INT, .min = least, .max = most, .initial = start, .help = text}
#define FLOAT(section, name, least, most, start, text) \
    {KEY(section, name), .type = OPTION_FLOAT, .min = least, .max = most, .initial = start, .help = text}
#define BOOL(section, name, start, text) {KEY(section, name), .type = OPTION_BOOL, .initial = start, .help = text}
#define STRING(section, name, start, text) {KEY(section, name), .type = OPTION_STRING, .initial = start, .help = text}
#define NAME(section, name, start, text) \
    {KEY(section, name), .type = OPTION_STRING, .min = 1, .initial = start, .help = text}
#define CHOICE(section, name, all, start, text) \
    {KEY(section, name), .type = OPTION_CHOICE, .choices = all, .initial = start, .help = text}
#define COUNT(table) (int)(sizeof table / sizeof *table)

const char run_devices[] = "auto|cpu|cuda|replay", train_dtypes[] = "f32|tf32|bf16";
const char train_recomputations[] = "no|gelu|norms|layers";

static const Option run_options[] = {
    CHOICE(RunSettings, device, run_devices, "auto", "auto: a GPU where there is one, else cpu; replay: see [replay]"),
    BOOL(RunSettings, cuda_graphs, "no", "on a GPU: launch each layer's pass whole, which may save time of the host"),
    BOOL(RunSettings, deterministic, "yes", "on a GPU, no: cuDNN's backward may be faster, last bits depend on timing"),
    INT(RunSettings, threads, 0, 4096, "0", "per rank; 0: the cores it is bound to. The last bits depend on it"),
    INT(RunSettings, seed, 0, 1e15, "1", "of initialisation, shuffling and sampling"),
    NAME(RunSettings, out, "out", "folder for the log, checkpoints and the trained model"),
    BOOL(RunSettings, resume, "no", "go on from the newest checkpoint in run.out, from the start when there is none"),
    FLOAT(RunSettings, peak_tflops, 0, 1e6, "0", "of one rank's device, for MFU; 0: as measured on a GPU, else n/a"),
};
static const Option model_options[] = {
    INT(ModelSettings, layers, 1, 1024, "12", "transformer blocks"),
    INT(ModelSettings, heads, 1, 1024, "12", "attention heads, a divisor of channels"),
    INT(ModelSettings, channels, 1, 65536, "768", "width"),
    INT(ModelSettings, context, 1, 1048576, "1024", "longest sequence, rows of the position embedding"),
    INT(ModelSettings, vocab, 1, 16777216, "50257", "tokens: 50257 for GPT-2's tokenizer, 257 for bytes"),
    NAME(ModelSettings, init, "random", "random, or a .bin (llm.c) or .safetensors file, which also sets the sizes"),
};
static const Option data_options[] = {
    STRING(DataSettings, train, "", "training shards: glob patterns, separated by spaces; '\\ ' is a space"),
    STRING(DataSettings, val, "", "validation shards, in the same way; empty: no validation"),
    NAME(DataSettings, tokenizer, "gpt2", "for samples and bits per byte: gpt2, bytes, a tokenizer file, or none"),
    BOOL(DataSettings, shuffle, "yes", "visit the sequences in a new order each epoch"),
};
static const Option train_options[] = {
    INT(TrainSettings, batch, 1, 65536, "4", "sequences per rank and micro-step"),
    INT(TrainSettings, seq_len, 1, 1048576, "1024", "tokens per sequence, at most model.context"),
    INT(TrainSettings, global_batch, 0, 1e12, "0", "tokens per step, by accumulation; 0: one micro-step"),
    INT(TrainSettings, steps, 0, 1e12, "1000", "optimizer steps"),
    INT(TrainSettings, val_every, 0, 1e12, "0", "validate every so many steps and at the end; 0: never"),
    INT(TrainSettings, val_batches, 1, 1e9, "20", "batches of train.batch sequences per validation, over all ranks"),
    INT(TrainSettings, sample_every, 0, 1e12, "0", "show generated text every so many steps, at the start and end"),
    INT(TrainSettings, sample_tokens, 1, 1048576, "64", "length of it"),
    STRING(TrainSettings, sample_prompt, "", "text it starts from; empty: end of text"),
    INT(TrainSettings, save_every, 0, 1e12, "0", "checkpoint every so many steps; 0: only the model, at the end"),
    INT(TrainSettings, keep, 1, 1e6, "2", "checkpoints kept; older ones are removed"),
    CHOICE(TrainSettings, recompute, train_recomputations, "no",
           "what backward computes again to save memory: gelu; norms: and GELU; layers: all, a third more time"),
    CHOICE(TrainSettings, dtype, train_dtypes, "f32", "of activations and products; tf32, bf16: on a GPU"),
};
static const Option log_options[] = {
    BOOL(LogSettings, jsonl, "yes", "write run.out/log.jsonl, one object per step"),
    INT(LogSettings, every, 1, 1e9, "10", "a line on the terminal per so many steps, and after the first"),
    STRING(LogSettings, trace, "", "file for a Chrome trace of the first steps, opens in Perfetto; empty: off"),
    STRING(LogSettings, profile, "", "file for the time of each operation, for [replay]; empty: off"),
};

static Status read_arguments(Settings *settings, int argc, char **argv) {
    bool have_file = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            settings->help = true;
            return OK;
        }
        if (strcmp(argv[i], "--plan") == 0)
            settings->plan = true;
        else if (strncmp(argv[i], "--", 2) == 0)
            return bad_input("unknown option '%s'; --help lists the keys", argv[i]);
        else if (strchr(argv[i], '='))
            TRY(config_assign(settings->config, argv[i]));
        else if (have_file)
            return bad_input("expected one config file, found a second one, '%s'", argv[i]);
        else {
            TRY(config_read_file(settings->config, argv[i]));
            settings->file = argv[i];
            have_file = true;
        }
    }
    return have_file ? OK : bad_input("expected a config file, such as configs/demo.cfg; --help explains");
}

Status settings_read(Settings *settings, int argc, char **argv) {
    *settings = (Settings){0};
    const ConfigSection sections[SETTINGS_SECTIONS] = {
        {"run", run_options, COUNT(run_options), &settings->run},
        {"model", model_options, COUNT(model_options), &settings->model},
        {"data", data_options, COUNT(data_options), &settings->data},
        {"train", train_options, COUNT(train_options), &settings->train},
        {"optim", optim_options, optim_option_count, &settings->optim},
        {"comm", comm_options, comm_option_count, &settings->comm},
        {"loop", loop_options, loop_option_count, &settings->loop},
        {"replay", replay_options, replay_option_count, &settings->replay},
        {"log", log_options, COUNT(log_options), &settings->log},
    };
    memcpy(settings->sections, sections, sizeof sections);
    settings->config = config_create(settings->sections, SETTINGS_SECTIONS);
    TRY(read_arguments(settings, argc, argv));
    if (settings->help)
        return OK;
    if (settings->comm.warmup_steps < 0)
        settings->comm.warmup_steps = settings->optim.warmup;
    if (!settings->data.train[0])
        return config_error(settings->config, "data.train", "expected a pattern of training shards");
    if (settings->train.val_every > 0 && !settings->data.val[0])
        return config_error(settings->config, "train.val_every", "validation needs data.val, a pattern of shards");
    if (settings->run.cuda_graphs && settings->log.profile[0])
        return config_error(settings->config, "log.profile", "times single operations, which run.cuda_graphs=yes "
                            "launches a layer at a time");
    if (settings->train.sample_every > 0 && strcmp(settings->data.tokenizer, "none") == 0)
        return config_error(settings->config, "train.sample_every", "showing text needs data.tokenizer");
    return OK;
}

void settings_free(Settings *settings) {
    config_destroy(settings->config);
    settings->config = NULL;
}

static void add_to_hash(void *user, const char *section, const char *key, const char *value) {
    uint64_t *hash = user; /* FNV-1a */
    const char *const texts[] = {section, key, value};
    for (int i = 0; i < 3; i++)
        for (const char *at = texts[i]; *at; at++)
            *hash = (*hash ^ (unsigned char)*at) * 0x100000001b3u;
}

uint64_t settings_hash(const Settings *settings) {
    uint64_t hash = 0xcbf29ce484222325u;
    config_visit(settings->config, add_to_hash, &hash);
    return hash;
}

void settings_help(const Settings *settings, FILE *out) {
    fprintf(out, "usage: train [--plan] FILE.cfg [section.key=value ...]\n"
                 "       mpirun -n RANKS ./train FILE.cfg ...\n\n"
                 "Trains GPT-2. A config file has sections of 'key = value'; the command line overrides it.\n"
                 "A line of the file has at most 198 bytes; longer values can be given on the command line.\n"
                 "--plan prints what would run, with its memory, and stops.\n\n");
    config_help(settings->config, out);
}

Status settings_model(const Settings *settings, Gpt2Config *model) {
    const ModelSettings *sizes = &settings->model;
    if (strcmp(sizes->init, "random") != 0) {
        TRY(checkpoint_read_config(sizes->init, model));
    } else {
        *model = (Gpt2Config){.layers = (int)sizes->layers, .heads = (int)sizes->heads,
                              .channels = (int)sizes->channels, .context = (int)sizes->context,
                              .vocab = (int)sizes->vocab, .vocab_padded = gpt2_pad_vocab((int)sizes->vocab)};
        if (model->channels % model->heads)
            return config_error(settings->config, "model.heads", "expected a divisor of model.channels = %d, found %d",
                                model->channels, model->heads);
        TRY(gpt2_check(model, "[model]"));
    }
    if (settings->train.seq_len > model->context)
        return config_error(settings->config, "train.seq_len", "expected at most the model's context, %d, found %lld",
                            model->context, (long long)settings->train.seq_len);
    return OK;
}

Status settings_micro_steps(const Settings *settings, int ranks, int64_t *micro_steps) {
    const TrainSettings *train = &settings->train;
    int64_t tokens = ranks * train->batch * train->seq_len;
    if (train->global_batch % tokens)
        return config_error(settings->config, "train.global_batch",
                            "expected a multiple of %lld tokens (%d rank%s x batch %lld x seq_len %lld), found %lld",
                            (long long)tokens, ranks, ranks > 1 ? "s" : "", (long long)train->batch,
                            (long long)train->seq_len, (long long)train->global_batch);
    *micro_steps = train->global_batch ? train->global_batch / tokens : 1;
    return OK;
}
