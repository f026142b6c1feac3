// Weights at the start. The oracles are the C library's erfc and log.
#include "layers/draw.h"

#include "tests/test.h"

enum { SEED = 11, STREAM = 12 };

// Any part of a tensor equals that part of the whole, also if it begins inside a block of four. Nothing around it
// changes.
static void parts(void) {
    enum { N = 70000 };
    real *whole = (real*)host_alloc(N * sizeof(real)), *part = (real*)host_alloc(N * sizeof(real));
    masters_draw(whole, whole, N, 0, 2.0, SEED, STREAM, 0, NULL);
    for (int64_t first = 1; first < 12; first++)
        for (int64_t n = 1; n < N - 20; n = n < 6 ? n + 1 : 10 * n + 1) {
            for (int64_t i = 0; i < N; i++) part[i] = -7;
            masters_draw(part + 4, part + 4, n, 0, 2.0, SEED, STREAM, first, NULL);
            CHECK(memcmp(part + 4, whole + first, (size_t)n * sizeof(real)) == 0, "%d from %d differ", (int)n,
                  (int)first);
            for (int64_t i = 0; i < N; i++)
                if ((i < 4 || i >= n + 4) && part[i] != -7)
                    CHECK(0, "%d from %d write element %d", (int)n, (int)first, (int)i);
        }
    free(whole);
    free(part);
}

// A working weight that is not its master gets the value too; deviation 0 is the mean exactly.
static void weights_and_ones(void) {
    real master[9], weight[9];
    masters_draw(master, weight, 9, 1, 0.5, SEED, STREAM, 3, NULL);
    CHECK(memcmp(master, weight, sizeof(weight)) == 0 && master[0] != master[1], "%g and %g", master[0], weight[0]);
    masters_draw(master, weight, 9, 1, 0, SEED, STREAM, 3, NULL);
    for (int i = 0; i < 9; i++) CHECK(master[i] == 1 && weight[i] == 1, "%g is not 1", master[i]);
}

// The draws are the inverse distribution function of the uniforms: Phi(z), from the C library's erfc, gives the uniform
// back. A float32 z below 3 has steps of 2.4e-7, times the density (at most 0.4): 1e-7. A normal cut at 3 has variance
// 0.97334; 1e6 draws estimate it to 1.3e-3.
static void distribution(void) {
    enum { N = 1000000 };
    real* z = (real*)host_alloc(N * sizeof(real));
    masters_draw(z, z, N, 0, 1.0, SEED, STREAM, 0, NULL);
    double mean = 0, square = 0, worst = 0, low = 0.5 * erfc(3 / sqrt(2.0));
    for (int i = 0; i < N; i++) {
        mean += z[i] / (double)N;
        square += (double)z[i] * z[i] / N;
        double back = 0.5 * erfc(-z[i] / sqrt(2.0)),
               expected = low + (1 - 2 * low) * random_uniform(SEED, STREAM, (uint64_t)i);
        if (fabs(back - expected) > worst) worst = fabs(back - expected);
        if (fabs(z[i]) > 3) worst = 1;
    }
    CHECK(worst < 1.2e-7, "Phi(z) is off by %g", worst);
    CHECK(fabs(mean) < 5e-3 && fabs(square - 0.97334) < 7e-3, "mean %g, mean square %g", mean, square);
    free(z);
}

// The series leaves 4e-14 of its first term, and sums and the conversion of e ln 2 leave some 1e-15.
static void logarithm(void) {
    double worst = 0;
    for (int i = 0; i < 1000000; i++) {
        const double p = ldexp(0.5 + random_uniform(SEED, STREAM, (uint64_t)i), -(i % 60));
        worst = fmax(worst, fabs(natural_log(p) - log(p)) / fmax(fabs(log(p)), 1e-3));
    }
    CHECK(worst < 5e-14, "ln p is off by %g", worst);
}

// The bits of a million draws, by FNV-1a. Machines, compilers and their options must agree on them.
static void known_bits(void) {
    enum { N = 1000000 };
    real* z = (real*)host_alloc(N * sizeof(real));
    masters_draw(z, z, N, 0, 0.02, SEED, STREAM, 0, NULL);
    uint64_t hash = 0xcbf29ce484222325;
    for (int i = 0; i < N; i++) {
        const float value = (float)z[i];
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        hash = (hash ^ bits) * 0x100000001b3;
    }
    CHECK(hash == 0x1fc7e03111ddc063, "they are %016lx", (unsigned long)hash);
    free(z);
}

int main(void) {
    RUN(parts);
    RUN(weights_and_ones);
    RUN(distribution);
    RUN(logarithm);
    RUN(known_bits);
    return test_summary();
}
