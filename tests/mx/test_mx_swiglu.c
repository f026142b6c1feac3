// SwiGLU and its backward, fused with quantization: values and scales against the oracle's quantization
// (tests/mx/mx_bytes.h) of the activation and of its gradients in float64.
#include "mx/mx_swiglu.h"

#include "tests/mx/mx_bytes.h"

typedef struct {
    const real* h;
    Ragged ragged;
    int64_t F;
    MxRecipe recipe;
    uint8_t *q, *scale;
} Swiglu;

static void run_swiglu(void* arg) {
    Swiglu* s = arg;
    Ctx* ctx = ctx_create(0);
    s->q = poisoned_bytes(s->ragged.capacity * s->F), s->scale = poisoned_bytes(s->ragged.capacity * mx_stride(s->F));
    mx_swiglu_quantize((MxBytes){s->q, s->scale}, s->h, s->ragged, s->F, s->recipe.scale, ctx);
    ctx_destroy(ctx);
}

static void test_swiglu(void) {
    enum { ROWS = 50, ROOM = 60 };
    for (int i = 0; i < 4; i++) {
        int64_t F = i % 2 ? 32 : 416, starts[] = {0, 20, ROWS}, differ = 0, far = 0;
        real* h = tensor(ROOM * 2 * F, 60);
        for (int64_t j = 0; j < ROOM * F; j++)  // silu(x) is x from 40 on, and 0 at 0
            if (j / F % 2) h[j / F * 2 * F + j % F] = j % 5 ? (real)(40 + j % 7) : 0;
        Swiglu s = {
            .h = h, .ragged = {.El = 2, .capacity = ROOM, .group_start = starts}, .F = F, .recipe = {i / 2, 128}};
        check_threads(run_swiglu, &s);
        real* a = kept_bytes(ROWS * F * sizeof(real));
        for (int64_t j = 0; j < ROWS * F; j++) {
            real g = h[j / F * 2 * F + j % F], u = h[j / F * 2 * F + F + j % F];
            a[j] = g >= 40 ? g * u : g == 0 ? 0 * u : (real)(g / (1 + exp(-(double)g)) * u);
        }
        uint8_t *q = poisoned_bytes(ROOM * F), *scale = poisoned_bytes(ROOM * mx_stride(F));
        oracle_quantize(q, scale, a, ROWS, F, s.recipe);
        CHECK_BYTES(s.scale, scale, ROOM * mx_stride(F), "swiglu, scales");
        for (int64_t j = 0; j < ROOM * F; j++)
            if (j / F % 2)
                CHECK(s.q[j] == q[j], "byte %lld is %#x, not %#x", (long long)j, s.q[j], q[j]);
            else
                differ += s.q[j] != q[j], far += abs(s.q[j] - q[j]) > 1;
        // float32's exp may move a number across a rounding border: about one in 2^15.
        CHECK(far == 0 && differ <= TOL(5, 0), "%lld of %lld bytes differ", (long long)differ, (long long)ROOM * F);
        release_all();
    }
}

typedef struct {
    const real *h, *dap;
    Ragged ragged;
    int64_t F;
    MxRecipe recipe;
    uint8_t *q, *scale;
    real *dh, *gated_a, *drow_gate;
} SwigluBackward;

static void run_swiglu_backward(void* arg) {
    SwigluBackward* s = arg;
    int64_t F = s->F, room = s->ragged.capacity;
    Ctx* ctx = ctx_create(0);
    s->q = poisoned_bytes(room * 2 * F), s->scale = poisoned_bytes(room * mx_stride(2 * F));
    s->dh = poisoned(room * 2 * F), s->gated_a = poisoned(room * F), s->drow_gate = poisoned(room);
    // dh, which the fused function does not write, and then its results.
    const int64_t length = ragged_rows(room, s->ragged.El, BACKEND_CUDA);
    ExpertsBackward t = {s->dh, s->gated_a, s->drow_gate, s->dap, s->h};
    experts_swiglu_backward(t, s->ragged, F, ctx);
    memset(s->gated_a, 0xff, (size_t)(room * F) * sizeof(real));
    memset(s->drow_gate, 0xff, (size_t)room * sizeof(real));
    t.dh = NULL;
    mx_swiglu_backward_both((MxBytes){s->q, s->scale},
                            (MxBytes){poisoned_bytes(2 * F * length), poisoned_bytes(length / 128 * 2 * F)}, t, length,
                            s->ragged, F, s->recipe.scale, ctx);
    ctx_destroy(ctx);
}

