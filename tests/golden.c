/* build/golden DIR NAME: holds the model against reference tensors (docs/formats.md, "Reference tensors"):
 *
 *   DIR/NAME_model.bin   the parameters
 *   DIR/NAME_state.bin   inputs, targets, and for them logits, loss and every gradient
 *   DIR/NAME_train.txt   step, loss and gradient norm of ten AdamW steps on that same batch
 *
 * Logits and gradients must lie within 2e-5 + 1e-4 |reference|, losses and norms within 1e-5 relative. A row per
 * tensor; exit 1 when any is out of bounds, NaN included, 2 when the files are not what they should be.
 *
 * --device computes elsewhere than on the cpu. With bf16 activations and weights are off by up to e = 2^-8 of
 * themselves, with tf32 in products by up to e = 2^-11; by e / sqrt 3 in the mean. On the longest way through the
 * network and back 16 such values lie in each layer and direction (10 activations, 4 matrices, 2 gains), and their
 * errors add up as squares do. So a tensor as a whole, |error| over |reference|, must lie within e sqrt(32 L / 3), and
 * so must norms, and losses in units of the largest logit. */
#include "base/config.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/report.h"
#include "model/checkpoint.h"
#include "model/gpt2.h"
#include "optim/adamw.h"
#include "tests/model_device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_WORDS = 256, MAGIC = 20240327, VERSION = 2, STEPS = 10 };

static const double bound_absolute = 2e-5, bound_relative = 1e-4, bound_loss = 1e-5;

typedef struct Golden {
    Gpt2Config config;
    ParamTable table;
    float *params, *grads; /* on the host */
    ModelDevice device;
    Ops ops; /* the device's, but for the head in its smallest chunks: one set has more than 64 positions */
    Gpt2 *model;
    AdamW adamw;

    FileMap state; /* the slices below lie in it */
    int B, T;
    const int *inputs, *targets;
    const float *logits, *loss, *gradients;

    char train_path[512];
    bool split;  /* the tied embedding in two gradients */
    float *rows; /* f32[V][C], the lookup's, on the host; NULL without split */
    int *slot_of_token;
    Report report;
    double of_norm;       /* bound of a whole tensor's error; 0: each element has its own */
    double largest_logit; /* of the reference */
    bool failed;
} Golden;

static const ReportColumn columns[] = {
    {"name", "tensor", "%s"},
    {"elems", "elements", "%.0f"},
    {"max_abs_error", "max error", "%.2e"},
    {"max_of_bound", "of bound", "%.4f"}, /* largest error over its own bound: at most 1 */
    {"result", "result", "%s"},
};

static Status read_header(Golden *golden, const char *path) {
    if (golden->state.size < HEADER_WORDS * sizeof(int32_t))
        return bad_input("%s: expected a header of %zu bytes, found %zu", path, HEADER_WORDS * sizeof(int32_t),
                         golden->state.size);
    int32_t header[HEADER_WORDS];
    memcpy(header, golden->state.bytes, sizeof header);
    if (header[0] != MAGIC || header[1] != VERSION)
        return bad_input("%s: expected magic %d version %d, found %d and %d", path, MAGIC, VERSION, header[0],
                         header[1]);
    golden->B = header[2];
    golden->T = header[3];
    if (golden->B < 1 || golden->T < 1 || golden->B > 65536 || golden->T > golden->config.context)
        return bad_input("%s: B %d, T %d: expected T in [1, %d]", path, golden->B, golden->T, golden->config.context);
    return OK;
}

static Status check_tokens(const Golden *golden, const char *path) {
    for (int i = 0; i < 2 * golden->B * golden->T; i++)
        if (golden->inputs[i] < 0 || golden->inputs[i] >= golden->config.vocab)
            return bad_input("%s: token %d: expected one in [0, %d), found %d", path, i, golden->config.vocab,
                             golden->inputs[i]);
    return OK;
}

