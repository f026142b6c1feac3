#include "mx/grouped_gemm_mx.h"

#include <string.h>

#include "device/cpu.h"
#include "mx/mxfp8.h"

// The formula as it stands, over tiles of the output: a chunk's dot products first, then its two scales, once each.

// What the 256 bytes mean as e4m3 (sign, 4 bits of exponent, 3 of mantissa; no infinities) and as scales.
typedef struct Values {
    real e4m3[256], scale[256];
} Values;

static void fill_values(Values* v) {
    for (int i = 0; i < 256; i++) {
        int exponent = i >> 3 & 15, mantissa = i & 7;
        real magnitude = exponent ? ldexp((real)(8 + mantissa), exponent - 10) : ldexp((real)mantissa, -9);
        v->e4m3[i] = (i & 127) == 127 ? (real)NAN : i & 128 ? -magnitude : magnitude;
        v->scale[i] = i == MX_NAN ? (real)NAN : ldexp((real)1, i - 127);
    }
}

static int64_t most_tiles(Ragged r) {
    int64_t most = 0;
    for (int32_t e = 0; e < r.El; e++) {
        int64_t rows = r.group_start[e + 1] - r.group_start[e];
        most = rows > most ? rows : most;
    }
    return ceil_div(most, TILE);
}

void grouped_gemm_mx(floatX* y, real* y_real, const uint8_t* x, const uint8_t* x_scale, const uint8_t* w,
                     const uint8_t* w_scale, int64_t w_stride_o, int64_t w_stride_c, Ragged r, int64_t IC, int64_t OC,
                     Ctx* ctx) {
    (void)ctx;
    const int64_t tiles = most_tiles(r), columns = ceil_div(OC, TILE), chunks = ceil_div(IC, MX_CHUNK);
    real* out = y ? y : y_real;
    Values v;
    fill_values(&v);
#pragma omp parallel for schedule(dynamic) collapse(3)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int32_t e = 0; e < r.El; e++)
            for (int64_t column = 0; column < columns; column++) {
                const int64_t at = r.group_start[e] + tile * TILE, o = column * TILE, width = min_i64(TILE, OC - o);
                const int64_t rows = min_i64(TILE, r.group_start[e + 1] - at), valid = r.group_rows[e] - tile * TILE;
                const uint8_t* ws = w_scale + e * columns * chunks + column * w_stride_o;
                for (int64_t i = 0; i < rows; i++) memset(out + (at + i) * OC + o, 0, (size_t)width * sizeof(real));
                for (int64_t c = 0; c < chunks && rows > 0; c++) {
                    const int64_t depth = min_i64(MX_CHUNK, IC - c * MX_CHUNK);
                    real wt[MX_CHUNK][TILE];  // the chunk of W, transposed
                    for (int64_t j = 0; j < width; j++)
                        for (int64_t k = 0; k < depth; k++)
                            wt[k][j] = v.e4m3[w[(e * OC + o + j) * IC + c * MX_CHUNK + k]];
                    for (int64_t i = 0; i < min_i64(rows, valid); i++) {
                        const uint8_t* xi = x + (at + i) * IC + c * MX_CHUNK;
                        real sum[TILE] = {0};
                        for (int64_t k = 0; k < depth; k++) {
                            const real xk = v.e4m3[xi[k]];
                            for (int64_t j = 0; j < width; j++) sum[j] += xk * wt[k][j];
                        }
                        const real sx = v.scale[x_scale[(at + i) * mx_stride(IC) + c * (MX_CHUNK / MX_BLOCK)]];
                        const real s = sx * v.scale[ws[c * w_stride_c]];
                        for (int64_t j = 0; j < width; j++) out[(at + i) * OC + o + j] += s * sum[j];
                    }
                }
            }
}
