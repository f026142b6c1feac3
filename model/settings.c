// The table of options, the presets, and what must hold between options: a check for each subject, in the order in
// which settings_read calls them. Each ends the run with the names and values of the options that do not fit.
#include "model/settings.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/shards.h"
#include "data/tokenizer.h"
#include "device/check.h"
#include "model/record.h"
#include "moe/moe.h"
#include "parallel/sharding.h"

// The table's rows, by type: group, name, field of Settings, default (NULL: by the group's first option), range or
// choices, what it is to a resumed run, help. Texts and flags are empty and off by default.
#define FREE OPTION_FREE
#define FIXED OPTION_FIXED
#define ONCE OPTION_ONCE
#define WHOLE(group, name, field, initial, min, max, scope, help)                                                      \
    { group, name, OPTION_INT, offsetof(Settings, field), initial, min, max, NULL, scope, help }
#define NUMBER(group, name, field, initial, min, max, scope, help)                                                     \
    { group, name, OPTION_FLOAT, offsetof(Settings, field), initial, min, max, NULL, scope, help }
#define CHOICE(group, name, field, initial, choices, scope, help)                                                      \
    { group, name, OPTION_CHOICE, offsetof(Settings, field), initial, 0, 0, choices, scope, help }
#define TEXT(group, name, field, help)                                                                                 \
    { group, name, OPTION_TEXT, offsetof(Settings, field), "", 0, 0, NULL, FREE, help }
#define FLAG(group, name, field, scope, help)                                                                          \
    { group, name, OPTION_FLAG, offsetof(Settings, field), "0", 0, 1, NULL, scope, help }
#define BIG 1e12

