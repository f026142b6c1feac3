// The table of options, the presets, and values derived from options. Where values come from: model/settings_read.c.
#include "model/settings.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "device/check.h"
#include "moe/moe.h"

// Rows of the table, by type: group, name, field of Settings, default (NULL: from the group's first option), range or
// choices, scope at --resume, help. Texts and flags are empty and off by default. --help prints the rows with _COMMON.
#define FREE OPTION_FREE, false
#define FIXED OPTION_FIXED, false
#define KEPT OPTION_KEPT, false
#define ONCE OPTION_ONCE, false
#define FREE_COMMON OPTION_FREE, true
#define FIXED_COMMON OPTION_FIXED, true
#define KEPT_COMMON OPTION_KEPT, true
#define ONCE_COMMON OPTION_ONCE, true
#define WHOLE(group, name, field, initial, min, max, scope, help)                                                      \
    { group, name, OPTION_INT, offsetof(Settings, field), initial, min, max, NULL, scope, help }
#define NUMBER(group, name, field, initial, min, max, scope, help)                                                     \
    { group, name, OPTION_FLOAT, offsetof(Settings, field), initial, min, max, NULL, scope, help }
#define CHOICE(group, name, field, initial, choices, scope, help)                                                      \
    { group, name, OPTION_CHOICE, offsetof(Settings, field), initial, 0, 0, choices, scope, help }
#define TEXT(group, name, field, scope, help)                                                                          \
    { group, name, OPTION_TEXT, offsetof(Settings, field), "", 0, 0, NULL, scope, help }
#define FLAG(group, name, field, most, scope, help)                                                                    \
    { group, name, OPTION_FLAG, offsetof(Settings, field), "0", 0, most, NULL, scope, help }
#define BIG 1e12

