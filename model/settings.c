#include "model/settings.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "moe/moe.h"
#include "parallel/sharding.h"

#define AT(field) offsetof(Settings, field)
#define BIG 1e12

// group, name, type, offset, default, min, max, choices, fixed on resume, help
const Option settings_table[] = {
    {"model", "model", OPTION_CHOICE, AT(preset), "tiny", 0, 0, "tiny|small|debug|16b|236b|671b", 1,
     "preset for the options of this group"},
    {"model", "layers", OPTION_INT, AT(model.L), NULL, 1, 1024, NULL, 1, "blocks"},
    {"model", "dim", OPTION_INT, AT(model.C), NULL, 1, 1 << 20, NULL, 1, "model width"},
    {"model", "heads", OPTION_INT, AT(model.H), NULL, 1, 4096, NULL, 1, "attention heads"},
    {"model", "q-lora", OPTION_INT, AT(model.q_lora), NULL, 0, 1 << 20, NULL, 1,
     "rank of the query latent, 0 for none"},
    {"model", "kv-lora", OPTION_INT, AT(model.kv_lora), NULL, 1, 1 << 20, NULL, 1, "rank of the key-value latent"},
    {"model", "nope-dim", OPTION_INT, AT(model.nope), NULL, 1, 4096, NULL, 1, "head size without position"},
    {"model", "rope-dim", OPTION_INT, AT(model.rope), NULL, 2, 4096, NULL, 1, "head size with rotary position, even"},
    {"model", "v-dim", OPTION_INT, AT(model.v), NULL, 1, 4096, NULL, 1, "head size of values"},
    {"model", "dense-ffn", OPTION_INT, AT(model.dense_ffn), NULL, 1, 1 << 21, NULL, 1, "hidden width of the dense MLP"},
    {"model", "experts", OPTION_INT, AT(model.E), NULL, 1, 4096, NULL, 1, "routed experts"},
    {"model", "top-k", OPTION_INT, AT(model.K), NULL, 1, 64, NULL, 1, "routed experts a token"},
    {"model", "shared-experts", OPTION_INT, AT(model.shared), NULL, 0, 64, NULL, 1,
     "shared experts (one MLP of that many widths)"},
    {"model", "expert-ffn", OPTION_INT, AT(model.F), NULL, 1, 1 << 20, NULL, 1, "hidden width of an expert"},
    {"model", "dense-layers", OPTION_INT, AT(model.dense_layers), NULL, 0, 1024, NULL, 1,
     "first blocks with a dense MLP"},
    {"model", "vocab", OPTION_INT, AT(model.V), NULL, 2, 1 << 24, NULL, 1, "vocabulary"},
    {"model", "groups", OPTION_INT, AT(model.groups), NULL, 1, 4096, NULL, 1, "groups of experts"},
    {"model", "top-groups", OPTION_INT, AT(model.top_groups), NULL, 1, 4096, NULL, 1, "groups a token may choose from"},
    {"model", "score", OPTION_CHOICE, AT(model.score), NULL, 0, 0, "sigmoid|softmax", 1, "router's score"},
    {"model", "route-norm", OPTION_INT, AT(model.route_norm), NULL, 0, 1, NULL, 1,
     "1: a token's gates sum to route-scale"},
    {"model", "route-scale", OPTION_FLOAT, AT(model.route_scale), NULL, 0, 1e6, NULL, 1, "factor on the gates"},
    {"model", "rope-theta", OPTION_FLOAT, AT(model.rope_theta), NULL, 2, 1e12, NULL, 1,
     "base of the rotary frequencies"},
    {"model", "yarn", OPTION_INT, AT(model.yarn), NULL, 0, 1, NULL, 1, "1: YaRN frequencies for long context"},
    {"model", "yarn-factor", OPTION_FLOAT, AT(model.yarn_factor), NULL, 1, 1e6, NULL, 1, "YaRN's context extension"},
    {"model", "yarn-mscale", OPTION_FLOAT, AT(model.yarn_mscale), NULL, 0, 100, NULL, 1, "YaRN's softmax temperature"},
    {"model", "yarn-original-len", OPTION_FLOAT, AT(model.yarn_original_len), NULL, 1, 1e9, NULL, 1,
     "context length before extension"},

    {"data", "train", OPTION_TEXT, AT(train), "", 0, 0, NULL, 0, "training shards (glob)"},
    {"data", "val", OPTION_TEXT, AT(val), "", 0, 0, NULL, 0, "validation shards (glob)"},
    {"data", "tokenizer", OPTION_TEXT, AT(tokenizer), "", 0, 0, NULL, 0,
     "tokenizer file to decode samples; none: bytes"},
    {"data", "seq-len", OPTION_INT, AT(seq_len), "256", 1, 1 << 24, NULL, 1, "tokens of a sequence"},
    {"data", "batch", OPTION_INT, AT(batch), "8", 1, 1 << 20, NULL, 0, "sequences per rank and micro-step"},
    {"data", "tokens-per-step", OPTION_INT, AT(tokens_per_step), "0", 0, BIG, NULL, 1,
     "tokens of a step, all ranks; 0: one micro-step"},
    {"data", "seed", OPTION_INT, AT(seed), "1", 0, BIG, NULL, 1, "of the weights and of the order of data"},

    {"run", "steps", OPTION_INT, AT(steps), "1000", 1, 1e9, NULL, 0, "updates in all"},
    {"run", "out", OPTION_TEXT, AT(out), "", 0, 0, NULL, 0, "folder for log and checkpoints; none: nothing is kept"},
    {"run", "resume", OPTION_FLAG, AT(resume), "0", 0, 1, NULL, 0, "go on from the newest good checkpoint in --out"},
    {"run", "save-every", OPTION_INT, AT(save_every), "0", 0, 1e9, NULL, 0,
     "steps between checkpoints; 0: at the end only"},
    {"run", "keep", OPTION_INT, AT(keep), "2", 1, 1e6, NULL, 0, "checkpoints that stay"},
    {"run", "val-every", OPTION_INT, AT(val_every), "100", 1, 1e9, NULL, 0,
     "steps between validations (and one at the end)"},
    {"run", "val-tokens", OPTION_INT, AT(val_tokens), "65536", 1, BIG, NULL, 0, "tokens of a validation, all ranks"},
    {"run", "sample-every", OPTION_INT, AT(sample_every), "0", 0, 1e9, NULL, 0, "steps between samples; 0: none"},
    {"run", "sample-tokens", OPTION_INT, AT(sample_tokens), "128", 1, 1e6, NULL, 0, "tokens of a sample"},
    {"run", "prompt", OPTION_TEXT, AT(prompt), "", 0, 0, NULL, 0, "text that samples begin with"},
    {"run", "temperature", OPTION_FLOAT, AT(temperature), "0.8", 0, 100, NULL, 0,
     "of sampling; 0: the likeliest token"},
    {"run", "sample-top-k", OPTION_INT, AT(sample_top_k), "50", 0, 1e9, NULL, 0,
     "sample among that many likeliest; 0: all"},
    {"run", "dry-run", OPTION_FLAG, AT(dry_run), "0", 0, 1, NULL, 0, "print parameters, FLOPs and memory, and stop"},
    {"run", "ranks", OPTION_INT, AT(ranks), "0", 0, 1 << 20, NULL, 0,
     "with --dry-run: ranks to plan for; a run has those that mpirun or srun starts"},
    {"run", "help", OPTION_FLAG, AT(help), "0", 0, 1, NULL, 0, "print this and stop"},

    {"optimizer", "lr", OPTION_FLOAT, AT(lr), "1e-3", 0, 100, NULL, 1, "peak learning rate"},
    {"optimizer", "warmup", OPTION_INT, AT(warmup), "100", 0, 1e9, NULL, 1, "steps of linear warm-up"},
    {"optimizer", "schedule", OPTION_CHOICE, AT(schedule), "cosine", 0, 0, "cosine|wsd|linear|constant", 1,
     "after the warm-up"},
    {"optimizer", "final-lr-frac", OPTION_FLOAT, AT(final_lr_frac), "0.1", 0, 1, NULL, 1,
     "last learning rate as a part of --lr"},
    {"optimizer", "weight-decay", OPTION_FLOAT, AT(weight_decay), "0.1", 0, 100, NULL, 1, "on matrices"},
    {"optimizer", "beta1", OPTION_FLOAT, AT(beta1), "0.9", 0, 0.999999, NULL, 1, "AdamW"},
    {"optimizer", "beta2", OPTION_FLOAT, AT(beta2), "0.95", 0, 0.999999, NULL, 1, "AdamW"},
    {"optimizer", "eps", OPTION_FLOAT, AT(eps), "1e-8", 1e-30, 1, NULL, 1, "AdamW"},
    {"optimizer", "clip", OPTION_FLOAT, AT(clip), "1", 0, 1e9, NULL, 1, "largest global gradient norm; 0: no clipping"},
    {"optimizer", "bias-rate", OPTION_FLOAT, AT(bias_rate), "1e-3", 0, 100, NULL, 1,
     "step of the router's balance bias"},
    {"optimizer", "aux-loss", OPTION_FLOAT, AT(aux_loss), "0", 0, 100, NULL, 1,
     "weight of the sequence-wise balance loss"},

    {"parallel", "ep", OPTION_INT, AT(ep), "1", 1, MOE_MAX_EP, NULL, 0, "ranks that share a set of experts"},
    {"parallel", "shard", OPTION_CHOICE, AT(shard), "none", 0, 0, "none|optimizer|grads|weights", 0,
     "what ranks keep a part of, up to and with"},
    {"parallel", "timeout", OPTION_FLOAT, AT(timeout), "600", 1, 1e6, NULL, 0,
     "seconds that ranks wait for one another before the run ends"},

    {"precision", "precision", OPTION_CHOICE, AT(precision), "bf16", 0, 0, "bf16|mxfp8|mxfp8-exact", 0,
     "sets the options from here to --mx-gemm; one that is given as well wins"},
    {"precision", "expert-precision", OPTION_CHOICE, AT(expert_precision), NULL, 0, 0, "bf16|mxfp8", 1,
     "of the routed experts' products (bf16 is float32 in the CPU build)"},
    {"precision", "dispatch-precision", OPTION_CHOICE, AT(dispatch_precision), NULL, 0, 0, "bf16|mxfp8", 1,
     "of what goes to the experts, also where they are on the same rank"},
    {"precision", "combine-precision", OPTION_CHOICE, AT(combine_precision), NULL, 0, 0, "bf16|mxfp8", 1,
     "of what comes back from them"},
    {"precision", "wgrad-precision", OPTION_CHOICE, AT(wgrad_precision), NULL, 0, 0, "bf16|mxfp8", 1,
     "of the operands of the expert weights' gradients"},
    {"precision", "linear-precision", OPTION_CHOICE, AT(linear_precision), NULL, 0, 0, "bf16|mxfp8", 1,
     "of the products of attention but Wkva's, and of the dense and shared MLPs"},
    {"precision", "mx-gemm", OPTION_CHOICE, AT(mx_fast), NULL, 0, 0, "exact|fast", 1,
     "MXFP8 products in bf16, or on the bytes with scales aligned to 128"},
    {"precision", "mx-scale", OPTION_CHOICE, AT(mx_scale), "rceil", 0, 0, "rceil|floor", 1,
     "how MXFP8 blocks are scaled"},
    {"precision", "mx-stats", OPTION_INT, AT(mx_stats), "0", 0, 1e9, NULL, 0,
     "steps between statistics of the casts to MXFP8 in the log; 0: none"},

    {"memory", "recompute", OPTION_CHOICE, AT(recompute), "none", 0, 0, "none|moe|block", 0,
     "activations that backward computes again"},
    {"memory", "capacity", OPTION_FLOAT, AT(capacity), "1.25", 1, 1e6, NULL, 0,
     "room for routed tokens over the mean load, with --ep; more is made if needed"},

    {"debugging", "force-balance", OPTION_FLAG, AT(force_balance), "0", 0, 1, NULL, 1, "route round-robin"},
    {"debugging", "overfit", OPTION_FLAG, AT(overfit), "0", 0, 1, NULL, 1, "train on the first step's tokens for ever"},
};
const int settings_count = sizeof(settings_table) / sizeof(settings_table[0]);

