// Shared by the tests of the CUDA quantization kernels: bytes on both sides, and bf16 numbers of every kind.
#ifndef TESTS_MX_BYTES_CUH
#define TESTS_MX_BYTES_CUH

#include <functional>

#include "mx/mxfp8.h"
#include "tests/cuda.cuh"

// Poisoned bytes on the GPU, with a guard behind them that may not be written; the reference's bytes on the host.
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

// Sends the bits of bf16 numbers to the GPU and gives their values to the reference.
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

// The bits of element i. Every block of 32 has its own magnitude, and mantissas use all bits. A few blocks are
// subnormal or zero. `broken`: Inf and NaN too.
static uint32_t wild_bits(int64_t i, int broken) {
    const uint32_t kind = draw(3, i / 32, 16), exponent = 100 + draw(4, i / 32, 40);
    if (broken && draw(5, i, 2000) == 0) return draw(6, i, 2) ? 0x7f80u : 0xffc1u;
    if (kind == 0) return draw(7, i, 2) << 15;
    if (kind == 1) return draw(7, i, 300) | draw(8, i, 2) << 15;
    return ((exponent + draw(9, i, 12)) << 7) | draw(7, i, 128) | draw(8, i, 2) << 15;
}

static void set_wild(X& x, int broken) {
    set(x, [&](int64_t i) { return wild_bits(i, broken); });
}

static const MxRecipe recipes[] = {{MX_RCEIL, 1}, {MX_FLOOR, 1}, {MX_RCEIL, 128}, {MX_FLOOR, 128}};

#endif
