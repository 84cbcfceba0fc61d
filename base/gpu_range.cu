extern "C" {
#include "base/gpu_range.h"
}

#include <cstdio>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

void gpu_range_begin(const char *name, int number) {
    char text[48];
    snprintf(text, sizeof text, "%s %d", name, number);
    nvtxRangePushA(number < 0 ? name : text);
}
void gpu_range_end(void) { nvtxRangePop(); }
#else
void gpu_range_begin(const char *name, int number) { (void)name, (void)number; }
void gpu_range_end(void) {}
#endif
