/* What a sample of the flat gradient takes, alike on CPU and GPU: one stretch of values in SAMPLE_EVERY. */
#ifndef COMM_COMPRESS_SAMPLE_H
#define COMM_COMPRESS_SAMPLE_H

#include "base/random.h"

#include <stdbool.h>

enum { SAMPLE_EVERY = 16 };

static HOST_DEVICE inline bool sample_takes(int64_t stretch) { return random_mix((uint64_t)stretch) % SAMPLE_EVERY == 0; }

#endif
