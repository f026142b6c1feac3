// MXFP8 grouped GEMM on Hopper's fp8 tensor cores: one persistent, warp-specialized kernel over the ragged buffer. Work
// tiles, producer warp and rings are those of grouped/grouped_gemm.cu. Here are the consumer warpgroups and the scales.
//
//     y tile      =  sum over chunks c of        sx[row][c]  *  sw[tile][c]    *  (x chunk  w chunk^T)
//     256 x 128      float32, d in registers     one per row    one per w tile    wgmma m64n128k32, p in registers
//
// Hopper's tensor cores have no block scales, and their fp8 accumulators are short. So a k block is one chunk of 128.
// wgmma accumulates the chunk in p. Then d += p * both scales, one multiply-add per element and chunk (promotion to
// float32). Meanwhile the tensor cores work for the other warpgroup.
//
// Tiles are 256 x 128, or 128 x 128 at an expert's end. Registers suffice for p of 128 rows; 256 rows have two parts.
//
// Wgrad contracts over an expert's rows. Each chunk of 128 rows has a scale for every row of dW. Each 512-row scale
// group (four chunks) has one for every column:
//
//     dW tile  =  sum over groups g of  sb[g][column]  *  sum over chunks c of g:  sa[c][row]  *  (a chunk  b chunk^T)
//
// So d is kept relative to the current column scales. At each 512-row boundary it is rescaled from the old column scale
// to the new one. A second warp of the producer warpgroup writes these factors into the stage.
//
// Bound by the tensor cores under the card's power limit, and by the instructions that a warp issues next to wgmma. A
// chunk's wgmma take 512 clocks. A warp issues 205 instructions in them (wgrad 213, at a boundary 367), 128 for d.
#include "device/kernels.h"
#include "mx/grouped_gemm_blackwell.cuh"
#include "mx/grouped_gemm_mx.h"
#include "mx/grouped_gemm_mx_work.cuh"
#include "mx/mx_values.h"
#include "mx/mxfp8.h"

namespace {

enum { RUN = MX_RUN / MX_CHUNK };

// --- Scales: prefetched into registers ---
//
// wgmma leaves a row of the accumulator in four lanes, each with two rows of each part (device/wgmma.cuh). So these
// four lanes need the scales of four rows. Each loads one, and shuffles exchange them: lane % 4 = 2 * part, + 1 for the
// row 8 below. Only addresses depend on the lane, so that the mainloop's descriptors stay in uniform registers.

// The row of the work tile whose scale this lane loads.
__device__ __forceinline__ int row_of_lane(const WorkItem& item, int lane) {
    const int warp = threadIdx.x / 32 - 4, part = item.shape == TALL ? lane % 4 / 2 : 0;
    return part * SQUARE_SIDE + warp * 16 + lane / 4 + lane % 2 * 8;
}

// Scales of forward and dgrad: x has one per row and chunk, W one per tile of 128 x 128 (mx/grouped_gemm_mx.h).
struct SquareScales {
    enum { BY_COLUMN = 0 };
    struct Tensors {
        const uint8_t *x, *w;
        int64_t x_stride;                        // bytes per row
        int w_stride_e, w_stride_o, w_stride_c;  // from expert to expert, from tile to tile along OC and along IC
    };

    // A lane loads the scales of four chunks at a time: 16 bytes of x's scales. W's scale is common to the whole tile,
    // so each of the four lanes loads that of one chunk.
    const uint4* x;
    const uint8_t* w;
    uint4 x_next;  // of the next four chunks: loads in flight
    uint32_t w_next;
    uint32_t sx;  // scale bytes of the current four chunks, the current one lowest
    float sw;     // W's scale of chunk lane % 4 of these four

    // Starts the first loads for the next tile.
    __device__ __forceinline__ void begin(const WorkItem& item, const Tensors& t, int lane) {
        x = (const uint4*)(t.x + (item.m + row_of_lane(item, lane)) * t.x_stride);
        w = t.w + (item.expert * t.w_stride_e + (uint32_t)item.n / SQUARE_SIDE * t.w_stride_o);
        read(0, item.k_blocks, t, lane);
    }
    __device__ __forceinline__ void start(int k_blocks, const Tensors& t, int lane) { go_on(0, k_blocks, t, lane); }

