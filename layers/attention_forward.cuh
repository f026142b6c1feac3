// Forward of layers/attention.cu. A block owns 128 queries of a head and walks the keys from the diagonal back, in
// tiles of 128:
//
//   for each tile of keys:  S = q k^T,  online softmax,  o += P v
//
// P v runs one tile late: each consumer warpgroup issues the scores of a tile together with P v of the preceding tile.
// The two warpgroups take turns at issuing (named barriers 1 and 2). With the number of the tile:
//
//   warpgroup 0   | S1, P0 v0 |  softmax 1  | S2, P1 v1 |  softmax 2  | S3, P2 v2 | ..           time -->
//   warpgroup 1               | S1, P0 v0 |  softmax 1  | S2, P1 v1 |  softmax 2  | S3, P2 v2 | ..
//
// So the GEMMs of one warpgroup overlap the softmax of the other, and a softmax starts as soon as its scores are
// complete. The tensor cores bound forward: 2560 clocks for 128 x 128 scores, while exp2 takes about 1100.
#pragma once

namespace {

// Shared memory of a block, in chunks of D columns: its queries, and double buffers of keys and of values.
template <int D>
struct ForwardShared {
    floatX q[3][TILE][D];
    floatX k[2][3][TILE][D];
    floatX v[2][2][TILE][D];
    Work work;
    Ring<2> k_ring, v_ring;
};

// The producer thread: takes work tiles and issues their loads.
template <int D>
__device__ __forceinline__ void produce(ForwardShared<D>& sh, const Maps& maps, const Problem& p) {
    int k_use = 0, v_use = 0;
    for (int use = 0, work = blockIdx.x; sh.work.hand_out(use, work, p); use++) {
        // The queries. Meanwhile the number of the next work tile is drawn.
        const auto [head, rank] = p.order.place(work);
        const int b = head / p.H, h = head % p.H, tile = p.order.tiles - 1 - rank;
        barrier_expect(&sh.work.ring.full[0], sizeof(sh.q));
        tma_load(sh.q, &maps.q, &sh.work.ring.full[0], 0, h, tile * TILE, 0, b);
        work = gridDim.x + atomicAdd(p.counter, 1);

        // Keys and values from the diagonal back, in the order in which the consumers use them.
        for (int n = tile; n >= -1; n--) {  // keys of tile n, then values of tile n + 1
            if (n >= 0) {
                const int i = k_use % 2;
                sh.k_ring.wait_empty(k_use++);
                barrier_expect(&sh.k_ring.full[i], sizeof(sh.k[0]));
                tma_load(sh.k[i][0], &maps.kv, &sh.k_ring.full[i], 0, h, n * TILE, 0, b);
                tma_load(sh.k[i][2], &maps.rope, &sh.k_ring.full[i], 0, n * TILE, b);
            }
            if (n < tile) {
                const int i = v_use % 2;
                sh.v_ring.wait_empty(v_use++);
                barrier_expect(&sh.v_ring.full[i], sizeof(sh.v[0]));
                tma_load(sh.v[i], &maps.kv, &sh.v_ring.full[i], 0, h, (n + 1) * TILE, 2, b);
            }
        }
    }
}

// The state of a consumer thread.
template <int D>
struct ForwardState {
    float scale2;
    uint64_t q, k, v;          // descriptors of the operands; k and v: stage 0
    int k_use = 0, v_use = 0;  // the positions in both rings

    // In a work tile: o, the accumulator of P v before the division, and maximum and sum of the thread's two rows.
    float o[D], top[2], sum[2];

    // In a tile of keys: scores, then probabilities. p: rounded, the operand of P v. shrink rescales o.
    float s[TILE / 2], shrink[2];
    uint32_t p[TILE / 4];
};

// The two warpgroups take turns at issuing.
__device__ __forceinline__ void my_turn(int group) { named_sync(1 + group, 256); }
__device__ __forceinline__ void your_turn(int group) { named_arrive(2 - group, 256); }

// The online softmax, P = exp(scale (s - top)): the new maxima, the factor that rescales the earlier sums, and the sums
// per thread.
template <bool FIRST, int D>
__device__ __forceinline__ void softmax(ForwardState<D>& c) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float old = c.top[half], most = c.s[2 * half];
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) most = fmaxf(most, fmaxf(c.s[4 * j + 2 * half], c.s[4 * j + 2 * half + 1]));
        most = warp_max<4>(most);
        if (!FIRST) most = fmaxf(most, old);
        c.top[half] = most;
        // Rescaling of the earlier sums. The factor is exactly 1 where the maximum stays: anything else, such as the
        // rounding of old * scale2 - most * scale2, would grow from tile to tile.
        c.shrink[half] = FIRST ? 1 : exp2_approx((old - most) * c.scale2);
        // exp as a power of two: scale2 = scale log2(e).
        const float shift = most * c.scale2;
        float here = 0;
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float& x = c.s[4 * j + 2 * half + e];
                x = exp2_approx(x * c.scale2 - shift);
                here += x;
            }
        c.sum[half] = FIRST ? here : c.sum[half] * c.shrink[half] + here;
    }
}

