// Grouped GEMM on Hopper's tensor cores: one persistent kernel per pass over the ragged buffer, no transposed copies.
//
//                       x (rows, IC)                y (rows, OC)
//                     +---+---+---+---+           +-------+-------+---+
//     group_start[0]  |   |   |   |   |           |       |       |   |    Tiles are 128 x 256, or 256 x 128 where the
//           expert 0  | a | a | a | a |  x W_0^T  |   t   |       |   |    last column is narrow. Starts are multiples
//                     +---+---+---+---+     =     +-------+-------+   |    of 128: all rows of a tile are one expert's.
//                     |   |   |   |   |           |       |       |   |
//           pad rows  | 0 | 0 | 0 | 0 |           |   0   |   0   | 0 |    t = sum of a b^T over the k blocks: a is
//                     +---+---+---+---+           +-------+-------+---+    128 x 64 of x, b is 256 x 64 of W_0.
//     group_start[1]  |   |   |   |   |           |       |       |   |
//           expert 1  |   |   |   |   |  x W_1^T  |       |       |   |
//                       k blocks of 64
//
// Persistent: one block per SM takes tile after tile from the tile scheduler (grouped/tile_scheduler.cuh). Warp
// specialization: one producer warp loads, two consumer warpgroups multiply. A ring of four stages in shared memory
// connects them (grouped/grouped_gemm_parts.cuh):
//
//     producer warp  --TMA-->  stage 0 [ a | b ]  being read  --wgmma-->  warpgroup 0: rows 0..63 of t, in registers
//     (and the other           stage 1 [ a | b ]  loaded                  warpgroup 1: rows 64..127
//     block's, for             stage 2 [ a |   ]  in flight                    |
//     half of b)               stage 3 [   |   ]  empty                        +--TMA-->  y or dx, in or added to dW
//           ^                                         |
//           +---- empty barriers: warps are done -----+
//
// wgmma also reads operands whose rows are the contraction: dgrad's W, both operands of wgrad. So nothing is
// transposed, and the passes differ in coordinates only. Two blocks form a cluster and share one operand of their
// tiles: each block loads half of this operand, for both.
//
// Three GEMMs do more (grouped/grouped_gemm_gather.cuh, grouped/grouped_gemm_swiglu.cuh): helper warps gather an
// operand by token, and the epilogue is SwiGLU or its backward.
//
// Bound by the tensor cores under the card's power limit. Narrow layers are bound by L2, and by the memory that
// they write. With few rows per expert wgrad is bound by the traffic of dW.
#include "grouped/grouped_gemm.h"
#include "grouped/grouped_gemm_gather.cuh"
#include "grouped/grouped_gemm_portable.cuh"
#include "grouped/grouped_gemm_swiglu.cuh"

