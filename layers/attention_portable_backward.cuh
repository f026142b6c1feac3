// Backward on every NVIDIA GPU since Ampere; attention_portable.cuh explains the instructions. Four kernels in a row,
// as on Hopper (attention_backward.cuh): delta and lse; dq; dk and dv; dk_rope over the heads. The first and the last
// are the same kernels as on Hopper.
//
// Tiles are 64 queries by 64 keys. The four warps of a block work in pairs, and a pair owns 32 rows. Each of its warps
// computes 32 columns of scores, P and dS, and accumulates the gradients of every other 8 columns of the 32 rows. So
// each needs the other's P and dS as left operands: these are exchanged as fragments through shared memory, register by
// register. A warp multiplies its own fragments while the other's arrive. (A warp with 16 rows of its own would need no
// exchange, but a third more shared-memory bandwidth, which bounds these kernels.)
//
// There are two buffers, as in forward. The GEMMs are ordered so that each buffer is filled while a GEMM uses the
// other:
//
//   kernel   GEMMs (the buffer that each reads)   loads
//   dq       dP (v), S (k), dq (k)                v during S and dq, k during dP
//   dkv      S (q), dP (dout), dk (q), dv (dout)  q during dv, dout during S
#ifndef LAYERS_ATTENTION_PORTABLE_BACKWARD_CUH
#define LAYERS_ATTENTION_PORTABLE_BACKWARD_CUH

#include "layers/attention_portable.cuh"

