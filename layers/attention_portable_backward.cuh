// Backward on every NVIDIA GPU since Ampere; attention_portable.cu explains the instructions. Four kernels in a row, as
// on Hopper (attention_backward.cuh): delta and lse; dq; dk and dv; dk_rope over the heads. attention_delta_kernel and
// attention_sum_rope_kernel are the same on Hopper.
//
// Tiles are 64 queries by 64 keys. The four warps of a block work in pairs, and a pair owns 32 rows. Each warp of a
// pair computes 32 columns of scores, P and dS, and accumulates gradients: every other 8 columns of the 32 rows. So a
// warp needs the other warp's P and dS as left operands: the pair exchanges fragments through shared memory, register
// by register. A warp multiplies its own fragments while the other warp's arrive.
//
//   scores of a tile       columns 0 .. 31   32 .. 63        gradients of the rows
//     rows  0 .. 31      |     warp 0      |  warp 1  |      warp 0: columns 0 .. 7, 16 .. 23, ..
//     rows 32 .. 63      |     warp 2      |  warp 3  |      warp 1: columns 8 .. 15, 24 .. 31, ..
//
// Bound by the bandwidth of shared memory. A warp with 16 rows of its own would need no exchange, but a third more
// bandwidth.
//
// There are two buffers, as in forward. The GEMMs are ordered so that each buffer is filled while a GEMM uses the
// other:
//
//   kernel   GEMMs (the buffer that each reads)   loads
//   dq       dP (v), S (k), dq (k)                v during S and dq, k during dP
//   dkv      S (q), dP (dout), dk (q), dv (dout)  q during dv, dout during S
#pragma once

