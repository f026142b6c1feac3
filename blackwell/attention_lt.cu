// Attention as its formula reads, from cuBLASLt products with the scores in memory. Some heads of a sequence are worked
// on at a time, some queries of them against all the keys that those see: scores and dP as float32, P and dS as bf16
// for the products they go into. dk and dv are summed in float32 over the pieces of queries, in order, and dk_rope over
// the heads, in order: the same bits on every run. Simple rather than fast: every score goes through memory several
// times, which bounds it, and half of the pieces on the diagonal is masked and multiplied for nothing.
#include "blackwell/attention_lt.cuh"

#include "device/lt.cuh"
#include "layers/rows.cuh"

namespace {

enum { WARPS = 8 };  // a warp takes a row of scores

// Sizes of a piece, and where it lies in the workspace.
struct ScorePiece {
    int64_t heads, queries, keys;  // keys: T, padded so that every row of scores lies on 16 bytes
    float *scores, *dp;            // (heads, queries, keys)
    floatX *p, *ds;                // (heads, queries, keys)
    float *dk, *dv;                // (heads, T, nope + rope), (heads, T, v)
    float* rope_sum;               // (T, rope)
    size_t bytes;
};

// Up to 512 queries and all heads, as long as the scores take no more than 12 MiB and a piece 20.
ScorePiece piece_of(AttnShape s, char* base) {
    // Bytes of a score in all its four forms.
    const int64_t row = 2 * (int64_t)(sizeof(float) + sizeof(floatX)), width = s.nope + s.rope + s.v;
    ScorePiece w;
    w.keys = ceil_div(s.T, 8) * 8;

    // Queries first: halved until they fit, or are no more than T. Then as many heads as fit.
    w.queries = 512;
    while (w.queries > 16 && (w.queries / 2 >= s.T || w.queries * w.keys * row > 12 << 20)) w.queries /= 2;
    const int64_t scores = w.queries * w.keys, head = scores * row + s.T * width * (int64_t)sizeof(float);
    const int64_t fit = (20 << 20) / head;
    w.heads = fit < 1 ? 1 : fit < s.H ? fit : s.H;

    // The buffers, one after the other.
    w.scores = (float*)(base + LT_WORKSPACE);
    w.dp = w.scores + w.heads * scores;
    w.p = (floatX*)(w.dp + w.heads * scores);
    w.ds = w.p + w.heads * scores;
    w.dk = (float*)(w.ds + w.heads * scores);
    w.dv = w.dk + w.heads * s.T * (s.nope + s.rope);
    w.rope_sum = w.dv + w.heads * s.T * s.v;
    w.bytes = (size_t)((char*)(w.rope_sum + s.T * s.rope) - base);
    return w;
}

// The row of scores that this warp takes: query `t` of head `h`, both from the piece's first on; `seen` keys.
struct Row {
    int64_t h, t, at, seen;
    bool inside;
    __device__ Row(const ScorePiece& w, int64_t heads, int64_t first, int64_t rows) {
        const int64_t i = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
        inside = i < heads * rows;
        h = i / rows, t = i % rows;
        at = (h * w.queries + t) * w.keys;
        seen = first + t + 1;
    }
};

// P = exp(scale s - lse), 0 beyond the diagonal; `keys` columns are written.
__global__ void __launch_bounds__(32 * WARPS) softmax_kernel(ScorePiece w, float* lse, int64_t heads, int64_t first,
                                                             int64_t rows, int64_t keys, int64_t T, float scale) {
    // The row of this warp.
    const Row r(w, heads, first, rows);
    if (!r.inside) return;
    const float* s = w.scores + r.at;
    const int lane = threadIdx.x % 32;

    // lse = scale max + ln sum exp(scale (s - max))
    float top = -INFINITY, sum = 0;
    for (int64_t j = lane; j < r.seen; j += 32) top = fmaxf(top, s[j]);
    top = warp_max(top);
    for (int64_t j = lane; j < r.seen; j += 32) sum += expf(scale * (s[j] - top));
    const float z = scale * top + logf(warp_sum(sum));

    // P, and lse for backward.
    for (int64_t j = lane; j < keys; j += 32) w.p[r.at + j] = (floatX)(j < r.seen ? expf(scale * s[j] - z) : 0.0f);
    if (lane == 0) lse[r.h * T + first + r.t] = z;
}

// P again, and dS = scale P (dP - delta), delta = <dout, out> of the row. dout, out: (T, H, v) from the piece's head.
__global__ void __launch_bounds__(32 * WARPS)
    softmax_backward_kernel(ScorePiece w, const float* lse, const floatX* dout, const floatX* out, int64_t heads,
                            int64_t first, int64_t rows, int64_t keys, AttnShape shape) {
    // The row of this warp.
    const Row r(w, heads, first, rows);
    if (!r.inside) return;
    const float *s = w.scores + r.at, *dp = w.dp + r.at;
    const int lane = threadIdx.x % 32;
    const int64_t row = ((first + r.t) * shape.H + r.h) * shape.v;

    // delta = <dout, out>
    float delta = 0;
    for (int64_t c = lane; c < shape.v; c += 32) delta += (float)dout[row + c] * (float)out[row + c];
    delta = warp_sum(delta);

    // P = exp(scale s - lse), dS = scale P (dP - delta)
    const float z = lse[r.h * shape.T + first + r.t];
    for (int64_t j = lane; j < keys; j += 32) {
        const float p = j < r.seen ? expf(shape.scale * s[j] - z) : 0.0f;
        w.p[r.at + j] = (floatX)p;
        w.ds[r.at + j] = (floatX)(j < r.seen ? shape.scale * p * (dp[j] - delta) : 0.0f);
    }
}

// dkv (T, H, nope + v), from the piece's head on.
__global__ void __launch_bounds__(256) store_dkv_kernel(floatX* dkv, ScorePiece w, int64_t heads, AttnShape s) {
    // A thread an element: of k_nope from dk, of v from dv.
    const int64_t width = s.nope + s.v, i = blockIdx.x * (int64_t)256 + threadIdx.x;
    const int64_t c = i % width, h = i / width % heads, t = i / width / heads, row = h * s.T + t;
    if (t >= s.T) return;
    const float d = c < s.nope ? w.dk[row * (s.nope + s.rope) + c] : w.dv[row * s.v + c - s.nope];
    dkv[(t * s.H + h) * width + c] = (floatX)d;
}

// rope_sum = (begin) or += the heads' parts; the sum of all of them is dk_rope.
__global__ void __launch_bounds__(256)
    sum_rope_kernel(floatX* dk_rope, ScorePiece w, int64_t heads, bool begin, AttnShape s) {
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, t = i / s.rope, c = i % s.rope;
    if (t >= s.T) return;
    float sum = begin ? 0 : w.rope_sum[i];
    for (int64_t h = 0; h < heads; h++) sum += w.dk[(h * s.T + t) * (s.nope + s.rope) + s.nope + c];
    w.rope_sum[i] = sum;
    dk_rope[t * s.k_rope_stride + c] = (floatX)sum;
}

// Operands of a sequence's heads from `h` on, as matrices (T, width), a head a member of the batch.
struct Heads {
    AttnShape s;
    int64_t b, h;
    LtMatrix q(const floatX* p, int64_t t) const { return of(p, s.nope + s.rope, t); }
    LtMatrix kv(const floatX* p) const { return of(p, s.nope + s.v, 0); }
    LtMatrix out(const floatX* p, int64_t t) const { return of(p, s.v, t); }
    LtMatrix k_rope(const floatX* p) const { return {p + b * s.T * s.k_rope_stride, s.k_rope_stride}; }

