/* Model files: layouts written down a second time here, every refusal, and files damaged at random. */
#define _POSIX_C_SOURCE 200809L
#include "model/checkpoint.h"

#include "base/random.h"
#include "model/tensor.h"
#include "tests/check.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Two heads of 4, so that safetensors need a config.json beside them. */
static const Gpt2Config small = {
    .layers = 2, .heads = 2, .channels = 8, .context = 6, .vocab = 11, .vocab_padded = 128};

typedef struct Fixture {
    char folder[64], model[128], tensors[128], json[128];
    ParamTable table;
    float *params, *found;
    size_t param_bytes;
} Fixture;

/* Multiples of 1/64 below 2: exact in f32, f16 and bf16. */
static float exact_value(uint64_t counter) { return (float)((int)(random_bits(5, 0, counter) % 255) - 127) / 64; }

static int setup(void **state) {
    Fixture *f = calloc(1, sizeof *f);
    snprintf(f->folder, sizeof f->folder, "/tmp/tandem_test_XXXXXX");
    if (!f || !mkdtemp(f->folder))
        return 1;
    snprintf(f->model, sizeof f->model, "%s/m.bin", f->folder);
    snprintf(f->tensors, sizeof f->tensors, "%s/model.safetensors", f->folder);
    snprintf(f->json, sizeof f->json, "%s/config.json", f->folder);
    gpt2_param_table(&small, false, &f->table);
    f->param_bytes = (size_t)f->table.elems * sizeof(float);
    f->params = malloc(f->param_bytes);
    f->found = malloc(f->param_bytes);
    for (int64_t i = 0; i < f->table.elems; i++)
        f->params[i] = exact_value((uint64_t)i);
    const Param *wte = param_find(&f->table, "wte", -1);
    int64_t used = (int64_t)small.vocab * small.channels;
    memset(f->params + wte->offset + used, 0, (size_t)(wte->elems - used) * sizeof(float));
    memset(f->found, 0xff, f->param_bytes);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    Fixture *f = *state;
    unlink(f->model);
    unlink(f->tensors);
    unlink(f->json);
    int left = rmdir(f->folder); /* fails when a temporary file stayed behind */
    param_table_free(&f->table);
    free(f->params);
    free(f->found);
    free(f);
    return left;
}

static void write_file(const char *path, const void *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

static uint8_t *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    uint8_t *bytes = malloc(*size);
    assert_int_equal(fread(bytes, 1, *size, file), *size);
    fclose(file);
    return bytes;
}

/* One line that names the file. */
static void assert_line_names(const char *path) {
    assert_non_null(strstr(error_line(), path));
    assert_null(strchr(error_line(), '\n'));
}

#define assert_refused_file(path, text)                                                                            \
    do {                                                                                                           \
        Gpt2Config refused_;                                                                                       \
        assert_refused(checkpoint_read_config((path), &refused_), (text));                                         \
        assert_line_names(path);                                                                                   \
    } while (0)

static void assert_same_config(const Gpt2Config *found, const Gpt2Config *expected) {
    assert_memory_equal(found, expected, sizeof *found);
}

/* ---- llm.c's format ---- */

/* formats.md's body once more: kind, layers or 1, elements of one layer. */
static const struct {
    const char *name;
    int layers, elems;
} body[] = {
    {"wte", 0, 128 * 8}, {"wpe", 0, 6 * 8},     {"ln1w", 2, 8},       {"ln1b", 2, 8},
    {"qkvw", 2, 24 * 8}, {"qkvb", 2, 24},       {"attprojw", 2, 64},  {"attprojb", 2, 8},
    {"ln2w", 2, 8},      {"ln2b", 2, 8},        {"fcw", 2, 32 * 8},   {"fcb", 2, 32},
    {"fcprojw", 2, 256}, {"fcprojb", 2, 8},     {"lnfw", 0, 8},       {"lnfb", 0, 8},
};

