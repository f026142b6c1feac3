// Shared by the tests of the ops: memory freed all at once, comparison with float64 oracles, central differences, and
// the check that bits do not depend on the number of threads.
//
// An oracle is a plain float64 loop written from the op's header. The forward must equal it; the backward must equal
// the central differences of the oracle. So the float and the double build run the same tests and differ only in the
// tolerance. The double build's tolerance (1e-12 or less forward, 1e-6 differences) proves the formula, the float
// build's proves the rounding.
//
// In the comments on tolerances u is the rounding of float32, 6e-8 (of double, 1e-16). A sum of n terms of random signs
// has an error of about sqrt(n) u of its norm. An elementwise formula of k operations has an error of about k u or
// less.
#ifndef TESTS_ORACLE_H
#define TESTS_ORACLE_H

#include <omp.h>

#include "tests/test.h"

#ifdef F64
#define TOL(f32, f64) (f64)
#else
#define TOL(f32, f64) (f32)
#endif

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

// --- Memory: every buffer is kept until release_all(), and is exactly as large as asked for. ---

typedef struct Kept {
    void* p;
    size_t bytes;
} Kept;
static Kept kept[4096];
static int kept_count;

static inline void* keep(void* p, size_t bytes) {
    ASSERT(kept_count < COUNT(kept));
    kept[kept_count++] = (Kept){p, bytes};
    return p;
}

static inline void release_all(void) {
    while (kept_count) free(kept[--kept_count].p);
}

static inline void* kept_bytes(size_t bytes) { return keep(host_alloc(bytes), bytes); }

static inline real* tensor(int64_t n, uint32_t stream) {
    return (real*)keep(random_tensor(n, stream), n * sizeof(real));
}

static inline real* filled(int64_t n, double value) {
    real* x = (real*)kept_bytes(n * sizeof(real));
    for (int64_t i = 0; i < n; i++) x[i] = (real)value;
    return x;
}

// For outputs that are `=`: an op that reads an element, or leaves one unwritten, fails.
static inline real* poisoned(int64_t n) { return filled(n, NAN); }

static inline int32_t* poisoned_ints(int64_t n) {
    return (int32_t*)memset(kept_bytes(n * sizeof(int32_t)), 0x7b, n * sizeof(int32_t));
}

// For outputs that are `+=`.
static inline real* copied(const real* x, int64_t n) {
    return (real*)memcpy(kept_bytes(n * sizeof(real)), x, n * sizeof(real));
}

static inline double* zeros(int64_t n) { return (double*)kept_bytes(n * sizeof(double)); }

static inline double* doubles(const real* x, int64_t n) {
    double* d = zeros(n);
    for (int64_t i = 0; i < n; i++) d[i] = x[i];
    return d;
}

// n numbers in 0..below-1
static inline int32_t* random_ints(int64_t n, int32_t below, uint32_t stream) {
    int32_t* x = (int32_t*)kept_bytes(n * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) x[i] = (int32_t)(random_uniform(1234, stream, i) * below);
    return x;
}

// (N, C) out of rows `stride` apart, packed.
static inline real* packed(const real* x, int64_t N, int64_t C, int64_t stride) {
    real* out = (real*)kept_bytes(N * C * sizeof(real));
    for (int64_t n = 0; n < N; n++) memcpy(out + n * C, x + n * stride, C * sizeof(real));
    return out;
}

// The reverse of packed. The elements between the rows are NaN and may not be read or written (check_gaps).
static inline real* spread(const real* x, int64_t N, int64_t C, int64_t stride) {
    real* out = poisoned(N * stride);
    for (int64_t n = 0; n < N; n++) memcpy(out + n * stride, x + n * C, C * sizeof(real));
    return out;
}

static inline void check_gaps(const real* x, int64_t N, int64_t C, int64_t stride) {
    int64_t written = 0;
    for (int64_t n = 0; n < N; n++)
        for (int64_t c = C; c < stride; c++) written += !isnan(x[n * stride + c]);
    CHECK(written == 0, "%lld elements between the rows were written", (long long)written);
}

// --- Comparison. With TEST_ERRORS in the environment every error is printed with its tolerance. ---