   private:
    LtMatrix of(const floatX* p, int64_t width, int64_t t) const {
        return {p + ((b * s.T + t) * s.H + h) * width, s.H * width, width};
    }
};

// The same matrices from column `c` on.
LtMatrix columns(LtMatrix x, int64_t c) { return {(const floatX*)x.p + c, x.ld, x.step}; }

// Calls work(heads of a sequence, how many, first query, queries, keys they see) for all pieces, and before and after
// the queries of some heads begin and end with (heads of a sequence, how many).
template <typename Begin, typename Work, typename End>
void for_pieces(AttnShape s, const ScorePiece& w, Begin begin, Work work, End end) {
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.H; h += w.heads) {
            // Some heads of a sequence.
            const Heads at = {s, b, h};
            const int64_t heads = s.H - h < w.heads ? s.H - h : w.heads;
            begin(at, heads);
            for (int64_t t = 0; t < s.T; t += w.queries) {
                // Some queries of them, against the keys up to the last of these.
                const int64_t rows = s.T - t < w.queries ? s.T - t : w.queries;
                work(at, heads, t, rows, t + rows);
            }
            end(at, heads);
        }
}

ScorePiece get_piece(AttnShape s, Ctx* ctx) {
    const ScorePiece w = piece_of(s, ctx->workspace);
    ctx_workspace<char>(ctx, (int64_t)w.bytes);
    return w;
}

// q k^T of a piece, without scale and mask.
void multiply_scores(const ScorePiece& w, LtMatrix q, LtMatrix kv, LtMatrix k_rope, int64_t heads, int64_t rows,
                     int64_t keys, AttnShape s, Ctx* ctx) {
    const LtMatrix scores = {w.scores, w.keys, w.queries * w.keys};
    LtProduct product = {.m = rows, .n = keys, .k = s.nope, .transpose_b = true, .batch = heads, .real_out = true};
    lt_multiply(scores, q, kv, product, ctx);
    product.k = s.rope, product.accumulate = true;
    lt_multiply(scores, columns(q, s.nope), k_rope, product, ctx);
}

}  // namespace

