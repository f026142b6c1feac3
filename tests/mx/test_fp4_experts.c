// Experts and linear layers in NVFP4 and MXFP4 (linear/linear.h), forward and backward, against a chain in float64 that
// quantizes likewise. The chain has its own e2m1 (the nearest of a list), blocks, Hadamard matrix and coins; of the
// program it uses Philox.
//
// Tolerances. Both sides quantize the same tensors, so only sums differ.
//   double  The transform adds 16 terms in float32, and the largest magnitude of a tensor scales all of it: 3e-7.
//           Allowed: 1e-6. A tensor that is rounded otherwise is 1e-2 off or more.
//   float   Sums differ by 1e-6, and steps are a third of an element. So about one of 1e4 elements flips to its
//           neighbour: 1 / 3 of one element, 1e-2 of a norm of 1e3 elements. Allowed: 3e-2.
#include "linear/quantized.h"
#include "mx/formats.h"
#include "tests/mx.h"
#include "tests/test.h"
#include "tests/weight.h"

enum { El = 4, R = 56, C = 64, F = 32, BEFORE = 18, STREAM = 5 * 2 * WEIGHT_STREAMS };
#ifdef F64
static const double ALLOWED = 1e-6;
#else
static const double ALLOWED = 3e-2;
#endif
static int64_t start[El + 1] = {0, 21, 21, 22, R};  // one expert has no rows, one has one
static int32_t rows[El] = {21, 0, 1, 34};
static const BatchDraws draws = {0x123456789abcull, BEFORE* R};

// Memory of a test, freed at its end.
static void* kept[1000];
static int kept_count;
static void* keep(void* p) {
    CHECK(kept_count < 1000, "too many tensors");
    return kept[kept_count++] = p;
}
static void free_kept(void) {
    while (kept_count) free(kept[--kept_count]);
}
static real* tensor(int64_t n, uint32_t seed) { return keep(random_tensor(n, seed)); }
static double* zeros(int64_t n) { return keep(calloc((size_t)n + 1, 8)); }
static double* copy(const double* x, int64_t n) { return memcpy(zeros(n), x, (size_t)n * 8); }

// Of 16 bits: an even element has bits 7 to 22 of its word, the next one the others, from bit 23 on.
static double coin_of(const uint32_t word[4], uint64_t element) {
    const uint64_t twice = word[element % 8 / 2] * ((1ull << 32) + 1);
    return ((double)(twice >> (element % 2 ? 23 : 7) & 0xffff) + 0.5) * 0x1p-16;
}

