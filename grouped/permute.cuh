// L2 reuse for the kernels that permute rows. An expert's rows are in token order, so blocks take the same slice of
// every expert before the next slice. All copies of a token are then made at about the same time: its first read is
// from memory, the others are from L2.
#pragma once

#include "grouped/permute.h"
#include "layers/rows.cuh"

enum { PERMUTE_WARPS = 8 };  // of a block

// Number of slices of each expert, so that at balanced load a slice, which is one block's, has `rows` rows.
static inline int64_t permute_slices(const Ragged& r, int64_t rows) { return ceil_div(r.capacity, r.El * rows); }

// The rows [first, end) of this block's slice, with pad rows.
struct PermuteSlice {
    int64_t first, end;
};
static __device__ __forceinline__ PermuteSlice permute_slice(const Ragged& r, int64_t slices) {
    const int64_t e = blockIdx.x % r.El, slice = blockIdx.x / r.El;
    const int64_t start = r.group_start[e], length = r.group_start[e + 1] - start;
    return {start + length * slice / slices, start + length * (slice + 1) / slices};
}