// The options, in the order of --help.
const Option settings_table[] = {
    // Model: --model sets all of the group.
    CHOICE("model", "model", preset, "tiny", "tiny|small|medium|debug|16b|236b|671b", KEPT_COMMON,
           "preset for the options of this group"),
    WHOLE("model", "layers", model.L, NULL, 1, 1024, KEPT, "blocks"),
    WHOLE("model", "dim", model.C, NULL, 1, 1 << 14, KEPT, "model width"),
    WHOLE("model", "heads", model.H, NULL, 1, 4096, KEPT, "attention heads"),
    WHOLE("model", "q-lora", model.q_lora, NULL, 0, 1 << 14, KEPT, "rank of the query latent, 0 for none"),
    WHOLE("model", "kv-lora", model.kv_lora, NULL, 1, 1 << 14, KEPT, "rank of the key-value latent"),
    WHOLE("model", "nope-dim", model.nope, NULL, 1, 4096, KEPT, "head size without position"),
    WHOLE("model", "rope-dim", model.rope, NULL, 2, 4096, KEPT, "head size with rotary position, even"),
    WHOLE("model", "v-dim", model.v, NULL, 1, 4096, KEPT, "head size of values"),
    WHOLE("model", "dense-ffn", model.dense_ffn, NULL, 1, 1 << 21, KEPT, "hidden width of the dense MLP"),
    WHOLE("model", "experts", model.E, NULL, 1, 4096, KEPT, "routed experts"),
    WHOLE("model", "top-k", model.K, NULL, 1, 64, KEPT, "routed experts a token"),
    WHOLE("model", "shared-experts", model.shared, NULL, 0, 64, KEPT, "shared experts (one MLP of that many widths)"),
    WHOLE("model", "expert-ffn", model.F, NULL, 1, 1 << 20, KEPT, "hidden width of an expert"),
    WHOLE("model", "dense-layers", model.dense_layers, NULL, 0, 1024, KEPT, "first blocks with a dense MLP"),
    WHOLE("model", "vocab", model.V, NULL, 2, 1 << 24, KEPT, "vocabulary; where there is a tokenizer file, its size"),
    WHOLE("model", "groups", model.groups, NULL, 1, 4096, KEPT, "groups of experts"),
    WHOLE("model", "top-groups", model.top_groups, NULL, 1, 4096, KEPT, "groups a token may select from"),
    CHOICE("model", "score", model.score, NULL, "sigmoid|softmax", KEPT, "router's score"),
    WHOLE("model", "route-norm", model.route_norm, NULL, 0, 1, KEPT, "1: the gates of a token sum to route-scale"),
    NUMBER("model", "route-scale", model.route_scale, NULL, 0, 1e6, KEPT, "factor on the gates"),
    NUMBER("model", "rope-theta", model.rope_theta, NULL, 2, 1e12, FIXED, "base of the rotary frequencies"),
    WHOLE("model", "yarn", model.yarn, NULL, 0, 1, FIXED, "1: YaRN frequencies for long context"),
    // No options: --model or config.json of --init sets these, and the record has them.
    NUMBER("model", "rms-norm-eps", model.norm_eps, NULL, 1e-12, 1, KEPT, NULL),
    NUMBER("model", "yarn-factor", model.yarn_factor, NULL, 1, 1e6, FIXED, NULL),
    NUMBER("model", "yarn-mscale", model.yarn_mscale, NULL, 0, 100, FIXED, NULL),
    WHOLE("model", "yarn-original-len", model.yarn_original_len, NULL, 1, 1e9, FIXED, NULL),
    WHOLE("model", "mtp", model.mtp, "0", 0, 1, KEPT,
          "1: with an MTP module (multi-token prediction), a new one where --init lacks it"),

    // Use of an existing model.
    TEXT("use", "init", init, FREE_COMMON,
         "train on from the weights in this Hugging Face folder or run; give --lr too"),
    FLAG("use", "init-moments", init_moments, 1, FIXED,
         "with --init: begin a new stage with moments and options of the step in --init"),
    TEXT("use", "sample", sample, ONCE_COMMON, "no training: print a sample of the model in this folder or run"),
    TEXT("use", "evaluate", evaluate, ONCE_COMMON,
         "no training: loss of the model in this folder or run on --val and --eval"),

    // Data.
    TEXT("data", "train", train, FREE_COMMON, "training shards (glob), or several sets: GLOB:WEIGHT,GLOB:WEIGHT"),
    TEXT("data", "val", val, FREE_COMMON, "validation shards (glob)"),
    TEXT("data", "eval", eval, FREE, "multiple-choice questions (glob), from scripts/prepare_eval.py"),
    TEXT("data", "tokenizer", tokenizer, FREE,
         "tokenizer file; none: NAME_tokenizer.bin next to the shards, else bytes"),
    WHOLE("data", "seq-len", run.seq_len, "256", 1, 1 << 20, FIXED_COMMON, "tokens of a sequence"),
    WHOLE("data", "batch", run.batch, "8", 1, 1 << 20, FREE_COMMON, "sequences per rank and micro-step"),
    WHOLE("data", "tokens-per-step", run.tokens_per_step, "0", 0, BIG, FIXED_COMMON,
          "tokens of a step, all ranks; 0: one micro-step"),
    WHOLE("data", "seed", run.seed, "1", 0, BIG, FIXED_COMMON,
          "seed of the weights, and of the data order without --data-seed"),
    WHOLE("data", "data-seed", data_seed, "0", 0, BIG, FIXED, "seed of the data order; 0: --seed"),

    // Length of the run, and its outputs.
    WHOLE("run", "steps", run.steps, "1000", 1, 1e9, FREE_COMMON, "updates in all"),
    TEXT("run", "out", out, FREE_COMMON, "folder for log and checkpoints; none: nothing is kept"),
    FLAG("run", "resume", resume, 1, ONCE_COMMON, "go on from the newest good checkpoint in --out, with its options"),
    WHOLE("run", "save-every", save_every, "0", 0, 1e9, FREE_COMMON, "steps between checkpoints; 0: at the end only"),
    WHOLE("run", "keep", keep, "2", 1, 1e6, FREE, "newest checkpoints that stay"),
    WHOLE("run", "val-every", val_every, "100", 0, 1e9, FREE_COMMON,
          "steps between validations, and one at the end; 0: none"),
    WHOLE("run", "val-tokens", val_tokens, "65536", 1, BIG, FREE, "tokens of a validation, all ranks"),
    WHOLE("run", "eval-every", eval_every, "0", 0, 1e9, FREE, "steps between questions; 0: at the end only"),
    WHOLE("run", "sample-every", sample_every, "0", 0, 1e9, FREE_COMMON, "steps between samples; 0: none"),
    WHOLE("run", "sample-tokens", sample_tokens, "128", 1, 1e6, FREE, "tokens of a sample"),
    TEXT("run", "prompt", prompt, FREE_COMMON, "text that samples begin with, if tokens are bytes"),
    NUMBER("run", "temperature", temperature, "0.8", 0, 100, FREE, "temperature of samples; 0: the likeliest token"),
    CHOICE("run", "graph", run.graph, "auto", "auto|off", FREE, "auto: one GPU replays its steps as CUDA graphs"),
    FLAG("run", "dry-run", dry_run, 2, ONCE_COMMON,
         "print memory (exit code 1: too little), disk, time, and stop; all: also buffers"),
    WHOLE("run", "ranks", run.ranks, "0", 0, 1 << 20, ONCE,
          "with --dry-run: ranks to plan for; 0: those of mpirun or srun"),
    NUMBER("run", "gpu-memory", gpu_memory, "0", 0, 1e6, ONCE,
           "with --dry-run: plan the CUDA build for a GPU of that many GiB; 0: this build"),
    FLAG("run", "version", version, 1, ONCE, "print version, commit and build, and stop"),
    FLAG("run", "help", help, 2, ONCE_COMMON, "print the common options and stop (also -h); --help all: all options"),

    // How it learns.
    CHOICE("optimizer", "optimizer", run.optimizer, "muon", "adamw|muon", FREE_COMMON,
           "muon is for matrices; default with 16b, 236b, 671b and --init: adamw"),
    NUMBER("optimizer", "muon-lr", run.muon_lr, "2e-3", 0, 100, FIXED_COMMON,
           "peak learning rate of Muon; another with --model tiny (docs/model.md)"),
    WHOLE("optimizer", "muon-expert-steps", run.muon_expert_steps, "1", 1, 1000, FIXED,
          "every Nth step updates the experts, at N times the rate; 2 with small, medium"),
    NUMBER("optimizer", "lr", run.lr, "1e-3", 0, 100, FIXED_COMMON,
           "peak learning rate; others with 16b, 236b, 671b (docs/model.md)"),
    NUMBER("optimizer", "warmup", warmup, "0.05", 0, 1e9, FIXED_COMMON,
           "steps of linear warm-up; below 1: share of --steps"),
    CHOICE("optimizer", "schedule", run.schedule, "cosine", "cosine|wsd|linear|constant", FIXED_COMMON,
           "learning rate after the warm-up"),
    NUMBER("optimizer", "final-lr-frac", run.final_lr_frac, "0.1", 0, 1, FIXED, "last learning rate as a part of --lr"),
    NUMBER("optimizer", "weight-decay", run.weight_decay, "0.1", 0, 100, FIXED_COMMON, "weight decay of matrices"),
    NUMBER("optimizer", "beta1", run.beta1, "0.9", 0, 0.999999, KEPT, "decay of AdamW's first moments"),
    NUMBER("optimizer", "beta2", run.beta2, "0.95", 0, 0.999999, KEPT, "decay of AdamW's second moments"),
    CHOICE("optimizer", "moments", run.moments, "float32", "float32|bf16", KEPT,
           "type of AdamW's moments and Muon's momentum; bf16 with 16b, 236b, 671b"),
    NUMBER("optimizer", "clip", run.clip, "1", 0, 1e9, FIXED, "largest global gradient norm; 0: no clipping"),
    CHOICE("optimizer", "balance", run.balance, "quantile", "quantile|deepseek|none", KEPT_COMMON,
           "load balancing: quantile balancing, DeepSeek-V3's bias rule, or none"),
    NUMBER("optimizer", "bias-rate", run.bias_rate, "1e-3", 0, 100, FIXED,
           "step of the selection biases with --balance deepseek"),
    NUMBER("optimizer", "aux-loss", run.aux_loss, "1e-2", 0, 100, FIXED,
           "weight of the balance loss; softmax 1e-3; --balance deepseek 1e-4, none 0"),
    NUMBER("optimizer", "mtp-weight", run.mtp_weight, "0.3", 1e-3, 100, FIXED,
           "weight of the MTP loss in the first 0.67 of the steps; then 0.1"),

    // Parallelism.
    WHOLE("parallel", "ep", run.ep, "1", 1, DISPATCH_MAX_RANKS, FREE_COMMON, "ranks that share a set of experts"),
    CHOICE("parallel", "shard", run.shard, "none", "none|optimizer|grads|weights", FREE_COMMON,
           "FSDP shards nothing; the optimizer state; also gradients; also weights"),
    CHOICE("parallel", "dispatch", run.dispatch, "nccl", "auto|nccl|windows", FREE,
           "all-to-all by NCCL (CPU: MPI), or GPUs store into each other's memory"),
    NUMBER("parallel", "timeout", timeout, "600", 1, 1e6, FREE,
           "seconds that ranks wait for one another before the run ends"),

    // Which numbers are quantized: --precision sets all up to --linear-precision.
    CHOICE("precision", "precision", precision, "bf16", "bf16|mxfp8|nvfp4|mxfp4|mxfp8-exact|mxfp4-weights", FREE_COMMON,
           "sets the options from --expert-precision to --linear-precision, unless given"),
    CHOICE("precision", "expert-precision", run.expert_precision, NULL,
           "bf16|mxfp8|nvfp4|mxfp4|mxfp8-exact|mxfp4-weights", FIXED,
           "routed experts: bf16 (CPU: float32), fp8, or values rounded to a format"),
    CHOICE("precision", "dispatch-precision", run.dispatch_precision, NULL, "bf16|mxfp8", FIXED,
           "tokens on their way to the experts, also on the same rank"),
    CHOICE("precision", "combine-precision", run.combine_precision, NULL, "bf16|mxfp8", FIXED,
           "tokens on their way back from the experts"),
    CHOICE("precision", "wgrad-precision", run.wgrad_precision, NULL, "bf16|mxfp8|nvfp4|mxfp4", FIXED,
           "wgrad GEMMs of the routed experts and of layers with --linear-precision"),
    CHOICE("precision", "linear-precision", run.linear_precision, NULL, "bf16|mxfp8|nvfp4|mxfp4|mxfp8-exact", FIXED,
           "GEMMs of attention without Wkva, and of the dense and shared MLPs"),
    CHOICE("precision", "mx-scale", run.scale_rule, "rceil", "rceil|floor", FIXED,
           "rounding of the scales of MXFP8 and MXFP4 blocks"),
    WHOLE("precision", "mx-stats", run.stats_every, "0", 0, 1e9, FREE,
          "steps between quantization statistics in the log; 0: none"),

    // Memory: activation checkpointing, and capacity for uneven loads.
    CHOICE("memory", "recompute", run.recompute, "none", "none|moe|block", FREE_COMMON,
           "activation checkpointing: activations that backward computes again"),
    NUMBER("memory", "capacity", run.capacity, "1.25", 1, 1e6, FREE,
           "capacity factor with --ep: routed tokens to plan for, over the mean load"),

    // For debugging.
    FLAG("debugging", "force-balance", run.force_balance, 1, FIXED, "route round-robin, for benchmarks"),
    FLAG("debugging", "overfit", overfit, 1, FIXED, "train on the first step's tokens only"),
};
const int settings_count = sizeof(settings_table) / sizeof(settings_table[0]);
static_assert(sizeof(settings_table) / sizeof(settings_table[0]) <= SETTINGS_MOST, "Settings.given has all rows");