/* The model file that holds params, f32 (version 3) or bf16 (version 5); to be freed. */
static uint8_t *build_model(const Fixture *f, int version, size_t *size) {
    size_t element = version == 3 ? 4 : 2;
    *size = 1024 + (size_t)f->table.elems * element;
    uint8_t *bytes = calloc(*size, 1), *at = bytes + 1024;
    const int32_t header[8] = {20240326, version, 6, 11, 2, 2, 8, 128};
    memcpy(bytes, header, sizeof header);
    for (size_t kind = 0; kind < sizeof body / sizeof body[0]; kind++)
        for (int layer = body[kind].layers ? 0 : -1; layer < body[kind].layers; layer++) {
            const Param *param = param_find(&f->table, body[kind].name, layer);
            assert_non_null(param);
            assert_int_equal(param->elems, body[kind].elems);
            for (int i = 0; i < body[kind].elems; i++, at += element)
                memcpy(at, (const uint8_t *)(f->params + param->offset + i) + (4 - element), element);
        }
    assert_ptr_equal(at, bytes + *size);
    return bytes;
}

static void checkpoint_is_written_as_documented(void **state) {
    Fixture *f = *state;
    size_t expected_size, size;
    assert_ok(checkpoint_write(f->model, &small, &f->table, f->params));
    uint8_t *expected = build_model(f, 3, &expected_size), *written = read_file(f->model, &size);
    assert_int_equal(size, expected_size);
    assert_memory_equal(written, expected, size);
    free(expected);
    free(written);
}

static void check_reads(Fixture *f, const char *path) {
    Gpt2Config config;
    assert_ok(checkpoint_read_config(path, &config));
    assert_same_config(&config, &small);
    memset(f->found, 0xff, f->param_bytes);
    assert_ok(checkpoint_read_params(path, &config, &f->table, f->found));
    assert_memory_equal(f->found, f->params, f->param_bytes);
}

static void checkpoint_round_trip_is_exact(void **state) {
    Fixture *f = *state;
    f->params[3] = 1.0f / 3; /* all 24 bits */
    f->params[4] = -0.0f;
    assert_ok(checkpoint_write(f->model, &small, &f->table, f->params));
    check_reads(f, f->model);
    f->params[5] = 7;
    assert_ok(checkpoint_write(f->model, &small, &f->table, f->params)); /* over an older one */
    check_reads(f, f->model);
}

static void checkpoint_reads_bf16(void **state) {
    Fixture *f = *state;
    size_t size;
    uint8_t *bytes = build_model(f, 5, &size);
    write_file(f->model, bytes, size);
    check_reads(f, f->model);
    free(bytes);
}

static void checkpoint_zeroes_padded_rows(void **state) {
    Fixture *f = *state;
    size_t size;
    uint8_t *bytes = build_model(f, 3, &size);
    memset(bytes + 1024 + 11 * 8 * 4, 0x40, (128 - 11) * 8 * 4);
    write_file(f->model, bytes, size);
    check_reads(f, f->model);
    free(bytes);
}

/* What PyTorch wrote, read and written again, is the same file. */
static void checkpoint_rewrites_golden_models(void **state) {
    Fixture *f = *state;
    static const char *const paths[] = {"tests/data/tiny_model.bin", "tests/data/odd_model.bin"};
    for (int i = 0; i < 2; i++) {
        Gpt2Config config;
        ParamTable table;
        assert_ok(checkpoint_read_config(paths[i], &config));
        gpt2_param_table(&config, false, &table);
        float *params = malloc((size_t)table.elems * sizeof(float));
        assert_ok(checkpoint_read_params(paths[i], &config, &table, params));
        assert_ok(checkpoint_write(f->model, &config, &table, params));
        size_t expected_size, size;
        uint8_t *expected = read_file(paths[i], &expected_size), *written = read_file(f->model, &size);
        assert_int_equal(size, expected_size);
        assert_memory_equal(written, expected, size);
        free(expected);
        free(written);
        free(params);
        param_table_free(&table);
    }
}

