// The dy that linear_dgrad quantizes for the next linear_wgrads (linear/linear.h). The gradients must have the same
// bits as with a dy that linear_wgrads quantizes itself.
#include <string.h>

#include "layers/swiglu.h"
#include "linear/quantized.h"
#include "tests/mx.h"
#include "tests/test.h"
#include "tests/weight.h"

static Ctx* ctx;

static floatX* random_values(int64_t n, uint32_t stream) {
    real* x = random_tensor(n, stream);
    floatX* values = values_on_device(x, n, ctx);
    free(x);
    return values;
}

enum { FAST = 3 };
typedef struct FastWeights {
    GemmWorkspace workspace;
    Arena arena;
    Weight w[FAST];
    floatX* dx;
} FastWeights;

// Three weights with memory for 300 tokens. They are quantized, because dgrad reads the quantized copies.
static void fast_weights(FastWeights* f) {
    static const int64_t sizes[FAST][2] = {{96, 160}, {160, 96}, {64, 160}};  // IC, OC
    memset(f, 0, sizeof(*f));
    arena_init(&f->arena, "a test", BACKEND);
    for (int i = 0; i < FAST; i++) {
        const int64_t IC = sizes[i][0], OC = sizes[i][1];
        real* dw = (real*)device_alloc((size_t)(OC * IC) * sizeof(real), "dW");
        f->w[i] = plain_weight(random_values(OC * IC, 60 + (uint32_t)i), dw, 1, OC, IC);
        f->w[i].accumulate = 0, f->w[i].workspace = &f->workspace;
        f->w[i].format = f->w[i].wgrad = format_of_id(FORMAT_MXFP8, MX_RCEIL);
        f->workspace.of_dy += OC, f->workspace.of_x += IC;
        weight_plan(&f->arena, &f->w[i], 1);
    }
    linear_plan(&f->arena, &f->workspace, 300, 1);
    arena_allocate(&f->arena);
    for (int i = 0; i < FAST; i++) weight_quantize(&f->w[i], ctx);
    f->dx = (floatX*)device_alloc((size_t)(300 * 160) * sizeof(floatX), "dx");
}

// Writes NaN to the gradients, and runs linear_wgrads on N tokens. Returns the gradients, one behind the other.
static real* gradients_of(FastWeights* f, LinearGradient* products, int64_t N) {
    int64_t at = 0;
    real* got = (real*)host_alloc((size_t)(3 * 160 * 160) * sizeof(real));
    for (int i = 0; i < FAST; i++) fill_with_nan(f->w[i].grad, (size_t)(f->w[i].OC * f->w[i].IC) * sizeof(real), ctx);
    linear_wgrads(products, FAST, N, ctx);
    for (int i = 0; i < FAST; i++) {
        const int64_t n = f->w[i].OC * f->w[i].IC;
        device_download(got + at, f->w[i].grad, (size_t)n * sizeof(real), ctx);
        at += n;
    }
    return got;
}

// Frees got. The sizes are those of fast_weights.
static void check_same_gradients(real* got, const real* want, const char* what) {
    CHECK(!memcmp(got, want, (size_t)((96 + 64) * 160 + 160 * 96) * sizeof(real)), "%s: other gradients", what);
    free(got);
}

// The same bits as with a dy that linear_wgrads quantizes itself, for any order of the dgrad calls and any earlier
// calls.
static void test_dy_of_dgrad(void) {
    if (!has_fast(ctx)) return;
    FastWeights f;
    fast_weights(&f);
    floatX *dy[FAST], *x[FAST], *other[FAST];
    for (int i = 0; i < FAST; i++) {  // the third has the first one's dy
        dy[i] = i == 2 ? dy[0] : random_values(300 * f.w[i].OC, 70);
        other[i] = i == 2 ? other[0] : random_values(300 * f.w[i].OC, 71);
        x[i] = random_values(300 * f.w[i].IC, 80 + (uint32_t)i);
    }
    LinearGradient products[FAST], others[FAST];
    for (int i = 0; i < FAST; i++) {
        const LinearGradient product = {&f.w[i], dy[i], x[i], 0}, of_other = {&f.w[i], other[i], x[i], 0};
        products[i] = product, others[i] = of_other;
    }
    linear_batch(&f.workspace, 0, 300, ctx);
    real *want = gradients_of(&f, products, 300), *want_other = gradients_of(&f, others, 300);

    // dgrad in another order than the list of gradients, and not for all of them.
    linear_dgrad(f.dx, &products[2], 300, 0, ctx), linear_dgrad(f.dx, &products[0], 300, 0, ctx);
    check_same_gradients(gradients_of(&f, products, 300), want, "two of three, in another order");

    // wgrad reads the quantized dy that dgrad left: dy itself has been overwritten. The next wgrads finds nothing left
    // of this dy and reads the new one.
    for (int i = 0; i < FAST; i++) linear_dgrad(f.dx, &products[i], 300, 0, ctx);
    for (int i = 0; i < 2; i++) device_copy(dy[i], other[i], (size_t)(300 * f.w[i].OC) * sizeof(floatX), ctx);
    check_same_gradients(gradients_of(&f, products, 300), want, "left by dgrad");
    check_same_gradients(gradients_of(&f, products, 300), want_other, "another dy at the same place");

    // Other numbers of tokens.
    free(want);
    linear_batch(&f.workspace, 0, 129, ctx);
    want = gradients_of(&f, others, 129);
    for (int i = 0; i < FAST; i++) linear_dgrad(f.dx, &others[i], 129, 0, ctx);
    check_same_gradients(gradients_of(&f, others, 129), want, "129 tokens");
    linear_batch(&f.workspace, 0, 300, ctx);
    check_same_gradients(gradients_of(&f, others, 300), want_other, "300 tokens after 129");

    for (int i = 0; i < FAST; i++) {
        if (i < 2) device_free(dy[i]), device_free(other[i]);
        device_free(x[i]), device_free((void*)f.w[i].w), device_free(f.w[i].grad);
    }
    free(want), free(want_other);
    device_free(f.dx);
    arena_free(&f.arena);
}

