// Flash attention for every NVIDIA GPU since Ampere (FlashAttention-2: Dao 2023, arXiv 2307.08691): forward, and the
// parts that both directions share. Backward is in attention_portable_backward.cuh. Chunks, tiles and the order of work
// are those of attention.cu.
//
// Tensor cores. One mma instruction of a warp (mma_bf16) is d (16 x 8) += a (16 x 16) b (16 x 8). a, b and d are
// fragments in registers, spread over the lanes. In 8 x 8 elements every lane has two neighbours of a row:
//
//     column   0, 1     2, 3     4, 5     6, 7
//     row 0   lane 0   lane 1   lane 2   lane 3            d = | d[0], d[1] |     a = | a[0]  a[2] |
//     row 1   lane 4   lane 5   lane 6   lane 7                | d[2], d[3] |         | a[1]  a[3] |
//      ..
//     row 7   lane 28  lane 29  lane 30  lane 31           b = | b[0] |  with rows and columns exchanged: a lane
//                                                              | b[1] |  has two neighbours in a column of b
//
// In d a register is one element; in a and b it is two neighbouring bf16. So two rounded d's next to each other are an
// a: probabilities turn from accumulator to operand without leaving their lane (pack_fragment). A row of d is in four
// neighbouring lanes, a quad: its maximum takes two shuffles.
//
// Operand loads. ldmatrix_x4 loads four such 8 x 8 matrices from shared memory; each lane addresses one row of 16
// bytes. From a tile with rows along the contraction (q and k in q k^T) ldmatrix_x4 makes an a, or the b's of 16 rows.
// A tile whose rows are the contraction (v in P v) is loaded transposed: 32 rows of 8 columns are the b's of two mma.
//
// Bank conflicts. Shared memory delivers 128 bytes a clock if they are in different banks, and banks repeat every 128
// bytes. The 8 rows of a matrix are below each other, so the 16-byte vectors of a chunk are swizzled:
//
//   vector i of row r is at place i XOR r % 8      in chunks 64 wide; narrower rows share 128 bytes
//
// From one ldmatrix to the next a lane's row moves by multiples of 8 and its vector by constants. So its address is one
// number per lane, XORed with and added to constants.
//
// Loads from global memory. cp.async copies asynchronously into two buffers, one of keys and one of values. A buffer is
// refilled as soon as the last GEMM that reads it is done:
//
//   all warps   | S = q k^T of tile n | online softmax, o += P v of tile n | S = q k^T of tile n + 1 |    time -->
//   cp.async    | values of tile n    | keys of tile n + 1                 | values of tile n + 1    |
//
// Where shared memory is large enough for two blocks per SM, each block hides the latency of the other.
//
// Sizes. A block is 4 warps with 32 rows each: every b fragment is used for two a's, which halves the shared-memory
// traffic. Shared memory and tensor cores are then about equally busy. A block takes at most 99 KB, the limit of
// compute capability 8.6, 8.9 and 12.0. With 255 registers a thread the occupancy is two blocks per SM.
#include "layers/attention_portable.cuh"

#include "layers/attention_backward.cuh"

