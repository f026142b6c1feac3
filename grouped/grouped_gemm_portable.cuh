// Grouped GEMM for every NVIDIA GPU since Ampere. The contracts are those of grouped/grouped_gemm.h, whose functions
// call these if ctx->portable is set.
#pragma once

#include "device/device.h"
#include "grouped/permute.h"

void grouped_gemm_portable_forward(floatX* y, const floatX* x, const floatX* w, Ragged ragged, int64_t IC, int64_t OC,
                                   Ctx* ctx);
void grouped_gemm_portable_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged ragged, int64_t IC, int64_t OC,
                                 Ctx* ctx);
template <typename Out>  // real, or floatX without accumulation
void grouped_gemm_portable_wgrad(Out* dw, const floatX* dy, const floatX* x, Ragged ragged, int64_t IC, int64_t OC,
                                 int accumulate, Ctx* ctx);
