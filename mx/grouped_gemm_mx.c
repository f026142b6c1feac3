#include "mx/grouped_gemm_mx.h"

#include <string.h>

#include "device/cpu.h"
#include "mx/mxfp8_cpu.h"

// CPU reference of the MXFP8 grouped GEMM: the formula of the header, tile by tile of the output. For each chunk the
// dot products are summed first. The sums are then multiplied by the chunk's two scales.

char* grouped_gemm_mx_missing(Ctx* ctx) { return NULL; }
const char* grouped_gemm_mx_unreplayed(Ctx* ctx) { return NULL; }

// One chunk of an operand: a row for each row (a) or column (b) of the output.
typedef struct Chunk {
    const uint8_t *q, *scale;
    int64_t stride, scale_stride;  // from one row to the next; scale_stride 0: all rows have the same scale
} Chunk;

// d[i][j] += s_a[i] s_b[j] sum_k a[i][k] b[j][k] for rows x columns outputs and `depth` elements of the contraction.
static void add_chunk(real* d, int64_t d_stride, Chunk a, Chunk b, int64_t rows, int64_t columns, int64_t depth) {
    // Decode b, transposed, and its scales.
    real bt[MX_CHUNK][TILE], sb[TILE];
    for (int64_t j = 0; j < columns; j++) {
        sb[j] = mx_scale_value(b.scale[j * b.scale_stride]);
        for (int64_t k = 0; k < depth; k++) bt[k][j] = e4m3_value(b.q[j * b.stride + k]);
    }

    // For each row: the chunk's dot products, then both scales.
    for (int64_t i = 0; i < rows; i++) {
        const real sa = mx_scale_value(a.scale[i * a.scale_stride]);
        real sum[TILE] = {0};
        for (int64_t k = 0; k < depth; k++) {
            const real ak = e4m3_value(a.q[i * a.stride + k]);
            for (int64_t j = 0; j < columns; j++) sum[j] += ak * bt[k][j];
        }
        for (int64_t j = 0; j < columns; j++) d[i * d_stride + j] += sa * sb[j] * sum[j];
    }
}

void grouped_gemm_mx(floatX* y, MxBytes x, MxTiles w, Ragged r, int64_t IC, int64_t OC, Ctx* ctx) {
    const int64_t columns = ceil_div(OC, TILE), chunks = ceil_div(IC, MX_CHUNK);
    int64_t most = 0;  // rows of the largest group
    for (int32_t e = 0; e < r.El; e++) most = max_i64(most, r.group_start[e + 1] - r.group_start[e]);
#pragma omp parallel for schedule(dynamic) collapse(3)
    for (int64_t tile = 0; tile < ceil_div(most, TILE); tile++)
        for (int32_t e = 0; e < r.El; e++)
            for (int64_t column = 0; column < columns; column++) {
                // One output tile: its rows and columns, zeros to start. Pad rows stay zeros.
                const int64_t at = r.group_start[e] + tile * TILE, o = column * TILE, width = min_i64(TILE, OC - o);
                const int64_t rows = min_i64(TILE, r.group_start[e + 1] - at), valid = r.group_rows[e] - tile * TILE;
                for (int64_t i = 0; i < rows; i++) memset(y + (at + i) * OC + o, 0, (size_t)width * sizeof(real));

                // Chunk by chunk of the contraction. A tile of W has one scale.
                for (int64_t c = 0; c < chunks && rows > 0; c++) {
                    const Chunk xs = {x.q + at * IC + c * MX_CHUNK,
                                      x.scale + at * mx_stride(IC) + c * (MX_CHUNK / MX_BLOCK), IC, mx_stride(IC)};
                    const Chunk ws = {w.q + (e * OC + o) * IC + c * MX_CHUNK,
                                      w.scale + e * columns * chunks + column * w.stride_o + c * w.stride_c, IC, 0};
                    add_chunk(y + at * OC + o, OC, xs, ws, min_i64(rows, valid), width,
                              min_i64(MX_CHUNK, IC - c * MX_CHUNK));
                }
            }
}

// Wgrad, the same way: rows are channels of dy, columns are channels of x.
void grouped_gemm_mx_wgrad(real* dw, floatX* rounded, MxBytes dy, MxBytes x, int64_t length, Ragged r, int64_t IC,
                           int64_t OC, int accumulate, Ctx* ctx) {
    if (rounded) dw = rounded;
    const int64_t rows = ceil_div(OC, TILE), columns = ceil_div(IC, TILE);
#pragma omp parallel for schedule(dynamic) collapse(3)
    for (int32_t e = 0; e < r.El; e++)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t column = 0; column < columns; column++) {
                // One tile of dW, set to zero unless it accumulates.
                const int64_t o = row * TILE, height = min_i64(TILE, OC - o), i = column * TILE;
                const int64_t width = min_i64(TILE, IC - i), start = channel_start(r, e), end = start + r.group_rows[e];
                real* out = dw + (e * OC + o) * IC + i;
                for (int64_t m = 0; m < height && !accumulate; m++)
                    memset(out + m * IC, 0, (size_t)width * sizeof(real));

                // Chunk by chunk of the contraction. Each channel has its own scale.
                for (int64_t at = start; at < end; at += MX_CHUNK) {
                    const Chunk dys = {dy.q + o * length + at, dy.scale + at / MX_CHUNK * OC + o, length, 1};
                    const Chunk xs = {x.q + i * length + at, x.scale + at / MX_CHUNK * IC + i, length, 1};
                    add_chunk(out, IC, dys, xs, height, width, min_i64(MX_CHUNK, end - at));
                }
            }
}

void gemm_mx_wgrads(const MxMatrix* list, int count, MxBytes dy, MxBytes x, int64_t length, Ragged r, int accumulate,
                    Ctx* ctx) {
    mx_one_by_one(list, count, dy, x, length, r, accumulate, ctx);
}
