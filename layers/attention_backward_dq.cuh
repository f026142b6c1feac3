// dq of layers/attention_backward.cuh. A block owns 128 queries of a head and walks the keys from the diagonal back, in
// tiles of 80:
//
//   for each tile of keys:  S = q k^T,  P = exp(scale S - lse),  dP = dout v^T,  dS = P (dP - delta),  dq += dS k
//
// dq += dS k runs one tile late, so that the tensor cores have work while P is computed. A consumer warpgroup, with the
// number of the tile:
//
//   tensor cores   | S1 | dq += dS0 k0 | dP1 |       | S2 | dq += dS1 k1 | dP2 |       | ..    time -->
//   P and dS            | P1           |     | dS1   |    | P2           |     | dS2   |
//
// The GEMMs of the other warpgroup fill the gaps. Keys are read one tile longer than values, and have one stage more.
// From registers, dS goes directly into a GEMM, as its left operand.
#pragma once

namespace {

// 80 keys: with 96 too few registers remain (WGMMAs would be serialized), and 64 are 3 % slower.
enum { DQ_KEYS = 80, K_STAGES = 3, V_STAGES = 2 };

// Shared memory of a block: its queries and their dout, three stages of keys and two of values.
template <int D>
struct QueriesShared {
    floatX q[3][TILE][D];
    floatX dout[2][TILE][D];
    floatX k[K_STAGES][3][DQ_KEYS][D];
    floatX v[V_STAGES][2][DQ_KEYS][D];
    Work work;
    Ring<K_STAGES> k_ring;
    Ring<V_STAGES> v_ring;
};

// The producer thread: takes work tiles and issues their loads.
template <int D>
__device__ __forceinline__ void produce(QueriesShared<D>& sh, const Maps& maps, const Problem& p) {
    int kv_use = 0;
    for (int use = 0, work = blockIdx.x; sh.work.hand_out(use, work, p); use++) {
        // q and dout of the work tile. Meanwhile the number of the next work tile is drawn.
        const auto [head, rank] = p.order.place(work);
        const int b = head / p.H, h = head % p.H, q0 = (p.order.tiles - 1 - rank) * TILE;
        barrier_expect(&sh.work.ring.full[0], sizeof(sh.q) + sizeof(sh.dout));
        tma_load(sh.q, &maps.q, &sh.work.ring.full[0], 0, h, q0, 0, b);
        tma_load(sh.dout, &maps.dout, &sh.work.ring.full[0], 0, h, q0, 0, b);
        work = gridDim.x + atomicAdd(p.counter, 1);

        // Values and keys from the diagonal back. Keys are used one iteration longer: dq += dS k comes a tile late.
        for (int n = (min(q0 + TILE, p.T) - 1) / DQ_KEYS; n >= 0; n--, kv_use++) {
            int i = kv_use % V_STAGES;
            sh.v_ring.wait_empty(kv_use);
            barrier_expect(&sh.v_ring.full[i], sizeof(sh.v[0]));
            tma_load(sh.v[i], &maps.kv, &sh.v_ring.full[i], 0, h, n * DQ_KEYS, 2, b);
            i = kv_use % K_STAGES;
            sh.k_ring.wait_empty(kv_use);
            barrier_expect(&sh.k_ring.full[i], sizeof(sh.k[0]));
            tma_load(sh.k[i][0], &maps.kv, &sh.k_ring.full[i], 0, h, n * DQ_KEYS, 0, b);
            tma_load(sh.k[i][2], &maps.rope, &sh.k_ring.full[i], 0, n * DQ_KEYS, b);
        }
    }
}

// The state of a consumer thread.
template <int D>
struct DqState {
    float scale2;
    uint64_t q, dout, k, v;  // descriptors of the operands; k and v: stage 0
    int kv_use = 0;          // the position in both rings

    // In a work tile: lse and delta of the thread's two rows, and the accumulator of dq.
    float lse[2], delta[2], grad[D * 3 / 2];

