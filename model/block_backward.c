// Backward of a block, and of the final norm: model/block_forward.c from bottom to top. work.dx, the gradient of the
// residual stream, accumulates. Gradients of GEMM weights are written in a step's first micro-step, and accumulate in
// later micro-steps. Gradients of norms and router always accumulate. All other gradients are written. With activation
// checkpointing (--recompute block) the block's forward first runs again.
#include "layers/rmsnorm.h"
#include "model/block.h"

// work.dnorm = gradient of norm1, from work.dx = gradient of the attention block's output
static void mla_backward(Model* m, const Weight* w, const BlockSaved* block) {
    const ModelConfig* c = &m->config;
    const int64_t N = m->shapes.N;
    Workspace* work = &m->work;
    enum { OUTPUT, KVB, KVA, QB, QA };
    LinearGradient products[] = {
        {&w[WO], work->dx, block->att, 0},
        {&w[WKVB], work->dkv, block->ckv, 0},
        {&w[WKVA], work->dkva, block->norm1, 0},
        {&w[c->q_lora ? WQB : WQ], work->dq, c->q_lora ? block->cq_norm : block->norm1, 0},
        {&w[WQA], work->dcq, block->norm1, 0},  // with q_lora
    };

    // Output, attention, positions.
    linear_dgrad(work->datt, &products[OUTPUT], N, 0, m->ctx);
    attention_backward(work->dq, work->dkv, work->dkva + c->kv_lora, work->datt, block->att, block->lse, block->q,
                       block->kv, block->kva + c->kv_lora, m->shapes.attention, m->ctx);
    model_rope(m, work->dq, work->dkva, -1);

    // Keys and values: the gradient of c_kv joins that of k_rope in dkva.
    linear_dgrad(work->dckv, &products[KVB], N, 0, m->ctx);
    rmsnorm_backward(work->dkva, w[KV_NORM].grad, work->dckv, block->kva, w[WKVA].OC, w[KV_NORM].w, block->rstd_kv, N,
                     c->kv_lora, 0, m->ctx);

    // Queries.
    if (c->q_lora) {
        linear_dgrad(work->dcq_norm, &products[QB], N, 0, m->ctx);
        rmsnorm_backward(work->dcq, w[Q_NORM].grad, work->dcq_norm, block->cq, c->q_lora, w[Q_NORM].w, block->rstd_q, N,
                         c->q_lora, 0, m->ctx);
        linear_dgrad(work->dnorm, &products[QA], N, 0, m->ctx);
    } else {
        linear_dgrad(work->dnorm, &products[QB], N, 0, m->ctx);
    }

    // Both meet in norm1.
    linear_dgrad(work->dnorm, &products[KVA], N, 1, m->ctx);

    // The weights' gradients.
    linear_wgrads(products, c->q_lora ? 5 : 4, N, m->ctx);
}

// work.dnorm = gradient of norm2, from work.dx = gradient of the MLP's output
static void mlp_backward(Model* m, const Unit* u, float aux) {
    BlockSaved* block = &m->blocks[u->layer];
    const Workspace* work = &m->work;
    if (u->kind == UNIT_DENSE)
        linear_mlp_backward(work->dnorm, work->dx, block->norm2, block->h, work->mlp, &u->w[MLP13], &u->w[MLP2],
                            m->shapes.N, m->ctx);
    else  // a MoE block, or the MTP module
        moe_backward(work->dnorm, work->dx, block->norm2, model_moe_weights(m, u), &block->moe, aux, m->shapes.moe,
                     m->dispatch, m->pool, m->ctx);
}

// Both norms add to work.dx, because the residual stream goes around attention and MLP.
void block_backward(Model* m, const Unit* u, float aux) {
    const BlockSaved* block = &m->blocks[u->layer];
    const int64_t N = m->shapes.N, C = m->config.C;
    Workspace* work = &m->work;
    if (m->run.recompute == RECOMPUTE_BLOCK) model_rebuild_block(m, u);
    mlp_backward(m, u, aux);
    rmsnorm_backward(work->dx, u->w[NORM2].grad, work->dnorm, block->residual2, C, u->w[NORM2].w, block->rstd2, N, C, 1,
                     m->ctx);
    mla_backward(m, u->w, block);
    rmsnorm_backward(work->dx, u->w[NORM1].grad, work->dnorm, block->residual, C, u->w[NORM1].w, block->rstd1, N, C, 1,
                     m->ctx);
}

// The first gradient of its chain: it overwrites work.dx.
void output_backward(Model* m, int k, const Unit* u) {
    const Output* o = &m->outputs[k];
    const int64_t N = m->shapes.N, C = m->config.C;
    rmsnorm_backward(m->work.dx, u->w[FINAL_NORM].grad, o->dnorm, o->residual, C, u->w[FINAL_NORM].w, o->rstd, N, C, 0,
                     m->ctx);
}
