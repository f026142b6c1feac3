// CUDA quantization and fake quantization against the reference, bit for bit. Every bf16 is the largest of a block
// once; subnormal numbers, zeros, Inf and NaN. Widths and heights end inside a chunk, a warp or a block of threads,
// with 1 to 64 experts.
#include "mx/mxfp8.h"

#include <algorithm>

#include "tests/mx/mx_bytes.cuh"

// Element i of a block whose largest element is the bf16 h: up to 24 binades below it.
static uint32_t below(uint32_t h, int64_t i) {
    const uint32_t largest = h & 0x7fff, sign = draw(1, i, 2) << 15;
    if (largest >= 0x7f80) return draw(2, i, 0x7f80) | sign;
    const uint32_t step = draw(2, i, 24 * 128);
    return (largest > step ? largest - step : 0) | sign;
}

// Compares x with the reference, rounded to bf16. Poison counts as NaN.
static void check_values(const char* what, X& x) {
    auto got = x.got();
    int64_t wrong = 0, first = 0;
    for (int64_t i = 0; i < x.n; i++) {
        const double want = __bfloat162float(__double2bfloat16(x.host[(size_t)i])), have = got[(size_t)i];
        const bool same = want != want ? have != have : have == want && signbit(have) == signbit(want);
        if (!same && wrong++ == 0) first = i;
    }
    CHECK(wrong == 0, "%s: %lld of %lld differ, the first at %lld is %g", what, (long long)wrong, (long long)x.n,
          (long long)first, got[(size_t)first]);
}

// Fake quantization of x, into another tensor and in place. Both have a guard of NaN behind them. run(out, x,
// reference) calls the kernel or the reference. What the reference does not write stays as it is in x.
template <typename Run>
static void check_round(const char* what, X& x, Run run) {
    enum { GUARD = 64 };
    X out(x.n + GUARD), in_place(x.n + GUARD);
    std::copy(x.host.begin(), x.host.end(), out.host.begin());
    run(out.ref(), x.ref(), true);
    run(out.dev, x.dev, false);
    check_values(what, out);
    CUDA_CHECK(cudaMemcpy(in_place.dev, x.dev, (size_t)x.n * sizeof(floatX), cudaMemcpyDeviceToDevice));
    settle();
    in_place.host = out.host;
    run(in_place.dev, in_place.dev, false);
    check_values(what, in_place);
}

// Along the rows: q and scales, fake quantization, and the dequantized values of q, which are the same.
static void check_rows(X& x, int64_t rows, int64_t columns) {
    for (MxRecipe recipe : recipes) {
        Bytes q(rows * columns), scale(rows * mx_stride(columns));
        mx_quantize({q.dev, scale.dev}, x.dev, rows, columns, recipe, ctx);
        REFERENCE(mx_quantize)({q.host.data(), scale.host.data()}, x.ref(), rows, columns, recipe, reference_ctx);
        CHECK_BYTES(q);
        CHECK_BYTES(scale);
        check_round("mx_round_rows", x, [&](floatX* out, const floatX* in, bool reference) {
            auto round = reference ? REFERENCE(mx_round_rows) : mx_round_rows;
            round(out, in, rows, columns, recipe, reference ? reference_ctx : ctx);
        });
        X back(x.n);
        mx_dequantize(back.dev, {q.dev, scale.dev}, rows, columns, 0, ctx);
        REFERENCE(mx_round_rows)(back.ref(), x.ref(), rows, columns, recipe, reference_ctx);
        check_values("mx_quantize, mx_dequantize", back);
    }
}

// Down the columns, all rows as one group.
static void check_columns(X& x, int64_t rows, int64_t columns) {
    Ragged all = {};
    all.El = 1, all.capacity = rows;
    for (MxRecipe recipe : recipes)
        check_round("mx_round_columns", x, [&](floatX* out, const floatX* in, bool reference) {
            auto round = reference ? REFERENCE(mx_round_columns) : mx_round_columns;
            round(out, in, all, columns, recipe, reference ? reference_ctx : ctx);
        });
}

