/* A .safetensors file is 8 bytes of length, a JSON object {name: {dtype, shape, data_offsets}}, and the data. Reading
 * makes an index in four steps, each of which trusts only what the one before has checked:
 *
 *     length -> JSON -> tensors: sorted by offset, they tile the data -> slots: each tensor of GPT-2 once, in its shape
 *
 * then reads the tensors in file order, straight into the flat array. The four matrix kinds are stored [in,out] and
 * are transposed on the way. Memory is the header and the index, both bounded by HEADER_BYTES_MAX, whatever the file
 * says. Names that are not GPT-2's are refused, since what they mean would be lost in silence; masks are known and
 * skipped. The head is tied: a file may hold it once more, which must be the same as wte. */
#include "model/safetensors.h"

#include "base/input.h"
#include "model/tensor.h"

#include <assert.h>
#include <cJSON.h>
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH_BYTES = 8, HEADER_BYTES_MAX = 4 << 20, NAME = 80, LAYERS_MAX = 100000 };

typedef enum Layout { VECTOR, EMBEDDING, MATRIX } Layout; /* [cols], [rows,cols], [cols,rows] of our tensor */

static const struct {
    const char *param, *name;
    bool per_layer;
    Layout layout;
} kinds[] = {
    {"wte", "wte.weight", false, EMBEDDING},
    {"wpe", "wpe.weight", false, EMBEDDING},
    {"lnfw", "ln_f.weight", false, VECTOR},
    {"lnfb", "ln_f.bias", false, VECTOR},
    {"ln1w", "ln_1.weight", true, VECTOR},
    {"ln1b", "ln_1.bias", true, VECTOR},
    {"qkvw", "attn.c_attn.weight", true, MATRIX},
    {"qkvb", "attn.c_attn.bias", true, VECTOR},
    {"attprojw", "attn.c_proj.weight", true, MATRIX},
    {"attprojb", "attn.c_proj.bias", true, VECTOR},
    {"ln2w", "ln_2.weight", true, VECTOR},
    {"ln2b", "ln_2.bias", true, VECTOR},
    {"fcw", "mlp.c_fc.weight", true, MATRIX},
    {"fcb", "mlp.c_fc.bias", true, VECTOR},
    {"fcprojw", "mlp.c_proj.weight", true, MATRIX},
    {"fcprojb", "mlp.c_proj.bias", true, VECTOR},
};
enum { KINDS = sizeof kinds / sizeof kinds[0], WTE = 0, WPE = 1, SKIPPED = -1, HEAD = -2 }; /* the last two: no slot */

typedef struct Tensor {
    char name[NAME], dtype[8]; /* printable, cut to fit */
    int kind, layer;           /* layer is 0 outside the layers */
    int dims;
    int64_t shape[2];   /* of the first two dimensions */
    int64_t begin, end; /* in the data */
} Tensor;

typedef struct Index {
    InputFile input;
    int64_t data_start;
    Tensor *tensors; /* [count], by begin */
    int count;
    int layers;
    const Tensor **slots; /* [layers][KINDS]; NULL where there is none */
} Index;

/* ---- header to tensors ---- */

static void copy_printable(char *to, size_t size, const char *from) {
    size_t i = 0;
    for (; from[i] && i + 1 < size; i++)
        to[i] = isprint((unsigned char)from[i]) ? from[i] : '?';
    to[i] = 0;
}

static Status read_json(Index *index, cJSON **json) {
    InputFile *input = &index->input;
    uint64_t length, room = input->size > LENGTH_BYTES ? (uint64_t)input->size - LENGTH_BYTES : 0;
    if (room < 2)
        return bad_input("%s: expected a safetensors file, found only %lld bytes", input->path,
                         (long long)input->size);
    TRY(input_read(input, &length, sizeof length));
    if (length < 2 || length > room || length > HEADER_BYTES_MAX)
        return bad_input("%s: expected a safetensors header of 2 to %llu bytes, found a length of %llu", input->path,
                         (unsigned long long)(room < HEADER_BYTES_MAX ? room : HEADER_BYTES_MAX),
                         (unsigned long long)length);
    index->data_start = LENGTH_BYTES + (int64_t)length;
    char *text = malloc(length);
    if (!text)
        return fault("%s: out of memory", input->path);
    Status status = input_read(input, text, length);
    if (status == OK) {
        const char *end = text;
        *json = cJSON_ParseWithLengthOpts(text, length, &end, false);
        if (!cJSON_IsObject(*json))
            status = bad_input("%s: expected a JSON object in the safetensors header, found an error near byte %lld",
                               input->path, (long long)(LENGTH_BYTES + (end ? end - text : 0)));
    }
    free(text);
    return status;
}

