/* llm.c's model files: 256 int32 of header, then every tensor kind with its layers one after the other. The flat array
 * has another order (base/param.h), so each tensor is read into, or written from, its own place: one pass over the
 * file and no second copy of the model in memory. Nothing is allocated here; sizes in a header are believed only when
 * the file's size is what they give. */
#include "model/checkpoint.h"

#include "base/file.h"
#include "base/input.h"
#include "model/safetensors.h"
#include "model/tensor.h"

#include <assert.h>
#include <string.h>

enum { MAGIC = 20240326, VERSION_F32 = 3, VERSION_BF16 = 5, HEADER_WORDS = 256 };
enum { HEADER_BYTES = HEADER_WORDS * 4 };

static const struct {
    const char *name;
    bool per_layer;
} file_order[] = {
    {"wte", false},     {"wpe", false},  {"ln1w", true}, {"ln1b", true}, {"qkvw", true}, {"qkvb", true},
    {"attprojw", true}, {"attprojb", true}, {"ln2w", true}, {"ln2b", true}, {"fcw", true},  {"fcb", true},
    {"fcprojw", true},  {"fcprojb", true}, {"lnfw", false}, {"lnfb", false},
};
enum { KINDS = sizeof file_order / sizeof file_order[0] };

/* Visits every tensor in the order of the file. */
typedef Status VisitFn(void *user, const Param *param);

static Status visit_in_file_order(const Gpt2Config *config, const ParamTable *table, VisitFn *visit, void *user) {
    for (int kind = 0; kind < KINDS; kind++) {
        bool per_layer = file_order[kind].per_layer;
        for (int layer = 0; layer < (per_layer ? config->layers : 1); layer++) {
            const Param *param = param_find(table, file_order[kind].name, per_layer ? layer : -1);
            assert(param);
            TRY(visit(user, param));
        }
    }
    return OK;
}

/* Exact below 2^53, and unlike an integer it cannot overflow on absurd sizes. */
static double file_bytes(const Gpt2Config *config, TensorType type) {
    double C = config->channels, L = config->layers;
    double elems = (config->vocab_padded + (double)config->context) * C + L * (12 * C * C + 13 * C) + 2 * C;
    return HEADER_BYTES + elems * (double)tensor_type_bytes(type);
}

static Status read_header(InputFile *input, Gpt2Config *config, TensorType *type) {
    const char *path = input->path;
    int32_t header[HEADER_WORDS];
    if (input->size < HEADER_BYTES)
        return bad_input("%s: expected a model file (a header of %d bytes, then weights), found %lld bytes", path,
                         HEADER_BYTES, (long long)input->size);
    TRY(input_read(input, header, sizeof header));
    if (header[0] != MAGIC)
        return bad_input("%s: expected a model file (magic %d), found magic %d", path, MAGIC, header[0]);
    if (header[1] != VERSION_F32 && header[1] != VERSION_BF16)
        return bad_input("%s: expected version %d (f32) or %d (bf16) of the model format, found %d", path, VERSION_F32,
                         VERSION_BF16, header[1]);
    *type = header[1] == VERSION_F32 ? TENSOR_F32 : TENSOR_BF16;
    *config = (Gpt2Config){.context = header[2], .vocab = header[3], .layers = header[4], .heads = header[5],
                           .channels = header[6], .vocab_padded = header[7]};
    TRY(gpt2_check(config, path));
    double expected = file_bytes(config, *type);
    if (expected != (double)input->size)
        return bad_input("%s: expected %.0f bytes for the sizes in its header (context %d, vocabulary %d padded to %d, "
                         "%d layers, %d channels), found %lld: truncated or damaged",
                         path, expected, config->context, config->vocab, config->vocab_padded, config->layers,
                         config->channels, (long long)input->size);
    return OK;
}

typedef struct Reading {
    InputFile *input;
    TensorType type;
    float *params;
} Reading;

static Status read_tensor(void *user, const Param *param) {
    Reading *reading = user;
    return tensor_read(reading->input, reading->type, param->rows, param->cols, false, reading->params + param->offset);
}

static bool same_sizes(const Gpt2Config *a, const Gpt2Config *b) {
    return a->layers == b->layers && a->channels == b->channels && a->context == b->context && a->vocab == b->vocab &&
           a->vocab_padded == b->vocab_padded;
}

static Status read_llmc(InputFile *input, const Gpt2Config *config, const ParamTable *table, float *params) {
    Gpt2Config found;
    Reading reading = {.input = input, .params = params};
    TRY(read_header(input, &found, &reading.type));
    if (!same_sizes(&found, config))
        return bad_input("%s: the sizes in its header changed while it was being read", input->path);
    TRY(visit_in_file_order(config, table, read_tensor, &reading));
    const Param *wte = param_find(table, "wte", -1);
    int64_t used = (int64_t)config->vocab * config->channels;
    memset(params + wte->offset + used, 0, (size_t)(wte->elems - used) * sizeof *params);
    return OK;
}

static bool is_safetensors(const char *path) {
    const char *dot = strrchr(path, '.');
    return dot && strcmp(dot, ".safetensors") == 0;
}

Status checkpoint_read_config(const char *path, Gpt2Config *config) {
    if (is_safetensors(path))
        return safetensors_read_config(path, config);
    InputFile input;
    TensorType type;
    TRY(input_open(&input, path));
    Status status = read_header(&input, config, &type);
    input_close(&input);
    return status;
}

Status checkpoint_read_params(const char *path, const Gpt2Config *config, const ParamTable *table, float *params) {
    if (is_safetensors(path))
        return safetensors_read_params(path, config, table, params);
    InputFile input;
    TRY(input_open(&input, path));
    Status status = read_llmc(&input, config, table, params);
    input_close(&input);
    return status;
}

typedef struct Writing {
    FILE *stream;
    const float *params;
} Writing;

static Status write_tensor(void *user, const Param *param) {
    Writing *writing = user;
    fwrite(writing->params + param->offset, sizeof(float), (size_t)param->elems, writing->stream);
    return OK; /* errors stay in the stream until atomic_commit */
}

Status checkpoint_write(const char *path, const Gpt2Config *config, const ParamTable *table, const float *params) {
    int32_t header[HEADER_WORDS] = {MAGIC,         VERSION_F32,      config->context, config->vocab,
                                    config->layers, config->heads, config->channels, config->vocab_padded};
    AtomicFile file;
    TRY(atomic_open(&file, path));
    Writing writing = {file.stream, params};
    fwrite(header, sizeof header, 1, file.stream);
    visit_in_file_order(config, table, write_tensor, &writing);
    return atomic_commit(&file);
}