    // The current chunk's sx * sw. sw comes from another of the four lanes by a shuffle. Infinity becomes NaN.
    __device__ __forceinline__ float take(int k_block) {
        float scale = power(sx) * __shfl_sync(0xffffffffu, sw, k_block, 4);
        scale = fmaf(scale, 0, scale);
        sx >>= 8;
        return scale;
    }
    // Prefetches the scales of the following chunks while wgmma runs.
    __device__ __forceinline__ void ahead(int k_block, int k_blocks, const Tensors& t, int lane) {
        if (k_block % 4 == 3) go_on(k_block / 4 + 1, k_blocks, t, lane);
    }

   private:
    // 2^(s - 127) of the low byte (2^-127, the smallest, has no exponent bits); 255 gives infinity.
    __device__ __forceinline__ static float power(uint32_t s) {
        return fmaxf(__uint_as_float(s << 23 & 0x7f800000), 0x1p-127f);
    }
    // Starts the loads for chunks 4 * quad .. 4 * quad + 3. Past the end of a row the last ones are loaded again.
    __device__ __forceinline__ void read(int quad, int k_blocks, const Tensors& t, int lane) {
        x_next = x[min(quad, (k_blocks - 1) / 4)];
        w_next = w[min(4 * quad + lane % 4, k_blocks - 1) * t.w_stride_c];
    }
    // Takes the loaded scales, and starts the next loads. The four bytes of a chunk are equal, so one of each is kept.
    __device__ __forceinline__ void go_on(int quad, int k_blocks, const Tensors& t, int lane) {
        sx = __byte_perm(__byte_perm(x_next.x, x_next.y, 0x0040), __byte_perm(x_next.z, x_next.w, 0x0040), 0x5410);
        sw = power(w_next);
        read(quad + 1, k_blocks, t, lane);
    }
};

// Scales of wgrad: those of A's rows are prefetched two chunks ahead. Those of B's columns are in shared memory.
struct ChannelScales {
    enum { BY_COLUMN = 1 };
    typedef Wgrads Tensors;

    const uint8_t* a;
    int M;
    uint32_t now, next;  // scale bytes of the current and the next chunk

    __device__ __forceinline__ void begin(const WorkItem& item, const Tensors& t, int lane) {
        const Matrix& of = t.of(item);
        M = of.M;
        const int row = min(item.m - of.a + row_of_lane(item, lane), M - 1);
        a = t.a + ((int64_t)of.a * t.chunks + (int64_t)(item.k / MX_CHUNK) * M + row);
        now = read(0, item.k_blocks);
        next = read(1, item.k_blocks);
    }
    __device__ __forceinline__ void start(int, const Tensors&, int) {}
    __device__ __forceinline__ float take(int) {
        const float scale = mx_scale_value(now);
        now = next;
        return scale;
    }
    __device__ __forceinline__ void ahead(int k_block, int k_blocks, const Tensors&, int) {
        next = read(k_block + 2, k_blocks);
    }