/* A whole number in [0, max]. */
static bool read_count(const cJSON *item, int64_t max, int64_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= (double)max))
        return false;
    *value = (int64_t)item->valuedouble;
    return (double)*value == item->valuedouble;
}

static Status parse_shape(const Index *index, const cJSON *shape, Tensor *tensor) {
    const cJSON *size;
    bool valid = cJSON_IsArray(shape);
    cJSON_ArrayForEach(size, shape) {
        int64_t value;
        valid = valid && read_count(size, INT32_MAX, &value);
        if (valid && tensor->dims < 2)
            tensor->shape[tensor->dims] = value;
        tensor->dims++;
    }
    return valid ? OK : bad_input("%s: '%s': expected a shape of whole numbers", index->input.path, tensor->name);
}

static Status parse_offsets(const Index *index, const cJSON *offsets, Tensor *tensor) {
    int64_t room = index->input.size - index->data_start;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !read_count(cJSON_GetArrayItem(offsets, 0), INT64_C(1) << 53, &tensor->begin) ||
        !read_count(cJSON_GetArrayItem(offsets, 1), INT64_C(1) << 53, &tensor->end) || tensor->begin > tensor->end)
        return bad_input("%s: '%s': expected data_offsets [begin, end]", index->input.path, tensor->name);
    if (tensor->end > room)
        return bad_input("%s: '%s': expected data within the file's %lld bytes, found offsets %lld to %lld",
                         index->input.path, tensor->name, (long long)room, (long long)tensor->begin,
                         (long long)tensor->end);
    return OK;
}

/* "h.N.rest" gives N and rest; anything else -1. */
static int split_layer(const char **name) {
    const char *digits = *name + 2;
    if (strncmp(*name, "h.", 2) != 0 || !isdigit((unsigned char)*digits))
        return -1;
    char *end;
    long layer = strtol(digits, &end, 10);
    if (*end != '.' || layer >= LAYERS_MAX)
        return -1;
    *name = end + 1;
    return (int)layer;
}

static Status classify(const Index *index, const char *name, Tensor *tensor) {
    static const char prefix[] = "transformer.";
    if (strncmp(name, prefix, sizeof prefix - 1) == 0)
        name += sizeof prefix - 1;
    int layer = split_layer(&name);
    bool per_layer = layer >= 0;
    tensor->layer = per_layer ? layer : 0;
    tensor->kind = SKIPPED;
    for (int kind = 0; kind < KINDS; kind++)
        if (kinds[kind].per_layer == per_layer && strcmp(kinds[kind].name, name) == 0)
            tensor->kind = kind;
    if (!per_layer && strcmp(name, "lm_head.weight") == 0)
        tensor->kind = HEAD;
    bool skipped = per_layer && (strcmp(name, "attn.bias") == 0 || strcmp(name, "attn.masked_bias") == 0);
    if (tensor->kind != SKIPPED || skipped)
        return OK;
    return bad_input("%s: expected the tensors of GPT-2, found '%s'", index->input.path, tensor->name);
}

static Status parse_tensor(const Index *index, const cJSON *item, Tensor *tensor) {
    copy_printable(tensor->name, sizeof tensor->name, item->string);
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
    if (!cJSON_IsString(dtype))
        return bad_input("%s: '%s': expected a dtype", index->input.path, tensor->name);
    copy_printable(tensor->dtype, sizeof tensor->dtype, dtype->valuestring);
    TRY(classify(index, item->string, tensor));
    TRY(parse_shape(index, cJSON_GetObjectItemCaseSensitive(item, "shape"), tensor));
    return parse_offsets(index, cJSON_GetObjectItemCaseSensitive(item, "data_offsets"), tensor);
}

