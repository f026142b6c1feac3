// Shared by the tests of grouped GEMMs on the GPU: groups of rows at multiples of 128 on both sides, the buffers of
// such rows, and the checks of the results.
#ifndef TESTS_RAGGED_CUH
#define TESTS_RAGGED_CUH

#include <algorithm>

#include "grouped/permute.h"
#include "tests/cuda.cuh"

typedef std::vector<int32_t> Rows;

// The groups. With `short_by` the capacity ends inside the pad rows of the last group. All buffers continue behind the
// capacity and end inside a tile. Rows behind may not be used or written.
struct Layout {
    Rows rows;
    std::vector<int64_t> start;
    int64_t capacity, end, held;  // end: of the last group; held: rows of the buffers
    I64 device_start;
    I32 device_rows;

    explicit Layout(const Rows& r, int64_t short_by = 0)
        : rows(r), device_start((int64_t)r.size() + 1), device_rows((int64_t)r.size()) {
        int64_t at = 0;
        for (int32_t n : rows) start.push_back(at), at += ceil_div(n, 128) * 128;
        start.push_back(at);
        end = at - short_by, held = at + 200, capacity = short_by ? end : held;
        device_start.host = start, device_rows.host = rows;
        device_start.send(), device_rows.send();
    }
    int El() const { return (int)rows.size(); }
    int expert(int64_t row) const {  // -1: a pad row, or behind
        for (int e = 0; e < El(); e++)
            if (row >= start[e] && row < start[e] + rows[e]) return e;
        return -1;
    }
    Ragged device() {
        Ragged r = {};
        r.El = El(), r.capacity = capacity, r.group_start = device_start.dev, r.group_rows = device_rows.dev;
        return r;
    }
    Ragged reference() {
        Ragged r = device();
        r.group_start = start.data(), r.group_rows = rows.data();
        return r;
    }
};

static inline Rows random_rows(int El, int mean, uint32_t stream) {
    Rows rows;
    for (int e = 0; e < El; e++) {
        double u = random_uniform(99, stream, (uint64_t)e);
        rows.push_back(u < 0.15 ? 0 : (int32_t)(u * 2 * mean));
    }
    return rows;
}

// Random rows in bf16, zeros in pad rows, NaN behind the last group.
struct RowBuffer : X {
    RowBuffer(const Layout& l, int64_t C, uint32_t stream) : X(l.held * C, stream) {
        for (int64_t r = 0; r < l.held; r++)
            if (l.expert(r) < 0) std::fill_n(host.begin() + r * C, C, r < l.end ? 0.0 : (double)NAN);
        send();
    }
};

// Quantized values or scales, on both sides.
struct Bytes {
    std::vector<uint8_t> host;
    uint8_t* dev;

    explicit Bytes(int64_t n, uint8_t value) : host((size_t)n, value) {
        dev = (uint8_t*)device_alloc((size_t)n, "a test");
    }
    Bytes(const Bytes&) = delete;
    ~Bytes() { device_free(dev); }
    void send() {
        CUDA_CHECK(cudaMemcpy(dev, host.data(), host.size(), cudaMemcpyHostToDevice));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    std::vector<uint8_t> got() const {
        std::vector<uint8_t> bytes(host.size());
        ctx_sync(ctx);
        CUDA_CHECK(cudaMemcpy(bytes.data(), dev, bytes.size(), cudaMemcpyDeviceToHost));
        return bytes;
    }
};

static inline bool is_among(const Rows& experts, int e) {
    return std::find(experts.begin(), experts.end(), e) != experts.end();
}

// Against out.host, the reference's. Every row of a token: within `row_tolerance` in norm. All these rows together,
// from 1000 elements on: within `tolerance`. Pad rows must be zero, and rows behind the last group unchanged. Rows of
// `nan_experts` are not compared.
template <typename T>
static void check_rows(const char* what, const T& out, const Layout& l, int64_t C, double row_tolerance,
                       double tolerance = INFINITY, const Rows& nan_experts = {}) {
    auto got = out.got();
    double worst = 0, all_diff = 0, all_norm = 0;
    int64_t pads = 0, behind = 0, compared = 0;
    for (int64_t r = 0; r < l.held; r++) {
        const int e = l.expert(r);
        double diff = 0, norm = 0;
        for (int64_t i = r * C; i < (r + 1) * C; i++) {
            const double d = got[(size_t)i] - out.host[(size_t)i];
            diff += d * d, norm += out.host[(size_t)i] * out.host[(size_t)i];
            pads += e < 0 && r < l.end && got[(size_t)i] != 0;
            behind += r >= l.end && !isnan(got[(size_t)i]);
        }
        if (e < 0 || is_among(nan_experts, e)) continue;
        all_diff += diff, all_norm += norm, compared += C;
        const double error = sqrt(diff / norm);
        if (!(error <= worst)) worst = isfinite(error) ? error : INFINITY;
    }
    const double all = compared ? sqrt(all_diff / all_norm) : 0;
    if (getenv("TEST_ERRORS"))
        printf("    %s: rows %.3g of %.3g, all %.3g of %.3g\n", what, worst, row_tolerance, all, tolerance);
    CHECK(worst <= row_tolerance, "%s: a row is off by %g", what, worst);
    CHECK(all <= tolerance || compared < 1000, "%s is off by %g", what, all);
    CHECK(pads == 0, "%s: %lld elements of pad rows are not zero", what, (long long)pads);
    CHECK(behind == 0, "%s: %lld elements behind the last expert were written", what, (long long)behind);
}

// The rounded dW is the float32 one, rounded to nearest even: the sums are the same.
static inline void check_rounded(const X& rounded, const R& dw) {
    const auto got = rounded.got(), sums = dw.got();
    int64_t wrong = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double want = (double)__bfloat162float(__float2bfloat16_rn((float)sums[i]));
        wrong += !(got[i] == want || (isnan(got[i]) && isnan(want)));
    }
    CHECK(wrong == 0, "%lld elements of the rounded dW are wrong", (long long)wrong);
}

// dW in float32, `size` elements per expert, added to `start` (zeros where dW is written). The tensor cores add 16
// products at a time and cut the running sum off at 24 bits. Each time this loses at most 2^-23 of the sum. Partial
// sums are on average no larger than the final sum. dW is then added with one rounding. The tolerance is (rows / 16 +
// 4) * 2^-23 for every expert. Without rows dW equals `start` to the bit.
static inline void check_weights(const R& dw, const std::vector<double>& start, const Layout& l, int64_t size,
                                 const Rows& nan_experts = {}) {
    auto got = dw.got();
    for (int e = 0; e < l.El(); e++) {
        if (is_among(nan_experts, e)) continue;
        const double *g = got.data() + e * size, *r = dw.host.data() + e * size;
        if (l.rows[e] == 0) {
            CHECK(memcmp(g, start.data() + e * size, (size_t)size * sizeof(double)) == 0,
                  "dW of expert %d without rows is wrong", e);
            continue;
        }
        double diff = 0, norm = 0;
        for (int64_t i = 0; i < size; i++) diff += (g[i] - r[i]) * (g[i] - r[i]), norm += r[i] * r[i];
        const double error = sqrt(diff / norm), tolerance = ((double)l.rows[e] / 16 + 4) * 0x1p-23;
        if (getenv("TEST_ERRORS")) printf("    dW: %.3g of %.3g\n", error, tolerance);
        CHECK(error <= tolerance, "dW of expert %d (%d rows) is off by %g", e, l.rows[e], error);
    }
}

#endif
