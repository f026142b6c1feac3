// The forward pass; begin at model_forward. Formulas and names: model/model.h.
#include "device/check.h"
#include "layers/embedding.h"
#include "layers/loss.h"
#include "layers/rmsnorm.h"
#include "layers/swiglu.h"
#include "model/model.h"

// eps of the latents' norms, whatever --rms-norm-eps: DeepSeek's code and transformers' have it so.
static const double LATENT_EPS = 1e-6;

// out = attention(norm1)
static void mla_forward(Model* m, floatX* out, const Weight* w, const BlockSaved* s) {
    const ModelConfig* c = &m->config;
    const int64_t N = m->B * m->T;

    // Queries: straight from norm1, or through a normalised latent.
    if (c->q_lora) {
        linear_forward(s->cq, s->norm1, &w[WQA], N, m->ctx);
        rmsnorm_forward(s->cq_norm, s->rstd_q, s->cq, c->q_lora, w[Q_NORM].w, LATENT_EPS, N, c->q_lora, m->ctx);
        linear_forward(s->q, s->cq_norm, &w[WQB], N, m->ctx);
    } else {
        linear_forward(s->q, s->norm1, &w[WQ], N, m->ctx);
    }

    // Keys and values from the normalized latent c_kv. kva also holds k_rope, which all heads share.
    linear_forward(s->kva, s->norm1, &w[WKVA], N, m->ctx);
    rmsnorm_forward(s->ckv, s->rstd_kv, s->kva, w[WKVA].OC, w[KV_NORM].w, LATENT_EPS, N, c->kv_lora, m->ctx);
    linear_forward(s->kv, s->ckv, &w[WKVB], N, m->ctx);

    // Positions, attention, output.
    model_rope(m, s->q, s->kva, +1);
    attention_forward(s->att, s->lse, &m->state->max_logit, s->q, s->kv, s->kva + c->kv_lora, m->attn_shape, m->ctx);
    linear_forward(out, s->att, &w[WO], N, m->ctx);
}

// Where a block counts its loads and, for quantile balancing, its margins: in training alone.
static BalanceCounts router_counts(const Model* m, const Unit* u, int train) {
    const int64_t first = u->layer * m->config.E;
    BalanceCounts counts = {train ? m->load + first : NULL, m->margins ? m->margins + first * MARGIN_BINS : NULL};
    return counts;
}

// out = mlp(norm2)
static void mlp_forward(Model* m, floatX* out, const Unit* u, int train) {
    BlockSaved* s = &m->blocks[u->layer];
    const int64_t N = m->B * m->T;
    if (u->kind != UNIT_DENSE) {
        moe_forward(out, s->norm2, model_moe_weights(m, u), &s->moe, router_counts(m, u, train), m->moe_shape,
                    m->dispatch, m->pool, m->ctx);
        return;
    }
    // A dense block. t.act is workspace: backward makes it again from h.
    linear_forward(s->h, s->norm2, &u->w[MLP13], N, m->ctx);
    swiglu_forward(m->t.act, s->h, N, m->config.dense_ffn, m->ctx);
    linear_forward(out, m->t.act, &u->w[MLP2], N, m->ctx);
}

// From norm1 on: attention, and the norm before the MLP.
static void attention_part(Model* m, const Weight* w, const BlockSaved* s) {
    const int64_t N = m->B * m->T, C = m->config.C;
    mla_forward(m, m->t.out, w, s);
    residual_rmsnorm_forward(s->residual2, s->norm2, s->rstd2, s->residual, m->t.out, w[NORM2].w, m->config.norm_eps, N,
                             C, m->ctx);
}

// Backward needs no output of the MLP, so the last product is not repeated.
void model_rebuild_block(Model* m, const Unit* u) {
    const BlockSaved* s = &m->blocks[u->layer];
    const int64_t N = m->B * m->T, C = m->config.C;
    rmsnorm_forward(s->norm1, s->rstd1, s->residual, C, u->w[NORM1].w, m->config.norm_eps, N, C, m->ctx);
    attention_part(m, u->w, s);
    if (u->kind == UNIT_DENSE) linear_forward(s->h, s->norm2, &u->w[MLP13], N, m->ctx);
}