// dh by its formula, quantized dh by the oracle on it, A by the oracle on the float64 activation. The rows behind those
// in use are NaN and stay poisoned.
static void test_swiglu_backward(void) {
    enum { ROWS = 50, ROOM = 53 };
    static const int64_t widths[] = {128, 384};
    int32_t group_rows[] = {20, 0, ROWS - 20};
    for (int i = 0; i < 2 * COUNT(widths); i++) {
        int64_t F = widths[i / 2], starts[] = {0, 20, 20, ROWS}, steps_aside = 0, wrong = 0;
        real *h = tensor(ROOM * 2 * F, 61), *dap = tensor(ROOM * F, 62), *gate = filled(ROOM, NAN);
        for (int64_t r = 0; r < ROWS; r++) gate[r] = ldexp(1, -(int)(r % 5));  // so that gate * a gives a back
        for (int64_t j = ROWS * F; j < ROOM * F; j++) h[2 * j] = h[2 * j + 1] = dap[j] = NAN;
        SwigluBackward s = {.h = h, .dap = dap, .F = F, .recipe = {i % 2, 128}};
        s.ragged = (Ragged){3, ROOM, starts, group_rows, NULL, NULL, gate};
        check_threads(run_swiglu_backward, &s);

        real* a = kept_bytes(ROWS * F * sizeof(real));
        uint8_t *a_q = kept_bytes(ROWS * F), *a_scale = kept_bytes(ROWS * mx_stride(F));
        double *dh = zeros(ROWS * 2 * F), *dgate = zeros(ROWS);
        for (int64_t j = 0; j < ROWS * F; j++) {
            int64_t r = j / F, at = r * 2 * F + j % F;
            double g = h[at], u = h[at + F], sigmoid = 1 / (1 + exp(-g)), d = (double)gate[r] * dap[j];
            a[j] = (real)(g * sigmoid * u);
            dh[at] = d * u * (sigmoid + g * sigmoid * (1 - sigmoid));
            dh[at + F] = d * g * sigmoid;
        }
        oracle_quantize(a_q, a_scale, a, ROWS, F, s.recipe);
        for (int64_t j = 0; j < ROWS * F; j++) {
            int64_t r = j / F, scale = a_scale[r * mx_stride(F) + j % F / 32];
            double want = oracle_value(a_q[j], (int)scale), got = (double)s.gated_a[j] / gate[r];
            double step = fmax(fabs(want) / 8, pow(2, (double)scale - 127 - 9));
            steps_aside += got != want;
            wrong += !(fabs(got - want) <= 1.01 * step);
            dgate[r] += dap[j] * got;
        }
        // float32's exp may move a number across a rounding border: about one in 2^15.
        CHECK(wrong == 0 && steps_aside <= TOL(5, 0), "%d: %lld elements of a differ, %lld by more than a step", i,
              (long long)steps_aside, (long long)wrong);
        // dh: a few operations. The gates' gradients: sums of up to 416 terms, 1e-6 of their norm.
        CHECK_CLOSE(s.dh, dh, ROWS * 2 * F, TOL(1e-6, 1e-14));
        CHECK_CLOSE(s.drow_gate, dgate, ROWS, TOL(5e-6, 1e-13));
        uint8_t *q = poisoned_bytes(ROOM * 2 * F), *scale = poisoned_bytes(ROOM * mx_stride(2 * F));
        oracle_quantize(q, scale, s.dh, ROWS, 2 * F, s.recipe);
        CHECK_BYTES(s.scale, scale, ROOM * mx_stride(2 * F), "swiglu backward %d, scales", i);
        CHECK_BYTES(s.q, q, ROOM * 2 * F, "swiglu backward %d, bytes", i);
        for (int64_t j = ROWS * F; j < ROOM * F; j++)
            CHECK(isnan(s.dh[2 * j]) && isnan(s.dh[2 * j + 1]) && isnan(s.gated_a[j]), "a row not in use was written");
        release_all();
    }
}

