#include "base/param.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const Param *param_find(const ParamTable *table, const char *name, int layer) {
    for (int i = 0; i < table->param_count; i++)
        if (table->params[i].layer == layer && strcmp(table->params[i].name, name) == 0)
            return &table->params[i];
    return NULL;
}

int64_t shard_elems(const Shard *shard) {
    int64_t elems = 0;
    for (int i = 0; i < shard->count; i++)
        elems += shard->slices[i].elems;
    return elems;
}

int param_gradient(const ParamTable *table, const Param *param) {
    int gradient = 0;
    while (table->gradients[gradient].offset + table->gradients[gradient].elems <= param->offset)
        gradient++;
    return gradient;
}

/* Grows an owned array by one zeroed element and returns the element. */
static void *grow(void *array, int *count, size_t size) {
    char **base = array;
    *base = realloc(*base, ((size_t)*count + 1) * size);
    assert(*base);
    return memset(*base + (size_t)(*count)++ * size, 0, size);
}

void param_add(ParamTable *table, const char *name, int layer, int64_t rows, int64_t cols) {
    Param *param = grow(&table->params, &table->param_count, sizeof(Param));
    snprintf(param->name, sizeof param->name, "%s", name);
    param->layer = layer;
    param->rows = rows;
    param->cols = cols;
    param->offset = table->elems;
    param->elems = rows * cols;
    param->decay = rows > 1;
    table->elems += param->elems;

    bool dense = rows == 1;
    Gradient *last = table->gradient_count ? &table->gradients[table->gradient_count - 1] : NULL;
    if (dense && last && last->dense && last->layer == layer) {
        last->elems += param->elems;
        return;
    }
    Gradient *gradient = grow(&table->gradients, &table->gradient_count, sizeof(Gradient));
    *gradient = (Gradient){.offset = param->offset, .elems = param->elems, .layer = layer, .dense = dense};
}

void param_table_free(ParamTable *table) {
    free(table->params);
    free(table->gradients);
    *table = (ParamTable){0};
}