/* Words of four bytes throughout: x, y, logits, loss, gradients. */
static Status read_state(Golden *golden, const char *path) {
    TRY(file_map(&golden->state, path));
    TRY(read_header(golden, path));
    size_t rows = (size_t)golden->B * (size_t)golden->T, logits = rows * (size_t)golden->config.vocab;
    size_t bytes = 4 * (HEADER_WORDS + 2 * rows + logits + 1 + (size_t)golden->table.elems);
    if (golden->state.size != bytes)
        return bad_input("%s: expected %zu bytes for B %d, T %d and this model, found %zu", path, bytes, golden->B,
                         golden->T, golden->state.size);
    golden->inputs = (const int *)(const void *)golden->state.bytes + HEADER_WORDS;
    golden->targets = golden->inputs + rows;
    golden->logits = (const float *)(const void *)(golden->targets + rows);
    golden->loss = golden->logits + logits;
    golden->gradients = golden->loss + 1;
    return check_tokens(golden, path);
}

/* The lookup's gradient of token t goes to row V - 1 - t. */
static Status split_embedding(Golden *golden) {
    int V = golden->config.vocab;
    golden->rows = calloc((size_t)V * (size_t)golden->config.channels, sizeof *golden->rows);
    golden->slot_of_token = calloc((size_t)V, sizeof *golden->slot_of_token);
    if (!golden->rows || !golden->slot_of_token)
        return fault("no memory for the lookup's gradient");
    for (int token = 0; token < V; token++)
        golden->slot_of_token[token] = V - 1 - token;
    float *rows = model_device_rows(&golden->device, golden->rows, (size_t)V * (size_t)golden->config.channels);
    gpt2_set_lookup(golden->model, rows, V, golden->slot_of_token);
    return rows ? OK : fault("no memory on the device for the lookup's gradient");
}

/* Loss and gradients. */
static double backward(Golden *golden) {
    double loss = gpt2_backward(golden->model, golden->targets, 1, false, NULL, NULL);
    model_device_fetch(&golden->device);
    float *wte = golden->grads + param_find(&golden->table, "wte", -1)->offset;
    int V = golden->config.vocab, C = golden->config.channels;
    for (int token = 0; golden->split && token < V; token++)
        for (int c = 0; c < C; c++)
            wte[token * C + c] += golden->rows[golden->slot_of_token[token] * C + c];
    return loss;
}

static Status load(Golden *golden, const char *folder, const char *name, int device) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s_model.bin", folder, name);
    TRY(checkpoint_read_config(path, &golden->config));
    gpt2_param_table(&golden->config, golden->split, &golden->table);
    golden->params = memory_alloc(&host_memory, (size_t)golden->table.elems * sizeof(float));
    golden->grads = memory_alloc(&host_memory, (size_t)golden->table.elems * sizeof(float));
    if (!golden->params || !golden->grads)
        return fault("no memory for %lld parameters", (long long)golden->table.elems);
    TRY(checkpoint_read_params(path, &golden->config, &golden->table, golden->params));
    snprintf(path, sizeof path, "%s/%s_state.bin", folder, name);
    TRY(read_state(golden, path));
    snprintf(golden->train_path, sizeof golden->train_path, "%s/%s_train.txt", folder, name);
    TRY(model_device_open(&golden->device, device, golden->params, golden->grads, golden->table.elems));
    const Gpt2Config *m = &golden->config;
    fprintf(stderr, "golden: attention: %s\n",
            model_device_attention(&golden->device, golden->B, golden->T, m->channels, m->heads));
    golden->of_norm = golden->device.error * sqrt(32.0 * golden->config.layers / 3);
    Gpt2Options options = {.max_B = golden->B, .max_T = golden->T, .train = true};
    golden->ops = *golden->device.ops;
    golden->ops.head_logits = 1;
    TRY(gpt2_create(&golden->model, &golden->config, &golden->table, golden->device.params, golden->device.grads,
                    &options, &golden->ops, golden->device.memory));
    if (golden->split)
        TRY(split_embedding(golden));
    return adamw_create(&golden->adamw, &golden->table, NULL, &host_memory, &optim_cpu);
}