namespace {

// The three GEMMs. A k block is 128 bytes wide.
struct Forward : Pass {
    static constexpr int BLOCK_K = 64;
};
struct Dgrad : Forward {
    static constexpr bool K_ROWS_B = true;
};
struct Wgrad : Dgrad {
    static constexpr bool OVER_ROWS = true, ZERO_EMPTY = true, K_ROWS_A = true;
};

// The same with A, or B, by token. The blocks of a cluster share the other operand, which is multicast.
template <typename P>
struct TokensA : P {
    static constexpr bool GATHER_A = true;
    static constexpr int HELPERS = GATHER_WARPS, HELPER_ARRIVALS = GATHER_THREADS;
};
struct WgradTokensB : Wgrad {
    static constexpr bool GATHER_B = true, SIDE_BY_SIDE = true;
    static constexpr int HELPERS = GATHER_WARPS, HELPER_ARRIVALS = GATHER_THREADS;
};

// Forward of W13 from x by token, with SwiGLU in the epilogue.
struct Swiglu : TokensA<Forward> {
    static constexpr bool GATE_UP = true;
};

// The longest contraction for which dgrad of W2 runs in ping-pong.
enum { PING_PONG_WIDTH = 768 };

// Dgrad of W2, with the backward of SwiGLU in the epilogue.
struct DgradSwiglu : Dgrad {
    static constexpr int EPILOGUE_STAGES = 4;
};

// The same with ping-pong.
struct DgradSwigluPingPong : DgradSwiglu {
    static constexpr bool PING_PONG = true;
    static constexpr int STAGES = 6, STAGE_BOXES = 4, EPILOGUE_STAGES = 2;
};

// A tile of each shape: its columns, and a warpgroup's parts of 64 rows. Two warpgroups share each 128 rows, but with
// ping-pong.
template <int SHAPE>
constexpr int COLUMNS = SHAPE == WIDE ? 256 : 128;
template <typename P, int SHAPE>
constexpr int PARTS = P::PING_PONG || SHAPE == TALL ? 2 : 1;
template <typename P>
constexpr int PART_BOXES = P::PING_PONG ? 1 : 2;  // from a part to the next

// The first row of a tile for this consumer warpgroup, in boxes.
template <typename P>
__device__ __forceinline__ int first_box() {
    return P::PING_PONG ? 0 : threadIdx.x / 128 - 1;
}

// --- The consumer warpgroups ---

// Releases a stage: it may be overwritten by this block and its peer. One arrival per warp and block.
template <typename Memory>
__device__ __forceinline__ void release(Memory& s, int stage, int lane) {
    if (lane < CLUSTER) barrier_arrive_cluster(cluster_address(&s.empty_barriers[stage], lane));
}

// Mainloop: d = the tile's sums. Each tile shape has its own d, set to zero here. Anything else made the compiler
// serialize wgmma (C7511, C7512).
template <typename P, int SHAPE>
__device__ __forceinline__ void multiply(Shared<P>& s, float (&d)[PARTS<P, SHAPE>][COLUMNS<SHAPE> / 2], int k_blocks,
                                         int lane, RingSlot<P::STAGES>& stage) {
    constexpr int N = COLUMNS<SHAPE>, STAGE_BYTES = Shared<P>::STAGE_BYTES;

    // Descriptors of the operands in stage 0. They count in units of 16 bytes, and so do the steps. The next k16 is 32
    // bytes along a row, or 16 rows of 128 bytes further if rows are the contraction.
    constexpr int MN_A = P::K_ROWS_A, MN_B = P::K_ROWS_B;
    constexpr int STEP_A = MN_A ? 128 : 2, STEP_B = MN_B ? 128 : 2, PART = PART_BOXES<P> * BOX_BYTES / 16;
    const uint32_t front = shared_address(s.stages), end = front + STAGE_BYTES;
    const uint64_t a = wgmma_descriptor<64>(front + first_box<P>() * BOX_BYTES, BOX_BYTES);
    const uint64_t b = wgmma_descriptor<64>(end - N / 64 * BOX_BYTES, BOX_BYTES);

    // d = 0
#pragma unroll
    for (int part = 0; part < PARTS<P, SHAPE>; part++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) d[part][i] = 0;

    // d += A B over each k block, asynchronously. Each iteration first issues its own wgmma, then waits for those of
    // the k block before and releases that stage. So the tensor cores always have work.
    int before = 0;
    for (int k_block = 0; k_block < k_blocks; k_block++) {
        barrier_wait(&s.full_barriers[stage.index], stage.phase);
        if (P::HELPERS) fence_async();  // cp.async writes like ordinary code
        const uint64_t at = stage.index * (STAGE_BYTES / 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < P::BLOCK_K / 16; k++)
#pragma unroll
            for (int part = 0; part < PARTS<P, SHAPE>; part++)
                wgmma_ss<N, MN_A, MN_B>(d[part], a + at + k * STEP_A + part * PART, b + at + k * STEP_B, 1);
        wgmma_commit();
        wgmma_wait<1>();
        if (k_block) release(s, before, lane);
        before = stage.index;
        stage.advance();
    }

    // The other warpgroup's turn: it may wait for its stages only when all those of this tile are full. (The parity of
    // a barrier tells a phase from the next one, not from the one after.)
    if (P::PING_PONG) {
        RingSlot<P::STAGES> next = stage;
        for (int i = 0; i < P::EPILOGUE_STAGES; i++, next.advance())
            barrier_wait(&s.full_barriers[next.index], next.phase);
        if (lane == 0) barrier_arrive(&s.turn_barriers[2 - threadIdx.x / 128]);
    }

    // The last k block.
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS<P, SHAPE>; part++) wgmma_pin(d[part]);
    release(s, before, lane);
}