typedef struct {
    SwigluBackward s;
    int64_t length;
    uint8_t *q_channels, *scale_channels;
} SwigluBoth;

static void run_swiglu_both(void* arg) {
    SwigluBoth* b = arg;
    SwigluBackward* s = &b->s;
    int64_t F = s->F, room = s->ragged.capacity;
    Ctx* ctx = ctx_create(0);
    s->q = poisoned_bytes(room * 2 * F), s->scale = poisoned_bytes(room * mx_stride(2 * F));
    b->q_channels = poisoned_bytes(2 * F * b->length), b->scale_channels = poisoned_bytes(b->length / 128 * 2 * F);
    s->gated_a = poisoned(room * F), s->drow_gate = poisoned(room);
    mx_swiglu_backward_both((MxBytes){s->q, s->scale}, (MxBytes){b->q_channels, b->scale_channels},
                            (ExpertsBackward){NULL, s->gated_a, s->drow_gate, s->dap, s->h}, b->length, s->ragged, F,
                            s->recipe.scale, ctx);
    ctx_destroy(ctx);
}

// The column-wise results are the oracle's
// quantization of its dh, for each group, chunk of rows and column.
static void test_swiglu_backward_both(void) {
    enum { ROWS = 170, ROOM = 173, EXPERTS = 4 };
    static const int64_t widths[] = {128, 384};
    int32_t group_rows[] = {20, 0, 140, 10};
    for (int i = 0; i < 2 * COUNT(widths); i++) {
        int64_t F = widths[i / 2], starts[] = {0, 20, 20, 160, ROWS}, length = ragged_rows(ROOM, EXPERTS, BACKEND_CUDA);
        real *h = tensor(ROOM * 2 * F, 63), *dap = tensor(ROOM * F, 64), *gate = tensor(ROOM, 65);
        for (int64_t j = ROWS * F; j < ROOM * F; j++) h[2 * j] = h[2 * j + 1] = dap[j] = NAN;
        SwigluBackward s = {.h = h, .dap = dap, .F = F, .recipe = {i % 2 ? MX_FLOOR : MX_RCEIL, 128}};
        s.ragged = (Ragged){EXPERTS, ROOM, starts, group_rows, NULL, NULL, gate};
        SwigluBoth b = {.s = s, .length = length};
        run_swiglu_backward(&s);
        check_threads(run_swiglu_both, &b);
        CHECK_BYTES(b.s.q, s.q, ROOM * 2 * F, "both %d, bytes", i);
        CHECK_BYTES(b.s.scale, s.scale, ROOM * mx_stride(2 * F), "both %d, scales", i);
        CHECK(!memcmp(b.s.gated_a, s.gated_a, (size_t)(ROWS * F) * sizeof(real)), "both %d: gate * a", i);
        CHECK(!memcmp(b.s.drow_gate, s.drow_gate, ROWS * sizeof(real)), "both %d: the gates' gradients", i);

        int64_t to = 0;  // first row of a group in the column-wise output
        for (int e = 0; e < EXPERTS; e++)
            for (int64_t from = starts[e]; from < starts[e + 1]; from += 128, to += 128)
                for (int64_t c = 0; c < 2 * F; c++) {
                    int64_t n = starts[e + 1] - from < 128 ? starts[e + 1] - from : 128, wrong = 0;
                    const real* x = s.dh + from * 2 * F + c;
                    int scale = oracle_scale(oracle_amax(x, 2 * F, n, 1), s.recipe.scale);
                    for (int64_t k = 0; k < 128; k++)
                        wrong += b.q_channels[c * length + to + k] != (k < n ? oracle_byte(x[k * 2 * F], scale) : 0);
                    CHECK(wrong == 0 && b.scale_channels[to / 128 * 2 * F + c] == scale,
                          "both %d, expert %d, channel %d: %d bytes differ, scale %d is not %d", i, e, (int)c,
                          (int)wrong, b.scale_channels[to / 128 * 2 * F + c], scale);
                }
        release_all();
    }
}

int main(void) {
    list_e4m3();
    RUN(test_swiglu);
    RUN(test_swiglu_backward);
    RUN(test_swiglu_backward_both);
    return test_summary();
}
