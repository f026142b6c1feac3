// The MoE block under every precision switch, against a reference chain in float64. The chain has its own e4m3 and
// block scales (by frexp and ldexp), SwiGLU, router and dense GEMMs. It quantizes where the contract (moe/moe.h)
// requires it. One rank; tests/parallel/test_expert_parallel.c tests other layouts of the same block.
//
// Tolerances. Both sides quantize the same tensors, so only their arithmetic differs. If an element differs by delta
// and is within delta of the middle of two e4m3 numbers, it is rounded the other way: a flip, an error of one step.
//   double  delta is 1e-16 of an element, and steps are 1/11 of it: a flip in 1e15 elements. Only rounding is left,
//           1e-16 sqrt(terms). This is the sharp check: one element with another scale is 1e-8 or more.
//   float   delta is some 4e-7 (sums of 100 terms, exp), a flip in 2e5 elements: one or none in a tensor of these here
//           (1e4 elements), a dozen in all. A flip touches one row of y or dx, one expert of dW2, a row of dW13. The
//           median of the rows' errors stays that of float32, below 2e-6. In the whole tensor a flip of step D is
//           D^2 / (n rms^2). About 500 elements count (of inputs spread over 12 binades few do). So it is beyond 4e-4
//           (34 dB) only if D is 0.45 rms, the element 5 rms. One tensor in two has such an element, which flips with
//           probability 4e-7 / 0.45: 3e-4 in all cases.
//   CUDA    buffers between GEMMs are bf16, and the chain rounds at the same places. GEMMs then differ by up to 1e-5
//           (exact) or 1.3e-4 (fast, short sums) of the norm. So 0.3 or 3 % of the elements of a bf16 buffer are one
//           step off: 2e-4 or 7e-4. A quantization then flips 11 delta of its elements by 1/11 each. That makes
//           sqrt(delta / 11) of delta, 8e-3, and if another quantization follows (combine) 2.5e-2; the median row is
//           below. SQNR: the block and the chain, each against results without any rounding, agree within 0.3 dB.
//           Beyond 40 dB, where each bf16 rounding counts, they agree within 3 dB.
#include <math.h>
#include <omp.h>

#include "moe/moe.h"
#include "tests/mx.h"
#include "tests/transfer.h"
#include "tests/weight.h"

#ifdef F64
#define WHOLE_TOLERANCE 1e-13
#define ROW_TOLERANCE 1e-13
#else
#define WHOLE_TOLERANCE (BACKEND == BACKEND_CUDA ? 2.5e-2 : 2e-2)
#define ROW_TOLERANCE (BACKEND == BACKEND_CUDA ? 2e-2 : 2e-6)
#endif
#define SQNR_TOLERANCE(sqnr) ((sqnr) > 40 ? 3 : 0.3)

enum { E = 5, FAVOURITE = 1, EMPTY = 3, N = 131, K = 2, T = 8 };  // a group of 128 + 3 rows, and an empty one
enum { OUTPUTS = 5 };
static const char* const output_names[OUTPUTS] = {"y", "dx", "dw13", "dw2", "drouter"};

static double* numbers(int64_t n) { return (double*)host_room((size_t)n * sizeof(double)); }

static double* copy_of(const double* x, int64_t n) {
    return (double*)memcpy(numbers(n), x, (size_t)n * sizeof(double));
}

static real* reals(const double* x, int64_t n) {
    real* to = (real*)host_room((size_t)n * sizeof(real));
    for (int64_t i = 0; i < n; i++) to[i] = (real)x[i];
    return to;
}

static floatX* send_numbers(const double* x, int64_t n) { return send(reals(x, n), n); }

// The tensors in MXFP8. fast: the experts' GEMMs run on MXFP8 values.
typedef struct Precision {
    int32_t expert, dispatch, combine, wgrad, fast, scale;
} Precision;

// The quantizations with statistics: STATS_X, _DY, _W of W13, then of W2.
enum { OF_X, OF_DH, OF_W13, OF_ACT, OF_DY, OF_W2, MEASURED };
static const char* const measured_names[MEASURED] = {"x", "dh", "w13", "act", "dy", "w2"};

// --- Inputs ---

typedef struct Widths {
    int64_t C, F, shared_F;
    int32_t score;
    int32_t force_balance;  // else the router chooses: FAVOURITE always, EMPTY never
    int32_t spread;         // binades between the largest and the smallest tiles of 32 x 32 (activations: 1 x 32)
} Widths;

