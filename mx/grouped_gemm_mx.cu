// Grouped products of MXFP8 bytes on the tensor cores: one persistent kernel over the ragged buffer. Work items, the
// warp that loads and the rings are those of grouped/grouped_gemm.cu, whose opening draws them; this file is what the
// warpgroups that multiply do differently.
//
//     y tile      =  sum over chunks c of        sx[row][c]  *  sw[square][c]  *  (x chunk  w chunk^T)
//     256 x 128      float32, d in registers     one a row      one a square      wgmma m64n128k32, p in registers
//
// Hopper's tensor cores know no scales and keep few bits in fp8 sums. So a k block is one chunk of 128: its products
// are summed by themselves, p, and then added to the tile's sums, d, times both scales: a multiply-add for each element
// and chunk. While one warpgroup does that, the tensor cores work for the other. Registers have no room for a p twice
// as wide: tiles are 256 x 128, or 128 x 128 where an expert has no more rows, and go through p in parts of 128 rows.
//
// Bound by the tensor cores under the card's power limit and by what is issued beside them: a warp's 205 instructions
// for a chunk, 128 of them the multiply-adds, in the 512 clocks that its products take.
#include "blackwell/grouped_gemm_lt.cuh"
#include "grouped/grouped_gemm_parts.cuh"
#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"

namespace {

// The scales of x, one for each row and chunk, and of W, one for each square of 128 x 128 (mx/grouped_gemm_mx.h).
struct ScaleTensors {
    const uint8_t *x, *w;
    int64_t x_stride;                        // bytes of a row
    int w_stride_e, w_stride_o, w_stride_c;  // from expert to expert, from square to square along OC and along IC
};

// --- Scales: read four chunks ahead ---

// wgmma leaves the sums of a row in four lanes, and each of the four holds two rows of each part (device/wgmma.cuh).
// Between them these lanes need the scales of four rows: lane % 4 says for which one a lane reads, 2 * part, + 1 for
// the row 8 below. It reads four chunks at a time, 16 bytes of x's scales. Of W's scales, which the whole tile has in
// common, each of the four lanes reads that of one chunk.
struct Scales {
    const uint4* x;
    const uint8_t* w;
    uint4 x_next;  // bytes of the next four chunks: on their way
    uint32_t w_next;
    uint32_t sx;  // bytes of these four chunks, the one at hand lowest
    float sw;     // of chunk lane % 4 of these four
};

// Begins to read for chunks 4 * quad and on. Where a row ends, the last ones are read again. Nothing here depends on
// the lane but addresses: else the compiler would no longer keep the main loop's descriptors in uniform registers.
__device__ __forceinline__ void load_scales(Scales& c, int quad, int k_blocks, int w_stride, int lane) {
    c.x_next = c.x[min(quad, (k_blocks - 1) / 4)];
    c.w_next = c.w[min(4 * quad + lane % 4, k_blocks - 1) * w_stride];
}

// 2^(s - 127) of the low byte (2^-127, the smallest, has no exponent bits); 255 gives infinity.
__device__ __forceinline__ float power(uint32_t s) { return fmaxf(__uint_as_float(s << 23 & 0x7f800000), 0x1p-127f); }

// Takes up what load_scales read, and reads on. The four bytes of a chunk are equal: one of each is kept.
__device__ __forceinline__ void next_scales(Scales& c, int quad, int k_blocks, int w_stride, int lane) {
    c.sx =
        __byte_perm(__byte_perm(c.x_next.x, c.x_next.y, 0x0040), __byte_perm(c.x_next.z, c.x_next.w, 0x0040), 0x5410);
    c.sw = power(c.w_next);
    load_scales(c, quad + 1, k_blocks, w_stride, lane);
}

// --- The warpgroups that multiply ---

// Where a warp that multiplies stands.
struct Consumer {
    uint32_t a, b;   // descriptors of its operands in the first stage (low words; the high ones are constant)
    uint32_t empty;  // address of the first stage's empty barrier, in one of the two blocks
    Place<STAGES> stage;
    Place<ITEMS> at;
    Scales scales;
};

// Begins with the scales of `next`, the tile to come. Called before the present tile's last part is written, so that
// they are there in time.
__device__ __forceinline__ void begin_scales(Scales& c, const WorkItem& next, const ScaleTensors& scales) {
    const int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, part = next.shape == TALL ? lane % 4 / 2 : 0;
    const int row = next.m + part * SQUARE_SIDE + warp * 16 + lane / 4 + lane % 2 * 8;
    c.x = (const uint4*)(scales.x + row * scales.x_stride);
    c.w = scales.w + (next.expert * scales.w_stride_e + (uint32_t)next.n / SQUARE_SIDE * scales.w_stride_o);
    load_scales(c, 0, next.k_blocks, scales.w_stride_c, lane);
}

// d += sx sw p for the chunk at hand. `beside` runs while the last products of a tile's LAST chunk do. (That chunk is
// not in the loop of the others: there the compiler would give d and p registers of the same bank.)
template <int PARTS, bool LAST, typename Beside>
__device__ __forceinline__ void add_chunk(Shared& s, Consumer& c, float (&d)[PARTS][SQUARE_SIDE / 2], int k_block,
                                          int k_blocks, int w_stride, int lane, Beside beside) {
    // The chunk's operands are in this stage.
    const uint64_t high = wgmma_descriptor<64>(0, 0);
    float p[SQUARE_SIDE / 2], scale = 0;
    barrier_wait(&s.full_barriers[c.stage.index], c.stage.phase);
    const uint32_t at = c.stage.index * (STAGE_BYTES / 16), a = c.a + at, b = c.b + at;

#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        // p = the products, asynchronously. A step of k32 is 32 bytes; descriptors count in 16.
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K<MX> / 32; k++)
            wgmma_e4m3_n128(p, high | (a + part * (2 * BOX_BYTES / 16) + k * 2), high | (b + k * 2), k > 0);
        wgmma_commit();