const Option settings_table[] = {
    // What a model is: --model sets all that follow.
    CHOICE("model", "model", preset, "tiny", "tiny|small|debug|16b|236b|671b", FIXED,
           "preset for the options of this group"),
    WHOLE("model", "layers", model.L, NULL, 1, 1024, FIXED, "blocks"),
    WHOLE("model", "dim", model.C, NULL, 1, 1 << 14, FIXED, "model width"),
    WHOLE("model", "heads", model.H, NULL, 1, 4096, FIXED, "attention heads"),
    WHOLE("model", "q-lora", model.q_lora, NULL, 0, 1 << 14, FIXED, "rank of the query latent, 0 for none"),
    WHOLE("model", "kv-lora", model.kv_lora, NULL, 1, 1 << 14, FIXED, "rank of the key-value latent"),
    WHOLE("model", "nope-dim", model.nope, NULL, 1, 4096, FIXED, "head size without position"),
    WHOLE("model", "rope-dim", model.rope, NULL, 2, 4096, FIXED, "head size with rotary position, even"),
    WHOLE("model", "v-dim", model.v, NULL, 1, 4096, FIXED, "head size of values"),
    WHOLE("model", "dense-ffn", model.dense_ffn, NULL, 1, 1 << 21, FIXED, "hidden width of the dense MLP"),
    WHOLE("model", "experts", model.E, NULL, 1, 4096, FIXED, "routed experts"),
    WHOLE("model", "top-k", model.K, NULL, 1, 64, FIXED, "routed experts a token"),
    WHOLE("model", "shared-experts", model.shared, NULL, 0, 64, FIXED, "shared experts (one MLP of that many widths)"),
    WHOLE("model", "expert-ffn", model.F, NULL, 1, 1 << 20, FIXED, "hidden width of an expert"),
    WHOLE("model", "dense-layers", model.dense_layers, NULL, 0, 1024, FIXED, "first blocks with a dense MLP"),
    WHOLE("model", "vocab", model.V, NULL, 2, 1 << 24, FIXED, "vocabulary; where there is a tokenizer file, its size"),
    WHOLE("model", "groups", model.groups, NULL, 1, 4096, FIXED, "groups of experts"),
    WHOLE("model", "top-groups", model.top_groups, NULL, 1, 4096, FIXED, "groups a token may choose from"),
    CHOICE("model", "score", model.score, NULL, "sigmoid|softmax", FIXED, "router's score"),
    WHOLE("model", "route-norm", model.route_norm, NULL, 0, 1, FIXED, "1: a token's gates sum to route-scale"),
    NUMBER("model", "route-scale", model.route_scale, NULL, 0, 1e6, FIXED, "factor on the gates"),
    NUMBER("model", "rope-theta", model.rope_theta, NULL, 2, 1e12, FIXED, "base of the rotary frequencies"),
    WHOLE("model", "yarn", model.yarn, NULL, 0, 1, FIXED, "1: YaRN frequencies for long context"),
    NUMBER("model", "yarn-factor", model.yarn_factor, NULL, 1, 1e6, FIXED, "YaRN's context extension"),
    NUMBER("model", "yarn-mscale", model.yarn_mscale, NULL, 0, 100, FIXED, "YaRN's softmax temperature"),
    NUMBER("model", "yarn-original-len", model.yarn_original_len, NULL, 1, 1e9, FIXED,
           "context length before extension"),

    // What it learns from.
    TEXT("data", "train", train, "training shards (glob)"),
    TEXT("data", "val", val, "validation shards (glob)"),
    TEXT("data", "tokenizer", tokenizer,
         "tokenizer file to decode samples; none: NAME_tokenizer.bin beside NAME_train_*.bin, or else bytes"),
    WHOLE("data", "seq-len", seq_len, "256", 1, 1 << 24, FIXED, "tokens of a sequence"),
    WHOLE("data", "batch", batch, "8", 1, 1 << 20, FREE, "sequences per rank and micro-step"),
    WHOLE("data", "tokens-per-step", tokens_per_step, "0", 0, BIG, FIXED,
          "tokens of a step, all ranks; 0: one micro-step"),
    WHOLE("data", "seed", seed, "1", 0, BIG, FIXED, "of the weights and of the order of data"),

    // How long it runs, and what it leaves.
    WHOLE("run", "steps", steps, "1000", 1, 1e9, FREE, "updates in all"),
    TEXT("run", "out", out, "folder for log and checkpoints; none: nothing is kept"),
    FLAG("run", "resume", resume, ONCE,
         "go on from the newest good checkpoint in --out; options not given are as it was made with"),
    WHOLE("run", "save-every", save_every, "0", 0, 1e9, FREE, "steps between checkpoints; 0: at the end only"),
    WHOLE("run", "keep", keep, "2", 1, 1e6, FREE, "checkpoints that stay"),
    WHOLE("run", "val-every", val_every, "100", 0, 1e9, FREE, "steps between validations, and one at the end; 0: none"),
    WHOLE("run", "val-tokens", val_tokens, "65536", 1, BIG, FREE, "tokens of a validation, all ranks"),
    WHOLE("run", "sample-every", sample_every, "0", 0, 1e9, FREE, "steps between samples; 0: none"),
    WHOLE("run", "sample-tokens", sample_tokens, "128", 1, 1e6, FREE, "tokens of a sample"),
    TEXT("run", "prompt", prompt, "text that samples begin with"),
    NUMBER("run", "temperature", temperature, "0.8", 0, 100, FREE, "of sampling; 0: the likeliest token"),
    WHOLE("run", "sample-top-k", sample_top_k, "50", 0, 1e9, FREE, "sample among that many likeliest; 0: all"),
    FLAG("run", "dry-run", dry_run, ONCE, "print parameters, FLOPs and memory, and stop"),
    WHOLE("run", "ranks", ranks, "0", 0, 1 << 20, ONCE,
          "with --dry-run: ranks to plan for; a run has those that mpirun or srun starts"),
    FLAG("run", "version", version, ONCE, "print commit and build, and stop"),
    FLAG("run", "help", help, ONCE, "print this and stop (also -h)"),

    // How it learns.
    NUMBER("optimizer", "lr", lr, "1e-3", 0, 100, FIXED, "peak learning rate"),
    WHOLE("optimizer", "warmup", warmup, "100", 0, 1e9, FIXED, "steps of linear warm-up"),
    CHOICE("optimizer", "schedule", schedule, "cosine", "cosine|wsd|linear|constant", FIXED, "after the warm-up"),
    NUMBER("optimizer", "final-lr-frac", final_lr_frac, "0.1", 0, 1, FIXED, "last learning rate as a part of --lr"),
    NUMBER("optimizer", "weight-decay", weight_decay, "0.1", 0, 100, FIXED, "on matrices"),
    NUMBER("optimizer", "beta1", beta1, "0.9", 0, 0.999999, FIXED, "AdamW"),
    NUMBER("optimizer", "beta2", beta2, "0.95", 0, 0.999999, FIXED, "AdamW"),
    NUMBER("optimizer", "eps", eps, "1e-8", 1e-30, 1, FIXED, "AdamW"),
    NUMBER("optimizer", "clip", clip, "1", 0, 1e9, FIXED, "largest global gradient norm; 0: no clipping"),
    NUMBER("optimizer", "bias-rate", bias_rate, "1e-3", 0, 100, FIXED, "step of the router's balance bias"),
    NUMBER("optimizer", "aux-loss", aux_loss, "0", 0, 100, FIXED, "weight of the sequence-wise balance loss"),

    // How it lies on its ranks.
    WHOLE("parallel", "ep", ep, "1", 1, DISPATCH_MAX_RANKS, FREE, "ranks that share a set of experts"),
    CHOICE("parallel", "shard", shard, "none", "none|optimizer|grads|weights", FREE,
           "what ranks keep in parts: nothing; optimizer state; gradients too; weights too"),
    NUMBER("parallel", "timeout", timeout, "600", 1, 1e6, FREE,
           "seconds that ranks wait for one another before the run ends"),

    // Which numbers are MXFP8: --precision sets all up to --mx-gemm.
    CHOICE("precision", "precision", precision, "bf16", "bf16|mxfp8|mxfp8-exact", FREE,
           "sets the options from here to --mx-gemm; one that is given as well wins"),
    CHOICE("precision", "expert-precision", expert_precision, NULL, "bf16|mxfp8", FIXED,
           "of the routed experts' products (bf16 is float32 in the CPU build)"),
    CHOICE("precision", "dispatch-precision", dispatch_precision, NULL, "bf16|mxfp8", FIXED,
           "of what goes to the experts, also where they are on the same rank"),
    CHOICE("precision", "combine-precision", combine_precision, NULL, "bf16|mxfp8", FIXED,
           "of what comes back from them"),
    CHOICE("precision", "wgrad-precision", wgrad_precision, NULL, "bf16|mxfp8", FIXED,
           "of the operands of the expert weights' gradients"),
    CHOICE("precision", "linear-precision", linear_precision, NULL, "bf16|mxfp8", FIXED,
           "of the products of attention but Wkva's, and of the dense and shared MLPs"),
    CHOICE("precision", "mx-gemm", mx_fast, NULL, "exact|fast", FIXED,
           "MXFP8 products in bf16, or on the bytes with scales aligned to 128"),
    CHOICE("precision", "mx-scale", mx_scale, "rceil", "rceil|floor", FIXED, "how MXFP8 blocks are scaled"),
    WHOLE("precision", "mx-stats", mx_stats, "0", 0, 1e9, FREE,
          "steps between statistics of the casts to MXFP8 in the log; 0: none"),

    // What is computed twice to spare memory, and room for uneven loads.
    CHOICE("memory", "recompute", recompute, "none", "none|moe|block", FREE,
           "activations that backward computes again"),
    NUMBER("memory", "capacity", capacity, "1.25", 1, 1e6, FREE,
           "room for routed tokens over the mean load, with --ep; more is made if needed"),

    // For debugging.
    FLAG("debugging", "force-balance", force_balance, FIXED, "route round-robin"),
    FLAG("debugging", "overfit", overfit, FIXED, "train on the first step's tokens for ever"),
};
const int settings_count = sizeof(settings_table) / sizeof(settings_table[0]);