void block_forward(Model* m, const Unit* u, int train) {
    const BlockSaved* s = &m->blocks[u->layer];
    const int64_t N = m->B * m->T, C = m->config.C;
    // The previous block's output joins the residual stream where the next norm reads it.
    if (u->layer == 0 || u->kind == UNIT_MODULE) {
        rmsnorm_forward(s->norm1, s->rstd1, s->residual, C, u->w[NORM1].w, m->config.norm_eps, N, C, m->ctx);
    } else {
        const BlockSaved* previous = &m->blocks[u->layer - 1];
        residual_rmsnorm_forward(s->residual, s->norm1, s->rstd1, previous->residual2, m->t.out, u->w[NORM1].w,
                                 m->config.norm_eps, N, C, m->ctx);
    }
    attention_part(m, u->w, s);
    mlp_forward(m, m->t.out, u, train);
}

// The last residual add and the final norm are one op. Output k follows block L - 1 + k.
void output_forward(Model* m, int k, const Unit* u) {
    const Output* o = &m->outputs[k];
    residual_rmsnorm_forward(o->residual, o->norm, o->rstd, m->blocks[m->config.L - 1 + k].residual2, m->t.out,
                             u->w[FINAL_NORM].w, m->config.norm_eps, m->B * m->T, m->config.C, m->ctx);
}

void model_forward(Model* m, int train) {
    const int head = (int)m->config.L + 1;
    // A micro-batch begins with an empty pool: no activations of the one before are needed.
    const PoolMark bottom = {0, 0};
    pool_release(m->pool, bottom);
    m->moe_shape.capacity = train ? m->capacity : 0;  // validation has no step to run again
    m->mtp_modules = train ? (int)m->config.mtp : 0;

    Unit* u = unit_begin(m, 0, 1);
    embedding_forward(m->blocks[0].residual, m->tokens, u->w[EMBED].w, m->B * m->T, m->config.C, m->ctx);
    unit_end(m, 0);

    for (int unit = 1; unit < head; unit++) {
        block_forward(m, unit_begin(m, unit, unit + 1), train);
        unit_end(m, unit);
    }

    // The final norm, then the MTP modules, each on the output before it.
    output_forward(m, 0, unit_begin(m, head, m->mtp_modules ? head + 1 : -1));
    unit_end(m, head);
    for (int k = 1; k <= m->mtp_modules; k++) module_forward(m, k);
}

// A chunk of tokens at a time: its logits become their own gradient, which no one needs later.
// k: the main model (0) or an MTP module. *sum += its losses, in nats. dscale 0: no gradients.
static void output_loss(Model* m, int k, Weight* w, double* sum, float dscale) {
    const int64_t N = m->B * (m->T - k), C = m->config.C;
    const Output* o = &m->outputs[k];
    const int32_t* targets = m->targets + k * m->B * m->T;
    for (int64_t n = 0; n < N; n += m->chunk) {
        const int64_t rows = min_i64(m->chunk, N - n);
        floatX *x = o->norm + n * C, *logits = m->t.logits;
        linear_forward(logits, x, w, rows, m->ctx);
        cross_entropy(m->losses + n, logits, targets + n, rows, m->config.V, w->OC, dscale, m->ctx);
        if (dscale != 0) linear_backward(o->dnorm + n * C, logits, x, w, rows, m->ctx);
        w->accumulate = 1;
    }
    loss_add(sum, m->losses, N, m->ctx);
}

void model_loss(Model* m, StepState* state, float dscale) {
    const int head = (int)m->config.L + 1;
    // The head's gradients begin here, not in model_backward.
    Weight* w = &unit_begin(m, head, -1)->w[LM_HEAD];
    if (dscale != 0) unit_grads_begin(m, head);
    output_loss(m, 0, w, &state->loss_sum, dscale);
    for (int k = 1; k <= m->mtp_modules; k++) output_loss(m, k, w, &state->mtp_sum[k - 1], dscale * m->mtp_weight);
    unit_end(m, head);
}

void model_logits(Model* m, int64_t n, real* host_logits) {
    const int head = (int)m->config.L + 1;
    ASSERT(n < m->B * m->T);
    // One row of logits, as float32 for the host.
    const Unit* u = unit_begin(m, head, -1);
    linear_forward(m->t.logits, m->outputs[0].norm + n * m->config.C, &u->w[LM_HEAD], 1, m->ctx);
    unit_end(m, head);
    device_to_real(m->t.logits_row, m->t.logits, m->config.V, m->ctx);
    device_download(host_logits, m->t.logits_row, (size_t)m->config.V * sizeof(real), m->ctx);
}
