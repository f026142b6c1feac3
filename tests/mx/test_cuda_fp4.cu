// CUDA fake quantization of NVFP4 and MXFP4 against the reference, bit for bit: both sides have the same arithmetic,
// and the kernel rounds its float32 result to bf16. To nearest and stochastic, rows, columns with the Hadamard
// transform and without, tiles, the transposed copy, and statistics. Odd widths, groups without rows, and one with all
// rows.
#include "mx/fp4.h"
#include "mx/mxfp8.h"
#include "tests/ragged.cuh"

static bool small;  // fewer sizes

// Compares with the reference, rounded to bf16. What neither writes is NaN on both sides.
static void check_values(const char* what, const X& x) {
    const auto got = x.got();
    int64_t wrong = 0, first = 0;
    for (int64_t i = 0; i < x.n; i++) {
        const double want = __bfloat162float(__double2bfloat16(x.host[(size_t)i])), have = got[(size_t)i];
        const bool same = want != want ? have != have : have == want && signbit(have) == signbit(want);
        if (!same && wrong++ == 0) first = i;
    }
    CHECK(wrong == 0, "%s: %lld of %lld differ, the first at %lld is %g, not %g", what, (long long)wrong,
          (long long)x.n, (long long)first, got[(size_t)first], x.host[(size_t)first]);
}

// Random numbers of a step on both sides.
struct Numbers {
    BatchDraws host = {0x123456789abcull, (3 << 20) + 8}, *dev;
    Numbers() {
        dev = (BatchDraws*)device_alloc(sizeof(BatchDraws), "a test");
        device_upload(dev, &host, sizeof(host), ctx);
        ctx_sync(ctx);
    }
    ~Numbers() { device_free(dev); }
};

// x by fp4_round, into another tensor and in place. Each has a guard behind it. Random numbers begin with a counter,
// and in the middle of one.
static void check_round(X& x, Ragged dev, Ragged ref, int64_t columns, Fp4Blocks blocks, bool with_back) {
    Numbers numbers;
    for (int stochastic = 0; stochastic < 2; stochastic++)
        for (int in_place = 0; in_place < 2; in_place++) {
            X out(x.n + 64), back(x.n + 64);
            const Draw on_gpu = {stochastic ? numbers.dev : NULL, 77};
            const Draw on_host = {stochastic ? &numbers.host : NULL, 77};
            if (in_place) {
                std::copy(x.host.begin(), x.host.end(), out.host.begin());
                CUDA_CHECK(cudaMemcpy(out.dev, x.dev, (size_t)x.n * sizeof(floatX), cudaMemcpyDeviceToDevice));
                settle();
            }
            fp4_round({out.dev, with_back ? back.dev : NULL, in_place ? out.dev : x.dev, dev, columns, blocks, on_gpu},
                      ctx);
            const Fp4Work host = {
                out.ref(), with_back ? back.ref() : NULL, in_place ? out.ref() : x.ref(), ref, columns, blocks,
                on_host};
            REFERENCE(fp4_round)(host, reference_ctx);
            char what[99];
            snprintf(what, sizeof(what), "rule %d, %dx%d, transform %d, stochastic %d", blocks.scale, (int)blocks.high,
                     (int)blocks.wide, blocks.transform, stochastic);
            check_values(what, out);
            check_values("transposed", back);
        }
}

static const Fp4Blocks all_blocks[] = {{1, 16, 0, 0},        {16, 1, 0, 0},        {16, 1, 1, 0},
                                       {1, 32, 0, MX_RCEIL}, {1, 32, 0, MX_FLOOR}, {32, 1, 0, MX_RCEIL},
                                       {32, 1, 1, MX_RCEIL}};
static const Fp4Blocks tiles[] = {{16, 16, 0, 0}, {32, 32, 0, MX_RCEIL}};