// The row of the field at `offset`.
static int row(size_t offset) {
    int i = 0;
    while (settings_table[i].offset != offset) i++;
    return i;
}

// clang-format off
// The models, in the order of --model's choices. The last three are sized as DeepSeek-V2-Lite, V2 and V3.
#define POSITION(mscale) \
    .rope_theta = 10000, .yarn = 0, .yarn_factor = 40, .yarn_mscale = mscale, .yarn_original_len = 4096
static const ModelConfig presets[] = {
    // tiny
    {.L = 4, .C = 128, .H = 4, .q_lora = 0, .kv_lora = 64, .nope = 32, .rope = 16, .v = 32,
     .dense_ffn = 512, .dense_layers = 1, .E = 8, .K = 2, .shared = 1, .F = 128, .V = 257,
     .groups = 1, .top_groups = 1, .score = SCORE_SIGMOID, .route_norm = 1, .route_scale = 1, POSITION(1)},
    // small
    {.L = 8, .C = 512, .H = 8, .q_lora = 0, .kv_lora = 256, .nope = 64, .rope = 32, .v = 64,
     .dense_ffn = 2048, .dense_layers = 1, .E = 32, .K = 4, .shared = 1, .F = 384, .V = 50257,
     .groups = 1, .top_groups = 1, .score = SCORE_SIGMOID, .route_norm = 1, .route_scale = 1, POSITION(1)},
    // debug
    {.L = 6, .C = 256, .H = 16, .q_lora = 0, .kv_lora = 512, .nope = 128, .rope = 64, .v = 128,
     .dense_ffn = 1024, .dense_layers = 1, .E = 8, .K = 3, .shared = 2, .F = 256, .V = 2048,
     .groups = 1, .top_groups = 1, .score = SCORE_SOFTMAX, .route_norm = 0, .route_scale = 1, POSITION(0.707)},
    // 16b
    {.L = 27, .C = 2048, .H = 16, .q_lora = 0, .kv_lora = 512, .nope = 128, .rope = 64, .v = 128,
     .dense_ffn = 10944, .dense_layers = 1, .E = 64, .K = 6, .shared = 2, .F = 1408, .V = 102400,
     .groups = 1, .top_groups = 1, .score = SCORE_SOFTMAX, .route_norm = 0, .route_scale = 1, POSITION(0.707)},
    // 236b
    {.L = 60, .C = 5120, .H = 128, .q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64, .v = 128,
     .dense_ffn = 12288, .dense_layers = 1, .E = 160, .K = 6, .shared = 2, .F = 1536, .V = 102400,
     .groups = 8, .top_groups = 3, .score = SCORE_SOFTMAX, .route_norm = 0, .route_scale = 16, POSITION(1)},
    // 671b
    {.L = 61, .C = 7168, .H = 128, .q_lora = 1536, .kv_lora = 512, .nope = 128, .rope = 64, .v = 128,
     .dense_ffn = 18432, .dense_layers = 3, .E = 256, .K = 8, .shared = 1, .F = 2048, .V = 129280,
     .groups = 8, .top_groups = 4, .score = SCORE_SIGMOID, .route_norm = 1, .route_scale = 2.5, POSITION(1)},
};
// clang-format on

