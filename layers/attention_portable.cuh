// Attention for every NVIDIA GPU since Ampere. The contracts are those of layers/attention.h, whose functions call
// these if ctx->portable is set.
#pragma once

#include "layers/attention.h"

void attention_portable_forward(floatX* out, real* lse, real* max_logit, const floatX* q, const floatX* kv,
                                const floatX* k_rope, AttnShape shape, Ctx* ctx);
void attention_portable_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out,
                                 const real* lse, const floatX* q, const floatX* kv, const floatX* k_rope,
                                 AttnShape shape, Ctx* ctx);
