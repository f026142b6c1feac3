#include "moe/mxfp8.h"

#include <string.h>

#include "device/cpu.h"
#include "moe/experts.h"

static uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

static float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

// float32 -> e4m3 (sign, 4 bits of exponent with bias 7, 3 of mantissa, no Inf; S.1111.111 is NaN): to nearest even,
// saturating at 448 = 0x7e.
static uint8_t e4m3_of(float x) {
    uint32_t u = bits_of(x), sign = u >> 24 & 0x80, a = u & 0x7fffffff;
    if (a > 0x7f800000) return 0x7f;
    if (a >= bits_of(448)) return sign | 0x7e;
    // Below 2^-6 e4m3 counts in steps of 2^-9, and so do the last bits of floats from 2^14 on: the sum is rounded
    // there.
    if (a < bits_of(0x1p-6f)) return sign | (bits_of(float_of(a) + 0x1p14f) - bits_of(0x1p14f));
    // 20 bits of mantissa go, half to even; a carry runs into the exponent as it should.
    a += 0x7ffff + (a >> 20 & 1);
    return sign | ((a >> 20) - ((127 - 7) << 3));
}

// The same bits as a float32, whose bias is 120 more; subnormal numbers are subnormal there too.
static float float_of_e4m3(uint8_t q) {
    float magnitude = (q & 0x7f) == 0x7f ? NAN : float_of((uint32_t)(q & 0x7f) << 20) * 0x1p120f;
    return q & 0x80 ? -magnitude : magnitude;
}

// What x is multiplied with, 2^(127 - s). The product is exact in float32, or so small that it is rounded to 0 anyway.
static float factor_of(int s) { return s == MX_NAN ? NAN : ldexpf(1, 127 - s); }

// What bytes are multiplied with, 2^(s - 127). The product is exact in float32, up to 2^128.
static float unit_of(int s) { return s == MX_NAN ? NAN : ldexpf(1, s - 127); }

// What the cast of x with scale s stands for.
static float value_of(float x, int s) { return float_of_e4m3(e4m3_of(x * factor_of(s))) * unit_of(s); }

// The scale byte of rows x columns elements, rows `stride` apart, that share one.
static int scale_of(const floatX* x, int64_t stride, int64_t rows, int64_t columns, int32_t mode) {
    uint32_t amax = 0;  // magnitudes compare like their bits, and Inf and NaN stand above all others
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            uint32_t a = bits_of((float)x[r * stride + c]) & 0x7fffffff;
            amax = a > amax ? a : amax;
        }
    if (amax >= 0x7f800000) return MX_NAN;
    // 1.75 = 448 / 2^8: a mantissa above it, and only that, carries into the exponent. amax / 448 is just above 2^-127
    // for 0x04600001, and rounded to float32 it is 2^-127.
    int s = mode == MX_FLOOR ? (int)(amax >> 23) - 8 : amax == 0x04600001 ? 0 : (int)((amax + 0x1fffff) >> 23) - 8;
    return s > 0 ? s : 0;
}

// Casts them; the bytes of element (r, c) go to q[r q_row + c q_column].
static void cast_all(uint8_t* q, int64_t q_row, int64_t q_column, const floatX* x, int64_t stride, int64_t rows,
                     int64_t columns, int s) {
    const float factor = factor_of(s);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) q[r * q_row + c * q_column] = e4m3_of((float)x[r * stride + c] * factor);
}

// How many elements share a scale, along the contraction, but at the end of a row.
static int64_t chunk_of(MxCast cast) { return cast.align == 1 ? MX_BLOCK : MX_CHUNK; }

void mx_quantize(uint8_t* q, uint8_t* scale, const floatX* x, int64_t rows, int64_t columns, MxCast cast, Ctx* ctx) {
    (void)ctx;
    const int64_t chunk = chunk_of(cast), stride = mx_stride(columns);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        memset(scale + r * stride, 0, stride);
        for (int64_t c = 0; c < columns; c += chunk) {
            int64_t n = min_i64(chunk, columns - c), at = r * columns + c;
            int s = scale_of(x + at, columns, 1, n, cast.scale);
            memset(scale + r * stride + c / MX_BLOCK, s, (size_t)n / MX_BLOCK);
            cast_all(q + at, columns, 1, x + at, columns, 1, n, s);
        }
    }
}