namespace {

// A warp's 32 x 32 of P or dS: [m][k] as pack_fragment writes them, 16 bytes a lane.
typedef uint4 Fragments[2][2][32];

__device__ __forceinline__ void put_fragments(Fragments to, const uint32_t (&a)[2][2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) memcpy(&to[i / 2][i % 2][threadIdx.x % 32], a[i / 2][i % 2], sizeof(uint4));
}

__device__ __forceinline__ void get_fragments(uint32_t (&a)[2][2][4], const Fragments from) {
#pragma unroll
    for (int i = 0; i < 4; i++) memcpy(a[i / 2][i % 2], &from[i / 2][i % 2][threadIdx.x % 32], sizeof(uint4));
}

// Barrier of the two warps of a pair. If the compiler did not know the number, it would reserve all 16 barriers.
__device__ __forceinline__ void pair_sync(int pair) {
    if (pair == 0)
        named_sync(1, 64);
    else
        named_sync(2, 64);
}

struct PairPlace {
    int pair_row, row;       // row: the thread's first; it also holds rows + 8, + 16 and + 24
    int side, mine, others;  // columns mine .. mine + 31 are this warp's
};

__device__ __forceinline__ PairPlace pair_place(int warp, int lane) {
    const int side = warp % 2, pair_row = warp / 2 * 32;
    return {pair_row, pair_row + lane / 4, side, side * 32, 32 - side * 32};
}

// Two neighbouring columns of a row.
__device__ __forceinline__ void store_pair(floatX* to, float x, float y) { *(uint32_t*)to = pack_bf16(x, y); }

// --- dq ---

// Shared memory of a block: its queries and their dout, a tile of keys and one of values.
template <int D>
struct PortableQueriesShared {
    floatX q[3][STEP][D];
    floatX dout[2][STEP][D];
    floatX k[3][STEP][D];
    floatX v[2][STEP][D];
    Fragments ds[WARPS];
};

// A warp's accumulator, every other 8 columns of dq, and lse and delta of the thread's rows.
template <int D>
struct PortableQueriesWarp {
    float dq[2][D * 3 / 16][4] = {};
    float lse[4], delta[4];
};

// Mainloop of dq: tile n of keys and values, masked on the diagonal, the last tile.
template <bool MASKED, int D>
__device__ __forceinline__ void dq_tile(PortableQueriesShared<D>& sh, PortableQueriesWarp<D>& w, const HeadKeys& keys,
                                        const PairPlace& at, int n, float scale2) {
    const int warp = threadIdx.x / 32, row = at.row, mine = at.mine;
    float s[2][4][4] = {}, dp[2][4][4];
    uint32_t ds[2][2][4];

    // The values have arrived, and all warps are done with the preceding keys: dP = dout v^T - delta while the new
    // keys load.
    copy_async_wait<0>();
    __syncthreads();
    copy_keys(sh.k, keys, n * STEP);
    copy_async_commit();
    for_each(dp, [&](float& x, int i, int) { x = w.delta[i]; });
    warp_multiply_rows<D, 2, STEP>(dp, sh.dout[0][at.pair_row], sh.v[0][mine]);

    // The keys have arrived, and all warps are done with the values: S = q k^T, P = exp(scale S - lse) while the next
    // values load.
    copy_async_wait<0>();
    __syncthreads();
    if (!MASKED) {
        copy_values(sh.v, keys, (n + 1) * STEP);
        copy_async_commit();
    }
    warp_multiply_rows<D, 3, STEP>(s, sh.q[0][at.pair_row], sh.k[0][mine]);
    for_each(s, [&](float& x, int i, int column) {
        x = exp2_approx(x * scale2 + w.lse[i]);
        if (MASKED && mine + column > row + 8 * i) x = 0;
    });
#pragma unroll
    for (int i = 0; i < 32; i++) s[i / 16][i / 4 % 4][i % 4] *= dp[i / 16][i / 4 % 4][i % 4];  // dS = P (dP - delta)
    pack_fragment(ds, s, 0);
    put_fragments(sh.ds[warp], ds);

    // dq += dS k: first with the keys of this warp's dS, then with those of the other warp of the pair.
    const int lane_at = lane_of_columns<D>(at.side);
    warp_multiply_add<D, 2>(w.dq, ds, sh.k[0][mine], lane_at);
    pair_sync(warp / 2);
    get_fragments(ds, sh.ds[warp ^ 1]);
    warp_multiply_add<D, 2>(w.dq, ds, sh.k[0][at.others], lane_at);
}

// A block owns 64 queries of a head, and walks the keys up to the diagonal.
template <int D>
__global__ void __launch_bounds__(WARPS * 32, 2)
    attention_portable_dq_kernel(floatX* dq, const float* start_lse, const float* start_delta, const floatX* dout,
                                 const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape shape,
                                 int64_t padded, Order order) {
    extern __shared__ __align__(1024) char raw[];
    PortableQueriesShared<D>& sh = *(PortableQueriesShared<D>*)raw;
    const int T = (int)shape.T, H = (int)shape.H, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto [head, rank] = order.place(blockIdx.x);
    const int tile = order.tiles - 1 - rank, q0 = tile * STEP;
    const PairPlace at = pair_place(warp, lane);
    const float scale2 = shape.scale * LOG2E;

    // Prologue: q, dout and the first values start to load.
    const int64_t start = row_of(head, 0, T, H);
    const HeadKeys keys = keys_of<D>(kv, k_rope, head, shape);
    copy_tile<D, STEP, 3>(sh.q, q + start * 3 * D, shape.H * 3 * D, q0, T);
    copy_tile<D, STEP, 2>(sh.dout, dout + start * 2 * D, shape.H * 2 * D, q0, T);
    copy_values(sh.v, keys, 0);
    copy_async_commit();
    PortableQueriesWarp<D> w;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w.lse[i] = start_lse[head * padded + q0 + at.row + 8 * i] * scale2;
        w.delta[i] = start_delta[head * padded + q0 + at.row + 8 * i];
    }

    // Mainloop.
    for (int n = 0; n < tile; n++) dq_tile<false>(sh, w, keys, at, n, scale2);
    dq_tile<true>(sh, w, keys, at, tile, scale2);