static void show(Golden *golden, const char *name, int64_t elems, double error, double of_bound) {
    bool good = of_bound <= 1; /* false for NaN */
    golden->failed = golden->failed || !good;
    const ReportValue row[] = {{.text = name},
                               {.number = (double)elems},
                               {.number = error},
                               {.number = of_bound},
                               {.text = good ? "ok" : "MISS"}};
    report_row(&golden->report, row);
}

/* The largest of two errors; NaN is larger than all. */
static double worse(double a, double b) { return isnan(a) || a > b ? a : b; }

/* `size` is what errors in bf16 are relative to. */
static void compare_one(Golden *golden, const char *name, double actual, double expected, double size) {
    double error = fabs(actual - expected);
    double bound = golden->of_norm > 0 ? golden->of_norm * size : bound_loss * fabs(expected);
    show(golden, name, 1, error, error / bound);
}

static void compare_loss(Golden *golden, const char *name, double actual, double expected) {
    compare_one(golden, name, actual, expected, golden->largest_logit);
}

static void compare_norm(Golden *golden, const char *name, double actual, double expected) {
    compare_one(golden, name, actual, expected, expected);
}

/* Of the elements so far. */
typedef struct Errors {
    double largest, of_bound;       /* of an element, and over that element's bound */
    double square, expected_square; /* sums */
    int64_t elems;
} Errors;

static void compare(Errors *errors, const float *actual, const float *expected, int64_t elems) {
    for (int64_t i = 0; i < elems; i++) {
        double size = fabs((double)expected[i]), off = fabs((double)actual[i] - (double)expected[i]);
        errors->largest = worse(off, errors->largest);
        errors->of_bound = worse(off / (bound_absolute + bound_relative * size), errors->of_bound);
        errors->square += off * off;
        errors->expected_square += size * size;
    }
    errors->elems += elems;
}

static void show_errors(Golden *golden, const char *name, const Errors *errors) {
    double of_norm = sqrt(errors->square / errors->expected_square) / golden->of_norm;
    show(golden, name, errors->elems, errors->largest, golden->of_norm > 0 ? of_norm : errors->of_bound);
}

static Status compare_logits(Golden *golden) {
    int rows = golden->B * golden->T;
    int64_t elems = (int64_t)rows * golden->config.vocab;
    float *logits = malloc((size_t)elems * sizeof *logits);
    if (!logits)
        return fault("no memory for %lld logits", (long long)elems);
    gpt2_logits(golden->model, 0, rows, logits);
    Errors errors = {0};
    compare(&errors, logits, golden->logits, elems);
    show_errors(golden, "logits", &errors);
    for (int64_t i = 0; i < elems; i++)
        golden->largest_logit = fmax(golden->largest_logit, fabs((double)golden->logits[i]));
    free(logits);
    return OK;
}

/* The file has the kinds in this order, each with all its layers. */
static void compare_gradients(Golden *golden) {
    static const char *const outside[] = {"wte", "wpe", "lnfw", "lnfb"};
    static const char *const inside[] = {"ln1w", "ln1b", "qkvw", "qkvb", "attprojw", "attprojb",
                                         "ln2w", "ln2b", "fcw",  "fcb",  "fcprojw",  "fcprojb"};
    const float *expected = golden->gradients;
    for (int kind = 0; kind < 16; kind++) {
        bool layered = kind >= 2 && kind < 14;
        const char *name = layered ? inside[kind - 2] : outside[kind < 2 ? kind : kind - 12];
        Errors errors = {0};
        for (int layer = layered ? 0 : -1; layer < (layered ? golden->config.layers : 0); layer++) {
            const Param *param = param_find(&golden->table, name, layer);
            compare(&errors, golden->grads + param->offset, expected, param->elems);
            expected += param->elems;
        }
        char label[32];
        snprintf(label, sizeof label, "d %s", name);
        show_errors(golden, label, &errors);
    }
}

