// Wgrad on MXFP8 values: column-wise quantization bit for bit against the oracle of tests/mx/mx_bytes.h, and GEMMs
// against sums of dequantized values in float64. On random and on extreme routings.
#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"
#include "tests/mx/mx_bytes.h"
#include "tests/routing.h"

// --- Quantization ---

typedef struct {
    Ragged r;
    int64_t length, columns, held;  // held: rows of x, or tokens
    const real* x;                  // or quantized values, of tokens or of rows
    uint8_t *from, *from_scale;
    int tokens;
    MxRecipe recipe;
    uint8_t *q, *scale;
} Channels;

static void run_channels(void* arg) {
    Channels* c = arg;
    Ctx* ctx = ctx_create(0);
    c->q = poisoned_bytes(c->columns * c->length), c->scale = poisoned_bytes(c->length / 128 * c->columns);
    if (c->x)
        mx_quantize_channels((MxBytes){c->q, c->scale}, c->x, c->length, c->r, c->columns, c->recipe, ctx);
    else
        mx_requantize_channels((MxBytes){c->q, c->scale}, (MxBytes){c->from, c->from_scale}, c->tokens, c->length, c->r,
                               c->columns, c->recipe, ctx);
    ctx_destroy(ctx);
}

static real source(const Channels* c, int64_t row, int64_t column) {
    const int64_t at = c->tokens ? c->r.row_token[row] : row;
    if (c->x) return c->x[row * c->columns + column];
    return (real)oracle_value(c->from[at * c->columns + column],
                              c->from_scale[at * mx_stride(c->columns) + column / 32]);
}

// Chunk by chunk, or run by run. Everything behind the last chunk of the last group stays unchanged.
static void check_channels(Channels c, const char* what) {
    uint8_t *q = poisoned_bytes(c.columns * c.length), *scale = poisoned_bytes(c.length / 128 * c.columns);
    int64_t at = 0;
    for (int e = 0; e < c.r.El; at += tiles_of(c.r.group_rows[e++]) * 128)
        for (int64_t column = 0; column < c.columns; column++)
            for (int64_t first = 0; first < c.r.group_rows[e]; first += c.recipe.align) {
                real values[512] = {0};
                const int64_t left = c.r.group_rows[e] - first, n = left < c.recipe.align ? left : c.recipe.align;
                for (int64_t k = 0; k < n; k++) values[k] = source(&c, c.r.group_start[e] + first + k, column);
                int s = oracle_scale(oracle_amax(values, 0, 1, n), c.recipe.scale);
                const int zeros = c.recipe.align == 512 && s < 40;
                if (zeros) s = 0;
                for (int64_t k = 0; k < tiles_of(n) * 128; k++) {
                    scale[(at + first + k) / 128 * c.columns + column] = (uint8_t)s;
                    q[column * c.length + at + first + k] = oracle_byte(zeros ? values[k] * 0 : values[k], s);
                }
            }
    check_threads(run_channels, &c);
    CHECK_BYTES(c.scale, scale, c.length / 128 * c.columns, "%s, mode %d, align %d, scales", what, c.recipe.scale,
                c.recipe.align);
    CHECK_BYTES(c.q, q, c.columns * c.length, "%s, mode %d, align %d, bytes", what, c.recipe.scale, c.recipe.align);
}

// Uneven groups, empty ones, and one that has all rows. Inputs: values, quantized rows, and quantized tokens.
static void test_channels(void) {
    enum { GROUPS = 6, TOKENS = 77 };
    static const int32_t rows_of[2][GROUPS] = {{1, 0, 128, 513, 700, 45}, {0, 0, 0, 1100, 0, 0}};
    static const int64_t widths[2] = {32, 160};
    for (int i = 0; i < 16; i++) {
        const int64_t columns = widths[i & 1];
        int32_t rows[GROUPS];
        int64_t start[GROUPS + 1] = {0};
        for (int e = 0; e < GROUPS; e++) rows[e] = rows_of[i >> 1 & 1][e], start[e + 1] = start[e] + rows[e];
        int32_t* token = kept_bytes(start[GROUPS] * sizeof(int32_t));
        for (int64_t r = 0; r < start[GROUPS]; r++) token[r] = (int32_t)draw(90, r, TOKENS);
        Ragged r = {
            .El = GROUPS, .capacity = start[GROUPS], .group_start = start, .group_rows = rows, .row_token = token};
        Channels c = {.r = r, .columns = columns, .recipe = {i >> 2 & 1, i & 8 ? 512 : 128}};
        c.length = mx_channel_length(r.capacity, GROUPS, BACKEND);
        real* x = wild_tensor(r.capacity, columns, 91 + i);
        for (int64_t j = 5; j < r.capacity * columns; j += columns) x[j] = ldexp(x[j], -80);  // small: zeros in a run
        for (int64_t j = 0; j < r.capacity * columns; j += 1 + draw(92, j, 9000)) x[j] = j % 2 ? -(real)INFINITY : NAN;
        c.x = x;
        check_channels(c, "values by channel");

        // Any e4m3 values, NaN included, at scales that a float32 holds.
        uint8_t* q = kept_bytes(r.capacity * columns);
        uint8_t* scale = kept_bytes(r.capacity * mx_stride(columns));
        for (int64_t j = 0; j < r.capacity * columns; j++)
            q[j] = (uint8_t)(draw(93, j, 5000) == 0 ? 0x7f : draw(94, j, 127) | draw(95, j, 2) << 7);
        for (int64_t j = 0; j < r.capacity * mx_stride(columns); j++) scale[j] = (uint8_t)(20 + draw(96, j, 110));
        c.x = NULL, c.from = q, c.from_scale = scale;
        check_channels(c, "bytes by channel");
        c.tokens = 1;
        check_channels(c, "tokens by channel");
        release_all();
    }
}

