// Grouped products on Hopper's tensor cores: one persistent kernel per pass over the ragged buffer, no transposed
// copies.
//
//                       x (rows, IC)                y (rows, OC)
//                     +---+---+---+---+           +-------+-------+---+
//     group_start[0]  |   |   |   |   |           |       |       |   |    Tiles are 128 x 256, or 256 x 128 where the
//           expert 0  | a | a | a | a |  x W_0^T  |   t   |       |   |    last column is narrow. Starts are multiples
//                     +---+---+---+---+     =     +-------+-------+   |    of 128, so a tile has rows of one expert.
//                     |   |   |   |   |           |       |       |   |
//           pad rows  | 0 | 0 | 0 | 0 |           |   0   |   0   | 0 |    t = sum of a b^T over the k blocks: a is
//                     +---+---+---+---+           +-------+-------+---+    128 x 64 of x, b is 256 x 64 of W_0.
//     group_start[1]  |   |   |   |   |           |       |       |   |
//           expert 1  |   |   |   |   |  x W_1^T  |       |       |   |
//                       k blocks of 64
//
// A block per SM takes tile after tile (grouped/tile_scheduler.cuh). One warp loads, two warpgroups multiply, and
// between them lies a ring of four stages in shared memory (grouped/grouped_gemm_parts.cuh):
//
//     producer warp  --TMA-->  stage 0 [ a | b ]  being read  --wgmma-->  warpgroup 0: rows 0..63 of t, in registers
//     (and the other           stage 1 [ a | b ]  loaded                  warpgroup 1: rows 64..127
//     block's, for             stage 2 [ a |   ]  on its way                   |
//     half of b)               stage 3 [   |   ]  empty                        +--TMA-->  y or dx, in or added to dW
//           ^                                         |
//           +---- empty barriers: warps are done -----+
//
// wgmma takes operands whose rows are the contraction (dgrad's W, both of wgrad) as they lie, so the passes differ in
// coordinates only. Two blocks form a cluster and share one operand of their tiles: each loads half of it for both.
//
// Bound by the tensor cores under the card's power limit; with few rows per expert wgrad by the traffic of dW.
#include "grouped/grouped_gemm.h"
#include "grouped/grouped_gemm_parts.cuh"
#include "grouped/grouped_gemm_portable.cuh"

namespace {

// A tile of each shape in the two warpgroups: parts of 128 rows, 64 for each warpgroup, and their columns.
template <int SHAPE>
constexpr int PARTS = SHAPE == TALL ? 2 : 1;
template <int SHAPE>
constexpr int COLUMNS = SHAPE == WIDE ? 256 : 128;

// --- The warpgroups that multiply ---

// A stage may be overwritten, here and by the neighbour. One arrival per warp and block.
__device__ __forceinline__ void release(Shared& s, int stage, int lane) {
    if (lane < CLUSTER) barrier_arrive_cluster(cluster_address(&s.empty_barriers[stage], lane));
}

// d = the tile's sums. Each shape of tile has its own d, set to zero here: anything else made the compiler serialize
// wgmma (C7511, C7512).
template <Pass P, int SHAPE>
__device__ __forceinline__ void multiply(Shared& s, float (&d)[PARTS<SHAPE>][COLUMNS<SHAPE> / 2], int k_blocks,
                                         int group, int lane, Place<STAGES>& stage) {
    constexpr int N = COLUMNS<SHAPE>;

    // Where the operands lie in the first stage. Descriptors count in 16 bytes, and so do the steps: the next k16 is 32
    // bytes along a row, or 16 rows of 128 bytes further where rows are the contraction.
    constexpr int MN_A = P == WGRAD, MN_B = P != FORWARD;
    constexpr int STEP_A = MN_A ? 128 : 2, STEP_B = MN_B ? 128 : 2, PART = 2 * BOX_BYTES / 16;
    const uint32_t front = shared_address(s.stages), end = front + STAGE_BYTES;
    const uint64_t a = wgmma_descriptor<64>(front + group * BOX_BYTES, BOX_BYTES);
    const uint64_t b = wgmma_descriptor<64>(end - N / 64 * BOX_BYTES, BOX_BYTES);

    // d = 0
#pragma unroll
    for (int part = 0; part < PARTS<SHAPE>; part++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) d[part][i] = 0;

    // d += A B over a k block, asynchronously. When it waits for the block before and gives its stage back, the tensor
    // cores already have this one to work on.
    int before = 0;
    for (int k_block = 0; k_block < k_blocks; k_block++) {
        barrier_wait(&s.full_barriers[stage.index], stage.phase);
        const uint64_t at = stage.index * (STAGE_BYTES / 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K<P> / 16; k++)
#pragma unroll
            for (int part = 0; part < PARTS<SHAPE>; part++)
                wgmma_ss<N, MN_A, MN_B>(d[part], a + at + k * STEP_A + part * PART, b + at + k * STEP_B, 1);
        wgmma_commit();
        wgmma_wait<1>();
        if (k_block) release(s, before, lane);
        before = stage.index;
        stage.advance();
    }

    // The last one.
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS<SHAPE>; part++) wgmma_pin(d[part]);
    release(s, before, lane);
}

