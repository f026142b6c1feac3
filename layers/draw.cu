// masters_draw on the GPU. A thread draws four numbers at a time, of one call of Philox. Bound by arithmetic in double:
// some 150 operations a number. Compiled with --fmad=false, because a fused multiply-add rounds once instead of twice.
#include "layers/draw.h"

#include "device/cuda.cuh"
#include "layers/normal.h"

static __global__ void draw_kernel(Master* master, floatX* weight, int64_t n, double mean, double std, uint64_t seed,
                                   uint32_t stream, int64_t first) {
    const int64_t threads = (int64_t)gridDim.x * blockDim.x, end = first + n;
    for (int64_t four = first / 4 + blockIdx.x * (int64_t)blockDim.x + threadIdx.x; 4 * four < end; four += threads) {
        uint32_t word[4];
        philox(word, seed, stream, (uint64_t)four);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int64_t i = 4 * four + k - first;
            if (i < 0 || i >= n) continue;
            const uint32_t bits = __float_as_uint((float)(mean + std * normal_of(word[k])));
            const uint16_t high = (uint16_t)master_high(bits);
            memcpy(weight + i, &high, sizeof(high));
            master[i] = (Master)bits;
        }
    }
}

void masters_draw(Master* master, floatX* weight, int64_t n, double mean, double std, uint64_t seed, uint32_t stream,
                  int64_t first, Ctx* ctx) {
    launch(draw_kernel, min_i64(blocks_for(n, 4 * 256) + 1, 8 * ctx->sms), 256, 0, ctx, master, weight, n, mean, std,
           seed, stream, first);
}
