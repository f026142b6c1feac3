// Shared by the tests of CUDA ops. Every op runs twice on the same random inputs: as a kernel on bf16, and as the
// reference in double (build/f64/libreference.so) on the values of the bf16 inputs. Outputs are poisoned with NaN
// before the call, so an element that is not written shows.
//
//   X x(n, stream), w(n, stream), y(n);        bf16 tensors: random, random, output
//   rmsnorm_forward(y.dev, ..., ctx);
//   REFERENCE(rmsnorm_forward)(y.ref(), ..., reference_ctx);
//   CHECK_CLOSE(y, 4e-3);
#ifndef TESTS_CUDA_CUH
#define TESTS_CUDA_CUH

#include <dlfcn.h>

#include <type_traits>
#include <vector>

#include "device/cuda.cuh"
#include "tests/test.h"

static Ctx *ctx, *reference_ctx;
static void* reference_library;

static void* reference_symbol(const char* name) {
    if (!reference_library) {
        reference_library = dlopen("build/f64/libreference.so", RTLD_NOW | RTLD_LOCAL);
        if (!reference_library) die(EXIT_FAILED, "%s (make test builds it)", dlerror());
    }
    void* symbol = dlsym(reference_library, name);
    if (!symbol) die(EXIT_FAILED, "%s", dlerror());
    return symbol;
}

// The double reference, called by the kernel's own signature. Its floatX* and real* are double* inside (X::ref,
// R::ref).
#define REFERENCE(function) ((decltype(&function))reference_symbol(#function))

// Contexts for ops that need up to `workspace` bytes of workspace on the GPU. The reference gets 1 GiB more.
static void open_contexts(size_t workspace) {
    ctx = ctx_create(workspace);
    reference_ctx = REFERENCE(ctx_create)(workspace + ((size_t)1 << 30));
}

// n elements: `Dev` on the GPU and `Ref` on the host for the reference.
template <typename Dev, typename Ref>
struct Tensor {
    std::vector<Ref> host;
    Dev* dev;
    int64_t n;

    explicit Tensor(int64_t n) : host((size_t)n), n(n) {  // an output: NaN (or all bits set) on the GPU, NaN or -1 here
        dev = (Dev*)device_alloc((size_t)n * sizeof(Dev), "a test");
        poison();
    }
    Tensor(int64_t n, uint32_t stream, double scale = 1) : Tensor(n) {
        real* random = random_tensor(n, stream);
        for (int64_t i = 0; i < n; i++) host[(size_t)i] = (Ref)(scale * random[i]);
        free(random);
        send();
    }
    Tensor(const Tensor&) = delete;
    ~Tensor() { device_free(dev); }

    void poison() {
        for (Ref& r : host) r = std::is_floating_point<Ref>::value ? (Ref)NAN : (Ref)-1;
        poison_dev();
    }
    void poison_dev() {
        CUDA_CHECK(cudaMemset(dev, 0xff, (size_t)n * sizeof(Dev)));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    // Copies host to GPU. The host's values are rounded too.
    void send() {
        std::vector<Dev> rounded((size_t)n);
        for (int64_t i = 0; i < n; i++) {
            rounded[(size_t)i] = convert((double)host[(size_t)i], (Dev*)nullptr, host[(size_t)i]);
            host[(size_t)i] = back(rounded[(size_t)i]);
        }
        CUDA_CHECK(cudaMemcpy(dev, rounded.data(), (size_t)n * sizeof(Dev), cudaMemcpyHostToDevice));
        CUDA_CHECK(
            cudaDeviceSynchronize());  // pageable copies may still be in flight, and the stream of ctx does not wait
    }
    std::vector<Ref> got() const {
        std::vector<Dev> raw((size_t)n);
        std::vector<Ref> out((size_t)n);
        ctx_sync(ctx);
        CUDA_CHECK(cudaMemcpy(raw.data(), dev, (size_t)n * sizeof(Dev), cudaMemcpyDeviceToHost));
        for (int64_t i = 0; i < n; i++) out[(size_t)i] = back(raw[(size_t)i]);
        return out;
    }
    Dev* ref() { return (Dev*)host.data(); }  // typed for REFERENCE(...)

   private:
    static floatX convert(double x, floatX*, Ref) { return __double2bfloat16(x); }
    static float convert(double x, float*, Ref) { return (float)x; }
    static int32_t convert(double, int32_t*, Ref exact) { return (int32_t)exact; }
    static int64_t convert(double, int64_t*, Ref exact) { return (int64_t)exact; }
    static Ref back(floatX x) { return (Ref)__bfloat162float(x); }
    static Ref back(float x) { return (Ref)x; }
    static Ref back(int32_t x) { return (Ref)x; }
    static Ref back(int64_t x) { return (Ref)x; }
};

typedef Tensor<floatX, double> X;  // floatX: bf16 against double
typedef Tensor<float, double> R;   // real: float against double
typedef Tensor<int32_t, int32_t> I32;
typedef Tensor<int64_t, int64_t> I64;

// Master weights on the GPU, with their working weights. R's `dev` is not used.
struct Masters : R {
    X weight;
    Master* low;