static void test_groups(void) {
    static const Rows lists[] = {{129, 0, 5}, {128, 0, 512, 131}, {0, 1, 0, 31, 33, 97}, {0, 0, 1111, 0}, {5}, {0, 0}};
    static const int64_t widths[] = {160, 32, 1408};
    for (int i = 0; i < (small ? 1 : 6); i++)
        for (int k = 0; k < (small ? 1 : 3); k++) {
            Layout l(lists[i]);
            RowBuffer x(l, widths[k], 1);
            for (Fp4Blocks blocks : all_blocks) check_round(x, l.device(), l.reference(), widths[k], blocks, false);
        }
}

// Without starts: all rows as one group, and weights in tiles.
static void test_matrices(void) {
    static const int64_t shapes[][3] = {{3, 67, 96},  {1, 1, 32},    {1, 67, 96},
                                        {3, 96, 160}, {7, 288, 416}, {2, 1408, 992}};
    for (int i = 0; i < (small ? 1 : 6); i++) {
        const int64_t count = shapes[i][0], rows = shapes[i][1], columns = shapes[i][2];
        X x(count * rows * columns, 2);
        x.host[5] = 0, x.host[6] = -0.0;
        Ragged r = {};
        r.El = (int32_t)count, r.capacity = rows;
        for (int special = 0; special < 2; special++) {
            if (special) x.host[7] = rows % 2 ? NAN : INFINITY;
            x.send();
            for (Fp4Blocks blocks : all_blocks) check_round(x, r, r, columns, blocks, blocks.wide > 1);
            for (Fp4Blocks blocks : tiles) check_round(x, r, r, columns, blocks, true);
        }
    }
}

// Rows from..from + n - 1 of matrix g are rounded as they are alone, with their own random numbers: in `out`, and in
// the transposed `back` if there is one.
static void check_rows_of(const floatX* x, const floatX* out, const floatX* back, Ragged r, int64_t columns, int32_t g,
                          int64_t from, int64_t n, Fp4Blocks blocks, const Numbers& numbers) {
    const int64_t at = (g * r.capacity + from) * columns, turned = g * columns * r.capacity + from;
    BatchDraws draws = numbers.host, *dev = (BatchDraws*)device_alloc(sizeof(BatchDraws), "a test");
    draws.first += from;
    device_upload(dev, &draws, sizeof(draws), ctx);
    X own(n * columns), own_back(n * columns);
    Ragged one = {};
    one.El = 1, one.capacity = n;
    fp4_round({own.dev, back ? own_back.dev : NULL, x + at, one, columns, blocks, {dev, 77 + (uint32_t)g}}, ctx);
    const size_t row = (size_t)n * sizeof(floatX);
    std::vector<uint16_t> want((size_t)own.n), got((size_t)own.n);
    ctx_sync(ctx);
    for (int turn = 0; turn <= (back != NULL); turn++) {
        CUDA_CHECK(cudaMemcpy(want.data(), turn ? own_back.dev : own.dev, want.size() * 2, cudaMemcpyDeviceToHost));
        if (turn)
            CUDA_CHECK(cudaMemcpy2D(got.data(), row, back + turned, (size_t)r.capacity * sizeof(floatX), row,
                                    (size_t)columns, cudaMemcpyDeviceToHost));
        else
            CUDA_CHECK(cudaMemcpy(got.data(), out + at, got.size() * 2, cudaMemcpyDeviceToHost));
        CHECK(got == want, "rule %d, %dx%d, matrix %d, row %lld: another value%s", blocks.scale, (int)blocks.high,
              (int)blocks.wide, g, (long long)from, turn ? ", transposed" : "");
    }
    device_free(dev);
}