void mx_quantize_transposed(uint8_t* q, uint8_t* scale, const floatX* x, int64_t count, int64_t rows, int64_t columns,
                            MxCast cast, Ctx* ctx) {
    (void)ctx;
    const int64_t chunk = chunk_of(cast), stride = mx_stride(rows);
    memset(scale, 0, count * columns * stride);
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t m = 0; m < count; m++)
        for (int64_t r = 0; r < rows; r += chunk)
            for (int64_t c = 0; c < columns; c++) {
                int64_t n = min_i64(chunk, rows - r), column = m * columns + c;
                const floatX* from = x + (m * rows + r) * columns + c;
                int s = scale_of(from, columns, n, 1, cast.scale);
                memset(scale + column * stride + r / MX_BLOCK, s, (size_t)n / MX_BLOCK);
                cast_all(q + column * rows + r, 1, rows, from, columns, n, 1, s);
            }
}

void mx_quantize_tiles(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t count, int64_t rows,
                       int64_t columns, int32_t scale_mode, Ctx* ctx) {
    (void)ctx;
    const int64_t tiles_r = ceil_div(rows, MX_CHUNK), tiles_c = ceil_div(columns, MX_CHUNK);
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < count * tiles_r * tiles_c; tile++) {
        int64_t m = tile / (tiles_r * tiles_c), r = tile / tiles_c % tiles_r * MX_CHUNK, c = tile % tiles_c * MX_CHUNK;
        int64_t nr = min_i64(MX_CHUNK, rows - r), nc = min_i64(MX_CHUNK, columns - c);
        int64_t at = (m * rows + r) * columns + c, at_transposed = (m * columns + c) * rows + r;
        int s = scale_of(w + at, columns, nr, nc, scale_mode);
        scale[tile] = s;
        cast_all(q + at, columns, 1, w + at, columns, nr, nc, s);
        cast_all(q_transposed + at_transposed, 1, rows, w + at, columns, nr, nc, s);
    }
}

void mx_swiglu_quantize(uint8_t* q, uint8_t* scale, const floatX* h, Ragged ragged, int64_t F, MxCast cast, Ctx* ctx) {
    (void)ctx;
    const int64_t chunk = chunk_of(cast), stride = mx_stride(F);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < ragged.group_start[ragged.El]; r++) {  // rows lie without gaps on the CPU
        memset(scale + r * stride, 0, stride);
        for (int64_t c = 0; c < F; c += chunk) {
            const floatX *g = h + r * 2 * F + c, *u = g + F;
            floatX a[MX_CHUNK];
            int64_t n = min_i64(chunk, F - c);
#pragma omp simd
            for (int64_t i = 0; i < n; i++) a[i] = g[i] / (1 + exp(-g[i])) * u[i];
            int s = scale_of(a, n, 1, n, cast.scale);
            memset(scale + r * stride + c / MX_BLOCK, s, (size_t)n / MX_BLOCK);
            cast_all(q + r * F + c, n, 1, a, n, 1, n, s);
        }
    }
}

void mx_swiglu_backward_quantize(uint8_t* q, uint8_t* scale, floatX* dh, floatX* gated_a, real* drow_gate,
                                 const floatX* dap, const floatX* h, Ragged ragged, int64_t F, MxCast cast, Ctx* ctx) {
    const int64_t chunk = chunk_of(cast), rows = ragged.group_start[ragged.El];
    experts_swiglu_backward(dh, gated_a, drow_gate, dap, h, ragged, F, ctx);
    mx_quantize(q, scale, dh, rows, 2 * F, cast, ctx);
    // What depends on A is of the A before its cast so far.
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const floatX *g = h + r * 2 * F, *u = g + F;
        floatX* a = gated_a + r * F;
        real gate = ragged.row_gate[r], dgate = 0;
#pragma omp simd
        for (int64_t i = 0; i < F; i++) a[i] = g[i] / (1 + exp(-g[i])) * u[i];
        for (int64_t c = 0; c < F; c += chunk) {
            int64_t n = min_i64(chunk, F - c);
            int s = scale_of(a + c, n, 1, n, cast.scale);
            for (int64_t i = c; i < c + n; i++) a[i] = value_of((float)a[i], s);
        }
#pragma omp simd reduction(+ : dgate)
        for (int64_t i = 0; i < F; i++) dgate += dap[r * F + i] * a[i];
        for (int64_t i = 0; i < F; i++) a[i] *= gate;
        drow_gate[r] = dgate;
    }
}

