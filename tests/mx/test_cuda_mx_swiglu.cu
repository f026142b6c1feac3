// SwiGLU fused with the quantization of its result, forward and backward, against the separate kernels, bit for bit:
// empty experts, pad rows of NaN, in forward widths that end inside a chunk.
#include "grouped/experts.h"
#include "layers/swiglu.h"
#include "mx/mx_swiglu.h"
#include "tests/mx/mx_bytes.cuh"

// Groups at multiples of 128, and 256 rows behind the last one.
struct Groups {
    I64 start;
    int64_t used, capacity;
    I32 row_token;
    Ragged ragged;

    explicit Groups(const std::vector<int32_t>& counts)
        : start((int64_t)counts.size() + 1), used(0), capacity(rows_of(counts) + 256), row_token(capacity) {
        for (size_t e = 0; e < counts.size(); e++) {
            start.host[e] = used;
            for (int64_t i = 0; i < counts[e]; i++) row_token.host[(size_t)(used + i)] = 0;  // the others stay -1
            used += ceil_div(counts[e], 128) * 128;
        }
        start.host[counts.size()] = used;
        start.send(), row_token.send();
        ragged = {(int32_t)counts.size(), capacity, start.dev, NULL, row_token.dev, NULL, NULL};
    }
    static int64_t rows_of(const std::vector<int32_t>& counts) {
        int64_t rows = 0;
        for (int32_t count : counts) rows += ceil_div(count, 128) * 128;
        return rows;
    }
    bool pad(int64_t row) const { return row_token.host[(size_t)row] < 0; }
};

// NaN in pad rows and behind the last row.
static void swiglu_case(const std::vector<int32_t>& counts, int64_t F) {
    Groups l(counts);
    const int64_t used = l.used, capacity = l.capacity;
    const Ragged ragged = l.ragged;
    X h(capacity * 2 * F, 1, 4), a(capacity * F);
    for (int64_t i = 0; i < h.n; i++)
        if (l.pad(i / (2 * F))) h.host[(size_t)i] = NAN;
    h.send();
    experts_swiglu_forward(a.dev, h.dev, ragged, F, ctx);
    for (int32_t mode : {MX_RCEIL, MX_FLOOR}) {
        Bytes q(capacity * F), scale(capacity * mx_stride(F)), whole_q(capacity * F), whole_scale(scale.n);
        mx_swiglu_quantize({q.dev, scale.dev}, h.dev, ragged, F, mode, ctx);
        mx_quantize({whole_q.dev, whole_scale.dev}, a.dev, used, F, {mode, 128},
                    ctx);  // without a's unwritten rows
        q.host = whole_q.got(), scale.host = whole_scale.got();
        CHECK_BYTES(q);
        CHECK_BYTES(scale);
        int64_t wrong = 0;
        for (int64_t i = 0; i < used * F; i++) wrong += l.pad(i / F) && q.host[(size_t)i] != 0;
        for (int64_t i = 0, stride = mx_stride(F); i < used * stride; i++)
            wrong += l.pad(i / stride) && scale.host[(size_t)i] != 0;
        CHECK(wrong == 0, "%lld bytes of pad rows are not 0", (long long)wrong);
    }
}

// The inputs of backward, NaN in pad rows and behind the last row.
static void send_with_nan(Groups& l, X& h, X& dap, R& gate, int64_t F) {
    l.ragged.row_gate = gate.dev;
    for (int64_t i = 0; i < dap.n; i++)
        if (l.pad(i / F)) h.host[(size_t)(2 * i)] = h.host[(size_t)(2 * i + 1)] = dap.host[(size_t)i] = NAN;
    for (int64_t i = 0; i < l.capacity; i++)
        if (l.pad(i)) gate.host[(size_t)i] = NAN;
    h.send(), dap.send(), gate.send();
}

