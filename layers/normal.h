// The inverse of the normal distribution function, in double: AS 241, routine PPND16 (Wichura 1988).
//
// The CPU and the GPU give the same bits. IEEE 754 rounds sums, products, quotients and square roots correctly.
// Libraries' logarithms differ, so natural_log has these operations only. Files that include normal.h are compiled
// without fused multiply-adds.
#pragma once

#include <math.h>
#include <string.h>

#include "device/random.h"

// c[0] + c[1] x + ... + c[7] x^7, by Horner's rule.
static inline BOTH_SIDES double polynomial(const double* c, double x) {
    double sum = c[7];
    UNROLL
    for (int i = 6; i >= 0; i--) sum = sum * x + c[i];
    return sum;
}

// ln x for x > 0 that is not subnormal:
//
//   x = m 2^e,  sqrt(1/2) <= m < sqrt(2)
//   ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...),  s = (m - 1) / (m + 1)
//
// |s| is below 0.172. So the terms after the eighth are below 4e-14 of the first term.
static inline BOTH_SIDES double natural_log(double x) {
    const double terms[8] = {2.0, 2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13, 2.0 / 15};
    const int64_t root_of_half = 0x3fe6a09e667f3bcd;
    int64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    const int64_t e = (bits - root_of_half) >> 52;
    bits -= e * ((int64_t)1 << 52);
    double m;
    memcpy(&m, &bits, sizeof(m));
    const double s = (m - 1) / (m + 1);
    return (double)e * 0.69314718055994530942 + s * polynomial(terms, s * s);
}

// The z with Phi(z) = p, for Phi(-3) <= p <= Phi(3).
static inline BOTH_SIDES double normal_quantile(double p) {
    const double a[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                         1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                         3.3430575583588128105e4, 2.5090809287301226727e3};
    const double b[8] = {1.0000000000000000000e0, 4.2313330701600911252e1, 6.8718700749205790830e2,
                         5.3941960214247511077e3, 2.1213794301586595867e4, 3.9307895800092710610e4,
                         2.8729085735721942674e4, 5.2264952788528545610e3};
    const double c[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                         3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                         2.27238449892691845833e-2, 7.74545014278341407640e-4};
    const double d[8] = {1.0000000000000000000e0,   2.05319162663775882187e0,  1.67638483018380384940e0,
                         6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
                         5.47593808499534494600e-4, 1.05075007164441684324e-9};

    // The central part: a ratio of polynomials in q^2.
    const double q = p - 0.5;
    if (fabs(q) <= 0.425) {
        const double r = 0.180625 - q * q;
        return q * polynomial(a, r) / polynomial(b, r);
    }

    // The tail: a ratio of polynomials in sqrt(-ln p). At 3 sigma sqrt(-ln p) is 2.57, so the far tail of AS 241, from
    // 5 on, is left out.
    const double r = sqrt(-natural_log(q < 0 ? p : 1 - p)) - 1.6, z = polynomial(c, r) / polynomial(d, r);
    return q < 0 ? -z : z;
}

// A standard normal number, truncated at +-3, of 32 random bits: the uniform number in the middle of one of 2^32 cells.
static inline BOTH_SIDES double normal_of(uint32_t bits) {
    const double low = 0.0013498980316300946;  // Phi(-3)
    return normal_quantile(low + (1 - 2 * low) * uniform_of(bits));
}