namespace {

enum { STEP = 64, WARPS = 4 };  // rows of a tile in the mainloop; warps of a block

// The byte offset of a 16-byte vector (8 columns) of a row in a swizzled chunk of D columns.
template <int D>
__device__ __forceinline__ int swizzled(int row, int vector) {
    return row * (2 * D) + (vector ^ row / (64 / D) % (D / 8)) * 16;
}

// A lane's offset from the address of an operand. Vector i away from these is an XOR with 16 i.
template <int D>
__device__ __forceinline__ int lane_of_a() {  // 16 rows of two vectors, in the order of an a
    return swizzled<D>(threadIdx.x % 16, threadIdx.x % 32 / 16);
}
template <int D>
__device__ __forceinline__ int lane_of_b() {  // the same, as two b's
    return swizzled<D>(threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, threadIdx.x / 8 % 2);
}
template <int D>
__device__ __forceinline__ int lane_of_columns(int vector) {  // 32 rows of one vector, loaded transposed
    return swizzled<D>(threadIdx.x % 32, vector);
}

// Begins to copy rows first .. first + ROWS - 1 of a head, `stride` apart, CHUNKS chunks of them. Rows from T on become
// zeros. D / 8 neighbouring threads copy the 16-byte vectors of a row's chunk.
template <int D, int ROWS, int CHUNKS>
__device__ __forceinline__ void copy_tile(floatX (*to)[ROWS][D], const floatX* from, int64_t stride, int first, int T) {
    constexpr int VECTORS = D / 8, ROWS_AT_ONCE = WARPS * 32 / VECTORS;
    const int row = threadIdx.x / VECTORS, vector = threadIdx.x % VECTORS;
    from += (first + row) * stride + vector * 8;
#pragma unroll
    for (int r = 0; r < ROWS; r += ROWS_AT_ONCE)
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            copy_async_16((char*)to[c] + r * (2 * D) + swizzled<D>(row, vector), from + r * stride + c * D,
                          first + row + r < T ? 16 : 0);
}

// s (32, 8 N) += A B^T over CHUNKS chunks. A is 32 of a tile's A_ROWS rows, B is 8 N of STEP rows. `a` and `b` point to
// the first row in chunk 0.
template <int D, int CHUNKS, int A_ROWS, int N>
__device__ __forceinline__ void warp_multiply_rows(float (&s)[2][N][4], const void* a, const void* b) {
    const int lane_a = lane_of_a<D>(), lane_b = lane_of_b<D>();
#pragma unroll
    for (int k = 0; k < CHUNKS * D / 16; k++) {
        const int chunk = k / (D / 16), two_pieces = k % (D / 16) * 32;
        uint32_t x[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++)
            ldmatrix_x4(x[m], (const char*)a + (chunk * A_ROWS + m * 16) * (2 * D) + (lane_a ^ two_pieces));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t y[4];
            ldmatrix_x4(y, (const char*)b + (chunk * STEP + n * 8) * (2 * D) + (lane_b ^ two_pieces));
#pragma unroll
            for (int i = 0; i < 4; i++) mma_bf16(s[i % 2][n + i / 2], x[i % 2], y + i / 2 * 2);
        }
    }
}

// d (32, 8 N) += A B, with A (32, 32) in registers. B is 32 of a tile's STEP rows, and `b` points to the first. The
// columns of B are its vectors 0, EVERY, 2 EVERY, .., shifted by the start vector in `lane` (lane_of_columns).
template <int D, int EVERY, int N>
__device__ __forceinline__ void warp_multiply_add(float (&d)[2][N][4], const uint32_t (&a)[2][2][4], const void* b,
                                                  int lane) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint32_t y[2][4];
#pragma unroll
        for (int i = 0; i < 2 && n + i < N; i++) {
            const int chunk = (n + i) * EVERY / (D / 8), vector = (n + i) * EVERY % (D / 8);
            ldmatrix_x4_transposed(y[i], (const char*)b + chunk * STEP * (2 * D) + (lane ^ vector * 16));
        }
        // Accumulators that were just updated come last.
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 2 && n + i < N; i++)
#pragma unroll
                for (int m = 0; m < 2; m++) mma_bf16(d[m][n + i], a[m][k], y[i] + 2 * k);
    }
}

// Columns 8 n .. 8 n + 31 of s (32, 8 N), rounded, as the left operand of two GEMMs: a[m][k] is rows 16 m and columns
// 16 k.
template <int N>
__device__ __forceinline__ void pack_fragment(uint32_t (&a)[2][2][4], const float (&s)[2][N][4], int n) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 8; i++)
            a[m][i / 4][i % 4] = pack_bf16(s[m][n + i / 2][i % 2 * 2], s[m][n + i / 2][i % 2 * 2 + 1]);
}

// Calls f(x, i, column) for every x that the thread holds of s (32, 8 N). The thread holds parts of four rows: the i-th
// is row 8 i + lane / 4.
template <int N, typename F>
__device__ __forceinline__ void for_each(float (&s)[2][N][4], F f) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) f(s[m][n][e], 2 * m + e / 2, 8 * n + threadIdx.x % 4 * 2 + e % 2);
}

// A head's keys and values in global memory: kv has k_nope and v, each 2 D wide; k_rope is shared by the heads.
struct HeadKeys {
    const floatX *kv, *k_rope;
    int64_t stride, rope_stride;  // from token to token
    int T;
};