static int by_begin(const void *a, const void *b) {
    const Tensor *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The format wants data without holes, so that a file says exactly what it holds. */
static Status check_tiling(const Index *index) {
    int64_t at = 0, room = index->input.size - index->data_start;
    for (int i = 0; i < index->count; i++) {
        const Tensor *tensor = &index->tensors[i];
        if (tensor->begin != at)
            return bad_input("%s: '%s': expected data from byte %lld on, found %lld: %s", index->input.path,
                             tensor->name, (long long)at, (long long)tensor->begin,
                             tensor->begin < at ? "it overlaps another tensor's" : "bytes that belong to no tensor");
        at = tensor->end;
    }
    if (at != room)
        return bad_input("%s: expected %lld bytes of data by its header, found %lld", index->input.path,
                         (long long)at, (long long)room);
    return OK;
}

static Status parse_tensors(Index *index, const cJSON *json) {
    const cJSON *item;
    index->tensors = calloc((size_t)cJSON_GetArraySize(json) + 1, sizeof *index->tensors);
    if (!index->tensors)
        return fault("%s: out of memory", index->input.path);
    cJSON_ArrayForEach(item, json)
        if (strcmp(item->string, "__metadata__") != 0)
            TRY(parse_tensor(index, item, &index->tensors[index->count++]));
    qsort(index->tensors, (size_t)index->count, sizeof *index->tensors, by_begin);
    return check_tiling(index);
}

/* ---- tensors to slots ---- */

static Status fill_slots(Index *index) {
    int layers = 0;
    for (int i = 0; i < index->count; i++)
        if (index->tensors[i].layer >= layers)
            layers = index->tensors[i].layer + 1;
    if (layers > index->count)
        return bad_input("%s: expected %d layers by its tensors' names, found only %d tensors", index->input.path,
                         layers, index->count);
    index->layers = layers;
    index->slots = calloc((size_t)layers * KINDS + 1, sizeof *index->slots);
    if (!index->slots)
        return fault("%s: out of memory", index->input.path);
    for (int i = 0; i < index->count; i++) {
        const Tensor *tensor = &index->tensors[i];
        if (tensor->kind < 0)
            continue;
        const Tensor **slot = &index->slots[tensor->layer * KINDS + tensor->kind];
        if (*slot)
            return bad_input("%s: expected each tensor once, found '%s' and '%s'", index->input.path, (*slot)->name,
                             tensor->name);
        *slot = tensor;
    }
    return OK;
}

/* The slot's tensor, which must be there. */
static Status find(const Index *index, int kind, int layer, const Tensor **tensor) {
    *tensor = index->layers > 0 ? index->slots[layer * KINDS + kind] : NULL;
    if (*tensor)
        return OK;
    if (kinds[kind].per_layer)
        return bad_input("%s: expected a tensor 'h.%d.%s', found none", index->input.path, layer, kinds[kind].name);
    return bad_input("%s: expected a tensor '%s', found none", index->input.path, kinds[kind].name);
}

static bool tensor_type(const Tensor *tensor, TensorType *type) {
    static const char *const names[] = {[TENSOR_F32] = "F32", [TENSOR_F16] = "F16", [TENSOR_BF16] = "BF16"};
    for (int i = 0; i < 3; i++)
        if (strcmp(tensor->dtype, names[i]) == 0) {
            *type = (TensorType)i;
            return true;
        }
    return false;
}

static void shape_text(int dims, int64_t rows, int64_t cols, char *text, size_t size) {
    if (dims == 1)
        snprintf(text, size, "[%lld]", (long long)rows);
    else if (dims == 2)
        snprintf(text, size, "[%lld, %lld]", (long long)rows, (long long)cols);
    else
        snprintf(text, size, "%d dimensions", dims);
}

static Status check_tensor(const Index *index, const Tensor *tensor, int64_t rows, int64_t cols) {
    const char *path = index->input.path;
    Layout layout = kinds[tensor->kind == HEAD ? WTE : tensor->kind].layout;
    int dims = layout == VECTOR ? 1 : 2;
    int64_t first = layout == EMBEDDING ? rows : cols, second = layout == EMBEDDING ? cols : rows;
    if (tensor->dims != dims || tensor->shape[0] != first || (dims == 2 && tensor->shape[1] != second)) {
        char expected[64], found[64];
        shape_text(dims, first, second, expected, sizeof expected);
        shape_text(tensor->dims, tensor->shape[0], tensor->shape[1], found, sizeof found);
        return bad_input("%s: '%s': expected shape %s, found %s", path, tensor->name, expected, found);
    }
    TensorType type;
    if (!tensor_type(tensor, &type))
        return bad_input("%s: '%s': expected dtype F32, F16 or BF16, found %s", path, tensor->name, tensor->dtype);
    int64_t bytes = rows * cols * (int64_t)tensor_type_bytes(type);
    if (tensor->end - tensor->begin != bytes)
        return bad_input("%s: '%s': expected %lld bytes for its shape, found %lld", path, tensor->name,
                         (long long)bytes, (long long)(tensor->end - tensor->begin));
    return OK;
}

static const Param *param_of(const ParamTable *table, int kind, int layer) {
    const Param *param = param_find(table, kinds[kind].param, kinds[kind].per_layer ? layer : -1);
    assert(param);
    return param;
}

/* Every tensor that the model needs is there and has its shape. The file's wte is not padded. */
static Status check_slots(const Index *index, const Gpt2Config *config, const ParamTable *table) {
    for (int layer = 0; layer < config->layers; layer++)
        for (int kind = 0; kind < KINDS; kind++) {
            if (!kinds[kind].per_layer && layer > 0)
                continue;
            const Tensor *tensor;
            const Param *param = param_of(table, kind, layer);
            TRY(find(index, kind, layer, &tensor));
            TRY(check_tensor(index, tensor, kind == WTE ? config->vocab : param->rows, param->cols));
        }
    for (int i = 0; i < index->count; i++)
        if (index->tensors[i].kind == HEAD)
            TRY(check_tensor(index, &index->tensors[i], config->vocab, config->channels));
    return OK;
}

/* ---- sizes ---- */

/* n_head of the config.json beside the file; 0 when there is no such file. */
static Status read_heads(const char *path, int *heads) {
    char config_path[512];
    const char *slash = strrchr(path, '/');
    snprintf(config_path, sizeof config_path, "%.*sconfig.json", slash ? (int)(slash + 1 - path) : 0, path);
    InputFile input;
    *heads = 0;
    if (input_open(&input, config_path) != OK)
        return OK;
    static const int64_t size_max = 1 << 20;
    int64_t size = input.size < size_max ? input.size : size_max, value = 0;
    char *text = malloc((size_t)size + 1);
    Status status = text ? input_read(&input, text, (size_t)size) : fault("%s: out of memory", config_path);
    if (status == OK) {
        cJSON *json = cJSON_ParseWithLength(text, (size_t)size);
        if (!read_count(cJSON_GetObjectItemCaseSensitive(json, "n_head"), INT32_MAX, &value) || value == 0)
            status = bad_input("%s: expected JSON with the number of heads, n_head; found none", config_path);
        cJSON_Delete(json);
        *heads = (int)value;
    }
    free(text);
    input_close(&input);
    return status;
}

static Status find_sizes(const Index *index, Gpt2Config *config) {
    const char *path = index->input.path;
    const Tensor *wte, *wpe;
    TRY(find(index, WTE, 0, &wte));
    TRY(find(index, WPE, 0, &wpe));
    if (wte->dims != 2 || wpe->dims != 2)
        return bad_input("%s: expected wte.weight and wpe.weight of 2 dimensions, found %d and %d", path, wte->dims,
                         wpe->dims);
    *config = (Gpt2Config){.layers = index->layers, .channels = (int)wte->shape[1], .context = (int)wpe->shape[0],
                           .vocab = (int)wte->shape[0]};
    if (config->vocab > INT32_MAX - 1024) /* padding must not overflow */
        return bad_input("%s: expected a vocabulary, found %d tokens", path, config->vocab);
    config->vocab_padded = gpt2_pad_vocab(config->vocab);
    TRY(read_heads(path, &config->heads));
    if (config->heads == 0) {
        if (config->channels == 0 || config->channels % 64 != 0)
            return bad_input("%s: expected a config.json with n_head beside it, since its %d channels are not heads of "
                             "64", path, config->channels);
        config->heads = config->channels / 64;
    }
    return gpt2_check(config, path);
}

/* ---- reading ---- */

static void index_close(Index *index) {
    free(index->slots);
    free(index->tensors);
    input_close(&index->input);
}

/* On error nothing is left to close. */
static Status index_open(Index *index, const char *path) {
    *index = (Index){0};
    TRY(input_open(&index->input, path));
    cJSON *json = NULL;
    Status status = read_json(index, &json);
    if (status == OK)
        status = parse_tensors(index, json);
    cJSON_Delete(json);
    if (status == OK)
        status = fill_slots(index);
    if (status != OK)
        index_close(index);
    return status;
}

Status safetensors_read_config(const char *path, Gpt2Config *config) {
    Index index;
    TRY(index_open(&index, path));
    Status status = find_sizes(&index, config);
    if (status == OK) {
        ParamTable table = {0};
        gpt2_param_table(config, false, &table);
        status = check_slots(&index, config, &table);
        param_table_free(&table);
    }
    index_close(&index);
    return status;
}

static Status read_tensors(Index *index, const Gpt2Config *config, const ParamTable *table, float *params) {
    for (int i = 0; i < index->count; i++) {
        const Tensor *tensor = &index->tensors[i];
        TensorType type;
        if (tensor->kind < 0 || !tensor_type(tensor, &type))
            continue;
        const Param *param = param_of(table, tensor->kind, tensor->layer);
        int64_t rows = tensor->kind == WTE ? config->vocab : param->rows, cols = param->cols;
        bool transposed = kinds[tensor->kind].layout == MATRIX;
        TRY(input_seek(&index->input, index->data_start + tensor->begin));
        TRY(tensor_read(&index->input, type, transposed ? cols : rows, transposed ? rows : cols, transposed,
                        params + param->offset));
        if (tensor->kind == WTE)
            memset(params + param->offset + rows * cols, 0, (size_t)(param->elems - rows * cols) * sizeof *params);
    }
    return OK;
}

/* A head of its own would be lost: what the file holds is then another model. */
static Status compare_head(Index *index, const Tensor *head, int rows, int cols, const float *wte, float *row) {
    TensorType type;
    if (!tensor_type(head, &type))
        return OK; /* refused before */
    TRY(input_seek(&index->input, index->data_start + head->begin));
    for (int i = 0; i < rows; i++, wte += cols) {
        TRY(tensor_read(&index->input, type, 1, cols, false, row));
        if (memcmp(row, wte, (size_t)cols * sizeof *row) != 0)
            return bad_input("%s: '%s': expected the same as 'wte.weight', found another row %d", index->input.path,
                             head->name, i);
    }
    return OK;
}

static Status compare_heads(Index *index, const Gpt2Config *config, const ParamTable *table, const float *params) {
    float *row = malloc((size_t)config->channels * sizeof *row);
    Status status = row ? OK : fault("%s: out of memory", index->input.path);
    for (int i = 0; i < index->count && status == OK; i++)
        if (index->tensors[i].kind == HEAD)
            status = compare_head(index, &index->tensors[i], config->vocab, config->channels,
                                  params + param_of(table, WTE, 0)->offset, row);
    free(row);
    return status;
}

Status safetensors_read_params(const char *path, const Gpt2Config *config, const ParamTable *table, float *params) {
    Index index;
    TRY(index_open(&index, path));
    Status status = index.layers == config->layers
                        ? check_slots(&index, config, table)
                        : bad_input("%s: expected %d layers, found %d", path, config->layers, index.layers);
    if (status == OK)
        status = read_tensors(&index, config, table, params);
    if (status == OK)
        status = compare_heads(&index, config, table, params);
    index_close(&index);
    return status;
}