static void checkpoint_refuses_what_is_no_model(void **state) {
    Fixture *f = *state;
    assert_refused_file(f->model, "cannot open");
    assert_refused_file(f->folder, "regular file");
    write_file(f->model, "", 0);
    assert_refused_file(f->model, "found 0 bytes");
    char text[2000];
    memset(text, 'x', sizeof text);
    write_file(f->model, text, 100);
    assert_refused_file(f->model, "found 100 bytes");
    write_file(f->model, text, sizeof text);
    assert_refused_file(f->model, "expected a model file (magic 20240326), found magic 2021161080");
}

static void checkpoint_refuses_headers_that_do_not_fit(void **state) {
    Fixture *f = *state;
    static const struct {
        int word, value;
        const char *text;
    } cases[] = {
        {0, 20240520, "found magic 20240520"},
        {1, 1, "found 1"},
        {1, 5, "expected 6688 bytes"}, /* bf16 by its version, f32 by its size */
        {2, 7, "expected 12384 bytes"},
        {2, 0, "context"},
        {2, -6, "context"},
        {3, 0, "vocab"},
        {3, 129, "padded"},
        {4, 3, "found 12352"},
        {4, -1, "layers"},
        {4, 1 << 24, "expected"},
        {5, 3, "heads"},
        {5, 0, "heads"},
        {6, 16, "expected"},
        {6, 1 << 24, "m.bin"},
        {6, INT32_MAX, "channels"},
        {7, 127, "expected"},
        {7, INT32_MAX, "m.bin"},
    };
    size_t size;
    uint8_t *bytes = build_model(f, 3, &size);
    assert_int_equal(size, 12352);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int32_t *word = (int32_t *)(void *)bytes + cases[i].word, kept = *word;
        *word = cases[i].value;
        write_file(f->model, bytes, size);
        assert_refused_file(f->model, cases[i].text);
        *word = kept;
    }
    int32_t *header = (int32_t *)(void *)bytes;
    header[4] = header[6] = 1 << 24; /* sizes whose product passes 2^63 */
    write_file(f->model, bytes, size);
    assert_refused_file(f->model, "m.bin");
    free(bytes);
}

static void checkpoint_refuses_other_lengths(void **state) {
    Fixture *f = *state;
    size_t size;
    uint8_t *bytes = build_model(f, 3, &size);
    write_file(f->model, bytes, size - 1);
    assert_refused_file(f->model, "expected 12352 bytes");
    bytes = realloc(bytes, size + 4);
    memset(bytes + size, 0, 4);
    write_file(f->model, bytes, size + 4);
    assert_refused_file(f->model, "found 12356");
    free(bytes);
}

static void checkpoint_write_names_what_it_cannot_write(void **state) {
    Fixture *f = *state;
    char path[160];
    snprintf(path, sizeof path, "%s/none/m.bin", f->folder);
    assert_int_not_equal(checkpoint_write(path, &small, &f->table, f->params), OK);
    assert_line_names(path);
}

/* ---- safetensors ---- */

/* A file under construction: the JSON without its closing brace, and the data. */
typedef struct Parts {
    char json[8192];
    size_t json_size;
    uint8_t data[32768];
    size_t data_size;
} Parts;

static void add_tensor(Parts *parts, const char *name, const char *dtype, const char *shape, size_t bytes) {
    int size = snprintf(parts->json + parts->json_size, sizeof parts->json - parts->json_size,
                        "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                        parts->json_size ? "," : "{", name, dtype, shape, parts->data_size, parts->data_size + bytes);
    parts->json_size += (size_t)size;
    parts->data_size += bytes;
    assert_true(parts->json_size < sizeof parts->json && parts->data_size < sizeof parts->data);
}

static size_t put(uint8_t *at, float value, const char *dtype) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (strcmp(dtype, "F32") == 0)
        return memcpy(at, &bits, 4), 4;
    uint32_t half = bits >> 16;
    if (strcmp(dtype, "F16") == 0)
        half = value == 0 ? bits >> 16 : (bits >> 31 << 15 | ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023));
    uint16_t low = (uint16_t)half;
    return memcpy(at, &low, 2), 2;
}