// What each --precision sets, in the order of its choices. What a row does not name is bf16, and --mx-gemm exact.
static const Settings modes[] = {
    {.expert_precision = PRECISION_BF16},
    {.expert_precision = PRECISION_MXFP8, .dispatch_precision = PRECISION_MXFP8, .mx_fast = 1},
    {.expert_precision = PRECISION_MXFP8, .dispatch_precision = PRECISION_MXFP8, .mx_fast = 0},
};

// int64_t and double are both 8 bytes.
void settings_preset(Settings* s, const char* given, int64_t precision) {
    Settings preset = modes[precision];
    preset.model = presets[s->preset];
    for (int i = 0; i < settings_count; i++) {
        size_t at = settings_table[i].offset;
        if (!settings_table[i].initial && !given[i]) memcpy((char*)s + at, (char*)&preset + at, 8);
    }
}

// What must hold between the options of a model.
static void check_model(const ModelConfig* m) {
    if (m->rope % 2) die(EXIT_USAGE, "--rope-dim %ld is odd: rotary position turns pairs", m->rope);
    if (m->dense_layers > m->L) die(EXIT_USAGE, "--dense-layers %ld is more than --layers %ld", m->dense_layers, m->L);
    if (m->K > m->E) die(EXIT_USAGE, "--top-k %ld is more than --experts %ld", m->K, m->E);
    if (m->E % m->groups) die(EXIT_USAGE, "--experts %ld is not a multiple of --groups %ld", m->E, m->groups);
    if (m->top_groups > m->groups)
        die(EXIT_USAGE, "--top-groups %ld is more than --groups %ld", m->top_groups, m->groups);
    if (m->K > m->top_groups * (m->E / m->groups))
        die(EXIT_USAGE, "--top-k %ld is more than the %ld experts of --top-groups %ld", m->K,
            m->top_groups * (m->E / m->groups), m->top_groups);
}

