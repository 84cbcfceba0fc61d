#include "base/report.h"

#include <math.h>
#include <string.h>

static bool is_text(const ReportColumn *column) { return strchr(column->format, 's') != NULL; }

static void format_value(const ReportColumn *column, ReportValue value, char *text, size_t size) {
    if (is_text(column))
        snprintf(text, size, "%s", value.text);
    else if (isnan(value.number))
        snprintf(text, size, "n/a");
    else {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(text, size, column->format, value.number);
#pragma GCC diagnostic pop
    }
}

/* Wide enough for the title and for the largest value in sight, which the format's own width tells ("%12.1f"). */
static int column_width(const ReportColumn *column) {
    char sample[64];
    ReportValue zero = is_text(column) ? (ReportValue){.text = ""} : (ReportValue){.number = 0};
    format_value(column, zero, sample, sizeof sample);
    int width = is_text(column) ? 14 : 8;
    int title = (int)strlen(column->title), value = (int)strlen(sample);
    width = title > width ? title : width;
    return value > width ? value : width;
}

static void print_cell(Report *report, int i, const char *text) {
    int width = column_width(&report->columns[i]);
    fprintf(report->out, "%s%*s", i ? "  " : "", is_text(&report->columns[i]) ? -width : width, text);
}

static void json_string(FILE *out, const char *text) {
    putc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\')
            putc('\\', out);
        if ((unsigned char)*text < 0x20)
            fprintf(out, "\\u%04x", *text);
        else
            putc(*text, out);
    }
    putc('"', out);
}

static void json_row(Report *report, const ReportValue *values) {
    for (int i = 0; i < report->count; i++) {
        const ReportColumn *column = &report->columns[i];
        fprintf(report->out, "%s\"%s\": ", i ? ", " : "{", column->key);
        if (is_text(column))
            json_string(report->out, values[i].text);
        else if (isfinite(values[i].number))
            fprintf(report->out, "%.10g", values[i].number);
        else
            fputs("null", report->out);
    }
    fputs("}\n", report->out);
}

void report_row(Report *report, const ReportValue *values) {
    if (report->json) {
        json_row(report, values);
    } else {
        for (int i = 0; i < report->count && !report->started; i++)
            print_cell(report, i, report->columns[i].title);
        if (!report->started)
            putc('\n', report->out);
        for (int i = 0; i < report->count; i++) {
            char text[256];
            format_value(&report->columns[i], values[i], text, sizeof text);
            print_cell(report, i, text);
        }
        putc('\n', report->out);
    }
    report->started = true;
    fflush(report->out);
}