    // Epilogue: dq, times scale.
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int m = i / 2, e = i % 2 * 2, t = q0 + at.row + 8 * i;
        floatX* to = dq + row_of(head, t, T, H) * 3 * D + 8 * at.side + lane % 4 * 2;
        if (t >= T) continue;
#pragma unroll
        for (int j = 0; j < D * 3 / 16; j++)
            store_pair(to + 16 * j, w.dq[m][j][e] * shape.scale, w.dq[m][j][e + 1] * shape.scale);
    }
}

// --- dk, dv ---

// Shared memory of a block: its keys and values, a tile of queries and one of their dout, with lse and delta.
template <int D>
struct PortableKeysShared {
    floatX k[3][STEP][D];
    floatX v[2][STEP][D];
    floatX q[3][STEP][D];
    floatX dout[2][STEP][D];
    Fragments p[WARPS], ds[WARPS];
    float lse[STEP], delta[STEP];  // as attention_delta_kernel writes them
};

// A head's queries in global memory, with their dout, lse and delta.
struct HeadQueries {
    const floatX *q, *dout;
    const float *lse, *delta;
    int64_t H;
    int T;
};

// Begins to copy one number for each query of tile m.
__device__ __forceinline__ void copy_numbers(float* to, const float* from, int m) {
    if (threadIdx.x < STEP / 4) copy_async_16(to + threadIdx.x * 4, from + m * STEP + threadIdx.x * 4, 16);
    copy_async_commit();
}

// Begin to copy tile m of the queries with lse, or of dout with delta.
template <int D>
__device__ __forceinline__ void copy_queries(PortableKeysShared<D>& sh, const HeadQueries& from, int m) {
    copy_tile<D, STEP, 3>(sh.q, from.q, from.H * 3 * D, m * STEP, from.T);
    copy_numbers(sh.lse, from.lse, m);
}
template <int D>
__device__ __forceinline__ void copy_dout(PortableKeysShared<D>& sh, const HeadQueries& from, int m) {
    copy_tile<D, STEP, 2>(sh.dout, from.dout, from.H * 2 * D, m * STEP, from.T);
    copy_numbers(sh.delta, from.delta, m);
}

// Mainloop of dk and dv: tile m of queries, masked on the diagonal. Rows are keys: s, dp, p and ds are transposed.
template <bool MASKED, int D>
__device__ __forceinline__ void dkv_tile(PortableKeysShared<D>& sh, float (&dk)[2][D * 3 / 16][4],
                                         float (&dv)[2][D / 8][4], const HeadQueries& queries, const PairPlace& at,
                                         int m, float scale2) {
    const int warp = threadIdx.x / 32, row = at.row, mine = at.mine;
    float s[2][4][4];
    uint32_t p[2][2][4], ds[2][2][4], other[2][2][4];

    // The queries have arrived, and all warps are done with the preceding dout. While the new dout loads: S^T = k q^T -
    // lse / scale and P^T = exp(scale S^T).
    copy_async_wait<0>();
    __syncthreads();
    copy_dout(sh, queries, m);
    for (int half = 0; half < 2; half++) start_columns(*(float(*)[16])s[half], sh.lse + mine);
    warp_multiply_rows<D, 3, STEP>(s, sh.k[0][at.pair_row], sh.q[0][mine]);
    for_each(s, [&](float& x, int i, int column) {
        x = exp2_approx(x * scale2);
        if (MASKED && mine + column < row + 8 * i) x = 0;
    });
    pack_fragment(p, s, 0);
    put_fragments(sh.p[warp], p);

    // dout has arrived: dP^T = v dout^T - delta, dS^T = P^T (dP^T - delta), with P rounded as the GEMM uses it.
    copy_async_wait<0>();
    __syncthreads();
    for (int half = 0; half < 2; half++) start_columns(*(float(*)[16])s[half], sh.delta + mine);
    warp_multiply_rows<D, 2, STEP>(s, sh.v[0][at.pair_row], sh.dout[0][mine]);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const uint32_t both = p[i / 16][i / 8 % 2][i / 2 % 4];
        s[i / 16][i / 4 % 4][i % 4] *= __uint_as_float(i % 2 ? both & 0xffff0000u : both << 16);
    }
    pack_fragment(ds, s, 0);
    put_fragments(sh.ds[warp], ds);

    // dk += dS^T q: first with the queries of this warp's dS, then with those of the other warp of the pair.
    const int lane_at = lane_of_columns<D>(at.side);
    warp_multiply_add<D, 2>(dk, ds, sh.q[0][mine], lane_at);
    pair_sync(warp / 2);
    get_fragments(other, sh.ds[warp ^ 1]);
    warp_multiply_add<D, 2>(dk, other, sh.q[0][at.others], lane_at);

    // All warps are done with the queries: the next ones load during dv += P^T dout.
    __syncthreads();
    if ((m + 1) * STEP < queries.T) copy_queries(sh, queries, m + 1);
    warp_multiply_add<D, 2>(dv, p, sh.dout[0][mine], lane_at);
    get_fragments(other, sh.p[warp ^ 1]);
    warp_multiply_add<D, 2>(dv, other, sh.dout[0][at.others], lane_at);
}

