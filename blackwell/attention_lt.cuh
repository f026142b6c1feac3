// Attention on GPUs that do not know the instructions of layers/attention.cu (Blackwell). The contract is that of
// layers/attention.h, and the functions there come here on such a GPU.
#ifndef BLACKWELL_ATTENTION_LT_CUH
#define BLACKWELL_ATTENTION_LT_CUH

#include "layers/attention.h"

void attention_lt_forward(floatX* out, real* lse, const floatX* q, const floatX* kv, const floatX* k_rope,
                          AttnShape shape, Ctx* ctx);
void attention_lt_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out,
                           const real* lse, const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape shape,
                           Ctx* ctx);
size_t attention_lt_workspace(AttnShape shape);

#endif