static double e2m1(double x, double coin) {
    static const double list[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const double a = fabs(x);
    int k = 0;
    while (k < 6 && list[k + 1] <= a) k++;
    const double p = (a - list[k]) / (list[k + 1] - list[k]);
    const int up = a >= 6 || (coin >= 0 ? coin < p : p > 0.5 || (p == 0.5 && k % 2));
    return copysign(list[k + up], x);
}

// x (n, columns) of group g in blocks of high x wide. wgrad -1: to nearest; 0 or 1: coins of the dy of dgrad, of wgrad.
static void quantize(double* x, int64_t n, int64_t columns, int64_t high, int64_t wide, int nv, int wgrad, int g) {
    float amax = 0;
    for (int64_t i = 0; i < n * columns; i++) amax = fmaxf(amax, fabsf((float)x[i]));
    for (int64_t r0 = 0; r0 < n; r0 += high)
        for (int64_t c0 = 0; c0 < columns; c0 += wide) {
            const int64_t r1 = r0 + high < n ? r0 + high : n;
            float largest = 0, inverse, value;
            for (int64_t r = r0; r < r1; r++)
                for (int64_t c = c0; c < c0 + wide; c++) largest = fmaxf(largest, fabsf((float)x[r * columns + c]));
            const float e = 2688 / amax, t = 1 / e, b = (float)e4m3((double)(largest / 6 * e));
            int exponent;
            const double m = frexp(largest, &exponent);  // 6 = 0.75 2^3
            value = nv ? t : (float)ldexp(1, exponent - 3 + (m > 0.75));
            inverse = nv ? (b > 0 ? 1 / (t * b) : 0) : 1 / value;
            for (int64_t r = r0; r < r1; r++)
                for (int64_t c = c0; c < c0 + wide; c++) {
                    const uint64_t row = (uint64_t)(draws.first + r), column = (uint64_t)c;
                    const uint64_t element = high > 1 ? column << 40 | row : row << 24 | column;
                    uint32_t word[4];
                    philox(word, draws.key, (uint32_t)(STREAM + (wgrad == 1) * WEIGHT_STREAMS + g), element / 8);
                    double* at = x + r * columns + c;
                    const float q =
                        (float)e2m1((double)((float)*at * inverse), wgrad < 0 ? -1 : coin_of(word, element));
                    *at = (double)(nv ? q * b * value : q * value);
                }
        }
}

// H S x, with Sylvester's matrix: entry (i, j) has the sign of the parity of i & j.
static void hadamard(double* x, int64_t n, int64_t columns) {
    for (int64_t r = 0; r + 16 <= n; r += 16)
        for (int64_t c = 0; c < columns; c++) {
            double y[16] = {0};
            for (int i = 0; i < 16; i++)
                for (int j = 0; j < 16; j++) {
                    const int minus = (__builtin_popcount((unsigned)(i & j)) + (0x9d2c >> j & 1)) % 2;
                    y[i] += (minus ? -1 : 1) * (double)(float)x[(r + j) * columns + c] / 4;
                }
            for (int i = 0; i < 16; i++) x[(r + i) * columns + c] = y[i];
        }
}

// out (n, m) = a (n, k) b; b is (k, m), or (m, k) with t.
static double* times(const double* a, const double* b, int64_t n, int64_t k, int64_t m, int t) {
    double* out = zeros(n * m);
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < m; j++)
            for (int64_t l = 0; l < k; l++) out[i * m + j] += a[i * k + l] * b[t ? j * k + l : l * m + j];
    return out;
}

// dW (OC, IC) = Q(H dy)^T Q(H x)
static double* wgrad_of(const double* dy, const double* x, int64_t n, int64_t OC, int64_t IC, int64_t block, int g) {
    double *d = copy(dy, n * OC), *q = copy(x, n * IC), *out = zeros(OC * IC);
    hadamard(d, n, OC), hadamard(q, n, IC);
    quantize(d, n, OC, block, 1, block == 16, 1, g), quantize(q, n, IC, block, 1, block == 16, -1, g);
    for (int64_t r = 0; r < n; r++)
        for (int64_t o = 0; o < OC; o++)
            for (int64_t i = 0; i < IC; i++) out[o * IC + i] += d[r * OC + o] * q[r * IC + i];
    return out;
}

static double* doubles(const real* x, int64_t n) {
    double* out = zeros(n);
    for (int64_t i = 0; i < n; i++) out[i] = (double)x[i];
    return out;
}

static void compare(const char* what, int g, const real* got, const double* want, int64_t n) {
    double off = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) off += pow((double)got[i] - want[i], 2), norm += want[i] * want[i];
    if (getenv("TEST_ERRORS")) printf("    %s of expert %d: %.3g\n", what, g, sqrt(off / (norm + 1e-300)));
    CHECK(sqrt(off) <= ALLOWED * sqrt(norm), "%s of expert %d is off by %g", what, g, sqrt(off / norm));
}

