/* Tables of measurements: aligned text for people, or with `json` one JSON object per row for programs. */
#ifndef BASE_REPORT_H
#define BASE_REPORT_H

#include <stdbool.h>
#include <stdio.h>

typedef struct ReportColumn {
    const char *key;    /* JSON key, with its unit: "time_us" */
    const char *title;  /* column heading: "time (us)" */
    const char *format; /* printf format of one value: with %s for a const char *, else for a double, e.g. "%.1f".
                         * JSON shows every number in full. A NaN is "n/a", in JSON null. */
} ReportColumn;

typedef union ReportValue {
    double number;
    const char *text;
} ReportValue;

/* Text: the header line is printed with the first row; widths come from titles and formats (at least 8).
 * Each row is flushed at once. */
typedef struct Report {
    FILE *out;
    bool json;
    const ReportColumn *columns;
    int count;
    bool started;
} Report;

void report_row(Report *report, const ReportValue *values);

#endif