// Epilogue of dgrad W2 with the backward of SwiGLU: a stage has h for 128 rows and 64 columns.
template <typename P, int SHAPE>
__device__ __forceinline__ void swiglu_backward(Shared<P>& s, const float (&d)[PARTS<P, SHAPE>][COLUMNS<SHAPE> / 2],
                                                const WorkItem& tile, const Epilogue& to, int columns,
                                                RingSlot<P::STAGES>& stage, Writer& writer) {
    constexpr int PIECES = COLUMNS<SHAPE> / BOX, AT_ONCE = P::PING_PONG ? 2 : 1;
    const int lane = writer.lane, row_of_warp = first_box<P>() * BOX + threadIdx.x / 32 % 4 * 16;
    float weight[AT_ONCE][2] = {}, dot[AT_ONCE][2] = {};
#pragma unroll
    for (int i = 0; i < P::EPILOGUE_STAGES; i++) {
        barrier_wait(&s.full_barriers[stage.index], stage.phase);
        const EpiloguePiece piece = epilogue_piece(tile, SHAPE, i, columns);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int part = i / PIECES + k;
            if (part >= PARTS<P, SHAPE> || !piece.exists) continue;

            // The gates of this lane's two rows, and the gradients.
            const int row = part * PART_BOXES<P> * BOX + row_of_warp, first = tile.m + row + lane / 4;
            if (i % PIECES == 0)
                for (int half = 0; half < 2; half++)
                    weight[k][half] = first + 8 * half < to.rows ? to.row_gate[first + 8 * half] : 0;
            const uint8_t* gate = s.stages[stage.index] + row % SQUARE_SIDE * 128;
            write_swiglu_backward(writer, d[part] + i % PIECES * (BOX / 2), gate, gate + 2 * BOX_BYTES, to,
                                  piece.column, tile.m + row, columns, tile.valid - row, weight[k], dot[k]);

            // <da', a> of 128 columns, summed in a fixed order.
            if (i % 2 == 1 || piece.column + BOX >= columns)
                for (int half = 0; half < 2; half++) {
                    const float sum = quad_sum(dot[k][half]);
                    if (lane % 4 == 0 && first + 8 * half < to.rows)
                        to.drow_gate[(int64_t)(first + 8 * half) * to.parts + piece.column / SQUARE_SIDE] = sum;
                    dot[k][half] = 0;
                }
        }
        __syncwarp();
        release(s, stage.index, lane);
        stage.advance();
    }
}

// One tile: mainloop and epilogue. It is tile i of a work tile. (That is read from shared memory only where it is
// needed, to save registers.)
template <typename P, typename Out, int SHAPE>
__device__ __forceinline__ void compute(Shared<P>& s, const WorkItem& item, int i, const Epilogue& to, int columns,
                                        int add, RingSlot<P::STAGES>& stage, Writer& writer) {
    // Mainloop: the tile's sums.
    float d[PARTS<P, SHAPE>][COLUMNS<SHAPE> / 2];
    multiply<P, SHAPE>(s, d, item.k_blocks, writer.lane, stage);
    const WorkItem tile = tile_of<P>(item, i);
    if constexpr (P::EPILOGUE_STAGES) return swiglu_backward<P, SHAPE>(s, d, tile, to, columns, stage, writer);
    if (!tile.store) return;

#pragma unroll
    for (int part = 0; part < PARTS<P, SHAPE>; part++) {
        // Epilogue. Wgrad: dW_e = or += the sums. Else y or dx = the sums, zeros in pad rows.
        const int row = (part * PART_BOXES<P> + first_box<P>()) * BOX + threadIdx.x / 32 % 4 * 16;
        const int m = tile.m + row, expert = tile.expert;
        if constexpr (P::GATE_UP)
            write_swiglu<COLUMNS<SHAPE>>(writer, d[part], to, tile.n / 2, m, tile.valid - row);
        else if (P::OVER_ROWS)
            write<Out, COLUMNS<SHAPE>>(writer, d[part], tile.n, columns, 16,
                                       [&](const void* piece, int n) { tma_write(add, &to.out, piece, n, m, expert); });
        else
            write<Out, COLUMNS<SHAPE>>(writer, d[part], tile.n, columns, tile.valid - row,
                                       [&](const void* piece, int n) { tma_store(&to.out, piece, n, m); });
    }
}