typedef struct Inputs {
    double *x, *dy, *router, *w13, *w2, *shared13, *shared2, *bias;
} Inputs;

// (rows, columns) of bf16 numbers, so that all builds see the same ones.
static double* random_input(int64_t rows, int64_t columns, uint32_t stream, double scale, int64_t tile, int spread) {
    double* x = numbers(rows * columns);
    real* normal = random_tensor(rows * columns, stream);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            double step = floor(random_uniform(1234, stream + 100, r / tile * 64 + c / 32) * 4);  // 0..3
            x[r * columns + c] = ldexp(bf16(scale * (double)normal[r * columns + c]), -(int)(step * spread / 3));
        }
    free(normal);
    return x;
}

static Inputs make_inputs(Widths d) {
    double narrow = 1 / sqrt((double)d.C), hidden = 1 / sqrt((double)d.F);
    if (BACKEND == BACKEND_CUDA) d.spread = 0;  // few elements would decide the SQNR
    Inputs in;
    in.x = random_input(N, d.C, 1, 1, 1, d.spread);
    in.dy = random_input(N, d.C, 2, 1, 1, d.spread);
    in.router = random_input(E, d.C, 3, narrow, 1, 0);
    in.w13 = random_input(E * 2 * d.F, d.C, 4, narrow, 32, d.spread);
    in.w2 = random_input(E * d.C, d.F, 5, hidden, 32, d.spread);
    in.shared13 = random_input(2 * d.shared_F, d.C, 6, narrow, 1, 0);
    in.shared2 = random_input(d.C, d.shared_F, 7, hidden, 1, 0);
    in.bias = numbers(E);
    for (int e = 0; e < E; e++) in.bias[e] = e == FAVOURITE ? 10 : e == EMPTY ? -10 : 0;
    return in;
}

// --- The chain ---

// out (M, P) += op(a) op(b). Element (m, j) of op(a) is a[m am + j aj]. Row j of op(b), P long, begins at b + j P.
static void product(double* out, const double* a, int64_t am, int64_t aj, const double* b, int64_t M, int64_t J,
                    int64_t P) {
    for (int64_t m = 0; m < M; m++)
        for (int64_t j = 0; j < J; j++) {
            const double s = a[m * am + j * aj], *row = b + j * P;
            for (int64_t p = 0; p < P; p++) out[m * P + p] += s * row[p];
        }
}

static double* transposed(const double* x, int64_t rows, int64_t columns) {
    double* t = numbers(rows * columns);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) t[c * rows + r] = x[r * columns + c];
    return t;
}

static double* times_transposed(const double* x, const double* w, int64_t M, int64_t IC, int64_t OC) {  // x w^T
    double* y = numbers(M * OC);
    product(y, x, IC, 1, transposed(w, OC, IC), M, IC, OC);
    return y;
}

static double* times(const double* dy, const double* w, int64_t M, int64_t OC, int64_t IC) {  // dy w
    double* dx = numbers(M * IC);
    product(dx, dy, OC, 1, w, M, OC, IC);
    return dx;
}

static double silu(double g) { return g / (1 + exp(-g)); }

static double silu_slope(double g) {
    double s = 1 / (1 + exp(-g));
    return s + g * s * (1 - s);
}

static double* swiglu(const double* h, int64_t M, int64_t F) {
    double* a = numbers(M * F);
    for (int64_t m = 0; m < M; m++)
        for (int64_t i = 0; i < F; i++) a[m * F + i] = silu(h[m * 2 * F + i]) * h[m * 2 * F + F + i];
    return a;
}

// dh of gate * <da, swiglu(h)>
static double* swiglu_slope(const double* h, const double* da, const double* gate, int64_t M, int64_t F) {
    double* dh = numbers(M * 2 * F);
    for (int64_t m = 0; m < M; m++)
        for (int64_t i = 0; i < F; i++) {
            double g = h[m * 2 * F + i], u = h[m * 2 * F + F + i], d = (gate ? gate[m] : 1) * da[m * F + i];
            dh[m * 2 * F + i] = d * u * silu_slope(g);
            dh[m * 2 * F + F + i] = d * silu(g);
        }
    return dh;
}

typedef struct Chain {
    double* out[OUTPUTS];
    double *score, *gate, *dgate;  // (N, E), (N, K), (N, K)
    int narrow;                    // 1: buffers are rounded as floatX is
} Chain;

