#include "layers/rope.h"

#include "device/cpu.h"

static const double pi = 3.14159265358979323846;

// The pair that makes `beta` turns over the original length.
static double pair_of(double beta, const RopeConfig* config) {
    return config->dim * log(config->original_len / (2 * pi * beta)) / (2 * log(config->theta));
}

void rope_yarn_ramp(int* low, int* high, const RopeConfig* config) {
    double first = floor(pair_of(32, config)), last = ceil(pair_of(1, config));
    *low = first < 0 ? 0 : (int)first;
    *high = last > config->dim - 1 ? config->dim - 1 : (int)last;
}

double rope_mscale(const RopeConfig* config) {
    return config->yarn && config->factor > 1 ? 0.1 * config->mscale * log(config->factor) + 1 : 1;
}

static double frequency(int i, const RopeConfig* config) {
    double f = pow(config->theta, -2.0 * i / config->dim);
    if (!config->yarn) return f;
    int low, high;
    rope_yarn_ramp(&low, &high, config);
    double ramp = (i - low) / (high > low ? (double)(high - low) : 0.001);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return (1 - ramp) * f + ramp * f / config->factor;
}

void rope_table(real* host_table, int64_t T, const RopeConfig* config) {
    int half = config->dim / 2;
    for (int i = 0; i < half; i++) {
        double f = frequency(i, config);
        for (int64_t t = 0; t < T; t++) {
            host_table[(t * half + i) * 2] = (real)cos(t * f);
            host_table[(t * half + i) * 2 + 1] = (real)sin(t * f);
        }
    }
}

void rope_apply(floatX* x, const real* table, RopeShape shape, int direction, Ctx* ctx) {
    (void)ctx;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < shape.N; n++) {
        const real* turn = table + n % shape.T * shape.D;
        for (int64_t h = 0; h < shape.heads; h++) {
            floatX* v = x + n * shape.stride + h * shape.head_stride;
            for (int64_t i = 0; i < shape.D; i += 2) {
                real c = turn[i], s = direction * turn[i + 1], even = v[i], odd = v[i + 1];
                v[i] = even * c - odd * s;
                v[i + 1] = even * s + odd * c;
            }
        }
    }
}