// Matrices of more than 2^31 elements together, and of more than 2^32 where there is memory for them: 14 and 27 GB. So
// many more that also the first transposed element of a line lies beyond.
static void check_large(int64_t limit) {
    const int64_t elements = limit + ((int64_t)1 << 27);
    const int64_t count = 3, columns = 4128, rows = (elements / count / columns) / 32 * 32 + 37, pattern = 1001;
    const int64_t all = count * rows * columns;
    X part(pattern * columns, 5);
    // The largest magnitude of a matrix is in each of its rows: a tensor's scale does not depend on the rows taken.
    for (int64_t i = 0; i < pattern; i++) part.host[(size_t)(i * columns + i % columns)] = i % 2 ? 8 : -8;
    part.send();
    Numbers numbers;
    floatX* x = (floatX*)device_alloc((size_t)(3 * all) * sizeof(floatX), "a test");
    floatX *out = x + all, *back = out + all;
    for (int64_t at = 0; at < count * rows; at += pattern)
        CUDA_CHECK(cudaMemcpyAsync(x + at * columns, part.dev,
                                   (size_t)(std::min(pattern, count * rows - at) * columns) * sizeof(floatX),
                                   cudaMemcpyDeviceToDevice));
    settle();
    Ragged r = {};
    r.El = (int32_t)count, r.capacity = rows;
    const int64_t tail = 37, middle = rows / 64 * 32;
    for (Fp4Blocks blocks : {all_blocks[0], all_blocks[1], all_blocks[6], tiles[0], tiles[1]}) {
        CUDA_CHECK(cudaMemset(out, 0xff, (size_t)(2 * all) * sizeof(floatX)));
        settle();
        floatX* turned = blocks.wide > 1 ? back : NULL;
        fp4_round({out, turned, x, r, columns, blocks, {numbers.dev, 77}}, ctx);
        for (int32_t g = 0; g < count; g++) {
            check_rows_of(x, out, turned, r, columns, g, 0, 64, blocks, numbers);
            check_rows_of(x, out, turned, r, columns, g, middle, 64, blocks, numbers);
            check_rows_of(x, out, turned, r, columns, g, rows - tail, tail, blocks, numbers);
        }
    }
    device_free(x);
}

static void test_beyond_2_31(void) { check_large((int64_t)1 << 31); }
static void test_beyond_2_32(void) { check_large((int64_t)1 << 32); }
#define RUN_LARGE(test, gib)                                                                                           \
    do {                                                                                                               \
        if (device_free_memory(1) < (size_t)gib << 30)                                                                 \
            SKIP(test, "needs " #gib " GiB of GPU memory");                                                            \
        else                                                                                                           \
            RUN(test);                                                                                                 \
    } while (0)

// Counts are exact. Sums are of the same doubles in another order.
static void test_stats(void) {
    Ragged r = {};
    r.El = 3, r.capacity = 97;
    X x(3 * 97 * 416, 3);
    for (Fp4Blocks blocks : {all_blocks[0], all_blocks[4], tiles[0], tiles[1]}) {
        QuantizationStats want = {1, 2, 3, 4, 5, 6}, got;
        QuantizationStats* dev = (QuantizationStats*)device_alloc(sizeof(QuantizationStats), "a test");
        device_upload(dev, &want, sizeof(want), ctx);
        fp4_round({NULL, NULL, x.dev, r, 416, blocks, {}, dev}, ctx);
        device_download(&got, dev, sizeof(got), ctx);
        const Fp4Work host = {NULL, NULL, x.ref(), r, 416, blocks, {}, &want};
        REFERENCE(fp4_round)(host, reference_ctx);
        CHECK(got.elements == want.elements && got.saturated == want.saturated && got.flushed == want.flushed &&
                  got.inexact == want.inexact && fabs(got.signal / want.signal - 1) < 1e-10 &&
                  fabs(got.noise / want.noise - 1) < 1e-10,
              "%g %g %g %g %.17g %.17g, not %g %g %g %g %.17g %.17g", got.elements, got.saturated, got.flushed,
              got.inexact, got.signal, got.noise, want.elements, want.saturated, want.flushed, want.inexact,
              want.signal, want.noise);
        device_free(dev);
    }
}

// `small` is for compute-sanitizer.
int main(int argc, char** argv) {
    small = argc > 1 && !strcmp(argv[1], "small");
    open_contexts((size_t)1 << 20);
    RUN(test_groups);
    RUN(test_matrices);
    RUN(test_stats);
    if (small) return test_summary();
    RUN_LARGE(test_beyond_2_31, 14);
    RUN_LARGE(test_beyond_2_32, 27);
    return test_summary();
}
