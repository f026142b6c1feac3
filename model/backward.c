// The backward pass: model/forward.c from bottom to top, from the gradients of the outputs that model_loss left.
// t.dx is the gradient of the residual stream and is added to; gradients of parameters are written in a step's first
// micro-step and then added to; all others are written.
#include "layers/embedding.h"
#include "layers/rmsnorm.h"
#include "layers/swiglu.h"
#include "model/model.h"

// t.dnorm = gradient of norm1, from t.dx = gradient of the attention block's output
static void attention_backward_block(Model* m, const Weight* w, const BlockSaved* s) {
    const ModelConfig* c = &m->config;
    const int64_t N = m->B * m->T;
    Scratch* t = &m->t;

    // Output, attention, positions.
    linear_backward(t->datt, t->dx, s->att, &w[WO], N, 0, m->ctx);
    attention_backward(t->dq, t->dkv, t->dkva + c->kv_lora, t->datt, s->att, s->lse, s->q, s->kv, s->kva + c->kv_lora,
                       m->attn_shape, m->ctx);
    model_rope(m, t->dq, t->dkva, -1);

    // Keys and values: to c_kv, beside the gradient of k_rope in dkva.
    linear_backward(t->dckv, t->dkv, s->ckv, &w[WKVB], N, 0, m->ctx);
    rmsnorm_backward(t->dkva, w[KV_NORM].grad, t->dckv, s->kva, w[WKVA].OC, w[KV_NORM].w, s->rstd_kv, N, c->kv_lora, 0,
                     m->ctx);

    // Queries.
    if (c->q_lora) {
        linear_backward(t->dcq_norm, t->dq, s->cq_norm, &w[WQB], N, 0, m->ctx);
        rmsnorm_backward(t->dcq, w[Q_NORM].grad, t->dcq_norm, s->cq, c->q_lora, w[Q_NORM].w, s->rstd_q, N, c->q_lora, 0,
                         m->ctx);
        linear_backward(t->dnorm, t->dcq, s->norm1, &w[WQA], N, 0, m->ctx);
    } else {
        linear_backward(t->dnorm, t->dq, s->norm1, &w[WQ], N, 0, m->ctx);
    }

    // Both meet in norm1.
    linear_backward(t->dnorm, t->dkva, s->norm1, &w[WKVA], N, 1, m->ctx);
}

// t.dnorm = gradient of norm2, from t.dx = gradient of the MLP's output
static void mlp_backward(Model* m, const Unit* u, float aux) {
    BlockSaved* s = &m->blocks[u->layer];
    Scratch* t = &m->t;
    const int64_t N = m->B * m->T;
    if (u->kind != UNIT_DENSE) {
        moe_backward(t->dnorm, t->dx, s->norm2, model_moe_weights(m, u), &s->moe, aux, m->moe_shape, m->dispatch,
                     m->pool, m->ctx);
        return;
    }
    linear_dgrad(t->dact, t->dx, &u->w[MLP2], N, 0, m->ctx);
    swiglu_backward(t->dh, t->act, t->dact, s->h, N, m->config.dense_ffn, m->ctx);
    linear_wgrad(t->dx, t->act, &u->w[MLP2], N, m->ctx);
    linear_backward(t->dnorm, t->dh, s->norm2, &u->w[MLP13], N, 0, m->ctx);
}

// t.dx = gradient of what the block read, from t.dx = gradient of the residual stream after it
static void block_backward(Model* m, const Unit* u, float aux) {
    const BlockSaved* s = &m->blocks[u->layer];
    const int64_t N = m->B * m->T, C = m->config.C;
    Scratch* t = &m->t;
    if (m->settings.recompute == RECOMPUTE_BLOCK) model_rebuild_block(m, u);
    mlp_backward(m, u, aux);
    rmsnorm_backward(t->dx, u->w[NORM2].grad, t->dnorm, s->residual2, C, u->w[NORM2].w, s->rstd2, N, C, 1, m->ctx);
    attention_backward_block(m, u->w, s);
    rmsnorm_backward(t->dx, u->w[NORM1].grad, t->dnorm, s->residual, C, u->w[NORM1].w, s->rstd1, N, C, 1, m->ctx);
}

// t.dx = gradient of the last block's output
static void output_backward(Model* m, int k, const Unit* u) {
    const Output* o = &m->outputs[k];
    const int64_t N = m->B * m->T, C = m->config.C;
    rmsnorm_backward(m->t.dx, u->w[FINAL_NORM].grad, o->dnorm, o->residual, C, u->w[FINAL_NORM].w, o->rstd, N, C, 0,
                     m->ctx);
}

// Of half of t.djoined through its norm: the gradient of the rows x (B, from, C), of which those from `first` on were
// taken.
static void join_backward(Model* m, floatX* dx, const Weight* w, floatX* half, const floatX* x, const real* rstd,
                          int64_t from, int64_t first, int accumulate) {
    const int64_t C = m->config.C, rows = m->B * from;
    floatX* dnorm = m->t.out;
    device_zero(dnorm, (size_t)(rows * C) * sizeof(floatX), m->ctx);
    model_copy_half(m, half, dnorm, from, first, 1);
    rmsnorm_backward(dx, w->grad, dnorm, x, C, w->w, rstd, rows, C, accumulate, m->ctx);
}

static void module_backward(Model* m, int k, float aux, int last) {
    const int unit = params_block_unit(&m->config, m->config.L - 1 + k);
    const int64_t T = m->window, C = m->config.C;
    const Output* before = &m->outputs[k - 1];
    Scratch* t = &m->t;
    model_shapes(m, k);
    Unit* u = unit_begin(m, unit, unit - 1);
    unit_grads_begin(m, unit);
    output_backward(m, k, u);
    block_backward(m, u, aux);

    // The projection, then both norms. The last module is the first that the embeddings get a gradient from.
    model_join(m, k, u->w);
    linear_backward(t->djoined, t->dx, t->joined, &u->w[EH_PROJ], m->B * m->T, 0, m->ctx);
    join_backward(m, t->dembed, &u->w[ENORM], t->djoined, m->blocks[0].residual, t->rstd_embed, T, k, k < m->further);
    join_backward(m, before->dnorm, &u->w[HNORM], t->djoined + C, before->norm, t->rstd_in, T - k + 1, 0, 1);
    unit_grads_end(m, unit, last);
    unit_end(m, unit);
    model_shapes(m, 0);
}

void model_backward(Model* m, float aux, int last) {
    const int64_t N = m->B * m->T, C = m->config.C;
    const int head = (int)m->config.L + 1;
    for (int k = m->further; k >= 1; k--) module_backward(m, k, aux, last);

    output_backward(m, 0, unit_begin(m, head, head - 1));  // lm_head's gradients are there since model_loss
    unit_grads_end(m, head, last);
    unit_end(m, head);

    for (int unit = head - 1; unit > 0; unit--) {
        // The embedding's weights are only for the next forward.
        Unit* u = unit_begin(m, unit, unit > 1 || !last ? unit - 1 : -1);
        unit_grads_begin(m, unit);
        block_backward(m, u, aux);
        unit_grads_end(m, unit, last);
        unit_end(m, unit);
    }

    real* dtable = m->units[0].buffer[DENSE_PARAMS].grad;
    unit_grads_begin(m, 0);
    embedding_backward(dtable, m->t.dx, m->tokens, N, m->config.V, C, m->ctx);
    if (m->further) embedding_backward(dtable, m->t.dembed, m->tokens, N, m->config.V, C, m->ctx);
    unit_grads_end(m, 0, last);
    m->first = 0;
}
