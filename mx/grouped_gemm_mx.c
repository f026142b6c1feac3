#include "mx/grouped_gemm_mx.h"

#include <string.h>

#include "device/cpu.h"
#include "mx/mxfp8_cpu.h"

// CPU reference of the MXFP8 grouped GEMM: the formula of the header, tile by tile of the output. For each chunk the
// dot products are summed first. The sums are then multiplied by the chunk's two scales.

// The number of row tiles of the largest group.
static int64_t most_tiles(Ragged r) {
    int64_t most = 0;
    for (int32_t e = 0; e < r.El; e++) most = max_i64(most, r.group_start[e + 1] - r.group_start[e]);
    return ceil_div(most, TILE);
}

char* grouped_gemm_mx_missing(Ctx* ctx) {
    (void)ctx;
    return NULL;
}

void grouped_gemm_mx(floatX* y, real* y_real, const uint8_t* x, const uint8_t* x_scale, const uint8_t* w,
                     const uint8_t* w_scale, int64_t w_stride_o, int64_t w_stride_c, Ragged r, int64_t IC, int64_t OC,
                     Ctx* ctx) {
    (void)ctx;
    const int64_t tiles = most_tiles(r), columns = ceil_div(OC, TILE), chunks = ceil_div(IC, MX_CHUNK);
    real* out = y ? y : y_real;
    real value[256];  // table of all e4m3 values
    for (int i = 0; i < 256; i++) value[i] = e4m3_value((uint8_t)i);
#pragma omp parallel for schedule(dynamic) collapse(3)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int32_t e = 0; e < r.El; e++)
            for (int64_t column = 0; column < columns; column++) {
                // One output tile: its rows and columns, its row of W's scales, zeros to start.
                const int64_t at = r.group_start[e] + tile * TILE, o = column * TILE, width = min_i64(TILE, OC - o);
                const int64_t rows = min_i64(TILE, r.group_start[e + 1] - at), valid = r.group_rows[e] - tile * TILE;
                const uint8_t* ws = w_scale + e * columns * chunks + column * w_stride_o;
                for (int64_t i = 0; i < rows; i++) memset(out + (at + i) * OC + o, 0, (size_t)width * sizeof(real));
                for (int64_t c = 0; c < chunks && rows > 0; c++) {
                    // Decode the chunk of W.
                    const int64_t depth = min_i64(MX_CHUNK, IC - c * MX_CHUNK);
                    real wt[MX_CHUNK][TILE];  // the chunk of W, transposed
                    for (int64_t j = 0; j < width; j++)
                        for (int64_t k = 0; k < depth; k++)
                            wt[k][j] = value[w[(e * OC + o + j) * IC + c * MX_CHUNK + k]];

                    // For each row: the chunk's dot products, then both scales.
                    for (int64_t i = 0; i < min_i64(rows, valid); i++) {
                        const uint8_t* xi = x + (at + i) * IC + c * MX_CHUNK;
                        real sum[TILE] = {0};
                        for (int64_t k = 0; k < depth; k++) {
                            const real xk = value[xi[k]];
                            for (int64_t j = 0; j < width; j++) sum[j] += xk * wt[k][j];
                        }
                        const real sx = mx_scale_value(x_scale[(at + i) * mx_stride(IC) + c * (MX_CHUNK / MX_BLOCK)]);
                        const real s = sx * (real)mx_scale_value(ws[c * w_stride_c]);
                        for (int64_t j = 0; j < width; j++) out[(at + i) * OC + o + j] += s * sum[j];
                    }
                }
            }
}

// Wgrad, the same way: a chunk's dot products are multiplied by the scale of their row and of their column of dW.
void grouped_gemm_mx_wgrad(real* dw, const uint8_t* dy, const uint8_t* dy_scale, const uint8_t* x,
                           const uint8_t* x_scale, int64_t length, Ragged r, int64_t IC, int64_t OC, int accumulate,
                           Ctx* ctx) {
    (void)ctx;
    const int64_t rows = ceil_div(OC, TILE), columns = ceil_div(IC, TILE);
    real value[256];  // table of all e4m3 values
    for (int i = 0; i < 256; i++) value[i] = e4m3_value((uint8_t)i);
#pragma omp parallel for schedule(dynamic) collapse(3)
    for (int32_t e = 0; e < r.El; e++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < columns; column++) {
                // One tile of dW, set to zero unless it accumulates.
                const int64_t o = row * TILE, height = min_i64(TILE, OC - o);
                const int64_t i = column * TILE, width = min_i64(TILE, IC - i), start = channel_start(r, e);
                for (int64_t m = 0; m < height && !accumulate; m++)
                    memset(dw + (e * OC + o + m) * IC + i, 0, (size_t)width * sizeof(real));
                for (int64_t at = start; at < start + r.group_rows[e]; at += MX_CHUNK) {
                    // Decode the chunk of x.
                    const int64_t depth = min_i64(MX_CHUNK, start + r.group_rows[e] - at);
                    const uint8_t *sdy = dy_scale + at / MX_CHUNK * OC + o, *sx = x_scale + at / MX_CHUNK * IC + i;
                    real xt[MX_CHUNK][TILE];  // the chunk of x, transposed
                    for (int64_t j = 0; j < width; j++)
                        for (int64_t k = 0; k < depth; k++) xt[k][j] = value[x[(i + j) * length + at + k]];

                    // For each row of dW: the chunk's dot products, then both scales.
                    for (int64_t m = 0; m < height; m++) {
                        const uint8_t* dym = dy + (o + m) * length + at;
                        real sum[TILE] = {0}, *out = dw + (e * OC + o + m) * IC + i;
                        for (int64_t k = 0; k < depth; k++) {
                            const real dyk = value[dym[k]];
                            for (int64_t j = 0; j < width; j++) sum[j] += dyk * xt[k][j];
                        }
                        for (int64_t j = 0; j < width; j++)
                            out[j] += mx_scale_value(sdy[m]) * (real)mx_scale_value(sx[j]) * sum[j];
                    }
                }
            }
}

void gemm_mx_wgrads(const MxMatrix* list, int count, const uint8_t* dy, const uint8_t* dy_scale, const uint8_t* x,
                    const uint8_t* x_scale, int64_t length, Ragged r, int accumulate, Ctx* ctx) {
    mx_one_by_one(list, count, dy, dy_scale, x, x_scale, length, r, accumulate, ctx);
}
