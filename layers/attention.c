#include "layers/attention.h"

#include <string.h>

#include "device/cpu.h"

// Reference attention: one (sequence, head) at a time, in tiles of Q queries by Q keys.
//
//   S = scale * q k^T, masked where the key comes after the query
//
// Forward is an online softmax: it keeps a running maximum m and sum l per query, so a whole row of scores never
// exists. Backward recomputes S and gets P = exp(S - lse) directly.
enum { Q = 64 };

typedef struct Head {  // the tensors at head h of sequence b
    int64_t qk, q_row, kv_row;
    const floatX *q, *k_nope, *v, *k_rope;
} Head;

static Head head_of(const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape s, int64_t b, int64_t h) {
    Head head;
    head.qk = s.nope + s.rope;
    head.q_row = s.H * head.qk;
    head.kv_row = s.H * (s.nope + s.v);
    head.q = q + b * s.T * head.q_row + h * head.qk;
    head.k_nope = kv + b * s.T * head.kv_row + h * (s.nope + s.v);
    head.v = head.k_nope + s.nope;
    head.k_rope = k_rope + b * s.T * s.k_rope_stride;
    return head;
}

// Gathers keys first .. first + rows - 1 as (rows, nope + rope).
static void load_keys(real* k, Head head, AttnShape s, int64_t first, int64_t rows) {
    for (int64_t j = 0; j < rows; j++) {
        memcpy(k + j * head.qk, head.k_nope + (first + j) * head.kv_row, (size_t)s.nope * sizeof(real));
        memcpy(k + j * head.qk + s.nope, head.k_rope + (first + j) * s.k_rope_stride, (size_t)s.rope * sizeof(real));
    }
}

// S (rows, Q) for queries from q0 and keys from k0. The caller drops keys after the query (`visible`).
static void scores(real* S, Head head, const real* k, AttnShape s, int64_t q0, int64_t rows, int64_t cols) {
    gemm(0, 1, rows, cols, head.qk, s.scale, head.q + q0 * head.q_row, head.q_row, k, head.qk, 0, S, Q);
}

// The number of keys of the tile at k0 that query q may see.
static int64_t visible(int64_t q, int64_t k0, int64_t cols) { return min_i64(q - k0 + 1, cols); }

static int64_t tile_reals(AttnShape s) { return Q * (2 * Q + 2 * (s.nope + s.rope) + s.v + 3); }

size_t attention_workspace(AttnShape s) {
    int64_t rope_parts = s.B * s.H * s.T * s.rope;
    return (size_t)(rope_parts + device_workers() * tile_reals(s)) * sizeof(real);
}

void attention_forward(floatX* out, real* lse, real* max_logit, const floatX* q, const floatX* kv, const floatX* k_rope,
                       AttnShape s, Ctx* ctx) {
    int64_t out_row = s.H * s.v, tiles = ceil_div(s.T, Q);
    real largest = max_logit ? *max_logit : 0;
    real* scratch = ctx_workspace(ctx, device_workers() * tile_reals(s));
#pragma omp parallel for schedule(dynamic) collapse(3) reduction(max : largest)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.H; h++)
            for (int64_t tile = 0; tile < tiles; tile++) {
                // Q queries of a head, with empty sums.
                Head head = head_of(q, kv, k_rope, s, b, h);
                real* S = scratch + omp_get_thread_num() * tile_reals(s);
                real *k = S + 2 * Q * Q, *m = k + Q * (2 * head.qk + s.v), *l = m + Q;
                int64_t q0 = tile * Q, rows = min_i64(Q, s.T - q0);
                floatX* o = out + (b * s.T + q0) * out_row + h * s.v;
                for (int64_t i = 0; i < rows; i++) {
                    m[i] = -INFINITY, l[i] = 0;
                    for (int64_t c = 0; c < s.v; c++) o[i * out_row + c] = 0;
                }

                // The keys up to the diagonal, a tile at a time.
                for (int64_t k0 = 0; k0 <= q0; k0 += Q) {
                    // S = scale q k^T
                    int64_t cols = min_i64(Q, s.T - k0);
                    load_keys(k, head, s, k0, cols);
                    scores(S, head, k, s, q0, rows, cols);

                    // P = exp(S - m) overwrites S, with the new maximum m.
                    for (int64_t i = 0; i < rows; i++) {
                        real *p = S + i * Q, top = m[i], sum = 0;
                        int64_t seen = visible(q0 + i, k0, cols);
#pragma omp simd reduction(max : top)
                        for (int64_t j = 0; j < seen; j++) top = p[j] > top ? p[j] : top;
#pragma omp simd reduction(+ : sum)
                        for (int64_t j = 0; j < seen; j++) {
                            p[j] = exp(p[j] - top);
                            sum += p[j];
                        }
                        for (int64_t j = seen; j < cols; j++) p[j] = 0;
                        real shrink = exp(m[i] - top);  // rescales the earlier sums to the new maximum
                        if (shrink != 1)
                            for (int64_t c = 0; c < s.v; c++) o[i * out_row + c] *= shrink;
                        l[i] = l[i] * shrink + sum;
                        m[i] = top;
                    }

                    // out += P v
                    gemm(0, 0, rows, s.v, cols, 1, S, Q, head.v + k0 * head.kv_row, head.kv_row, 1, o, out_row);
                }

                // out / l, and lse = m + ln(l).
                for (int64_t i = 0; i < rows; i++) {
                    for (int64_t c = 0; c < s.v; c++) o[i * out_row + c] /= l[i];
                    lse[(b * s.H + h) * s.T + q0 + i] = m[i] + log(l[i]);
                    largest = m[i] > largest ? m[i] : largest;
                }
            }
    if (max_logit) *max_logit = largest;
}

