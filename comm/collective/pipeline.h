/* An all-reduce as a pipeline of segments through stages. reduce_scatter, hierarchical and leader are such pipelines.
 *
 * A stage is a group in which some members, the owners, have a part of the segment each:
 *     scatter   each member gives each owner its values of the owner's part
 *     sum       the owner adds them up in member order, in f32
 *     gather    each owner gives each member the sum of its part
 * A second stage stands between the first one's sum and gather: it does the same to the part that this rank owns there.
 *
 *   two stages: tick  0           1           2           3           4
 *     segment 0       scatter 0   sum 0       sum 1       gather 0
 *                                 scatter 1   gather 1
 *     segment 1                   scatter 0   sum 0       sum 1       gather 0
 *                                             scatter 1   gather 1                          ...
 *
 * So while a segment travels between nodes the next one is summed inside, and the one before is spread. All ranks go
 * through ticks and steps in the same order, so the messages of each pair are named in the same order at both ends.
 *
 * Where a stage's members share the memory of `data` its messages are replaced by work on the peers' arrays: the owner
 * reads its part there, and writes the sum there. Only two messages per pair remain, one that says "mine is there" and
 * one that says "yours is done". In the first stage the former carries the member's scale, which costs no pass then.
 *
 * The sum of an element depends on the stages' groups and orders alone: not on elems, segments or messages. */
#ifndef COMM_COLLECTIVE_PIPELINE_H
#define COMM_COLLECTIVE_PIPELINE_H

#include "comm/collective/collective.h"

enum { STAGES_MAX = 2 };

/* The shape, alike on all ranks. */
typedef struct Shape {
    int stages;              /* 0: nobody to reduce with */
    int members[STAGES_MAX]; /* the most that a stage's group has on any rank */
    int owners[STAGES_MAX];  /* the first so many members */
} Shape;

/* A stage as this rank sees it. */
typedef struct Stage {
    Group group; /* of its own; self < 0: this rank takes no part */
    int owners;
} Stage;

/* f32 values of scratch that pipeline_run needs: enough for messages everywhere. */
int64_t pipeline_scratch_elems(const Shape *shape, int64_t elems);

/* stages Stage[shape->stages]. */
Status pipeline_run(const Shape *shape, const Stage *stages, float *data, int64_t elems, float scale, float *scratch);

/* Segments that elems are cut into. */
int64_t pipeline_segments(const Shape *shape, int64_t elems);

#endif