// --- GEMMs ---

typedef struct {
    Routing* r;
    int64_t IC, OC, length;
    real *x, *dy, *dw_before;
    int accumulate;
    uint8_t *qx, *sx, *qdy, *sdy;  // made by the run
    real* dw;
} ByChannel;

static void run_by_channel(void* arg) {
    ByChannel* b = arg;
    const Ragged r = b->r->ragged;
    Ctx* ctx = ctx_create(0);
    b->qx = poisoned_bytes(b->IC * b->length), b->sx = poisoned_bytes(b->length / 128 * b->IC);
    b->qdy = poisoned_bytes(b->OC * b->length), b->sdy = poisoned_bytes(b->length / 128 * b->OC);
    mx_quantize_channels((MxBytes){b->qx, b->sx}, b->x, b->length, r, b->IC, (MxRecipe){MX_RCEIL, 512}, ctx);
    mx_quantize_channels((MxBytes){b->qdy, b->sdy}, b->dy, b->length, r, b->OC, (MxRecipe){MX_RCEIL, 128}, ctx);
    b->dw = copied(b->dw_before, r.El * b->OC * b->IC);
    grouped_gemm_mx_wgrad(b->dw, NULL, (MxBytes){b->qdy, b->sdy}, (MxBytes){b->qx, b->sx}, b->length, r, b->IC, b->OC,
                          b->accumulate, ctx);
    ctx_destroy(ctx);
}

// Rows and columns have their own magnitudes, so that a scale of another chunk or column shows.
static real* uneven_rows(const Routing* r, int64_t C, uint32_t stream) {
    real* rows = random_rows(r, C, stream);
    for (int64_t i = 0; i < r->ragged.capacity * C; i++) rows[i] = ldexp(rows[i], (int)(i / C / 50 % 4 + i % C % 5));
    return rows;
}

static double* values_of(const uint8_t* q, const uint8_t* scale, int64_t length, int64_t columns) {
    double* v = zeros(columns * length);
    for (int64_t i = 0; i < columns * length; i++)
        v[i] = oracle_value(q[i], scale[i % length / 128 * columns + i / length]);
    return v;
}

static void test_wgrad_of_bytes(void) {
    static const int64_t widths[][2] = {{32, 64}, {160, 32}, {96, 160}};
    for (int i = 0; i < COUNT(routings) * ROUTINGS; i++) {
        const int32_t* s = routings[i / ROUTINGS];
        Routing r = make_routing(s[0], s[1], s[2], s[3], s[4], i % ROUTINGS);
        run_plan(&r);
        ByChannel b = {.r = &r, .IC = widths[i % 3][0], .OC = widths[i % 3][1], .accumulate = i / 3 % 2};
        const int64_t nw = r.El * b.OC * b.IC;
        b.length = mx_channel_length(r.ragged.capacity, r.El, BACKEND);
        b.x = uneven_rows(&r, b.IC, 5), b.dy = uneven_rows(&r, b.OC, 6), b.dw_before = tensor(nw, 7);
        check_threads(run_by_channel, &b);

        // dW from the dequantized operands, in float64.
        double *dw = b.accumulate ? doubles(b.dw_before, nw) : zeros(nw), *x = values_of(b.qx, b.sx, b.length, b.IC);
        double* dy = values_of(b.qdy, b.sdy, b.length, b.OC);
        int64_t at = 0;
        for (int32_t e = 0; e < r.El; at += (r.ragged.group_rows[e++] + 127) / 128 * 128)
            for (int64_t o = 0; o < b.OC; o++)
                for (int64_t c = 0; c < b.IC; c++)
                    for (int64_t k = at; k < at + r.ragged.group_rows[e]; k++)
                        dw[(e * b.OC + o) * b.IC + c] += dy[o * b.length + k] * x[c * b.length + k];
        // Sums of up to 300 products: sqrt(300) u = 1e-6.
        CHECK_CLOSE(b.dw, dw, nw, TOL(2e-6, 1e-14));
        for (int32_t e = 0; e < r.El; e++)
            if (r.ragged.group_rows[e] == 0)
                for (int64_t j = e * b.OC * b.IC; j < (e + 1) * b.OC * b.IC; j++)
                    CHECK(b.dw[j] == (b.accumulate ? b.dw_before[j] : 0), "dW of expert %d without rows", (int)e);
        release_all();
    }
}

int main(void) {
    list_e4m3();
    RUN(test_channels);
    RUN(test_wgrad_of_bytes);
    return test_summary();
}
