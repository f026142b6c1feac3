// MXFP8 quantization (mx/mxfp8.h) to the bit, by its definition in float64: from a list of all e4m3 values, without bit
// operations. Also the inputs shared by these tests. A test calls list_e4m3 first.
#ifndef TESTS_MX_BYTES_H
#define TESTS_MX_BYTES_H

#include "mx/mxfp8.h"
#include "tests/oracle.h"

// --- The oracle: the definitions, in float64 ---

static double e4m3_values[127];  // of the bit patterns 0 .. 0x7e, in order

static inline void list_e4m3(void) {
    for (int b = 0; b < 127; b++) e4m3_values[b] = b < 8 ? b / 8.0 * pow(2, -6) : (1 + b % 8 / 8.0) * pow(2, b / 8 - 7);
}

// The nearest e4m3 value. A tie goes to the one whose last bit is 0.
static inline uint8_t nearest_e4m3(double y) {
    double a = fabs(y);
    int low = 0;
    if (isnan(y)) return 0x7f;
    for (int step = 64; step; step /= 2)
        if (low + step < 127 && e4m3_values[low + step] <= a) low += step;
    if (low < 126) {
        double below = a - e4m3_values[low], above = e4m3_values[low + 1] - a;
        low += above < below || (above == below && low % 2);
    }
    return (uint8_t)(low + (signbit(y) ? 128 : 0));
}

static inline int oracle_scale(double amax, int mode) {
    int e = -127;
    if (!isfinite(amax)) return 255;
    if (mode == MX_FLOOR) return amax == 0 || ilogb(amax) - 8 < -127 ? 0 : ilogb(amax) - 8 + 127;
    if (amax == 0x1.c00002p-119) return 0;  // the exception
    while (448 * pow(2, e) < amax) e++;
    return e + 127;
}

// The largest |x| of rows x columns elements; NaN if one of them is NaN.
static inline double oracle_amax(const real* x, int64_t stride, int64_t rows, int64_t columns) {
    double amax = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            double a = fabs((double)(float)x[r * stride + c]);
            if (!(a <= amax)) amax = isnan(amax) ? amax : a;
        }
    return amax;
}

static inline uint8_t oracle_byte(real x, int s) { return nearest_e4m3(s == 255 ? NAN : (float)x * pow(2, 127 - s)); }

static inline double oracle_value(uint8_t q, int s) {
    double magnitude = (q & 127) == 127 || s == 255 ? NAN : e4m3_values[q & 127] * pow(2, s - 127);
    return q & 128 ? -magnitude : magnitude;
}

static inline void oracle_quantize(uint8_t* q, uint8_t* scale, const real* x, int64_t rows, int64_t columns,
                                   MxRecipe recipe) {
    const int64_t chunk = recipe.align == 128 ? 128 : 32, stride = (columns / 32 + 15) / 16 * 16;
    for (int64_t i = 0; i < rows * stride; i++) scale[i] = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            int64_t c0 = c / chunk * chunk, n = columns - c0 < chunk ? columns - c0 : chunk;
            int s = scale[r * stride + c / 32];
            if (c % 32 == 0)
                s = scale[r * stride + c / 32] =
                    (uint8_t)oracle_scale(oracle_amax(x + r * columns + c0, 0, 1, n), recipe.scale);
            q[r * columns + c] = oracle_byte(x[r * columns + c], s);
        }
}

// --- Inputs and comparison ---

static inline uint8_t* poisoned_bytes(int64_t n) { return memset(kept_bytes(n), 0xa5, n); }

#define CHECK_BYTES(got, want, n, ...)                                                                                 \
    do {                                                                                                               \
        int64_t wrong_ = 0, first_ = -1;                                                                               \
        for (int64_t i_ = 0; i_ < (n); i_++)                                                                           \
            if ((got)[i_] != (want)[i_] && ++wrong_ == 1) first_ = i_;                                                 \
        if (!wrong_) break;                                                                                            \
        printf("    " __VA_ARGS__);                                                                                    \
        CHECK(wrong_ == 0, ": %lld of %lld differ, the first at %lld is %d, not %d", (long long)wrong_,                \
              (long long)(n), (long long)first_, (got)[first_], (want)[first_]);                                       \
    } while (0)

static inline real from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

static inline uint32_t draw(uint32_t stream, int64_t i, double below) {
    return (uint32_t)(random_uniform(5, stream, (uint64_t)i) * below);
}

// Normal numbers. Every block of 32 has its own magnitude, 2^-20 .. 2^19, and every row a further factor.
static inline real* wild_tensor(int64_t rows, int64_t columns, uint32_t stream) {
    real* x = tensor(rows * columns, stream);
    for (int64_t i = 0; i < rows * columns; i++)
        x[i] = ldexp(x[i], (int)draw(stream, i / 32, 40) - 20 + (int)(i / columns % 9));
    return x;
}

static const MxRecipe recipes[] = {{MX_RCEIL, 1}, {MX_FLOOR, 1}, {MX_RCEIL, 128}, {MX_FLOOR, 128}};

// Matrices: count, rows, columns.
static const int64_t matrices[][3] = {{1, 32, 32}, {3, 96, 160}, {2, 224, 64}, {5, 288, 416}, {1, 544, 32}};

static inline int64_t tiles_of(int64_t n) { return (n + 127) / 128; }

#endif
