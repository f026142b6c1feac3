// Weights at the start of a run: the same bits on every machine, backend and layout of ranks.
//
//   master[i] = mean + std * z(first + i)    i = 0 .. n - 1; rounded to float32
//   weight[i] = its working weight           (masters_upload, device/device.h)
//
// z(j) is standard normal, truncated at +-3: the inverse of the normal distribution function (layers/normal.h) at the
// uniform number j of (seed, stream) (device/random.h). A rank draws its part of a tensor, from element `first` on.
#pragma once

#include "device/device.h"

void masters_draw(Master* master, floatX* weight, int64_t n, double mean, double std, uint64_t seed, uint32_t stream,
                  int64_t first, Ctx* ctx);