// clang-format off
static const ModelConfig presets[] = {
    // L, C, H, q_lora, kv_lora, nope, rope, v, dense_ffn, dense_layers, E, K, shared, F, V,
    //   groups, top_groups, score, route_norm, route_scale, rope_theta, yarn, factor, mscale, original length
    {4, 128, 4, 0, 64, 32, 16, 32, 512, 1, 8, 2, 1, 128, 257,
     1, 1, SCORE_SIGMOID, 1, 1, 10000, 0, 40, 1, 4096},
    {8, 512, 8, 0, 256, 64, 32, 64, 2048, 1, 32, 4, 1, 384, 50257,
     1, 1, SCORE_SIGMOID, 1, 1, 10000, 0, 40, 1, 4096},
    {6, 256, 16, 0, 512, 128, 64, 128, 1024, 1, 8, 3, 2, 256, 2048,
     1, 1, SCORE_SOFTMAX, 0, 1, 10000, 0, 40, 0.707, 4096},
    {27, 2048, 16, 0, 512, 128, 64, 128, 10944, 1, 64, 6, 2, 1408, 102400,
     1, 1, SCORE_SOFTMAX, 0, 1, 10000, 0, 40, 0.707, 4096},
    {60, 5120, 128, 1536, 512, 128, 64, 128, 12288, 1, 160, 6, 2, 1536, 102400,
     8, 3, SCORE_SOFTMAX, 0, 16, 10000, 0, 40, 1, 4096},
    {61, 7168, 128, 1536, 512, 128, 64, 128, 18432, 3, 256, 8, 1, 2048, 129280,
     8, 4, SCORE_SIGMOID, 1, 2.5, 10000, 0, 40, 1, 4096},
};
// clang-format on

