/* Kernels of the embedding, both ways; see ops_cuda_embedding.cu. */
#ifndef MODEL_EMBEDDING_KERNELS_CUH
#define MODEL_EMBEDDING_KERNELS_CUH

#include "model/pack_kernels.cuh"

/* x[row] = wte[tokens[row]] + wpe[row % T].   Block: a row. Bytes: 3 elements for each of x. */
template <class A, int N>
__global__ void __launch_bounds__(128)
    embedding_forward_kernel(A *x, const int *tokens, const A *wte, const A *wpe, int T, int C) {
    int64_t row = blockIdx.x, token = (int64_t)tokens[row] * C, position = row % T * C;
    for (int c = (int)threadIdx.x * N; c < C; c += (int)blockDim.x * N) {
        Floats<N> sum = load<A, N>(wte + token + c), more = load<A, N>(wpe + position + c);
        for (int i = 0; i < N; i++)
            sum.at[i] += more.at[i];
        store<A, N>(x + row * C + c, sum);
    }
}

/* dwpe[t] (+)= the sum of dx[b][t] over b, in order; without accumulate 0 from row T on.
 * Block: a row of dwpe. Bytes: dx once. */
template <class A, int N>
__global__ void __launch_bounds__(128)
    position_gradient_kernel(float *dwpe, const A *dx, int B, int T, int C, bool accumulate) {
    int64_t t = blockIdx.x;
    for (int c = (int)threadIdx.x * N; c < C; c += (int)blockDim.x * N) {
        Floats<N> sum = {};
        if (accumulate)
            sum = load<float, N>(dwpe + t * C + c);
        for (int64_t b = 0; b < B && t < T; b++) {
            Floats<N> values = load<A, N>(dx + (b * T + t) * C + c);
            for (int i = 0; i < N; i++)
                sum.at[i] += values.at[i];
        }
        store<float, N>(dwpe + t * C + c, sum);
    }
}

/* ---- positions sorted by token: a stable radix sort, a digit of 8 bits per pass ---- */

enum { DIGITS = 256, SORT_ROWS = 1024 }; /* a block, of DIGITS threads, takes SORT_ROWS entries */

/* A position and its token, which is what entries are sorted by. */
typedef struct alignas(8) SortEntry {
    int token, row;
} SortEntry;

static __global__ void sort_start_kernel(SortEntry *entries, const int *tokens, int rows) {
    int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row < rows)
        entries[row] = {tokens[row], (int)row};
}

/* The digits of the block's entries into shared memory; returns their number. Ends with a barrier. */
__device__ inline int sort_digits(unsigned char *digits, const SortEntry *entries, int rows, int shift) {
    int64_t first = (int64_t)blockIdx.x * SORT_ROWS;
    int count = rows - first < SORT_ROWS ? (int)(rows - first) : (int)SORT_ROWS;
    for (int i = (int)threadIdx.x; i < count; i += DIGITS)
        digits[i] = (unsigned char)(entries[first + i].token >> shift);
    __syncthreads();
    return count;
}

/* counts[block][digit]: how many of the block's entries have it. A thread has a digit and looks through all. */
static __global__ void __launch_bounds__(DIGITS)
    sort_count_kernel(int *counts, const SortEntry *entries, int rows, int shift) {
    __shared__ unsigned char digits[SORT_ROWS];
    int count = sort_digits(digits, entries, rows, shift), own = 0;
    for (int i = 0; i < count; i++)
        own += digits[i] == (int)threadIdx.x;
    counts[(int64_t)blockIdx.x * DIGITS + threadIdx.x] = own;
}

/* Counts become places: where the block's first entry of that digit goes. One block; a thread has a digit. */
static __global__ void __launch_bounds__(DIGITS) sort_places_kernel(int *counts, int blocks) {
    __shared__ int totals[DIGITS];
    int digit = (int)threadIdx.x, place = 0;
    for (int block = 0; block < blocks; block++)
        place += counts[(int64_t)block * DIGITS + digit];
    totals[digit] = place;
    __syncthreads();
    place = 0;
    for (int smaller = 0; smaller < digit; smaller++)
        place += totals[smaller];
    for (int block = 0; block < blocks; block++) {
        int count = counts[(int64_t)block * DIGITS + digit];
        counts[(int64_t)block * DIGITS + digit] = place;
        place += count;
    }
}

/* Entries to their places, those of a digit in the order in which they stood. */
static __global__ void __launch_bounds__(DIGITS)
    sort_move_kernel(SortEntry *out, const SortEntry *entries, const int *places, int rows, int shift) {
    __shared__ unsigned char digits[SORT_ROWS];
    int count = sort_digits(digits, entries, rows, shift);
    int place = places[(int64_t)blockIdx.x * DIGITS + threadIdx.x];
    for (int i = 0; i < count; i++)
        if (digits[i] == (int)threadIdx.x)
            out[place++] = entries[(int64_t)blockIdx.x * SORT_ROWS + i];
}

/* dwte[token] += dx of the token's positions, in their order. Block: an entry, and only the first of each token works.
 * Bytes: dx once, the tokens' rows of dwte twice. */
template <class A, int N>
__global__ void __launch_bounds__(128)
    token_gradient_kernel(float *dwte, const A *dx, const SortEntry *entries, int rows, int C) {
    int64_t first = blockIdx.x;
    int token = entries[first].token;
    if (first > 0 && entries[first - 1].token == token)
        return;
    for (int c = (int)threadIdx.x * N; c < C; c += (int)blockDim.x * N) {
        float *out = dwte + (int64_t)token * C + c;
        Floats<N> sum = load<float, N>(out);
        for (int64_t at = first; at < rows && entries[at].token == token; at++) {
            Floats<N> values = load<A, N>(dx + (int64_t)entries[at].row * C + c);
            for (int i = 0; i < N; i++)
                sum.at[i] += values.at[i];
        }
        store<float, N>(out, sum);
    }
}

#endif