// A width, and the options that make it.
typedef struct Width {
    const char* options;
    int64_t width;
} Width;

static void check_multiples(const Width* widths, size_t count, int64_t of, const char* who) {
    for (size_t i = 0; i < count; i++)
        if (widths[i].width % of)
            die(EXIT_USAGE, "%s %ld is not a multiple of %ld, which %s needs", widths[i].options, widths[i].width, of,
                who);
}

// What the kernels take: rows of a multiple of 16 bytes, and the head sizes that the attention kernels are written for.
static void check_cuda_model(const ModelConfig* m) {
    const Width widths[] = {{"--dim", m->C},
                            {"--q-lora", m->q_lora},
                            {"--kv-lora", m->kv_lora},
                            {"--expert-ffn", m->F},
                            {"--dense-ffn", m->dense_ffn}};
    check_multiples(widths, sizeof(widths) / sizeof(widths[0]), 8, "the CUDA build");
    int64_t r = m->rope;
    if ((r != 64 && r != 32 && r != 16) || m->nope != 2 * r || m->v != 2 * r)
        die(EXIT_USAGE,
            "--nope-dim %ld --rope-dim %ld --v-dim %ld: the CUDA build takes 128/64/128, 64/32/64 and 32/16/32",
            m->nope, m->rope, m->v);
}

int64_t settings_micro_tokens(const Settings* s) { return s->ranks * s->batch * s->seq_len; }

// Options that are in their ranges can together ask for more than can be counted. Sizes are rounded up freely, in
// double, which does not overflow. 1e15 numbers leave int64 room for the bytes of several hundred copies. Rows and
// pieces of work are int32 in kernels and CBLAS. A grid has at most 65535 times 128 columns of a hidden layer, gate and
// up.
static void check_sizes(const Settings* s) {
    // Widths, tokens of a rank and of all, and rows that may be routed to a rank's experts.
    const ModelConfig* m = &s->model;
    const double L = (double)m->L, C = (double)m->C, H = (double)m->H, q_lora = (double)m->q_lora;
    const double latent = (double)(m->kv_lora + m->rope), head = (double)(m->nope + m->rope + m->v);
    const double hidden = (double)max_i64(m->dense_ffn, m->shared * m->F), E = (double)m->E, F = (double)m->F;
    const double tokens = (double)s->batch * (double)s->seq_len, micro = tokens * (double)s->ranks;
    const double spread = s->ep > 1 ? fmax((double)s->ep, s->capacity) : 1;
    const double rows = tokens * (double)m->K * spread + 128 * (E + 1);

    // Numbers of a block: its matrices, and what it keeps of a token.
    const double matrices = (C + q_lora + latent) * (C + H * head) + 3 * C * (hidden + E * F) + E * C;
    const double widths = C + q_lora + latent + H * head + hidden + E;

    const struct {
        const char *what, *options;
        double size, most;
    } sizes[] = {
        {"tokens a micro-step", "ranks x --batch x --seq-len", micro, BIG},
        {"tokens in all", "--steps x --tokens-per-step", (double)s->steps * fmax(micro, (double)s->tokens_per_step),
         1e18},
        {"rows of the experts", "--batch x --seq-len x --top-k, and with --ep x --ep or --capacity,", rows, INT32_MAX},
        {"pieces of attention", "--batch x --heads x --seq-len / 128", tokens / 128 * H + (double)s->batch * H,
         1 << 30},
        {"hidden columns", "--shared-experts x --expert-ffn", (double)(m->shared * m->F), 1 << 21},
        {"parameters", "--layers, --dim, --heads, --experts, --expert-ffn, --dense-ffn and --vocab",
         L * matrices + 2 * C * (double)m->V, 1e15},
        {"activations of a rank", "--batch, --seq-len, --layers, --dim, --heads, --top-k, --expert-ffn and --dense-ffn",
         L * (tokens * widths + rows * (C + F)), 1e15},
    };

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        if (sizes[i].size > sizes[i].most)
            die(EXIT_USAGE, "%s make %.3g %s: at most %.3g are possible", sizes[i].options, sizes[i].size,
                sizes[i].what, sizes[i].most);
}

