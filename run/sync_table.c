#include "run/sync_table.h"

#include "base/report.h"

#include <math.h>

enum { ROWS_MAX = 40 };

static void print_prediction(const Sync *sync, bool sharded) {
    SyncPrediction predicted = sync_predict(sync);
    double exposed_ms = predicted.gather_exposed_ms + predicted.reduce_exposed_ms;
    if (!isfinite(exposed_ms))
        return;
    printf("  predicted: %.1f ms of computing, %.1f ms of exposed communication", predicted.compute_ms, exposed_ms);
    if (sharded)
        printf(", %.1f of them under forward", predicted.gather_exposed_ms);
    putchar('\n');
}

static void print_bucket(Report *report, const Sync *sync, int b) {
    BucketStats mean = sync_bucket_mean(sync, b);
    char name[16] = "  lookup"; /* last: its rows are no part of the flat gradient */
    if (b == 0 || mean.offset > 0)
        snprintf(name, sizeof name, "  %d", b);
    report_row(report, (ReportValue[]){{.text = name},
                                       {.number = (double)mean.elems * sizeof(float) / 1048576},
                                       {.number = mean.ready_ms},
                                       {.number = mean.done_ms - mean.start_ms},
                                       {.number = mean.exposed_ms},
                                       {.number = mean.predicted_ms},
                                       {.number = mean.needed_ms},
                                       {.number = mean.gather_ms},
                                       {.number = mean.gather_predicted_ms}});
}

void sync_table_print(const Sync *sync) {
    static const ReportColumn columns[] = {
        {"bucket", "  bucket", "%s"},           {"mib", "MiB", "%.3f"},
        {"ready_ms", "ready (ms)", "%.1f"},     {"flight_ms", "in flight", "%.1f"},
        {"exposed_ms", "exposed", "%.1f"},      {"predicted_ms", "predicted", "%.1f"},
        {"needed_ms", "needed (ms)", "%.1f"},   {"gather_ms", "gathered in", "%.1f"},
        {"gather_predicted_ms", "predicted", "%.1f"}};
    int count = sync_bucket_count(sync);
    if (count == 0)
        return;
    bool sharded = sync_shard(sync, 0);
    Report report = {.out = stdout, .columns = columns, .count = sharded ? 9 : 6};
    printf("\n  gradient buckets, ms since backward began%s:\n",
           sharded ? "; parameters, ms of forward's own since it began" : "");
    for (int b = 0; b < count; b++)
        if (count <= ROWS_MAX || b < ROWS_MAX / 2 || b >= count - ROWS_MAX / 2)
            print_bucket(&report, sync, b);
    print_prediction(sync, sharded);
    putchar('\n');
}
