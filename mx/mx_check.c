#include "mx/mx_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/random.h"
#include "mx/grouped_gemm_mx.h"
#include "mx/mx_values.h"
#include "mx/mxfp8.h"

// Odd group sizes, an empty expert, a trailing chunk of the contraction, a narrow last tile of the outputs.
enum { EXPERTS = 4, IC = 352, OC = 144, CHUNKS = 3, TILES = 2, MOST_ROWS = 1024 };
static const int32_t group_rows[EXPERTS] = {129, 0, 1, 37};

typedef struct Case {
    int64_t start[EXPERTS + 1];
    uint8_t x[MOST_ROWS * IC], w[EXPERTS * OC * IC];
    uint8_t x_chunk[MOST_ROWS * CHUNKS];  // the scale of a row's chunk
    uint8_t w_tile[EXPERTS * TILES * CHUNKS];
} Case;

// Any bytes but NaN.
static void draw_bytes(uint8_t* q, int64_t n, uint32_t stream) {
    for (int64_t i = 0; i < n; i++) {
        q[i] = (uint8_t)(256 * random_uniform(1, stream, (uint64_t)i));
        if ((q[i] & 127) == 127) q[i] ^= 1;
    }
}

// Binades -1, 0 and 1.
static void draw_scales(uint8_t* scale, int64_t n, uint32_t stream) {
    for (int64_t i = 0; i < n; i++) scale[i] = (uint8_t)(126 + (int)(3 * random_uniform(1, stream, (uint64_t)i)));
}

static double row_error(const Case* c, const real* y, int e, int64_t row, int64_t stride_o, int64_t stride_c) {
    double diff = 0, norm = 0;
    for (int64_t o = 0; o < OC; o++) {
        const uint8_t *x = c->x + row * IC, *w = c->w + (e * OC + o) * IC;
        double sum = 0;
        for (int64_t chunk = 0; chunk < CHUNKS; chunk++) {
            int64_t tile = e * TILES * CHUNKS + o / MX_CHUNK * stride_o + chunk * stride_c;
            double part = 0;
            for (int64_t k = chunk * MX_CHUNK; k < IC && k < (chunk + 1) * MX_CHUNK; k++)
                part += (double)e4m3_value(x[k]) * e4m3_value(w[k]);
            sum += ldexp(part, c->x_chunk[row * CHUNKS + chunk] + c->w_tile[tile] - 2 * 127);
        }
        double d = (double)y[row * OC + o] - sum;
        diff += d * d, norm += sum * sum;
    }
    return isfinite(diff) ? sqrt(diff / norm) : (double)INFINITY;
}

static void* upload(const void* host, size_t bytes, Ctx* ctx) {
    void* p = device_alloc(bytes, "the check of MXFP8 products");
    device_upload(p, host, bytes, ctx);
    return p;
}

double mx_check_error(MxProduct* product, Ctx* ctx) {
    Case* c = (Case*)host_alloc(sizeof(Case));
    const int64_t align = row_align(BACKEND);
    for (int e = 0; e < EXPERTS; e++) c->start[e + 1] = c->start[e] + round_up(group_rows[e], align);
    const int64_t rows = c->start[EXPERTS], stride = mx_stride(IC);
    ASSERT(rows <= MOST_ROWS);
    draw_bytes(c->x, rows * IC, 1);
    draw_bytes(c->w, sizeof(c->w), 2);
    draw_scales(c->x_chunk, rows * CHUNKS, 3);
    draw_scales(c->w_tile, sizeof(c->w_tile), 4);
    uint8_t* x_scale = (uint8_t*)host_alloc((size_t)(rows * stride));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < IC / MX_BLOCK; b++)
            x_scale[r * stride + b] = c->x_chunk[r * CHUNKS + b / (MX_CHUNK / MX_BLOCK)];
    real* y = (real*)host_alloc((size_t)(rows * OC) * sizeof(real));

    Ragged ragged;
    memset(&ragged, 0, sizeof(ragged));
    ragged.El = EXPERTS;
    ragged.capacity = rows;
    ragged.group_start = (int64_t*)upload(c->start, sizeof(c->start), ctx);
    ragged.group_rows = (int32_t*)upload(group_rows, sizeof(group_rows), ctx);
    uint8_t *q = (uint8_t*)upload(c->x, (size_t)(rows * IC), ctx), *w = (uint8_t*)upload(c->w, sizeof(c->w), ctx);
    uint8_t *scale = (uint8_t*)upload(x_scale, (size_t)(rows * stride), ctx),
            *w_scale = (uint8_t*)upload(c->w_tile, sizeof(c->w_tile), ctx);
    real* out = (real*)device_alloc((size_t)(rows * OC) * sizeof(real), "the check of MXFP8 products");
    double worst = 0;
    for (int transposed = 0; transposed < 2; transposed++) {
        int64_t stride_o = transposed ? 1 : CHUNKS, stride_c = transposed ? TILES : 1;
        for (int64_t i = 0; i < rows * OC; i++) y[i] = NAN;  // what nobody writes shows
        device_upload(out, y, (size_t)(rows * OC) * sizeof(real), ctx);
        product(NULL, out, q, scale, w, w_scale, stride_o, stride_c, ragged, IC, OC, ctx);
        device_download(y, out, (size_t)(rows * OC) * sizeof(real), ctx);
        for (int e = 0; e < EXPERTS; e++)
            for (int64_t r = c->start[e]; r < c->start[e + 1]; r++) {
                double error = 0;
                if (r < c->start[e] + group_rows[e])
                    error = row_error(c, y, e, r, stride_o, stride_c);
                else
                    for (int64_t o = 0; o < OC; o++)
                        if (y[r * OC + o] != 0) error = INFINITY;
                if (error > worst) worst = error;
            }
    }
    device_free(ragged.group_start);
    device_free(ragged.group_rows);
    device_free(q);
    device_free(w);
    device_free(scale);
    device_free(w_scale);
    device_free(out);
    free(y);
    free(x_scale);
    free(c);
    return worst;
}

void mx_check(Ctx* ctx) {
    double error = mx_check_error(grouped_gemm_mx, ctx);
    if (error > MX_CHECK_BOUND)
        die(EXIT_FAILED,
            "MXFP8 products are wrong on %s: a row of a small case is off by %g of its norm (at most %g); use "
            "--mx-gemm exact",
            device_name(ctx), error, MX_CHECK_BOUND);
}