// The tile of keys on the diagonal: S, masked, and its softmax.
template <int D>
__device__ __forceinline__ void step_on_diagonal(ForwardShared<D>& sh, ForwardState<D>& c, Consumer me) {
    sh.k_ring.wait_full(c.k_use);
    my_turn(me.group);
    wgmma_fence();
    multiply_rows<D, TILE, 3>(c.s, c.q, in_buffer(c.k, sh.k, c.k_use));
    wgmma_commit();
    your_turn(me.group);
    wgmma_wait<0>();
    wgmma_pin(c.s);
    sh.k_ring.release(c.k_use++);
#pragma unroll
    for (int i = 0; i < TILE / 2; i++)  // the diagonal: keys after the query
        if (i / 4 * 8 + me.lane % 4 * 2 + i % 2 > me.row + i / 2 % 2 * 8) c.s[i] = -INFINITY;
    softmax<true>(c);
    round_to_bf16(c.p, c.s);
}

// A tile of keys before the diagonal: S of this tile and o += P v of the preceding tile are issued together.
template <int D>
__device__ __forceinline__ void step_before_diagonal(ForwardShared<D>& sh, ForwardState<D>& c, Consumer me) {
    sh.k_ring.wait_full(c.k_use);
    my_turn(me.group);
    wgmma_pin(c.o);
    wgmma_fence();
    multiply_rows<D, TILE, 3>(c.s, c.q, in_buffer(c.k, sh.k, c.k_use));
    wgmma_commit();
    sh.v_ring.wait_full(c.v_use);
    wgmma_fence();
    multiply_add<D, 2 * D, TILE>(c.o, c.p, in_buffer(c.v, sh.v, c.v_use));
    wgmma_commit();
    your_turn(me.group);
    wgmma_wait<1>();
    wgmma_pin(c.s);

    // The softmax of this tile runs while P v does.
    sh.k_ring.release(c.k_use++);
    softmax<false>(c);

    // P v is accumulated: o is rescaled to the new maximum.
    wgmma_wait<0>();
    wgmma_pin(c.o);
    sh.v_ring.release(c.v_use++);
#pragma unroll
    for (int i = 0; i < D; i++) c.o[i] *= c.shrink[i / 2 % 2];
    round_to_bf16(c.p, c.s);
}

// Epilogue: out = o / sum, lse = scale top + ln(sum).
template <int D>
__device__ __forceinline__ void store_out(floatX* out, float* lse, float* max_logit, const ForwardState<D>& c,
                                          const Problem& p, Consumer me, int head, int tile) {
    float largest = -INFINITY;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int t = tile * TILE + me.row + 8 * half;
        const float l = quad_sum(c.sum[half]);
        if (t < p.T && me.lane % 4 == 0) lse[(int64_t)head * p.T + t] = c.top[half] * p.scale + logf(l);
        store_row<2 * D>(out + row_of(head, t, p.T, p.H) * 2 * D, c.o, half, 1 / l, t < p.T);
        if (t < p.T) largest = fmaxf(largest, c.top[half] * p.scale);
    }
    take_in_logit(max_logit, largest);
}

// A consumer: 64 queries of each work tile.
template <int D>
__device__ __forceinline__ void consume(ForwardShared<D>& sh, Consumer me, floatX* out, float* lse, float* max_logit,
                                        const Problem& p) {
    ForwardState<D> c;
    c.scale2 = p.scale * LOG2E;
    c.q = operand<D>(sh.q[0][me.group * 64]);
    c.k = operand<D>(sh.k);
    c.v = operand<D>(sh.v, TILE * D * 2);

    if (me.group == 1) named_arrive(1, 256);  // the first turn is group 0's
    for (int use = 0, work; (work = sh.work.take(use)) < p.order.total(); use++) {
        // The work tile: 128 queries of a head.
        const auto [head, rank] = p.order.place(work);
        const int tile = p.order.tiles - 1 - rank;

        // Mainloop: the keys from the diagonal back.
        zero(c.o);
        step_on_diagonal(sh, c, me);
        for (int n = tile - 1; n >= 0; n--) step_before_diagonal(sh, c, me);
        sh.work.ring.release(use);  // q is read

        // The last tile of keys: o += P v.
        sh.v_ring.wait_full(c.v_use);
        multiply_add_and_wait<D, 2 * D, TILE>(c.o, c.p, in_buffer(c.v, sh.v, c.v_use));
        sh.v_ring.release(c.v_use++);
        store_out(out, lse, max_logit, c, p, me, head, tile);
    }
}

template <int D>
__global__ void __launch_bounds__(THREADS, 1) attention_forward_kernel(const __grid_constant__ Maps maps, floatX* out,
                                                                       float* lse, float* max_logit, const Problem p) {
    run_block<ForwardShared<D>>([&](auto& sh) { produce(sh, maps, p); },
                                [&](auto& sh, Consumer me) { consume(sh, me, out, lse, max_logit, p); });
}

}  // namespace
