// SwiGLU between an expert's two GEMMs, and its backward with the gate (grouped/experts.h), fused with the quantization
// to MXFP8 with align 128 (mx/mxfp8.h). Rows are ragged (grouped/permute.h); pad rows are zeros with scale 0.
//
//   forward   a = silu(h_gate) * h_up             quantized: a
//   backward  da = gate * da',  dh = d swiglu     quantized: dh
#pragma once

#include "grouped/experts.h"
#include "mx/mxfp8.h"

// out: a (capacity, F), row-wise, from h (capacity, 2F), gate, then up. a is rounded to floatX, then quantized as by
// mx_quantize. On the GPU the result equals that of experts_swiglu_forward and mx_quantize to the bit.
void mx_swiglu_quantize(MxBytes out, const floatX* h, Ragged ragged, int64_t F, int32_t scale_mode, Ctx* ctx);

// Backward: dh (capacity, 2F) quantized row-wise for dgrad (out), and into channels (mx_quantize_channels) for wgrad.
// dh is first rounded to floatX, but dh in floatX is not written (tensors.dh is NULL). `a` is the dequantized result of
// mx_swiglu_quantize, not rounded again. On the GPU q equals that of experts_swiglu_backward and mx_quantize_both to
// the bit. F is a multiple of 128.
//
// With ragged.row_gate NULL the rows are the `capacity` tokens of a dense MLP. The function is then swiglu_backward
// (layers/swiglu.h) and mx_quantize_both: gates are 1, `a` is not quantized, and drow_gate is not written.
void mx_swiglu_backward_both(MxBytes out, MxBytes channels, ExpertsBackward tensors, int64_t length, Ragged ragged,
                             int64_t F, int32_t scale_mode, Ctx* ctx);

// Computes drow_gate and gated_a of experts_swiglu_backward for an `a` that forward has quantized. On entry gated_a
// holds this `a`, with zeros in pad rows.
void experts_gate_backward(ExpertsBackward tensors, Ragged ragged, int64_t F, Ctx* ctx);
