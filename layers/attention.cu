// Flash attention for MLA's heads on Hopper's tensor cores (Dao et al. 2022, arXiv 2205.14135; Shah et al. 2024, arXiv
// 2407.08608). Persistent kernels with warp specialization, TMA and WGMMA:
//
//   head sizes   the presets have (nope, rope, v) = D x (2, 1, 2) with D = 64, 32 or 16
//   tiles        consist of D-wide chunks: q 3, k 2 + 1, v 2. k_nope and k_rope meet only in shared memory
//   producer     one thread of a block: takes the next work tile from a counter, heaviest first, and loads it by TMA
//   consumers    two warpgroups of 64 rows each: WGMMA, with scores, probabilities and accumulators in registers
//   buffers      a ring between them: the producer loads the next tiles of the walk while the consumers multiply
//
// The scores of a head, in tiles of 128 x 128. Tiles above the diagonal are never computed:
//
//         keys   0   1   2   3
//   queries 0  | \ |   |   |   |
//           1  | <---\ |   |   |    forward, dq   a block owns 128 queries and walks the keys from the diagonal back
//           2  |   |   | \ |   |    dk, dv        a block owns 128 keys and walks the queries from the diagonal on
//           3  |   |   | v | \ |
//
// The two passes of backward need 7 GEMMs where 5 would do. In return every sum has one owner and one order, so bits
// repeat without synchronization between blocks. The gradient of k_rope is kept per head in float32 and summed in the
// order of heads.
//
// Bound by the tensor cores. Clocks of a tile of 128 x 128:
//
//              tensor cores   exp2
//   forward            2560   about 1100
//   backward           9216   about 2100
//
// The losses are the start and the end of a tile, and the softmax that no GEMM overlaps.
//
// GPUs without WGMMA have kernels of their own, with the same chunks and passes (attention_portable.cuh).
#include <new>

#include "device/wgmma.cuh"
#include "layers/attention_backward.cuh"
#include "layers/attention_portable.cuh"

namespace {

enum { THREADS = 384 };  // one producer and two consumer warpgroups

// The problem of a Hopper kernel: the counter from which blocks take work tiles, their order, and sizes.
struct Problem {
    int* counter;
    Order order;
    int T, H;
    float scale;
};

Problem problem_of(AttnShape s, Ctx* ctx) { return {ctx->counter, order_of(s, TILE), (int)s.T, (int)s.H, s.scale}; }

// The tensor maps of a kernel's TMA loads. Forward has no dout.
struct Maps {
    CUtensorMap q, dout, kv, rope;
};

// A ring of N buffers, each with a full and an empty mbarrier. `use` is the number of the use, counted by the producer
// and by the consumers.
template <int N, bool EVERY_THREAD = false>
struct Ring {
    uint64_t full[N], empty[N];
    __device__ Ring() {
        for (int i = 0; i < N; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], EVERY_THREAD ? 256 : 8);  // arrivals of the consumers: two warpgroups
        }
    }
    __device__ void wait_empty(int use) { barrier_wait(&empty[use % N], (use / N & 1) ^ 1); }
    __device__ void wait_full(int use) { barrier_wait(&full[use % N], use / N & 1); }
    __device__ void release(int use) {
        __syncwarp();
        if (EVERY_THREAD || threadIdx.x % 32 == 0) barrier_arrive(&empty[use % N]);
    }
    __device__ void skip(int use) {  // a consumer needs nothing of this buffer
        wait_full(use);
        release(use);
    }
};

// The current work tile of a block. The producer passes its number to the consumers through a ring of one buffer,
// together with the loads that belong to it.
struct Work {
    Ring<1, true> ring;  // each thread releases it, because each reads `number`
    int number;
    // The producer publishes the next work tile. A number >= total ends the loop: no loads come with it. Each block
    // draws one such number, so the highest of them resets the counter to 0 for the next kernel.
    __device__ bool hand_out(int use, int work, const Problem& p) {
        ring.wait_empty(use);
        number = work;
        if (work < p.order.total()) return true;
        barrier_arrive(&ring.full[0]);
        if (work == p.order.total() + (int)gridDim.x - 1) *p.counter = 0;
        return false;
    }
    // A consumer reads the number.
    __device__ int take(int use) {
        ring.wait_full(use);
        return number;
    }
};