// before: 1 adds to x.
static void dequantize(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, int before) {
    const int64_t stride = mx_stride(columns);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += MX_BLOCK) {
            const float unit = unit_of(scale[r * stride + c / MX_BLOCK]);
            for (int64_t i = r * columns + c; i < r * columns + c + MX_BLOCK; i++)
                x[i] = before ? x[i] + float_of_e4m3(q[i]) * unit : float_of_e4m3(q[i]) * unit;
        }
}

void mx_dequantize(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, Ctx* ctx) {
    (void)ctx, dequantize(x, q, scale, rows, columns, 0);
}

void mx_dequantize_add(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, Ctx* ctx) {
    (void)ctx, dequantize(x, q, scale, rows, columns, 1);
}

void mx_round_columns(floatX* x, Ragged ragged, int64_t columns, MxCast cast, Ctx* ctx) {
    (void)ctx;
    const int64_t chunk = chunk_of(cast);
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < columns; c++)
        for (int32_t e = 0; e < ragged.El; e++)
            for (int64_t r = 0; r < ragged.group_rows[e]; r += chunk) {
                floatX* top = x + (ragged.group_start[e] + r) * columns + c;
                int64_t n = min_i64(chunk, ragged.group_rows[e] - r);
                int s = scale_of(top, columns, n, 1, cast.scale);
                for (int64_t i = 0; i < n; i++) top[i * columns] = value_of((float)top[i * columns], s);
            }
}

// Adds what the cast of a block with scale s does.
static void add_block(MxStats* stats, const floatX* block, int s, int32_t scale_mode) {
    const int s_alone = scale_of(block, MX_BLOCK, 1, MX_BLOCK, scale_mode);
    for (int64_t i = 0; i < MX_BLOCK && s != MX_NAN; i++) {
        const float x = (float)block[i], value = value_of(x, s);
        stats->elements += x != 0;
        stats->saturated += fabsf(x * factor_of(s)) > 448;
        stats->flushed += x != 0 && value == 0;
        stats->inexact += value != value_of(x, s_alone);
        stats->signal += (double)x * x;
        stats->noise += ((double)x - value) * ((double)x - value);
    }
}

void mx_stats(MxStats* stats, const floatX* x, int64_t rows, int64_t columns, MxCast cast, Ctx* ctx) {
    (void)ctx;
    const int64_t chunk = chunk_of(cast);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += MX_BLOCK) {
            const int64_t c0 = c / chunk * chunk, at = r * columns;
            const int s = scale_of(x + at + c0, columns, 1, min_i64(chunk, columns - c0), cast.scale);
            add_block(stats, x + at + c, s, cast.scale);
        }
}

void mx_stats_tiles(MxStats* stats, const floatX* w, const uint8_t* scale, int64_t count, int64_t rows, int64_t columns,
                    int32_t scale_mode, Ctx* ctx) {
    (void)ctx;
    const int64_t tiles_r = ceil_div(rows, MX_CHUNK), tiles_c = ceil_div(columns, MX_CHUNK);
    for (int64_t r = 0; r < count * rows; r++)
        for (int64_t c = 0; c < columns; c += MX_BLOCK) {
            const int64_t tile = (r / rows * tiles_r + r % rows / MX_CHUNK) * tiles_c + c / MX_CHUNK;
            add_block(stats, w + r * columns + c, scale[tile], scale_mode);
        }
}

size_t mx_stats_workspace(void) { return 0; }
