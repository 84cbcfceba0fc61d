/* How a slice of the flat gradient travels: which of it is compressed, and what its quantisations left behind.
 *
 * The flat gradient consists of pieces: the gradients of the parameter table. Matrices are compressed, each on its own
 * (a block never holds values of two pieces); a layer's 1-D tensors, and pieces below CODEC_PIECE_MIN values, travel as
 * f32. The wire form of a slice is that of its parts in the pieces, one after another.
 *
 * Error feedback: what a quantisation leaves of a value is added to the same place's next one. A place of the gradient
 * is quantised up to three times on its way, each time with a residual of its own (CodecHop), f32 at the value's global
 * offset. New residuals go to a second array; codec_commit makes them current, so a step that is skipped changes
 * nothing. The arrays are as long as the gradient, but memory is only there where this rank ever wrote: its shard. */
#ifndef COMM_COMPRESS_CODEC_H
#define COMM_COMPRESS_CODEC_H

#include "base/error.h"
#include "base/gpu.h"
#include "base/param.h"
#include "comm/compress/compressor.h"

enum { CODEC_PIECE_MIN = 1024 };

/* Where on its way to everybody a value is quantised. */
typedef enum CodecHop {
    HOP_FIRST,  /* this rank's own gradient, to whoever adds it up: in a flat reduce-scatter, or inside a node */
    HOP_SECOND, /* this node's sum, to the other nodes */
    HOP_RESULT, /* the sum over all, to everybody */
    CODEC_HOPS
} CodecHop;

typedef struct CodecPiece {
    int64_t start, stop; /* global offsets */
    bool dense;          /* travels as f32 */
} CodecPiece;

typedef struct Codec {
    /* set once */
    const Compressor *compressor;
    CompressorOptions options;
    bool every_hop;      /* also inside a node: comm.compress_scope = all */
    bool error_feedback;
    CodecPiece *pieces;  /* owned: cover the flat gradient in order */
    int piece_count;
    int64_t elems;
    /* comm thread */
    float *residual[CODEC_HOPS];     /* f32[elems], owned; NULL without error feedback */
    float *new_residual[CODEC_HOPS]; /* f32[elems], owned */
    Gpu *gpu;     /* borrowed; NULL: values, wire and residuals are in the host's memory */
    void *stream; /* in which the Gpu works on them */
    float *on_gpu[2 * CODEC_HOPS]; /* while they are held on the host: where they belong */
    float *lost;                   /* f32[elems] of the Gpu's memory, owned: what encoding drops; NULL with residuals */
    double *sums;                  /* f64[CUDA_SUMS] of the Gpu's memory, owned: parts of the next two */
    double noise, signal; /* sums of (p - C(p))^2 and p^2 over a sample of what was encoded since codec_measure */
} Codec;

/* Pieces from the table: its gradients. */
Status codec_create(Codec **codec, const ParamTable *table, const Compressor *compressor,
                    const CompressorOptions *options, bool every_hop, bool error_feedback);
void codec_destroy(Codec *codec); /* accepts NULL and half-built ones */

/* Before the first use: from now on values, wire and residuals lie in the Gpu's memory, and calls below join `stream`
 * (cudaStream_t). BAD_INPUT for a compressor that runs on the host only. */
Status codec_use_gpu(Codec *codec, Gpu *gpu, void *stream);
size_t codec_gpu_bytes(const Codec *codec); /* of the Gpu's memory, that codec_use_gpu will allocate */

/* Brings residuals to the host, for whoever reads or fills codec->residual, and back. Nothing else may use the codec
 * between the two; on the host they do nothing. */
Status codec_hold(Codec *codec);
Status codec_release(Codec *codec);

size_t codec_wire_bytes(const Codec *codec, int64_t offset, int64_t elems);     /* exactly */
size_t codec_wire_bytes_max(const Codec *codec, int64_t elems);                 /* wherever it starts; pure */

/* p = scale * values + residual of that hop, encoded; the new residual is kept for codec_commit. */
void codec_encode(Codec *codec, CodecHop hop, int64_t offset, int64_t elems, const float *values, float scale,
                  void *wire);
void codec_decode(const Codec *codec, int64_t offset, int64_t elems, const void *wire, float *values);
void codec_decode_add(const Codec *codec, int64_t offset, int64_t elems, const void *wire, float *sum);

/* The step counts: its new residuals are the current ones. Only what the last step encoded has any: what it did not
 * encode is lost, so a step encodes either all that this rank ever encodes, or nothing and is not committed. */
void codec_commit(Codec *codec);

/* Gives the memory of the new residuals back: they read as zeros. For a change of who encodes what. */
void codec_forget_new(Codec *codec);

/* noise / signal since the last call (NMSE of what this rank encoded), NaN if there was none; starts anew. On a GPU it
 * waits for the stream. */
double codec_measure(Codec *codec);

#endif