   private:
    __device__ __forceinline__ uint32_t read(int k_block, int k_blocks) const {
        return a[(uint64_t)(uint32_t)min(k_block, k_blocks - 1) * (uint32_t)M];
    }
};

// The factor of d where the column scale changes from 2^(now - 127) to 2^(next - 127): 2^(now - next). A zero block has
// scale 0: keep the current exponent. If the current one is 0, take the next. The factor is 1 in both cases.
__device__ __forceinline__ float change_unit(uint32_t& now, uint32_t next) {
    const uint32_t from = now;
    if (next) now = next;
    if (from == MX_NAN || next == MX_NAN) return __uint_as_float(0x7fffffff);
    if (from == 0 || next == 0) return 1;
    const int exponent = 127 + (int)from - (int)next;
    return __uint_as_float((uint32_t)max(0, min(255, exponent)) << 23);
}

// The second warp of the producer warpgroup: writes each column's factor into the stage, after every fourth k block and
// after the last. The order is the one in which consumer lanes read. j counts groups of 8 columns: consumer lane l has
// columns 8j + l % 4 * 2 and the next column, for every j (device/wgmma.cuh). A lane's four factors for two
// neighbouring j are adjacent in the stage.
__device__ __forceinline__ void fill_column_scales(Shared<Mx>& s, const Wgrads& t) {
    const int lane = threadIdx.x % 32;
    RingSlot<Mx::STAGES> stage = {0, 1};
    RingSlot<ITEMS> at = {0, 0};
    for (;;) {
        // The work item, this lane's four columns (a half of those of j = lane / 2), and their first scale bytes.
        barrier_wait(&s.item_full_barriers[at.index], at.phase);
        const WorkItem& item = s.items[at.index];
        const int k_blocks = item.k_blocks, to = lane / 4 * 16 + lane % 2 * 8 + lane / 2 % 2 * 2;
        if (k_blocks == 0) break;
        const Matrix& of = t.of(item);
        const int N = of.N, column = min(item.n - of.b + 4 * lane, N - 4);
        const uint8_t* from = t.b + ((int64_t)of.b * t.chunks + (int64_t)(item.k / MX_CHUNK) * N + column);
        const uint32_t first = *(const uint32_t*)from;
        uint32_t unit[4];
#pragma unroll
        for (int i = 0; i < 4; i++) unit[i] = first >> 8 * i & 0xff;

        // Scale loads are in flight while the stage is in use. The scale after the last k block is 1 (byte 0x7f).
        for (int k_block = 0; k_block < k_blocks; k_block++) {
            const bool last = k_block == k_blocks - 1, ends = last || k_block % RUN == RUN - 1;
            from += N;
            const uint32_t four = ends && !last ? *(const uint32_t*)from : 0x7f7f7f7f;
            barrier_wait(&s.empty_barriers[stage.index], stage.phase);
            if (ends) {
                float factor[4];
#pragma unroll
                for (int i = 0; i < 4; i++) factor[i] = change_unit(unit[i], four >> 8 * i & 0xff);
                float2* pair = (float2*)&s.extra.column_scales[stage.index][to];
                pair[0] = {factor[0], factor[1]};
                pair[2] = {factor[2], factor[3]};
            }
            __syncwarp();  // lane 0 arrives for all (racecheck reports a race, because it tracks each lane on its own)
            if (lane == 0) barrier_arrive(&s.full_barriers[stage.index]);
            stage.advance();
        }

        // Release the work item's slot to the producer.
        if (lane == 0) barrier_arrive(&s.item_empty_barriers[at.index]);
        at.advance();
    }
    __syncwarp();
}

// --- The consumer warpgroups ---

// wgmma_ss on e4m3 over k32, N 128, both operands K-major. Here the tensor cores keep only about 14 bits below the
// largest addend. So callers make long sums of short ones.
__device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WGMMA_REGS128 "}, %64, %65, p, 1, 1;\n}"
        : WGMMA_OUT128
        : "l"(a), "l"(b), "r"(accumulate));
}

// State of a consumer warp.
template <typename Scales>
struct Consumer {
    uint32_t a, b;   // descriptors of its operands in the first stage (low words; the high ones are constant)
    uint32_t empty;  // address of the first stage's empty barrier, in one of the cluster's two blocks
    RingSlot<Mx::STAGES> stage;
    RingSlot<ITEMS> at;
    Scales scales;
};

// d += p * row scale: `near` for row lane / 4, `far` for the row 8 below. Then d *= columns, unless NULL.
__device__ __forceinline__ void add_scaled(float (&d)[SQUARE_SIDE / 2], const float (&p)[SQUARE_SIDE / 2], float near,
                                           float far, const float* columns, int lane) {
#pragma unroll
    for (int i = 0; i < SQUARE_SIDE / 2; i += 8) {
        float of[4];  // factors of columns 8j + lane % 4 * 2 and the next, j = i / 4 and the next
        if (columns) *(float4*)of = ((const float4*)columns)[i / 8 * 4 + lane % 4];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            d[i + k] = fmaf(p[i + k], k & 2 ? far : near, d[i + k]);
            if (columns) d[i + k] *= of[k / 4 * 2 + k % 2];
        }
    }
}

