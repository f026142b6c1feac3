// The order in which the kernels that permute rows go through them. An expert's rows are in the order of their tokens,
// so blocks take the same slice of every expert before the next slice. The copies of a token are then made at about the
// same time: it comes from memory once, and from L2 after that.
#ifndef GROUPED_PERMUTE_CUH
#define GROUPED_PERMUTE_CUH

#include "grouped/permute.h"
#include "layers/rows.cuh"

enum { PERMUTE_WARPS = 8 };  // of a block

// Slices of an expert's rows, so that at even load a block takes so many of them.
static inline int64_t permute_slices(const Ragged& r, int64_t rows) { return ceil_div(r.capacity, r.El * rows); }

// The rows of this block's slice, pad rows in: from `first` to before `end`.
struct PermuteSlice {
    int64_t first, end;
};
static __device__ __forceinline__ PermuteSlice permute_slice(const Ragged& r, int64_t slices) {
    const int64_t e = blockIdx.x % r.El, slice = blockIdx.x / r.El;
    const int64_t start = r.group_start[e], length = r.group_start[e + 1] - start;
    return {start + length * slice / slices, start + length * (slice + 1) / slices};
}

#endif
