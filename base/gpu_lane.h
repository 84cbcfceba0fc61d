/* A lane: a stream of a GPU beside the computing one, in which what is done with a rank's gradients stands. Marks tie
 * the two together, so that nobody waits on the host:
 *
 *   computing   | layer 11 | mark 0 | layer 10 | mark 1 | ...
 *   lane                     follow 0 | bucket 0 ...  | follow 1 | bucket 1 ...            finish: the host waits
 *
 * Marks are numbers from 0 on, of which the last GPU_LANE_MARKS are kept apart: a later mark may stand for one that is
 * so much older, which only waits for more. They are set by the threads that compute, everything else is called by the
 * comm thread. */
#ifndef BASE_GPU_LANE_H
#define BASE_GPU_LANE_H

#include "base/gpu.h"

#include <stdbool.h>

enum { GPU_LANE_MARKS = 256 };

typedef struct GpuLane GpuLane;

Status gpu_lane_create(GpuLane **lane, Gpu *gpu);
void gpu_lane_destroy(GpuLane *lane); /* accepts NULL */

void *gpu_lane_stream(const GpuLane *lane); /* cudaStream_t */

/* What the computing stream holds now is `mark`. */
void gpu_lane_mark(GpuLane *lane, int mark);

/* What joins the lane from now on waits for the last gpu_lane_mark of that mark. */
void gpu_lane_follow(GpuLane *lane, int mark);

/* fn(user, argument) is called by a thread of the driver when all that is in the lane now is done. */
void gpu_lane_call(GpuLane *lane, GpuDoneFn *fn, void *user, int argument);

/* Whether the lane is empty. FAULT on the device's first fault. */
Status gpu_lane_test(GpuLane *lane, bool *empty);

#endif
