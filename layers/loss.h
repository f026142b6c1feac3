// Cross-entropy loss over the vocabulary. The caller passes a chunk of tokens at a time, so that the logits of a batch
// never exist whole.
#pragma once

#include "device/device.h"

//   loss[n] = ln sum_{v < V} exp(logits[n][v]) - logits[n][target[n]]                              in nats
//   logits[n][v] = dscale * (softmax(logits[n])[v] - [v == target[n]]), 0 in the padding           if dscale is not 0
//
// The second line is the gradient of dscale * sum_n loss[n], written over the logits. With dscale 0 the logits stay
// unchanged. loss (N), logits (N, Vp), target (N): 0..V-1. Columns V..Vp-1 are padding and are ignored. On the GPU Vp
// is a multiple of 8.
void cross_entropy(real* loss, floatX* logits, const int32_t* target, int64_t N, int64_t V, int64_t Vp, float dscale,
                   Ctx* ctx);