    Masters(int64_t n, uint32_t stream) : R(n, stream), weight(n) {
        low = (Master*)device_alloc((size_t)n * sizeof(Master), "a test");
        const std::vector<float> values(host.begin(), host.end());
        masters_upload(low, weight.dev, values.data(), n, ctx);
    }
    ~Masters() { device_free(low); }
    std::vector<double> got() const {
        std::vector<float> values((size_t)n);
        masters_download(values.data(), low, weight.dev, n, ctx);
        return std::vector<double>(values.begin(), values.end());
    }
};

// ||out - ref|| / ||ref||; NaN or Inf in the output gives infinity. Only the first `count` elements (-1: all).
template <typename T>
static double tensor_error(const T& t, int64_t count = -1) {
    auto got = t.got();
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < (count < 0 ? t.n : count); i++) {
        double d = (double)got[(size_t)i] - (double)t.host[(size_t)i];
        if (!isfinite(d)) return INFINITY;
        diff += d * d;
        norm += (double)t.host[(size_t)i] * (double)t.host[(size_t)i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

template <typename T>
static int64_t differing(const T& t, int64_t count = -1) {
    auto got = t.got();
    int64_t differ = 0;
    for (int64_t i = 0; i < (count < 0 ? t.n : count); i++) differ += got[(size_t)i] != t.host[(size_t)i];
    return differ;
}

#define CHECK_CLOSE(tensor, tolerance)                                                                                 \
    do {                                                                                                               \
        double error_ = tensor_error(tensor);                                                                          \
        if (getenv("TEST_ERRORS")) printf("    %s: %.3g of %.3g\n", #tensor, error_, (double)(tolerance));             \
        CHECK(error_ <= (tolerance), "%s is off by %g", #tensor, error_);                                              \
    } while (0)
#define CHECK_SAME(tensor)                                                                                             \
    CHECK(differing(tensor) == 0, "%s: %lld of %lld differ", #tensor, (long long)differing(tensor),                    \
          (long long)(tensor).n)

// The same call twice gives the same bits: `run` writes `tensor`.
#define CHECK_REPEATS(tensor, run)                                                                                     \
    do {                                                                                                               \
        run;                                                                                                           \
        auto first_ = (tensor).got();                                                                                  \
        (tensor).poison();                                                                                             \
        run;                                                                                                           \
        auto second_ = (tensor).got();                                                                                 \
        CHECK(memcmp(first_.data(), second_.data(), first_.size() * sizeof(first_[0])) == 0,                           \
              "%s differs from run to run", #tensor);                                                                  \
    } while (0)

// Tolerances. BF16: an element rounded to bf16 once is off by at most 2^-8 = 3.9e-3 of itself, and so is the tensor's
// norm. FLOAT, for float outputs: sums of up to 1e5 random terms in float32 lose about 1e-6.
#define BF16 4e-3
#define FLOAT 5e-6

// Copies to the GPU may still be in flight when they return, and the stream of the ops does not wait for them.
static inline void settle(void) { CUDA_CHECK(cudaDeviceSynchronize()); }

template <typename T>
static inline void restore(T& t, const decltype(t.host)& values) {
    t.host = values;
    t.send();
    settle();
}

// A random integer from 0 to below - 1.
static inline uint32_t draw_below(uint32_t stream, int64_t i, uint32_t below) {
    return (uint32_t)(random_uniform(11, stream, (uint64_t)i) * below);
}

#endif
