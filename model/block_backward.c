// Backward of a block, and of the final norm: model/block_forward.c from bottom to top. t.dx, the gradient of the
// residual stream, accumulates. Gradients of parameters are written in a step's first micro-step and accumulate in
// later ones. All other gradients are written. Activation checkpointing (--recompute) repeats the forward of a block
// first.
#include "layers/rmsnorm.h"
#include "model/block.h"

// t.dnorm = gradient of norm1, from t.dx = gradient of the attention block's output
static void mla_backward(Model* m, const Weight* w, const BlockSaved* s) {
    const ModelConfig* c = &m->config;
    const int64_t N = m->shapes.N;
    Workspace* t = &m->t;
    enum { OUTPUT, KVB, KVA, QB, QA };
    LinearGradient products[] = {
        {&w[WO], t->dx, s->att, 0},
        {&w[WKVB], t->dkv, s->ckv, 0},
        {&w[WKVA], t->dkva, s->norm1, 0},
        {&w[c->q_lora ? WQB : WQ], t->dq, c->q_lora ? s->cq_norm : s->norm1, 0},
        {&w[WQA], t->dcq, s->norm1, 0},  // with q_lora
    };

    // Output, attention, positions.
    linear_dgrad(t->datt, &products[OUTPUT], N, 0, m->ctx);
    attention_backward(t->dq, t->dkv, t->dkva + c->kv_lora, t->datt, s->att, s->lse, s->q, s->kv, s->kva + c->kv_lora,
                       m->shapes.attention, m->ctx);
    model_rope(m, t->dq, t->dkva, -1);

    // Keys and values: the gradient of c_kv joins that of k_rope in dkva.
    linear_dgrad(t->dckv, &products[KVB], N, 0, m->ctx);
    rmsnorm_backward(t->dkva, w[KV_NORM].grad, t->dckv, s->kva, w[WKVA].OC, w[KV_NORM].w, s->rstd_kv, N, c->kv_lora, 0,
                     m->ctx);

    // Queries.
    if (c->q_lora) {
        linear_dgrad(t->dcq_norm, &products[QB], N, 0, m->ctx);
        rmsnorm_backward(t->dcq, w[Q_NORM].grad, t->dcq_norm, s->cq, c->q_lora, w[Q_NORM].w, s->rstd_q, N, c->q_lora, 0,
                         m->ctx);
        linear_dgrad(t->dnorm, &products[QA], N, 0, m->ctx);
    } else {
        linear_dgrad(t->dnorm, &products[QB], N, 0, m->ctx);
    }

    // Both meet in norm1.
    linear_dgrad(t->dnorm, &products[KVA], N, 1, m->ctx);

    // The weights' gradients.
    linear_wgrads(products, c->q_lora ? 5 : 4, N, m->ctx);
}

// t.dnorm = gradient of norm2, from t.dx = gradient of the MLP's output
static void mlp_backward(Model* m, const Unit* u, float aux) {
    BlockSaved* s = &m->blocks[u->layer];
    Workspace* t = &m->t;
    const int64_t N = m->shapes.N;
    // A MoE block, or an MTP module.
    if (u->kind != UNIT_DENSE) {
        moe_backward(t->dnorm, t->dx, s->norm2, model_moe_weights(m, u), &s->moe, aux, m->shapes.moe, m->dispatch,
                     m->pool, m->ctx);
        return;
    }
    // A dense block. t.act is computed again from h, so forward does not keep it.
    LinearGradient products[] = {{&u->w[MLP2], t->dx, t->act, 0}, {&u->w[MLP13], t->dh, s->norm2, 0}};
    linear_dgrad(t->dact, &products[0], N, 0, m->ctx);
    linear_swiglu_backward(t->dnorm, t->dh, t->act, t->dact, s->h, &products[1], N, m->ctx);
    linear_wgrads(products, 2, N, m->ctx);
}

// Both norms add to t.dx, because the residual stream goes around attention and MLP.
void block_backward(Model* m, const Unit* u, float aux) {
    const BlockSaved* s = &m->blocks[u->layer];
    const int64_t N = m->shapes.N, C = m->config.C;
    Workspace* t = &m->t;
    if (m->settings.recompute == RECOMPUTE_BLOCK) model_rebuild_block(m, u);
    mlp_backward(m, u, aux);
    rmsnorm_backward(t->dx, u->w[NORM2].grad, t->dnorm, s->residual2, C, u->w[NORM2].w, s->rstd2, N, C, 1, m->ctx);
    mla_backward(m, u->w, s);
    rmsnorm_backward(t->dx, u->w[NORM1].grad, t->dnorm, s->residual, C, u->w[NORM1].w, s->rstd1, N, C, 1, m->ctx);
}

// The first gradient of its chain: it overwrites t.dx.
void output_backward(Model* m, int k, const Unit* u) {
    const Output* o = &m->outputs[k];
    const int64_t N = m->shapes.N, C = m->config.C;
    rmsnorm_backward(m->t.dx, u->w[FINAL_NORM].grad, o->dnorm, o->residual, C, u->w[FINAL_NORM].w, o->rstd, N, C, 0,
                     m->ctx);
}