/* GPT-2's names as Hugging Face writes them; 't': stored [in,out]. */
static const struct {
    const char *param, *name;
    char layout;
} names[] = {
    {"lnfw", "ln_f.weight", '1'}, {"lnfb", "ln_f.bias", '1'}, {"wpe", "wpe.weight", '2'}, {"wte", "wte.weight", '2'},
    {"ln1w", "ln_1.weight", '1'}, {"ln1b", "ln_1.bias", '1'}, {"qkvw", "attn.c_attn.weight", 't'},
    {"qkvb", "attn.c_attn.bias", '1'}, {"attprojw", "attn.c_proj.weight", 't'}, {"attprojb", "attn.c_proj.bias", '1'},
    {"ln2w", "ln_2.weight", '1'}, {"ln2b", "ln_2.bias", '1'}, {"fcw", "mlp.c_fc.weight", 't'},
    {"fcb", "mlp.c_fc.bias", '1'}, {"fcprojw", "mlp.c_proj.weight", 't'}, {"fcprojb", "mlp.c_proj.bias", '1'},
};

static void add_param(Parts *parts, const Fixture *f, const Param *param, const char *prefix, const char *dtype) {
    size_t kind = 0;
    while (strcmp(names[kind].param, param->name) != 0)
        kind++;
    char name[64], shape[32];
    int rows = strcmp(param->name, "wte") == 0 ? small.vocab : (int)param->rows, cols = (int)param->cols;
    bool transposed = names[kind].layout == 't';
    if (param->layer >= 0)
        snprintf(name, sizeof name, "%sh.%d.%s", prefix, param->layer, names[kind].name);
    else
        snprintf(name, sizeof name, "%s%s", prefix, names[kind].name);
    if (names[kind].layout == '1')
        snprintf(shape, sizeof shape, "[%d]", cols);
    else
        snprintf(shape, sizeof shape, "[%d,%d]", transposed ? cols : rows, transposed ? rows : cols);
    uint8_t *at = parts->data + parts->data_size;
    for (int i = 0; i < rows * cols; i++) {
        int row = transposed ? i % rows : i / cols, col = transposed ? i / rows : i % cols;
        at += put(at, f->params[param->offset + row * cols + col], dtype);
    }
    add_tensor(parts, name, dtype, shape, (size_t)(at - (parts->data + parts->data_size)));
}

/* extras: what real files also hold and nobody needs. */
static void build_tensors(Parts *parts, const Fixture *f, const char *prefix, const char *dtype, bool extras) {
    *parts = (Parts){0};
    for (int i = 0; i < f->table.param_count; i++) {
        add_param(parts, f, &f->table.params[i], prefix, dtype);
        if (extras && i == 4) {
            char name[64];
            snprintf(name, sizeof name, "%sh.1.attn.bias", prefix);
            add_tensor(parts, name, "U8", "[1,1,6,6]", 36);
            snprintf(name, sizeof name, "%sh.1.attn.masked_bias", prefix);
            add_tensor(parts, name, "F32", "[]", 4);
            memcpy(parts->data + parts->data_size, f->params + param_find(&f->table, "wte", -1)->offset, 11 * 8 * 4);
            add_tensor(parts, "lm_head.weight", "F32", "[11,8]", 11 * 8 * 4);
        }
    }
    if (extras)
        parts->json_size += (size_t)sprintf(parts->json + parts->json_size, ",\"__metadata__\":{\"format\":\"pt\"}");
    parts->json_size += (size_t)sprintf(parts->json + parts->json_size, extras ? "}      " : "}");
}

static void write_tensors(const char *path, const Parts *parts, uint64_t length) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fwrite(&length, 8, 1, file);
    fwrite(parts->json, 1, parts->json_size, file);
    fwrite(parts->data, 1, parts->data_size, file);
    assert_int_equal(fclose(file), 0);
}

static void write_heads(const Fixture *f, const char *json) { write_file(f->json, json, strlen(json)); }

