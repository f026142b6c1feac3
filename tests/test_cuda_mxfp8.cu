// The CUDA casts against the reference, bit for bit: every bf16 as the largest of a block, subnormal numbers, zeros,
// Inf and NaN, widths and heights that end inside a chunk, a warp or a block of threads, 1 to 64 experts.
#include <functional>

#include "moe/experts.h"
#include "moe/mxfp8.h"
#include "tests/cuda.cuh"

// Bytes on the GPU, poisoned, and a guard behind them that nobody may touch; the reference's on the host.
struct Bytes {
    static constexpr int64_t GUARD = 64;
    static constexpr uint8_t POISON = 0xa5;
    int64_t n;
    uint8_t* dev;
    std::vector<uint8_t> host;

    explicit Bytes(int64_t n) : n(n), host((size_t)n, POISON) {
        dev = (uint8_t*)device_alloc((size_t)(n + GUARD), "a test");
        poison();
    }
    Bytes(const Bytes&) = delete;
    ~Bytes() { device_free(dev); }
    void poison() {
        CUDA_CHECK(cudaMemset(dev, POISON, (size_t)(n + GUARD)));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    void send(const std::vector<uint8_t>& values) {
        host = values;
        CUDA_CHECK(cudaMemcpy(dev, host.data(), (size_t)n, cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    std::vector<uint8_t> got() const {
        std::vector<uint8_t> out((size_t)(n + GUARD));
        ctx_sync(ctx);
        CUDA_CHECK(cudaMemcpy(out.data(), dev, out.size(), cudaMemcpyDeviceToHost));
        return out;
    }
};

static void check_same(const char* what, const std::vector<uint8_t>& got, const std::vector<uint8_t>& want) {
    int64_t wrong = 0, first = 0, n = (int64_t)want.size();
    for (int64_t i = 0; i < (int64_t)got.size(); i++)
        if (got[(size_t)i] != (i < n ? want[(size_t)i] : Bytes::POISON) && wrong++ == 0) first = i;
    CHECK(wrong == 0, "%s: %lld of %lld differ, the first at %lld is %d", what, (long long)wrong, (long long)n,
          (long long)first, got[(size_t)first]);
}

#define CHECK_BYTES(bytes) check_same(#bytes, (bytes).got(), (bytes).host)

static uint32_t draw(uint32_t stream, int64_t i, double below) {
    return (uint32_t)(random_uniform(7, stream, (uint64_t)i) * below);
}

// The bits of a bf16, to the GPU, and its value, to the reference.
static void set(X& x, const std::function<uint32_t(int64_t)>& bits) {
    std::vector<uint16_t> raw((size_t)x.n);
    for (int64_t i = 0; i < x.n; i++) {
        raw[(size_t)i] = (uint16_t)bits(i);
        uint32_t wide = (uint32_t)raw[(size_t)i] << 16;
        float value;
        memcpy(&value, &wide, sizeof(value));
        x.host[(size_t)i] = value;
    }
    CUDA_CHECK(cudaMemcpy(x.dev, raw.data(), raw.size() * 2, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
}

// Element i of the block whose largest is the bf16 h: up to 24 binades below.
static uint32_t below(uint32_t h, int64_t i) {
    const uint32_t largest = h & 0x7fff, sign = draw(1, i, 2) << 15;
    if (largest >= 0x7f80) return draw(2, i, 0x7f80) | sign;
    const uint32_t step = draw(2, i, 24 * 128);
    return (largest > step ? largest - step : 0) | sign;
}

// Blocks of 32 at sizes of their own, all bits of the mantissa; a few blocks subnormal or zero; Inf and NaN where
// asked.
static void set_wild(X& x, int broken) {
    set(x, [&](int64_t i) {
        const uint32_t kind = draw(3, i / 32, 16), exponent = 100 + draw(4, i / 32, 40);
        if (broken && draw(5, i, 2000) == 0) return draw(6, i, 2) ? 0x7f80u : 0xffc1u;
        if (kind == 0) return draw(7, i, 2) << 15;
        if (kind == 1) return draw(7, i, 300) | draw(8, i, 2) << 15;
        return ((exponent + draw(9, i, 12)) << 7) | draw(7, i, 128) | draw(8, i, 2) << 15;
    });
}

static const MxCast casts[] = {{MX_RCEIL, 1}, {MX_FLOOR, 1}, {MX_RCEIL, 128}, {MX_FLOOR, 128}};

static void check_rows(X& x, int64_t rows, int64_t columns) {
    for (MxCast cast : casts) {
        Bytes q(rows * columns), scale(rows * mx_stride(columns));
        mx_quantize(q.dev, scale.dev, x.dev, rows, columns, cast, ctx);
        REFERENCE(mx_quantize)(q.host.data(), scale.host.data(), x.ref(), rows, columns, cast, reference_ctx);
        CHECK_BYTES(q);
        CHECK_BYTES(scale);
    }
}

static void check_columns(X& x, int64_t count, int64_t rows, int64_t columns) {
    for (MxCast cast : casts) {
        Bytes q(count * rows * columns), scale(count * columns * mx_stride(rows));
        mx_quantize_transposed(q.dev, scale.dev, x.dev, count, rows, columns, cast, ctx);
        REFERENCE(mx_quantize_transposed)
        (q.host.data(), scale.host.data(), x.ref(), count, rows, columns, cast, reference_ctx);
        CHECK_BYTES(q);
        CHECK_BYTES(scale);
    }
}

static void check_tiles(X& x, int64_t count, int64_t rows, int64_t columns) {
    for (int mode = MX_RCEIL; mode <= MX_FLOOR; mode++) {
        Bytes q(count * rows * columns), turned(count * rows * columns);
        Bytes scale(count * ceil_div(rows, 128) * ceil_div(columns, 128));
        mx_quantize_tiles(q.dev, turned.dev, scale.dev, x.dev, count, rows, columns, mode, ctx);
        REFERENCE(mx_quantize_tiles)
        (q.host.data(), turned.host.data(), scale.host.data(), x.ref(), count, rows, columns, mode, reference_ctx);
        CHECK_BYTES(q);
        CHECK_BYTES(turned);
        CHECK_BYTES(scale);
    }
}

static void test_every_bf16(void) {
    X x(65536 * 32);
    // The largest at any place of a block.
    set(x, [](int64_t i) {
        const uint32_t h = (uint32_t)(i / 32);
        return i % 32 == draw(10, h, 32) ? h : below(h, i);
    });
    check_rows(x, 65536, 32);
    check_rows(x, 64, 65536 / 2);
    // Down the columns: 64 matrices of 32 x 1024.
    set(x, [](int64_t i) {
        const int64_t r = i / 1024 % 32;
        const uint32_t h = (uint32_t)(i / 32768 * 1024 + i % 1024);
        return r == draw(10, h, 32) ? h : below(h, i);
    });
    check_columns(x, 64, 32, 1024);
    check_columns(x, 1, 2048, 1024);
    check_tiles(x, 64, 32, 1024);
}

static void test_rows(void) {
    static const int64_t shapes[][2] = {{1, 32},   {3, 64},   {67, 96},    {5, 160},   {129, 224}, {33, 992},
                                        {9, 1024}, {9, 1056}, {130, 1408}, {50, 2048}, {7, 7168},  {3, 10944}};
    for (auto& s : shapes)
        for (int broken = 0; broken < 2; broken++) {
            X x(s[0] * s[1]);
            set_wild(x, broken);
            check_rows(x, s[0], s[1]);
        }
}

static void test_columns(void) {
    static const int64_t shapes[][3] = {{1, 32, 32},  {3, 96, 160},   {2, 224, 64},   {8, 288, 416}, {64, 128, 96},
                                        {1, 544, 32}, {1, 1408, 256}, {3, 256, 1408}, {2, 2080, 96}};
    for (auto& s : shapes)
        for (int broken = 0; broken < 2; broken++) {
            X x(s[0] * s[1] * s[2]);
            set_wild(x, broken);
            check_columns(x, s[0], s[1], s[2]);
            check_tiles(x, s[0], s[1], s[2]);
        }
}

static void test_dequantize(void) {
    for (int64_t columns : {(int64_t)32, (int64_t)1056, (int64_t)8192}) {
        const int64_t rows = 256, stride = mx_stride(columns);
        Bytes q(rows * columns), scale(rows * stride);
        std::vector<uint8_t> bytes((size_t)q.n), scales((size_t)scale.n);
        for (int64_t i = 0; i < q.n; i++) bytes[(size_t)i] = (uint8_t)(columns == 8192 ? i : draw(11, i, 256));
        for (int64_t i = 0; i < scale.n; i++)
            scales[(size_t)i] = (uint8_t)(i / stride);  // every scale, and every byte at it
        q.send(bytes), scale.send(scales);
        X x(rows * columns);
        mx_dequantize(x.dev, q.dev, scale.dev, rows, columns, ctx);
        REFERENCE(mx_dequantize)(x.ref(), q.host.data(), scale.host.data(), rows, columns, reference_ctx);
        auto got = x.got();
        int64_t wrong = 0;
        for (int64_t i = 0; i < x.n; i++) {
            const double want = __bfloat162float(__double2bfloat16(x.host[(size_t)i])), have = got[(size_t)i];
            wrong += want != want ? have == have : have != want || signbit(have) != signbit(want);
        }
        CHECK(wrong == 0, "%lld of %lld differ", (long long)wrong, (long long)x.n);
    }
}

// Groups of whole 128 rows; the rows after the last are not in use.
static void test_round_columns(void) {
    const int64_t starts[5] = {0, 128, 128, 640, 768}, capacity = 1024;
    const int32_t rows[4] = {128, 0, 512, 128};
    int64_t* start_dev = (int64_t*)device_alloc(sizeof(starts), "a test");
    CUDA_CHECK(cudaMemcpy(start_dev, starts, sizeof(starts), cudaMemcpyHostToDevice));
    Ragged on_gpu = {}, on_host = {};
    on_gpu.El = on_host.El = 4, on_gpu.capacity = on_host.capacity = capacity;
    on_gpu.group_start = start_dev, on_host.group_start = (int64_t*)starts, on_host.group_rows = (int32_t*)rows;
    for (MxCast cast : casts)
        for (int64_t columns : {(int64_t)32, (int64_t)1408}) {
            X x(capacity * columns);
            set_wild(x, 5);
            mx_round_columns(x.dev, on_gpu, columns, cast, ctx);
            REFERENCE(mx_round_columns)(x.ref(), on_host, columns, cast, reference_ctx);
            auto got = x.got();
            int64_t wrong = 0;
            for (int64_t i = 0; i < x.n; i++) {
                const double want = __bfloat162float(__double2bfloat16(x.host[(size_t)i])), have = got[(size_t)i];
                wrong += want != want ? have == have : have != want;
            }
            CHECK(wrong == 0, "%lld of %lld differ", (long long)wrong, (long long)x.n);
        }
    device_free(start_dev);
}

static void test_stats(void) {
    CHECK(mx_stats_workspace() <= ctx->workspace_bytes, "workspace");
    for (MxCast cast : casts) {
        const int64_t rows = 3001, columns = 1376;
        X x(rows * columns);
        set_wild(x, 1);
        MxStats first = {1, 2, 3, 4, 5, 6}, want = first, got, again;
        MxStats* dev = (MxStats*)device_alloc(sizeof(MxStats), "a test");
        auto run = [&](MxStats* out) {
            device_upload(dev, &first, sizeof(first), ctx);
            mx_stats(dev, x.dev, rows, columns, cast, ctx);
            device_download(out, dev, sizeof(*out), ctx);
        };
        run(&got);
        run(&again);
        REFERENCE(mx_stats)(&want, x.ref(), rows, columns, cast, reference_ctx);
        CHECK(memcmp(&got, &again, sizeof(got)) == 0, "not the same on every run");
        CHECK(got.elements == want.elements && got.saturated == want.saturated && got.flushed == want.flushed &&
                  got.inexact == want.inexact,
              "%g %g %g %g, not %g %g %g %g", got.elements, got.saturated, got.flushed, got.inexact, want.elements,
              want.saturated, want.flushed, want.inexact);
        // 4 million positive numbers, which the reference adds one after the other.
        CHECK(fabs(got.signal / want.signal - 1) < 1e-10 && fabs(got.noise / want.noise - 1) < 1e-10,
              "signal %.17g noise %.17g, not %.17g %.17g", got.signal, got.noise, want.signal, want.noise);
        device_free(dev);
    }
}

// As test_stats, the scales those of the cast.
static void test_stats_tiles(void) {
    static const int64_t shapes[][3] = {{1, 32, 32}, {3, 96, 160}, {7, 288, 416}, {2, 1408, 992}};
    for (auto& m : shapes)
        for (int mode = MX_RCEIL; mode <= MX_FLOOR; mode++) {
            const int64_t n = m[0] * m[1] * m[2];
            X w(n);
            set_wild(w, 0);
            Bytes q(n), turned(n), scale(m[0] * ceil_div(m[1], 128) * ceil_div(m[2], 128));
            mx_quantize_tiles(q.dev, turned.dev, scale.dev, w.dev, m[0], m[1], m[2], mode, ctx);
            std::vector<uint8_t> scales = scale.got();
            scales.resize((size_t)scale.n);
            scales[(size_t)scale.n / 2] = MX_NAN;  // left out
            scale.send(scales);
            MxStats want = {1, 2, 3, 4, 5, 6}, got;
            MxStats* dev = (MxStats*)device_alloc(sizeof(MxStats), "a test");
            device_upload(dev, &want, sizeof(want), ctx);
            mx_stats_tiles(dev, w.dev, scale.dev, m[0], m[1], m[2], mode, ctx);
            device_download(&got, dev, sizeof(got), ctx);
            REFERENCE(mx_stats_tiles)(&want, w.ref(), scales.data(), m[0], m[1], m[2], mode, reference_ctx);
            CHECK(got.elements == want.elements && got.saturated == want.saturated && got.flushed == want.flushed &&
                      got.inexact == want.inexact && fabs(got.signal / want.signal - 1) < 1e-10 &&
                      fabs(got.noise / want.noise - 1) < 1e-10,
                  "%g %g %g %g %.17g %.17g, not %g %g %g %g %.17g %.17g", got.elements, got.saturated, got.flushed,
                  got.inexact, got.signal, got.noise, want.elements, want.saturated, want.flushed, want.inexact,
                  want.signal, want.noise);
            device_free(dev);
        }
}

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
    for (MxCast cast : casts) {
        Bytes q(capacity * F), scale(capacity * mx_stride(F)), whole_q(capacity * F), whole_scale(scale.n);
        mx_swiglu_quantize(q.dev, scale.dev, h.dev, ragged, F, cast, ctx);
        mx_quantize(whole_q.dev, whole_scale.dev, a.dev, used, F, cast,
                    ctx);  // a's rows that nobody wrote are left out
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

// The fused backward against the kernels that it stands for, bit for bit: dh and its bytes; gate * A with the A that
// the cast's bytes give. <dA', A> is a sum of up to 2048 products in float32: 1e-5 of the norm of its terms.
static void swiglu_backward_case(const std::vector<int32_t>& counts, int64_t F) {
    Groups l(counts);
    const int64_t used = l.used, capacity = l.capacity;
    X h(capacity * 2 * F, 1, 4), dap(capacity * F, 2), act(capacity * F), gated(capacity * F), other(capacity * F);
    X dh(capacity * 2 * F), whole_dh(capacity * 2 * F);
    R gate(capacity, 3), drow_gate(capacity), other_gate(capacity);
    l.ragged.row_gate = gate.dev;
    for (int64_t i = 0; i < dap.n; i++)
        if (l.pad(i / F)) h.host[(size_t)(2 * i)] = h.host[(size_t)(2 * i + 1)] = dap.host[(size_t)i] = NAN;
    for (int64_t i = 0; i < capacity; i++)
        if (l.pad(i)) gate.host[(size_t)i] = NAN;
    h.send(), dap.send(), gate.send();
    experts_swiglu_backward(whole_dh.dev, other.dev, other_gate.dev, dap.dev, h.dev, l.ragged, F, ctx);
    whole_dh.host = whole_dh.got();
    for (MxCast cast : casts) {
        Bytes a_q(capacity * F), a_scale(capacity * mx_stride(F)), q(capacity * 2 * F), whole_q(q.n);
        Bytes scale(capacity * mx_stride(2 * F)), whole_scale(scale.n);
        dh.poison(), gated.poison(), drow_gate.poison();
        auto run = [&] {
            mx_swiglu_backward_quantize(q.dev, scale.dev, dh.dev, gated.dev, drow_gate.dev, dap.dev, h.dev, l.ragged, F,
                                        cast, ctx);
        };
        run();
        mx_swiglu_quantize(a_q.dev, a_scale.dev, h.dev, l.ragged, F, cast, ctx);
        mx_dequantize(act.dev, a_q.dev, a_scale.dev, used, F, ctx);
        mx_quantize(whole_q.dev, whole_scale.dev, whole_dh.dev, used, 2 * F, cast, ctx);
        q.host = whole_q.got(), scale.host = whole_scale.got();
        CHECK_BYTES(q);
        CHECK_BYTES(scale);
        auto got_dh = dh.got(), got_gated = gated.got(), got_dgate = drow_gate.got(), a = act.got();
        int64_t wrong_dh = 0, wrong_gated = 0, wrong_gate = 0;
        for (int64_t r = 0; r < capacity; r++) {
            double sum = 0, norm = 0;
            for (int64_t i = 2 * r * F; i < 2 * (r + 1) * F; i++) {
                const double want = whole_dh.host[(size_t)i], have = got_dh[(size_t)i];
                wrong_dh += want != want ? have == have : have != want || signbit(have) != signbit(want);
            }
            for (int64_t i = r * F; i < (r + 1) * F; i++) {
                const float product = l.pad(r) ? 0 : (float)gate.host[(size_t)r] * (float)a[(size_t)i];
                const double want = __bfloat162float(__float2bfloat16(product)), have = got_gated[(size_t)i];
                wrong_gated += r < used ? have != want : have == have;
                if (l.pad(r)) continue;
                const double term = dap.host[(size_t)i] * a[(size_t)i];
                sum += term, norm += term * term;
            }
            const double have = got_dgate[(size_t)r];
            wrong_gate += r < used ? !(fabs(have - sum) <= 1e-5 * sqrt(norm)) : have == have;
        }
        CHECK(wrong_dh == 0 && wrong_gated == 0 && wrong_gate == 0,
              "F %d: %lld of dh, %lld of gate * A and %lld gates' gradients are wrong", (int)F, (long long)wrong_dh,
              (long long)wrong_gated, (long long)wrong_gate);
        CHECK_REPEATS(drow_gate, run());
    }
}

static void test_swiglu_backward(void) {
    swiglu_backward_case({1}, 32);
    swiglu_backward_case({129, 0, 128, 5}, 96);
    swiglu_backward_case({0, 0}, 64);
    swiglu_backward_case({3, 130}, 160);
    swiglu_backward_case({5, 250}, 544);
    swiglu_backward_case({300, 1, 77, 512, 0}, 1408);
    swiglu_backward_case({40, 40}, 2048);
}

static void test_swiglu(void) {
    swiglu_case({1}, 32);
    swiglu_case({129, 0, 128, 5}, 96);
    swiglu_case({0, 0}, 64);
    swiglu_case({300, 1, 77, 512, 0}, 1408);
    swiglu_case({40, 40}, 2048);
}

int main(void) {
    open_contexts((size_t)1 << 20);
    RUN(test_every_bf16);
    RUN(test_rows);
    RUN(test_columns);
    RUN(test_dequantize);
    RUN(test_round_columns);
    RUN(test_stats);
    RUN(test_stats_tiles);
    RUN(test_swiglu);
    RUN(test_swiglu_backward);
    return test_summary();
}
