#include "model/predict.h"

#include <math.h>

#include "layers/muon.h"
#include "mx/formats.h"

// Rates of one H200, from sections of bench/results.jsonl. In FLOP/s: dense and grouped GEMM of "Bounds of these
// classes"; 32.0e12 FLOPs of MXFP8 GEMMs take the 27.19 ms of "Where the time of a step goes".
static const double DENSE = 733e12, GROUPED = 698e12, PACKED = 1177e12;
// In bytes a second: AdamW, norms and SwiGLU of "Bounds of these classes"; dispatch and combine of 16b and 671b on 4
// H200.
static const double MEMORY = 3.9e12, LINKS = 290e9;
// Shares that are exposed. "Transfers and shares of 16b": 0.096 of gathers and reductions. A quarter of the all-to-all
// is the rest of the 3.2 % of all transfers.
static const double GATHERS_EXPOSED = 0.096, DISPATCH_EXPOSED = 0.25;
// Seconds that a launch costs over its FLOPs and bytes, from the rows of `small`, `debug` and `tiny`: a dense GEMM, a
// grouped GEMM, attention and the other kernels of a block. With --ep the host waits for counts in each MoE block: the
// row of `small` on 2 H200, 20.42 against 18.63 ms in 7 blocks.
static const double DENSE_START = 5e-6, GROUPED_START = 40e-6, ATTENTION_START = 30e-6, BLOCK_START = 100e-6,
                    DISPATCH_START = 256e-6;

// Attention of T positions, forward and backward, within 4 % of the rows "attention" (T 1024, 4096, 8192) and of
// `debug` (T 256).
static double attention_rate(double T) { return 560e12 * T / (T + 600); }

// Muon's GEMMs by the smaller side of the matrix, from the row "Muon, gate and up": 356 and 590 TFLOP/s at 384 and
// 1408.
static double muon_rate(double side) { return 783e12 * side / (side + 461); }

// Bytes that a rank sends and receives for each of n parameters of a group of `parts` ranks: gradients are float32,
// weights bf16.
static double bytes_reduced(const ParamBuffer* p, double micro) {
    // All-reduce, or reduce-scatter and gather: once a step, in each micro-step, for forward and for backward.
    const double bytes[] = {8, 4 + 2, 4 * micro + 2, (4 + 2 * 2) * micro};  // by Shard
    return (double)(p->n * (p->parts - 1)) / (double)p->parts * bytes[p->shard];
}

// Adds the matmuls of a parameter, and its update, to the seconds of a step.
static void add_param(double t[TIMES], const Model* m, const Unit* u, const Param* p, double micro) {
    const RunConfig* s = &m->run;
    const Weight* w = &u->w[p->id];
    const int routed = param_buffer(p->id) == EXPERT_PARAMS, up = p->id == W13 || p->id == MLP13;
    const ParamBuffer* buffer = &u->buffer[param_buffer(p->id)];
    const double rows = (double)w->OC, columns = (double)w->IC, N = (double)(m->shapes.N * (routed ? m->config.K : 1));
    const double owned = rows * columns * (double)(w->count * buffer->owned) / (double)buffer->n;

    // Products. Activation checkpointing repeats forward, but not the last products of a block.
    const int last = p->id == LM_HEAD || p->id == W2 || p->id == MLP2, block = s->recompute == RECOMPUTE_BLOCK;
    const int again = block ? !last : s->recompute == RECOMPUTE_MOE && up && u->kind != UNIT_DENSE;
    const int packed = format_packed(w->format) != NULL;
    if (p->start != ONE && p->id != EMBED) {
        const double bf16 = routed ? GROUPED : DENSE, wgrad = s->wgrad_precision ? PACKED : bf16;
        const double rate = packed ? 3 / (2 / PACKED + 1 / wgrad) : bf16;
        const double passes = micro * (3 + again) * (p->id == LM_HEAD ? 1 + (double)m->config.mtp : 1);
        const TimeClass kernels = routed ? T_GROUPED : p->id == LM_HEAD ? T_HEAD : T_DENSE;
        t[kernels] += passes * (2 * N * rows * columns / rate + (routed ? GROUPED_START : DENSE_START));
        // x and dy are quantized along rows and along columns: each time 2 bytes in, 1 out.
        if (packed) t[T_MEMORY] += micro * 6 * N * (rows + columns) / MEMORY;
    }

    // The update reads and writes weight, master weight and moments. The gradient is read here and for its norm.
    const int muon = s->optimizer == MUON && p->by == MUON;
    const double bytes =
        8 + 2 * (muon ? 1 : 2) * (s->moments ? 2 : 4) + 2 * (routed && buffer->parts == 1 && micro == 1 ? 2 : 4);
    t[T_OPTIMIZER] += owned * bytes / MEMORY;
    if (muon) {
        const double matrix = rows / (p->second ? 2 : 1);
        t[T_OPTIMIZER] += owned / (matrix * columns) * muon_flops((int64_t)matrix, w->IC) /
                          muon_rate(fmin(matrix, columns)) / (double)(routed ? s->muon_expert_steps : 1);
    }
}

