// Weights and gradients of a unit, and rotary positions: for blocks, the MTP module and passes.
#include "model/block.h"

void unit_quantized(Model* m, Unit* u) {
    for (int b = 0; b < BUFFERS; b++) u->version[b] = weights_version(m->sharding, b);
}

Unit* unit_begin(Model* m, int unit, int next) {
    Unit* u = &m->units[unit];
    // Waits for this unit's weights, and starts to gather the next unit's.
    weights_get(m->sharding, unit, m->ctx);
    weights_start(m->sharding, next);
    // Quantized copies are made once for each version of the weights.
    for (int i = 0; i < PARAMS; i++) {
        const int b = param_buffer((ParamId)i);
        if (u->at[i] >= 0 && u->version[b] != weights_version(m->sharding, b)) weight_quantize(&u->w[i], m->ctx);
    }
    unit_quantized(m, u);
    return u;
}

void unit_end(Model* m, int unit) { weights_release(m->sharding, unit, m->ctx); }

// Elements from .. end - 1 of a buffer.
static void zero_gradients(const ParamBuffer* p, int64_t from, int64_t end, Ctx* ctx) {
    if (p->rounded_grad)
        device_zero(p->rounded_grad + from, (size_t)(end - from) * sizeof(floatX), ctx);
    else
        device_zero(p->grad + from, (size_t)(end - from) * sizeof(real), ctx);
}

// GEMMs write a fresh gradient as a whole. The gradients of embedding, router and norms are added to. So these begin
// as 0, and with them the padding behind each matrix and buffer.
void unit_grads_begin(Model* m, int unit) {
    Unit* u = &m->units[unit];
    grads_get(m->sharding, unit, m->step.first, m->ctx);
    for (int b = 0; b < BUFFERS; b++) {
        const ParamBuffer* p = &u->buffer[b];
        int64_t done = 0;
        // Ids from LM_HEAD up to NORM1 are matrices. The gaps between those that GEMMs write become 0.
        for (int i = LM_HEAD; i < NORM1; i++) {
            if (u->at[i] < 0 || i == ROUTER || param_buffer((ParamId)i) != b) continue;
            Weight* w = &u->w[i];
            w->accumulate = !p->fresh;
            if (p->fresh) zero_gradients(p, done, u->at[i], m->ctx);
            done = u->at[i] + w->count * w->OC * w->IC;
        }
        if (p->fresh) zero_gradients(p, done, p->n, m->ctx);
    }
}

// Each rank adds the squares of its own shards, so each parameter counts once. The sums run on the side stream, in the
// order of backward.
void unit_grads_end(Model* m, int unit, int last) {
    Ctx* side = grads_reduce(m->sharding, unit, m->step.first, last, m->ctx);
    for (int b = 0; b < BUFFERS; b++) {
        const ParamBuffer* p = &m->units[unit].buffer[b];
        if (last && p->n) grad_norm_add(m->step.state, p->own_grad, p->rounded_grad, p->part, side);
    }
}

MoeWeights model_moe_weights(const Model* m, const Unit* u) {
    const Weight* w = u->w;
    MoeWeights weights = {w[ROUTER].w, w[ROUTER].grad, m->bias + u->layer * m->config.E, &w[W13], &w[W2],
                          &w[MLP13],   &w[MLP2]};
    return weights;
}

// Turns the rope parts of q (every head) and of kva (one vector a token).
void model_rope(Model* m, floatX* q, floatX* kva, int direction) {
    const ModelConfig* c = &m->config;
    // The rope part is the last of each query head, and the last of a row of kva.
    int64_t qk = c->nope + c->rope;
    RopeShape of_q = {m->shapes.N, m->shapes.T, c->H, c->rope, c->H * qk, qk};
    RopeShape of_k = {m->shapes.N, m->shapes.T, 1, c->rope, c->kv_lora + c->rope, 0};
    rope_apply(q + c->nope, of_q, kva + c->kv_lora, of_k, m->rope_table, direction, m->ctx);
}