// A consumer warp: tile after tile. With ping-pong it computes every other one.
template <typename P, typename Out>
__device__ __forceinline__ void consume(Shared<P>& s, const Epilogue& to, int columns, int add) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    Writer writer = {s.stores[warp], 0, lane};
    RingSlot<P::STAGES> stage = {0, 0};
    RingSlot<ITEMS> at = {0, 0};
    RingSlot<1> turn = {0, warp < 4};  // the first warpgroup's first turn is at once
    bool mine = warp < 4;
    for (;;) {
        // The work tile, written by the producer.
        barrier_wait(&s.item_full_barriers[at.index], at.phase);
        const WorkItem& item = s.items[at.index];
        const int shape = item.shape;
        if (item.k_blocks == 0) break;

        // Its tile, by shape.
        if constexpr (P::PING_PONG) {
            for (int i = 0; i < tiles_of<P>(item); i++, mine = !mine)
                if (mine) {
                    barrier_wait(&s.turn_barriers[warp / 4], turn.phase);
                    turn.advance();
                    compute<P, Out, SQUARE>(s, item, i, to, columns, add, stage, writer);
                } else {
                    stage.skip(item.k_blocks + P::EPILOGUE_STAGES);
                }
        } else {
            if (!P::SIDE_BY_SIDE && shape == WIDE)
                compute<P, Out, WIDE>(s, item, 0, to, columns, add, stage, writer);
            else if (shape == TALL)
                compute<P, Out, TALL>(s, item, 0, to, columns, add, stage, writer);
            else
                compute<P, Out, SQUARE>(s, item, 0, to, columns, add, stage, writer);
        }

        // Release the slot of the work tile.
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.item_empty_barriers[at.index]);
        at.advance();
    }

    // Shared memory must stay allocated until TMA has read the last output buffers.
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
}

template <typename P, typename Out>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                        const __grid_constant__ Epilogue to, const Groups g, const Tokens tokens) {
    run_block<P>(
        &a, &b, &to.out, g, [&](Shared<P>& s) { consume<P, Out>(s, to, g.N, g.add); },
        [&](Shared<P>& s) {
            if constexpr (P::HELPERS) gather<P>(s, tokens);
        },
        &to.h);
}

// --- The host's side ---

// True if there is anything to multiply. Rows are copied in vectors of 16 bytes: the settings refuse other sizes by
// name.
bool check_sizes(const Ragged& r, int64_t IC, int64_t OC) {
    ASSERT(IC > 0 && OC > 0 && IC % 8 == 0 && OC % 8 == 0 && r.El <= MAX_EXPERTS);
    return r.capacity > 0 && r.El > 0;
}

}  // namespace

int grouped_gemm_gathers(const Ctx* ctx) { return !ctx->portable; }

// The operand to gather. A kernel that gathers does not read its map of that operand.
static Tokens tokens_of(const floatX* x, const Ragged& r, int64_t columns) {
    return {x, r.row_token, (int)r.capacity, (int)columns};
}

template <typename P, typename Out = floatX>
static void run(const CUtensorMap& a, const CUtensorMap& b, const Epilogue& to, const Groups& g, const Tokens& tokens,
                Ctx* ctx) {
    launch<P>(grouped_gemm_kernel<P, Out>, ctx, a, b, to, g, tokens);
}

// h or dh as (2, rows, F): gate and up of each row.
static CUtensorMap gate_up_map(const floatX* h, const Ragged& r, int64_t F, int rows, Ctx* ctx) {
    const int64_t size[3] = {F, r.capacity, 2}, stride[2] = {2 * F, F};
    const int box[3] = {BOX, rows, 1};
    return tensor_map(h, 3, size, stride, box, ctx);
}

void grouped_gemm_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    if (!check_sizes(r, IC, OC)) return;
    if (ctx->portable) return grouped_gemm_portable_forward(y, x, w, r, IC, OC, ctx);
    run<Forward>(matrix_map(x, 0, r.capacity, IC, BOX, ctx), matrix_map(w, r.El, OC, IC, BOX, ctx),
                 {matrix_map(y, 0, r.capacity, OC, 16, ctx)}, groups_of(r, 0, OC, IC, ctx), {}, ctx);
}

// W13 is (2 El, F, C). The scheduler's columns are those of gate and up, in whole boxes of both.
void grouped_gemm_swiglu(floatX* h, floatX* a, const floatX* x, const floatX* w13, GroupedRows order, Ragged r,
                         int64_t C, int64_t F, Ctx* ctx) {
    if (!check_sizes(r, C, F)) return;
    if (order == ALL_BY_ROW) {
        grouped_gemm_forward(h, x, w13, r, C, 2 * F, ctx);
        return experts_swiglu_forward(a, h, r, F, ctx);
    }
    ASSERT(!ctx->portable);
    const CUtensorMap w = matrix_map(w13, 2 * r.El, F, C, BOX, ctx);
    const Epilogue to = {
        gate_up_map(h, r, F, 16, ctx), matrix_map(a, 0, r.capacity, F, 16, ctx), {}, NULL, NULL, 0, 0, (int)F};
    run<Swiglu>(w, w, to, groups_of(r, 0, 2 * round_up(F, BOX), C, ctx), tokens_of(x, r, C), ctx);
}