// One chunk: d += p * scales. `overlap` runs while the last wgmma of a tile's LAST chunk are in flight. (The last chunk
// is outside of the loop. Inside, the compiler would give d and p registers of the same bank.)
template <int PARTS, bool LAST, typename Scales, typename Overlap>
__device__ __forceinline__ void add_chunk(Shared<Mx>& s, Consumer<Scales>& c, float (&d)[PARTS][SQUARE_SIDE / 2],
                                          int k_block, int k_blocks, const typename Scales::Tensors& tensors, int lane,
                                          Overlap overlap) {
    // Wait for the stage. After the last of four chunks the column scales change (`ends`).
    const bool ends = Scales::BY_COLUMN && (LAST || k_block % RUN == RUN - 1);
    const uint64_t high = wgmma_descriptor<64>(0, 0);
    float p[SQUARE_SIDE / 2], scale = 0;
    barrier_wait(&s.full_barriers[c.stage.index], c.stage.phase);
    const uint32_t at = c.stage.index * (Shared<Mx>::STAGE_BYTES / 16), a = c.a + at, b = c.b + at;

    // Release the stage to the producers of both blocks: one arrival per warp and block.
    auto release = [&] {
        if (lane < CLUSTER) barrier_arrive_cluster(c.empty + c.stage.index * sizeof(uint64_t));
    };

#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        // Issue wgmma: p = A B^T. A step of k32 is 32 bytes; descriptors count in units of 16.
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Mx::BLOCK_K / 32; k++)
            wgmma_e4m3_n128(p, high | (a + part * (2 * BOX_BYTES / 16) + k * 2), high | (b + k * 2), k > 0);
        wgmma_commit();

        // While wgmma runs: the row scales, exchanged between the four lanes of a row.
        if (part == 0) scale = c.scales.take(k_block);
        const float near = __shfl_sync(0xffffffffu, scale, part * 2, 4);
        const float far = __shfl_sync(0xffffffffu, scale, part * 2 + 1, 4);

        // Then prefetch the next scales, or run `overlap`.
        if (part == PARTS - 1 && !LAST) c.scales.ahead(k_block, k_blocks, tensors, lane);
        if (PARTS == 2 && part == 1 && LAST) overlap();

        // wgmma is done. After the last part the operands are no longer needed.
        wgmma_wait<0>();
        wgmma_pin(p);
        if (part == PARTS - 1 && !ends) release();
        if (ends)
            add_scaled(d[part], p, near, far, s.extra.column_scales[c.stage.index], lane);
        else
            add_scaled(d[part], p, near, far, NULL, lane);
    }

    // With column factors the stage is released only here, after all lanes have read them.
    if (ends) __syncwarp(), release();
    c.stage.advance();
}

// One tile: mainloop over the chunks, then the epilogue. With two parts the first is stored while the last wgmma of the
// second are in flight. Advances the consumer to the next work item.
template <int PARTS, typename Out, typename Scales>
__device__ __forceinline__ void compute(Shared<Mx>& s, Consumer<Scales>& c, const WorkItem& item,
                                        const typename Scales::Tensors& tensors, const CUtensorMap* out, int columns,
                                        Writer& writer) {
    // d = 0
    const int warp = threadIdx.x / 32 - 4, k_blocks = item.k_blocks, lane = writer.lane;
    float d[PARTS][SQUARE_SIDE / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < SQUARE_SIDE / 2; i++) d[part][i] = 0;

    // Epilogue of a part: dW_e = or += d; or y = d, zeros in pad rows. The item is read only here, to save registers.
    auto write_part = [&](int part) {
        if (!item.store) return;
        const int row = part * SQUARE_SIDE + warp * 16;
        if constexpr (Scales::BY_COLUMN) {
            const Matrix& of = tensors.of(item);
            const CUtensorMap* dw = out + tensors.map_of(item);
            const int m = item.m - of.a + row, depth = tensors.depth_of(item), add = tensors.add;
            write<Out, SQUARE_SIDE>(writer, d[part], item.n - of.b, of.N, 16,
                                    [&](const void* piece, int n) { tma_write(add, dw, piece, n, m, depth); });
        } else {
            const int m = item.m + row;
            write<Out, SQUARE_SIDE>(writer, d[part], item.n, columns, item.valid - row,
                                    [&](const void* piece, int n) { tma_store(out, piece, n, m); });
        }
    };
    auto first_part = [&] { write_part(0); };

    // Mainloop: d += every chunk.
    c.scales.start(k_blocks, tensors, lane);
    for (int k_block = 0; k_block < k_blocks - 1; k_block++)
        add_chunk<PARTS, false>(s, c, d, k_block, k_blocks, tensors, lane, first_part);
    add_chunk<PARTS, true>(s, c, d, k_blocks - 1, k_blocks, tensors, lane, first_part);

    // Prefetch the next item's scales, then store the last part.
    c.at.advance();
    barrier_wait(&s.item_full_barriers[c.at.index], c.at.phase);
    if (s.items[c.at.index].k_blocks) c.scales.begin(s.items[c.at.index], tensors, lane);
    write_part(PARTS - 1);
}

