// The work of mx/grouped_gemm_mx.cu: its two GEMMs, and the tile scheduler of a wgrad with several outputs.
#pragma once

#include "grouped/grouped_gemm_parts.cuh"
#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"

namespace {

// Two kernels: Mx for forward and dgrad, MxWgrad for wgrad. In wgrad a helper warp loads the column scales. A k block
// is 128 bytes wide.
struct Mx : Pass {
    static constexpr int BLOCK_K = MX_CHUNK;
    static constexpr bool SIDE_BY_SIDE = true;
    struct Extra {
        alignas(16) float column_scales[STAGES][SQUARE_SIDE];  // factors of B's columns, from a helper warp
    };
};
struct MxWgrad : Mx {
    static constexpr bool OVER_ROWS = true;
    static constexpr int HELPERS = 1, HELPER_ARRIVALS = 1;
};

// An output of wgrad: its sizes, and its first rows in A and in B.
struct Matrix {
    int M, N, a, b;
};

// A wgrad: one matrix for each expert, all of one size. Or, with one expert, a list of matrices of any sizes. The
// matrices of a list contract over the same rows of A and B, and a work tile's `expert` is the index in the list.
struct Wgrads : Groups {
    const uint8_t *a, *b;  // scales: per matrix (chunks, M) and (chunks, N), one matrix after another
    int chunks, matrices;  // matrices: 1 with experts
    Matrix list[MX_MATRICES];

    // A work tile's matrix, which is also the index of its TMA map; and the index of the tile's expert in this map.
    __device__ __forceinline__ int map_of(const WorkItem& item) const { return matrices > 1 ? item.expert : 0; }
    __device__ __forceinline__ const Matrix& of(const WorkItem& item) const { return list[map_of(item)]; }
    __device__ __forceinline__ int depth_of(const WorkItem& item) const { return matrices > 1 ? 0 : item.expert; }
};

// The tile scheduler of one matrix after another. A tile's m and n count from the first matrix of A and B.
struct WgradScheduler : TileScheduler<MxWgrad> {
    const Wgrads& all;
    int matrix, before;  // the current matrix; work tiles before it

    __device__ __forceinline__ explicit WgradScheduler(const Wgrads& all)
        : TileScheduler(all), all(all), matrix(0), before(0) {}

    __device__ __forceinline__ WorkItem find(int number, int rank) {
        for (;;) {
            WorkItem item = TileScheduler::find(number - before, rank);
            if (item.k_blocks == 0 && matrix + 1 < all.matrices) {
                before = number - item.past;
                matrix++;
                restart(all.list[matrix].M, all.list[matrix].N);
                continue;
            }
            item.m += all.list[matrix].a;
            item.n += all.list[matrix].b;
            if (all.matrices > 1) item.expert = matrix;
            return item;
        }
    }
};

}  // namespace
