// Checks between options, one function a subject. A check ends the run with the names and values of the options that do
// not fit, or returns such a message.
#include <math.h>

#include "device/check.h"
#include "model/settings.h"
#include "moe/moe.h"

// The options of a model.
static void check_model(const ModelConfig* c) {
    if (c->rope % 2) die(EXIT_USAGE, "--rope-dim %ld must be even: rotary position turns pairs", c->rope);
    if (c->yarn && c->yarn_mscale <= 0)
        die(EXIT_USAGE, "--yarn 1: the run's record has yarn-mscale %g, and it must be above 0", c->yarn_mscale);
    if (c->dense_layers > c->L) die(EXIT_USAGE, "--dense-layers %ld is more than --layers %ld", c->dense_layers, c->L);
    if (c->K > c->E) die(EXIT_USAGE, "--top-k %ld is more than --experts %ld", c->K, c->E);
    if (c->E % c->groups) die(EXIT_USAGE, "--experts %ld is not a multiple of --groups %ld", c->E, c->groups);
    if (c->top_groups > c->groups)
        die(EXIT_USAGE, "--top-groups %ld is more than --groups %ld", c->top_groups, c->groups);
    if (c->K > c->top_groups * (c->E / c->groups))
        die(EXIT_USAGE, "--top-k %ld is more than the %ld experts of --top-groups %ld", c->K,
            c->top_groups * (c->E / c->groups), c->top_groups);
}

// A width, and the options that make it.
typedef struct Width {
    const char* options;
    int64_t width;
} Width;

// Ends the run at the first width that is not a multiple of `of`; 0 passes. who: what needs it.
static void check_multiples(const Width* widths, size_t count, int64_t of, const char* who) {
    for (size_t i = 0; i < count; i++)
        if (widths[i].width % of)
            die(EXIT_USAGE, "%s %ld is not a multiple of %ld, which %s needs", widths[i].options, widths[i].width, of,
                who);
}

// Limits of the CUDA kernels: rows of a multiple of 16 bytes, the head sizes of the attention kernels, the number of
// experts.
static void check_cuda_model(const ModelConfig* c) {
    const Width widths[] = {{"--dim", c->C},
                            {"--q-lora", c->q_lora},
                            {"--kv-lora", c->kv_lora},
                            {"--expert-ffn", c->F},
                            {"--dense-ffn", c->dense_ffn}};
    check_multiples(widths, sizeof(widths) / sizeof(widths[0]), 8, "the CUDA build");
    const int64_t rope = c->rope;
    if ((rope != 64 && rope != 32 && rope != 16) || c->nope != 2 * rope || c->v != 2 * rope)
        die(EXIT_USAGE,
            "--nope-dim %ld --rope-dim %ld --v-dim %ld: the CUDA build takes 128/64/128, 64/32/64 and 32/16/32",
            c->nope, c->rope, c->v);
    if (c->E > ROUTER_MOST_EXPERTS || c->K > ROUTER_MOST_CHOICES)
        die(EXIT_USAGE, "--experts %ld --top-k %ld: the CUDA build takes at most %d and %d", c->E, c->K,
            ROUTER_MOST_EXPERTS, ROUTER_MOST_CHOICES);
}