// Adds the other kernels of a block.
static void add_block(double t[TIMES], const Model* m, const Unit* u, double micro) {
    const ModelConfig* c = &m->config;
    const RunConfig* s = &m->run;
    const double N = (double)m->shapes.N, T = (double)s->seq_len, K = (double)c->K, ep = (double)s->ep;
    const int moe = u->kind != UNIT_DENSE, again = s->recompute == RECOMPUTE_BLOCK;
    const double forward = N * T * (double)(c->H * (c->nope + c->rope + c->v));
    t[T_ATTENTION] += micro * ((3.5 + again) * forward / attention_rate(T) + ATTENTION_START);

    // Elements that move, each of 2 bytes: SwiGLU 3 of the hidden width forward and 6 backward, two norms of 4 and 4,
    // permute and combine 6.
    const double hidden = (double)(moe ? (c->K + c->shared) * c->F : c->dense_ffn);
    const double width = (9 + 3 * again) * hidden + (16 + 8 * again) * (double)c->C + (moe ? 6 * K * (double)c->C : 0);
    t[T_MEMORY] += micro * (2 * N * width / MEMORY + BLOCK_START);

    // A token is sent once to each other rank that has experts of it, and comes back; so do gradients.
    if (ep == 1 || !moe) return;
    const double ranks = (ep - 1) * (1 - pow(1 - 1 / ep, K));
    const double sent = s->dispatch_precision ? 1 : 2, back = s->combine_precision ? 1 : 2;
    const double bytes = N * ranks * (double)c->C * ((2 + (s->recompute != RECOMPUTE_NONE)) * sent + 2 * back);
    t[T_TRANSFERS] += micro * (DISPATCH_EXPOSED * bytes / LINKS + DISPATCH_START);
}

double predict_step(double t[TIMES], const Model* m) {
    const RunConfig* s = &m->run;
    const ModelConfig* c = &m->config;
    const double micro = (double)(s->tokens_per_step / run_micro_tokens(s));
    for (int i = 0; i < TIMES; i++) t[i] = 0;
    for (int unit = 0; unit < params_units(c); unit++) {
        const Unit* u = &m->units[unit];
        Param list[PARAMS];
        const int count = params_list(list, c, u->kind);
        for (int i = 0; i < count; i++) add_param(t, m, u, &list[i], micro);
        if (u->layer >= 0) add_block(t, m, u, micro);
        for (int b = 0; b < BUFFERS; b++)
            if (u->buffer[b].parts > 1) t[T_TRANSFERS] += GATHERS_EXPOSED * bytes_reduced(&u->buffer[b], micro) / LINKS;
    }
    // Logits are read for the loss, and replaced by their gradient.
    t[T_HEAD] += micro * (1 + (double)c->mtp) * 4 * (double)(m->shapes.N * config_vocab_padded(c)) / MEMORY;
    double seconds = 0;
    for (int i = 0; i < TIMES; i++) seconds += t[i];
    return seconds;
}