static double* narrow(const Chain* c, double* x, int64_t n) {
    for (int64_t i = 0; i < n && c->narrow && BACKEND == BACKEND_CUDA; i++) x[i] = bf16(x[i]);
    return x;
}

static const float route_scale = 1.5f;

static void router(Chain* c, const Inputs* in, const int32_t* expert, Widths d) {
    c->score = times_transposed(in->x, in->router, N, d.C, E);
    c->gate = numbers(N * K);
    c->dgate = numbers(N * K);
    for (int n = 0; n < N; n++) {
        double *s = c->score + n * E, sum = 0;
        for (int e = 0; e < E; e++) sum += exp(s[e]);
        for (int e = 0; e < E; e++) s[e] = d.score == SCORE_SOFTMAX ? exp(s[e]) / sum : 1 / (1 + exp(-s[e]));
        double chosen = 0;
        for (int k = 0; k < K; k++) chosen += s[expert[n * K + k]];
        for (int k = 0; k < K; k++)
            c->gate[n * K + k] = s[expert[n * K + k]] / (d.score == SCORE_SOFTMAX ? 1 : chosen) * route_scale;
    }
}

// dx and drouter += the gates' part.
static void router_slope(Chain* c, const Inputs* in, const int32_t* expert, Widths d) {
    double* dlogit = numbers(N * E);
    for (int n = 0; n < N; n++) {
        double *dl = dlogit + n * E, chosen = 0, mean = 0;
        const double* s = c->score + n * E;
        for (int k = 0; k < K; k++) chosen += s[expert[n * K + k]];
        for (int k = 0; k < K; k++) {  // gate_k = scale s_k / chosen, or scale s_k
            double slope = c->dgate[n * K + k] * route_scale;
            if (d.score == SCORE_SOFTMAX) {
                dl[expert[n * K + k]] += slope;
                continue;
            }
            dl[expert[n * K + k]] += slope / chosen;
            for (int j = 0; j < K; j++) dl[expert[n * K + j]] -= slope * s[expert[n * K + k]] / (chosen * chosen);
        }
        for (int e = 0; e < E; e++) mean += dl[e] * s[e];
        for (int e = 0; e < E; e++)
            dl[e] = d.score == SCORE_SOFTMAX ? s[e] * (dl[e] - mean) : dl[e] * s[e] * (1 - s[e]);
    }
    product(c->out[1], dlogit, E, 1, in->router, N, E, d.C);
    product(c->out[4], dlogit, 1, E, in->x, E, N, d.C);
}

static void shared_mlp(Chain* c, const Inputs* in, Widths d) {
    int64_t C = d.C, F = d.shared_F;
    if (!F) return;
    double* h = narrow(c, times_transposed(in->x, in->shared13, N, C, 2 * F), N * 2 * F);
    double* y = times_transposed(narrow(c, swiglu(h, N, F), N * F), in->shared2, N, F, C);
    double* da = narrow(c, times(in->dy, in->shared2, N, C, F), N * F);
    double* dx = times(narrow(c, swiglu_slope(h, da, NULL, N, F), N * 2 * F), in->shared13, N, 2 * F, C);
    narrow(c, y, N * C), narrow(c, dx, N * C);
    for (int64_t i = 0; i < N * C; i++) c->out[0][i] += y[i], c->out[1][i] += dx[i];
}

