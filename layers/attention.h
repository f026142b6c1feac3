// The core of causal multi-head latent attention (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1.3), on the
// up-projected heads:
//
//   k_h = [k_nope_h ; k_rope]              k_rope is shared by the heads
//   P = softmax(scale * q_h k_h^T)         causal
//   out_h = P v_h
//
//   q, dq             (B, T, H, nope + rope), rope part rotated
//   kv, dkv           (B, T, H, nope + v): k_nope, then v
//   k_rope, dk_rope   (B, T, rope), rows k_rope_stride apart, rotated
//   out, dout         (B, T, H, v)
//   lse               (B, H, T): ln sum_j exp(scale q k_j), kept for backward
//   max_logit         (1): max(itself, attention logits); NULL: not computed
//
// Both passes work in tiles with an online softmax (flash attention, Dao et al. 2022, arXiv 2205.14135): no T x T
// matrix exists. k is never concatenated in memory: k_nope and v are read from the output of Wkvb, k_rope from the
// output of Wkva. On the GPU (nope, rope, v) is (128, 64, 128), (64, 32, 64) or (32, 16, 32), and k_rope_stride is a
// multiple of 8.
#pragma once

#include "device/device.h"

typedef struct AttnShape {
    int64_t B, T, H;
    int64_t nope, rope, v;  // head sizes; Dqk = nope + rope
    int64_t k_rope_stride;  // elements from token to token in k_rope and dk_rope
    float scale;            // softmax scale
} AttnShape;

void attention_forward(floatX* out, real* lse, real* max_logit, const floatX* q, const floatX* kv, const floatX* k_rope,
                       AttnShape shape, Ctx* ctx);

// Recomputes P from lse. With delta = rowsum(dout * out):
//
//   dS = P * (dout v^T - delta),  dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout
//
// All outputs are overwritten (=). dk_rope is summed over the heads in their order.
void attention_backward(floatX* dq, floatX* dkv, floatX* dk_rope, const floatX* dout, const floatX* out,
                        const real* lse, const floatX* q, const floatX* kv, const floatX* k_rope, AttnShape shape,
                        Ctx* ctx);

// Bytes of workspace that forward and backward need.
size_t attention_workspace(AttnShape shape);