static void safetensors_are_read_in_every_style(void **state) {
    Fixture *f = *state;
    static const char *const dtypes[] = {"F32", "F16", "BF16"};
    write_heads(f, "{\"model_type\": \"gpt2\", \"n_head\": 2}");
    Parts parts;
    for (int i = 0; i < 3; i++)
        for (int extras = 0; extras < 2; extras++) {
            build_tensors(&parts, f, extras ? "transformer." : "", dtypes[i], extras);
            write_tensors(f->tensors, &parts, parts.json_size);
            check_reads(f, f->tensors);
            build_tensors(&parts, f, extras ? "" : "transformer.", dtypes[i], extras);
            write_tensors(f->tensors, &parts, parts.json_size);
            check_reads(f, f->tensors);
        }
}

/* GPT-2's head is wte; a file with another one holds another model. */
static void safetensors_refuse_a_head_of_its_own(void **state) {
    Fixture *f = *state;
    Parts parts;
    Gpt2Config config;
    write_heads(f, "{\"n_head\": 2}");
    build_tensors(&parts, f, "", "F32", true);
    const char *head = strstr(parts.json, "lm_head.weight");
    size_t begin;
    assert_int_equal(sscanf(strstr(head, "offsets"), "offsets\":[%zu", &begin), 1);
    parts.data[begin + 11 * 8 * 4 - 1] ^= 1; /* in the last row */
    write_tensors(f->tensors, &parts, parts.json_size);
    assert_ok(checkpoint_read_config(f->tensors, &config));
    assert_refused(checkpoint_read_params(f->tensors, &config, &f->table, f->found),
                   "'lm_head.weight': expected the same as 'wte.weight', found another row 10");
    assert_line_names(f->tensors);
    memcpy(strstr(head, "[11,8]"), "[8,11]", 6);
    write_tensors(f->tensors, &parts, parts.json_size);
    assert_refused_file(f->tensors, "'lm_head.weight': expected shape [11, 8], found [8, 11]");
}

static void safetensors_take_heads_from_config_json(void **state) {
    Fixture *f = *state;
    Parts parts;
    Gpt2Config config;
    build_tensors(&parts, f, "", "F32", false);
    write_tensors(f->tensors, &parts, parts.json_size);
    assert_refused_file(f->tensors, "config.json");
    write_heads(f, "{\"n_head\": 4}");
    assert_ok(checkpoint_read_config(f->tensors, &config));
    assert_int_equal(config.heads, 4);
    write_heads(f, "{\"n_head\": 3}");
    assert_refused_file(f->tensors, "heads");
    static const char *const broken[] = {"", "{\"n_head\": ", "{}", "{\"n_head\": 0}", "{\"n_head\": 2.5}",
                                         "{\"n_head\": \"2\"}", "[2]"};
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        write_heads(f, broken[i]);
        assert_refused(checkpoint_read_config(f->tensors, &config), "n_head");
        assert_line_names(f->json);
    }
}

/* Channels 64 without a config.json: one head of 64. */
static void safetensors_default_to_heads_of_64(void **state) {
    Fixture *f = *state;
    static const struct {
        const char *name, *shape;
        size_t elems;
    } tensors[] = {
        {"wte.weight", "[3,64]", 192}, {"wpe.weight", "[2,64]", 128},
        {"ln_f.weight", "[64]", 64}, {"ln_f.bias", "[64]", 64},
        {"h.0.ln_1.weight", "[64]", 64}, {"h.0.ln_1.bias", "[64]", 64}, {"h.0.attn.c_attn.bias", "[192]", 192},
        {"h.0.attn.c_proj.bias", "[64]", 64}, {"h.0.ln_2.weight", "[64]", 64}, {"h.0.ln_2.bias", "[64]", 64},
        {"h.0.mlp.c_fc.bias", "[256]", 256}, {"h.0.mlp.c_proj.bias", "[64]", 64},
        {"h.0.attn.c_attn.weight", "[64,192]", 12288}, {"h.0.attn.c_proj.weight", "[64,64]", 4096},
        {"h.0.mlp.c_fc.weight", "[64,256]", 16384}, {"h.0.mlp.c_proj.weight", "[256,64]", 16384},
    };
    static uint8_t zeros[1 << 17];
    char json[4096];
    size_t size = 0, at = 0;
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++, at += tensors[i - 1].elems * 2)
        size += (size_t)sprintf(json + size, "%c\"%s\":{\"dtype\":\"BF16\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                                i ? ',' : '{', tensors[i].name, tensors[i].shape, at, at + tensors[i].elems * 2);
    size += (size_t)sprintf(json + size, "}");
    uint64_t length = size;
    FILE *file = fopen(f->tensors, "wb");
    fwrite(&length, 8, 1, file);
    fwrite(json, 1, size, file);
    fwrite(zeros, 1, at, file);
    fclose(file);
    Gpt2Config config;
    assert_ok(checkpoint_read_config(f->tensors, &config));
    const Gpt2Config expected = {
        .layers = 1, .heads = 1, .channels = 64, .context = 2, .vocab = 3, .vocab_padded = 128};
    assert_same_config(&config, &expected);
}

