// The forward pass, top to bottom. Formulas and names: model/model.h.
#include <stddef.h>

#include "device/check.h"
#include "layers/embedding.h"
#include "layers/loss.h"
#include "layers/matmul.h"
#include "layers/rmsnorm.h"
#include "layers/swiglu.h"
#include "model/model.h"

// Turns the rope parts of q (every head) and of kva (one vector a token).
void model_rope(Model* m, floatX* q, floatX* kva, int direction) {
    const ModelConfig* c = &m->config;
    int64_t qk = c->nope + c->rope;
    RopeShape of_q = {m->B * m->T, m->T, c->H, c->rope, c->H * qk, qk};
    RopeShape of_k = {m->B * m->T, m->T, 1, c->rope, c->kv_lora + c->rope, 0};
    rope_apply(q + c->nope, m->rope_table, of_q, direction, m->ctx);
    rope_apply(kva + c->kv_lora, m->rope_table, of_k, direction, m->ctx);
}

// out = attention block's output for norm1
static void attention_block(Model* m, floatX* out, int64_t layer) {
    const ModelConfig* c = &m->config;
    const BlockSaved* s = &m->blocks[layer];
    const Unit* u = &m->units[layer + 1];
    const BlockMatrices* matrix = model_matrices(m, layer);
    const floatX* w = u->dense.weight;
    int64_t N = m->B * m->T, kva_rows = c->kv_lora + c->rope;
    if (c->q_lora) {
        linear_mx_forward(s->cq, s->norm1, &matrix->wqa, N, m->ctx);
        rmsnorm_forward(s->cq_norm, s->rstd_q, s->cq, c->q_lora, w + u->at.q_norm, N, c->q_lora, m->ctx);
        linear_mx_forward(s->q, s->cq_norm, &matrix->wqb, N, m->ctx);
    } else {
        linear_mx_forward(s->q, s->norm1, &matrix->wq, N, m->ctx);
    }
    matmul_forward(s->kva, s->norm1, w + u->at.wkva, N, c->C, kva_rows, m->ctx);
    rmsnorm_forward(s->ckv, s->rstd_kv, s->kva, kva_rows, w + u->at.kv_norm, N, c->kv_lora, m->ctx);
    linear_mx_forward(s->kv, s->ckv, &matrix->wkvb, N, m->ctx);
    model_rope(m, s->q, s->kva, +1);
    attention_forward(s->att, s->lse, s->q, s->kv, s->kva + c->kv_lora, model_attn_shape(m), m->ctx);
    linear_mx_forward(out, s->att, &matrix->wo, N, m->ctx);
}

static void dense_hidden(Model* m, int64_t layer) {
    const BlockSaved* s = &m->blocks[layer];
    linear_mx_forward(s->h, s->norm2, &model_matrices(m, layer)->mlp13, m->B * m->T, m->ctx);
}

static void mlp_block(Model* m, floatX* out, int64_t layer, int train) {
    BlockSaved* s = &m->blocks[layer];
    int64_t N = m->B * m->T;
    if (m->units[layer + 1].kind == UNIT_MOE) {
        int64_t* load = train ? m->load + layer * m->config.E : NULL;
        MxStats* stats = m->measures ? m->mx_stats + layer * BLOCK_STATS : NULL;
        moe_forward(out, s->norm2, model_moe_weights(m, layer), &s->moe, load, stats, model_moe_shape(m), m->ways,
                    m->ctx);
        return;
    }
    dense_hidden(m, layer);
    swiglu_forward(m->t.act, s->h, N, m->config.dense_ffn, m->ctx);
    linear_mx_forward(out, m->t.act, &model_matrices(m, layer)->mlp2, N, m->ctx);
}

// From norm1 on: attention, and the norm before the MLP.
static void attention_part(Model* m, int64_t layer) {
    const BlockSaved* s = &m->blocks[layer];
    const Unit* u = &m->units[layer + 1];
    const floatX* norm2 = u->dense.weight + u->at.norm2;
    attention_block(m, m->t.out, layer);
    residual_rmsnorm_forward(s->residual2, s->norm2, s->rstd2, s->residual, m->t.out, norm2, m->B * m->T, m->config.C,
                             m->ctx);
}