// A consumer warp: tile after tile.
template <typename Out, typename Scales>
__device__ __forceinline__ void consume(Shared<Mx>& s, const typename Scales::Tensors& tensors, const CUtensorMap* out,
                                        int columns) {
    // Descriptors of the operands in the first stage. They are equal in all lanes. The reduction makes that provable,
    // so the compiler keeps them in uniform registers.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    const uint32_t front = shared_address(s.stages), end = front + Shared<Mx>::STAGE_BYTES;
    Writer writer = {s.stores[warp], 0, lane};
    Consumer<Scales> c = {};
    c.a = __reduce_max_sync(0xffffffffu, (uint32_t)wgmma_descriptor<64>(front + warp / 4 * BOX_BYTES, 0));
    c.b = __reduce_max_sync(0xffffffffu, (uint32_t)wgmma_descriptor<64>(end - 2 * BOX_BYTES, 0));
    c.empty = cluster_address(s.empty_barriers, lane % CLUSTER);

    // Load the first work item's scales; compute() prefetches those of the others.
    barrier_wait(&s.item_full_barriers[0], 0);
    if (s.items[0].k_blocks) c.scales.begin(s.items[0], tensors, lane);
    for (;;) {
        const int at = c.at.index;
        const WorkItem& item = s.items[at];
        if (item.k_blocks == 0) break;
        if (item.shape == TALL)
            compute<2, Out>(s, c, item, tensors, out, columns, writer);
        else
            compute<1, Out>(s, c, item, tensors, out, columns, writer);

        // Release the work item's slot to the producer.
        __syncwarp();
        if (lane == 0) barrier_arrive(&s.item_empty_barriers[at]);
    }

    // Keep shared memory until TMA has read the last output boxes.
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
}

__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm_mx_kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap w,
                           const __grid_constant__ CUtensorMap out, const Groups g,
                           const SquareScales::Tensors scales) {
    run_block<Mx>(
        &x, &w, &out, g, [&](Shared<Mx>& s) { consume<floatX, SquareScales>(s, scales, &out, g.N); },
        [](Shared<Mx>&) {});
}

// TMA maps of the output: one for all experts, or one per matrix.
struct Outputs {
    CUtensorMap map[MX_MATRICES];
};

template <typename Out>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm_mx_wgrad_kernel(const __grid_constant__ CUtensorMap dy, const __grid_constant__ CUtensorMap x,
                                 const __grid_constant__ Outputs dw, const __grid_constant__ Wgrads g) {
    run_block<MxWgrad, WgradScheduler>(
        &dy, &x, dw.map, g, [&](Shared<Mx>& s) { consume<Out, ChannelScales>(s, g, dw.map, g.N); },
        [&](Shared<Mx>& s) { fill_column_scales(s, g); });
}

// dW = 0 for experts without rows: no work item writes it. blockIdx.y is the expert; its dW has `size` vectors.
__global__ void __launch_bounds__(256) zero_without_rows(uint4* dw, const int32_t* rows, int64_t size) {
    wait_for_previous();
    if (rows[blockIdx.y] > 0) return;
    dw += blockIdx.y * size;
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < size; i += gridDim.x * (int64_t)256) dw[i] = {};
}

}  // namespace

char* grouped_gemm_mx_missing(Ctx* ctx) { return kernels_without_fast(ctx->capability, ctx->portable); }

const char* grouped_gemm_mx_unreplayed(Ctx* ctx) {
    return has_block_scales(ctx) ? "MXFP8 GEMMs wait for their sizes on this GPU" : NULL;
}