template <int D>
__device__ __forceinline__ HeadKeys keys_of(const floatX* kv, const floatX* k_rope, int head, const AttnShape& shape) {
    return {kv + row_of(head, 0, (int)shape.T, (int)shape.H) * 4 * D,
            k_rope + head / (int)shape.H * shape.T * shape.k_rope_stride, shape.H * 4 * D, shape.k_rope_stride,
            (int)shape.T};
}

// Begin to copy the tile of keys, or of values, that starts at token `first`.
template <int D>
__device__ __forceinline__ void copy_keys(floatX (*to)[STEP][D], const HeadKeys& from, int first) {
    copy_tile<D, STEP, 2>(to, from.kv, from.stride, first, from.T);
    copy_tile<D, STEP, 1>(to + 2, from.k_rope, from.rope_stride, first, from.T);
}
template <int D>
__device__ __forceinline__ void copy_values(floatX (*to)[STEP][D], const HeadKeys& from, int first) {
    copy_tile<D, STEP, 2>(to, from.kv + 2 * D, from.stride, first, from.T);
}

// --- Forward ---

// Shared memory of a block: its queries, a tile of keys and one of values.
template <int D>
struct PortableForwardShared {
    floatX q[3][TILE][D];
    floatX k[3][STEP][D];
    floatX v[2][STEP][D];
};

// A warp's 32 queries, and its state. The thread holds parts of four rows: row + 8 i + lane / 4.
template <int D>
struct PortableForwardWarp {
    int row, lane;              // row: the warp's first query
    float scale, scale2;        // of the scores; times log2(e), for exp as a power of two
    float o[2][D / 4][4] = {};  // the accumulator of P v, before the division
    float top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sum[4] = {};  // of the online softmax
    float largest = -INFINITY;                                                 // logit of the rows before T
};

// The online softmax, s = P = exp(scale (s - top)). A row's top follows its maximum only when P has grown by a factor
// of 2^8. Until then no rescaling is needed, and P has the precision of any other scale.
template <int D>
__device__ __forceinline__ void online_softmax(PortableForwardWarp<D>& w, float (&s)[2][STEP / 8][4], int T) {
    const int row = w.row, lane = w.lane;
    const float scale2 = w.scale2;
    float shrink[4];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // The maximum of the row, and the factor that corrects its sum and o.
        const float old = w.top[i];
        float most = -INFINITY, here = 0;
#pragma unroll
        for (int j = 0; j < STEP / 4; j++) most = fmaxf(most, s[i / 2][j / 2][i % 2 * 2 + j % 2]);
        most = warp_max<4>(most);
        if (row + 8 * i + lane / 4 < T) w.largest = fmaxf(w.largest, most * w.scale);
        const bool follow = (most - old) * scale2 > 8;
        if (follow) w.top[i] = most;
        moved |= follow;
        const float shift = w.top[i] * scale2;
        shrink[i] = follow ? exp2_approx(old * scale2 - shift) : 1;

        // P and its sum.
#pragma unroll
        for (int j = 0; j < STEP / 4; j++) {
            float& x = s[i / 2][j / 2][i % 2 * 2 + j % 2];
            x = exp2_approx(x * scale2 - shift);
            here += x;
        }
        w.sum[i] = w.sum[i] * shrink[i] + here;
    }
    // Rows whose top stays are multiplied by 1: no row's bits depend on the others.
    if (__any_sync(0xffffffffu, moved)) for_each(w.o, [&](float& x, int i, int) { x *= shrink[i]; });
}

// Mainloop: tile n of keys and values, masked where the diagonal crosses it. Warps whose queries all come before it
// only copy.
template <bool MASKED, int D>
__device__ __forceinline__ void attend_tile(PortableForwardShared<D>& sh, PortableForwardWarp<D>& w,
                                            const HeadKeys& keys, int n, int tiles) {
    const int warp = threadIdx.x / 32, row = w.row, lane = w.lane;
    const bool seen = !MASKED || n * STEP < row + 32;
    float s[2][STEP / 8][4] = {};

    // The keys have arrived, and all warps are done with the preceding values: S = q k^T while the new values load.
    copy_async_wait<0>();
    __syncthreads();
    copy_values(sh.v, keys, n * STEP);
    copy_async_commit();
    if (seen) warp_multiply_rows<D, 3, TILE>(s, sh.q[0][warp * 32], sh.k);

    // The values have arrived, and all warps are done with the keys: the next keys load during softmax and P v.
    copy_async_wait<0>();
    __syncthreads();
    if (n + 1 < tiles) {
        copy_keys(sh.k, keys, (n + 1) * STEP);
        copy_async_commit();
    }
    if (!seen) return;
    if (MASKED)  // keys after the query
        for_each(s, [&](float& x, int i, int column) {
            if (n * STEP + column > row + 8 * i + lane / 4) x = -INFINITY;
        });
    online_softmax(w, s, keys.T);
#pragma unroll
    for (int first = 0; first < STEP; first += 32) {
        uint32_t p[2][2][4];
        pack_fragment(p, s, first / 8);
        warp_multiply_add<D, 1>(w.o, p, sh.v[0][first], lane_of_columns<D>(0));
    }
}

