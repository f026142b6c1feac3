// Backward of layers/attention.cu, four kernels in a row:
//
//   attention_delta_kernel         delta and lse, as initial accumulators
//   attention_backward_dq_kernel   dq. Its GEMM dq += dS k runs one tile late, together with the next tile's scores
//   attention_backward_dkv_kernel  dk, dv. Works on transposed scores (rows are keys), so that P^T and dS^T are left
//                                  operands too. Its 160 accumulator registers leave none for a late GEMM: the GEMMs of
//                                  the other warpgroup fill the gaps
//   attention_sum_rope_kernel      dk_rope, the sum over the heads
//
// In the two large kernels a block owns 128 rows, 64 for each consumer warpgroup. Their gradients stay in registers. dS
// goes from registers directly into a GEMM, as its left operand.
#ifndef LAYERS_ATTENTION_BACKWARD_CUH
#define LAYERS_ATTENTION_BACKWARD_CUH

namespace {

// Initial accumulators of the backward GEMMs, so that P = exp2(..) and dS = P * acc need no subtraction:
//
//   start_delta = -rowsum(dout * out),   start_lse = -lse / scale
//
// Rows beyond T get 0 and -inf, which make P and dS 0 there.
template <int D>
__global__ void attention_delta_kernel(float* start_delta, float* start_lse, const floatX* dout, const floatX* out,
                                       const float* lse, int64_t B, int64_t T, int64_t H, int64_t padded, float scale) {
    wait_for_previous();
    constexpr int LANES = 2 * D / 8;                                         // threads to a row, 8 columns each
    int64_t row = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / LANES;  // (b, t, h)
    int lane = threadIdx.x % LANES;
    int64_t h = row % H, t = row / H % padded, b = row / H / padded;
    if (b >= B) return;  // only whole warps leave (padded is a multiple of 128): the shuffles below need that

    // The thread's part of <dout, out>, then the sum over the row.
    float sum = 0;
    if (t < T) {
        int64_t at = ((b * T + t) * H + h) * 2 * D + lane * 8;
        float x[8], y[8];
        load(x, dout + at);
        load(y, out + at);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += x[i] * y[i];
    }
#pragma unroll
    for (int i = LANES / 2; i; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);

    // The initial accumulators of the row.
    if (lane == 0) {
        int64_t to = (b * H + h) * padded + t;
        start_delta[to] = -sum;
        start_lse[to] = t < T ? -lse[(b * H + h) * T + t] / scale : -INFINITY;
    }
}

// dk_rope = sum of the heads' parts (B, H, T, D) in the order of heads; 8 columns a thread.
template <int D>
__global__ void attention_sum_rope_kernel(floatX* dk_rope, const float* part, int64_t B, int64_t T, int64_t H,
                                          int64_t stride) {
    wait_for_previous();
    int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, token = i / (D / 8), column = i % (D / 8) * 8;
    if (token >= B * T) return;
    part += (token / T * H * T + token % T) * D + column;

    // The heads in order.
    float sum[8] = {};
#pragma unroll 4
    for (int64_t h = 0; h < H; h++) {
        float x[8];
        load_real(x, part + h * T * D);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    store(dk_rope + token * stride + column, sum);
}

// --- dq ---

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
    __device__ void init() {
        work.ring.init();
        k_ring.init();
        v_ring.init();
    }
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

    // The first tile, then tiles that the diagonal crosses, then those before it.
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

// --- dk, dv ---

// Initializes an accumulator: every row gets the same 2N numbers, one per column.
template <int N>
__device__ __forceinline__ void start_columns(float (&d)[N], const float* columns) {
#pragma unroll
    for (int j = 0; j < N / 4; j++) {
        float2 x = *(const float2*)(columns + 8 * j + threadIdx.x % 4 * 2);
        d[4 * j] = d[4 * j + 2] = x.x;
        d[4 * j + 1] = d[4 * j + 3] = x.y;
    }
}

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
    Ring<DK_STAGES, true> ring;  // each thread releases it, because each reads lse and delta
    Work work;
    __device__ void init() {
        work.ring.init();
        ring.init();
    }
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
    if (me.group == 1) sh.ring.skip(c.q_use++);  // the first queries all come before its keys

    // The tile on this group's diagonal, then those after it. No tile if all of its keys are beyond T.
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

// The first and the last of the four kernels, used on every GPU.
template <int D>
void run_delta(Workspace w, const floatX* dout, const floatX* out, const real* lse, AttnShape s, Ctx* ctx) {
    int64_t threads = s.B * w.padded * s.H * (D / 4);
    launch_early(attention_delta_kernel<D>, blocks_for(threads, 256), 256, 0, ctx, w.delta, w.lse, dout, out, lse, s.B,
                 s.T, s.H, w.padded, s.scale);
}

template <int D>
void run_sum_rope(floatX* dk_rope, Workspace w, AttnShape s, Ctx* ctx) {
    launch_early(attention_sum_rope_kernel<D>, blocks_for(s.B * s.T * (D / 8), 256), 256, 0, ctx, dk_rope, w.rope_part,
                 s.B, s.T, s.H, s.k_rope_stride);
}

template <int D>
void run_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out, const real* lse,
                  const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape s, Ctx* ctx) {
    // 1. delta and lse, the initial accumulators
    const Workspace w = get_workspace(s, ctx);
    run_delta<D>(w, dout, out, lse, s, ctx);

    // 2. dq: 128 queries a work tile
    const Problem p = problem_of(s, ctx);
    const int64_t blocks = min_i64(p.order.total(), ctx->sms);
    launch_long(attention_backward_dq_kernel<D>, blocks, THREADS, sizeof(QueriesShared<D>), ctx,
                maps_of(q, dout, kv, k_rope, TILE, DQ_KEYS, s, ctx), dq, w.lse, w.delta, p);

    // 3. dk and dv: 128 keys a work tile
    launch_long(attention_backward_dkv_kernel<D>, blocks, THREADS, sizeof(KeysShared<D>), ctx,
                maps_of(q, dout, kv, k_rope, DK_QUERIES, TILE, s, ctx), dkv, w.rope_part, w.lse, w.delta, p);

    // 4. dk_rope: the sum over the heads
    run_sum_rope<D>(dk_rope, w, s, ctx);
}

}  // namespace

#endif
