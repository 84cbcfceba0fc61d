/* A table hashed by key; one that has filled up, as it can when batches of many shapes are taken, starts over. A key
 * that comes once makes no graph.
 *
 * A capture ends badly when anybody touches the stream from outside, be it only to ask whether it is idle. The comm
 * thread reads stamps and does so: the stamps are held meanwhile. Whatever else it does concerns other streams, and in
 * thread-local mode disturbs nobody. */
#include "base/cuda.cuh"

extern "C" {
#include "base/gpu_graph.h"
#include "base/gpu_stamps.h"
}

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GRAPHS = 1024 /* a power of two; at most 3/4 are used */ };

static_assert(sizeof(GpuGraphKey) == sizeof(void *) + GPU_GRAPH_NUMBERS * sizeof(int), "padding is compared");

typedef struct Graph {
    GpuGraphKey key;
    bool seen;
    cudaGraphExec_t exec; /* NULL: not recorded yet */
} Graph;

struct GpuGraphs {
    Gpu *gpu;
    cudaStream_t stream;
    Graph graphs[GRAPHS];
    int count;
    Graph *recording; /* NULL: none */
};

/* Notes a failure, with what there is to do. */
#define CHECK_GRAPH(graphs, call, arguments)                                                                  \
    do {                                                                                                      \
        cudaError_t error_ = call arguments;                                                                  \
        if (error_ != cudaSuccess)                                                                            \
            gpu_fault((graphs)->gpu, "CUDA graphs, which run.cuda_graphs=no does without: " #call,            \
                      cudaGetErrorString(error_));                                                            \
    } while (0)

Status gpu_graphs_create(GpuGraphs **result, Gpu *gpu) {
    GpuGraphs *graphs = *result = (GpuGraphs *)calloc(1, sizeof *graphs);
    if (!graphs)
        return fault("no memory for a table of CUDA graphs");
    graphs->gpu = gpu;
    graphs->stream = (cudaStream_t)gpu_stream(gpu);
    return OK;
}

/* Those under way come to their end first, without us. */
void gpu_graphs_clear(GpuGraphs *graphs) {
    for (int i = 0; i < GRAPHS; i++)
        if (graphs->graphs[i].exec)
            cudaGraphExecDestroy(graphs->graphs[i].exec);
    memset((void *)graphs->graphs, 0, sizeof graphs->graphs);
    graphs->count = 0;
}

void gpu_graphs_destroy(GpuGraphs *graphs) {
    if (graphs)
        gpu_graphs_clear(graphs);
    free(graphs);
}

/* FNV-1a. */
static uint64_t hash_of(const GpuGraphKey *key) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ ((const unsigned char *)key)[i]) * 0x100000001b3u;
    return hash;
}

static Graph *find(GpuGraphs *graphs, const GpuGraphKey *key) {
    if (graphs->count >= GRAPHS / 4 * 3)
        gpu_graphs_clear(graphs);
    uint64_t slot = hash_of(key) % GRAPHS;
    while (graphs->graphs[slot].seen && memcmp(&graphs->graphs[slot].key, key, sizeof *key) != 0)
        slot = (slot + 1) % GRAPHS;
    return &graphs->graphs[slot];
}

static void record(GpuGraphs *graphs, Graph *graph) {
    gpu_stamps_hold(gpu_stamps(graphs->gpu));
    graphs->recording = graph;
    CHECK_GRAPH(graphs, cudaStreamBeginCapture, (graphs->stream, cudaStreamCaptureModeThreadLocal));
}

bool gpu_graphs_begin(GpuGraphs *graphs, const GpuGraphKey *key) {
    Graph *graph = find(graphs, key);
    if (graph->exec) {
        CHECK_GRAPH(graphs, cudaGraphLaunch, (graph->exec, graphs->stream));
        return false;
    }
    if (graph->seen) {
        record(graphs, graph);
    } else {
        graph->key = *key;
        graph->seen = true;
        graphs->count++;
    }
    return true;
}

void gpu_graphs_end(GpuGraphs *graphs) {
    Graph *graph = graphs->recording;
    if (!graph)
        return;
    graphs->recording = NULL;
    cudaGraph_t recorded = NULL;
    CHECK_GRAPH(graphs, cudaStreamEndCapture, (graphs->stream, &recorded));
    gpu_stamps_release(gpu_stamps(graphs->gpu));
    if (!recorded)
        return;
    CHECK_GRAPH(graphs, cudaGraphInstantiate, (&graph->exec, recorded, 0));
    cudaGraphDestroy(recorded);
    if (graph->exec)
        CHECK_GRAPH(graphs, cudaGraphLaunch, (graph->exec, graphs->stream));
}
