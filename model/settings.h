// Everything a run can be told: the option table, the model presets, the sets of precisions, and what must fit
// together.
#pragma once

#include "data/json.h"
#include "device/options.h"
#include "layers/rope.h"
#include "mx/formats.h"

// A DeepSeek-style model. Letters as everywhere: C width, L layers, H heads, E experts, K experts a token, F expert
// hidden width, V vocabulary.
typedef struct ModelConfig {
    int64_t L, C, H;
    int64_t q_lora, kv_lora;          // MLA's latents; q_lora 0: queries come straight from x
    int64_t nope, rope, v;            // head sizes
    int64_t dense_ffn, dense_layers;  // the first dense_layers blocks have a dense MLP of this width
    int64_t E, K, shared, F;          // the others: E routed experts, and one shared MLP of width shared * F
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

// A model of --model, with the defaults that belong to it.
typedef struct Preset {
    ModelConfig model;
    double lr, muon_lr;
    Optimizer optimizer;
    int expert_steps;  // --muon-expert-steps
    bool bf16_moments;
} Preset;
extern const Preset settings_presets[];

enum { SETTINGS_MOST = 128 };  // rows of the table

// The value of every option. A choice is the number of the word in its list.
typedef struct Settings {
    int64_t preset;
    ModelConfig model;
    char *init, *sample, *evaluate;  // folders of models
    char *train, *val, *eval, *tokenizer;
    int64_t seq_len, batch, tokens_per_step, seed, data_seed;
    int64_t init_moments, steps, resume, save_every, keep, val_every, val_tokens, eval_every, sample_every,
        sample_tokens, graph, dry_run, ranks, version, help;
    char *out, *prompt;
    double temperature;
    double lr, final_lr_frac, weight_decay, beta1, beta2, clip, bias_rate, aux_loss;
    int64_t optimizer, moments, schedule, balance, muon_expert_steps;
    double warmup, muon_lr, mtp_weight;
    int64_t ep, shard, dispatch, recompute;
    double timeout, capacity, gpu_memory;
    int64_t precision;  // the mode (FormatId), which sets the following unless the command line does:
    int64_t expert_precision, dispatch_precision, combine_precision, wgrad_precision, linear_precision, scale_rule,
        stats_every;
    int64_t force_balance, overfit;
    double warmup_steps;                    // of --warmup when the run began; not an option
    int64_t steps_before;                   // --resume: --steps of the checkpoint; not an option
    int64_t updates_before, tokens_before;  // --init-moments: of all stages before; not options
    char given[SETTINGS_MOST];              // by row of the table: 1 if the command line has the option
} Settings;

typedef enum { RECOMPUTE_NONE, RECOMPUTE_MOE, RECOMPUTE_BLOCK } Recompute;
typedef enum { DISPATCH_AUTO, DISPATCH_NCCL, DISPATCH_WINDOWS } DispatchUse;
typedef enum { GRAPH_AUTO, GRAPH_OFF } GraphUse;

// Rows are in the order of --help; the first is --model.
extern const Option settings_table[];
extern const int settings_count;

// The command line over the defaults (argc 0: these alone). It is the first of two steps, because --out names the
// record that the second one needs.
Settings settings_parse(int argc, char** argv);

// All options, each from the first source that has it: the command line, which settings_parse read; the record of the
// checkpoint to resume from (NULL: none), or of that to begin with (--init-moments); --model, --precision and the
// tokenizer; the default. Then the checks for a run of `ranks` ranks (--dry-run: --ranks). Ends the run with EXIT_USAGE
// and a message that names the option that does not fit. --help prints the table; --help and --version skip the checks.
Settings settings_read(Settings parsed, int ranks, const Json* record);

// Sets options without a default of their own, unless given: from --model and `precision`.
void settings_preset(Settings* settings, int64_t precision);

// The defaults of all options with this --model and --precision, in fresh memory. Options that the start of a
// run prints in other lines have the given values.
Settings settings_defaults(const Settings* settings);

void settings_free(Settings* settings);

// The checks of settings_read.
void settings_check(const Settings* settings);
// The checks of sizes, --ep and --tokens-per-step alone: a message in fresh memory, or NULL where they pass.
char* settings_refusal(const Settings* settings);

// The folder of the model to begin with, and which option named it; NULL: none.
const char* settings_folder(const Settings* settings, const char** option);

// Tokens that a micro-step takes on all ranks together.
int64_t settings_micro_tokens(const Settings* settings);

static inline int64_t config_blocks(const ModelConfig* config) { return config->L + config->mtp; }
int64_t config_vocab_padded(const ModelConfig* config);  // V rounded up to a multiple of 128
RopeConfig config_rope(const ModelConfig* config);
double config_softmax_scale(const ModelConfig* config);  // (nope + rope)^-1/2, times YaRN's mscale^2

// Steps of the warm-up of a run that begins with these --warmup and --steps.
double settings_warmup(const Settings* settings);

// The learning rate of update `step` (1 is the first). It rises linearly to lr over `warmup_steps`, and then falls to
// lr * final_lr_frac at the last step:
//
//   cosine     along half a cosine            linear     along a line
//   wsd        along a line, but only over the last fifth; constant until then
//   constant   not at all
double settings_lr(const Settings* settings, int64_t step);
double settings_muon_lr(const Settings* settings, int64_t step);  // the same of --muon-lr

// The weight of the MTP loss at `step`; the main loss has 1. It is --mtp-weight in the first MTP_SWITCH of the steps,
// then MTP_WEIGHT_END. DeepSeek-V3 has 0.3 for 10 of its 14.8 trillion tokens, then 0.1 (arXiv 2412.19437,
// section 4.2).
#define MTP_SWITCH 0.67
#define MTP_WEIGHT_END 0.1
double settings_mtp_weight(const Settings* settings, int64_t step);
