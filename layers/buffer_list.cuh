// One launch over a list of flat buffers, for the optimizers. Blocks first[b] .. first[b + 1] - 1 of the grid belong to
// buffer b. The list is a kernel argument of at most 32 buffers; a longer list takes several launches.
#pragma once

#include "layers/rows.cuh"

enum { LIST_BUFFERS = 32, LIST_THREADS = 256 };

template <typename Buffer>
struct BufferList {
    Buffer buffer[LIST_BUFFERS];
    unsigned first[LIST_BUFFERS + 1];
};

// The buffer of this block, and the first of this thread's 8 elements in it. Lane b compares with the end of buffer b.
template <typename Buffer>
struct ListPlace {
    const Buffer& buffer;
    int64_t i;
};

template <typename Buffer>
static __device__ __forceinline__ ListPlace<Buffer> list_place(const BufferList<Buffer>& list) {
    const int b = __popc(__ballot_sync(0xffffffffu, blockIdx.x >= list.first[threadIdx.x % 32 + 1]));
    return {list.buffer[b], ((blockIdx.x - list.first[b]) * (int64_t)LIST_THREADS + threadIdx.x) * 8};
}

// 8 gradients of a buffer from element i on.
template <typename Buffer>
static __device__ __forceinline__ void load_gradients(float g[8], const Buffer& buffer, int64_t i) {
    if (buffer.rounded)
        load(g, buffer.rounded + i);
    else
        load(g, buffer.grad + i);
}

// 8 master weights, with their working weights: pairs of 16 bits.
static __device__ __forceinline__ void load_masters(float p[8], const floatX* weight, const Master* master) {
    const uint4 high = *(const uint4*)weight, low = *(const uint4*)master;
    const uint32_t highs[4] = {high.x, high.y, high.z, high.w}, lows[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        p[2 * i] = __uint_as_float(master_bits(highs[i] & 0xffff, lows[i] & 0xffff));
        p[2 * i + 1] = __uint_as_float(master_bits(highs[i] >> 16, lows[i] >> 16));
    }
}

static __device__ __forceinline__ void store_masters(floatX* weight, Master* master, const float p[8]) {
    uint32_t highs[4], lows[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t first = __float_as_uint(p[2 * i]), second = __float_as_uint(p[2 * i + 1]);
        highs[i] = master_high(first) | master_high(second) << 16;
        lows[i] = (first & 0xffff) | second << 16;
    }
    *(uint4*)weight = make_uint4(highs[0], highs[1], highs[2], highs[3]);
    *(uint4*)master = make_uint4(lows[0], lows[1], lows[2], lows[3]);
}

// Launches kernel(list, arguments...) for all buffers, whose lengths are multiples of 8.
template <typename Buffer, typename... Parameters, typename... Arguments>
static inline void launch_list(void (*kernel)(BufferList<Buffer>, Parameters...), const Buffer* buffers, int count,
                               Ctx* ctx, Arguments... arguments) {
    for (int from = 0; from < count; from += LIST_BUFFERS) {
        BufferList<Buffer> list = {};
        for (int b = 0; b < LIST_BUFFERS; b++) {
            // Buffers after the last one have no blocks.
            int64_t blocks = 0;
            if (from + b < count) {
                list.buffer[b] = buffers[from + b];
                blocks = blocks_for(list.buffer[b].n, 8 * LIST_THREADS);
            }
            ASSERT(list.first[b] + blocks < INT32_MAX);
            list.first[b + 1] = list.first[b] + (unsigned)blocks;
        }
        launch_early(kernel, list.first[LIST_BUFFERS], LIST_THREADS, 0, ctx, list, arguments...);
    }
}
