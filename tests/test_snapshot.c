/* Checkpoints of a run: what is saved comes back, in whatever layout of the flat arrays, and with no other model. */
#define _POSIX_C_SOURCE 200809L
#include "run/snapshot.h"

#include "base/random.h"
#include "model/checkpoint.h"
#include "tests/check.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const Gpt2Config small = {
    .layers = 11, .heads = 2, .channels = 6, .context = 5, .vocab = 61, .vocab_padded = 128};

typedef struct Run {
    ParamTable table;
    Snapshot snapshot;
} Run;

typedef struct Fixture {
    char folder[64];
    Run saved; /* as saved, in the plain layout */
} Fixture;

static void create_run(Run *run, const Gpt2Config *config, bool split) {
    gpt2_param_table(config, split, &run->table);
    float *arrays = calloc((size_t)run->table.elems * 3, sizeof *arrays);
    assert_non_null(arrays);
    run->snapshot = (Snapshot){.config = config, .table = &run->table, .params = arrays, .seq_len = 5,
                               .m = arrays + run->table.elems, .v = arrays + 2 * run->table.elems};
}

static void destroy_run(Run *run) {
    free(run->snapshot.params);
    param_table_free(&run->table);
}

static int setup(void **state) {
    Fixture *f = calloc(1, sizeof *f);
    snprintf(f->folder, sizeof f->folder, "/tmp/tandem_test_XXXXXX");
    if (!mkdtemp(f->folder))
        return 1;
    create_run(&f->saved, &small, false);
    Snapshot *s = &f->saved.snapshot;
    gpt2_init_random(&small, &f->saved.table, 1, s->params);
    for (int64_t i = 0; i < 2 * f->saved.table.elems; i++)
        s->m[i] = (float)random_normal(2, 0, (uint64_t)i); /* v too, which lies behind it */
    s->step = 12, s->adamw_step = 11, s->skipped = 1, s->position = 345;
    assert_ok(snapshot_save(s, f->folder, 3));
    *state = f;
    return 0;
}

static void remove_file(const char *folder, const char *name) {
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    unlink(path);
}

static int teardown(void **state) {
    Fixture *f = *state;
    for (int step = 12; step <= 14; step++) {
        char name[32];
        snprintf(name, sizeof name, "model_%08d.bin", step);
        remove_file(f->folder, name);
        snprintf(name, sizeof name, "state_%08d.bin", step);
        remove_file(f->folder, name);
    }
    int left = rmdir(f->folder);
    destroy_run(&f->saved);
    free(f);
    return left;
}

static void assert_same_run(const Run *a, const Run *b) {
    const Snapshot *x = &a->snapshot, *y = &b->snapshot;
    assert_int_equal(x->step, y->step);
    assert_int_equal(x->adamw_step, y->adamw_step);
    assert_int_equal(x->skipped, y->skipped);
    assert_int_equal(x->position, y->position);
    assert_int_equal(a->table.param_count, b->table.param_count);
    for (int i = 0; i < a->table.param_count; i++) {
        const Param *p = &a->table.params[i], *q = param_find(&b->table, p->name, p->layer);
        size_t bytes = (size_t)p->elems * sizeof(float);
        assert_memory_equal(x->params + p->offset, y->params + q->offset, bytes);
        assert_memory_equal(x->m + p->offset, y->m + q->offset, bytes);
        assert_memory_equal(x->v + p->offset, y->v + q->offset, bytes);
    }
}

/* To the other layout and back: a run can be resumed with the tied embedding's gradients apart or together. */
static void snapshot_comes_back_in_any_layout(void **state) {
    Fixture *f = *state;
    Run split, plain;
    create_run(&split, &small, true);
    assert_ok(snapshot_load(&split.snapshot, f->folder, 12));
    assert_same_run(&split, &f->saved);
    split.snapshot.step = 13;
    assert_ok(snapshot_save(&split.snapshot, f->folder, 3));
    assert_int_equal(snapshot_newest(f->folder), 13);
    create_run(&plain, &small, false);
    assert_ok(snapshot_load(&plain.snapshot, f->folder, 13));
    assert_same_run(&plain, &split);
    destroy_run(&plain);
    destroy_run(&split);
}

static void snapshot_keeps_the_newest(void **state) {
    Fixture *f = *state;
    Run found;
    for (f->saved.snapshot.step = 13; f->saved.snapshot.step < 15; f->saved.snapshot.step++)
        assert_ok(snapshot_save(&f->saved.snapshot, f->folder, 2));
    create_run(&found, &small, false);
    assert_refused(snapshot_load(&found.snapshot, f->folder, 12), "model_00000012.bin");
    assert_ok(snapshot_load(&found.snapshot, f->folder, 13));
    assert_ok(snapshot_load(&found.snapshot, f->folder, 14));
    assert_int_equal(snapshot_newest(f->folder), 14);
    destroy_run(&found);
}

static void snapshot_refuses_another_model(void **state) {
    Fixture *f = *state;
    Run other, found;
    Gpt2Config config = small;
    config.layers = 10;
    create_run(&other, &config, false);
    assert_refused(snapshot_load(&other.snapshot, f->folder, 12), "expected the run's model, L10");
    destroy_run(&other);

    create_run(&found, &small, true);
    found.snapshot.seq_len = 4;
    assert_refused(snapshot_load(&found.snapshot, f->folder, 12), "expected train.seq_len = 5");
    found.snapshot.seq_len = 5;
    f->saved.snapshot.params[3 * small.channels] += 1;
    char path[128];
    snprintf(path, sizeof path, "%s/model_00000012.bin", f->folder);
    assert_ok(checkpoint_write(path, &small, &f->saved.table, f->saved.snapshot.params));
    assert_refused(snapshot_load(&found.snapshot, f->folder, 12), "expected the state of the model file beside it");
    destroy_run(&found);
}

#define SNAPSHOT_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
static const struct CMUnitTest tests[] = {
    SNAPSHOT_TEST(snapshot_comes_back_in_any_layout),
    SNAPSHOT_TEST(snapshot_keeps_the_newest),
    SNAPSHOT_TEST(snapshot_refuses_another_model),
};

CHECK_MAIN(tests)