static void check(FormatId id, int64_t block) {
    const Format* f = format_of_id(id, MX_RCEIL);
    const int nv = block == 16;
    Ctx* ctx = ctx_create(1 << 20);
    GemmWorkspace workspace = {.key = draws.key, .before = BEFORE};
    Arena arena;
    arena_init(&arena, "a test", BACKEND);
    linear_plan(&arena, &workspace, R, 1);
    arena_allocate(&arena);
    linear_batch(&workspace, 0, R, ctx);
    real *x = tensor(R * C, 1), *dy = tensor(R * C, 2), *gate = tensor(R, 3);
    real *w13 = tensor(El * 2 * F * C, 4), *w2 = tensor(El * C * F, 5);
    real *h = tensor(R * 2 * F, 6), *y = tensor(R * C, 6), *act = tensor(R * F, 6);
    real *rows_x = tensor(R * C, 6), *da = tensor(R * C, 6), *dx = tensor(R * C, 6);
    real *dh = tensor(R * 2 * F, 6), *gated = tensor(R * F, 6), *dgate = tensor(R, 6);
    real *rounded = tensor(R * 2 * F, 6), *dw13 = tensor(El * 2 * F * C, 6), *dw2 = tensor(El * C * F, 6);
    const Ragged r = {El, R, start, rows, NULL, NULL, gate};
    Weight first = plain_weight(w13, dw13, El, 2 * F, C), second = plain_weight(w2, dw2, El, C, F);
    Weight* both[] = {&first, &second};
    for (int i = 0; i < 2; i++) {
        both[i]->format = both[i]->wgrad = f, both[i]->workspace = &workspace, both[i]->stream = STREAM;
        both[i]->accumulate = 0;
        both[i]->forward.value = tensor(El * 2 * F * C, 6), both[i]->back.value = tensor(El * 2 * F * C, 6);
        weight_quantize(both[i], ctx);
    }

    // The program: rows of x are rounded in place, and wgrad has x again.
    memcpy(rows_x, x, R * C * sizeof(real));
    const Rows a =
        grouped_forward_swiglu(rows_of_values(act, R, F), h, rows_of_values(rows_x, R, C), &first, &second, r, ctx);
    grouped_forward(y, a, &second, r, ctx);
    Rows for_wgrad;
    int32_t parts;
    const ExpertsBackward tensors = {dh, gated, dgate, NULL, h};
    real* dy_rows = memcpy(tensor(R * C, 6), dy, R * C * sizeof(real));
    const Rows back = grouped_dgrad_swiglu(rows_of_values(rounded, R, 2 * F), &for_wgrad, &parts, tensors, da,
                                           rows_of_values(dy_rows, R, C), &second, &first, r, ctx);
    grouped_dgrad(dx, back, &first, r, ctx);
    const Rows none = rows_of_values(NULL, 0, 0);
    grouped_wgrad(&second, rows_of_values(dy_rows, R, C), none, rows_of_values(gated, R, F), none, r, ctx);
    memcpy(rows_x, x, R * C * sizeof(real));
    grouped_wgrad(&first, for_wgrad, none, rows_of_values(rows_x, R, C), none, r, ctx);

    // The chain, expert by expert.
    for (int g = 0; g < El; g++) {
        const int64_t n = rows[g], at = start[g];
        double *w_1 = doubles(w13 + g * 2 * F * C, 2 * F * C), *w_2 = doubles(w2 + g * C * F, C * F);
        quantize(w_1, 2 * F, C, block, block, nv, -1, g), quantize(w_2, C, F, block, block, nv, -1, g);
        double *x_own = doubles(x + at * C, n * C), *xq = copy(x_own, n * C), *dy_own = doubles(dy + at * C, n * C);
        double *dyq = copy(dy_own, n * C), *a_own = zeros(n * F), *gated_own = zeros(n * F);
        quantize(xq, n, C, 1, block, nv, -1, g), quantize(dyq, n, C, 1, block, nv, 0, g);
        double *h_own = times(xq, w_1, n, C, 2 * F, 1), *da_own = times(dyq, w_2, n, C, F, 0);
        double* dh_own = zeros(n * 2 * F);
        for (int64_t i = 0; i < n * F; i++) {
            const double *hr = h_own + i / F * 2 * F + i % F, s = 1 / (1 + exp(-hr[0])), gr = (double)gate[at + i / F];
            a_own[i] = hr[0] * s * hr[F], gated_own[i] = gr * a_own[i];
            dh_own[i / F * 2 * F + i % F] = gr * da_own[i] * hr[F] * s * (1 + hr[0] * (1 - s));
            dh_own[i / F * 2 * F + i % F + F] = gr * da_own[i] * hr[0] * s;
        }
        double *aq = copy(a_own, n * F), *dhq = copy(dh_own, n * 2 * F);
        quantize(aq, n, F, 1, block, nv, -1, g), quantize(dhq, n, 2 * F, 1, block, nv, 0, g);
        double* dgate_own = zeros(n);
        for (int64_t i = 0; i < n * F; i++) dgate_own[i / F] += da_own[i] * a_own[i];
        compare("dgate", g, dgate + at, dgate_own, n);
        compare("h", g, h + at * 2 * F, h_own, n * 2 * F);
        compare("y", g, y + at * C, times(aq, w_2, n, F, C, 1), n * C);
        compare("dx", g, dx + at * C, times(dhq, w_1, n, 2 * F, C, 0), n * C);
        compare("dW2", g, dw2 + g * C * F, wgrad_of(dy_own, gated_own, n, C, F, block, g), C * F);
        compare("dW13", g, dw13 + g * 2 * F * C, wgrad_of(dh_own, x_own, n, 2 * F, C, block, g), 2 * F * C);
    }
    arena_free(&arena);
    free_kept();
    ctx_destroy(ctx);
}

