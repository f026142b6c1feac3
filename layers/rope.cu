// Rotary embedding in place: bound by memory (each element is read and written once). A thread owns 4 pairs of a token
// (one 16-byte vector) and rotates them in 4 heads by the same angles. All loads of a thread are issued before its
// first store. The grid walks memory in order, heads before tokens. The table (T x D floats) stays in L2. Rotations are
// in float32 and rounded once. At model sizes the kernel takes 20 us or less, so PDL matters: the kernel starts while
// the preceding kernel drains, and lets the next kernel do the same.
#include "layers/rope.h"
#include "layers/rows.cuh"

enum { HEADS = 4, THREADS = 128 };

// The first `blocks` blocks of the grid rotate the first tensor, the others the second.
struct RopeTensor {
    floatX* x;
    RopeShape shape;
};

static __global__ void __launch_bounds__(THREADS)
    rope_kernel(RopeTensor first, RopeTensor second, uint32_t blocks, const float* table, float direction) {
    // 32-bit divisions: 64-bit divisions would take as long as the memory traffic.
    const bool in_first = blockIdx.x < blocks;
    const RopeShape s = in_first ? first.shape : second.shape;
    floatX* x = in_first ? first.x : second.x;
    const uint32_t block = in_first ? blockIdx.x : blockIdx.x - blocks;
    const uint32_t i = block * THREADS + threadIdx.x, spans = (uint32_t)s.D / 8, rest = i / spans;
    const uint32_t groups = ((uint32_t)s.heads + HEADS - 1) / HEADS;  // stride between a thread's heads
    const int64_t n = rest / groups, h0 = rest % groups, d = i % spans * 8, step = groups * s.head_stride;
    let_next_start();
    if (n >= s.N) return;

    // The angles are loaded before the wait for preceding kernels.
    float angle[8];
    load(angle, table + (uint32_t)n % (uint32_t)s.T * s.D + d);  // no kernel writes the table
    previous_is_done();

    // The heads' vectors: all loads before the first store.
    floatX* v = x + n * s.stride + h0 * s.head_stride + d;
    Vec8 p[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++)
        if (h0 + h * groups < s.heads) p[h] = *(const Vec8*)(v + h * step);

#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        // Each pair (even, odd) is rotated by its angle.
        if (h0 + h * groups >= s.heads) continue;
        float f[8];
        floats_of(f, p[h]);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            float cosine = angle[j], sine = direction * angle[j + 1], even = f[j], odd = f[j + 1];
            f[j] = even * cosine - odd * sine;
            f[j + 1] = even * sine + odd * cosine;
        }
        store(v + h * step, f);
    }
}

// The number of blocks for a tensor.
static unsigned blocks_of(const floatX* x, RopeShape s) {
    const int64_t threads = s.N * ceil_div(s.heads, HEADS) * (s.D / 8);
    ASSERT(wide(s.D | s.stride | s.head_stride, x) && threads < UINT32_MAX - THREADS && s.T <= INT32_MAX);
    return blocks_for(threads, THREADS);
}

void rope_apply(floatX* x, RopeShape of_x, floatX* y, RopeShape of_y, const real* table, int direction, Ctx* ctx) {
    const unsigned first = blocks_of(x, of_x);
    ASSERT(aligned(table));
    launch_early(rope_kernel, first + blocks_of(y, of_y), THREADS, 0, ctx, RopeTensor{x, of_x}, RopeTensor{y, of_y},
                 first, table, direction);
}