        // Meanwhile sx sw, of the row that this lane reads for; its four lanes exchange theirs. Infinity becomes NaN.
        if (part == 0) {
            scale = power(c.scales.sx) * __shfl_sync(0xffffffffu, c.scales.sw, k_block, 4);
            scale = fmaf(scale, 0, scale);
            c.scales.sx >>= 8;
        }
        const float near = __shfl_sync(0xffffffffu, scale, part * 2, 4);
        const float far = __shfl_sync(0xffffffffu, scale, part * 2 + 1, 4);

        // Meanwhile what comes next: the following scales, or `beside`.
        if (part == PARTS - 1 && !LAST && k_block % 4 == 3)
            next_scales(c.scales, k_block / 4 + 1, k_blocks, w_stride, lane);
        if (part == PARTS - 1 && LAST) beside();

        // The products are there. After the last ones the stage may be overwritten, here and by the neighbour: one
        // arrival per warp and block.
        wgmma_wait<0>();
        wgmma_pin(p);
        if (part == PARTS - 1 && lane < CLUSTER) barrier_arrive_cluster(c.empty + c.stage.index * sizeof(uint64_t));

#pragma unroll
        // d += sx sw p: `near` is of row lane / 4, `far` of the one 8 below.
        for (int i = 0; i < SQUARE_SIDE / 2; i++) d[part][i] = fmaf(p[i], i & 2 ? far : near, d[part][i]);
    }
    c.stage.advance();
}

// One tile, from its first chunk to the output; of two parts the first leaves while the second's last products run.
// Leaves the consumer at the next work item.
template <int PARTS, typename Out>
__device__ __forceinline__ void compute(Shared& s, Consumer& c, const WorkItem& item, const ScaleTensors& scales,
                                        const CUtensorMap* out, int columns, Writer& writer) {
    // d = 0
    const int warp = threadIdx.x / 32 - 4, k_blocks = item.k_blocks, lane = writer.lane;
    float d[PARTS][SQUARE_SIDE / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < SQUARE_SIDE / 2; i++) d[part][i] = 0;

    // y = d, with zeros for pad rows. (The item is read from shared memory only here: registers are short.)
    auto write_part = [&](int part) {
        if (!item.store) return;
        const int row = part * SQUARE_SIDE + warp * 16, m = item.m + row;
        write<Out, SQUARE_SIDE>(writer, d[part], item.n, columns, item.valid - row,
                                [&](const void* piece, int n) { tma_store(out, piece, n, m); });
    };
    auto first_part = [&] {
        if (PARTS == 2) write_part(0);
    };

    // d += every chunk.
    next_scales(c.scales, 0, k_blocks, scales.w_stride_c, lane);
    for (int k_block = 0; k_block < k_blocks - 1; k_block++)
        add_chunk<PARTS, false>(s, c, d, k_block, k_blocks, scales.w_stride_c, lane, first_part);
    add_chunk<PARTS, true>(s, c, d, k_blocks - 1, k_blocks, scales.w_stride_c, lane, first_part);

    // The next item's scales are on their way while the last part leaves.
    c.at.advance();
    barrier_wait(&s.item_full_barriers[c.at.index], c.at.phase);
    if (s.items[c.at.index].k_blocks) begin_scales(c.scales, s.items[c.at.index], scales);
    write_part(PARTS - 1);
}

