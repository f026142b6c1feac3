// The backward pass: model/forward.c from bottom to top. t.dx is the gradient of the residual stream and is added to;
// gradients of parameters are added to; all others are written.
#include "layers/embedding.h"
#include "layers/matmul.h"
#include "layers/rmsnorm.h"
#include "layers/swiglu.h"
#include "model/model.h"

// t.dnorm = gradient of norm1, from t.dx = gradient of the attention block's output
static void attention_backward_block(Model* m, int64_t layer) {
    const ModelConfig* c = &m->config;
    const BlockSaved* s = &m->blocks[layer];
    const Unit* u = &m->units[layer + 1];
    const BlockMatrices* matrix = model_matrices(m, layer);
    const floatX* w = u->dense.weight;
    real* g = u->dense.grad;
    const UnitLayout* at = &u->at;
    Scratch* t = &m->t;
    int64_t N = m->B * m->T, C = c->C, q_rows = c->H * (c->nope + c->rope), kva_rows = c->kv_lora + c->rope;
    int64_t kv_rows = c->H * (c->nope + c->v), att_rows = c->H * c->v;
    linear_mx_dgrad(t->datt, t->dx, &matrix->wo, N, m->ctx);
    matmul_wgrad(g + at->wo, t->dx, s->att, N, att_rows, C, m->ctx);
    attention_backward(t->dq, t->dkv, t->dkva + c->kv_lora, t->datt, s->att, s->lse, s->q, s->kv, s->kva + c->kv_lora,
                       model_attn_shape(m), m->ctx);
    model_rope(m, t->dq, t->dkva, -1);
    linear_mx_dgrad(t->dckv, t->dkv, &matrix->wkvb, N, m->ctx);
    matmul_wgrad(g + at->wkvb, t->dkv, s->ckv, N, c->kv_lora, kv_rows, m->ctx);
    rmsnorm_backward(t->dkva, g + at->kv_norm, t->dckv, s->kva, kva_rows, w + at->kv_norm, s->rstd_kv, N, c->kv_lora, 0,
                     m->ctx);
    if (c->q_lora) {
        linear_mx_dgrad(t->dcq_norm, t->dq, &matrix->wqb, N, m->ctx);
        matmul_wgrad(g + at->wqb, t->dq, s->cq_norm, N, c->q_lora, q_rows, m->ctx);
        rmsnorm_backward(t->dcq, g + at->q_norm, t->dcq_norm, s->cq, c->q_lora, w + at->q_norm, s->rstd_q, N, c->q_lora,
                         0, m->ctx);
        linear_mx_dgrad(t->dnorm, t->dcq, &matrix->wqa, N, m->ctx);
        matmul_wgrad(g + at->wqa, t->dcq, s->norm1, N, C, c->q_lora, m->ctx);
    } else {
        linear_mx_dgrad(t->dnorm, t->dq, &matrix->wq, N, m->ctx);
        matmul_wgrad(g + at->wq, t->dq, s->norm1, N, C, q_rows, m->ctx);
    }
    matmul_dgrad(t->dnorm, t->dkva, w + at->wkva, N, C, kva_rows, 1, m->ctx);
    matmul_wgrad(g + at->wkva, t->dkva, s->norm1, N, C, kva_rows, m->ctx);
}

// t.dnorm = gradient of norm2, from t.dx = gradient of the MLP's output
static void mlp_backward(Model* m, int64_t layer, float aux) {
    BlockSaved* s = &m->blocks[layer];
    const Unit* u = &m->units[layer + 1];
    const BlockMatrices* matrix = model_matrices(m, layer);
    real* g = u->dense.grad;
    Scratch* t = &m->t;
    int64_t N = m->B * m->T, C = m->config.C, F = m->config.dense_ffn;
    if (u->kind == UNIT_MOE) {
        MoeGrads dw = {g + u->at.router, u->experts.grad + u->at.w13, u->experts.grad + u->at.w2, g + u->at.mlp13,
                       g + u->at.mlp2};
        moe_backward(t->dnorm, t->dx, s->norm2, model_moe_weights(m, layer), dw, &s->moe, aux, model_moe_shape(m),
                     m->ways, m->ctx);
        return;
    }
    linear_mx_dgrad(t->dact, t->dx, &matrix->mlp2, N, m->ctx);
    swiglu_backward(t->dh, t->act, t->dact, s->h, N, F, m->ctx);
    matmul_wgrad(g + u->at.mlp2, t->dx, t->act, N, F, C, m->ctx);
    linear_mx_dgrad(t->dnorm, t->dh, &matrix->mlp13, N, m->ctx);
    matmul_wgrad(g + u->at.mlp13, t->dh, s->norm2, N, C, 2 * F, m->ctx);
}

void model_backward(Model* m, float aux, int last_micro_step) {
    int64_t N = m->B * m->T, C = m->config.C, L = m->config.L;
    int last = last_micro_step, unit = (int)L + 1;
    Scratch* t = &m->t;
    const Unit* head = &m->units[L + 1];
    weights_get(m->sharding, unit, m->ctx);
    weights_start(m->sharding, unit - 1);
    rmsnorm_backward(t->dx, head->dense.grad + head->at.final_norm, t->dnorm, m->final_residual, C,
                     head->dense.weight + head->at.final_norm, m->final_rstd, N, C, 0, m->ctx);
    grads_reduce(m->sharding, unit, last, m->ctx);
    weights_release(m->sharding, unit, m->ctx);
    for (int64_t l = L - 1; l >= 0; l--) {
        const BlockSaved* s = &m->blocks[l];
        const Unit* u = &m->units[l + 1];
        unit = (int)l + 1;
        weights_get(m->sharding, unit, m->ctx);
        if (l > 0 || !last) weights_start(m->sharding, unit - 1);  // the embedding's only for the next forward
        grads_get(m->sharding, unit, m->ctx);
        const floatX* w = u->dense.weight;
        real* g = u->dense.grad;
        if (m->settings.recompute == RECOMPUTE_BLOCK) model_rebuild_block(m, l);
        mlp_backward(m, l, aux);
        rmsnorm_backward(t->dx, g + u->at.norm2, t->dnorm, s->residual2, C, w + u->at.norm2, s->rstd2, N, C, 1, m->ctx);
        attention_backward_block(m, l);
        rmsnorm_backward(t->dx, g + u->at.norm1, t->dnorm, s->residual, C, w + u->at.norm1, s->rstd1, N, C, 1, m->ctx);
        grads_reduce(m->sharding, unit, last, m->ctx);
        weights_release(m->sharding, unit, m->ctx);
    }
    grads_get(m->sharding, 0, m->ctx);
    embedding_backward(m->units[0].dense.grad, t->dx, m->tokens, N, m->config.V, C, m->ctx);
    grads_reduce(m->sharding, 0, last, m->ctx);
}
