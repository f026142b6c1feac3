// Forward of a block, and the final norm; begin at block_forward. Formulas and names: model/model.h.
#include "layers/rmsnorm.h"
#include "model/block.h"

// eps of the latents' norms, whatever the model's rms_norm_eps: DeepSeek's code and transformers' have it so.
static const double LATENT_EPS = 1e-6;

// work.out = attention(norm1), and norm2 of the residual stream with it
static void mla_forward(Model* m, const Weight* w, const BlockSaved* block) {
    const ModelConfig* c = &m->config;
    const int64_t N = m->shapes.N;
    floatX* out = m->work.out;

    // Queries: straight from norm1, or through a normalised latent.
    if (c->q_lora) {
        linear_forward(block->cq, block->norm1, &w[WQA], N, m->ctx);
        rmsnorm_forward(block->cq_norm, block->rstd_q, block->cq, c->q_lora, w[Q_NORM].w, LATENT_EPS, N, c->q_lora,
                        m->ctx);
        linear_forward(block->q, block->cq_norm, &w[WQB], N, m->ctx);
    } else {
        linear_forward(block->q, block->norm1, &w[WQ], N, m->ctx);
    }

    // Keys and values from the normalized latent c_kv. kva also holds k_rope, which all heads share.
    linear_forward(block->kva, block->norm1, &w[WKVA], N, m->ctx);
    rmsnorm_forward(block->ckv, block->rstd_kv, block->kva, w[WKVA].OC, w[KV_NORM].w, LATENT_EPS, N, c->kv_lora,
                    m->ctx);
    linear_forward(block->kv, block->ckv, &w[WKVB], N, m->ctx);

    // Positions, attention, output.
    model_rope(m, block->q, block->kva, +1);
    attention_forward(block->att, block->lse, &m->step.state->max_logit, block->q, block->kv, block->kva + c->kv_lora,
                      m->shapes.attention, m->ctx);
    linear_forward(out, block->att, &w[WO], N, m->ctx);
    residual_rmsnorm_forward(block->residual2, block->norm2, block->rstd2, block->residual, out, w[NORM2].w,
                             c->norm_eps, N, c->C, m->ctx);
}

// Where a block counts its loads and, for quantile balancing, its margins: in training alone.
static BalanceCounts router_counts(const Model* m, const Unit* u, int train) {
    const int64_t first = u->layer * m->config.E;
    BalanceCounts counts = {train ? m->step.load + first : NULL,
                            m->step.margins ? m->step.margins + first * MARGIN_BINS : NULL};
    return counts;
}

// work.out = mlp(norm2)
static void mlp_forward(Model* m, const Unit* u, int train) {
    BlockSaved* block = &m->blocks[u->layer];
    const Workspace* work = &m->work;
    if (u->kind == UNIT_DENSE) {
        linear_mlp_hidden(work->mlp.a, block->h, block->norm2, &u->w[MLP13], m->shapes.N, m->ctx);
        linear_forward(work->out, work->mlp.a, &u->w[MLP2], m->shapes.N, m->ctx);
    } else {
        moe_forward(work->out, block->norm2, model_moe_weights(m, u), &block->moe, router_counts(m, u, train),
                    m->shapes.moe, m->dispatch, m->pool, m->ctx);
    }
}

// Backward needs no output of the MLP, so the last product is not repeated.
void model_rebuild_block(Model* m, const Unit* u) {
    const BlockSaved* block = &m->blocks[u->layer];
    const int64_t N = m->shapes.N, C = m->config.C;
    rmsnorm_forward(block->norm1, block->rstd1, block->residual, C, u->w[NORM1].w, m->config.norm_eps, N, C, m->ctx);
    mla_forward(m, u->w, block);
    if (u->kind == UNIT_DENSE) linear_forward(block->h, block->norm2, &u->w[MLP13], N, m->ctx);
}

void block_forward(Model* m, const Unit* u, int train) {
    const BlockSaved* block = &m->blocks[u->layer];
    const int64_t N = m->shapes.N, C = m->config.C;
    // The previous block's output joins the residual stream where the next norm reads it.
    if (u->layer == 0 || u->kind == UNIT_MODULE) {
        rmsnorm_forward(block->norm1, block->rstd1, block->residual, C, u->w[NORM1].w, m->config.norm_eps, N, C,
                        m->ctx);
    } else {
        const BlockSaved* previous = &m->blocks[u->layer - 1];
        residual_rmsnorm_forward(block->residual, block->norm1, block->rstd1, previous->residual2, m->work.out,
                                 u->w[NORM1].w, m->config.norm_eps, N, C, m->ctx);
    }
    mla_forward(m, u->w, block);
    mlp_forward(m, u, train);
}

// The last residual add and the final norm are one op. Output k follows block L - 1 + k.
void output_forward(Model* m, int k, const Unit* u) {
    const Output* o = &m->outputs[k];
    residual_rmsnorm_forward(o->residual, o->norm, o->rstd, m->blocks[m->config.L - 1 + k].residual2, m->work.out,
                             u->w[FINAL_NORM].w, m->config.norm_eps, m->shapes.N, m->config.C, m->ctx);
}
