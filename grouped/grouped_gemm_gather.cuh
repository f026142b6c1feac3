// Gather: helper warps of a grouped GEMM load an operand's rows by token (rows[r] = tokens[row_token[r]],
// grouped/permute.h). So no kernel writes the permuted rows first.
//
// TMA on Hopper cannot gather. The helpers copy each row in vectors of 16 bytes (cp.async) to the places where TMA
// would have put them, with its swizzle. Like TMA, cp.async is asynchronous: the helpers run ahead until all stages are
// full. When a thread's copies for a stage are done, the hardware arrives at the stage's full barrier for the thread. A
// gathered operand is not multicast: each block of a cluster gathers its own.
//
//     along the contraction (forward, dgrad)    A's rows are rows of the tile: the same tokens for each k block
//     over rows (wgrad)                         the contraction runs over the rows: 64 tokens for each k block
#pragma once

#include "device/mma.cuh"
#include "grouped/grouped_gemm_parts.cuh"

namespace {

enum { GATHER_WARPS = 2, GATHER_THREADS = 32 * GATHER_WARPS };

// The operand to gather: (tokens, columns), below 2^31 vectors of eight.
struct Tokens {
    const floatX* x;
    const int32_t* row_token;  // of `rows` rows
    int rows, columns;
};

// Arrives at the barrier when all earlier copies of this thread are done.
__device__ __forceinline__ void arrive_after_copies(uint64_t* bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

// Copies the operand's boxes of a tile, stage after stage. Eight lanes copy 128 bytes of a row, a box's width. The two
// warps copy eight rows at a time: warp w has rows 4w .. 4w + 3 of them, so a thread's place in the swizzle never
// changes.
template <typename P>
__device__ __forceinline__ void gather_tile(Shared<P>& s, const Tokens& t, const WorkItem& tile,
                                            RingSlot<P::STAGES>& stage) {
    enum { BOXES = P::PING_PONG ? 2 : 4, STEPS = BOX / 8 };  // at most; eight rows a step
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 1, vector = lane % 8, row = 4 * warp + lane / 8;
    const int vectors = t.columns / 8, first = P::GATHER_A ? tile.m : tile.n;
    const int boxes = P::GATHER_A ? boxes_of_a(tile.shape) : boxes_of_b<P>(tile.shape);
    uint8_t* front =
        s.stages[0] + (P::GATHER_A ? 0 : (P::STAGE_BOXES - boxes) * BOX_BYTES) + row * 128 + (vector ^ row) * 16;

    // The token of row i of 64 rows from `from` on, for lane l: step l / 4, row l % 4 of this warp's four.
    auto token_of = [&](int from) {
        const int r = from + lane / 4 * 8 + 4 * warp + lane % 4;
        return r < t.rows ? t.row_token[r] : -1;
    };
    // The first vector of this thread's row in a step, from the tokens in the lanes; -1: the row is zeros.
    auto place_of = [&](int tokens, int step) {
        const int token = __shfl_sync(0xffffffffu, tokens, 4 * step + lane / 8);
        return token < 0 ? -1 : token * vectors;
    };
    auto copy = [&](uint8_t* to, int place, int column) {
        uint64_t from;  // x + place + column; the compiler's own form takes twice the instructions
        asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(from) : "r"(place), "l"((const uint4*)t.x + column));
        copy_async_16(to, (const void*)from, place < 0 || column >= vectors ? 0 : 16);
    };

    // Along the contraction the rows are the same in each stage. The places of the first two boxes stay in registers.
    int tokens[BOXES], places[2][STEPS];
#pragma unroll
    for (int i = 0; i < BOXES && !P::OVER_ROWS; i++) tokens[i] = i < boxes ? token_of(first + i * BOX) : -1;
#pragma unroll
    for (int i = 0; i < 2 * STEPS && !P::OVER_ROWS; i++)
        places[i / STEPS][i % STEPS] = place_of(tokens[i / STEPS], i % STEPS);

    int next = P::OVER_ROWS ? token_of(tile.k) : 0;  // over rows: the tokens of a k block are read one ahead
    for (int k_block = 0; k_block < tile.k_blocks; k_block++) {
        const int k = tile.k + k_block * P::BLOCK_K, over = next;
        if (P::OVER_ROWS && k_block + 1 < tile.k_blocks) next = token_of(k + P::BLOCK_K);
#pragma unroll
        for (int step = 0; step < STEPS && P::OVER_ROWS; step++) places[0][step] = place_of(over, step);
        barrier_wait(&s.empty_barriers[stage.index], stage.phase);
        uint8_t* to = front + stage.index * Shared<P>::STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < BOXES; i++)
#pragma unroll
            for (int step = 0; step < STEPS && i < boxes; step++)
                copy(to + i * BOX_BYTES + step * (8 * 128),
                     P::OVER_ROWS ? places[0][step]
                     : i < 2      ? places[i % 2][step]
                                  : place_of(tokens[i], step),
                     (P::OVER_ROWS ? first + i * BOX : k) / 8 + vector);
        arrive_after_copies(&s.full_barriers[stage.index]);
        stage.advance();
    }
    for (int i = 0; i < P::EPILOGUE_STAGES; i++) {  // nothing of epilogue stages is gathered
        barrier_wait(&s.empty_barriers[stage.index], stage.phase);
        barrier_arrive(&s.full_barriers[stage.index]);
        stage.advance();
    }
}

// The helper warps: one work tile after another.
template <typename P>
__device__ __forceinline__ void gather(Shared<P>& s, const Tokens& t) {
    RingSlot<P::STAGES> stage = {0, 1};
    RingSlot<ITEMS> at = {0, 0};
    for (;;) {
        // The work tile, and the release of its slot.
        barrier_wait(&s.item_full_barriers[at.index], at.phase);
        const WorkItem item = s.items[at.index];
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(&s.item_empty_barriers[at.index]);
        if (item.k_blocks == 0) break;
        at.advance();
        for (int i = 0; i < tiles_of<P>(item); i++) gather_tile<P>(s, t, tile_of<P>(item, i), stage);
    }
    __syncwarp();
}

}  // namespace
