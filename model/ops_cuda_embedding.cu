/* The embedding on the cuda device.
 *
 * Its backward adds rows of dx into the rows of their tokens, of which some are the same. So the positions are sorted
 * by token first, stably: each token's positions lie side by side, in order, and one block adds them up. No atomics;
 * the sums are those of the cpu to the bit when activations are f32. The sort costs three passes (tokens are below
 * 2^24) over 8 bytes per position, whatever the vocabulary; the sums read dx once. A token that is most of the batch
 * is a long sum for few threads: 1 row of C per step. */
#include "model/embedding_kernels.cuh"
#include "model/ops_cuda_internal.cuh"

enum { THREADS = 128, TOKEN_BITS = 24, DIGIT_BITS = 8 };

static size_t sort_blocks(size_t rows) { return (rows + SORT_ROWS - 1) / SORT_ROWS; }

size_t embedding_cuda_scratch_bytes(const OpsLimits *limits) {
    size_t rows = (size_t)limits->rows;
    return 2 * rows * sizeof(SortEntry) + sort_blocks(rows) * DIGITS * sizeof(int);
}

template <class A>
static void embedding_forward(OpsContext *context, Act *x, const int *tokens, const float *wte, const float *wpe, int B,
                              int T, int C) {
    CudaOps *ops = cuda_of(context);
    const A *token_rows = weights_of<A>(ops, wte), *position_rows = weights_of<A>(ops, wpe);
    bool wide = wide_rows<A>(C) && aligned(x, token_rows, position_rows);
    LAUNCH_PACKED(wide, embedding_forward_kernel, A, (unsigned)(B * T), THREADS, 0, ops->stream, (A *)x, tokens,
                  token_rows, position_rows, T, C);
    CHECK_LAUNCH(ops);
}

/* The positions sorted by token; in scratch. */
static const SortEntry *sort_by_token(OpsContext *context, const int *tokens, int rows) {
    CudaOps *ops = cuda_of(context);
    unsigned blocks = (unsigned)sort_blocks((size_t)rows);
    SortEntry *from = (SortEntry *)context->scratch, *to = from + rows;
    int *counts = (int *)(to + rows);
    LAUNCH(sort_start_kernel, (unsigned)blocks_of(rows, THREADS), THREADS, 0, ops->stream, from, tokens, rows);
    for (int shift = 0; shift < TOKEN_BITS; shift += DIGIT_BITS) {
        LAUNCH(sort_count_kernel, blocks, DIGITS, 0, ops->stream, counts, from, rows, shift);
        LAUNCH(sort_places_kernel, 1, DIGITS, 0, ops->stream, counts, (int)blocks);
        LAUNCH(sort_move_kernel, blocks, DIGITS, 0, ops->stream, to, from, counts, rows, shift);
        SortEntry *sorted = to;
        to = from;
        from = sorted;
    }
    CHECK_LAUNCH(ops);
    return from;
}

template <class A>
static void embedding_backward(OpsContext *context, float *dwte, float *dwpe, const Act *dx, const int *tokens, int B,
                               int T, int C, int maxT, bool accumulate) {
    CudaOps *ops = cuda_of(context);
    const A *in = (const A *)dx;
    int rows = B * T;
    const SortEntry *entries = sort_by_token(context, tokens, rows);
    /* packs are 16 bytes of dx; f32 rows that are wide for A are so too, and are taken in 16 bytes as well */
    bool wide = wide_rows<A>(C) && aligned(dx, dwte, dwpe);
    LAUNCH_PACKED(wide, token_gradient_kernel, A, (unsigned)rows, THREADS, 0, ops->stream, dwte, in, entries, rows, C);
    LAUNCH_PACKED(wide, position_gradient_kernel, A, (unsigned)maxT, THREADS, 0, ops->stream, dwpe, in, B, T, C,
                  accumulate);
    CHECK_LAUNCH(ops);
}

template <class A> static void fill(Ops *table) {
    table->embedding_forward = embedding_forward<A>;
    table->embedding_backward = embedding_backward<A>;
}

void embedding_cuda_slots(Ops *table, CudaDtype dtype) { dtype == CUDA_BF16 ? fill<bf16>(table) : fill<float>(table); }
