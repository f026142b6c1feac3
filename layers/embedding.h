// Token embedding: a row of the table per token. On the GPU C is a multiple of 8.
#pragma once

#include "device/device.h"

// out[n] = table[token[n]]
void embedding_forward(floatX* out,           // (N, C)
                       const int32_t* token,  // (N), ids in 0..V-1, checked by the loader
                       const floatX* table,   // (V, C)
                       int64_t N, int64_t C, Ctx* ctx);

// dtable[token[n]] += dout[n]. The order of the sums depends on the tokens alone (no atomics).
void embedding_backward(real* dtable,          // (V, C), +=
                        const floatX* dout,    // (N, C)
                        const int32_t* token,  // (N)
                        int64_t N, int64_t V, int64_t C, Ctx* ctx);

// Bytes of workspace that embedding_backward needs (tokens sorted by id; none on the CPU).
size_t embedding_workspace(int64_t N, int64_t V);
