/* A sync under test: settings by their keys, and ranks that run steps on random gradients. Needs tests/check.h. */
#ifndef TESTS_SYNC_WORLD_H
#define TESTS_SYNC_WORLD_H

#include "base/config.h"
#include "base/random.h"
#include "tests/with_sync.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* [comm] and [loop] from "comm.key=value loop.key=value ..."; calibration is off. */
static inline void sync_settings(const char *text, CommConfig *comm, LoopConfig *loop) {
    const ConfigSection sections[] = {{"comm", comm_options, comm_option_count, comm},
                                      {"loop", loop_options, loop_option_count, loop}};
    Config *config = config_create(sections, 2);
    char copy[1024];
    snprintf(copy, sizeof copy, "comm.calibrate=no comm.timeout_s=30 %s", text);
    for (char *at = copy, *end; *at; at = end + (*end != 0)) {
        end = at + strcspn(at, " ");
        char word[1024];
        snprintf(word, sizeof word, "%.*s", (int)(end - at), at);
        if (word[0])
            assert_ok(config_assign(config, word));
        if (!*end)
            break;
    }
    config_destroy(config);
}

/* Like GPT-2's: matrices large enough to be compressed, 1-D groups, sizes that are multiples of nothing. */
static inline void sync_table_make(ParamTable *table) {
    *table = (ParamTable){0};
    param_add(table, "lnfw", -1, 1, 130);
    for (int layer = 2; layer >= 0; layer--) {
        param_add(table, "fcw", layer, 61, 130);
        param_add(table, "projw", layer, 97, 130);
        param_add(table, "fcb", layer, 1, 190);
    }
    param_add(table, "wpe", -1, 7, 130);
    param_add(table, "wte", -1, 211, 130);
}

static inline float sync_value(int rank, int step, int64_t i) {
    return (float)random_normal((uint64_t)rank + 1, (uint64_t)step, (uint64_t)i);
}

/* One step of random gradients, marked in an order of this rank's own; poison, if any, goes to one place of rank 0. */
static inline Status sync_random_step(Sync *sync, const ParamTable *table, float *grads, int rank, int number,
                                      float poison) {
    sync_forward_begin(sync, NULL, 0);
    TRY(sync_forward_end(sync));
    sync_begin(sync);
    for (int k = 0; k < table->gradient_count; k++) {
        int g = (k + rank + number) % table->gradient_count;
        const Gradient *gradient = &table->gradients[g];
        for (int64_t i = gradient->offset; i < gradient->offset + gradient->elems; i++)
            grads[i] = sync_value(rank, number, i);
        if (poison != 0 && rank == 0 && g == 1)
            grads[gradient->offset + gradient->elems / 2] = poison;
        sync_mark_ready(sync, g);
    }
    return sync_wait(sync);
}

#endif
