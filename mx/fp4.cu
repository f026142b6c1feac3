// Four-bit fake quantization. A pass reads x once, lines of a block for each thread, and keeps them in registers. The
// pass is bound by memory along rows, by instructions in the transform and in stochastic rounding. Bytes per element:
//
//     MXFP4                  4
//     NVFP4                  6: a pass before finds the largest magnitude of each group
//     the transposed copy   +2
//
// Lines along a row come in accesses of 16 bytes. A thread has two lines down neighbouring columns. An access reads one
// element of each line, so a warp reads 64 neighbouring elements. The lines of a tile are in neighbouring lanes, which
// find its scale by shuffles. The transform is computed in registers, in both passes.
//
// Thread blocks of one grid row walk over a group, because only the device knows the group's rows. The second pass
// begins with the last group: the end of x is still in the L2 cache.
#include "layers/rows.cuh"
#include "mx/fp4_values.h"

// Threads of a block; elements of a thread, if groups are equal.
enum { THREADS = 256, ELEMENTS = 64, STATS_SUMS = sizeof(QuantizationStats) / sizeof(double) };

// The use of the lines: AMAX finds the bits of the largest magnitude of each group, in amax (groups), from zeros.
enum Use { AMAX, VALUES, STATS };

// f(*p, k) for the elements k of a line that are inside of its group, from p on and `step` apart. A whole line has no
// branches, so that its loads go out together. The empty asm hides the value of `step`. Otherwise nvcc computes
// multiples of `step` by 64-bit products, which take more instructions than sums.
template <int N, typename T, typename F>
static __device__ __forceinline__ void each_inside(T* p, int64_t step, int32_t inside, F f) {
    if (inside >= N) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            f(*p, k);
            asm("" : "+l"(step));
            p += step;
        }
    } else {
#pragma unroll
        for (int k = 0; k < N; k++)
            if (k < inside) f(p[k * step], k);
    }
}

// Blocks of HIGH x WIDE. LANES lanes, with a line each, share a scale. A thread has two neighbouring columns, or one
// line of another shape.
template <int HIGH, int WIDE, int LANES, Use USE>
static __global__ void __launch_bounds__(THREADS, HIGH > 16 || WIDE > 16 || USE == STATS ? 2 : 4)
    lines_kernel(Fp4Work w, uint32_t* amax) {
    wait_for_previous();
    constexpr int N = WIDE > 1 ? WIDE : HIGH, LINES = WIDE > 1 ? 1 : 2;
    QuantizationStats sums = {};
    for (int32_t y = (int32_t)blockIdx.y; y < w.groups.El; y += (int32_t)gridDim.y) {
        const int32_t g = USE == AMAX ? y : w.groups.El - 1 - y;
        const Fp4Group group = fp4_group(&w, g, HIGH, WIDE);
        const Fp4Scale tensor = N == 16 && USE != AMAX ? nvfp4_tensor(amax[g]) : Fp4Scale{};
        uint32_t largest = 0;

        // Whole warps, for the shuffles. A line after the last one is empty.
        for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i / 32 * 32 < group.lines / LINES;
             i += gridDim.x * THREADS) {
            const Fp4Line line = fp4_line(group, i * LINES);
            const int64_t at = (group.first + line.row) * group.columns + line.column;
            float v[LINES][N] = {}, value[LINES][N];
            if constexpr (LINES == 2)
                each_inside<N>((const uint32_t*)(w.x + at), group.columns / 2, line.inside, [&](uint32_t x, int k) {
                    v[0][k] = float_of_bits(x << 16), v[1][k] = float_of_bits(x & 0xffff0000);
                });
            else if (line.inside > 0)
                for (int k = 0; k < N; k += 8) load(v[0] + k, w.x + at + k);

#pragma unroll
            for (int l = 0; l < LINES; l++) {
                uint32_t block = fp4_prepare(v[l], N, line);
                largest = max(largest, block);
                if constexpr (USE == AMAX) continue;

                // The block's scale.
                if constexpr (LANES > 1)
                    for (int lane = LANES / 2; lane; lane /= 2)
                        block = max(block, __shfl_xor_sync(0xffffffffu, block, lane));
                const Fp4Scale s = N == 16 ? nvfp4_scale(tensor, block) : mxfp4_scale(w.blocks.scale, block);
                fp4_values(value[l], v[l], N, WIDE, s, &w, g, {line.row, line.column + l, line.inside, line.own});
                for (int k = 0; k < N && USE == STATS; k++)
                    stats_add(&sums, v[l][k], v[l][k] * s.inverse, 6, value[l][k]);
            }

            // The values, also transposed.
            if constexpr (USE == VALUES && LINES == 2) {
                each_inside<N>((__nv_bfloat162*)(w.out + at), group.columns / 2, line.inside,
                               [&](auto& out, int k) { out = __floats2bfloat162_rn(value[0][k], value[1][k]); });
            } else if (USE == VALUES && line.inside > 0) {
                for (int k = 0; k < N; k += 8) store(w.out + at + k, value[0] + k);
                floatX* back = w.back + (g * w.columns + line.column) * group.rows + line.row;
                if (w.back) each_inside<N>(back, group.rows, N, [&](floatX& out, int k) { out = value[0][k]; });
            }
        }
        if constexpr (USE == AMAX) {
            largest = __reduce_max_sync(0xffffffffu, largest);
            if (threadIdx.x % 32 == 0 && largest) atomicMax(amax + g, largest);
        }
    }

    for (int k = 0; k < STATS_SUMS && USE == STATS; k++) {
        const double sum = block_sum(((const double*)&sums)[k]);
        if (threadIdx.x == 0) ((double*)w.stats)[k] += sum;
    }
}