static void safetensors_refuse_broken_headers(void **state) {
    Fixture *f = *state;
    /* The first `from` in the JSON becomes `to`. The first tensors are ln_f.weight [0,32] and ln_f.bias [32,64]. */
    static const struct {
        const char *from, *to, *text;
    } cases[] = {
        {"{\"ln_f", "[\"ln_f", "JSON"},
        {"{\"ln_f", "{ln_f", "JSON"},
        {"\"F32\"", "\"I32\"", "'ln_f.weight': expected dtype F32, F16 or BF16, found I32"},
        {"\"F32\"", "32", "dtype"},
        {"\"dtype\"", "\"type\"", "'ln_f.weight': expected a dtype"},
        {"\"shape\"", "\"form\"", "shape"},
        {"\"data_offsets\"", "\"offsets\"", "data_offsets"},
        {"wpe.weight", "wpx.weight", "expected the tensors of GPT-2, found 'wpx.weight'"},
        {"wpe.weight", "w\\npe", "found 'w?pe'"},
        {"wpe.weight", "lm_head.weight", "expected a tensor 'wpe.weight', found none"},
        {"wte.weight", "h.0.attn.bias", "expected a tensor 'wte.weight', found none"},
        {"h.1.mlp.c_fc.bias", "h.1.attn.bias", "expected a tensor 'h.1.mlp.c_fc.bias', found none"},
        {"h.1.mlp.c_fc.bias", "h.4.attn.bias", "expected a tensor 'h.1.mlp.c_fc.bias', found none"},
        {"h.1.mlp.c_fc.bias", "h.9999.mlp.c_fc.bias", "10000 layers"},
        {"h.1.mlp.c_fc.bias", "h.99999999999999999999.mlp.c_fc.bias", "expected the tensors of GPT-2"},
        {"h.1.mlp.c_fc.bias", "h.-1.mlp.c_fc.bias", "expected the tensors of GPT-2"},
        {"h.1.ln_1.bias", "h.0.ln_1.bias", "once, found 'h.0.ln_1.bias'"},
        {"h.1.ln_1.bias", "transformer.h.0.ln_1.bias", "once, found 'transformer.h.0.ln_1.bias'"},
        {"[11,8]", "[12,8]", "'wte.weight': expected 384 bytes for its shape, found 352"},
        {"[11,8]", "[11,16]", "expected"},
        {"[11,8]", "[0,8]", "vocab"},
        {"[11,8]", "[11,0]", "channels"},
        {"[11,8]", "[88]", "2 dimensions"},
        {"[11,8]", "[1,11,8]", "2 dimensions"},
        {"[11,8]", "[11,8.5]", "whole numbers"},
        {"[11,8]", "[11,-8]", "whole numbers"},
        {"[11,8]", "[11,1e99]", "whole numbers"},
        {"[11,8]", "[2147483647,8]", "model.safetensors"},
        {"[11,8]", "[11,2147483647]", "model.safetensors"},
        {"[11,8]", "\"11x8\"", "whole numbers"},
        {"[6,8]", "[7,8]", "'wpe.weight': expected 224 bytes"},
        {"[6,8]", "[6,4]", "'wpe.weight': expected shape [6, 8], found [6, 4]"},
        {"[8,24]", "[24,8]", "expected shape [8, 24], found [24, 8]"},
        {"[8]", "[8,1]", "'ln_f.weight': expected shape [8], found [8, 1]"},
        {"[8]", "[2,2,2]", "expected shape [8], found 3 dimensions"},
        {"[32,64]", "[31,64]", "'ln_f.bias': expected data from byte 32 on, found 31: it overlaps"},
        {"[32,64]", "[0,32]", "overlaps"},
        {"[32,64]", "[33,64]", "no tensor"},
        {"[32,64]", "[32,999999]", "within the file"},
        {"[32,64]", "[999990,999999]", "within the file"},
        {"[32,64]", "[64,32]", "[begin, end]"},
        {"[32,64]", "[32,64,96]", "[begin, end]"},
        {"[32,64]", "[32]", "[begin, end]"},
        {"[32,64]", "[-32,64]", "[begin, end]"},
        {"[32,64]", "[32,1e300]", "[begin, end]"},
        {"[32,64]", "[32,64.5]", "[begin, end]"},
        {"[32,64]", "[\"32\",64]", "[begin, end]"},
        {"[0,32]", "[0,28]", "from byte 28 on"},
    };
    write_heads(f, "{\"n_head\": 2}");
    Parts parts, changed;
    build_tensors(&parts, f, "", "F32", false);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *place = strstr(parts.json, cases[i].from);
        assert_non_null(place);
        changed = parts;
        changed.json_size = (size_t)sprintf(changed.json, "%.*s%s%s", (int)(place - parts.json), parts.json,
                                            cases[i].to, place + strlen(cases[i].from));
        write_tensors(f->tensors, &changed, changed.json_size);
        assert_refused_file(f->tensors, cases[i].text);
    }
}