// What --precision sets.
static const struct {
    int64_t expert, dispatch, combine, wgrad, linear, fast;
} modes[] = {
    {PRECISION_BF16, PRECISION_BF16, PRECISION_BF16, PRECISION_BF16, PRECISION_BF16, 0},
    {PRECISION_MXFP8, PRECISION_MXFP8, PRECISION_BF16, PRECISION_BF16, PRECISION_BF16, 1},
    {PRECISION_MXFP8, PRECISION_MXFP8, PRECISION_BF16, PRECISION_BF16, PRECISION_BF16, 0},
};

// The options without a default of their own, as --model and --precision set them.
static void set_presets(Settings* s, int64_t model, int64_t precision) {
    s->model = presets[model];
    s->expert_precision = modes[precision].expert;
    s->dispatch_precision = modes[precision].dispatch;
    s->combine_precision = modes[precision].combine;
    s->wgrad_precision = modes[precision].wgrad;
    s->linear_precision = modes[precision].linear;
    s->mx_fast = modes[precision].fast;
}

static void check_model(const ModelConfig* m) {
    if (m->rope % 2) die(EXIT_USAGE, "--rope-dim %lld is odd: rotary position turns pairs", (long long)m->rope);
    if (m->dense_layers > m->L)
        die(EXIT_USAGE, "--dense-layers %lld is more than --layers %lld", (long long)m->dense_layers, (long long)m->L);
    if (m->K > m->E) die(EXIT_USAGE, "--top-k %lld is more than --experts %lld", (long long)m->K, (long long)m->E);
    if (m->E % m->groups)
        die(EXIT_USAGE, "--experts %lld is not a multiple of --groups %lld", (long long)m->E, (long long)m->groups);
    if (m->top_groups > m->groups)
        die(EXIT_USAGE, "--top-groups %lld is more than --groups %lld", (long long)m->top_groups, (long long)m->groups);
    if (m->K > m->top_groups * (m->E / m->groups))
        die(EXIT_USAGE, "--top-k %lld is more than the %lld experts of --top-groups %lld", (long long)m->K,
            (long long)(m->top_groups * (m->E / m->groups)), (long long)m->top_groups);
}