void grouped_gemm_mx(floatX* y, MxBytes x, MxTiles w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    ASSERT(IC > 0 && IC % MX_BLOCK == 0 && OC > 0 && OC % 8 == 0);
    if (r.capacity == 0 || r.El == 0) return;
    if (has_block_scales(ctx)) return grouped_gemm_lt_mx(y, x, w, r, IC, OC, ctx);

    // W's scales: expert after expert, within an expert the caller's strides.
    const int squares = (int)(mx_tiles(OC) * mx_tiles(IC));
    const SquareScales::Tensors scales = {x.scale, w.scale, mx_stride(IC), squares, (int)w.stride_o, (int)w.stride_c};

    const CUtensorMap from = matrix_map(x.q, 0, r.capacity, IC, BOX, ctx), by = matrix_map(w.q, r.El, OC, IC, BOX, ctx);
    const Groups g = groups_of(r, 0, OC, IC, ctx);
    launch<Mx>(grouped_gemm_mx_kernel, ctx, from, by, matrix_map(y, 0, r.capacity, OC, 16, ctx), g, scales);
}

template <typename Out>
static void wgrad(Out* dw, MxBytes dy, MxBytes x, int64_t length, Ragged r, int64_t IC, int64_t OC, int add, Ctx* ctx) {
    ASSERT(IC > 0 && IC % MX_BLOCK == 0 && OC > 0 && OC % MX_BLOCK == 0 && length % MX_CHUNK == 0);
    ASSERT(r.El <= MAX_EXPERTS && length >= r.capacity);
    if (r.capacity == 0 || r.El == 0)
        return add ? void() : device_zero(dw, (size_t)(r.El * OC * IC) * sizeof(Out), ctx);
    if (has_block_scales(ctx)) return grouped_gemm_lt_mx_wgrad(dw, dy, x, length, r, IC, OC, add, ctx);
    const int64_t vectors = OC * IC * (int64_t)sizeof(Out) / (int64_t)sizeof(uint4);
    if (!add) launch_early(zero_without_rows, dim3(16, r.El), 256, 0, ctx, (uint4*)dw, r.group_rows, vectors);
    Wgrads g = {groups_of(r, OC, IC, 0, ctx), dy.scale, x.scale, (int)(length / MX_CHUNK), 1};
    g.list[0] = {(int)OC, (int)IC, 0, 0};
    g.add = add;
    launch<MxWgrad>(grouped_gemm_mx_wgrad_kernel<Out>, ctx, matrix_map(dy.q, 0, OC, length, BOX, ctx),
                    matrix_map(x.q, 0, IC, length, BOX, ctx), Outputs{{matrix_map(dw, r.El, OC, IC, 16, ctx)}}, g);
}

void grouped_gemm_mx_wgrad(real* dw, floatX* rounded, MxBytes dy, MxBytes x, int64_t length, Ragged r, int64_t IC,
                           int64_t OC, int accumulate, Ctx* ctx) {
    rounded ? wgrad(rounded, dy, x, length, r, IC, OC, 0, ctx) : wgrad(dw, dy, x, length, r, IC, OC, accumulate, ctx);
}

void gemm_mx_wgrads(const MxMatrix* list, int count, MxBytes dy, MxBytes x, int64_t length, Ragged r, int accumulate,
                    Ctx* ctx) {
    ASSERT(r.El == 1 && count >= 1 && count <= MX_MATRICES && length % MX_CHUNK == 0 && length >= r.capacity);
    if (r.capacity == 0 || has_block_scales(ctx)) return mx_one_by_one(list, count, dy, x, length, r, accumulate, ctx);

    Wgrads g = {groups_of(r, list[0].OC, list[0].IC, 0, ctx), dy.scale, x.scale, (int)(length / MX_CHUNK), count};
    g.add = accumulate;
    Outputs outputs;
    int64_t of_dy = 0, of_x = 0;
    for (int i = 0; i < count; i++) {
        const MxMatrix m = list[i];
        ASSERT(m.IC > 0 && m.IC % MX_BLOCK == 0 && m.OC > 0 && m.OC % MX_BLOCK == 0);
        g.list[i] = {(int)m.OC, (int)m.IC, (int)m.dy, (int)m.x};
        outputs.map[i] = matrix_map(m.dw, 1, m.OC, m.IC, 16, ctx);
        of_dy = max_i64(of_dy, m.dy + m.OC);
        of_x = max_i64(of_x, m.x + m.IC);
    }
    launch<MxWgrad>(grouped_gemm_mx_wgrad_kernel<real>, ctx, matrix_map(dy.q, 0, of_dy, length, BOX, ctx),
                    matrix_map(x.q, 0, of_x, length, BOX, ctx), outputs, g);
}