// What a warp that multiplies does: tile after tile.
template <typename Out>
__device__ __forceinline__ void consume(Shared& s, const ScaleTensors& scales, const CUtensorMap* out, int columns) {
    // Where its operands lie in the first stage. That is the same in all lanes: as a reduction's result the compiler
    // knows it.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    const uint32_t front = shared_address(s.stages), end = front + STAGE_BYTES;
    Writer writer = {s.pieces[warp], 0, lane};
    Consumer c = {};
    c.a = __reduce_max_sync(0xffffffffu, (uint32_t)wgmma_descriptor<64>(front + warp / 4 * BOX_BYTES, 0));
    c.b = __reduce_max_sync(0xffffffffu, (uint32_t)wgmma_descriptor<64>(end - 2 * BOX_BYTES, 0));
    c.empty = cluster_address(s.empty_barriers, lane % CLUSTER);

    // The first work item's scales; compute() sees to those of the others.
    barrier_wait(&s.item_full_barriers[0], 0);
    if (s.items[0].k_blocks) begin_scales(c.scales, s.items[0], scales);
    for (;;) {
        // A tile.
        const int at = c.at.index;
        const WorkItem& item = s.items[at];
        if (item.k_blocks == 0) break;
        if (item.shape == TALL)
            compute<2, Out>(s, c, item, scales, out, columns, writer);
        else
            compute<1, Out>(s, c, item, scales, out, columns, writer);

        // The producer may write another item there.
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.item_empty_barriers[at]);
    }

    // Shared memory stays until TMA has read the last pieces.
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
}

template <typename Out>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm_mx_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                           const __grid_constant__ CUtensorMap out, const Groups g, const ScaleTensors scales) {
    run_block<MX>(&x, &w, &out, g, [&](Shared& s) { consume<Out>(s, scales, &out, g.N); });
}

}  // namespace

void grouped_gemm_mx(floatX* y, real* y_real, const uint8_t* x, const uint8_t* x_scale, const uint8_t* w,
                     const uint8_t* w_scale, int64_t w_stride_o, int64_t w_stride_c, Ragged r, int64_t IC, int64_t OC,
                     Ctx* ctx) {
    ASSERT(IC > 0 && IC % MX_BLOCK == 0 && OC > 0 && OC % 8 == 0);
    if (r.capacity == 0 || r.El == 0) return;
    if (ctx->blackwell)
        return grouped_gemm_lt_mx(y, y_real, x, x_scale, w, w_scale, w_stride_o, w_stride_c, r, IC, OC, ctx);

    // The scales of W's squares: expert after expert, then as the caller strides.
    const int squares = (int)(mx_tiles(OC) * mx_tiles(IC));
    const ScaleTensors scales = {x_scale, w_scale, mx_stride(IC), squares, (int)w_stride_o, (int)w_stride_c};

    // y in the type that is asked for.
    const CUtensorMap from = matrix_map(x, 0, r.capacity, IC, BOX, ctx), by = matrix_map(w, r.El, OC, IC, BOX, ctx);
    const Groups g = groups_of(r, 0, OC, IC, ctx);
    if (y)
        launch(grouped_gemm_mx_kernel<floatX>, ctx, from, by, matrix_map(y, 0, r.capacity, OC, 16, ctx), g, scales);
    else
        launch(grouped_gemm_mx_kernel<real>, ctx, from, by, matrix_map(y_real, 0, r.capacity, OC, 16, ctx), g, scales);
}