// The fused backward against the separate kernels, bit for bit, also in unused rows: dh quantized row-wise and
// column-wise, and gate * a with the fake-quantized a. <da', a> is a sum of up to 2048 products in float32, in another
// order: 1e-5 of the norm of its terms.
static void swiglu_backward_both_case(const std::vector<int32_t>& counts, int64_t F) {
    Groups l(counts);
    const int64_t used = l.used, capacity = l.capacity;
    X h(capacity * 2 * F, 1, 4), dap(capacity * F, 2), dh(capacity * 2 * F), gated(capacity * F), other(capacity * F);
    R gate(capacity, 3), drow_gate(capacity), other_gate(capacity);
    send_with_nan(l, h, dap, gate, F);
    const ExpertsBackward separate = {dh.dev, other.dev, other_gate.dev, dap.dev, h.dev};
    for (int32_t mode : {MX_RCEIL, MX_FLOOR}) {
        const MxRecipe recipe = {mode, 128};
        Bytes q(capacity * 2 * F), scale(capacity * mx_stride(2 * F)), want_q(q.n), want_scale(scale.n);
        Bytes channels(q.n), scales(capacity / 128 * 2 * F), want_channels(q.n), want_scales(scales.n);
        gated.poison(), other.poison(), drow_gate.poison(), other_gate.poison(), dh.poison();
        auto run = [&] {
            mx_swiglu_backward_both({q.dev, scale.dev}, {channels.dev, scales.dev},
                                    {NULL, gated.dev, drow_gate.dev, dap.dev, h.dev}, capacity, l.ragged, F, mode, ctx);
        };
        run();
        // The separate kernels: dh, then <da', a> and gate * a from the a that forward has quantized.
        experts_swiglu_backward(separate, l.ragged, F, ctx);
        mx_quantize({want_q.dev, want_scale.dev}, dh.dev, used, 2 * F, recipe, ctx);
        mx_quantize_channels({want_channels.dev, want_scales.dev}, dh.dev, capacity, l.ragged, 2 * F, recipe, ctx);
        experts_swiglu_forward(other.dev, h.dev, l.ragged, F, ctx);
        mx_round_rows(other.dev, other.dev, used, F, recipe, ctx);
        other.host = other.got();
        experts_gate_backward(separate, l.ragged, F, ctx);
        const int rows = q.got() == want_q.got() && scale.got() == want_scale.got();
        const int by_channel = channels.got() == want_channels.got() && scales.got() == want_scales.got();
        // gate * a to the bit, <da', a> within its tolerance.
        auto got = gated.got(), want = other.got(), got_gate = drow_gate.got(), want_gate = other_gate.got();
        int64_t wrong = 0, wrong_gate = 0;
        for (int64_t i = 0; i < capacity * F; i++) wrong += i < used * F ? got[i] != want[i] : got[i] == got[i];
        for (int64_t r = 0; r < capacity; r++) {
            double norm = 0;
            for (int64_t i = r * F; i < (r + 1) * F && !l.pad(r); i++) {
                const double term = dap.host[(size_t)i] * other.host[(size_t)i];
                norm += term * term;
            }
            const double have = got_gate[(size_t)r], far = fabs(have - want_gate[(size_t)r]);
            wrong_gate += r < used ? !(far <= 1e-5 * sqrt(norm)) : have == have;
        }
        CHECK(rows && by_channel && wrong == 0 && wrong_gate == 0,
              "F %d: rows %d, by channel %d, %lld of gate * a and %lld gates' gradients are wrong", (int)F, rows,
              by_channel, (long long)wrong, (long long)wrong_gate);
        CHECK_REPEATS(drow_gate, run());
    }
}

// Tokens without gates, against swiglu_backward and mx_quantize_both, bit for bit; NaN behind the last token.
static void swiglu_backward_tokens_case(int64_t N, int64_t F) {
    const int64_t length = ceil_div(N, 128) * 128;
    X h((N + 1) * 2 * F, 1, 4), da((N + 1) * F, 2), dh(N * 2 * F), a((N + 1) * F), other((N + 1) * F);
    for (int64_t i = N * F; i < da.n; i++)
        h.host[(size_t)(2 * i)] = h.host[(size_t)(2 * i + 1)] = da.host[(size_t)i] = NAN;
    h.send(), da.send();
    for (int32_t mode : {MX_RCEIL, MX_FLOOR}) {
        Bytes q(N * 2 * F), scale(N * mx_stride(2 * F)), channels(2 * F * length), scales(length / 128 * 2 * F);
        Bytes want_q(q.n), want_scale(scale.n), want_channels(channels.n), want_scales(scales.n);
        a.poison(), other.poison();
        mx_swiglu_backward_both({q.dev, scale.dev}, {channels.dev, scales.dev}, {NULL, a.dev, NULL, da.dev, h.dev},
                                length, {1, N}, F, mode, ctx);
        swiglu_backward(dh.dev, other.dev, da.dev, h.dev, N, F, ctx);
        mx_quantize_both({want_q.dev, want_scale.dev}, {want_channels.dev, want_scales.dev}, dh.dev, length, N, 2 * F,
                         mode, ctx);
        const int rows = q.got() == want_q.got() && scale.got() == want_scale.got();
        const int by_channel = channels.got() == want_channels.got() && scales.got() == want_scales.got();
        auto got = a.got(), want = other.got();
        int64_t wrong = 0;
        for (int64_t i = 0; i < a.n; i++) wrong += i < N * F ? got[i] != want[i] : got[i] == got[i];
        CHECK(rows && by_channel && wrong == 0, "%d x %d: rows %d, by channel %d, %lld of a are wrong", (int)N, (int)F,
              rows, by_channel, (long long)wrong);
    }
}

static void test_swiglu(void) {
    swiglu_case({1}, 32);
    swiglu_case({129, 0, 128, 5}, 96);
    swiglu_case({0, 0}, 64);
    swiglu_case({300, 1, 77, 512, 0}, 1408);
    swiglu_case({40, 40}, 2048);
}

static void test_swiglu_backward_both(void) {
    swiglu_backward_both_case({1}, 128);
    swiglu_backward_both_case({129, 0, 128, 5}, 256);
    swiglu_backward_both_case({0, 0}, 128);
    swiglu_backward_both_case({300, 1, 77, 512, 0}, 1408);
    swiglu_backward_both_case({40, 40}, 2048);
    swiglu_backward_tokens_case(1, 128);
    swiglu_backward_tokens_case(300, 384);
    swiglu_backward_tokens_case(128, 2816);
}

int main(void) {
    open_contexts(0);
    RUN(test_swiglu);
    RUN(test_swiglu_backward_both);
    return test_summary();
}
