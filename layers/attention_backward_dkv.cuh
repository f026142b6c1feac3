// dk and dv of layers/attention_backward.cuh. A block owns 128 keys of a head and walks the queries from the diagonal
// on, in tiles of 64. Rows are keys, so that P^T and dS^T are left operands of GEMMs, in registers:
//
//   for each tile of queries:  S^T = k q^T,  P^T = exp(scale S^T - lse),  dP^T = v dout^T,  dS^T = P^T (dP^T - delta),
//                              dv += P^T dout,  dk += dS^T q
//
// The 160 accumulator registers of dk and dv leave none for a late GEMM. A consumer warpgroup:
//
//   tensor cores   | S^T |       | dP^T | dv += P^T dout | dk += dS^T q |    next tile -->
//   P and dS             | P^T   |      | dS^T           |
//
// The GEMMs of the other warpgroup fill the gaps. A query is a column: its lse and delta are loaded with its tile. lse
// and delta are initial accumulators, so P and dS need no subtraction.
#pragma once

namespace {

enum { DK_QUERIES = 64, DK_STAGES = 3 };

// Shared memory of a block: its keys and values, three stages of queries with their dout, lse and delta.
template <int D>
struct KeysShared {
    floatX k[3][TILE][D];
    floatX v[2][TILE][D];
    floatX q[DK_STAGES][3][DK_QUERIES][D];
    floatX dout[DK_STAGES][2][DK_QUERIES][D];
    float lse[DK_STAGES][DK_QUERIES];  // as attention_delta_kernel writes them
    float delta[DK_STAGES][DK_QUERIES];
    Ring<DK_STAGES, true> ring;  // each thread releases a stage, because each reads lse and delta
    Work work;
};

// The producer thread: takes work tiles and issues their loads.
template <int D>
__device__ __forceinline__ void produce(KeysShared<D>& sh, const Maps& maps, const float* lse, const float* delta,
                                        const Problem& p, int ends) {
    int q_use = 0;
    for (int use = 0, work = blockIdx.x; sh.work.hand_out(use, work, p); use++) {
        // k and v of the work tile. Meanwhile the number of the next work tile is drawn.
        const auto [head, rank] = p.order.place(work);
        const int b = head / p.H, h = head % p.H, k0 = rank * TILE;
        barrier_expect(&sh.work.ring.full[0], sizeof(sh.k) + sizeof(sh.v));
        tma_load(sh.k[0], &maps.kv, &sh.work.ring.full[0], 0, h, k0, 0, b);
        tma_load(sh.k[2], &maps.rope, &sh.work.ring.full[0], 0, k0, b);
        tma_load(sh.v, &maps.kv, &sh.work.ring.full[0], 0, h, k0, 2, b);
        work = gridDim.x + atomicAdd(p.counter, 1);

        // Queries from the diagonal on. q, dout, lse and delta of a tile share one full barrier.
        for (int m = k0 / DK_QUERIES; m < ends; m++, q_use++) {
            const int i = q_use % DK_STAGES;
            uint64_t* full = &sh.ring.full[i];
            const int64_t at = (int64_t)head * p.order.tiles * TILE + m * DK_QUERIES;
            sh.ring.wait_empty(q_use);
            barrier_expect(full, sizeof(sh.q[0]) + sizeof(sh.dout[0]) + 2 * sizeof(sh.lse[0]));
            tma_load(sh.q[i], &maps.q, full, 0, h, m * DK_QUERIES, 0, b);
            bulk_load(sh.lse[i], lse + at, sizeof(sh.lse[0]), full);
            tma_load(sh.dout[i], &maps.dout, full, 0, h, m * DK_QUERIES, 0, b);
            bulk_load(sh.delta[i], delta + at, sizeof(sh.delta[0]), full);
        }
    }
}

// The state of a consumer thread.
template <int D>
struct DkvState {
    float scale2;
    uint64_t k, v, q, dout;      // descriptors of the operands; q and dout: stage 0
    int q_use = 0;               // the position in the ring
    float dk[D * 3 / 2], dv[D];  // accumulators; dk with its rope part
};

// P^T = exp(scale S^T), in place. 0 before the diagonal.
template <bool MASKED>
__device__ __forceinline__ void probabilities(float (&s)[DK_QUERIES / 2], float scale2, Consumer me) {
#pragma unroll
    for (int j = 0; j < DK_QUERIES / 2; j++) {
        s[j] = exp2_approx(s[j] * scale2);
        if (MASKED && me.group * 64 + j / 4 * 8 + me.lane % 4 * 2 + j % 2 < me.row + j / 2 % 2 * 8) s[j] = 0;
    }
}

// One tile of 64 queries, MASKED on the diagonal: dv += P^T dout, dk += dS^T q. Rows are keys: s, dp, p and ds are
// transposed.
template <bool MASKED, int D>
__device__ __forceinline__ void step_over_queries(KeysShared<D>& sh, DkvState<D>& c, Consumer me) {
    const int i = c.q_use % DK_STAGES;
    float s[DK_QUERIES / 2], dp[DK_QUERIES / 2];
    uint32_t p[DK_QUERIES / 4], ds[DK_QUERIES / 4];
    sh.ring.wait_full(c.q_use);

    // S^T = k q^T - lse / scale: the accumulator starts from start_lse.
    start_columns(s, sh.lse[i]);
    wgmma_pin(s);
    wgmma_fence();
    multiply_rows<D, DK_QUERIES, 3>(s, c.k, in_buffer(c.q, sh.q, c.q_use), 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    probabilities<MASKED>(s, c.scale2, me);
    round_to_bf16(p, s);

    // dP^T - delta = v dout^T, where the accumulator starts from start_delta; and dv += P^T dout.
    start_columns(dp, sh.delta[i]);
    wgmma_pin(dp);
    wgmma_pin(c.dv);
    wgmma_fence();
    multiply_rows<D, DK_QUERIES, 2>(dp, c.v, in_buffer(c.dout, sh.dout, c.q_use), 1);
    wgmma_commit();
    multiply_add<D, 2 * D, DK_QUERIES>(c.dv, p, in_buffer(c.dout, sh.dout, c.q_use));
    wgmma_commit();

    // dS^T = P^T (dP^T - delta)
    wgmma_wait<1>();
    wgmma_pin(dp);
#pragma unroll
    for (int j = 0; j < DK_QUERIES / 4; j++)  // P as the GEMM used it: rounded
        ds[j] = pack_bf16(__uint_as_float(p[j] << 16) * dp[2 * j], __uint_as_float(p[j] & 0xffff0000u) * dp[2 * j + 1]);

    // dk += dS^T q
    multiply_add_and_wait<D, 3 * D, DK_QUERIES>(c.dk, ds, in_buffer(c.q, sh.q, c.q_use));
    wgmma_pin(c.dv);
    sh.ring.release(c.q_use++);
}

// Mainloop: dk and dv are summed over the tiles of queries, from the diagonal on.
template <int D>
__device__ __forceinline__ void accumulate_dkv(KeysShared<D>& sh, DkvState<D>& c, Consumer me, int k0, int ends) {
    int m = k0 / DK_QUERIES + me.group;
    if (me.group == 1) sh.ring.skip(c.q_use++);  // the first tile of queries comes before this group's keys

    // The tile on this group's diagonal, then the tiles after it. No tile if all keys of the group are beyond T.
    if (m++ < ends) step_over_queries<true>(sh, c, me);
    for (; m < ends; m++) step_over_queries<false>(sh, c, me);
}

// Epilogue: dk, times scale, and dv, of the thread's rows t and t + 8. The rope part is stored per head in float32.
template <int D>
__device__ __forceinline__ void store_dkv(floatX* dkv, float* rope_part, const DkvState<D>& c, const Problem& p,
                                          Consumer me, int head, int k0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = k0 + me.row + 8 * half;
        floatX* to = dkv + row_of(head, t, p.T, p.H) * 4 * D;
        store_row<2 * D>(to, c.dk, half, p.scale, t < p.T);
        store_row<2 * D>(to + 2 * D, c.dv, half, 1, t < p.T);
        float* part = rope_part + ((int64_t)head * p.T + t) * D + me.lane % 4 * 2;
        if (t >= p.T) continue;
#pragma unroll
        for (int j = D / 4; j < D * 3 / 8; j++)
            *(float2*)(part + 8 * j - 2 * D) =
                make_float2(c.dk[4 * j + 2 * half] * p.scale, c.dk[4 * j + 2 * half + 1] * p.scale);
    }
}

// A consumer: dk and dv of 64 keys of each work tile.
template <int D>
__device__ __forceinline__ void consume(KeysShared<D>& sh, Consumer me, floatX* dkv, float* rope_part, const Problem& p,
                                        int ends) {
    DkvState<D> c;
    c.scale2 = p.scale * LOG2E;
    // The group is added outside of operand(). Inside, the compiler would keep the 20 descriptors of k and v in
    // registers through the whole loop, and there are not enough registers.
    c.k = operand<D>(sh.k) + me.group * (64 * D / 8);
    c.v = operand<D>(sh.v) + me.group * (64 * D / 8);
    c.q = operand<D>(sh.q, DK_QUERIES * D * 2);
    c.dout = operand<D>(sh.dout, DK_QUERIES * D * 2);

    for (int use = 0, work; (work = sh.work.take(use)) < p.order.total(); use++) {
        // The work tile: 128 keys of a head.
        const auto [head, rank] = p.order.place(work);
        const int k0 = rank * TILE;
        zero(c.dk);
        zero(c.dv);
        accumulate_dkv(sh, c, me, k0, ends);
        sh.work.ring.release(use);  // k and v are read
        store_dkv(dkv, rope_part, c, p, me, head, k0);
    }
}

template <int D>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_dkv_kernel(const __grid_constant__ Maps maps, floatX* dkv, float* rope_part, const float* lse,
                                  const float* delta, const Problem p) {
    const int ends = (p.T + DK_QUERIES - 1) / DK_QUERIES;  // tiles of queries
    run_block<KeysShared<D>>([&](auto& sh) { produce(sh, maps, lse, delta, p, ends); },
                             [&](auto& sh, Consumer me) { consume(sh, me, dkv, rope_part, p, ends); });
}

}  // namespace
