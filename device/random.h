// Counter-based random numbers without state: Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
// 1, 2, 3"). A number depends only on (seed, stream, index). So a rank can draw its part alone, and the numbers are the
// same for any number of ranks.
#pragma once

#include "device/types.h"

// Four 32-bit numbers of (seed, stream, index): ten rounds of two multiplications on a counter of four words, with a
// key that changes in each round.
static inline BOTH_SIDES void philox(uint32_t out[4], uint64_t seed, uint32_t stream, uint64_t index) {
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = stream, c3 = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;  // Weyl constants: golden ratio, sqrt(3) - 1
        k1 += 0xBB67AE85u;
#ifdef __CUDA_ARCH__
        asm("" : "+r"(c0), "+r"(c2));  // else nvcc multiplies 64 bits by 64
#endif
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// The middle of one of 2^32 cells of (0, 1): never 0 and never 1.
static inline BOTH_SIDES double uniform_of(uint32_t word) { return ((double)word + 0.5) * 0x1p-32; }

// Uniform in (0, 1) with 32 bits: word `index % 4` of philox(seed, stream, index / 4).
static inline double random_uniform(uint64_t seed, uint32_t stream, uint64_t index) {
    uint32_t word[4];
    philox(word, seed, stream, index / 4);
    return uniform_of(word[index % 4]);
}
