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
 * With a codec, the messages of a coded stage carry its wire form. Each value is then quantised once per coded stage
 * on its way to the owner, the owner's own value too, and once more when it is summed up in the last stage; that last
 * wire form is what everybody decodes, the owner included, and what an earlier coded stage passes on as it is.
 *
 *     g -> C(g + e) -> sum of decoded -> C(sum + e) -> decoded: the result, the same bits everywhere
 *
 * The sum of an element depends on the stages' groups and orders alone: not on elems, segments or messages. */
#ifndef COMM_COLLECTIVE_PIPELINE_H
#define COMM_COLLECTIVE_PIPELINE_H

#include "comm/collective/collective.h"

enum { STAGES_MAX = 2 };

/* The shape, alike on all ranks. */
typedef struct Shape {
    bool on_host;            /* data lies in the host's memory; else in a device's, which takes work as a whole */
    int stages;              /* 0: nobody to reduce with */
    int members[STAGES_MAX]; /* the most that a stage's group has on any rank */
    int owners[STAGES_MAX];  /* the first so many members */
    bool coded[STAGES_MAX];  /* its messages are compressed; then a later stage's are too */
} Shape;

/* A stage as this rank sees it. */
typedef struct Stage {
    Group group; /* of its own; self < 0: this rank takes no part */
    int owners;
} Stage;

/* Which of it is run: everything, or one of the halves of collective.h. */
typedef enum PipelinePart { PIPELINE_ALL, PIPELINE_REDUCE_SCATTER, PIPELINE_ALL_GATHER } PipelinePart;

/* f32 values of scratch that pipeline_run needs: enough for messages everywhere. */
int64_t pipeline_scratch_elems(const Shape *shape, int64_t elems, const Codec *codec);

/* stages Stage[shape->stages]. */
Status pipeline_run(Transport *transport, const Shape *shape, const Stage *stages, const Payload *payload, PipelinePart part);

/* What this rank owns of the last stage, in rising order; see Collective.owned. owner: its place in each stage's group,
 * -1 where it owns nothing. */
int64_t pipeline_owned(const Shape *shape, const int *owner, int64_t offset, int64_t elems, Slice *slices);

/* Segments that elems are cut into, at most. */
int64_t pipeline_segments(const Shape *shape, int64_t elems);

#endif