// A block owns 64 keys of a head, and walks the queries from the diagonal on.
template <int D>
__global__ void __launch_bounds__(WARPS * 32, 2)
    attention_portable_dkv_kernel(floatX* dkv, float* rope_part, const float* start_lse, const float* start_delta,
                                  const floatX* dout, const floatX* q, const floatX* kv, const floatX* k_rope,
                                  AttnShape shape, int64_t padded, Order order) {
    extern __shared__ __align__(1024) char raw[];
    PortableKeysShared<D>& sh = *(PortableKeysShared<D>*)raw;
    const int T = (int)shape.T, H = (int)shape.H, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto [head, tile] = order.place(blockIdx.x);
    const PairPlace at = pair_place(warp, lane);
    const float scale2 = shape.scale * LOG2E;

    // Prologue: keys, values and the first queries start to load.
    const int64_t start = row_of(head, 0, T, H);
    const HeadKeys keys = keys_of<D>(kv, k_rope, head, shape);
    const HeadQueries queries = {
        q + start * 3 * D, dout + start * 2 * D, start_lse + head * padded, start_delta + head * padded, shape.H, T};
    copy_keys(sh.k, keys, tile * STEP);
    copy_values(sh.v, keys, tile * STEP);
    copy_queries(sh, queries, tile);

    // Mainloop. The warp's accumulators, every other 8 columns: dk with its rope part, and dv.
    float dk[2][D * 3 / 16][4] = {}, dv[2][D / 8][4] = {};
    dkv_tile<true>(sh, dk, dv, queries, at, tile, scale2);
    for (int m = tile + 1; m * STEP < T; m++) dkv_tile<false>(sh, dk, dv, queries, at, m, scale2);

#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Epilogue: dk, times scale, and dv. The rope part is stored per head in float32.
        const int m = i / 2, e = i % 2 * 2, t = tile * STEP + at.row + 8 * i, column = 8 * at.side + lane % 4 * 2;
        floatX* to = dkv + row_of(head, t, T, H) * 4 * D + column;
        float* part = rope_part + ((int64_t)head * T + t) * D + column;
        if (t >= T) continue;
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            store_pair(to + 16 * j, dk[m][j][e] * shape.scale, dk[m][j][e + 1] * shape.scale);
            store_pair(to + 16 * j + 2 * D, dv[m][j][e], dv[m][j][e + 1]);
        }
#pragma unroll
        for (int j = D / 8; j < D * 3 / 16; j++)
            *(float2*)(part + 16 * j - 2 * D) = make_float2(dk[m][j][e] * shape.scale, dk[m][j][e + 1] * shape.scale);
    }
}

}  // namespace
