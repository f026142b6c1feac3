// Gather: helper warps of a grouped GEMM load an operand's rows by token (rows[r] = tokens[row_token[r]],
// grouped/permute.h). So no kernel writes the permuted rows first.
//
// TMA on Hopper cannot gather. The helpers copy each row in pieces of 16 bytes (cp.async) to the places where TMA would
// have put them, with its swizzle. A copy is asynchronous too: the helpers run ahead until all stages are full. When a
// thread's copies for a stage are done, the hardware arrives at the stage's full barrier for it. A gathered operand is
// not multicast: each block of a cluster gathers its own.
//
//     along the contraction (forward, dgrad)    A's rows are rows of the tile: their tokens are the same for each k
//     block over rows (wgrad)                         the contraction runs over the rows: 64 tokens for each k block
#pragma once

#include "device/mma.cuh"
#include "grouped/grouped_gemm_parts.cuh"

namespace {

enum { GATHER_WARPS = 2, GATHER_THREADS = 32 * GATHER_WARPS };

// The operand to gather: (tokens, columns).
struct Tokens {
    const floatX* x;
    const int32_t* row_token;  // of `rows` rows
    int rows, columns;
};

// Arrives at the barrier when all earlier copies of this thread are done.
__device__ __forceinline__ void arrive_after_copies(uint64_t* bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

// The helper warps: one work tile after another. Eight lanes copy 128 bytes of a row, a box's width. The two warps copy
// eight rows at a time: warp w has rows 4w .. 4w + 3 of them, so a thread's place in the swizzle never changes.
template <typename P>
__device__ __forceinline__ void gather(Shared& s, const Tokens& t) {
    enum { BOXES = 4, STEPS = BOX / 8 };  // at most; eight rows a step
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1, vector = lane % 8, row = 4 * warp + lane / 8;
    const int place = row * 128 + (vector ^ row) * 16;
    RingSlot<STAGES> stage = {0, 1};
    RingSlot<ITEMS> at = {0, 0};

    // The token of row i of 64 rows from `first` on, for lane l: step l / 4, row l % 4 of this warp's four.
    auto token_of = [&](int first) {
        const int r = first + lane / 4 * 8 + 4 * warp + lane % 4;
        return r < t.rows ? t.row_token[r] : -1;
    };
    // One box: its rows' tokens are in the lanes of `tokens`.
    auto copy_box = [&](uint8_t* to, int tokens, int column) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int token = __shfl_sync(0xffffffffu, tokens, 4 * step + lane / 8);
            const bool zeros = token < 0 || column >= t.columns;
            const floatX* from = t.x + (zeros ? 0 : (int64_t)token * t.columns + column);
            copy_async_16(to + step * (8 * 128), from, zeros ? 0 : 16);
        }
    };

    for (;;) {
        // The work tile, and the release of its slot.
        barrier_wait(&s.item_full_barriers[at.index], at.phase);
        const WorkItem& item = s.items[at.index];
        const int k_blocks = item.k_blocks, k = item.k, first = P::GATHER_A ? item.m : item.n;
        const int boxes = P::GATHER_A ? boxes_of_a(item.shape) : boxes_of_b<P>(item.shape);
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.item_empty_barriers[at.index]);
        if (k_blocks == 0) break;
        at.advance();

        // Along the contraction: the tokens of all rows of the tile.
        int tokens[BOXES];
        if (!P::OVER_ROWS)
#pragma unroll
            for (int i = 0; i < BOXES; i++) tokens[i] = i < boxes ? token_of(first + i * BOX) : -1;

        // Its boxes in each stage.
        uint8_t* front = s.stages[0] + (P::GATHER_A ? 0 : (STAGE_BOXES - boxes) * BOX_BYTES) + place;
        int next = P::OVER_ROWS ? token_of(k) : 0;  // over rows: the tokens of a k block are read one ahead
        for (int k_block = 0; k_block < k_blocks; k_block++) {
            const int k_now = k + k_block * P::BLOCK_K, over = next;
            if (P::OVER_ROWS && k_block + 1 < k_blocks) next = token_of(k_now + P::BLOCK_K);
            barrier_wait(&s.empty_barriers[stage.index], stage.phase);
            uint8_t* to = front + stage.index * STAGE_BYTES;
#pragma unroll
            for (int i = 0; i < BOXES; i++)
                if (i < boxes)
                    copy_box(to + i * BOX_BYTES, P::OVER_ROWS ? over : tokens[i],
                             (P::OVER_ROWS ? first + i * BOX : k_now) + vector * 8);
            arrive_after_copies(&s.full_barriers[stage.index]);
            stage.advance();
        }
        for (int i = 0; i < P::EPILOGUE_STAGES; i++) {  // nothing of these is gathered
            barrier_wait(&s.empty_barriers[stage.index], stage.phase);
            barrier_arrive(&s.full_barriers[stage.index]);
            stage.advance();
        }
    }
    __syncwarp();
}

}  // namespace