// Runs an expert on its tokens, in their order. Adds to y and dx, and writes its dW13, dW2 and dgates. x and dy are as
// dispatched.
static void run_expert(Chain* c, int e, const double* x, const double* dy, const Inputs* in, const int32_t* expert,
                       Widths d, Precision p) {
    const int64_t C = d.C, F = d.F, along = p.fast ? 128 : 32;
    const MxScale mode = (MxScale)p.scale;
    const int before = host_count;
    double *w13 = copy_of(in->w13 + e * 2 * F * C, 2 * F * C), *w13_back = copy_of(w13, 2 * F * C);
    double *w2 = copy_of(in->w2 + e * C * F, C * F), *w2_back = copy_of(w2, C * F);
    if (p.expert) {
        fake_quantize(w13, 2 * F, C, p.fast ? 128 : 1, along, mode);
        fake_quantize(w2, C, F, p.fast ? 128 : 1, along, mode);
        fake_quantize(w13_back, 2 * F, C, along, p.fast ? 128 : 1, mode);
        fake_quantize(w2_back, C, F, along, p.fast ? 128 : 1, mode);
    }
    // The rows of this expert.
    int choice[N * K], M = 0;
    for (int i = 0; i < N * K; i++)
        if (expert[i] == e) choice[M++] = i;
    double *xr = numbers(M * C), *dr = numbers(M * C), *gate = numbers(M);
    for (int m = 0; m < M; m++) {
        memcpy(xr + m * C, x + choice[m] / K * C, (size_t)C * sizeof(double));
        memcpy(dr + m * C, dy + choice[m] / K * C, (size_t)C * sizeof(double));
        gate[m] = c->gate[choice[m]];
    }

    // Forward, then backward.
    double* h = narrow(c, times_transposed(xr, w13, M, C, 2 * F), M * 2 * F);
    double* a = narrow(c, swiglu(h, M, F), M * F);
    if (p.expert) fake_quantize(a, M, F, 1, along, mode);
    double* y = narrow(c, times_transposed(a, w2, M, F, C), M * C);
    double* da = narrow(c, times(dr, w2_back, M, C, F), M * F);
    double *dh = narrow(c, swiglu_slope(h, da, gate, M, F), M * 2 * F), *dh_quantized = copy_of(dh, M * 2 * F);
    if (p.expert) fake_quantize(dh_quantized, M, 2 * F, 1, along, mode);
    double* dx = narrow(c, times(dh_quantized, w13_back, M, 2 * F, C), M * C);

    for (int m = 0; m < M; m++) {
        int64_t n = choice[m] / K;
        for (int64_t j = 0; j < C; j++) {
            c->out[0][n * C + j] += gate[m] * y[m * C + j];
            c->out[1][n * C + j] += dx[m * C + j];
        }
        for (int64_t j = 0; j < F; j++) {
            c->dgate[choice[m]] += da[m * F + j] * a[m * F + j];
            a[m * F + j] *= gate[m];
        }
    }
    narrow(c, a, M * F);
    if (p.wgrad) {
        const int64_t along_x = p.fast ? 512 : 32;
        fake_quantize(dr, M, C, along, 1, mode);
        fake_quantize(a, M, F, along_x, 1, mode);
        fake_quantize(dh, M, 2 * F, along, 1, mode);
        fake_quantize(xr, M, C, along_x, 1, mode);
    }
    product(c->out[2] + e * 2 * F * C, dh, 1, 2 * F, xr, 2 * F, M, C);
    product(c->out[3] + e * C * F, dr, 1, C, a, C, M, F);
    forget(before, device_count);
}

static Chain run_chain(const Inputs* in, const int32_t* expert, Widths d, Precision p, int rounded) {
    const int64_t C = d.C, F = d.F;
    const MxScale mode = (MxScale)p.scale;
    Chain c = {{numbers(N * C), numbers(N * C), numbers(E * 2 * F * C), numbers(E * C * F), numbers(E * C)},
               NULL,
               NULL,
               NULL,
               rounded};
    router(&c, in, expert, d);
    p.fast = p.fast && p.expert;  // chooses the experts' GEMMs, so it needs p.expert
    double *x = copy_of(in->x, N * C), *dy = copy_of(in->dy, N * C);
    if (p.dispatch || p.expert) {
        fake_quantize(x, N, C, 1, p.fast ? 128 : 32, mode);
        fake_quantize(dy, N, C, 1, p.fast ? 128 : 32, mode);
    }
    for (int e = 0; e < E; e++) run_expert(&c, e, x, dy, in, expert, d, p);
    if (p.combine) {
        fake_quantize(narrow(&c, c.out[0], N * C), N, C, 1, 32, mode);
        fake_quantize(narrow(&c, c.out[1], N * C), N, C, 1, 32, mode);
    }
    shared_mlp(&c, in, d);
    narrow(&c, c.out[0], N * C), narrow(&c, c.out[1], N * C);
    router_slope(&c, in, expert, d);
    narrow(&c, c.out[1], N * C);
    return c;
}

// --- The block ---

typedef struct Block {
    real* out[OUTPUTS];
    int32_t* expert;  // (N, K)
    QuantizationStats stats[MEASURED];
} Block;

static const Format* format_of(int quantized, Precision p) {
    return quantized ? format_of_id(p.expert && p.fast ? FORMAT_MXFP8 : FORMAT_MXFP8_EXACT, (MxScale)p.scale) : NULL;
}