// clang-format off
// In the order of --model's choices. The last three are DeepSeek-V2-Lite, V2 and V3: sizes, and peak learning rates of
// AdamW, as published. Optimizers and types of moments are as measured (bench/RESULTS.md).
#define V2(scale, mscale) SCORE_SOFTMAX, 0, 0, scale, 1e-6, 10000, 0, 40, mscale, 4096
#define V3(scale) SCORE_SIGMOID, 1, 0, scale, 1e-6, 10000, 0, 40, 1, 4096
const Preset settings_presets[] = {
    //L     C    H  q_lora kv_lora nope rope v  dense_ffn, layers. E K shared F    V  mtp groups top_groups; the router.
    // Then lr, muon_lr, optimizer, expert_steps, bf16_moments.
    {{ 4,  128,   4,    0,     64,   32,  16,  32,   512,    1,   8, 2, 1,   128,    257, 0,   1,   1, V3(1)},
     1e-3, 12e-3, MUON, 1, false},    // tiny
    {{ 8,  512,   8,    0,    256,   64,  32,  64,  2048,    1,  32, 4, 1,   384,  50257, 0,   1,   1, V3(1)},
     1e-3, 2e-3, MUON, 2, false},     // small
    {{12, 1024,  16,    0,    512,   64,  32,  64,  4096,    1,  64, 6, 1,   512,  50257, 0,   1,   1, V3(1)},
     1e-3, 2e-3, MUON, 2, false},     // medium
    {{ 6,  256,  16,    0,    512,  128,  64, 128,  1024,    1,   8, 3, 2,   256,   2048, 0,   1,   1, V2(1, 0.707)},
     1e-3, 2e-3, MUON, 1, false},     // debug
    {{27, 2048,  16,    0,    512,  128,  64, 128, 10944,    1,  64, 6, 2,  1408, 102400, 0,   1,   1, V2(1, 0.707)},
     4.2e-4, 2e-3, ADAMW, 1, true},   // 16b
    {{60, 5120, 128, 1536,    512,  128,  64, 128, 12288,    1, 160, 6, 2,  1536, 102400, 0,   8,   3, V2(16, 1)},
     2.4e-4, 2e-3, ADAMW, 1, true},   // 236b
    {{61, 7168, 128, 1536,    512,  128,  64, 128, 18432,    3, 256, 8, 1,  2048, 129280, 0,   8,   4, V3(2.5)},
     2.2e-4, 2e-3, ADAMW, 1, true},   // 671b
};
// clang-format on