// Every group of --ep ranks is whole, and every rank of it has as many experts.
static void check_layout(const Settings* s) {
    if (s->ranks % s->ep)
        die(EXIT_USAGE, "--ep %ld does not divide the %ld rank%s of the run", s->ep, s->ranks,
            s->ranks == 1 ? "" : "s");
    if (s->model.E % s->ep) die(EXIT_USAGE, "--ep %ld does not divide --experts %ld", s->ep, s->model.E);
}

// Every width that MXFP8 products contract over is made of blocks of 32. Forward contracts over a matrix' columns,
// dgrad over its rows. A width that no such product has counts as 0.
static void check_precision(const Settings* s) {
    const ModelConfig* m = &s->model;
    const int linear = s->linear_precision == PRECISION_MXFP8, expert = s->expert_precision || s->wgrad_precision;
    const int dense = linear && m->dense_layers > 0, shared = linear && m->dense_layers < m->L;
    const int any = linear || expert || s->dispatch_precision || s->combine_precision;
    const Width widths[] = {{"--dim", any * m->C},
                            {"--expert-ffn", expert * m->F},
                            {"--q-lora", linear * m->q_lora},
                            {"--kv-lora", linear * m->kv_lora},
                            {"--heads x (--nope-dim + --rope-dim) =", linear * m->H * (m->nope + m->rope)},
                            {"--heads x (--nope-dim + --v-dim) =", linear * m->H * (m->nope + m->v)},
                            {"--heads x --v-dim =", linear * m->H * m->v},
                            {"--dense-ffn", dense * m->dense_ffn},
                            {"--shared-experts x --expert-ffn =", shared * m->shared * m->F}};
    check_multiples(widths, sizeof(widths) / sizeof(widths[0]), MX_BLOCK, "MXFP8");
}

// --mx-stats measures casts, so there must be some.
static void check_stats(const Settings* s) {
    const int moe = s->model.dense_layers < s->model.L, experts = s->expert_precision || s->dispatch_precision;
    if (s->mx_stats && !s->linear_precision && !(moe && experts))
        die(EXIT_USAGE,
            "--mx-stats %ld: nothing that it measures is MXFP8; it goes with --linear-precision mxfp8 or, where there "
            "is a MoE block, --expert-precision mxfp8 or --dispatch-precision mxfp8",
            s->mx_stats);
}

// A step is a whole number of micro-steps, and what the run is to write has a place.
static void check_run(const Settings* s) {
    int64_t micro = settings_micro_tokens(s);
    if (s->tokens_per_step % micro)
        die(EXIT_USAGE,
            "--tokens-per-step %ld is not a multiple of %ld ranks x --batch %ld x --seq-len %ld = %ld tokens a "
            "micro-step",
            s->tokens_per_step, s->ranks, s->batch, s->seq_len, micro);

    // What is allowed, and hardly meant.
    if (s->warmup > s->steps && s->schedule != SCHEDULE_CONSTANT)
        warn("--warmup %ld is longer than --steps %ld: the learning rate never reaches --lr", s->warmup, s->steps);
    if (s->model.K == 1 && s->model.route_norm && s->model.dense_layers < s->model.L)
        warn("--top-k 1 --route-norm 1: every gate is --route-scale, so the router gets %s; --route-norm 0 helps",
             s->aux_loss > 0 ? "a gradient from --aux-loss alone" : "no gradient");

    if (s->dry_run) return;
    if (!*s->train)
        die(EXIT_USAGE, "--train is missing: name the training shards, e.g. --train 'corpus/text_train_*.bin'");
    if (s->resume && !*s->out) die(EXIT_USAGE, "--resume needs --out: the folder to resume from");
    if (s->mx_stats && !*s->out) die(EXIT_USAGE, "--mx-stats needs --out: the statistics go into its log");
    if (s->save_every && !*s->out) die(EXIT_USAGE, "--save-every needs --out: the folder to save into");
}

