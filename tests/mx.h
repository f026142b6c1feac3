// Rounding and MXFP8 quantization in float64, by frexp and ldexp, for tests that compare values (mx_bytes.h compares
// bits). Nothing here is shared with the reference.
#ifndef TESTS_MX_H
#define TESTS_MX_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"

static inline double bf16(double x) {
    int exponent;
    double m = frexp(x, &exponent);
    return ldexp(rint(ldexp(m, 8)), exponent - 8);
}

// To nearest even, saturating at 448. Three bits of mantissa follow the first one. Below 2^-6 steps are 2^-9.
static inline double e4m3(double x) {
    int exponent;
    frexp(x, &exponent);
    double step = ldexp(1, (exponent - 1 < -6 ? -6 : exponent - 1) - 3), q = rint(x / step) * step;
    return q > 448 ? 448 : q < -448 ? -448 : q;
}

// The exponent of a block's scale: amax = m 2^e with 1/2 <= m < 1, and 448 = 7/8 2^9.
static inline int scale_exponent(double amax, MxScale mode) {
    int exponent;
    double m = frexp(amax, &exponent);
    int p = mode == MX_RCEIL && m > 0.875 ? exponent - 8 : exponent - 9;
    return amax == 0 || p < -127 ? -127 : p;
}

// Replaces x (rows, columns) by its dequantized values. One scale per tile; tiles at the edges are smaller.
static inline void fake_quantize(double* x, int64_t rows, int64_t columns, int64_t tile_rows, int64_t tile_columns,
                                 MxScale mode) {
    for (int64_t r0 = 0; r0 < rows; r0 += tile_rows)
        for (int64_t c0 = 0; c0 < columns; c0 += tile_columns) {
            int64_t r1 = r0 + tile_rows < rows ? r0 + tile_rows : rows;
            int64_t c1 = c0 + tile_columns < columns ? c0 + tile_columns : columns;
            double amax = 0;
            for (int64_t r = r0; r < r1; r++)
                for (int64_t c = c0; c < c1; c++) amax = fmax(amax, fabs((double)(float)x[r * columns + c]));
            double scale = ldexp(1, scale_exponent(amax, mode));
            for (int64_t r = r0; r < r1; r++)
                for (int64_t c = c0; c < c1; c++) {
                    double* at = x + r * columns + c;
                    *at = e4m3((double)(float)*at / scale) * scale;
                }
        }
}

// 1: the device has GEMMs of MXFP8 values (--precision mxfp8). Without them tests of fast GEMMs are left out, with one
// message.
static inline int has_fast(Ctx* ctx) {
    static int said;
    char* missing = ctx ? grouped_gemm_mx_missing(ctx) : NULL;
    if (missing && !said++) printf("    without what is fast: %s\n", missing);
    const int has = missing == NULL;
    free(missing);
    return has;
}

#endif
