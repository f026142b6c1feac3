// Rotary position embedding (Su et al. 2021, arXiv 2104.09864) on interleaved pairs: at position t the pair
// (x_2i, x_2i+1) is turned by the angle t * f_i. Positions count from 0 in every sequence. Angles in double; their
// cosines, sines and the turns in float32.
//
// Frequencies: f_i = g_i = theta^(-2i/D). With YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2) they are blended
// between g_i (fast pairs, left alone) and g_i / factor (slow pairs, interpolated): f_i = (1 - r_i) g_i + r_i g_i /
// factor. The ramp is linear in the pair i, as in YaRN's and DeepSeek's code (the paper's is linear in the turns): r_i
// = clamp((i - low) / (high - low), 0, 1), low = floor(d(beta_fast)), high = ceil(d(beta_slow)), where d(beta) = D
// ln(original_len / (2 pi beta)) / (2 ln theta) is the pair that makes beta turns over the original length; beta_fast =
// 32, beta_slow = 1, low is at least 0 and high at most D - 1. Where they are equal, 0.001 takes the place of high -
// low; high < low is taken as it is (both as in DeepSeek's code).
#ifndef LAYERS_ROPE_H
#define LAYERS_ROPE_H

#include "device/device.h"

BEGIN_C

typedef struct RopeConfig {
    int dim;              // D, even
    double theta;         // base
    int yarn;             // 0: plain
    double factor;        // YaRN: context extension
    double mscale;        // YaRN: softmax scale is multiplied by rope_mscale^2
    double original_len;  // YaRN: length trained before
} RopeConfig;

// YaRN's ramp (for the tests): pairs below *low are left alone, pairs from *high on are interpolated fully.
void rope_yarn_ramp(int* low, int* high, const RopeConfig* config);

// 0.1 * mscale * ln(factor) + 1 with YaRN and factor > 1, else 1 (host).
double rope_mscale(const RopeConfig* config);

// table[t][i] = (cos(t f_i), sin(t f_i)), computed in double on the host, for upload.
void rope_table(real* host_table,  // (T, D/2, 2)
                int64_t T, const RopeConfig* config);

// In place on two tensors of as many tokens, queries and keys: on `heads` vectors a token, of which vector h of token n
// is x + n * stride + h * head_stride, D long.
// direction +1 turns forward; -1 turns back, which is the backward pass. On the GPU D and both strides are multiples
// of 8.
typedef struct RopeShape {
    int64_t N, T;         // tokens, tokens of a sequence (token n stands at position n % T)
    int64_t heads, D;     // vectors a token, length of each
    int64_t stride;       // elements from token to token
    int64_t head_stride;  // elements from head to head
} RopeShape;
void rope_apply(floatX* x, RopeShape of_x, floatX* y, RopeShape of_y, const real* table, int direction, Ctx* ctx);

END_C

#endif