Settings settings_parse(int argc, char** argv) {
    Settings s = {.preset = 0};
    options_defaults(settings_table, settings_count, &s);
    options_parse(settings_table, settings_count, &s, s.given, argc, argv);
    return s;
}

// Sets the options of a --precision.
static void set_precisions(Settings* s, int64_t precision) {
    s->run.expert_precision = s->run.linear_precision = s->run.wgrad_precision = precision;
    const int mxfp8 = precision == FORMAT_MXFP8 || precision == FORMAT_MXFP8_EXACT;
    s->run.dispatch_precision = s->run.combine_precision = mxfp8 ? FORMAT_MXFP8 : FORMAT_BF16;
    if (mxfp8) s->run.wgrad_precision = FORMAT_MXFP8;
    if (precision == FORMAT_MXFP4_WEIGHTS) s->run.linear_precision = s->run.wgrad_precision = FORMAT_BF16;
}

// int64_t and double are both 8 bytes.
void settings_preset(Settings* s, int64_t precision) {
    Settings preset = {.model = settings_presets[s->preset].model};
    set_precisions(&preset, precision);
    for (int i = 0; i < settings_count; i++) {
        size_t at = settings_table[i].offset;
        // A row without a default of its own takes that of --model or --precision.
        if (!settings_table[i].initial && !s->given[i]) memcpy((char*)s + at, (char*)&preset + at, 8);
    }
}

const char* settings_folder(const Settings* s, const char** option) {
    const char* const folders[3][2] = {{"init", s->init}, {"sample", s->sample}, {"evaluate", s->evaluate}};
    const char* found = NULL;
    for (int i = 0; i < 3; i++) {
        if (!*folders[i][1]) continue;
        if (found) die(EXIT_USAGE, "--%s and --%s do not go together", *option, folders[i][0]);
        *option = folders[i][0];
        found = folders[i][1];
    }
    return found;
}

void settings_free(Settings* s) { options_free(settings_table, settings_count, s); }

double settings_warmup(const Settings* s) { return s->warmup < 1 ? ceil(s->warmup * (double)s->run.steps) : s->warmup; }
