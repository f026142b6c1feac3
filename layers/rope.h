// Rotary position embedding (RoPE; Su et al. 2021, arXiv 2104.09864) on interleaved pairs. At position t the pair
// (x_2i, x_2i+1) is rotated by the angle t * f_i. Positions count from 0 in every sequence. Angles are in double; their
// cosines and sines, and the rotations, in float32.
//
//   g_i = theta^(-2i/D)
//   f_i = g_i                                      plain
//   f_i = (1 - r_i) g_i + r_i g_i / factor         YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2)
//
// YaRN leaves fast pairs unchanged (r_i = 0) and interpolates slow pairs (r_i = 1). YaRN's ramp is linear in the pair
// i, as in the code of YaRN and DeepSeek (in the paper it is linear in the rotations):
//
//   r_i     = clamp((i - low) / (high - low), 0, 1)
//   low     = max(floor(d(beta_fast)), 0),         beta_fast = 32
//   high    = min(ceil(d(beta_slow)), D - 1),      beta_slow = 1
//   d(beta) = D ln(original_len / (2 pi beta)) / (2 ln theta)
//
// d(beta) is the pair that makes beta rotations over the original length. As in DeepSeek's code, high - low becomes
// 0.001 if low and high are equal, and high < low is not corrected.
#pragma once

#include "device/device.h"

typedef struct RopeConfig {
    int dim;              // D, even
    double theta;         // base
    int yarn;             // 0: plain
    double factor;        // YaRN: context extension
    double mscale;        // YaRN: softmax scale is multiplied by rope_mscale^2
    double original_len;  // YaRN: length trained before
} RopeConfig;

// YaRN's ramp (for the tests): pairs below *low are unchanged, pairs from *high on are fully interpolated.
void rope_yarn_ramp(int* low, int* high, const RopeConfig* config);

// 0.1 * mscale * ln(factor) + 1 with YaRN and factor > 1, else 1 (host).
double rope_mscale(const RopeConfig* config);

// host_table (T, D/2, 2): host_table[t][i] = (cos(t f_i), sin(t f_i)), computed in double, for upload to the device.
void rope_table(real* host_table, int64_t T, const RopeConfig* config);

// Rotates two tensors in place (queries and keys) of the same number of tokens. Each tensor has `heads` vectors of
// length D per token. Vector h of token n is at x + n * stride + h * head_stride. Direction +1 is forward, -1 the
// inverse rotation, which is backward. On the GPU D and both strides are multiples of 8.
typedef struct RopeShape {
    int64_t N, T;         // tokens, tokens of a sequence (token n has position n % T)
    int64_t heads, D;     // vectors a token, length of each
    int64_t stride;       // elements from token to token
    int64_t head_stride;  // elements from head to head
} RopeShape;
void rope_apply(floatX* x, RopeShape of_x, floatX* y, RopeShape of_y, const real* table, int direction, Ctx* ctx);