// What the kernels take: 16-byte rows, and the head sizes that the attention kernels are written for.
static void check_cuda_model(const ModelConfig* m) {
    const struct {
        const char* option;
        int64_t value;
    } widths[] = {{"dim", m->C},
                  {"q-lora", m->q_lora},
                  {"kv-lora", m->kv_lora},
                  {"expert-ffn", m->F},
                  {"dense-ffn", m->dense_ffn}};
    for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++)
        if (widths[i].value % 8)
            die(EXIT_USAGE, "--%s %lld is not a multiple of 8, which the CUDA build needs", widths[i].option,
                (long long)widths[i].value);
    int64_t r = m->rope;
    if ((r != 64 && r != 32 && r != 16) || m->nope != 2 * r || m->v != 2 * r)
        die(EXIT_USAGE,
            "--nope-dim %lld --rope-dim %lld --v-dim %lld: the CUDA build takes 128/64/128, 64/32/64 and 32/16/32",
            (long long)m->nope, (long long)m->rope, (long long)m->v);
}

int64_t settings_micro_tokens(const Settings* s) { return s->ranks * s->batch * s->seq_len; }

// Options in their ranges can ask together for more than can be counted. Sizes are rounded up freely, in double, which
// does not overflow. 1e15 numbers leave int64 room for the bytes of several hundred copies; rows and pieces of work are
// int32 in kernels and CBLAS, and a grid has at most 65535 times 128 columns of a hidden layer, gate and up.
static void check_sizes(const Settings* s) {
    const ModelConfig* m = &s->model;
    const double L = (double)m->L, C = (double)m->C, H = (double)m->H, q_lora = (double)m->q_lora;
    const double latent = (double)(m->kv_lora + m->rope), head = (double)(m->nope + m->rope + m->v);
    const double hidden = (double)max_i64(m->dense_ffn, m->shared * m->F), E = (double)m->E, F = (double)m->F;
    const double tokens = (double)s->batch * (double)s->seq_len, micro = tokens * (double)s->ranks;
    const double spread = s->ep > 1 ? fmax((double)s->ep, s->capacity) : 1;
    const double rows = tokens * (double)m->K * spread + 128 * (E + 1);
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

static void check_layout(const Settings* s) {
    if (s->ranks % s->ep)
        die(EXIT_USAGE, "--ep %lld does not divide the %lld rank%s of the run", (long long)s->ep, (long long)s->ranks,
            s->ranks == 1 ? "" : "s");
    if (s->model.E % s->ep)
        die(EXIT_USAGE, "--ep %lld does not divide --experts %lld", (long long)s->ep, (long long)s->model.E);
}

// Blocks of 32 along every contraction that meets MXFP8: forward contracts over a matrix' columns, dgrad over its rows.
static void check_precision(const Settings* s) {
    const ModelConfig* m = &s->model;
    const int linear = s->linear_precision == PRECISION_MXFP8, expert = s->expert_precision || s->wgrad_precision;
    const int moe = m->dense_layers < m->L;
    const struct {
        int used;
        int64_t width;
        const char* options;
    } widths[] = {{linear || expert || s->dispatch_precision || s->combine_precision, m->C, "--dim"},
                  {expert, m->F, "--expert-ffn"},
                  {linear, m->q_lora, "--q-lora"},
                  {linear, m->kv_lora, "--kv-lora"},
                  {linear, m->H * (m->nope + m->rope), "--heads x (--nope-dim + --rope-dim) ="},
                  {linear, m->H * (m->nope + m->v), "--heads x (--nope-dim + --v-dim) ="},
                  {linear, m->H * m->v, "--heads x --v-dim ="},
                  {linear && m->dense_layers, m->dense_ffn, "--dense-ffn"},
                  {linear && moe, m->shared * m->F, "--shared-experts x --expert-ffn ="}};
    for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++)
        if (widths[i].used && widths[i].width % MX_BLOCK)
            die(EXIT_USAGE, "%s %lld is not a multiple of 32, which MXFP8 needs", widths[i].options,
                (long long)widths[i].width);
}