static Status read_steps(const char *path, double losses[STEPS], double norms[STEPS]) {
    FILE *in = fopen(path, "r");
    if (!in)
        return bad_input("%s: cannot be opened", path);
    int count = 0, step, fields;
    double loss, norm;
    for (; (fields = fscanf(in, "%d %lf %lf", &step, &loss, &norm)) == 3; count++)
        if (count < STEPS)
            losses[count] = loss, norms[count] = norm;
    fclose(in);
    if (fields != EOF)
        return bad_input("%s: expected lines of 'step loss norm', found something else after line %d", path, count);
    return count == STEPS ? OK : bad_input("%s: expected %d lines, found %d", path, STEPS, count);
}

static Status compare_training(Golden *golden) {
    double losses[STEPS], norms[STEPS];
    TRY(read_steps(golden->train_path, losses, norms));
    const OptimConfig optim = {.lr = 1e-3,
                               .schedule = SCHEDULE_CONSTANT,
                               .beta1 = 0.9,
                               .beta2 = 0.95,
                               .eps = 1e-8,
                               .weight_decay = 0.1,
                               .grad_clip = 1.0};
    for (int step = 0; step < STEPS; step++) {
        gpt2_forward(golden->model, golden->inputs, golden->B, golden->T);
        double loss = backward(golden);
        double norm = grad_norm(&golden->table, golden->grads);
        char label[48];
        snprintf(label, sizeof label, "step %d loss", step + 1);
        compare_loss(golden, label, loss, losses[step]);
        snprintf(label, sizeof label, "step %d norm", step + 1);
        compare_norm(golden, label, norm, norms[step]);
        if (!isfinite(norm))
            return OK; /* reported as a miss; there is no step to take */
        adamw_update(&golden->adamw, &optim, optim.lr, clip_scale(norm, optim.grad_clip), golden->params,
                     golden->grads);
        model_device_give(&golden->device);
    }
    return OK;
}

static Status run(Golden *golden, const char *folder, const char *name, int device) {
    TRY(load(golden, folder, name, device));
    gpt2_forward(golden->model, golden->inputs, golden->B, golden->T);
    TRY(compare_logits(golden));
    compare_loss(golden, "loss, forward", gpt2_loss(golden->model, golden->targets), (double)*golden->loss);
    compare_loss(golden, "loss", backward(golden), (double)*golden->loss);
    compare_gradients(golden);
    return compare_training(golden);
}

static void unload(Golden *golden) {
    adamw_destroy(&golden->adamw);
    gpt2_destroy(golden->model);
    model_device_close(&golden->device);
    memory_free(&host_memory, golden->grads);
    memory_free(&host_memory, golden->params);
    free(golden->slot_of_token);
    free(golden->rows);
    param_table_free(&golden->table);
    file_unmap(&golden->state);
}

typedef struct Arguments {
    bool json, split;
    int device;
} Arguments;

int main(int argc, char **argv) {
    static const Option options[] = {
        {.key = "json", .type = OPTION_BOOL, .offset = offsetof(Arguments, json), .initial = "no",
         .help = "one JSON object per row"},
        {.key = "split", .type = OPTION_BOOL, .offset = offsetof(Arguments, split), .initial = "no",
         .help = "the tied embedding in two gradients, which are then added"},
        {.key = "device", .type = OPTION_CHOICE, .offset = offsetof(Arguments, device), .initial = "cpu",
         .choices = MODEL_DEVICES, .help = "where the model is computed"},
    };
    Arguments arguments = {0};
    const char *names[2];
    int count = 0;
    Status status = args_parse("golden [options] DIR NAME\n"
                               "Checks the model against DIR/NAME_model.bin, _state.bin, _train.txt.",
                               options, 3, &arguments, argc, argv, names, 2, &count);
    if (status == OK && count != 2)
        status = bad_input("expected a folder and a name, found %d arguments", count);
    if (status != OK)
        return error_exit_code("golden", status);
    Golden golden = {.split = arguments.split,
                     .report = {.out = stdout, .json = arguments.json, .columns = columns, .count = 5}};
    status = run(&golden, names[0], names[1], arguments.device);
    unload(&golden);
    int code = error_exit_code("golden", status);
    return golden.failed ? 1 : code;
}
