#include "run/sync_table.h"

#include "base/report.h"

enum { ROWS_MAX = 40 };

void sync_table_print(const Sync *sync) {
    static const ReportColumn columns[] = {
        {"bucket", "  bucket", "%s"},           {"mib", "MiB", "%.3f"},
        {"ready_ms", "ready (ms)", "%.1f"},     {"flight_ms", "in flight", "%.1f"},
        {"exposed_ms", "exposed", "%.1f"},      {"predicted_ms", "predicted", "%.1f"}};
    Report report = {.out = stdout, .columns = columns, .count = 6};
    int count = sync_bucket_count(sync);
    if (count > 0)
        printf("\n  gradient buckets, ms since backward began:\n");
    for (int b = 0; b < count; b++) {
        if (count > ROWS_MAX && b >= ROWS_MAX / 2 && b < count - ROWS_MAX / 2)
            continue;
        BucketStats mean = sync_bucket_mean(sync, b);
        char name[16] = "  lookup"; /* last: its rows are no part of the flat gradient */
        if (b == 0 || mean.offset > 0)
            snprintf(name, sizeof name, "  %d", b);
        report_row(&report, (ReportValue[]){{.text = name},
                                            {.number = (double)mean.elems * sizeof(float) / 1048576},
                                            {.number = mean.ready_ms},
                                            {.number = mean.done_ms - mean.start_ms},
                                            {.number = mean.exposed_ms},
                                            {.number = mean.predicted_ms}});
    }
    if (count > 0)
        putchar('\n');
}