// Options in their ranges can together overflow an integer. Sizes are estimated from above in double, which does not
// overflow. With at most 1e15 elements, int64 can count the bytes of several hundred copies. Rows and work items are
// int32 in kernels and CBLAS. A grid has at most 65535 x 128 columns of a hidden layer, gate and up.
static char* refuse_sizes(const ModelConfig* c, const RunConfig* r) {
    // Widths, tokens of a rank and of all, and rows that may be routed to a rank's experts.
    const double L = (double)config_blocks(c), C = (double)c->C, H = (double)c->H, q_lora = (double)c->q_lora;
    const double latent = (double)(c->kv_lora + c->rope), head = (double)(c->nope + c->rope + c->v);
    const double hidden = (double)max_i64(c->dense_ffn, c->shared * c->F), E = (double)c->E, F = (double)c->F;
    const double tokens = (double)r->batch * (double)r->seq_len, micro = tokens * (double)r->ranks;
    const double spread = r->ep > 1 ? fmax(DISPATCH_MOST_CAPACITY * (double)r->ep, r->capacity) : 1;
    const double rows = tokens * (double)c->K * spread + 128 * (E + 1);

    // Elements of a block: its matrices, and its activations of a token.
    const double matrices = (C + q_lora + latent) * (C + H * head) + 3 * C * (hidden + E * F) + E * C;
    const double widths = C + q_lora + latent + H * head + hidden + E;

    const struct {
        const char *what, *options;
        double size, most;
    } sizes[] = {
        {"tokens a micro-step", "ranks x --batch x --seq-len", micro, 1e12},
        {"tokens in all", "--steps x --tokens-per-step", (double)r->steps * fmax(micro, (double)r->tokens_per_step),
         1e18},
        {"rows of the experts", "--batch x --seq-len x --top-k, and with --ep x --ep or --capacity,", rows, INT32_MAX},
        {"rows quantized for --wgrad-precision mxfp8",
         "--batch x --seq-len x --top-k, and with --ep x --ep or --capacity,", r->wgrad_precision ? rows : 0,
         65535.0 * 128},  // limit of a grid in y
        {"tiles of attention", "--batch x --heads x --seq-len / 128", tokens / 128 * H + (double)r->batch * H, 1 << 30},
        {"hidden columns", "--shared-experts x --expert-ffn", (double)(c->shared * c->F), 1 << 21},
        {"parameters", "--layers, --dim, --heads, --experts, --expert-ffn, --dense-ffn and --vocab",
         L * matrices + 2 * C * (double)c->V, 1e15},
        {"activations of a rank", "--batch, --seq-len, --layers, --dim, --heads, --top-k, --expert-ffn and --dense-ffn",
         L * (tokens * widths + rows * (C + F)), 1e15},
        // Their places count vectors of eight (grouped/grouped_gemm_gather.cuh).
        {"numbers of a rank's tokens", "--batch x --seq-len x --dim x --ep", tokens * C * (double)r->ep,
         8.0 * INT32_MAX},
    };

    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        if (sizes[i].size > sizes[i].most)
            return host_format("%s make %.10g %s: at most %.10g are possible", sizes[i].options, sizes[i].size,
                               sizes[i].what, sizes[i].most);
    return NULL;
}

// Groups of --ep ranks are whole, and their ranks own the same number of experts. A step is a whole number of
// micro-steps.
char* settings_refusal(const Settings* s) {
    const RunConfig* r = &s->run;
    char* refusal = refuse_sizes(&s->model, r);
    if (refusal) return refusal;
    if (r->ranks % r->ep)
        return host_format("--ep %ld does not divide the %ld rank%s of the run%s", r->ep, r->ranks,
                           r->ranks == 1 ? "" : "s",
                           s->resume ? " (without --ep, the value of the checkpoint counts; --ep 1 fits)" : "");
    if (s->model.E % r->ep) return host_format("--ep %ld does not divide --experts %ld", r->ep, s->model.E);
    const int64_t micro = run_micro_tokens(r);
    if (r->tokens_per_step % micro)
        return host_format(
            "--tokens-per-step %ld is not a multiple of %ld ranks x --batch %ld x --seq-len %ld = %ld tokens a "
            "micro-step",
            r->tokens_per_step, r->ranks, r->batch, r->seq_len, micro);
    return NULL;
}

// Every width that quantized products contract over is made of blocks of 32. Forward contracts over a matrix' columns,
// dgrad over its rows. A width that no such product has counts as 0.
static void check_precision(const ModelConfig* c, const RunConfig* r) {
    const int linear = r->linear_precision != FORMAT_BF16, expert = r->expert_precision || r->wgrad_precision;
    const int dense = linear && c->dense_layers > 0, shared = linear && c->dense_layers < config_blocks(c);
    const int any = linear || expert || r->dispatch_precision || r->combine_precision;
    const Width widths[] = {{"--dim", any * c->C},
                            {"--expert-ffn", expert * c->F},
                            {"--q-lora", linear * c->q_lora},
                            {"--kv-lora", linear * c->kv_lora},
                            {"--heads x (--nope-dim + --rope-dim) =", linear * c->H * (c->nope + c->rope)},
                            {"--heads x (--nope-dim + --v-dim) =", linear * c->H * (c->nope + c->v)},
                            {"--heads x --v-dim =", linear * c->H * c->v},
                            {"--dense-ffn", dense * c->dense_ffn},
                            {"--shared-experts x --expert-ffn =", shared * c->shared * c->F}};
    check_multiples(widths, sizeof(widths) / sizeof(widths[0]), FORMAT_BLOCK, "a quantized format");
}