static MoeShape shape_of(Widths d, Precision p, int recompute) {
    int32_t norm = d.score == SCORE_SIGMOID;
    RouterShape r = {N, T, d.C, E, K, 1, 1, d.score, norm, route_scale, d.force_balance};
    MoeShape s = {r, d.F, d.shared_F, 1, recompute, {{NULL}, {NULL}, NULL, NULL, 0, 0}, 1, 0};
    s.formats.gemm[EXPERT] = format_of(p.expert, p);
    s.formats.wgrad[EXPERT] = format_of(p.wgrad, p);
    s.formats.dispatch = format_of(p.dispatch, p);
    s.formats.combine = p.combine ? format_of_id(FORMAT_MXFP8_EXACT, (MxScale)p.scale) : NULL;
    return s;
}

static void sizes_of(int64_t* n, Widths d) {
    n[0] = n[1] = N * d.C;
    n[2] = E * 2 * d.F * d.C;
    n[3] = E * d.C * d.F;
    n[4] = E * d.C;
}

static Block run_block(const Inputs* in, Widths d, Precision p, int recompute, int measured) {
    const int64_t C = d.C, sF = d.shared_F;
    MoeShape s = shape_of(d, p, recompute);
    int64_t n[OUTPUTS];
    sizes_of(n, d);
    floatX *x = send_numbers(in->x, N * C), *dy = send_numbers(in->dy, N * C),
           *y = (floatX*)poison((size_t)n[0] * sizeof(floatX));
    floatX* dx = (floatX*)poison((size_t)n[1] * sizeof(floatX));
    real* dw[OUTPUTS];
    for (int i = 2; i < OUTPUTS; i++) dw[i] = (real*)device_room((size_t)n[i] * sizeof(real));
    Weight w13 = plain_weight(send_numbers(in->w13, n[2]), dw[2], E, 2 * d.F, C);
    Weight w2 = plain_weight(send_numbers(in->w2, n[3]), dw[3], E, C, d.F);
    Weight shared13 = plain_weight(send_numbers(in->shared13, 2 * sF * C),
                                   (real*)device_room((size_t)(2 * sF * C) * sizeof(real)), 1, 2 * sF, C);
    Weight shared2 =
        plain_weight(send_numbers(in->shared2, C * sF), (real*)device_room((size_t)(C * sF) * sizeof(real)), 1, C, sF);
    MoeWeights w = {
        send_numbers(in->router, E * C), dw[4], send_real(reals(in->bias, E), E), &w13, &w2, &shared13, &shared2};

    Arena plan, weights;
    arena_init(&plan, "a test", BACKEND);
    moe_plan(&plan, s, 1);
    size_t room = arena_bytes(&plan);
    arena_free(&plan);
    // Statistics leave NaN out. With this fill, elements that they must not count are about 0.75 instead.
    Pool* pool =
        pool_create("pool of a test", measured ? filled_with(0x3f, room) : poison(room), room, (size_t)1 << 30);
    Dispatch* dispatch = dispatch_create(NULL, pool, NULL, ctx);
    // The experts' weights, quantized.
    GemmWorkspace gemms;
    memset(&gemms, 0, sizeof(gemms));
    arena_init(&weights, "a test", BACKEND);
    Weight* experts[2] = {&w13, &w2};
    for (int i = 0; i < 2; i++) {
        experts[i]->format = s.formats.gemm[EXPERT];
        experts[i]->wgrad = s.formats.wgrad[EXPERT];
        experts[i]->workspace = &gemms;
        weight_plan(&weights, experts[i], 0);
    }
    linear_plan(&weights, &gemms, N, 1);
    arena_allocate(&weights);
    for (int i = 0; i < 2; i++) weight_quantize(experts[i], ctx);
    // Forward and backward.
    MoeSaved saved;
    Block b;
    QuantizationStats* stats = (QuantizationStats*)device_room(sizeof(b.stats));
    if (measured) gemms.stats = stats, w2.stream = 2 * WEIGHT_STREAMS;
    const BalanceCounts no_counts = {NULL, NULL};
    moe_forward(y, x, w, &saved, no_counts, s, dispatch, pool, ctx);
    b.expert = (int32_t*)host_room(N * K * sizeof(int32_t));
    device_download(b.expert, saved.route.expert, N * K * sizeof(int32_t), ctx);
    moe_backward(dx, dy, x, w, &saved, 0, s, dispatch, pool, ctx);
    device_download(b.stats, stats, sizeof(b.stats), ctx);
    b.out[0] = fetch_floatX(y, n[0]);
    b.out[1] = fetch_floatX(dx, n[1]);
    for (int i = 2; i < OUTPUTS; i++) b.out[i] = (real*)fetch(dw[i], (size_t)n[i] * sizeof(real));
    dispatch_destroy(dispatch);
    pool_destroy(pool);
    arena_free(&weights);
    return b;
}