// Both copies of a weight. Each has a guard of NaN behind it.
static void check_weight(X& w, int64_t count, int64_t rows, int64_t columns) {
    for (int mode = MX_RCEIL; mode <= MX_FLOOR; mode++) {
        X out(w.n + 64), turned(w.n + 64);
        mx_round_weight(out.dev, turned.dev, w.dev, count, rows, columns, mode, ctx);
        REFERENCE(mx_round_weight)
        (out.ref(), turned.ref(), w.ref(), count, rows, columns, mode, reference_ctx);
        check_values("mx_round_weight", out);
        check_values("mx_round_weight, transposed", turned);
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
    check_columns(x, 2048, 1024);
    check_weight(x, 64, 32, 1024);
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

// Rows end inside a block, a chunk and a block of threads.
static void test_columns(void) {
    static const int64_t shapes[][2] = {{1, 32},    {31, 64},   {33, 96},   {127, 160},  {129, 224}, {300, 32},
                                        {777, 544}, {64, 1056}, {513, 256}, {257, 1408}, {33, 10944}};
    for (auto& s : shapes)
        for (int broken = 0; broken < 2; broken++) {
            X x(s[0] * s[1]);
            set_wild(x, broken);
            check_columns(x, s[0], s[1]);
        }
}

static void test_weights(void) {
    static const int64_t shapes[][3] = {{1, 32, 32},  {3, 96, 160},   {2, 224, 64},   {8, 288, 416}, {64, 128, 96},
                                        {1, 544, 32}, {1, 1408, 256}, {3, 256, 1408}, {2, 2080, 96}};
    for (auto& s : shapes)
        for (int broken = 0; broken < 2; broken++) {
            X w(s[0] * s[1] * s[2]);
            set_wild(w, broken);
            check_weight(w, s[0], s[1], s[2]);
            check_tiles(w, s[0], s[1], s[2]);
        }
}

static void test_dequantize(void) {
    for (int64_t columns : {(int64_t)32, (int64_t)1056, (int64_t)8192}) {
        const int64_t rows = 256, stride = mx_stride(columns);
        Bytes q(rows * columns), scale(rows * stride);
        std::vector<uint8_t> bytes((size_t)q.n), scales((size_t)scale.n);
        for (int64_t i = 0; i < q.n; i++) bytes[(size_t)i] = (uint8_t)(columns == 8192 ? i : draw(11, i, 256));
        for (int64_t i = 0; i < scale.n; i++)
            scales[(size_t)i] = (uint8_t)(i / stride);  // every scale, with every e4m3 value
        q.send(bytes), scale.send(scales);
        X x(rows * columns);
        mx_dequantize(x.dev, {q.dev, scale.dev}, rows, columns, 0, ctx);
        REFERENCE(mx_dequantize)(x.ref(), {q.host.data(), scale.host.data()}, rows, columns, 0, reference_ctx);
        check_values("mx_dequantize", x);
    }
}

// Groups at multiples of 128, with pad rows of zeros, and 128 rows of NaN behind the last group.
struct Groups {
    std::vector<int32_t> rows, padded;
    I64 start;
    int64_t capacity = 0;

    explicit Groups(const std::vector<int32_t>& counts) : rows(counts), start((int64_t)counts.size() + 1) {
        for (size_t e = 0; e < rows.size(); e++) {
            padded.push_back((int32_t)round_up(rows[e], 128));
            start.host[e] = capacity, capacity += padded[e];
        }
        start.host[rows.size()] = capacity, capacity += 128;
        start.send();
    }
    // Group of a row; -1: a pad row, -2: behind the last group.
    int of_row(int64_t row) const {
        for (size_t e = 0; e < rows.size(); e++)
            if (row < start.host[e + 1]) return row - start.host[e] < rows[e] ? (int)e : -1;
        return -2;
    }
    Ragged device() {
        Ragged r = {};
        r.El = (int32_t)rows.size(), r.capacity = capacity, r.group_start = start.dev;
        return r;
    }
    // The reference gets the same starts. With `broken` pad rows count as rows there too: they become NaN where their
    // block has NaN.
    Ragged reference(int broken) {
        Ragged r = device();
        r.group_start = start.ref(), r.group_rows = broken ? padded.data() : rows.data();
        return r;
    }
};

// Down the columns of each group: several groups, one expert with all rows, and no rows at all.
static void test_groups(void) {
    static const std::vector<int32_t> lists[] = {
        {128, 0, 512, 131}, {0, 1, 0, 31, 33, 97}, {0, 0, 1111, 0}, {5}, {0, 0}};
    for (auto& rows : lists)
        for (int64_t columns : {(int64_t)32, (int64_t)160, (int64_t)1408})
            for (int broken = 0; broken < 2; broken++) {
                Groups g(rows);
                X x(g.capacity * columns);
                set(x, [&](int64_t i) {
                    const int e = g.of_row(i / columns);
                    return e >= 0 ? wild_bits(i, broken) : e == -1 ? 0u : 0x7fc0u;
                });
                for (MxRecipe recipe : recipes)
                    check_round("mx_round_columns", x, [&](floatX* out, const floatX* in, bool reference) {
                        auto round = reference ? REFERENCE(mx_round_columns) : mx_round_columns;
                        round(out, in, reference ? g.reference(broken) : g.device(), columns, recipe,
                              reference ? reference_ctx : ctx);
                    });
            }
}

// Uneven groups: an empty one, and one of several chunks for a block of threads. Inputs: bf16 values, quantized rows,
// and quantized tokens in any order. Behind the last group nothing is written.
static void test_channels(void) {
    const int64_t N = 300;
    Groups g({128, 0, 600, 1, 131});
    const int64_t capacity = g.capacity;
    I32 token(capacity);
    for (int64_t r = 0; r < capacity; r++) {
        const int e = g.of_row(r);
        token.host[(size_t)r] = e == -2 ? 1 << 30 : e == -1 ? -1 : (int32_t)draw(15, r, N);
    }
    token.send();
    Ragged on_gpu = g.device(), on_host = g.reference(0);
    on_gpu.row_token = token.dev, on_host.row_token = token.host.data();
    for (MxRecipe recipe :
         {MxRecipe{MX_RCEIL, 128}, MxRecipe{MX_FLOOR, 128}, MxRecipe{MX_RCEIL, 512}, MxRecipe{MX_FLOOR, 512}})
        for (int64_t columns : {(int64_t)32, (int64_t)160, (int64_t)1408}) {
            // Values; those of some columns are small.
            Bytes q(columns * capacity), scale(capacity / 128 * columns);
            X x(capacity * columns);
            set(x, [&](int64_t i) {
                const int e = g.of_row(i / columns);
                if (e < 0) return e == -1 ? 0u : 0x7fc0u;
                if (draw(16, i, 3000) == 0) return draw(17, i, 2) ? 0x7f80u : 0xffc1u;
                return (((i % columns % 9 == 5 ? 10 : 100) + draw(18, i / 40, 30) + draw(19, i, 12)) << 7) |
                       draw(20, i, 128) | draw(21, i, 2) << 15;
            });
            mx_quantize_channels({q.dev, scale.dev}, x.dev, capacity, on_gpu, columns, recipe, ctx);
            REFERENCE(mx_quantize_channels)
            ({q.host.data(), scale.host.data()}, x.ref(), capacity, on_host, columns, recipe, reference_ctx);
            CHECK_BYTES(q);
            CHECK_BYTES(scale);

            // Quantized rows, with zeros in pad rows; then quantized tokens.
            for (int tokens = 0; tokens < 2; tokens++) {
                const int64_t held = tokens ? N : capacity, stride = mx_stride(columns);
                Bytes from(held * columns), from_scale(held * stride);
                std::vector<uint8_t> bytes((size_t)from.n), scales((size_t)from_scale.n);
                for (int64_t i = 0; i < from.n; i++) {
                    const bool pad = !tokens && g.of_row(i / columns) < 0;
                    bytes[(size_t)i] = (uint8_t)(pad ? 0 : draw(22, i, 4000) == 0 ? 0x7f : draw(23, i, 256) & 0xf7);
                }
                for (int64_t i = 0; i < from_scale.n; i++) scales[(size_t)i] = (uint8_t)(20 + draw(24, i, 130));
                from.send(bytes), from_scale.send(scales);
                Bytes q2(columns * capacity), scale2(capacity / 128 * columns);
                mx_requantize_channels({q2.dev, scale2.dev}, {from.dev, from_scale.dev}, tokens, capacity, on_gpu,
                                       columns, recipe, ctx);
                REFERENCE(mx_requantize_channels)
                ({q2.host.data(), scale2.host.data()}, {from.host.data(), from_scale.host.data()}, tokens, capacity,
                 on_host, columns, recipe, reference_ctx);
                CHECK_BYTES(q2);
                CHECK_BYTES(scale2);
            }
        }
}

// Row-wise and column-wise in one kernel. Rows and columns end inside half a warp, a chunk and a block of rows. Against
// the reference and against the two separate kernels, with outputs that go on behind the rows in use.
static void test_both(void) {
    static const int64_t shapes[][2] = {{1, 32},    {15, 64},   {127, 96},   {128, 128},  {129, 160},  {300, 224},
                                        {777, 544}, {64, 1056}, {513, 2048}, {257, 1408}, {33, 10944}, {2000, 576}};
    for (auto& s : shapes)
        for (int i = 0; i < 4; i++) {
            const int64_t rows = s[0], columns = s[1], used = round_up(rows, 128), length = used + 128 * (i & 1);
            const MxRecipe recipe = {i & 1, 128};
            X x(rows * columns);
            set_wild(x, i >> 1);
            I64 start(2);
            start.host = {0, used};
            start.send();
            Ragged all = {};
            all.El = 1, all.capacity = rows, all.group_start = start.dev;

            Bytes q(rows * columns), scale(rows * mx_stride(columns)), one_way(rows * columns),
                one_scale(rows * mx_stride(columns));
            Bytes by_channel(columns * length), scales(length / 128 * columns), channels(columns * length),
                channel_scales(length / 128 * columns);
            // The kernel against the two separate ones.
            mx_quantize_both({q.dev, scale.dev}, {by_channel.dev, scales.dev}, x.dev, length, rows, columns,
                             recipe.scale, ctx);
            mx_quantize({one_way.dev, one_scale.dev}, x.dev, rows, columns, recipe, ctx);
            mx_quantize_channels({channels.dev, channel_scales.dev}, x.dev, length, all, columns, recipe, ctx);
            CHECK(q.got() == one_way.got(), "%lld x %lld: bytes along rows", (long long)rows, (long long)columns);
            CHECK(scale.got() == one_scale.got(), "%lld x %lld: their scales", (long long)rows, (long long)columns);
            CHECK(by_channel.got() == channels.got(), "%lld x %lld: bytes by channel", (long long)rows,
                  (long long)columns);
            CHECK(scales.got() == channel_scales.got(), "%lld x %lld: their scales", (long long)rows,
                  (long long)columns);

            // The kernel against the reference.
            REFERENCE(mx_quantize_both)
            ({q.host.data(), scale.host.data()}, {by_channel.host.data(), scales.host.data()}, x.ref(), length, rows,
             columns, recipe.scale, reference_ctx);
            CHECK_BYTES(q);
            CHECK_BYTES(scale);
            CHECK_BYTES(by_channel);
            CHECK_BYTES(scales);
        }
}

// Bytes of a matrix on the GPU: `height` rows of `width` bytes, `pitch` apart.
static std::vector<uint8_t> window(const uint8_t* from, int64_t pitch, int64_t width, int64_t height) {
    std::vector<uint8_t> bytes((size_t)(width * height));
    ctx_sync(ctx);
    CUDA_CHECK(cudaMemcpy2D(bytes.data(), (size_t)width, from, (size_t)pitch, (size_t)width, (size_t)height,
                            cudaMemcpyDeviceToHost));
    return bytes;
}

// More chunks of rows than a grid has rows, 1.5 GB. The kernel that quantizes both ways: first, middle and last rows
// are as those of a matrix of their own. Channels: a capacity of that size, of which three experts use little.
static void test_many_rows(void) {
    const int64_t columns = 32, chunks = 65536 + 3, rows = chunks * 128 - 5, length = chunks * 128, some = 3 * 128 - 5;
    const int64_t stride = mx_stride(columns), pattern = 1000;
    X part(pattern * columns);
    set_wild(part, 0);
    floatX* x = (floatX*)device_alloc((size_t)(rows * columns) * sizeof(floatX), "a test");
    for (int64_t at = 0; at < rows; at += pattern)
        CUDA_CHECK(cudaMemcpyAsync(x + at * columns, part.dev,
                                   (size_t)(std::min(pattern, rows - at) * columns) * sizeof(floatX),
                                   cudaMemcpyDeviceToDevice));
    settle();
    uint8_t* all =
        (uint8_t*)device_alloc((size_t)(2 * length * columns + length * stride + chunks * columns), "a test");
    uint8_t *q = all, *by_channel = q + length * columns, *scale = by_channel + length * columns,
            *scales = scale + length * stride;
    CUDA_CHECK(cudaMemset(all, Bytes::POISON, (size_t)(scales + chunks * columns - all)));
    settle();
    mx_quantize_both({q, scale}, {by_channel, scales}, x, length, rows, columns, MX_RCEIL, ctx);
    const int64_t places[] = {0, 32768 * 128 - 128, 65536 * 128 - 128, (chunks - 3) * 128};
    for (int64_t from : places) {
        Bytes own_q(some * columns), own_scale(some * stride), own_channel(columns * 384), own_scales(3 * columns);
        mx_quantize_both({own_q.dev, own_scale.dev}, {own_channel.dev, own_scales.dev}, x + from * columns, 384,
                         std::min(some, rows - from), columns, MX_RCEIL, ctx);
        // Whole chunks, and the last rows where they end.
        const int64_t here = from == places[3] ? some : 256;
        CHECK(window(q + from * columns, columns, columns, here) == window(own_q.dev, columns, columns, here),
              "row %lld: bytes along rows", (long long)from);
        CHECK(window(scale + from * stride, stride, stride, here) == window(own_scale.dev, stride, stride, here),
              "row %lld: their scales", (long long)from);
        CHECK(window(by_channel + from, length, here, columns) == window(own_channel.dev, 384, here, columns),
              "row %lld: bytes by channel", (long long)from);
        CHECK(window(scales + from / 128 * columns, columns, columns, 2) == window(own_scales.dev, columns, columns, 2),
              "row %lld: their scales", (long long)from);
    }

    Groups g({129, 0, 700});
    const int64_t used = g.capacity - 128;
    Bytes own_channel(columns * g.capacity), own_scales(g.capacity / 128 * columns);
    Ragged r = g.device();
    mx_quantize_channels({own_channel.dev, own_scales.dev}, x, r.capacity, r, columns, {MX_RCEIL, 128}, ctx);
    CUDA_CHECK(cudaMemset(all, Bytes::POISON, (size_t)(scales + chunks * columns - all)));
    settle();
    r.capacity = length;
    mx_quantize_channels({by_channel, scales}, x, length, r, columns, {MX_RCEIL, 128}, ctx);
    CHECK(window(by_channel, length, used, columns) == window(own_channel.dev, g.capacity, used, columns),
          "bytes by channel of a large capacity");
    CHECK(window(scales, columns, columns, used / 128) == window(own_scales.dev, columns, columns, used / 128),
          "their scales");
    device_free(all), device_free(x);
}

int main(void) {
    open_contexts(0);
    RUN(test_every_bf16);
    RUN(test_rows);
    RUN(test_columns);
    RUN(test_weights);
    RUN(test_groups);
    RUN(test_dequantize);
    RUN(test_channels);
    RUN(test_both);
    RUN(test_many_rows);
    return test_summary();
}
