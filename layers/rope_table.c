// The host side of layers/rope.h: frequencies and angles, one source for both builds (CPU and CUDA).
#include <math.h>

#include "layers/rope.h"

// d(beta): the pair that makes `beta` rotations over the original length.
static double pair_of(double beta, const RopeConfig* config) {
    return config->dim * log(config->original_len / (2 * M_PI * beta)) / (2 * log(config->theta));
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
    double ramp = (i - low) / (high == low ? 0.001 : (double)(high - low));
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