// --- Comparison ---

static int ascending(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// ||out - ref||^2 / ||ref||^2
static double power(const real* out, const double* wide, const double* ref, int64_t n) {
    double diff = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        double o = out ? (double)out[i] : wide[i];
        diff += (o - ref[i]) * (o - ref[i]);
        norm += ref[i] * ref[i];
    }
    return norm > 0 ? diff / norm : diff;
}

static double decibels(double power) { return power > 0 ? -10 * log10(power) : 400; }

// Median of the errors of rows with an expected result. Rows without one (empty experts) must be 0, or the test fails.
static double median_error(const real* out, const double* ref, int64_t rows, int64_t columns, const char* name) {
    double* error = numbers(rows);
    int64_t count = 0, not_zero = 0;
    for (int64_t r = 0; r < rows; r++) {
        int any = 0, differs = 0;
        for (int64_t c = r * columns; c < (r + 1) * columns; c++) any |= ref[c] != 0, differs |= !(out[c] == 0);
        if (any) {
            error[count] = sqrt(power(out + r * columns, NULL, ref + r * columns, columns));
            if (isnan(error[count])) error[count] = INFINITY;
            count++;
        } else {
            not_zero += differs;
        }
    }
    CHECK(not_zero == 0, "%s: %lld rows without tokens are not 0", name, (long long)not_zero);
    qsort(error, (size_t)count, sizeof(double), ascending);
    return count ? error[count / 2] : 0;
}

static void compare(const Block* b, const Chain* chain, const Chain* plain, Widths d, Precision p) {
    int64_t n[OUTPUTS], columns[OUTPUTS] = {d.C, d.C, d.C, d.F, d.C};
    sizes_of(n, d);
    for (int i = 0; i < OUTPUTS; i++) {
        char name[160];
        snprintf(name, sizeof(name), "C %d F %d %s %s expert %d dispatch %d combine %d wgrad %d: %s", (int)d.C,
                 (int)d.F, p.fast ? "fast" : "exact", p.scale == MX_RCEIL ? "rceil" : "floor", p.expert, p.dispatch,
                 p.combine, p.wgrad, output_names[i]);
        double ours = decibels(power(b->out[i], NULL, plain->out[i], n[i]));
        double theirs = decibels(power(NULL, chain->out[i], plain->out[i], n[i]));
        double whole = sqrt(power(b->out[i], NULL, chain->out[i], n[i]));
        double row = median_error(b->out[i], chain->out[i], n[i] / columns[i], columns[i], name);
        if (getenv("TEST_ERRORS"))
            printf("    %s: %.1e, rows %.1e; %.2f dB, chain %.2f dB\n", name, whole, row, ours, theirs);
        CHECK(whole <= WHOLE_TOLERANCE, "%s: off by %.3g", name, whole);
        CHECK(row <= ROW_TOLERANCE, "%s: rows are off by %.3g", name, row);
        if (BACKEND == BACKEND_CUDA)
            CHECK(fabs(ours - theirs) <= SQNR_TOLERANCE(theirs), "%s: %.2f dB, the chain %.2f dB", name, ours, theirs);
    }
}

// --- Tests ---

static const Widths widths[] = {
    // C  F shared score     balanced spread
    {160, 32, 32, SCORE_SIGMOID, 0, 12},
    {96, 160, 0, SCORE_SIGMOID, 0, 12},
    {96, 32, 32, SCORE_SOFTMAX, 1, 0},
    {160, 160, 0, SCORE_SOFTMAX, 0, 0},
    // whole chunks of F: dh is quantized row-wise and column-wise in one kernel
    {96, 128, 0, SCORE_SIGMOID, 0, 12},
};

static const Precision plainly = {0, 0, 0, 0, 0, 0};

static Precision precision_of(int bits) {
    Precision p = {bits & 1, bits >> 1 & 1, bits >> 2 & 1, bits >> 3 & 1, bits >> 4 & 1, bits >> 5 & 1};
    return p;
}