// Backward of one (sequence, head). dk_part (T, rope) is the gradient of the shared key from this head.
static void head_backward(floatX* dq, floatX* dk_nope, real* dk_part, const floatX* dout, const floatX* out,
                          const real* lse, Head head, AttnShape s, real* scratch) {
    real *P = scratch, *dS = P + Q * Q, *k = dS + Q * Q, *dk = k + Q * head.qk, *dv = dk + Q * head.qk;
    int64_t out_row = s.H * s.v;
    floatX* dv_out = dk_nope + s.nope;
    for (int64_t k0 = 0; k0 < s.T; k0 += Q) {
        int64_t cols = min_i64(Q, s.T - k0);
        load_keys(k, head, s, k0, cols);
        for (int64_t q0 = k0; q0 < s.T; q0 += Q) {
            // The queries from the diagonal on: S = scale q k^T, and dP = dout v^T, stored in dS.
            int64_t rows = min_i64(Q, s.T - q0);
            scores(P, head, k, s, q0, rows, cols);
            gemm(0, 1, rows, cols, s.v, 1, dout + q0 * out_row, out_row, head.v + k0 * head.kv_row, head.kv_row, 0, dS,
                 Q);

            // P = exp(S - lse), dS = P (dP - delta) with delta = <dout, out>.
            for (int64_t i = 0; i < rows; i++) {
                real *p = P + i * Q, *d = dS + i * Q, z = lse[q0 + i], delta = 0;
                const floatX *g = dout + (q0 + i) * out_row, *o = out + (q0 + i) * out_row;
                int64_t seen = visible(q0 + i, k0, cols);
#pragma omp simd reduction(+ : delta)
                for (int64_t c = 0; c < s.v; c++) delta += g[c] * o[c];
#pragma omp simd
                for (int64_t j = 0; j < seen; j++) {
                    p[j] = exp(p[j] - z);
                    d[j] = p[j] * (d[j] - delta);
                }
                for (int64_t j = seen; j < cols; j++) p[j] = d[j] = 0;
            }

            // dv += P^T dout, dk += scale dS^T q, dq += scale dS k. The first tile overwrites instead.
            int first = q0 == k0;  // of this tile of keys
            gemm(1, 0, cols, s.v, rows, 1, P, Q, dout + q0 * out_row, out_row, !first, dv, s.v);
            gemm(1, 0, cols, head.qk, rows, s.scale, dS, Q, head.q + q0 * head.q_row, head.q_row, !first, dk, head.qk);
            gemm(0, 0, rows, head.qk, cols, s.scale, dS, Q, k, head.qk, k0 > 0, dq + q0 * head.q_row, head.q_row);
        }

        // This tile of keys is complete.
        for (int64_t j = 0; j < cols; j++) {
            memcpy(dk_nope + (k0 + j) * head.kv_row, dk + j * head.qk, (size_t)s.nope * sizeof(real));
            memcpy(dv_out + (k0 + j) * head.kv_row, dv + j * s.v, (size_t)s.v * sizeof(real));
            memcpy(dk_part + (k0 + j) * s.rope, dk + j * head.qk + s.nope, (size_t)s.rope * sizeof(real));
        }
    }
}

void attention_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out,
                        const real* lse, const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape s,
                        Ctx* ctx) {
    int64_t parts = s.B * s.H * s.T * s.rope;
    real* part = ctx_workspace(ctx, parts + device_workers() * tile_reals(s));
    real* scratch = part + parts;

    // All heads. Each writes its own part of dk_rope.
#pragma omp parallel for schedule(dynamic) collapse(2)
    for (int64_t b = 0; b < s.B; b++)
        for (int64_t h = 0; h < s.H; h++) {
            Head head = head_of(q, kv, k_rope, s, b, h);
            int64_t o = b * s.T * s.H * s.v + h * s.v;
            head_backward(dq + (head.q - q), dkv + (head.k_nope - kv), part + (b * s.H + h) * s.T * s.rope, dout + o,
                          out + o, lse + (b * s.H + h) * s.T, head, s, scratch + omp_get_thread_num() * tile_reals(s));
        }

#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < s.B * s.T; n++) {
        // dk_rope of a token: the sum of the heads' parts, in the order of heads.
        floatX* d = dk_rope + n * s.k_rope_stride;
        for (int64_t c = 0; c < s.rope; c++) d[c] = 0;
        for (int64_t h = 0; h < s.H; h++) {
            const real* p = part + ((n / s.T * s.H + h) * s.T + n % s.T) * s.rope;
            for (int64_t c = 0; c < s.rope; c++) d[c] += p[c];
        }
    }
}