namespace {

// A warp's 32 x 32 of P or dS: [m][k] as pack_fragment writes them, 16 bytes a lane.
typedef uint4 Fragments[2][2][32];

__device__ __forceinline__ void put_fragments(Fragments to, const uint32_t (&a)[2][2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t* x = a[i / 2][i % 2];
        to[i / 2][i % 2][threadIdx.x % 32] = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

__device__ __forceinline__ void get_fragments(uint32_t (&a)[2][2][4], const Fragments from) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint4 x = from[i / 2][i % 2][threadIdx.x % 32];
        uint32_t* to = a[i / 2][i % 2];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
}

// Barrier of the two warps of a pair. With a barrier number unknown to the compiler, it would reserve all 16.
__device__ __forceinline__ void pair_sync(int pair) {
    if (pair == 0)
        named_sync(1, 64);
    else
        named_sync(2, 64);
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

template <int D>
__global__ void __launch_bounds__(WARPS * 32, 2)
    attention_portable_dq_kernel(floatX* dq, const float* start_lse, const float* start_delta, const floatX* dout,
                                 const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape shape,
                                 int64_t padded, Order order) {
    extern __shared__ __align__(1024) char raw[];
    PortableQueriesShared<D>& sh = *(PortableQueriesShared<D>*)raw;
    const int T = (int)shape.T, H = (int)shape.H, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int side = warp % 2, mine = side * 32, others = 32 - mine;  // columns of a tile
    const auto [head, rank] = order.place(blockIdx.x);
    const int tile = order.tiles - 1 - rank, q0 = tile * STEP, pair_row = warp / 2 * 32;
    const int row = pair_row + lane / 4;  // in the tile; the thread also holds rows + 8, + 16 and + 24
    const float scale2 = shape.scale * LOG2E;

    // The head's tensors, and the first copies: q, dout and the first values; then the first keys.
    const int64_t start = row_of(head, 0, T, H);
    kv += start * 4 * D, k_rope += head / H * shape.T * shape.k_rope_stride;
    auto copy_keys = [&](int n) {
        copy_tile<D, STEP, 2>(sh.k, kv, shape.H * 4 * D, n * STEP, T);
        copy_tile<D, STEP, 1>(sh.k + 2, k_rope, shape.k_rope_stride, n * STEP, T);
        copy_async_commit();
    };
    auto copy_values = [&](int n) {
        copy_tile<D, STEP, 2>(sh.v, kv + 2 * D, shape.H * 4 * D, n * STEP, T);
        copy_async_commit();
    };
    copy_tile<D, STEP, 3>(sh.q, q + start * 3 * D, shape.H * 3 * D, q0, T);
    copy_tile<D, STEP, 2>(sh.dout, dout + start * 2 * D, shape.H * 2 * D, q0, T);
    copy_values(0);

    // grad: the accumulator of dq, this warp's columns. lse and delta are those of the thread's rows.
    float grad[2][D * 3 / 16][4] = {}, lse_row[4], delta_row[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        lse_row[i] = start_lse[head * padded + q0 + row + 8 * i] * scale2;
        delta_row[i] = start_delta[head * padded + q0 + row + 8 * i];
    }

    auto step = [&](int n, auto masked) {
        float s[2][4][4] = {}, dp[2][4][4];
        uint32_t ds[2][2][4];

        // The values have arrived, and all warps are done with the preceding keys: dP = dout v^T - delta while the new
        // keys load.
        copy_async_wait<0>();
        __syncthreads();
        copy_keys(n);
        for_each(dp, [&](float& x, int i, int) { x = delta_row[i]; });
        warp_multiply_rows<D, 2, STEP>(dp, sh.dout[0][pair_row], sh.v[0][mine]);

        // The keys have arrived, and all warps are done with the values: S = q k^T, P = exp(scale S - lse) while the
        // next values load.
        copy_async_wait<0>();
        __syncthreads();
        if (n < tile) copy_values(n + 1);
        warp_multiply_rows<D, 3, STEP>(s, sh.q[0][pair_row], sh.k[0][mine]);
        for_each(s, [&](float& x, int i, int column) {
            x = exp2_approx(x * scale2 + lse_row[i]);
            if (masked.value && mine + column > row + 8 * i) x = 0;
        });
#pragma unroll
        for (int i = 0; i < 32; i++)
            s[i / 16][i / 4 % 4][i % 4] *= dp[i / 16][i / 4 % 4][i % 4];  // dS = P (dP - delta)
        pack_fragment(ds, s, 0);
        put_fragments(sh.ds[warp], ds);

        // dq += dS k: first with the keys of this warp's dS, then with those of the other warp of the pair.
        const int at = lane_of_columns<D>(side);
        warp_multiply_add<D, 2>(grad, ds, sh.k[0][mine], at);
        pair_sync(warp / 2);
        get_fragments(ds, sh.ds[warp ^ 1]);
        warp_multiply_add<D, 2>(grad, ds, sh.k[0][others], at);
    };
    for (int n = 0; n < tile; n++) step(n, std::false_type());
    step(tile, std::true_type());  // on the diagonal

    // Epilogue: dq, times scale.
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int m = i / 2, half = i % 2, t = q0 + row + 8 * i;
        floatX* to = dq + row_of(head, t, T, H) * 3 * D + 8 * side + lane % 4 * 2;
        if (t >= T) continue;
#pragma unroll
        for (int j = 0; j < D * 3 / 16; j++)
            store_pair(to + 16 * j, grad[m][j][2 * half] * shape.scale, grad[m][j][2 * half + 1] * shape.scale);
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

// Initializes s (32, 32): every row gets the same numbers, one per column.
__device__ __forceinline__ void start_columns(float (&s)[2][4][4], const float* columns) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const float2 x = *(const float2*)(columns + 8 * n + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) s[i / 2][n][i % 2 * 2] = x.x, s[i / 2][n][i % 2 * 2 + 1] = x.y;
    }
}

// Rows are keys: s, dp, p and ds are transposed.
template <int D>
__global__ void __launch_bounds__(WARPS * 32, 2)
    attention_portable_dkv_kernel(floatX* dkv, float* rope_part, const float* start_lse, const float* start_delta,
                                  const floatX* dout, const floatX* q, const floatX* kv, const floatX* k_rope,
                                  AttnShape shape, int64_t padded, Order order) {
    extern __shared__ __align__(1024) char raw[];
    PortableKeysShared<D>& sh = *(PortableKeysShared<D>*)raw;
    const int T = (int)shape.T, H = (int)shape.H, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int side = warp % 2, mine = side * 32, others = 32 - mine;  // columns of a tile
    const auto [head, rank] = order.place(blockIdx.x);
    const int tile = rank, k0 = tile * STEP, pair_row = warp / 2 * 32, row = pair_row + lane / 4;
    const float scale2 = shape.scale * LOG2E;

    // The head's tensors, and the first copies: keys, values and the first queries; then their dout.
    const int64_t start = row_of(head, 0, T, H);
    q += start * 3 * D, dout += start * 2 * D, kv += start * 4 * D;
    k_rope += head / H * shape.T * shape.k_rope_stride, start_lse += head * padded, start_delta += head * padded;
    auto copy_numbers = [&](float* to, const float* from, int m) {  // one for each of the tile's queries
        if (threadIdx.x < STEP / 4) copy_async_16(to + threadIdx.x * 4, from + m * STEP + threadIdx.x * 4, 16);
        copy_async_commit();
    };
    auto copy_queries = [&](int m) {
        copy_tile<D, STEP, 3>(sh.q, q, shape.H * 3 * D, m * STEP, T);
        copy_numbers(sh.lse, start_lse, m);
    };
    auto copy_dout = [&](int m) {
        copy_tile<D, STEP, 2>(sh.dout, dout, shape.H * 2 * D, m * STEP, T);
        copy_numbers(sh.delta, start_delta, m);
    };
    copy_tile<D, STEP, 2>(sh.k, kv, shape.H * 4 * D, k0, T);
    copy_tile<D, STEP, 1>(sh.k + 2, k_rope, shape.k_rope_stride, k0, T);
    copy_tile<D, STEP, 2>(sh.v, kv + 2 * D, shape.H * 4 * D, k0, T);
    copy_queries(tile);

    // Accumulators, this warp's columns: dk with its rope part, and dv.
    float dk[2][D * 3 / 16][4] = {}, dv[2][D / 8][4] = {};
    auto step = [&](int m, auto masked) {
        float s[2][4][4];
        uint32_t p[2][2][4], ds[2][2][4], other[2][2][4];

        // The queries have arrived, and all warps are done with the preceding dout. While the new dout loads: S^T = k
        // q^T - lse / scale and P^T = exp(scale S^T).
        copy_async_wait<0>();
        __syncthreads();
        copy_dout(m);
        start_columns(s, sh.lse + mine);
        warp_multiply_rows<D, 3, STEP>(s, sh.k[0][pair_row], sh.q[0][mine]);
        for_each(s, [&](float& x, int i, int column) {
            x = exp2_approx(x * scale2);
            if (masked.value && mine + column < row + 8 * i) x = 0;
        });
        pack_fragment(p, s, 0);
        put_fragments(sh.p[warp], p);

        // dout has arrived: dP^T = v dout^T - delta, dS^T = P^T (dP^T - delta), with P rounded as the GEMM uses it.
        copy_async_wait<0>();
        __syncthreads();
        start_columns(s, sh.delta + mine);
        warp_multiply_rows<D, 2, STEP>(s, sh.v[0][pair_row], sh.dout[0][mine]);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const uint32_t both = p[i / 16][i / 8 % 2][i / 2 % 4];
            s[i / 16][i / 4 % 4][i % 4] *= __uint_as_float(i % 2 ? both & 0xffff0000u : both << 16);
        }
        pack_fragment(ds, s, 0);
        put_fragments(sh.ds[warp], ds);

        // dk += dS^T q: first with the queries of this warp's dS, then with those of the other warp of the pair.
        const int at = lane_of_columns<D>(side);
        warp_multiply_add<D, 2>(dk, ds, sh.q[0][mine], at);
        pair_sync(warp / 2);
        get_fragments(other, sh.ds[warp ^ 1]);
        warp_multiply_add<D, 2>(dk, other, sh.q[0][others], at);

        // All warps are done with the queries: the next ones load during dv += P^T dout.
        __syncthreads();
        if ((m + 1) * STEP < T) copy_queries(m + 1);
        warp_multiply_add<D, 2>(dv, p, sh.dout[0][mine], at);
        get_fragments(other, sh.p[warp ^ 1]);
        warp_multiply_add<D, 2>(dv, other, sh.dout[0][others], at);
    };
    step(tile, std::true_type());  // on the diagonal
    for (int m = tile + 1; m * STEP < T; m++) step(m, std::false_type());

#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Epilogue: dk, times scale, and dv. The rope part is stored per head in float32.
        const int m = i / 2, e = i % 2 * 2, t = k0 + row + 8 * i, column = 8 * side + lane % 4 * 2;
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

template <int D>
void portable_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out, const real* lse,
                       const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape s, Ctx* ctx) {
    const Workspace w = get_workspace(s, ctx);
    const Order order = order_of(s, STEP);
    run_delta<D>(w, dout, out, lse, s, ctx);
    launch(attention_portable_dq_kernel<D>, order.total(), WARPS * 32, sizeof(PortableQueriesShared<D>), ctx, dq, w.lse,
           w.delta, dout, q, kv, k_rope, s, w.padded, order);
    launch(attention_portable_dkv_kernel<D>, order.total(), WARPS * 32, sizeof(PortableKeysShared<D>), ctx, dkv,
           w.rope_part, w.lse, w.delta, dout, q, kv, k_rope, s, w.padded, order);
    run_sum_rope<D>(dk_rope, w, s, ctx);
}

}  // namespace

#endif