// Finds the largest magnitudes of NVFP4's groups, in the workspace, then launches the kernel for these blocks of N.
template <int N>
static void run(Fp4Work w, Ctx* ctx) {
    // Whole 16 bytes of words are set to zero by a kernel and not by a memset, after which no kernel starts early.
    uint32_t* amax = ctx_workspace<uint32_t>(ctx, round_up(w.groups.El, 4));
    // A row of the grid for each group. One thread block for statistics, which are rare: equal bits on every run.
    const int64_t all = w.groups.capacity * w.columns, each = w.groups.group_start ? ceil_div(all, w.groups.El) : all;
    const dim3 grid(walking_blocks(ceil_div(each, THREADS * ELEMENTS), ctx), (unsigned)w.groups.El);
    const bool down = w.blocks.wide == 1, tiles = !down && w.blocks.high == N;
    ASSERT(max_i64(w.blocks.high, w.blocks.wide) == N && w.columns % FORMAT_BLOCK == 0 && aligned(w.out, w.x));
    ASSERT(w.columns < 1 << 24 && all / N <= INT32_MAX);
    if constexpr (N == 16) {
        device_zero(amax, (size_t)round_up(w.groups.El, 4) * sizeof(uint32_t), ctx);
        launch_early(down ? lines_kernel<N, 1, 1, AMAX> : lines_kernel<1, N, 1, AMAX>, grid, THREADS, 0, ctx, w, amax);
    }
    // With a transposed copy, neighbouring lanes take the rows of a tile and write neighbouring elements.
    launch_early(w.stats  ? tiles ? lines_kernel<N, N, N, STATS> : lines_kernel<1, N, 1, STATS>
                  : down ? lines_kernel<N, 1, 1, VALUES>
                 : tiles  ? lines_kernel<N, N, N, VALUES>
                 : w.back ? lines_kernel<N, N, 1, VALUES>
                          : lines_kernel<1, N, 1, VALUES>,
                 w.stats ? dim3(1) : grid, THREADS, 0, ctx, w, amax);
}

void fp4_round(Fp4Work work, Ctx* ctx) { (fp4_is_nv(work.blocks) ? run<16> : run<32>)(work, ctx); }
