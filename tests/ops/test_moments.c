// Moments of AdamW in bf16 against float64: stored rounded to nearest; the update uses them before rounding.
#include "layers/adamw.h"
#include "tests/mx.h"
#include "tests/oracle.h"

static const AdamW options = {.lr = 0.1f, .beta1 = 0.9f, .beta2 = 0.95f, .weight_decay = 0.5f, .clip = 1};

enum { LONG = 2 * 4096 + 77, GUARD = 3, STEPS = 4 };  // more than one block of the reference

typedef struct {
    StepState* state;
    real *grad[STEPS], *master[STEPS + 1];
    uint16_t *m[STEPS + 1], *v[STEPS + 1];  // before each step and after the last
} Run;

// The value of a bf16, given its bits.
static double bf16_value(uint16_t x) {
    const int e = x >> 7 & 255;
    const double size = ldexp((e != 0) + (x & 127) / 128.0, (e ? e : 1) - 127);
    return e == 255 ? NAN : x >> 15 ? -size : size;
}

// Zeros, or a copy of the moments at `from`, with NaN around them.
static uint16_t* narrow(const uint16_t* from, int64_t n) {
    const size_t bytes = (size_t)(n + 2 * GUARD) * sizeof(uint16_t);
    uint16_t* x = (uint16_t*)memset(kept_bytes(bytes), 0xff, bytes);
    if (from)
        memcpy(x + GUARD, from, (size_t)n * sizeof(uint16_t));
    else
        memset(x + GUARD, 0, (size_t)n * sizeof(uint16_t));
    return x;
}

static void update(StepState* state, real* master, uint16_t* m, uint16_t* v, const real* grad, int64_t n,
                   const AdamW* opt, Ctx* ctx) {
    const AdamWBuffer buffer = {master, master, m, v, grad, n, n / 2, NULL};
    step_begin(state, ctx);
    grad_norm_add(state, grad, NULL, n, ctx);
    step_decide(state, 1, opt, ctx);
    adamw_update(&buffer, 1, 1, opt, state, ctx);
    ctx_sync(ctx);
}

static void run(void* arg) {
    Run* a = (Run*)arg;
    Ctx* ctx = ctx_create(step_workspace(LONG));
    a->state = kept_bytes(sizeof(StepState));
    a->master[0] = tensor(LONG, 1), a->m[0] = narrow(NULL, LONG), a->v[0] = narrow(NULL, LONG);
    for (int s = 0; s < STEPS; s++) {
        a->grad[s] = tensor(LONG, 2 + s), a->master[s + 1] = copied(a->master[s], LONG);
        a->m[s + 1] = narrow(a->m[s] + GUARD, LONG), a->v[s + 1] = narrow(a->v[s] + GUARD, LONG);
        update(a->state, a->master[s + 1], a->m[s + 1] + GUARD, a->v[s + 1] + GUARD, a->grad[s], LONG, &options, ctx);
    }
    ctx_destroy(ctx);
}

// 1: a moment is the bf16 nearest to x. Arithmetic in float32 may be off by e. So if x is within e of the middle of
// two, either one is accepted and counted in *vague.
static int is_nearest(uint16_t got, double x, double e, int* vague) {
    const double low = bf16(x - e), high = bf16(x + e);
    *vague += low != high;
    return low <= bf16_value(got) && bf16_value(got) <= high;
}