// A block owns 128 queries of a head, a warp 32 of them. It walks the keys up to the diagonal in tiles of 64.
template <int D>
__global__ void __launch_bounds__(WARPS * 32, 2)
    attention_portable_forward_kernel(floatX* out, float* lse, float* max_logit, const floatX* q, const floatX* kv,
                                      const floatX* k_rope, AttnShape shape, Order order) {
    extern __shared__ __align__(1024) char raw[];
    PortableForwardShared<D>& sh = *(PortableForwardShared<D>*)raw;
    const int T = (int)shape.T, H = (int)shape.H, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto [head, rank] = order.place(blockIdx.x);
    const int q0 = (order.tiles - 1 - rank) * TILE;  // the block's first query
    const HeadKeys keys = keys_of<D>(kv, k_rope, head, shape);

    // Prologue: the queries and the first keys start to load.
    copy_tile<D, TILE, 3>(sh.q, q + row_of(head, 0, T, H) * 3 * D, shape.H * 3 * D, q0, T);
    copy_keys(sh.k, keys, 0);
    copy_async_commit();
    PortableForwardWarp<D> w = {q0 + warp * 32, lane, shape.scale, shape.scale * LOG2E};

    // Mainloop: the tiles before the diagonal, then those that it crosses.
    const int tiles = (min(q0 + TILE, T) + STEP - 1) / STEP;
    int n = 0;
    for (; n < q0 / STEP; n++) attend_tile<false>(sh, w, keys, n, tiles);
    for (; n < tiles; n++) attend_tile<true>(sh, w, keys, n, tiles);

#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Epilogue: out = o / sum, lse = scale top + ln(sum).
        const int t = w.row + 8 * i + lane / 4;
        const float l = quad_sum(w.sum[i]);
        if (t < T && lane % 4 == 0) lse[(int64_t)head * T + t] = w.top[i] * shape.scale + logf(l);
        store_row<2 * D>(out + row_of(head, t, T, H) * 2 * D, *(const float(*)[D])w.o[i / 2], i % 2, 1 / l, t < T);
    }
    take_in_logit(max_logit, w.largest);
}

}  // namespace

#include "layers/attention_portable_backward.cuh"

void attention_portable_forward(floatX* out, real* lse, real* max_logit, const floatX* q, const floatX* kv,
                                const floatX* k_rope, AttnShape s, Ctx* ctx) {
    const Order order = order_of(s, TILE);
    by_head_size(s, [&](auto size) {
        constexpr int D = decltype(size)::value;
        launch(attention_portable_forward_kernel<D>, order.total(), WARPS * 32, sizeof(PortableForwardShared<D>), ctx,
               out, lse, max_logit, q, kv, k_rope, s, order);
    });
}

void attention_portable_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out,
                                 const real* lse, const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape s,
                                 Ctx* ctx) {
    const Order order = order_of(s, STEP);
    by_head_size(s, [&](auto size) {
        constexpr int D = decltype(size)::value;
        const Workspace w = begin_backward<D>(dout, out, lse, s, ctx);
        launch(attention_portable_dq_kernel<D>, order.total(), WARPS * 32, sizeof(PortableQueriesShared<D>), ctx, dq,
               w.lse, w.delta, dout, q, kv, k_rope, s, w.padded, order);
        launch(attention_portable_dkv_kernel<D>, order.total(), WARPS * 32, sizeof(PortableKeysShared<D>), ctx, dkv,
               w.rope_part, w.lse, w.delta, dout, q, kv, k_rope, s, w.padded, order);
        sum_rope<D>(dk_rope, w, s, ctx);
    });
}