static void check_all(Widths d, int first, int step) {
    Inputs in = make_inputs(d);
    int64_t n[OUTPUTS];
    sizes_of(n, d);
    Chain plain = {{NULL}, NULL, NULL, NULL, 0};
    for (int bits = first; bits < 64; bits += step) {
        Precision p = precision_of(bits);
        if (p.fast && p.expert && !has_fast(ctx)) continue;
        int host = host_count, device = device_count;
        Block b = run_block(&in, d, p, 0, 0), again = run_block(&in, d, p, 1, 0);
        for (int i = 0; i < OUTPUTS; i++)
            CHECK(!memcmp(b.out[i], again.out[i], (size_t)n[i] * sizeof(real)), "C %d F %d, switches %d: %s recomputed",
                  (int)d.C, (int)d.F, bits, output_names[i]);
        int rows[E] = {0};
        for (int i = 0; i < N * K; i++) rows[b.expert[i]]++;
        if (!d.force_balance) ASSERT(rows[FAVOURITE] == N && rows[EMPTY] == 0);
        if (!plain.score) {
            plain = run_chain(&in, b.expert, d, plainly, 0);
            host = host_count;  // plain stays
        }
        Chain chain = run_chain(&in, b.expert, d, p, 1);
        compare(&b, &chain, &plain, d, p);
        forget(host, device);
    }
    forget(0, 0);
}

static void test_switches(void) {
    check_all(widths[0], 0, 1);
    check_all(widths[1], 0, 1);
}

static void test_widths(void) {
    check_all(widths[2], 1, 5);
    check_all(widths[3], 1, 5);
    check_all(widths[4], 1, 2);
}

// The noise that quantization in the experts adds to normal numbers. Quantization adds q = 6.9e-4 of the power (blocks
// of 32 of a normal: 31.6 dB), and a GEMM has that of both operands. Over a standard normal S = E silu^2 = 0.356, S' =
// E silu'^2 = 0.380 and S'' = 0.144. To first order, in units of q:
//   h 2;  a = silu(g) u: 2 (1 + S' / S) = 4.13;  y: a, and a and W2 quantized = 6.13: 23.7 dB
//   da' 2;  dg = da' u silu'(g), du = da' silu(g), together S' + S: 2 + 2 (S' + S' + S'') / (S + S') = 4.46
//   dx: and dh and W13 quantized = 6.46: 23.5 dB;  dW13: dh and x = 5.46: 24.2 dB;  dW2: dy and a, quantized = 6.13
static void test_noise(void) {
    static const double expected[] = {23.7, 23.5, 24.2, 23.7};
    for (int fast = 0; fast < 1 + has_fast(ctx); fast++) {
        Precision p = {1, 1, 0, 0, fast, MX_RCEIL};
        Inputs in = make_inputs(widths[3]);
        Block b = run_block(&in, widths[3], p, 0, 0);
        Chain plain = run_chain(&in, b.expert, widths[3], plainly, 0);
        int64_t n[OUTPUTS];
        sizes_of(n, widths[3]);
        for (int i = 0; i < 4; i++) {
            double sqnr = decibels(power(b.out[i], NULL, plain.out[i], n[i]));
            CHECK(fabs(sqnr - expected[i]) <= 0.5, "%s has %.2f dB, expected %.1f dB", output_names[i], sqnr,
                  expected[i]);
        }
        forget(0, 0);
    }
}

// Statistics of the quantization of `count` matrices in tiles, element by element. `alone` has a scale for each block
// of 32.
static QuantizationStats oracle_stats(const double* x, int64_t count, int64_t rows, int64_t columns, int64_t tile_rows,
                                      int64_t along, MxScale mode) {
    QuantizationStats s = {0, 0, 0, 0, 0, 0};
    double* alone = copy_of(x, count * rows * columns);
    fake_quantize(alone, count * rows, columns, 1, 32, mode);
    for (int64_t m = 0; m < count; m++)
        for (int64_t r0 = 0; r0 < rows; r0 += tile_rows)
            for (int64_t c0 = 0; c0 < columns; c0 += along) {
                int64_t r1 = m * rows + (r0 + tile_rows < rows ? r0 + tile_rows : rows);
                int64_t c1 = c0 + along < columns ? c0 + along : columns;
                double amax = 0;
                for (int64_t r = m * rows + r0; r < r1; r++)
                    for (int64_t c = c0; c < c1; c++) amax = fmax(amax, fabs(x[r * columns + c]));
                double scale = ldexp(1, scale_exponent(amax, mode));
                for (int64_t r = m * rows + r0; r < r1; r++)
                    for (int64_t c = c0; c < c1; c++) {
                        double f = x[r * columns + c], v = e4m3(f / scale) * scale;
                        s.elements += f != 0, s.saturated += fabs(f) > 448 * scale, s.flushed += f != 0 && v == 0;
                        s.inexact += v != alone[r * columns + c];
                        s.signal += f * f, s.noise += (f - v) * (f - v);
                    }
            }
    return s;
}