// Every step is checked from the bits before it. e: a moment is a sum of two terms, each with at most 7 float32
// roundings of its own size. So 14 * 2^-24 of a number is vague. The steps of bf16 are at least 2^-8, which makes 2e-4
// of all moments vague, and more where the terms cancel.
static void test_stored_is_nearest(void) {
    Run a;
    check_threads(run, &a);
    const double b1 = options.beta1, b2 = options.beta2, lr = options.lr, bound = 7 * ldexp(1, -24);
    for (int s = 0; s < STEPS; s++) {
        double *g = doubles(a.grad[s], LONG), *change = zeros(LONG), norm = sqrt(dot(g, g, LONG));
        real* moved = copied(a.master[s + 1], LONG);
        int wrong = 0, vague = 0;
        for (int64_t i = 0; i < LONG; i++) {
            const double scaled = g[i] / norm, decay = i < LONG / 2 ? options.weight_decay : 0, w = a.master[s][i];
            const double m0 = b1 * bf16_value(a.m[s][GUARD + i]), dm = (1 - b1) * scaled;
            const double v0 = b2 * bf16_value(a.v[s][GUARD + i]), dv = (1 - b2) * scaled * scaled;
            wrong += !is_nearest(a.m[s + 1][GUARD + i], m0 + dm, bound * (fabs(m0) + fabs(dm)), &vague);
            wrong += !is_nearest(a.v[s + 1][GUARD + i], v0 + dv, bound * (v0 + dv), &vague);
            const double mean = (m0 + dm) / (1 - pow(b1, s + 1)), root = sqrt((v0 + dv) / (1 - pow(b2, s + 1)));
            change[i] = -lr * (mean / (root + (double)ADAMW_EPS) + decay * w);
            moved[i] -= a.master[s][i];
        }
        CHECK(wrong == 0 && vague < 2 * LONG / 1000, "step %d: %d moments are wrong, %d vague", s, wrong, vague);
        // The update uses moments before they are rounded; with rounded ones it would be 2^-9 off. A master of 1 is
        // rounded once.
        CHECK_CLOSE(moved, change, LONG, TOL(2e-6, 1e-14));
        for (int i = 0; i < GUARD; i++)
            CHECK(
                (a.m[s + 1][i] & a.v[s + 1][i] & a.m[s + 1][GUARD + LONG + i] & a.v[s + 1][GUARD + LONG + i]) == 0xffff,
                "step %d: something beside the moments is written", s);
    }
    release_all();
}

// Halves are exact: a new moment in the middle of two bf16 numbers becomes the even one. Below the smallest normal
// number steps are 2^-133.
static void test_ties(void) {
    const AdamW opt = {.lr = 0.1f, .beta1 = 0.5f, .beta2 = 0.5f};
    static const struct {
        double m, g, becomes;  // of 2^-7
    } ties[] = {{128, 129, 128},    {129, 130, 130},    {130, 131, 130},   {254, 255, 254},  {255, 256, 256},
                {-128, -129, -128}, {-129, -130, -130}, {128, 128.5, 128}, {128, 129.5, 129}};
    enum { TIES = COUNT(ties) };
    uint16_t *m = narrow(NULL, TIES + 2), *v = narrow(NULL, TIES + 2);
    real *master = filled(TIES + 2, 1), *grad = filled(TIES + 2, 0);
    for (int i = 0; i < TIES; i++) {
        const float before = (float)(ties[i].m / 128);
        uint32_t bits;
        memcpy(&bits, &before, sizeof(bits));
        m[GUARD + i] = (uint16_t)(bits >> 16), grad[i] = (real)(ties[i].g / 128);
    }
    m[GUARD + TIES] = 1, m[GUARD + TIES + 1] = 3;  // 2^-133 and 3 * 2^-133, halved: to 0 and to 2
    Ctx* ctx = ctx_create(step_workspace(TIES + 2));
    StepState* state = kept_bytes(sizeof(StepState));
    update(state, master, m + GUARD, v + GUARD, grad, TIES + 2, &opt, ctx);
    for (int i = 0; i < TIES; i++)
        CHECK(bf16_value(m[GUARD + i]) == ties[i].becomes / 128, "%g and %g become %g, not %g", ties[i].m, ties[i].g,
              128 * bf16_value(m[GUARD + i]), ties[i].becomes);
    CHECK(m[GUARD + TIES] == 0 && m[GUARD + TIES + 1] == 2, "%d and %d", m[GUARD + TIES], m[GUARD + TIES + 1]);
    ctx_destroy(ctx);
    release_all();
}

int main(void) {
    RUN(test_stored_is_nearest);
    RUN(test_ties);
    return test_summary();
}