// --mx-stats measures quantized tensors, so there must be some.
static void check_stats(const ModelConfig* c, const RunConfig* r) {
    const int moe = c->dense_layers < config_blocks(c), experts = r->expert_precision || r->dispatch_precision;
    if (r->stats_every && !r->linear_precision && !(moe && experts))
        die(EXIT_USAGE,
            "--mx-stats %ld: no tensor that it measures is quantized: give a --linear-precision other than bf16 or, "
            "for a model with MoE blocks, an --expert-precision or --dispatch-precision other than bf16",
            r->stats_every);
}

// Warnings, and inputs and outputs that an option needs.
static void check_run(const Settings* s) {
    const ModelConfig* c = &s->model;
    const RunConfig* r = &s->run;
    // 0 means no clipping, so a tiny value is a mistake.
    if (r->clip > 0 && r->clip < 1e-30)
        die(EXIT_USAGE, "--clip %g is too small: give at least 1e-30, or 0 for no clipping", r->clip);

    // Allowed, but hardly meant: warnings.
    if (r->warmup_steps > (double)r->steps && r->schedule != SCHEDULE_CONSTANT)
        warn("--warmup %g is longer than --steps %ld: the learning rate never reaches --lr", r->warmup_steps, r->steps);
    if (r->moments && r->beta2 > 0.99)
        warn("--moments bf16 --beta2 %g: second moments follow shrinking gradients late or never; --beta2 0.95 helps",
             r->beta2);
    // Rounded to bf16, a momentum stops at no less than 1 / (1 + 2^-8 / (1 - beta1)) of a steady gradient
    // (layers/adamw.h). At 0.98 that is 0.84, close to the root of second moments at the limit of --beta2.
    if (r->moments && r->beta1 > 0.98)
        warn("--moments bf16 --beta1 %g: rounding may stop momenta at %.0f %% of a steady gradient; --beta1 0.9 helps",
             r->beta1, 100 / (1 + 0x1p-8 / (1 - r->beta1)));
    if (c->K == 1 && c->route_norm && c->dense_layers < c->L)
        warn("--top-k 1 --route-norm 1: every gate is --route-scale, so the router gets %s; --route-norm 0 helps",
             r->aux_loss > 0 ? "a gradient from --aux-loss alone" : "no gradient");
    const int64_t widest = max_i64(c->C, c->F);
    const int packed = r->expert_precision == FORMAT_MXFP8 || r->linear_precision == FORMAT_MXFP8;
    if (BACKEND == BACKEND_CUDA && packed && widest < 768)
        warn("--precision mxfp8 at --dim %ld and --expert-ffn %ld: at such widths MXFP8 is no faster than bf16", c->C,
             c->F);

    // Use of a model.
    if (s->dry_run) return;
    if (*s->evaluate && !*s->val && !*s->eval)
        die(EXIT_USAGE, "--evaluate needs text or questions: --val or --eval, e.g. --val 'corpus/text_val_*.bin'");
    if (s->resume && (*s->sample || *s->evaluate))
        die(EXIT_USAGE, "--resume goes on with training, which --%s does not", *s->sample ? "sample" : "evaluate");
    if (*s->sample && (*s->val || *s->eval))
        die(EXIT_USAGE, "--%s goes with --evaluate, not with --sample, which writes a text", *s->val ? "val" : "eval");
    if (*s->sample || *s->evaluate) return;

    // Training.
    if (s->resume && !*s->out) die(EXIT_USAGE, "--resume needs --out: the folder to resume from");
    if (!*s->train && s->resume)
        die(EXIT_USAGE, "there is no checkpoint in %s to resume from; --train is needed to start afresh", s->out);
    if (!*s->train)
        die(EXIT_USAGE,
            "--train is missing: name the training shards, e.g. --train 'corpus/text_train_*.bin'; "
            "scripts/prepare_text.py makes them from text");
    if (r->stats_every && !*s->out) die(EXIT_USAGE, "--mx-stats needs --out: the statistics go into its log");
    if (s->save_every && !*s->out) die(EXIT_USAGE, "--save-every needs --out: the folder to save into");
}

void settings_check(const Settings* s) {
    char* refusal = settings_refusal(s);
    if (refusal) die(EXIT_USAGE, "%s", refusal);
    check_model(&s->model);
    if (BACKEND == BACKEND_CUDA) check_cuda_model(&s->model);
    if (s->model.mtp >= s->run.seq_len)
        die(EXIT_USAGE, "--mtp 1 needs --seq-len 2 or more: the MTP module predicts the token after the next");
    check_precision(&s->model, &s->run);
    check_stats(&s->model, &s->run);
    check_run(s);
}
