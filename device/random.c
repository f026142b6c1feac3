#include "device/random.h"

#include <math.h>
#include <omp.h>

// The middle of one of 2^32 cells: never 0 and never 1.
static double cell(uint32_t word) { return ((double)word + 0.5) * 0x1p-32; }

double random_uniform(uint64_t seed, uint32_t stream, uint64_t index) {
    uint32_t word[4];
    philox(word, seed, stream, index / 4);
    return cell(word[index % 4]);
}

// c[0] + c[1] x + ... + c[7] x^7, by Horner's rule.
static double polynomial(const double* c, double x) {
    double sum = c[7];
    for (int i = 6; i >= 0; i--) sum = sum * x + c[i];
    return sum;
}

// Inverse of the standard normal distribution function: AS 241, routine PPND16, for 5e-324 < p < 1.
static double normal_quantile(double p) {
    static const double a[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                                1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                                3.3430575583588128105e4, 2.5090809287301226727e3};
    static const double b[8] = {1.0000000000000000000e0, 4.2313330701600911252e1, 6.8718700749205790830e2,
                                5.3941960214247511077e3, 2.1213794301586595867e4, 3.9307895800092710610e4,
                                2.8729085735721942674e4, 5.2264952788528545610e3};
    static const double c[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                                3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                                2.27238449892691845833e-2, 7.74545014278341407640e-4};
    static const double d[8] = {1.0000000000000000000e0,   2.05319162663775882187e0,  1.67638483018380384940e0,
                                6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
                                5.47593808499534494600e-4, 1.05075007164441684324e-9};

    // The central part: a ratio of polynomials in q^2.
    double q = p - 0.5;
    if (fabs(q) <= 0.425) {
        double r = 0.180625 - q * q;
        return q * polynomial(a, r) / polynomial(b, r);
    }

    // The tail: a ratio of polynomials in sqrt(-ln p). The draws are truncated at 3 sigma, where sqrt(-ln p) is 2.58.
    // So AS 241's far tail (above 5) is never reached.
    double r = sqrt(-log(q < 0 ? p : 1 - p)) - 1.6;
    double z = polynomial(c, r) / polynomial(d, r);
    return q < 0 ? -z : z;
}

void random_normal(float* out, int64_t n, uint64_t seed, uint32_t stream, uint64_t first, double std) {
    const double low = 0.0013498980316300946;  // the normal distribution function at -3
    const double width = 1 - 2 * low;
    // No thread gets less than a third of a millisecond of work, because a model has hundreds of tensors. Start time of
    // four runs of `small` on 64 cores:
    //
    //   64 threads for every tensor    20 s
    //   six threads each                2 s
#pragma omp parallel for schedule(static) num_threads((int)min_i64(omp_get_max_threads(), n / 16384 + 1))
    for (int64_t block = 0; block < (n + 4095) / 4096; block++) {
        // One call gives four numbers, for elements 4k .. 4k + 3, independent of the start of this rank's part.
        uint32_t word[4];
        uint64_t have = UINT64_MAX;  // the counter that word belongs to
        int64_t end = block * 4096 + 4096 < n ? block * 4096 + 4096 : n;
        for (int64_t i = block * 4096; i < end; i++) {
            uint64_t element = first + (uint64_t)i;
            if (element / 4 != have) philox(word, seed, stream, have = element / 4);
            out[i] = (float)(std * normal_quantile(low + width * cell(word[element % 4])));
        }
    }
}
