#include "comm/compress/compressor.h"

#include <string.h>

const Compressor *compressor_find(const char *name) {
    static const Compressor *const all[] = {&compressor_none, &compressor_bf16, &compressor_int8, &compressor_int4,
                                            &compressor_topk, &compressor_int8_tensor};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(all[i]->name, name) == 0)
            return all[i];
    return NULL;
}
