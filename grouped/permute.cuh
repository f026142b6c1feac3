// The order in which the kernels that permute rows go through them. An expert's rows are in the order of their tokens,
// so blocks take the same slice of every expert before the next slice. The copies of a token are then made at about the
// same time: it comes from memory once, and from L2 after that.
#ifndef GROUPED_PERMUTE_CUH
#define GROUPED_PERMUTE_CUH

#include "grouped/permute.h"
#include "layers/rows.cuh"

enum { PERMUTE_WARPS = 8 };  // of a block, a row each at a time

// At even load: a row a warp.
static inline int64_t permute_slices(const Ragged& r) { return ceil_div(r.capacity, r.El * PERMUTE_WARPS); }

// Calls move(row, token) in a whole warp, for the rows of this block's slice, pad rows (token -1) in.
template <typename Move>
static __device__ __forceinline__ void permute_slice(const Ragged& r, int64_t slices, Move move) {
    const int64_t e = blockIdx.x % r.El, slice = blockIdx.x / r.El;
    const int64_t start = r.group_start[e], length = r.group_start[e + 1] - start;
    const int64_t end = start + length * (slice + 1) / slices;
    for (int64_t row = start + length * slice / slices + threadIdx.x / 32; row < end; row += PERMUTE_WARPS)
        move(row, (int64_t)r.row_token[row]);
}

#endif
