// Sizes of a model, and hyperparameters of its training. Options set these numbers (model/settings.h). The code of the
// model and of its training step includes no header of options.
#pragma once

#include "layers/rope.h"

// A DeepSeek-style model. Letters as everywhere: C width, L layers, H heads, E experts, K experts a token, F expert
// hidden width, V vocabulary.
typedef struct ModelConfig {
    int64_t L, C, H;
    int64_t q_lora, kv_lora;          // MLA's latents; q_lora 0: queries come straight from x
    int64_t nope, rope, v;            // head sizes
    int64_t dense_ffn, dense_layers;  // the first dense_layers blocks have a dense MLP of this width
    int64_t E, K, shared, F;          // other blocks: E routed experts, and one shared MLP of width shared * F
    int64_t V;
    int64_t mtp;  // 1: an MTP module follows, as block L
    int64_t groups, top_groups, score, route_norm;
    int64_t selection_bias;  // 1: the folder of --init has selection biases; not an option
    double route_scale, norm_eps, rope_theta;
    int64_t yarn;
    double yarn_factor, yarn_mscale;
    int64_t yarn_original_len;
} ModelConfig;

typedef enum { ADAMW, MUON } Optimizer;  // MUON: for the matrices that params.c names, AdamW for the rest
typedef enum { BALANCE_QUANTILE, BALANCE_DEEPSEEK, BALANCE_NONE } Balance;
typedef enum { SCHEDULE_COSINE, SCHEDULE_WSD, SCHEDULE_LINEAR, SCHEDULE_CONSTANT } Schedule;
typedef enum { RECOMPUTE_NONE, RECOMPUTE_MOE, RECOMPUTE_BLOCK } Recompute;
typedef enum { DISPATCH_AUTO, DISPATCH_NCCL, DISPATCH_WINDOWS } DispatchUse;
typedef enum { GRAPH_AUTO, GRAPH_OFF } GraphUse;

// A member has the value of the option with its name or in its comment. warmup_steps and frozen are no options.
typedef struct RunConfig {
    int64_t batch, seq_len;  // sequences of a rank's micro-step, and their tokens
    int64_t tokens_per_step, steps, seed;
    double lr, muon_lr, final_lr_frac, weight_decay, beta1, beta2, clip, bias_rate, aux_loss, mtp_weight;
    int64_t optimizer, muon_expert_steps, moments, schedule, balance, force_balance;
    int64_t ranks, ep, shard, dispatch, recompute, graph;
    double capacity;
    int64_t expert_precision, dispatch_precision, combine_precision, wgrad_precision, linear_precision;
    int64_t scale_rule, stats_every;  // --mx-scale, --mx-stats
    double warmup_steps;              // steps of --warmup when the run began
    int64_t frozen;                   // 1: the model is not trained (--sample, --evaluate)
} RunConfig;

static inline int64_t config_blocks(const ModelConfig* config) { return config->L + config->mtp; }
int64_t config_vocab_padded(const ModelConfig* config);  // V rounded up to a multiple of 128
RopeConfig config_rope(const ModelConfig* config);
double config_softmax_scale(const ModelConfig* config);  // (nope + rope)^-1/2, times YaRN's mscale^2

// Tokens that a micro-step takes on all ranks together.
static inline int64_t run_micro_tokens(const RunConfig* run) { return run->ranks * run->batch * run->seq_len; }

// The learning rate of update `step` (1 is the first). It rises linearly to lr over `warmup_steps`, and then falls to
// lr * final_lr_frac at the last step:
//
//   cosine     along half a cosine            linear     along a line
//   wsd        along a line, but only over the last fifth; constant until then
//   constant   not at all
double run_lr(const RunConfig* run, int64_t step);
double run_muon_lr(const RunConfig* run, int64_t step);  // the same schedule with --muon-lr

// The weight of the MTP loss at `step`; the main loss has weight 1. The weight is --mtp-weight for the first share
// MTP_SWITCH of the steps, then MTP_WEIGHT_END. DeepSeek-V3 has 0.3 for 10 of its 14.8 trillion tokens, then 0.1 (arXiv
// 2412.19437, section 4.2).
#define MTP_SWITCH 0.67
#define MTP_WEIGHT_END 0.1
double run_mtp_weight(const RunConfig* run, int64_t step);