static void safetensors_refuse_other_lengths(void **state) {
    Fixture *f = *state;
    write_heads(f, "{\"n_head\": 2}");
    Parts parts;
    build_tensors(&parts, f, "", "F32", false);
    const uint64_t lengths[] = {0, 1, 8 + parts.json_size + parts.data_size, UINT64_MAX, (uint64_t)1 << 63, 1 << 30};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        write_tensors(f->tensors, &parts, lengths[i]);
        assert_refused_file(f->tensors, "header of 2 to");
    }
    write_tensors(f->tensors, &parts, parts.json_size - 1);
    assert_refused_file(f->tensors, "JSON");
    parts.data_size--;
    write_tensors(f->tensors, &parts, parts.json_size);
    assert_refused_file(f->tensors, "within the file");
    parts.data_size += 2;
    write_tensors(f->tensors, &parts, parts.json_size);
    assert_refused_file(f->tensors, "bytes of data by its header");
    write_file(f->tensors, "plain", 5);
    assert_refused_file(f->tensors, "found only 5 bytes");
    write_file(f->tensors, "", 0);
    assert_refused_file(f->tensors, "found only 0 bytes");
    unlink(f->tensors);
    assert_refused_file(f->tensors, "cannot open");
}

/* Every half float there is, against its definition. */
static void half_floats_convert_exactly(void **state) {
    Fixture *f = *state;
    enum { COUNT = 65536 };
    static uint16_t halves[COUNT];
    static float found[COUNT];
    for (int i = 0; i < COUNT; i++)
        halves[i] = (uint16_t)i;
    write_file(f->model, halves, sizeof halves);
    InputFile input;
    assert_ok(input_open(&input, f->model));
    assert_ok(tensor_read(&input, TENSOR_F16, 1, COUNT, false, found));
    input_close(&input);
    for (int i = 0; i < COUNT; i++) {
        int exponent = i >> 10 & 31, mantissa = i & 1023;
        double size = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
        if (exponent == 31)
            size = mantissa ? (double)NAN : (double)INFINITY;
        if (isnan(size))
            assert_true(isnan(found[i]));
        else
            assert_true((double)found[i] == (i & 0x8000 ? -size : size) && !signbit(found[i]) == !(i & 0x8000));
    }
}

