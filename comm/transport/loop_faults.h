/* Faults that the loop transport injects, for tests. See loop_faults.c. */
#ifndef COMM_TRANSPORT_LOOP_FAULTS_H
#define COMM_TRANSPORT_LOOP_FAULTS_H

#include "base/error.h"

#include <stdbool.h>
#include <stdint.h>

enum { LOOP_FAULTS_MAX = 16 };

typedef struct LoopFault {
    enum { FAULT_DELAY, FAULT_DROP, FAULT_DIE, FAULT_NAN } kind;
    int64_t rank; /* -1: any */
    double ms;
    int64_t every, message, step;
} LoopFault;

typedef struct LoopFaults {
    LoopFault faults[LOOP_FAULTS_MAX];
    int count;
} LoopFaults;

/* The text is described in transport_loop.h. BAD_INPUT with a line that says where it is wrong. */
Status loop_faults_parse(LoopFaults *faults, const char *text);

/* What shall happen to a rank's message; 1 is its first. */
typedef struct LoopFate {
    double delay_s;
    bool drop, die;
} LoopFate;

LoopFate loop_faults_fate(const LoopFaults *faults, int rank, int64_t message);

/* A rank's gradient of that step, 1 is the first, shall hold a NaN. */
bool loop_faults_nan(const LoopFaults *faults, int rank, int64_t step);

#endif
