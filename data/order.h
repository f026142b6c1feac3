// The order in which an epoch reads the windows of a set.
#pragma once

#include "device/types.h"

// Element i of the permutation of 0..n-1 for epoch `epoch` of `seed`. A Feistel network over the next even power of two
// is iterated until the result is below n (cycle walking; Black & Rogaway 2002).
int64_t order_permute(uint64_t seed, int64_t epoch, int64_t i, int64_t n);