/* ---- damage at random ---- */

/* Must end in OK or one line that names the file, whatever was read; ASan watches. */
static void read_damaged(const char *path) {
    Gpt2Config config;
    Status status = checkpoint_read_config(path, &config);
    if (status == OK) {
        ParamTable table;
        gpt2_param_table(&config, false, &table);
        float *params = malloc((size_t)table.elems * sizeof(float));
        assert_non_null(params);
        status = checkpoint_read_params(path, &config, &table, params);
        free(params);
        param_table_free(&table);
    }
    assert_true(status == OK || status == BAD_INPUT);
    if (status == BAD_INPUT)
        assert_line_names(path);
}

static void damage_and_read(const char *path, const uint8_t *bytes, size_t size, size_t header_size, int rounds) {
    uint8_t *damaged = malloc(size);
    for (uint64_t round = 0; round < (uint64_t)rounds; round++) {
        memcpy(damaged, bytes, size);
        uint64_t draw = random_bits(7, round, 0);
        for (uint64_t i = 1; i <= 1 + draw % 3; i++) {
            uint64_t bits = random_bits(7, round, i), range = bits >> 60 < 14 ? header_size : size;
            uint8_t *byte = &damaged[(bits >> 8) % range];
            *byte = bits & 1 ? (uint8_t)(bits >> 40) : (uint8_t)(*byte ^ 1 << (bits >> 1 & 7));
        }
        size_t kept = draw >> 60 < 3 ? (size_t)(draw >> 8) % (size + 1) : size;
        write_file(path, damaged, kept);
        read_damaged(path);
    }
    free(damaged);
}

static void damaged_models_are_refused_or_read(void **state) {
    Fixture *f = *state;
    size_t size;
    uint8_t *bytes = build_model(f, 3, &size);
    damage_and_read(f->model, bytes, size, 32, 2000);
    free(bytes);
}

static void damaged_safetensors_are_refused_or_read(void **state) {
    Fixture *f = *state;
    Parts parts;
    write_heads(f, "{\"n_head\": 2}");
    build_tensors(&parts, f, "transformer.", "F16", true);
    write_tensors(f->tensors, &parts, parts.json_size);
    size_t size;
    uint8_t *bytes = read_file(f->tensors, &size);
    damage_and_read(f->tensors, bytes, size, 8 + parts.json_size, 3000);
    free(bytes);
}

#define MODEL_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
static const struct CMUnitTest tests[] = {
    MODEL_TEST(checkpoint_is_written_as_documented),
    MODEL_TEST(checkpoint_round_trip_is_exact),
    MODEL_TEST(checkpoint_reads_bf16),
    MODEL_TEST(checkpoint_zeroes_padded_rows),
    MODEL_TEST(checkpoint_rewrites_golden_models),
    MODEL_TEST(checkpoint_refuses_what_is_no_model),
    MODEL_TEST(checkpoint_refuses_headers_that_do_not_fit),
    MODEL_TEST(checkpoint_refuses_other_lengths),
    MODEL_TEST(checkpoint_write_names_what_it_cannot_write),
    MODEL_TEST(safetensors_are_read_in_every_style),
    MODEL_TEST(safetensors_refuse_a_head_of_its_own),
    MODEL_TEST(safetensors_take_heads_from_config_json),
    MODEL_TEST(safetensors_default_to_heads_of_64),
    MODEL_TEST(safetensors_refuse_broken_headers),
    MODEL_TEST(safetensors_refuse_other_lengths),
    MODEL_TEST(half_floats_convert_exactly),
    MODEL_TEST(damaged_models_are_refused_or_read),
    MODEL_TEST(damaged_safetensors_are_refused_or_read),
};

CHECK_MAIN(tests)
