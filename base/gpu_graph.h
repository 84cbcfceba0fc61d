/* Stretches of a GPU's work that come again and again, each launched whole: CUDA graphs. The host then asks once for
 * what would be dozens of kernels.
 *
 *   first time    the work is done as it is asked for: what is planned or loaded at first use, is so now
 *   second        it is recorded, made into a graph, and that is launched
 *   from then on  the graph is launched, nothing is asked for
 *
 * A graph holds what it was recorded with, to the pointer: whatever may differ must be in the key. While a stretch is
 * recorded nothing is done of it, so it may not wait, allocate, or move anything to or from the host. For the rank's
 * thread. A failure is noted in the Gpu, as any other. */
#ifndef BASE_GPU_GRAPH_H
#define BASE_GPU_GRAPH_H

#include "base/gpu.h"

#include <stdbool.h>

enum { GPU_GRAPH_NUMBERS = 6 };

/* Whose stretch, and which. Compared as bytes; it has no padding. */
typedef struct GpuGraphKey {
    const void *owner;
    int numbers[GPU_GRAPH_NUMBERS];
} GpuGraphKey;

typedef struct GpuGraphs GpuGraphs;

Status gpu_graphs_create(GpuGraphs **graphs, Gpu *gpu);
void gpu_graphs_destroy(GpuGraphs *graphs); /* accepts NULL */

/* Forgets all of them, since an owner is another one now. */
void gpu_graphs_clear(GpuGraphs *graphs);

/* false: the stretch is in the computing stream. true: it must be asked for, and gpu_graphs_end then. */
bool gpu_graphs_begin(GpuGraphs *graphs, const GpuGraphKey *key);
void gpu_graphs_end(GpuGraphs *graphs);

#endif