void grouped_gemm_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    if (!check_sizes(r, IC, OC)) return;
    if (ctx->portable) return grouped_gemm_portable_dgrad(dx, dy, w, r, IC, OC, ctx);
    run<Dgrad>(matrix_map(dy, 0, r.capacity, OC, BOX, ctx), matrix_map(w, r.El, OC, IC, BOX, ctx),
               {matrix_map(dx, 0, r.capacity, IC, 16, ctx)}, groups_of(r, 0, IC, OC, ctx), {}, ctx);
}

int32_t grouped_gemm_dgrad_swiglu(ExpertsBackward t, const floatX* dy, const floatX* w2, GroupedRows order, Ragged r,
                                  int64_t C, int64_t F, Ctx* ctx) {
    if (ctx->portable) {
        ASSERT(order == ALL_BY_ROW);
        grouped_gemm_dgrad((floatX*)t.da_ungated, dy, w2, r, F, C, ctx);
        experts_swiglu_backward(t, r, F, ctx);
        return 1;
    }
    const int32_t parts = grouped_gemm_gate_parts(F);
    if (!check_sizes(r, F, C)) return parts;
    const CUtensorMap w = matrix_map(w2, r.El, C, F, BOX, ctx);
    const Groups g = groups_of(r, 0, F, C, ctx);
    const CUtensorMap dh = gate_up_map(t.dh, r, F, 16, ctx), h = gate_up_map(t.h, r, F, BOX, ctx);
    const CUtensorMap gated = matrix_map(t.gated_a, 0, r.capacity, F, 16, ctx);
    const Epilogue to = {dh, gated, h, r.row_gate, t.drow_gate, (int)r.capacity, parts, (int)F};
    const bool by_token = order == DY_BY_TOKEN;
    const CUtensorMap rows = matrix_map(dy, 0, r.capacity, C, BOX, ctx);
    const Tokens tokens = by_token ? tokens_of(dy, r, C) : Tokens{};
    if (C <= PING_PONG_WIDTH)
        by_token ? run<TokensA<DgradSwigluPingPong>>(rows, w, to, g, tokens, ctx)
                 : run<DgradSwigluPingPong>(rows, w, to, g, tokens, ctx);
    else
        by_token ? run<TokensA<DgradSwiglu>>(rows, w, to, g, tokens, ctx)
                 : run<DgradSwiglu>(rows, w, to, g, tokens, ctx);
    return parts;
}

// The contraction runs over whole k blocks of 64 rows. Pad rows at an expert's end are zeros in dy and x and add
// nothing.
template <typename Out>
static void wgrad(Out* dw, const floatX* dy, const floatX* x, GroupedRows order, Ragged r, int64_t IC, int64_t OC,
                  int accumulate, Ctx* ctx) {
    if (!check_sizes(r, IC, OC))
        return accumulate ? void() : device_zero(dw, (size_t)(r.El * OC * IC) * sizeof(Out), ctx);
    if (ctx->portable) return grouped_gemm_portable_wgrad(dw, dy, x, r, IC, OC, accumulate, ctx);
    const Epilogue to = {matrix_map(dw, r.El, OC, IC, 16, ctx)};
    Groups g = groups_of(r, OC, IC, r.capacity, ctx);
    g.add = accumulate;
    const CUtensorMap a = matrix_map(dy, 0, r.capacity, OC, BOX, ctx), b = matrix_map(x, 0, r.capacity, IC, BOX, ctx);
    if (order == DY_BY_TOKEN)
        run<TokensA<Wgrad>, Out>(a, b, to, g, tokens_of(dy, r, OC), ctx);
    else if (order == X_BY_TOKEN)
        run<WgradTokensB, Out>(a, b, to, g, tokens_of(x, r, IC), ctx);
    else
        run<Wgrad, Out>(a, b, to, g, {}, ctx);
}

void grouped_gemm_wgrad(real* dw, floatX* rounded, const floatX* dy, const floatX* x, GroupedRows order, Ragged r,
                        int64_t IC, int64_t OC, int accumulate, Ctx* ctx) {
    rounded ? wgrad(rounded, dy, x, order, r, IC, OC, 0, ctx) : wgrad(dw, dy, x, order, r, IC, OC, accumulate, ctx);
}