static void check_stats(const Settings* s) {
    const int moe = s->model.dense_layers < s->model.L, experts = s->expert_precision || s->dispatch_precision;
    if (s->mx_stats && !s->linear_precision && !(moe && experts))
        die(EXIT_USAGE,
            "--mx-stats %lld: nothing that it measures is MXFP8; it goes with --linear-precision mxfp8 or, where there "
            "is a MoE block, --expert-precision mxfp8 or --dispatch-precision mxfp8",
            (long long)s->mx_stats);
}

static void check_run(Settings* s) {
    int64_t micro = settings_micro_tokens(s);
    if (s->tokens_per_step == 0) s->tokens_per_step = micro;
    if (s->tokens_per_step % micro)
        die(EXIT_USAGE,
            "--tokens-per-step %lld is not a multiple of %lld ranks x --batch %lld x --seq-len %lld = %lld tokens a "
            "micro-step",
            (long long)s->tokens_per_step, (long long)s->ranks, (long long)s->batch, (long long)s->seq_len,
            (long long)micro);
    if (s->warmup > s->steps && s->schedule != SCHEDULE_CONSTANT)
        warn("--warmup %lld is longer than --steps %lld: the learning rate never reaches --lr", (long long)s->warmup,
             (long long)s->steps);
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

Settings settings_read(int argc, char** argv, int ranks) {
    Settings s;
    memset(&s, 0, sizeof(s));
    char* given = (char*)host_alloc((size_t)settings_count);
    options_defaults(settings_table, settings_count, &s);
    options_parse(settings_table, settings_count, &s, given, argc, argv);
    if (s.help) {
        options_help(settings_table, settings_count, "train_moe");
        free(given);
        return s;
    }
    Settings from;
    memset(&from, 0, sizeof(from));
    set_presets(&from, s.preset, s.precision);
    for (int i = 0; i < settings_count; i++)
        if (!settings_table[i].initial && !given[i])  // int64_t and double are both 8 bytes
            memcpy((char*)&s + settings_table[i].offset, (char*)&from + settings_table[i].offset, 8);
    free(given);
    check_model(&s.model);
    if (BACKEND == BACKEND_CUDA) check_cuda_model(&s.model);
    if (s.ranks && !s.dry_run)
        die(EXIT_USAGE, "--ranks is for --dry-run; start %lld ranks with mpirun -np %lld", (long long)s.ranks,
            (long long)s.ranks);
    if (!s.ranks) s.ranks = ranks;
    check_sizes(&s);
    check_layout(&s);
    check_precision(&s);
    check_stats(&s);
    check_run(&s);
    return s;
}

void settings_free(Settings* s) { options_free(settings_table, settings_count, s); }

static char* value_json(const Option* option, const Settings* s) {
    char* text = option_text(option, s);
    if (option->type != OPTION_TEXT && option->type != OPTION_CHOICE) return text;
    char* quoted = json_quote(text);
    free(text);
    return quoted;
}

char* settings_json(const Settings* s) {
    char* json = host_strdup("{");
    for (int i = 0; i < settings_count; i++) {
        char* value = value_json(&settings_table[i], s);
        char* longer = host_format("%s%s\"%s\": %s", json, i ? ", " : "", settings_table[i].name, value);
        free(json);
        free(value);
        json = longer;
    }
    char* closed = host_format("%s}", json);
    free(json);
    return closed;
}

// A value as option_text writes it.
static char* recorded_text(const Option* option, const Json* value) {
    if (value->type == JSON_STRING) return host_strdup(value->text);
    if (option->type == OPTION_FLOAT) return host_format("%.9g", value->number);
    return host_format("%lld", (long long)value->integer);
}

const char* settings_differ(const Settings* s, const Json* record, char** was, char** is) {
    // What an option was before it existed: its default, or its preset's where there are presets.
    Settings before;
    memset(&before, 0, sizeof(before));
    options_defaults(settings_table, settings_count, &before);
    set_presets(&before, s->preset, before.precision);
    before.tokens_per_step = settings_micro_tokens(s);

    const char* name = NULL;
    for (int i = 0; i < settings_count && !name; i++) {
        const Option* o = &settings_table[i];
        if (!o->fixed) continue;
        const Json* recorded = json_get(record, o->name);
        char* now = option_text(o, s);
        char* then = recorded ? recorded_text(o, recorded) : option_text(o, &before);
        if (strcmp(now, then) != 0) {
            name = o->name;
            *is = host_strdup(now);
            *was =
                host_format("%s%s", then, recorded ? "" : " (the default: its checkpoint does not name this option)");
        }
        free(now);
        free(then);
    }
    settings_free(&before);
    return name;
}

int64_t config_vocab_padded(const ModelConfig* m) { return (m->V + 127) / 128 * 128; }

RopeConfig config_rope(const ModelConfig* m) {
    RopeConfig rope;
    rope.dim = (int)m->rope;
    rope.theta = m->rope_theta;
    rope.yarn = (int)m->yarn;
    rope.factor = m->yarn_factor;
    rope.mscale = m->yarn_mscale;
    rope.original_len = m->yarn_original_len;
    return rope;
}

double config_softmax_scale(const ModelConfig* m) {
    RopeConfig rope = config_rope(m);
    double mscale = rope_mscale(&rope);
    return mscale * mscale / sqrt((double)(m->nope + m->rope));
}

double settings_lr(const Settings* s, int64_t step) {
    if (step <= s->warmup) return s->lr * (double)step / (double)s->warmup;
    double left = s->steps > s->warmup ? (double)(s->steps - step) / (double)(s->steps - s->warmup) : 0;
    if (left < 0) left = 0;
    double share = 1;  // of the way from final_lr_frac to 1
    switch (s->schedule) {
        case SCHEDULE_COSINE: share = 0.5 - 0.5 * cos(3.14159265358979323846 * left); break;
        case SCHEDULE_WSD: share = left < 0.2 ? left / 0.2 : 1; break;
        case SCHEDULE_LINEAR: share = left; break;
    }
    return s->lr * (s->final_lr_frac + (1 - s->final_lr_frac) * share);
}
