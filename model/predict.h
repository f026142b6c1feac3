// The time of a training step on H200s, predicted from the FLOPs and bytes of its kernels and from measured rates
// (bench/results.jsonl). "Predicted steps" in bench/h200.md compares predicted and measured times, for one GPU, and
// for 2 and 4 GPUs of one host.
#pragma once

#include "model/model.h"

// The classes of kernels.
typedef enum { T_GROUPED, T_DENSE, T_ATTENTION, T_HEAD, T_OPTIMIZER, T_MEMORY, T_TRANSFERS, TIMES } TimeClass;

// Seconds of a step, and of each class in it, from a plan (model_plan) of a model that is trained:
//
//   matmul         passes (2 N rows columns / rate + start), 3 passes a step: forward, dgrad, wgrad
//   attention      3.5 forwards: backward has five products, forward two
//   optimizer      bytes of parameters, moments and gradients; FLOPs of Muon
//   memory-bound   bytes of norms, SwiGLU, permute, combine and quantization, and a start for each block
//   transfers      the exposed part, beside no compute: bytes / rate, times the measured share
//
// Activation checkpointing adds passes. Transfers between hosts were not measured.
double predict_step(double seconds[TIMES], const Model* model);