void model_rebuild_block(Model* m, int64_t layer) {
    const BlockSaved* s = &m->blocks[layer];
    const Unit* u = &m->units[layer + 1];
    int64_t C = m->config.C;
    rmsnorm_forward(s->norm1, s->rstd1, s->residual, C, u->dense.weight + u->at.norm1, m->B * m->T, C, m->ctx);
    attention_part(m, layer);
    if (u->kind == UNIT_DENSE) dense_hidden(m, layer);
}

void model_forward(Model* m, int train) {
    int64_t N = m->B * m->T, C = m->config.C, L = m->config.L;
    pool_release(m->pool, m->pool_empty);
    weights_get(m->sharding, 0, m->ctx);
    weights_start(m->sharding, 1);
    embedding_forward(m->blocks[0].residual, m->tokens, m->units[0].dense.weight, N, C, m->ctx);
    weights_release(m->sharding, 0, m->ctx);
    for (int64_t l = 0; l < L; l++) {
        const BlockSaved* s = &m->blocks[l];
        const Unit* u = &m->units[l + 1];
        int unit = (int)l + 1;
        weights_get(m->sharding, unit, m->ctx);
        weights_start(m->sharding, unit + 1);
        const floatX* norm1 = u->dense.weight + u->at.norm1;
        if (l == 0)
            rmsnorm_forward(s->norm1, s->rstd1, s->residual, C, norm1, N, C, m->ctx);
        else
            residual_rmsnorm_forward(s->residual, s->norm1, s->rstd1, s[-1].residual2, m->t.out, norm1, N, C, m->ctx);
        attention_part(m, l);
        mlp_block(m, m->t.out, l, train);
        weights_release(m->sharding, unit, m->ctx);
    }
    const Unit* head = &m->units[L + 1];
    weights_get(m->sharding, (int)L + 1, m->ctx);
    residual_rmsnorm_forward(m->final_residual, m->final_norm, m->final_rstd, m->blocks[L - 1].residual2, m->t.out,
                             head->dense.weight + head->at.final_norm, N, C, m->ctx);
    weights_release(m->sharding, (int)L + 1, m->ctx);
}

void model_loss(Model* m, StepState* state, float dscale) {
    int unit = (int)m->config.L + 1;
    const Unit* head = &m->units[unit];
    weights_get(m->sharding, unit, m->ctx);
    if (dscale != 0) grads_get(m->sharding, unit, m->ctx);
    const floatX* lm_head = head->dense.weight + head->at.lm_head;
    int64_t N = m->B * m->T, C = m->config.C, V = m->config.V, Vp = config_vocab_padded(&m->config);
    for (int64_t n = 0; n < N; n += m->chunk) {
        int64_t rows = N - n < m->chunk ? N - n : m->chunk;
        floatX *x = m->final_norm + n * C, *logits = m->t.logits;
        matmul_forward(logits, x, lm_head, rows, C, Vp, m->ctx);
        cross_entropy(m->losses + n, logits, m->targets + n, rows, V, Vp, dscale, m->ctx);
        if (dscale == 0) continue;
        matmul_dgrad(m->t.dnorm + n * C, logits, lm_head, rows, C, Vp, 0, m->ctx);
        matmul_wgrad(head->dense.grad + head->at.lm_head, logits, x, rows, C, Vp, m->ctx);
    }
    weights_release(m->sharding, unit, m->ctx);
    loss_add(state, m->losses, N, m->ctx);
}

void model_logits(Model* m, int64_t n, real* host_logits) {
    const Unit* head = &m->units[m->config.L + 1];
    int64_t C = m->config.C, Vp = config_vocab_padded(&m->config);
    ASSERT(n < m->B * m->T);
    weights_get(m->sharding, (int)m->config.L + 1, m->ctx);
    matmul_forward(m->t.logits, m->final_norm + n * C, head->dense.weight + head->at.lm_head, 1, C, Vp, m->ctx);
    weights_release(m->sharding, (int)m->config.L + 1, m->ctx);
    device_to_real(m->t.logits_row, m->t.logits, m->config.V, m->ctx);
    device_download(host_logits, m->t.logits_row, (size_t)m->config.V * sizeof(real), m->ctx);
}
