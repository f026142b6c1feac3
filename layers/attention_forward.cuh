// Forward of layers/attention.cu. A block owns 128 queries of a head and walks the keys from the diagonal back, in
// tiles of 128:
//
//   for each tile of keys:  S = q k^T,  online softmax,  o += P v
//
// Each consumer warpgroup issues the scores of the next tile and P v of this tile together. It computes the softmax of
// the scores while P v runs. The two warpgroups take turns at issuing (named barriers 1 and 2): the GEMMs of one
// overlap the softmax of the other.
#ifndef LAYERS_ATTENTION_FORWARD_CUH
#define LAYERS_ATTENTION_FORWARD_CUH

namespace {

// Shared memory of a block, in chunks of D columns: its queries, and double buffers of keys and of values.
template <int D>
struct ForwardShared {
    floatX q[3][TILE][D];
    floatX k[2][3][TILE][D];
    floatX v[2][2][TILE][D];
    Work work;
    Ring<2> k_ring, v_ring;
    __device__ void init() { work.ring.init(), k_ring.init(), v_ring.init(); }
};

template <int D>
__global__ void __launch_bounds__(THREADS, 1)
    attention_forward_kernel(const __grid_constant__ Maps maps, floatX* out, float* lse, float* max_logit, int* counter,
                             Order order, int T, int H, float scale) {
    ForwardShared<D>& sh = shared_memory<ForwardShared<D>>();

    if (threadIdx.x < 128) {  // producer
        registers_fewer<24>();
        if (threadIdx.x == 0) {
            // One thread takes work tiles and issues their loads.
            int k_use = 0, v_use = 0;
            for (int use = 0, work = blockIdx.x; sh.work.hand_out(use, work, order, counter); use++) {
                // The queries. Meanwhile the number of the next work tile is drawn.
                const auto [head, rank] = order.place(work);
                int b = head / H, h = head % H, tile = order.tiles - 1 - rank;
                barrier_expect(&sh.work.ring.full[0], sizeof(sh.q));
                tma_load(sh.q, &maps.q, &sh.work.ring.full[0], 0, h, tile * TILE, 0, b);
                work = gridDim.x + atomicAdd(counter, 1);

                // Keys and values from the diagonal back, in the order in which the consumers use them.
                for (int n = tile; n >= -1; n--) {  // keys of tile n, then values of tile n + 1
                    if (n >= 0) {
                        int i = k_use % 2;
                        sh.k_ring.wait_empty(k_use++);
                        barrier_expect(&sh.k_ring.full[i], sizeof(sh.k[0]));
                        tma_load(sh.k[i][0], &maps.kv, &sh.k_ring.full[i], 0, h, n * TILE, 0, b);
                        tma_load(sh.k[i][2], &maps.rope, &sh.k_ring.full[i], 0, n * TILE, b);
                    }
                    if (n < tile) {
                        int i = v_use % 2;
                        sh.v_ring.wait_empty(v_use++);
                        barrier_expect(&sh.v_ring.full[i], sizeof(sh.v[0]));
                        tma_load(sh.v[i], &maps.kv, &sh.v_ring.full[i], 0, h, (n + 1) * TILE, 2, b);
                    }
                }
            }
        }
    } else {
        // The consumers: the rows of this thread, and the descriptors of the operands.
        registers_more<240>();
        const int group = uniform(threadIdx.x / 128 - 1), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
        const int row = group * 64 + warp * 16 + lane / 4;  // in the tile; the thread also holds row + 8
        const float scale2 = scale * LOG2E;
        const uint64_t q_at = operand<D>(sh.q[0][group * 64]);
        const uint64_t k_at = operand<D>(sh.k);
        const uint64_t v_at = operand<D>(sh.v, TILE * D * 2);
        const int k_stage = sizeof(sh.k[0]) / 16, v_stage = sizeof(sh.v[0]) / 16;

        // The position of this warpgroup in both rings, and the turns at issuing.
        int k_use = 0, v_use = 0;
        if (group == 1) named_arrive(1, 256);  // the first turn is group 0's
        auto my_turn = [&] { named_sync(1 + group, 256); };
        auto your_turn = [&] { named_arrive(2 - group, 256); };

        for (int use = 0, work; (work = sh.work.take(use)) < order.total(); use++) {
            const auto [head, rank] = order.place(work);
            // The work tile: 128 queries of a head.
            const int tile = order.tiles - 1 - rank;

            // o: the accumulator of P v, before the division. s: scores, then probabilities. top, sum: maximum and sum
            // of the two rows.
            float o[D], s[TILE / 2], top[2], sum[2], shrink[2];
            uint32_t p[TILE / 4];
            zero(o);

            // The online softmax, P = exp(scale (s - top)): the new maxima, the factor that rescales the earlier sums,
            // and the sums per thread.
            auto softmax = [&](bool first) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float old = top[half], most = s[2 * half];
#pragma unroll
                    for (int j = 0; j < TILE / 8; j++)
                        most = fmaxf(most, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
                    most = quad_max(most);
                    if (!first) most = fmaxf(most, old);
                    top[half] = most;
                    // Rescaling of the earlier sums. The factor is exactly 1 where the maximum stays: anything else,
                    // such as the rounding of old * scale2 - most * scale2, would grow from tile to tile.
                    shrink[half] = first ? 1 : exp2_approx((old - most) * scale2);
                    // exp as a power of two: scale2 = scale log2(e).
                    const float shift = most * scale2;
                    float here = 0;
#pragma unroll
                    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float& x = s[4 * j + 2 * half + e];
                            x = exp2_approx(x * scale2 - shift);
                            here += x;
                        }
                    sum[half] = first ? here : sum[half] * shrink[half] + here;
                }
            };
            auto pack_p = [&] {
#pragma unroll
                for (int i = 0; i < TILE / 4; i++) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
            };

            // The tile on the diagonal: S = q k^T, masked, and its softmax.
            sh.k_ring.wait_full(k_use);
            my_turn();
            wgmma_fence();
            multiply_rows<D, TILE, 3>(s, q_at, k_at + k_use % 2 * k_stage);
            wgmma_commit();
            your_turn();
            wgmma_wait<0>();
            wgmma_pin(s);
            sh.k_ring.release(k_use++);
#pragma unroll
            for (int i = 0; i < TILE / 2; i++)  // the diagonal: keys after the query
                if (i / 4 * 8 + lane % 4 * 2 + i % 2 > row + i / 2 % 2 * 8) s[i] = -INFINITY;
            softmax(true);
            pack_p();

            // The tiles before it: S of this tile and o += P v of the preceding tile are issued together.
            for (int n = tile - 1; n >= 0; n--) {
                sh.k_ring.wait_full(k_use);
                my_turn();
                wgmma_pin(o);
                wgmma_fence();
                multiply_rows<D, TILE, 3>(s, q_at, k_at + k_use % 2 * k_stage);
                wgmma_commit();
                sh.v_ring.wait_full(v_use);
                wgmma_fence();
                multiply_add<D, 2 * D, TILE>(o, p, v_at + v_use % 2 * v_stage);
                wgmma_commit();
                your_turn();
                wgmma_wait<1>();
                wgmma_pin(s);

                // The softmax of this tile runs while P v does.
                sh.k_ring.release(k_use++);
                softmax(false);

                // P v is accumulated: o is rescaled to the new maximum.
                wgmma_wait<0>();
                wgmma_pin(o);
                sh.v_ring.release(v_use++);
#pragma unroll
                for (int i = 0; i < D; i++) o[i] *= shrink[i / 2 % 2];
                pack_p();
            }

            // The last tile: o += P v.
            sh.work.ring.release(use);  // q is read
            sh.v_ring.wait_full(v_use);
            wgmma_pin(o);
            wgmma_fence();
            multiply_add<D, 2 * D, TILE>(o, p, v_at + v_use % 2 * v_stage);
            wgmma_commit();
            wgmma_wait<0>();
            wgmma_pin(o);
            sh.v_ring.release(v_use++);

            // out = o / sum, lse = scale top + ln(sum).
            float largest = -INFINITY;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int t = tile * TILE + row + 8 * half;
                float l = quad_sum(sum[half]);
                if (t < T && lane % 4 == 0) lse[(int64_t)head * T + t] = top[half] * scale + logf(l);
                store_row<2 * D>(out + row_of(head, t, T, H) * 2 * D, o, half, 1 / l, t < T);
                if (t < T) largest = fmaxf(largest, top[half] * scale);
            }
            take_in_logit(max_logit, largest);
        }
    }
}

template <int D>
void run_forward(floatX* out, real* lse, real* max_logit, const floatX* q, const floatX* kv, const floatX* k_rope,
                 AttnShape s, Ctx* ctx) {
    const Order order = order_of(s, TILE);
    launch_long(attention_forward_kernel<D>, min_i64(order.total(), ctx->sms), THREADS, sizeof(ForwardShared<D>), ctx,
                maps_of(q, nullptr, kv, k_rope, TILE, TILE, s, ctx), out, lse, max_logit, ctx->counter, order, s.T, s.H,
                s.scale);
}

}  // namespace

#endif