// A linear layer: x and dy stay as they are, and wgrad rounds them again.
static void check_linear(FormatId id, int64_t block) {
    enum { OC = 2 * F, IC = C };
    const int nv = block == 16;
    Ctx* ctx = ctx_create(1 << 20);
    GemmWorkspace workspace = {.key = draws.key, .before = BEFORE};
    Arena arena;
    real *x = tensor(R * IC, 1), *dy = tensor(R * OC, 2), *w = tensor(OC * IC, 4);
    real *y = tensor(R * OC, 6), *dx = tensor(R * IC, 6), *dw = tensor(OC * IC, 6);
    double *x_own = doubles(x, R * IC), *dy_own = doubles(dy, R * OC), *w_own = doubles(w, OC * IC);
    double *xq = copy(x_own, R * IC), *dyq = copy(dy_own, R * OC);
    Weight weight = plain_weight(w, dw, 1, OC, IC);
    weight.format = weight.wgrad = format_of_id(id, MX_RCEIL), weight.workspace = &workspace, weight.stream = STREAM;
    weight.accumulate = 0;
    arena_init(&arena, "a test", BACKEND);
    weight_plan(&arena, &weight, 1);
    linear_plan(&arena, &workspace, R, 1);
    arena_allocate(&arena);
    linear_batch(&workspace, 0, R, ctx);
    weight_quantize(&weight, ctx);
    linear_forward(y, x, &weight, R, ctx);
    linear_backward(dx, dy, x, &weight, R, ctx);

    quantize(w_own, OC, IC, block, block, nv, -1, 0);
    quantize(xq, R, IC, 1, block, nv, -1, 0), quantize(dyq, R, OC, 1, block, nv, 0, 0);
    compare("y of a linear layer", 0, y, times(xq, w_own, R, IC, OC, 1), R * OC);
    compare("dx of a linear layer", 0, dx, times(dyq, w_own, R, OC, IC, 0), R * IC);
    compare("dW of a linear layer", 0, dw, wgrad_of(dy_own, x_own, R, OC, IC, block, 0), OC * IC);
    arena_free(&arena);
    free_kept();
    ctx_destroy(ctx);
}

static void test_nvfp4(void) { check(FORMAT_NVFP4, 16); }
static void test_mxfp4(void) { check(FORMAT_MXFP4, 32); }

static void test_linear(void) {
    check_linear(FORMAT_NVFP4, 16);
    check_linear(FORMAT_MXFP4, 32);
}

int main(void) {
    RUN(test_nvfp4);
    RUN(test_mxfp4);
    RUN(test_linear);
    return test_summary();
}
