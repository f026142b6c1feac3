// Counter-based random numbers without state: Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3"). A number depends only on (seed, stream, index). So a rank can draw its part alone, and the numbers are the
// same for any number of ranks.
#pragma once

#include "device/types.h"

// Four 32-bit numbers of (seed, stream, index).
void philox(uint32_t out[4], uint64_t seed, uint32_t stream, uint64_t index);

// Uniform in (0, 1) with 32 bits: word `index % 4` of philox(seed, stream, index / 4).
double random_uniform(uint64_t seed, uint32_t stream, uint64_t index);

// out[i] = std * z for elements first .. first + n - 1 of `stream`. z is standard normal, truncated at +-3: the inverse
// of the normal distribution (Wichura 1988, AS 241) at a uniform number, in double. OpenMP over fixed blocks.
void random_normal(float* out, int64_t n, uint64_t seed, uint32_t stream, uint64_t first, double std);