// quantized_swiglu_backward against swiglu_backward and linear_dgrad, which it fuses, and the gradient after it. With
// 2F of 160 it does nothing.
static void test_swiglu_backward(void) {
    if (!has_fast(ctx)) return;
    enum { IC = 96, MOST = 300 };
    for (int i = 0; i < 4; i++) {
        const int64_t OC = i % 2 ? 160 : 256, F = OC / 2, N = i < 2 ? MOST : 129;
        GemmWorkspace workspace = {0};
        Arena arena;
        arena_init(&arena, "a test", BACKEND);
        real *dw = (real*)device_alloc((size_t)(OC * IC) * sizeof(real), "dW"), *got[2];
        Weight w = plain_weight(random_values(OC * IC, 90), dw, 1, OC, IC);
        w.accumulate = 0, w.workspace = &workspace, w.format = w.wgrad = format_of_id(FORMAT_MXFP8, MX_RCEIL);
        workspace.of_dy = OC, workspace.of_x = IC;
        weight_plan(&arena, &w, 1);
        linear_plan(&arena, &workspace, MOST, 1);
        arena_allocate(&arena);
        weight_quantize(&w, ctx);
        linear_batch(&workspace, 0, N, ctx);

        // First the separate functions, then the fused one. The gradient is computed after both.
        floatX *h = random_values(N * OC, 91), *da = random_values(N * F, 92), *x = random_values(N * IC, 93);
        floatX* out = (floatX*)device_alloc((size_t)(N * (IC + OC + F)) * sizeof(floatX), "dx, dh, a");
        floatX *dx = out, *a = dx + N * IC, *dh = a + N * F;
        const size_t values = (size_t)(N * (IC + F)) * sizeof(floatX), gradient = (size_t)(OC * IC) * sizeof(real);
        for (int k = 0; k < 2; k++) {
            fill_with_nan(out, (size_t)(N * (IC + OC + F)) * sizeof(floatX), ctx), fill_with_nan(dw, gradient, ctx);
            LinearGradient product = {&w, dh, x, 0};
            const int fused = k == 1 && quantized_swiglu_backward(dx, a, da, h, &product, N, ctx);
            CHECK(fused == (k == 1 && OC == 256), "2F %d, %d tokens: fused %d", (int)OC, (int)N, fused);
            if (!fused) {
                swiglu_backward(dh, a, da, h, N, F, ctx);
                linear_dgrad(dx, &product, N, 0, ctx);
            }
            linear_wgrads(&product, 1, N, ctx);
            got[k] = (real*)host_alloc(values + gradient);
            device_download(got[k], dw, gradient, ctx);
            device_download((char*)got[k] + gradient, out, values, ctx);
        }
        CHECK(!memcmp(got[0], got[1], gradient), "2F %d, %d tokens: another gradient", (int)OC, (int)N);
        CHECK(!memcmp((char*)got[0] + gradient, (char*)got[1] + gradient, values), "2F %d, %d tokens: another dx or a",
              (int)OC, (int)N);
        for (int k = 0; k < 2; k++) free(got[k]);
        device_free(h), device_free(da), device_free(x), device_free(out), device_free(dw), device_free((void*)w.w);
        arena_free(&arena);
    }
}

int main(void) {
    if (device_available()) ctx = ctx_create((size_t)64 << 20);
    RUN(test_dy_of_dgrad);
    RUN(test_swiglu_backward);
    if (ctx) ctx_destroy(ctx);
    return test_summary();
}
