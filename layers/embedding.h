// Token embedding: a row of the table per token. On the GPU C is a multiple of 8.
//
//   out, dout       (N, C)
//   table, dtable   (V, C)
//   token           (N), ids in 0..V-1, checked by the loader
#pragma once

#include "device/device.h"

// out[n] = table[token[n]]
void embedding_forward(floatX* out, const int32_t* token, const floatX* table, int64_t N, int64_t C, Ctx* ctx);

// dtable[token[n]] += dout[n]. The order of the sums depends on the tokens alone (no atomics).
void embedding_backward(real* dtable, const floatX* dout, const int32_t* token, int64_t N, int64_t V, int64_t C,
                        Ctx* ctx);

// Bytes of workspace that embedding_backward needs (tokens sorted by id; none on the CPU).
size_t embedding_workspace(int64_t N, int64_t V);
