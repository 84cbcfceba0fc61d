/* The wire of a slice is walked part by part: a part lies in one piece, and so travels in one way.
 *
 *     pieces   | matrix      | 1-D | matrix            | small | matrix ...
 *     slice           |======|=====|=======|
 *     wire            | int8 | f32 | int8  |
 *
 * Residual arrays are reserved address space. Pages appear where they are first written, and reading others gives
 * zeros: what a first step needs. */
#define _GNU_SOURCE
#include "comm/compress/codec.h"

#include "comm/compress/compress_cuda.h"
#include "comm/compress/sample.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PART_BYTES = 8, SAMPLE_ELEMS = 256, BLOCK_ELEMS_MAX = 4096, LANES = 8 };

/* ---- create and destroy ---- */

static Status reserve(float **array, int64_t elems) {
    void *memory = mmap(NULL, (size_t)elems * sizeof(float), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return fault("no address space for %lld residuals", (long long)elems);
    *array = memory;
    return OK;
}

static void release(float *array, int64_t elems) {
    if (array)
        munmap(array, (size_t)elems * sizeof(float));
}

static Status add_pieces(Codec *codec, const ParamTable *table) {
    codec->pieces = calloc((size_t)table->gradient_count + 1, sizeof *codec->pieces);
    if (!codec->pieces)
        return fault("no memory for %d pieces", table->gradient_count);
    for (int g = 0; g < table->gradient_count; g++) {
        const Gradient *gradient = &table->gradients[g];
        codec->pieces[g] = (CodecPiece){.start = gradient->offset, .stop = gradient->offset + gradient->elems,
                                        .dense = gradient->dense || gradient->elems < CODEC_PIECE_MIN};
    }
    codec->piece_count = table->gradient_count;
    codec->elems = table->elems;
    return OK;
}

/* The i-th of all residual arrays. */
static float **residual_at(Codec *codec, int i) {
    return i < CODEC_HOPS ? &codec->residual[i] : &codec->new_residual[i - CODEC_HOPS];
}

static Status codec_init(Codec *codec, const ParamTable *table) {
    TRY(add_pieces(codec, table));
    for (int hop = 0; hop < CODEC_HOPS && codec->error_feedback && codec->elems > 0; hop++) {
        TRY(reserve(&codec->residual[hop], codec->elems));
        TRY(reserve(&codec->new_residual[hop], codec->elems));
    }
    return OK;
}

Status codec_create(Codec **codec, const ParamTable *table, const Compressor *compressor,
                    const CompressorOptions *options, bool every_hop, bool error_feedback) {
    *codec = calloc(1, sizeof **codec);
    if (!*codec)
        return fault("no memory for a codec");
    **codec = (Codec){.compressor = compressor, .options = *options, .every_hop = every_hop,
                      .error_feedback = error_feedback && compressor != &compressor_none};
    Status status = codec_init(*codec, table);
    if (status != OK) {
        codec_destroy(*codec);
        *codec = NULL;
    }
    return status;
}

void codec_destroy(Codec *codec) {
    if (!codec)
        return;
    for (int i = 0; i < 2 * CODEC_HOPS; i++) {
        float *array = *residual_at(codec, i);
        if (codec->gpu && !codec->on_gpu[i])
            memory_free(gpu_memory(codec->gpu), array);
        else
            release(array, codec->elems);
        if (codec->on_gpu[i])
            memory_free(gpu_memory(codec->gpu), codec->on_gpu[i]);
    }
    if (codec->lost)
        memory_free(gpu_memory(codec->gpu), codec->lost);
    if (codec->sums)
        memory_free(gpu_memory(codec->gpu), codec->sums);
    free(codec->pieces);
    free(codec);
}

/* ---- on a GPU ---- */

Status codec_use_gpu(Codec *codec, Gpu *gpu, void *stream) {
    if (!cuda_compressor(codec->compressor))
        return bad_input("comm.compress = %s: runs on the host only, comm.transport = nccl does not", codec->compressor->name);
    codec->gpu = gpu;
    codec->stream = stream;
    size_t bytes = (size_t)codec->elems * sizeof(float);
    for (int i = 0; i < 2 * CODEC_HOPS; i++) {
        float **array = residual_at(codec, i);
        if (!*array)
            continue;
        release(*array, codec->elems);
        *array = memory_alloc(gpu_memory(gpu), bytes);
        if (!*array)
            return fault("out of memory on the GPU: residuals of error feedback take %d x %.2f GB", 2 * CODEC_HOPS,
                         1e-9 * (double)bytes);
    }
    codec->sums = memory_alloc(gpu_memory(gpu), CUDA_SUMS * sizeof *codec->sums);
    codec->lost = codec->error_feedback ? NULL : memory_alloc(gpu_memory(gpu), bytes);
    bool complete = codec->sums && (codec->error_feedback || codec->lost);
    return complete ? OK : fault("out of memory on the GPU: what compression drops takes %.2f GB", 1e-9 * (double)bytes);
}

size_t codec_gpu_bytes(const Codec *codec) {
    size_t arrays = codec->residual[0] ? 2 * CODEC_HOPS : 1; /* without error feedback what is lost, for its measure */
    return arrays * (size_t)codec->elems * sizeof(float) + CUDA_SUMS * sizeof *codec->sums;
}

Status codec_hold(Codec *codec) {
    for (int i = 0; codec->gpu && i < 2 * CODEC_HOPS; i++) {
        float **array = residual_at(codec, i), *held = NULL;
        if (!*array)
            continue;
        TRY(reserve(&held, codec->elems));
        gpu_copy_out(codec->gpu, held, *array, (size_t)codec->elems * sizeof(float), NULL, NULL, 0);
        codec->on_gpu[i] = *array;
        *array = held;
    }
    return codec->gpu ? gpu_finish(codec->gpu) : OK;
}

Status codec_release(Codec *codec) {
    Status status = OK;
    for (int i = 0; codec->gpu && i < 2 * CODEC_HOPS; i++) {
        float **array = residual_at(codec, i), *held = *array;
        if (!codec->on_gpu[i])
            continue;
        gpu_copy_in(codec->gpu, codec->on_gpu[i], held, (size_t)codec->elems * sizeof(float));
        Status copied = gpu_finish(codec->gpu);
        status = status == OK ? copied : status;
        release(held, codec->elems);
        *array = codec->on_gpu[i];
        codec->on_gpu[i] = NULL;
    }
    return status;
}

/* ---- parts of a slice ---- */

typedef struct Part {
    const Compressor *compressor;
    int64_t offset, elems;
    size_t bytes;
    bool dense;
    int piece; /* where it lies */
} Part;

static int find_piece(const Codec *codec, int64_t offset) {
    int low = 0, high = codec->piece_count;
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (codec->pieces[middle].start <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Of the slice [offset, stop), the part in that piece. */
static Part part_in(const Codec *codec, int piece, int64_t offset, int64_t stop) {
    assert(piece < codec->piece_count && stop <= codec->elems);
    const CodecPiece *at = &codec->pieces[piece];
    Part part = {.compressor = at->dense ? &compressor_none : codec->compressor, .offset = offset,
                 .elems = (stop < at->stop ? stop : at->stop) - offset, .dense = at->dense, .piece = piece};
    part.bytes = part.compressor->wire_bytes(&codec->options, part.offset, part.elems);
    return part;
}

/* for (each part): an empty slice has one without values. */
static Part first_part(const Codec *codec, int64_t offset, int64_t elems) {
    if (elems == 0)
        return (Part){.compressor = &compressor_none, .offset = offset};
    return part_in(codec, find_piece(codec, offset), offset, offset + elems);
}

/* False behind the last one. */
static bool next_part(const Codec *codec, Part *part, int64_t stop) {
    if (part->offset + part->elems >= stop)
        return false;
    *part = part_in(codec, part->piece + 1, part->offset + part->elems, stop);
    return true;
}

/* ---- sizes ---- */

size_t codec_wire_bytes(const Codec *codec, int64_t offset, int64_t elems) {
    Part part = first_part(codec, offset, elems);
    size_t bytes = part.bytes;
    while (next_part(codec, &part, offset + elems))
        bytes += part.bytes;
    return bytes;
}

/* Whole blocks never take more than f32 would. A part of one takes at most PART_BYTES more than that (a scale, or the
 * index and value that top-k keeps of a few), each compressed piece has at most two, and only so many pieces of
 * CODEC_PIECE_MIN values fit. */
size_t codec_wire_bytes_max(const Codec *codec, int64_t elems) {
    (void)codec;
    int64_t pieces = elems / CODEC_PIECE_MIN + 2;
    return (size_t)(elems * (int64_t)sizeof(float) + 2 * PART_BYTES * pieces);
}

/* ---- how much is lost ---- */

static double sum_lanes(const double *lanes) {
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}

/* Adds up what became of n values. */
static void measure_values(Codec *codec, const float *values, float scale, const float *residual, const float *decoded,
                           int n) {
    double noise[LANES] = {0}, signal[LANES] = {0};
    for (int i = 0; i < n; i++) {
        float scaled = scale * values[i];
        float p = residual ? scaled + residual[i] : scaled;
        double lost = (double)p - (double)decoded[i];
        noise[i % LANES] += lost * lost;
        signal[i % LANES] += (double)p * (double)p;
    }
    codec->noise += sum_lanes(noise);
    codec->signal += sum_lanes(signal);
}

static int64_t stretch_of(const Part *part) {
    return part->compressor->block_elems > SAMPLE_ELEMS ? part->compressor->block_elems : SAMPLE_ELEMS;
}

/* Decodes again those stretches of the part that the sample takes: by global offset, so alike in every run. */
static void measure_part(Codec *codec, const Part *part, const float *values, float scale, const float *residual,
                         const uint8_t *wire) {
    int64_t stretch = stretch_of(part);
    float decoded[BLOCK_ELEMS_MAX];
    for (int64_t i = 0, n; i < part->elems; i += n) {
        int64_t offset = part->offset + i, left = stretch - offset % stretch;
        n = left < part->elems - i ? left : part->elems - i;
        if (!sample_takes(offset / stretch))
            continue;
        const uint8_t *from = wire + part->compressor->wire_bytes(&codec->options, part->offset, i);
        part->compressor->decode(&codec->options, offset, n, from, decoded);
        measure_values(codec, values + i, scale, residual ? residual + i : NULL, decoded, (int)n);
    }
}

double codec_measure(Codec *codec) {
    if (codec->gpu)
        cuda_take_sums(codec->gpu, codec->stream, codec->sums, &codec->noise, &codec->signal);
    double nmse = codec->noise / codec->signal; /* 0 / 0 is NaN */
    codec->noise = codec->signal = 0;
    return nmse;
}

/* ---- encode and decode ---- */

/* What is lost is the new residual, or kept for its own sake. */
static void encode_on_gpu(Codec *codec, const Part *part, const float *values, float scale, const float *residual,
                          float *new_residual, uint8_t *wire) {
    float *lost = part->dense || new_residual ? new_residual : codec->lost + part->offset;
    cuda_compressor(part->compressor)->encode(codec->gpu, codec->stream, &codec->options, part->offset, part->elems,
                                              values, scale, residual, lost, wire);
    if (!part->dense)
        cuda_measure(codec->gpu, codec->stream, part->offset, part->elems, stretch_of(part), values, scale, residual,
                     lost, codec->sums);
}

static void encode_part(Codec *codec, CodecHop hop, const Part *part, const float *values, float scale, uint8_t *wire) {
    bool feedback = codec->error_feedback && !part->dense;
    const float *residual = feedback ? codec->residual[hop] + part->offset : NULL;
    float *new_residual = feedback ? codec->new_residual[hop] + part->offset : NULL;
    if (codec->gpu) {
        encode_on_gpu(codec, part, values, scale, residual, new_residual, wire);
        return;
    }
    part->compressor->encode(&codec->options, part->offset, part->elems, values, scale, residual, new_residual, wire);
    if (!part->dense)
        measure_part(codec, part, values, scale, residual, wire);
}

void codec_encode(Codec *codec, CodecHop hop, int64_t offset, int64_t elems, const float *values, float scale,
                  void *wire) {
    uint8_t *out = wire;
    Part part = first_part(codec, offset, elems);
    do {
        encode_part(codec, hop, &part, values + (part.offset - offset), scale, out);
        out += part.bytes;
    } while (next_part(codec, &part, offset + elems));
}

static void decode_part(const Codec *codec, const Part *part, const uint8_t *wire, float *values) {
    if (codec->gpu)
        cuda_compressor(part->compressor)->decode(codec->gpu, codec->stream, &codec->options, part->offset, part->elems,
                                                  wire, values);
    else
        part->compressor->decode(&codec->options, part->offset, part->elems, wire, values);
}

static void decode_add_part(const Codec *codec, const Part *part, const uint8_t *wire, float *sum) {
    if (codec->gpu)
        cuda_compressor(part->compressor)->decode_add(codec->gpu, codec->stream, &codec->options, part->offset,
                                                      part->elems, wire, sum);
    else
        part->compressor->decode_add(&codec->options, part->offset, part->elems, wire, sum);
}

void codec_decode(const Codec *codec, int64_t offset, int64_t elems, const void *wire, float *values) {
    const uint8_t *in = wire;
    Part part = first_part(codec, offset, elems);
    do {
        decode_part(codec, &part, in, values + (part.offset - offset));
        in += part.bytes;
    } while (next_part(codec, &part, offset + elems));
}

void codec_decode_add(const Codec *codec, int64_t offset, int64_t elems, const void *wire, float *sum) {
    const uint8_t *in = wire;
    Part part = first_part(codec, offset, elems);
    do {
        decode_add_part(codec, &part, in, sum + (part.offset - offset));
        in += part.bytes;
    } while (next_part(codec, &part, offset + elems));
}

/* ---- residuals ---- */

void codec_commit(Codec *codec) {
    for (int hop = 0; hop < CODEC_HOPS; hop++) {
        float *current = codec->residual[hop];
        codec->residual[hop] = codec->new_residual[hop];
        codec->new_residual[hop] = current;
    }
}

void codec_forget_new(Codec *codec) {
    for (int hop = 0; hop < CODEC_HOPS; hop++)
        if (codec->new_residual[hop] && codec->gpu && !codec->on_gpu[CODEC_HOPS + hop])
            cuda_clear(codec->gpu, codec->stream, codec->new_residual[hop], codec->elems);
        else if (codec->new_residual[hop])
            madvise(codec->new_residual[hop], (size_t)codec->elems * sizeof(float), MADV_DONTNEED);
}