// Makes a warp-uniform value provably uniform. The compiler then keeps it, and all that follows from it, in uniform
// registers, from which WGMMA takes its descriptors.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// A consumer thread: its warpgroup, its lane, and the first of its two rows in the work tile. The second is row + 8.
struct Consumer {
    int group, lane, row;
};

// A block of a Hopper kernel from start to end: the producer thread runs produce(sh), the two consumer warpgroups
// consume(sh, me). Launched early (PDL), it waits until the preceding kernels are done. The producer's warpgroup gives
// registers to the consumers.
template <typename Shared, typename Produce, typename Consume>
__device__ __forceinline__ void run_block(Produce produce, Consume consume) {
    // Shared memory. One thread sets up the barriers.
    extern __shared__ __align__(1024) char raw[];
    Shared& sh = *(Shared*)raw;
    if (threadIdx.x == 0) {
        new (&sh) Shared;
        barrier_init_fence();
    }
    previous_is_done();
    __syncthreads();

    // The roles.
    if (threadIdx.x < 128) {
        registers_fewer<24>();
        if (threadIdx.x == 0) produce(sh);
    } else {
        registers_more<240>();
        const int group = uniform(threadIdx.x / 128 - 1), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        consume(sh, Consumer{group, lane, group * 64 + warp * 16 + lane / 4});
    }
}

// The WGMMA descriptor of an operand in boxes of D columns.
template <int D>
__device__ __forceinline__ uint64_t operand(const void* p, uint32_t box_bytes = 0) {
    const uint64_t x = wgmma_descriptor<D>(shared_address(p), box_bytes);
    return (uint64_t)uniform(x >> 32) << 32 | uniform((uint32_t)x);
}

// The descriptor of the operand in the buffer of use number `use`, from that in buffer 0.
template <typename Buffer, int N>
__device__ __forceinline__ uint64_t in_buffer(uint64_t first, const Buffer (&)[N], int use) {
    return first + use % N * (int)(sizeof(Buffer) / 16);
}

// s (64, N) = A B^T over CHUNKS chunks, or += with `accumulate`. Both operands are K-major: A in chunks of TILE rows, B
// in chunks of N rows.
template <int D, int N, int CHUNKS>
__device__ __forceinline__ void multiply_rows(float (&s)[N / 2], uint64_t a, uint64_t b, int accumulate = 0) {
    constexpr int STEPS = D / 16;
#pragma unroll
    for (int k = 0; k < CHUNKS * STEPS; k++)
        wgmma_ss<N, 0, 0>(s, a + k / STEPS * (TILE * D / 8) + k % STEPS * 2,
                          b + k / STEPS * (N * D / 8) + k % STEPS * 2, k > 0 || accumulate);
}

// d (64, N) += A B, with A (64, K) in registers and the K rows of B in chunks of D columns.
template <int D, int N, int K>
__device__ __forceinline__ void multiply_add(float (&d)[N / 2], const uint32_t (&a)[K / 4], uint64_t b) {
#pragma unroll
    for (int k = 0; k < K / 16; k++) wgmma_rs<N, 1>(d, a + 4 * k, b + k * 2 * D, 1);
}

// The same, complete on return.
template <int D, int N, int K>
__device__ __forceinline__ void multiply_add_and_wait(float (&d)[N / 2], const uint32_t (&a)[K / 4], uint64_t b) {
    wgmma_pin(d);
    wgmma_fence();
    multiply_add<D, N, K>(d, a, b);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(d);
}

// An accumulator, rounded to bf16, as the left operand of a GEMM.
template <int N>
__device__ __forceinline__ void round_to_bf16(uint32_t (&a)[N], const float (&d)[2 * N]) {
#pragma unroll
    for (int i = 0; i < N; i++) a[i] = pack_bf16(d[2 * i], d[2 * i + 1]);
}

template <int N>
__device__ __forceinline__ void zero(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) d[i] = 0;
}

