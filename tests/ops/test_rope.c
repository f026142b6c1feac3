// RoPE: the table of frequencies with YaRN, and the rotation, in float64.
#include "layers/rope.h"
#include "tests/oracle.h"

// f_i, written with powers from the header.
static double oracle_frequency(int i, const RopeConfig* c) {
    double f = pow(c->theta, -2.0 * i / c->dim);
    if (!c->yarn) return f;
    double per = c->dim / (2 * log(c->theta)), low = floor(per * log(c->original_len / (2 * M_PI * 32)));
    double high = ceil(per * log(c->original_len / (2 * M_PI * 1)));
    low = fmax(low, 0), high = fmin(high, c->dim - 1);
    double ramp = fmin(fmax(high == low ? 1000 * (i - low) : (i - low) / (high - low), 0), 1);
    return (1 - ramp) * f + ramp * f / c->factor;
}

static void test_rope_table(void) {
    RopeConfig configs[] = {{64, 10000, 0, 40, 0.707, 4096}, {64, 10000, 1, 40, 0.707, 4096},
                            {6, 10000, 0, 1, 1, 4096},       {16, 10000, 1, 40, 1, 4096},
                            {2, 500000, 0, 1, 1, 4096},      {32, 500000, 1, 8, 1, 8192},
                            {6, 100, 1, 40, 1, 600000},  // high == low == 5
                            {8, 2, 1, 40, 1, 4096},      // high < low, and low is beyond all pairs
                            {16, 10000, 1, 40, 1, 1}};   // high < low = 0
    enum { T = 300 };
    for (int s = 0; s < COUNT(configs); s++) {
        RopeConfig* c = &configs[s];
        real* table = poisoned(T * c->dim);
        double* ref = zeros(T * c->dim);
        rope_table(table, T, c);
        for (int t = 0; t < T; t++)
            for (int i = 0; i < c->dim / 2; i++) {
                ref[t * c->dim + 2 * i] = cos(t * oracle_frequency(i, c));
                ref[t * c->dim + 2 * i + 1] = sin(t * oracle_frequency(i, c));
            }
        // Computed in double, rounded once to real. In double: an angle of 300 with a few u = 1.1e-16.
        CHECK_CLOSE(table, ref, T * c->dim, TOL(6e-8, 3e-13));
        release_all();
    }
    RopeConfig* yarn = &configs[1];
    int low = -1, high = -1;
    rope_yarn_ramp(&low, &high, yarn);
    CHECK(low == 10 && high == 23, "ramp from %d to %d", low, high);
    real *plain_table = poisoned(2 * 64), *table = poisoned(2 * 64);
    rope_table(plain_table, 2, &configs[0]);
    rope_table(table, 2, yarn);
    for (int i = 0; i < 32; i++) {  // at position 1 the angle is the frequency
        double f = asin(plain_table[64 + 2 * i + 1]), g = asin(table[64 + 2 * i + 1]);
        double expected = i <= 10 ? f : i >= 23 ? f / 40 : f * (1 - (i - 10) / 13.0) + f / 40 * ((i - 10) / 13.0);
        CHECK(fabs(g - expected) <= 1e-6 * expected, "pair %d: frequency %g, expected %g", i, g,
              expected);  // u and asin's
    }
    release_all();
    CHECK(fabs(rope_mscale(yarn) - (0.1 * 0.707 * log(40) + 1)) < 1e-15, "mscale %.17g", rope_mscale(yarn));
    CHECK(rope_mscale(&configs[0]) == 1, "mscale without YaRN: %g", rope_mscale(&configs[0]));
}

typedef struct {
    RopeShape shape;
    real *x, *table, *turned, *back, *turned_back;
} Rope;

// The second of two tensors is empty.
static void turn_one(real* x, const Rope* r, int direction, Ctx* ctx) {
    const RopeShape none = {0};
    rope_apply(x, r->shape, x, none, r->table, direction, ctx);
}

static void run_rope(void* arg) {
    Rope* r = arg;
    int64_t n = r->shape.N * r->shape.stride;
    Ctx* ctx = ctx_create(0);
    r->turned = copied(r->x, n), r->turned_back = copied(r->x, n);
    turn_one(r->turned, r, 1, ctx);
    r->back = copied(r->turned, n);
    turn_one(r->back, r, -1, ctx);
    turn_one(r->turned_back, r, -1, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void test_rope_apply(void) {
    // N, T, heads, D, stride, head_stride; the vectors begin `offset` elements into a token, as q's rope part does.
    static const RopeShape shapes[] = {{1, 1, 1, 2, 2, 2},        {6, 3, 2, 6, 31, 15},      {127, 127, 1, 16, 41, 16},
                                       {258, 129, 3, 10, 57, 19}, {300, 100, 1, 64, 70, 64}, {130, 65, 4, 4, 16, 4}};
    for (int s = 0; s < COUNT(shapes); s++) {
        RopeShape p = shapes[s];
        RopeConfig config = {.dim = (int)p.D, .theta = 10000};
        Rope r = {.shape = p};
        int64_t n = p.N * p.stride;
        r.table = poisoned(p.T * p.D);
        rope_table(r.table, p.T, &config);
        r.x = tensor(n, 1);
        check_threads(run_rope, &r);
        double *ref = doubles(r.x, n), *original = doubles(r.x, n);
        char* touched = kept_bytes(n);
        for (int64_t t = 0; t < p.N; t++)
            for (int64_t h = 0; h < p.heads; h++)
                for (int64_t i = 0; i < p.D / 2; i++) {
                    int64_t at = t * p.stride + h * p.head_stride + 2 * i;
                    double angle = (double)(t % p.T) * oracle_frequency((int)i, &config);
                    ref[at] = r.x[at] * cos(angle) - r.x[at + 1] * sin(angle);
                    ref[at + 1] = r.x[at] * sin(angle) + r.x[at + 1] * cos(angle);
                    touched[at] = touched[at + 1] = 1;
                }
        // Two products and a sum of numbers rounded once: 3 u. There and back: twice that. In double: the angle.
        CHECK_CLOSE(r.turned, ref, n, TOL(2e-7, 3e-13));
        CHECK_CLOSE(r.back, original, n, TOL(4e-7, 1e-15));
        int64_t changed = 0;
        for (int64_t i = 0; i < n; i++) changed += !touched[i] && (r.turned[i] != r.x[i] || r.turned_back[i] != r.x[i]);
        CHECK(changed == 0, "%lld elements outside the vectors changed", (long long)changed);
        // The rotation is linear: direction -1 is its backward if <R x, y> = <x, R^-1 y> for y = another random vector.
        real* y = tensor(n, 2);
        Rope other = {.shape = p, .x = y, .table = r.table};
        run_rope(&other);
        double left = dot(doubles(r.turned, n), doubles(y, n), n),
               right = dot(original, doubles(other.turned_back, n), n);
        // A sum of n random products has size sqrt(n), each known to 3 u.
        CHECK(fabs(left - right) <= TOL(1e-6, 1e-13) * sqrt((double)n), "<Rx, y> = %.9g, <x, R'y> = %.9g", left, right);
        release_all();
    }
}

int main(void) {
    RUN(test_rope_table);
    RUN(test_rope_apply);
    return test_summary();
}