    // dS of the preceding tile of keys, and these keys: the operands of its late GEMM.
    uint32_t ds[DQ_KEYS / 4];
    uint64_t k_before;
};

// P = exp(scale S - lse) of the keys of tile n, in place. 0 for keys after the query.
template <bool MASKED, int D>
__device__ __forceinline__ void probabilities(float (&s)[DQ_KEYS / 2], const DqState<D>& c, Consumer me, int q0,
                                              int n) {
#pragma unroll
    for (int j = 0; j < DQ_KEYS / 2; j++) {
        s[j] = exp2_approx(s[j] * c.scale2 + c.lse[j / 2 % 2]);
        if (MASKED && n * DQ_KEYS + j / 4 * 8 + me.lane % 4 * 2 + j % 2 > q0 + me.row + j / 2 % 2 * 8) s[j] = 0;
    }
}

// One tile of keys: dq += dS k of the preceding tile, except in the FIRST. S and P of this tile, MASKED on the
// diagonal. Then dS = P (dP - delta).
template <bool FIRST, bool MASKED, int D>
__device__ __forceinline__ void step_over_keys(QueriesShared<D>& sh, DqState<D>& c, Consumer me, int q0, int n) {
    float s[DQ_KEYS / 2], dp[DQ_KEYS / 2];
    sh.v_ring.wait_full(c.kv_use);
    sh.k_ring.wait_full(c.kv_use);

    // Three GEMMs are issued: S = q k^T, dq += dS k, dP = dout v^T.
    wgmma_pin(c.grad);
    wgmma_fence();
    const uint64_t k_here = in_buffer(c.k, sh.k, c.kv_use);
    multiply_rows<D, DQ_KEYS, 3>(s, c.q, k_here);
    wgmma_commit();
    if (!FIRST) multiply_add<D, 3 * D, DQ_KEYS>(c.grad, c.ds, c.k_before);
    wgmma_commit();
    c.k_before = k_here;
    multiply_rows<D, DQ_KEYS, 2>(dp, c.dout, in_buffer(c.v, sh.v, c.kv_use));
    wgmma_commit();

    // S is complete.
    wgmma_wait<2>();
    wgmma_pin(s);
    probabilities<MASKED>(s, c, me, q0, n);

    // dq is accumulated: the keys of the preceding tile are released.
    wgmma_wait<1>();
    wgmma_pin(c.grad);
    if (!FIRST) sh.k_ring.release(c.kv_use - 1);

    // dP is complete: dS = P (dP - delta), rounded to bf16 for the next GEMM.
    wgmma_wait<0>();
    wgmma_pin(dp);
    sh.v_ring.release(c.kv_use);
#pragma unroll
    for (int j = 0; j < DQ_KEYS / 4; j++)
        c.ds[j] = pack_bf16(s[2 * j] * (dp[2 * j] + c.delta[j % 2]), s[2 * j + 1] * (dp[2 * j + 1] + c.delta[j % 2]));
    c.kv_use++;
}

// Mainloop: dq = the sum of dS k over the tiles of keys, from the diagonal back.
template <int D>
__device__ __forceinline__ void accumulate_dq(QueriesShared<D>& sh, DqState<D>& c, Consumer me, int q0, int T) {
    // The first tile of keys that this warpgroup needs. Earlier tiles of the walk come after all of its queries:
    // skipped.
    int n = (min(q0 + TILE, T) - 1) / DQ_KEYS, own = min(n, (q0 + me.group * 64 + 63) / DQ_KEYS);
    for (; n > own; n--, c.kv_use++) {
        sh.v_ring.skip(c.kv_use);
        sh.k_ring.skip(c.kv_use);
    }

    // The first tile, then tiles that the diagonal crosses, then tiles before the diagonal.
    step_over_keys<true, true>(sh, c, me, q0, n);
    for (n--; n >= 0 && n * DQ_KEYS + DQ_KEYS > q0 + me.group * 64 + 1; n--)
        step_over_keys<false, true>(sh, c, me, q0, n);
    for (; n >= 0; n--) step_over_keys<false, false>(sh, c, me, q0, n);
}

// A consumer: dq of 64 queries of each work tile.
template <int D>
__device__ __forceinline__ void consume(QueriesShared<D>& sh, Consumer me, floatX* dq, const float* lse,
                                        const float* delta, const Problem& p) {
    DqState<D> c;
    c.scale2 = p.scale * LOG2E;
    c.q = operand<D>(sh.q[0][me.group * 64]);
    c.dout = operand<D>(sh.dout[0][me.group * 64]);
    c.k = operand<D>(sh.k, DQ_KEYS * D * 2);
    c.v = operand<D>(sh.v);

    for (int use = 0, work; (work = sh.work.take(use)) < p.order.total(); use++) {
        // The work tile: 128 queries of a head.
        const auto [head, rank] = p.order.place(work);
        const int q0 = (p.order.tiles - 1 - rank) * TILE;
        zero(c.grad);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64_t at = (int64_t)head * p.order.tiles * TILE + q0 + me.row + 8 * half;
            c.lse[half] = lse[at] * c.scale2;
            c.delta[half] = delta[at];
        }

        // Mainloop.
        accumulate_dq(sh, c, me, q0, p.T);
        sh.work.ring.release(use);  // q and dout are read

        // The last tile of keys: dq += dS k.
        multiply_add_and_wait<D, 3 * D, DQ_KEYS>(c.grad, c.ds, c.k_before);
        sh.k_ring.release(c.kv_use - 1);

        // Epilogue: dq, times scale.
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = q0 + me.row + 8 * half;
            store_row<3 * D>(dq + row_of(head, t, p.T, p.H) * 3 * D, c.grad, half, p.scale, t < p.T);
        }
    }
}

template <int D>
__global__ void __launch_bounds__(THREADS, 1)
    attention_backward_dq_kernel(const __grid_constant__ Maps maps, floatX* dq, const float* lse, const float* delta,
                                 const Problem p) {
    run_block<QueriesShared<D>>([&](auto& sh) { produce(sh, maps, p); },
                                [&](auto& sh, Consumer me) { consume(sh, me, dq, lse, delta, p); });
}

}  // namespace