// The tensor map of a (B, T, H, width) tensor in chunks of D columns. Coordinates: column, head, token, chunk,
// sequence.
CUtensorMap heads_map(const floatX* p, AttnShape s, int64_t width, int rows, int chunks, Ctx* ctx) {
    int64_t size[5] = {s.rope, s.H, s.T, width / s.rope, s.B};
    int64_t stride[4] = {width, s.H * width, s.rope, s.T * s.H * width};
    int box[5] = {(int)s.rope, 1, rows, chunks, 1};
    return tensor_map(p, 5, size, stride, box, ctx);
}

// The tensor map of k_rope (B, T, rope). Coordinates: column, token, sequence.
CUtensorMap rope_map(const floatX* p, AttnShape s, int rows, Ctx* ctx) {
    int64_t size[3] = {s.rope, s.T, s.B}, stride[2] = {s.k_rope_stride, s.T * s.k_rope_stride};
    int box[3] = {(int)s.rope, rows, 1};
    return tensor_map(p, 3, size, stride, box, ctx);
}

// All tensor maps, for tiles of `queries` and `keys` rows.
Maps maps_of(const floatX* q, const floatX* dout, const floatX* kv, const floatX* k_rope, int queries, int keys,
             AttnShape s, Ctx* ctx) {
    return {heads_map(q, s, 3 * s.rope, queries, 3, ctx),
            dout ? heads_map(dout, s, 2 * s.rope, queries, 2, ctx) : CUtensorMap{},
            heads_map(kv, s, 4 * s.rope, keys, 2, ctx), rope_map(k_rope, s, keys, ctx)};
}

// There are kernels for these head sizes only. The settings refuse other sizes by name.
void check_shape(AttnShape s, const floatX* k_rope) {
    ASSERT(s.rope == 64 || s.rope == 32 || s.rope == 16);
    ASSERT(s.nope == 2 * s.rope && s.v == 2 * s.rope && wide(s.k_rope_stride, k_rope));
    ASSERT(s.scale > 0 && s.T < (1 << 30) && s.B * s.H * ceil_div(s.T, TILE) < (1 << 30));
}

}  // namespace

#include "layers/attention_backward_dkv.cuh"
#include "layers/attention_backward_dq.cuh"
#include "layers/attention_forward.cuh"

size_t attention_workspace(AttnShape s) { return workspace_of(s, nullptr).bytes; }

void attention_forward(floatX* out, real* lse, real* max_logit, const floatX* q, const floatX* kv, const floatX* k_rope,
                       AttnShape s, Ctx* ctx) {
    check_shape(s, k_rope);
    if (ctx->portable) return attention_portable_forward(out, lse, max_logit, q, kv, k_rope, s, ctx);
    const Problem p = problem_of(s, ctx);
    by_head_size(s, [&](auto size) {
        constexpr int D = decltype(size)::value;
        launch_long(attention_forward_kernel<D>, min_i64(p.order.total(), ctx->sms), THREADS, sizeof(ForwardShared<D>),
                    ctx, maps_of(q, nullptr, kv, k_rope, TILE, TILE, s, ctx), out, lse, max_logit, p);
    });
}

void attention_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out,
                        const real* lse, const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape s,
                        Ctx* ctx) {
    check_shape(s, k_rope);
    check_shape(s, dk_rope);
    if (ctx->portable) return attention_portable_backward(dq, dkv, dk_rope, dout, out, lse, q, kv, k_rope, s, ctx);
    const Problem p = problem_of(s, ctx);
    const int64_t blocks = min_i64(p.order.total(), ctx->sms);
    by_head_size(s, [&](auto size) {
        constexpr int D = decltype(size)::value;
        const Workspace w = begin_backward<D>(dout, out, lse, s, ctx);
        launch_long(attention_backward_dq_kernel<D>, blocks, THREADS, sizeof(QueriesShared<D>), ctx,
                    maps_of(q, dout, kv, k_rope, TILE, DQ_KEYS, s, ctx), dq, w.lse, w.delta, p);
        launch_long(attention_backward_dkv_kernel<D>, blocks, THREADS, sizeof(KeysShared<D>), ctx,
                    maps_of(q, dout, kv, k_rope, DK_QUERIES, TILE, s, ctx), dkv, w.rope_part, w.lse, w.delta, p);
        sum_rope<D>(dk_rope, w, s, ctx);
    });
}