// One tile, from its first k block to the output.
template <Pass P, int SHAPE>
__device__ __forceinline__ void compute(Shared& s, const WorkItem& item, const CUtensorMap* out, int columns, int add,
                                        Place<STAGES>& stage, Writer& writer) {
    // Its sums.
    const int warp = threadIdx.x / 32 - 4;
    float d[PARTS<SHAPE>][COLUMNS<SHAPE> / 2];
    multiply<P, SHAPE>(s, d, item.k_blocks, warp / 4, writer.lane, stage);
    if (!item.store) return;

#pragma unroll
    // dW_e = or += the sums, or y = the sums, rounded, with zeros for pad rows. (The item is read from shared memory
    // only now: registers are short.)
    for (int part = 0; part < PARTS<SHAPE>; part++) {
        const int row = part * SQUARE_SIDE + warp * 16, m = item.m + row, expert = item.expert;
        if (P == WGRAD)
            write<float, COLUMNS<SHAPE>>(writer, d[part], item.n, columns, 16, [&](const void* piece, int n) {
                add ? tma_add(out, piece, n, m, expert) : tma_store(out, piece, n, m, expert);
            });
        else
            write<floatX, COLUMNS<SHAPE>>(writer, d[part], item.n, columns, item.valid - row,
                                          [&](const void* piece, int n) { tma_store(out, piece, n, m); });
    }
}

// What a warp that multiplies does: tile after tile.
template <Pass P>
__device__ __forceinline__ void consume(Shared& s, const CUtensorMap* out, int columns, int add) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    Writer writer = {s.pieces[warp], 0, lane};
    Place<STAGES> stage = {0, 0};
    Place<ITEMS> at = {0, 0};
    for (;;) {
        // The work item, which the producer wrote.
        barrier_wait(&s.item_full_barriers[at.index], at.phase);
        const WorkItem& item = s.items[at.index];
        const int shape = item.shape;
        if (item.k_blocks == 0) break;

        // Its tile.
        if (shape == WIDE)
            compute<P, WIDE>(s, item, out, columns, add, stage, writer);
        else if (shape == TALL)
            compute<P, TALL>(s, item, out, columns, add, stage, writer);
        else
            compute<P, SQUARE>(s, item, out, columns, add, stage, writer);

        // The producer may write another item there.
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.item_empty_barriers[at.index]);
        at.advance();
    }

    // Shared memory stays until TMA has read the last pieces.
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
}

template <Pass P>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                        const __grid_constant__ CUtensorMap out, const Groups g) {
    run_block<P>(
        &a, &b, &out, g, [&](Shared& s) { consume<P>(s, &out, g.N, g.add); }, [](Shared&) {});
}

// --- The host's side ---

// Whether there is anything to multiply; sizes that TMA cannot take end the run.
bool check_sizes(const Ragged& r, int64_t IC, int64_t OC) {
    if (IC <= 0 || OC <= 0 || IC % 8 != 0 || OC % 8 != 0)
        die(EXIT_USAGE,
            "a grouped product needs dimensions that are multiples of 8 (rows are copied in pieces of 16 bytes), not "
            "IC %lld and "
            "OC %lld; choose --dim and --expert-ffn so",
            (long long)IC, (long long)OC);
    ASSERT(r.El <= MAX_EXPERTS);
    return r.capacity > 0 && r.El > 0;
}

}  // namespace

void grouped_gemm_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    if (!check_sizes(r, IC, OC)) return;
    if (ctx->portable) return grouped_gemm_portable_forward(y, x, w, r, IC, OC, ctx);
    launch(grouped_gemm_kernel<FORWARD>, ctx, matrix_map(x, 0, r.capacity, IC, BOX, ctx),
           matrix_map(w, r.El, OC, IC, BOX, ctx), matrix_map(y, 0, r.capacity, OC, 16, ctx),
           groups_of(r, 0, OC, IC, ctx));
}

void grouped_gemm_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    if (!check_sizes(r, IC, OC)) return;
    if (ctx->portable) return grouped_gemm_portable_dgrad(dx, dy, w, r, IC, OC, ctx);
    launch(grouped_gemm_kernel<DGRAD>, ctx, matrix_map(dy, 0, r.capacity, OC, BOX, ctx),
           matrix_map(w, r.El, OC, IC, BOX, ctx), matrix_map(dx, 0, r.capacity, IC, 16, ctx),
           groups_of(r, 0, IC, OC, ctx));
}

// Sums run over whole k blocks of 64 rows: pad rows at an expert's end are zeros in dy and x and add nothing.
void grouped_gemm_wgrad(real* dw, const floatX* dy, const floatX* x, Ragged r, int64_t IC, int64_t OC, int accumulate,
                        Ctx* ctx) {
    if (!check_sizes(r, IC, OC))
        return accumulate ? void() : device_zero(dw, (size_t)(r.El * OC * IC) * sizeof(real), ctx);
    if (ctx->portable) return grouped_gemm_portable_wgrad(dw, dy, x, r, IC, OC, accumulate, ctx);
    Groups g = groups_of(r, OC, IC, r.capacity, ctx);
    g.add = accumulate;
    launch(grouped_gemm_kernel<WGRAD>, ctx, matrix_map(dy, 0, r.capacity, OC, BOX, ctx),
           matrix_map(x, 0, r.capacity, IC, BOX, ctx), matrix_map(dw, r.El, OC, IC, 16, ctx), g);
}
