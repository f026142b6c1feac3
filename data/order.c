#include "data/order.h"

#include "device/check.h"

// SplitMix64's finalizer (Steele, Lea & Flood 2014; Stafford's variant 13): every input bit affects every output bit.
static uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

int64_t order_permute(uint64_t seed, int64_t epoch, int64_t i, int64_t n) {
    const uint64_t golden = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio: decorrelates consecutive numbers
    enum { ROUNDS = 8 };
    ASSERT(i >= 0 && i < n);

    // Width of the two halves: 4^half >= n. A key for this epoch of this seed.
    int half = 1;
    while (half < 31 && ((uint64_t)1 << (2 * half)) < (uint64_t)n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t key = mix64(mix64(seed + golden) + ((uint64_t)epoch + 1) * golden);
    uint64_t x = (uint64_t)i;

    // The Feistel network permutes 0 .. 4^half - 1, and 4^half is at most 4 n. Cycle walking: the cycle from i must
    // return below n, at the latest at i itself. A round XORs one half with a function of the other, then swaps the
    // halves.
    do {
        uint64_t left = x >> half, right = x & mask;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t next = left ^ (mix64(key + ((uint64_t)round << 32) + right * golden) & mask);
            left = right;
            right = next;
        }
        x = (left << half) | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}