// ||out - ref|| / ||ref||; NaN if any element of out is.
static inline double oracle_error(const real* out, const double* ref, int64_t n) {
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        diff += ((double)out[i] - ref[i]) * ((double)out[i] - ref[i]);
        norm += ref[i] * ref[i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

#define CHECK_CLOSE(out, ref, n, tolerance)                                                                            \
    do {                                                                                                               \
        double error_ = oracle_error(out, ref, n), allowed_ = tolerance;                                               \
        if (getenv("TEST_ERRORS")) printf("    %s:%d %s %.1e of %.1e\n", __FILE__, __LINE__, #out, error_, allowed_);  \
        CHECK(error_ <= allowed_, "%s against %s: %.3g, allowed %.3g", #out, #ref, error_, allowed_);                  \
    } while (0)

#define CHECK_BITS(a, b, bytes) CHECK(!memcmp(a, b, bytes), "bits differ")

// Runs the op with one and with three threads. Every buffer that it made must have the same bits.
static inline void check_threads(void (*run)(void*), void* arg) {
    int first = kept_count, many = omp_get_max_threads();
    omp_set_num_threads(1);
    run(arg);
    int second = kept_count;
    omp_set_num_threads(3);
    run(arg);
    ASSERT(kept_count - second == second - first);
    for (int i = 0; i < second - first; i++) {
        const char *one = (const char*)kept[first + i].p, *three = (const char*)kept[second + i].p;
        size_t bytes = kept[first + i].bytes, at = 0;
        while (at < bytes && one[at] == three[at]) at++;
        CHECK(at == bytes, "buffer %d of %d: byte %zu of %zu differs between 1 and 3 threads", i + 1, second - first,
              at, bytes);
    }
    omp_set_num_threads(many);
}

// --- Central differences ---

typedef double (*Objective)(void* arg);

// sum_i a_i b_i
static inline double dot(const double* a, const double* b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// Relative error of a gradient against (f(x + h d) - f(x - h d)) / 2h, h = 1e-5. A small tensor: every element is
// tested. A large tensor: some elements and eight random directions of length 1, which cover all elements at once. The
// derivative along such a direction is about ||grad|| / sqrt(n), so its error counts sqrt(n)-fold.
static inline double difference_error(Objective f, void* arg, double* x, const double* grad, int64_t n) {
    const double h = 1e-5;
    double diff = 0, norm = 0, worst = 0;
    // Single elements.
    int64_t every = n <= 300 ? 1 : n / 41;
    for (int64_t i = every == 1 ? 0 : every / 2; i < n; i += every) {
        double saved = x[i];
        x[i] = saved + h;
        double up = f(arg);
        x[i] = saved - h;
        double down = f(arg), slope = (up - down) / (2 * h);
        x[i] = saved;
        diff += (slope - grad[i]) * (slope - grad[i]);
        norm += slope * slope;
    }
    worst = norm > 0 ? sqrt(diff / norm) : sqrt(diff);
    if (every == 1 || isnan(worst)) return worst;
    // Random directions.
    double length = sqrt(dot(grad, grad, n)), *saved = (double*)host_alloc(n * sizeof(double));
    memcpy(saved, x, n * sizeof(double));
    for (int direction = 0; direction < 8; direction++) {
        real* d = random_tensor(n, 900 + direction);
        double size = 0, slope = 0, along = 0;
        for (int64_t i = 0; i < n; i++) size += (double)d[i] * d[i];
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int64_t i = 0; i < n; i++) x[i] = saved[i] + sign * h * (d[i] / sqrt(size));
            slope += sign * f(arg) / (2 * h);
        }
        for (int64_t i = 0; i < n; i++) along += grad[i] * (d[i] / sqrt(size));
        double error = fabs(slope - along) * sqrt((double)n) / length;
        worst = !(error <= worst) ? error : worst;
        free(d);
    }
    memcpy(x, saved, n * sizeof(double));
    free(saved);
    return worst;
}

// `out` is the op's gradient with respect to x, on top of `before` (NULL: the op writes =).
// In double: the differences have an error from rounding, 1e-16 |f| / h, and from truncation, h^2 f''' / 6. Both are
// about 1e-10 of the gradient; 1e-6 allows |f| up to 1e4 times larger. In float: the op's own rounding, `tolerance`.
#define CHECK_GRADIENT(f, arg, x, out, before, n, tolerance)                                                           \
    do {                                                                                                               \
        double* grad_ = (double*)host_alloc((n) * sizeof(double));                                                     \
        const real *out_ = out, *before_ = before;                                                                     \
        for (int64_t i_ = 0; i_ < (n); i_++) grad_[i_] = (double)out_[i_] - (before_ ? (double)before_[i_] : 0);       \
        double error_ = difference_error(f, arg, x, grad_, n), allowed_ = TOL(tolerance, 1e-6);                        \
        if (getenv("TEST_ERRORS")) printf("    %s:%d %s %.1e of %.1e\n", __FILE__, __LINE__, #out, error_, allowed_);  \
        CHECK(error_ <= allowed_, "%s against differences: %.3g, allowed %.3g", #out, error_, allowed_);               \
        free(grad_);                                                                                                   \
    } while (0)

#endif