char* settings_resumed(int argc, char** argv) {
    Settings s = {.preset = 0};
    char* given = (char*)host_alloc((size_t)settings_count);
    options_defaults(settings_table, settings_count, &s);
    options_parse(settings_table, settings_count, &s, given, argc, argv);
    int asks = s.help || s.version;
    char* out = s.resume && *s.out && !asks ? host_strdup(s.out) : NULL;
    free(given);
    settings_free(&s);
    return out;
}

// The tokenizer beside the shards, and the vocabulary of the tokenizer, each where it is not given and no record says
// it. Shards that are given anew may have taken their tokenizer with them.
static void find_tokenizer(Settings* s, const char* given, int recorded) {
    if (!given[row(offsetof(Settings, tokenizer))] && (!recorded || given[row(offsetof(Settings, train))])) {
        char* beside = shards_tokenizer(s->train);
        if (beside) free(s->tokenizer), s->tokenizer = beside;
    }
    if (!*s->tokenizer || recorded || given[row(offsetof(Settings, model.V))]) return;
    Tokenizer* tokenizer = tokenizer_open(s->tokenizer);
    s->model.V = tokenizer_size(tokenizer);
    tokenizer_close(tokenizer);
}

Settings settings_read(int argc, char** argv, int ranks, const Json* record) {
    // The command line over the record over the presets over the defaults.
    Settings s = {.preset = 0};
    char* given = (char*)host_alloc((size_t)settings_count);
    options_defaults(settings_table, settings_count, &s);
    options_parse(settings_table, settings_count, &s, given, argc, argv);
    settings_preset(&s, given, s.precision);
    if (s.help) options_help(settings_table, settings_count, "train_moe");
    if (record && !s.help) record_recall(record, &s, given);
    if (!s.help && !s.version) find_tokenizer(&s, given, record != NULL);
    free(given);
    if (s.help || s.version) return s;

    // What must fit together.
    if (s.ranks && !s.dry_run)
        die(EXIT_USAGE, "--ranks is for --dry-run; start %ld ranks with mpirun -np %ld", s.ranks, s.ranks);
    if (!s.ranks) s.ranks = ranks;
    check_sizes(&s);
    if (s.tokens_per_step == 0) s.tokens_per_step = settings_micro_tokens(&s);
    if (record) record_check(record, &s);
    check_model(&s.model);
    if (BACKEND == BACKEND_CUDA) check_cuda_model(&s.model);
    check_layout(&s);
    check_precision(&s);
    check_stats(&s);
    check_run(&s);
    return s;
}

void settings_free(Settings* s) { options_free(settings_table, settings_count, s); }

int64_t config_vocab_padded(const ModelConfig* m) { return (m->V + 127) / 128 * 128; }

RopeConfig config_rope(const ModelConfig* m) {
    RopeConfig rope = {.dim = (int)m->rope,
                       .theta = m->rope_theta,
                       .yarn = (int)m->yarn,
                       .factor = m->yarn_factor,
                       .mscale = m->yarn_mscale,
                       .original_len = m->yarn_original_len};
    return rope;
}

double config_softmax_scale(const ModelConfig* m) {
    RopeConfig rope = config_rope(m);
    double mscale = rope_mscale(&rope);
    return mscale * mscale / sqrt((double)(m->nope + m->rope));
}

double settings_lr(const Settings* s, int64_t step) {
    // The way up, then how much of the rest is left.
    if (step <= s->warmup) return s->lr * (double)step / (double)s->warmup;
    double left = s->steps > s->warmup ? fmax((double)(s->steps - step) / (double)(s->steps - s->warmup), 0) : 0;

    double share = 1;  // of the way from final_lr_frac to 1
    switch (s->schedule) {
        case SCHEDULE_COSINE: share = 0.5 - 0.5 * cos(3.14159265358979323846 * left); break;
        case SCHEDULE_WSD: share = left < 0.2 ? left / 0.2 : 1; break;
        case SCHEDULE_LINEAR: share = left; break;
    }
    return s->lr * (s->final_lr_frac + (1 - s->final_lr_frac) * share);
}