// Statistics change no bit of a result and are the same with recompute. Inputs and weights are bf16 numbers, so their
// statistics equal the oracle's. For the activation and dh every element of every token's row counts once, and none of
// pads or unused rows. (With bf16 buffers sums of short GEMMs are 0 now and then.) Quantization of about normal numbers
// makes some 31.5 dB in these (FLOOR, which saturates, a little less).
static void test_stats(void) {
    const Widths d = widths[1];
    Inputs in = make_inputs(d);
    for (int bits = 0; bits < 6; bits++) {
        Precision p = {bits < 4, 1, 0, 0, bits & 1, bits >> 1 & 1};
        if (p.fast && p.expert && !has_fast(ctx)) continue;
        Block b = run_block(&in, d, p, 0, 1), again = run_block(&in, d, p, 1, 1), without = run_block(&in, d, p, 0, 0);
        int64_t n[OUTPUTS], along = p.fast && p.expert ? 128 : 32, tile = along == 128 ? 128 : 1;
        const MxScale mode = (MxScale)p.scale;
        sizes_of(n, d);
        for (int i = 0; i < OUTPUTS; i++)
            CHECK(!memcmp(b.out[i], without.out[i], (size_t)n[i] * sizeof(real)), "%d: statistics change %s", bits,
                  output_names[i]);
        CHECK(!memcmp(b.stats, again.stats, sizeof(b.stats)), "%d: other statistics with recompute", bits);
        // The expected statistics.
        QuantizationStats want[MEASURED];
        memset(want, 0, sizeof(want));
        want[OF_X] = oracle_stats(in.x, 1, N, d.C, 1, along, mode);
        want[OF_DY] = oracle_stats(in.dy, 1, N, d.C, 1, along, mode);
        want[OF_W13] = oracle_stats(in.w13, E, 2 * d.F, d.C, tile, along, mode);
        want[OF_W2] = oracle_stats(in.w2, E, d.C, d.F, tile, along, mode);
        want[OF_ACT].elements = (double)(N * K * d.F);
        want[OF_DH].elements = (double)(2 * N * K * d.F);
        for (int i = 0; i < MEASURED; i++) {
            const QuantizationStats *got = &b.stats[i], *w = &want[i];
            const char* name = measured_names[i];
            int of_tokens = i == OF_X || i == OF_DY;
            if (!p.expert && !of_tokens) {
                CHECK(got->elements == 0, "%d: %s was measured, but not cast", bits, name);
                continue;
            }
            int made = i == OF_ACT || i == OF_DH;
            double zeros = made && BACKEND == BACKEND_CUDA ? 1e-3 * w->elements : 0;
            CHECK(w->elements - zeros <= got->elements && got->elements <= w->elements, "%d: %g of %s, not %g", bits,
                  got->elements, name, w->elements);
            double snr = 10 * log10(got->signal / got->noise);
            CHECK(28 < snr && snr < 33, "%d: %s has %.2f dB", bits, name, snr);
            if (made) continue;
            CHECK(got->saturated == w->saturated && got->flushed == w->flushed && got->inexact == w->inexact,
                  "%d: of %s %g %g %g, not %g %g %g", bits, name, got->saturated, got->flushed, got->inexact,
                  w->saturated, w->flushed, w->inexact);
            if (of_tokens)
                CHECK((mode == MX_FLOOR) == (got->saturated > 0), "%d: %g of %s saturated", bits, got->saturated, name);
            CHECK(fabs(got->signal / w->signal - 1) < 1e-10 && fabs(got->noise / w->noise - 1) < 1e-10,
                  "%d: %s %.17g %.17g, not %.17g %.17g", bits, name, got->signal, got->noise, w->signal, w->noise);
        }
        forget(0, 0);
        in = make_inputs(d);
    }
    forget(0, 0);
}

int main(void) {
    omp_set_num_threads(1);  // tensors too small for more
    if (device_available()) {
        size_t workspace = 0;
        for (int i = 0; i < 4; i++) {
            size_t one = moe_workspace(shape_of(widths[i], plainly, 0));
            workspace = one > workspace ? one : workspace;
        }
        ctx = ctx_create(workspace);
    }
    RUN(test_switches);
    RUN(test_widths);
    RUN(test_noise);
    RUN(test_stats);
    if (ctx) ctx_destroy(ctx);
    return test_summary();
}
