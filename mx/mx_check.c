#include "mx/mx_check.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/random.h"
#include "device/values.h"

// The case covers odd group sizes, an empty expert, a short last chunk of the contraction, a narrow last output tile.
enum { EXPERTS = 4, IC = 352, OC = 144, CHUNKS = 3, TILES = 2, MOST_ROWS = 1024, STRIDE = 16 };
static const int32_t group_rows[EXPERTS] = {129, 0, 1, 37};

// The buffers of the case, the same struct on host and device. Large arrays come first, so each is aligned to 128
// bytes.
typedef struct Case {
    uint8_t x[MOST_ROWS * IC], w[EXPERTS * OC * IC];
    real y[MOST_ROWS * OC];  // the output, widened from rounded_y
    floatX rounded_y[MOST_ROWS * OC];
    uint8_t x_scale[MOST_ROWS * STRIDE];  // a chunk's bytes are equal
    uint8_t w_scale[EXPERTS * TILES * CHUNKS];
    int64_t start[EXPERTS + 1];
    int32_t rows[EXPERTS];
} Case;

// Random e4m3 bytes except NaN.
static void draw_bytes(uint8_t* q, int64_t n, uint32_t stream) {
    for (int64_t i = 0; i < n; i++) {
        q[i] = (uint8_t)(256 * random_uniform(1, stream, (uint64_t)i));
        if ((q[i] & 127) == 127) q[i] ^= 1;
    }
}

// Random scale bytes of binades -1, 0 and 1.
static uint8_t draw_scale(int64_t i, uint32_t stream) {
    return (uint8_t)(126 + (int)(3 * random_uniform(1, stream, (uint64_t)i)));
}

// ||y - sums|| / ||sums|| of a row, whose sums are zeros if it is a pad row.
static double row_error(const Case* c, int e, int64_t row, int64_t stride_o, int64_t stride_c) {
    const int is_pad = row >= c->start[e] + group_rows[e];
    double diff = 0, norm = 0;
    for (int64_t o = 0; o < OC; o++) {
        const uint8_t *x = c->x + row * IC, *w = c->w + (e * OC + o) * IC;
        // y[row][o] by the formula of grouped_gemm_mx, in double.
        double sum = 0;
        for (int64_t chunk = 0; chunk < CHUNKS && !is_pad; chunk++) {
            int64_t tile = e * TILES * CHUNKS + o / MX_CHUNK * stride_o + chunk * stride_c;
            double part = 0;
            for (int64_t k = chunk * MX_CHUNK; k < IC && k < (chunk + 1) * MX_CHUNK; k++)
                part += (double)e4m3_value(x[k]) * e4m3_value(w[k]);
            sum += ldexp(part, c->x_scale[row * STRIDE + chunk * 4] + c->w_scale[tile] - 2 * 127);
        }

        // Compare with the tested GEMM.
        double d = (double)c->y[row * OC + o] - sum;
        diff += d * d;
        norm += sum * sum;
    }
    if (diff == 0) return 0;
    return isfinite(diff) && norm > 0 ? sqrt(diff / norm) : (double)INFINITY;
}

double mx_check_error(MxProduct* product, Ctx* ctx) {
    // Set the groups, and draw random operands.
    Case* c = (Case*)host_alloc(sizeof(Case));
    for (int e = 0; e < EXPERTS; e++) {
        c->rows[e] = group_rows[e];
        c->start[e + 1] = c->start[e] + round_up(group_rows[e], row_align(BACKEND));
    }
    const int64_t rows = c->start[EXPERTS];
    ASSERT(rows <= MOST_ROWS && mx_stride(IC) == STRIDE);
    draw_bytes(c->x, rows * IC, 1);
    draw_bytes(c->w, sizeof(c->w), 2);
    // A scale of x serves a chunk, so its four blocks get the same byte.
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < IC / MX_BLOCK; b++)
            c->x_scale[r * STRIDE + b] = draw_scale(r * CHUNKS + b * MX_BLOCK / MX_CHUNK, 3);
    for (int64_t i = 0; i < EXPERTS * TILES * CHUNKS; i++) c->w_scale[i] = draw_scale(i, 4);

    // Run the GEMM with both orders of W's scales, and keep the larger error.
    Case* on_device = (Case*)device_alloc(sizeof(Case), "the check of MXFP8 GEMMs");
    const Ragged ragged = {
        .El = EXPERTS, .capacity = rows, .group_start = on_device->start, .group_rows = on_device->rows};
    double worst = 0;
    for (int transposed = 0; transposed < 2; transposed++) {
        int64_t stride_o = transposed ? 1 : CHUNKS, stride_c = transposed ? TILES : 1;
        memset((void*)c->rounded_y, 0xff, sizeof(c->rounded_y));  // NaN, so that unwritten elements show
        device_upload(on_device, c, sizeof(Case), ctx);
        const MxBytes x = {on_device->x, on_device->x_scale};
        const MxTiles w = {on_device->w, on_device->w_scale, stride_o, stride_c};
        product(on_device->rounded_y, x, w, ragged, IC, OC, ctx);
        device_to_real(on_device->y, on_device->rounded_y, rows * OC, ctx);
        device_download(c->y, on_device->y, (size_t)(rows * OC) * sizeof(real), ctx);
        for (int e = 0; e < EXPERTS; e++)
            for (int64_t r = c->start[e]; r < c->start[e + 1]; r++)
                worst = fmax(worst, row_error(c, e, r, stride_o, stride_c));
    }
    device_free(on_device);
    free(c);
    return worst;
}

void mx_check(Ctx* ctx) {
    const char* missing = grouped_gemm_mx_missing(ctx);
    if (missing) die(EXIT_USAGE, "%s: %s", device_name(ctx), missing);
    double error = mx_check_error(grouped_gemm_mx, ctx);
    if (error > MX_CHECK_BOUND)
        die(EXIT_FAILED,
            "MXFP8 GEMMs are wrong on %s: a row of a small case is off by %g of its norm (at most %g); use "
            "--precision mxfp8-exact",
            device_name(ctx), error, MX_CHECK_BOUND);
}