size_t attention_lt_workspace(AttnShape s) { return piece_of(s, NULL).bytes; }

void attention_lt_forward(floatX* out, real* lse, const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape s,
                          Ctx* ctx) {
    // Buffers as matrices.
    const ScorePiece w = get_piece(s, ctx);
    const LtMatrix p = {w.p, w.keys, w.queries * w.keys};
    auto nothing = [](Heads, int64_t) {};
    auto work = [&](Heads at, int64_t heads, int64_t t, int64_t rows, int64_t keys) {
        // S = q k^T
        multiply_scores(w, at.q(q, t), at.kv(kv), at.k_rope(k_rope), heads, rows, keys, s, ctx);
        // P and lse
        softmax_kernel<<<blocks_for(heads * rows, WARPS), 32 * WARPS, 0, ctx->stream>>>(
            w, lse + (at.b * s.H + at.h) * s.T, heads, t, rows, keys, s.T, s.scale);
        LAUNCH_CHECK();
        // out = P v
        lt_multiply(at.out(out, t), p, columns(at.kv(kv), s.nope), {.m = rows, .n = s.v, .k = keys, .batch = heads},
                    ctx);
    };
    for_pieces(s, w, nothing, work, nothing);
}

void attention_lt_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out,
                           const real* lse, const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape s,
                           Ctx* ctx) {
    const ScorePiece w = get_piece(s, ctx);
    const int64_t qk = s.nope + s.rope, step = w.queries * w.keys;
    const LtMatrix p = {w.p, w.keys, step}, ds = {w.ds, w.keys, step}, dp = {w.dp, w.keys, step};
    const LtMatrix dk = {w.dk, qk, s.T * qk}, dv = {w.dv, s.v, s.T * s.v};
    auto begin = [&](Heads, int64_t) { device_zero(w.dk, (size_t)((char*)w.rope_sum - (char*)w.dk), ctx); };
    auto work = [&](Heads at, int64_t heads, int64_t t, int64_t rows, int64_t keys) {
        // The piece's operands.
        const LtMatrix q_at = at.q(q, t), dq_at = at.q(dq, t), dout_at = at.out(dout, t), kv_at = at.kv(kv);

        // S = q k^T, dP = dout v^T
        multiply_scores(w, q_at, kv_at, at.k_rope(k_rope), heads, rows, keys, s, ctx);
        lt_multiply(dp, dout_at, columns(kv_at, s.nope),
                    {.m = rows, .n = keys, .k = s.v, .transpose_b = true, .batch = heads, .real_out = true}, ctx);

        // P again, and dS
        const int64_t head = (at.b * s.T * s.H + at.h) * s.v;
        softmax_backward_kernel<<<blocks_for(heads * rows, WARPS), 32 * WARPS, 0, ctx->stream>>>(
            w, lse + (at.b * s.H + at.h) * s.T, dout + head, out + head, heads, t, rows, keys, s);
        LAUNCH_CHECK();

        // dq = dS k
        lt_multiply(dq_at, ds, kv_at, {.m = rows, .n = s.nope, .k = keys, .batch = heads}, ctx);
        lt_multiply(columns(dq_at, s.nope), ds, at.k_rope(k_rope), {.m = rows, .n = s.rope, .k = keys, .batch = heads},
                    ctx);

        // dk += dS^T q, dv += P^T dout: sums over the pieces of queries
        LtProduct over_queries = {
            .m = keys, .n = qk, .k = rows, .transpose_a = true, .batch = heads, .real_out = true, .accumulate = true};
        lt_multiply(dk, ds, q_at, over_queries, ctx);
        over_queries.n = s.v;
        lt_multiply(dv, p, dout_at, over_queries, ctx);
    };
    auto end = [&](Heads at, int64_t heads) {
        // All queries of these heads are in: dk and dv are rounded, dk_rope takes their part.
        store_dkv_kernel<<<blocks_for(s.T * heads * (s.nope + s.v), 256), 256, 0, ctx->stream>>>(
            dkv + (at.b * s.T * s.H + at.h) * (s.nope + s.v), w, heads, s);
        sum_rope_kernel<<<blocks_for(s.T * s.rope, 256), 256, 0, ctx->stream>>>(dk_rope + at.b * s.T * s.k_rope_stride,
                                                                                w, heads, at.h == 0, s);
        LAUNCH_CHECK();
    };
    for_pieces(s, w, begin, work, end);
}
