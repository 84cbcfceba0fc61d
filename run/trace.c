#include "run/trace.h"

#include "base/clock.h"
#include "base/file.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct Event {
    char name[48];
    int row;
    double start_s, end_s; /* since zero_s */
} Event;

struct Trace {
    double zero_s;
    Event *events; /* owned */
    int64_t count, capacity;
};

Status trace_open(Trace **result, Comm *comm, int64_t capacity) {
    Trace *trace = calloc(1, sizeof *trace);
    *result = trace;
    if (trace)
        trace->events = calloc((size_t)capacity, sizeof *trace->events);
    bool complete = trace && trace->events;
    TRY(comm_agree(comm, complete ? OK : fault("no memory for a trace of %lld events", (long long)capacity)));
    trace->capacity = capacity;
    TRY(comm_barrier(comm));
    trace->zero_s = clock_s();
    return OK;
}

void trace_close(Trace *trace) {
    if (trace)
        free(trace->events);
    free(trace);
}

void trace_span(Trace *trace, int row, const char *name, int64_t number, double start_s, double end_s) {
    if (!trace || trace->count == trace->capacity)
        return;
    Event *event = &trace->events[trace->count++];
    *event = (Event){.row = row, .start_s = start_s - trace->zero_s, .end_s = end_s - trace->zero_s};
    if (number >= 0)
        snprintf(event->name, sizeof event->name, "%s %lld", name, (long long)number);
    else
        snprintf(event->name, sizeof event->name, "%s", name);
}

static void trace_phases(Trace *trace, const Phases *phases, int bucket) {
    for (int i = 0; i < PHASES_MAX; i++) {
        const Phase *phase = &phases->phase[i];
        char name[32];
        if (!phase->name)
            continue;
        snprintf(name, sizeof name, "%s, bucket", phase->name);
        trace_span(trace, TRACE_PHASES + i, name, bucket, phase->start_s, phase->end_s);
    }
}

void trace_sync(Trace *trace, const Sync *sync, const ParamTable *table, double start_s, double end_s) {
    double begin_s = sync_begin_s(sync), since_s = start_s;
    for (int g = 0; g < table->gradient_count; g++) {
        bool layer_done = g + 1 == table->gradient_count || table->gradients[g + 1].layer != table->gradients[g].layer;
        if (!layer_done)
            continue;
        int layer = table->gradients[g].layer;
        double ready_s = begin_s + 1e-3 * sync_ready_ms(sync, g);
        const char *part = layer >= 0 ? "backward layer" : g == 0 ? "backward head" : "backward embedding";
        trace_span(trace, TRACE_COMPUTE, part, layer, since_s, ready_s < end_s ? ready_s : end_s);
        since_s = ready_s;
    }
    for (int b = 0; b < sync_bucket_count(sync); b++) {
        BucketStats bucket = sync_bucket(sync, b);
        double ready_s = begin_s + 1e-3 * bucket.ready_ms;
        trace_span(trace, TRACE_COMM, "ready: bucket", b, ready_s, ready_s);
        trace_span(trace, TRACE_COMM, "bucket", b, begin_s + 1e-3 * bucket.start_ms, begin_s + 1e-3 * bucket.done_ms);
        trace_phases(trace, &bucket.phases, b);
    }
}

static void write_events(FILE *out, int rank, const Event *events, int64_t count) {
    static const char *const rows[] = {"compute", "comm", "first phase", "second phase", "third phase", "fourth phase"};
    static_assert(sizeof rows / sizeof *rows == TRACE_ROWS, "every row has a name");
    fprintf(out, "%s{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}",
            rank ? ",\n" : "", rank, rank);
    for (int row = 0; row < TRACE_ROWS; row++)
        fprintf(out, ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
                rank, row, rows[row]);
    for (int64_t i = 0; i < count; i++) {
        const Event *event = &events[i];
        if (!event->name[0])
            continue;
        bool span = event->end_s > event->start_s;
        fprintf(out, ",\n{\"ph\":\"%s\",\"name\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f", span ? "X" : "i",
                event->name, rank, event->row, 1e6 * event->start_s);
        if (span)
            fprintf(out, ",\"dur\":%.3f}", 1e6 * (event->end_s - event->start_s));
        else
            fprintf(out, ",\"s\":\"t\"}");
    }
}

static Status write_all(const char *path, const Event *events, int64_t count, int ranks) {
    AtomicFile file;
    TRY(atomic_open(&file, path));
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", file.stream);
    for (int rank = 0; rank < ranks; rank++)
        write_events(file.stream, rank, events + rank * count, count);
    fputs("\n]}\n", file.stream);
    return atomic_commit(&file);
}

Status trace_write(const Trace *trace, Comm *comm, const char *path) {
    double most = (double)trace->count;
    TRY(comm_reduce(comm, &most, 1, COMM_MAX));
    int64_t count = (int64_t)most; /* a rank's events beyond its own are empty */
    Event *all = calloc((size_t)(count * comm_ranks(comm)) + 1, sizeof *all);
    Status status = comm_agree(comm, all ? OK : fault("no memory for the trace"));
    if (status == OK)
        status = comm_gather(comm, trace->events, all, (size_t)count * sizeof *all);
    if (status == OK)
        status = comm_agree(comm, comm_rank(comm) == 0 ? write_all(path, all, count, comm_ranks(comm)) : OK);
    free(all);
    return status;
}
