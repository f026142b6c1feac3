// The passes of a model: forward, loss and backward of a micro-batch. Passes go through the units: embedding, blocks
// (model/block_forward.c, model/block_backward.c), final norm and lm_head, then the MTP module (model/mtp.c).
#include "device/check.h"
#include "layers/embedding.h"
#include "layers/loss.h"
#include "model/block.h"

void model_forward(Model* m, int train) {
    const int head = (int)m->config.L + 1;
    // A micro-batch begins with an empty pool: no activations of the one before are needed.
    pool_release(m->pool, 0);
    m->shapes.moe.windows = train && m->windows;  // validation has no step to run again
    m->mtp = train && m->config.mtp;

    Unit* u = unit_begin(m, 0, 1);
    embedding_forward(m->blocks[0].residual, m->tokens, u->w[EMBED].w, m->shapes.N, m->config.C, m->ctx);
    unit_end(m, 0);

    for (int unit = 1; unit < head; unit++) {
        block_forward(m, unit_begin(m, unit, unit + 1), train);
        unit_end(m, unit);
    }

    // The final norm, then the MTP module.
    output_forward(m, 0, unit_begin(m, head, m->mtp ? head + 1 : -1));
    unit_end(m, head);
    if (m->mtp) module_forward(m);
}

// A chunk of tokens at a time: cross_entropy overwrites its logits with their gradient.
// k: the main model (0) or the MTP module (1). *sum += its losses, in nats. dscale 0: no gradients.
static void output_loss(Model* m, int k, Weight* w, double* sum, float dscale) {
    const int64_t N = m->shapes.B * (m->shapes.T - k), C = m->config.C;
    const Output* o = &m->outputs[k];
    const int32_t* targets = m->targets + k * m->shapes.N;
    for (int64_t n = 0; n < N; n += m->work.chunk) {
        const int64_t rows = min_i64(m->work.chunk, N - n);
        floatX *x = o->norm + n * C, *logits = m->work.logits;
        linear_forward(logits, x, w, rows, m->ctx);
        cross_entropy(m->losses + n, logits, targets + n, rows, m->config.V, w->OC, dscale, m->ctx);
        if (dscale != 0) linear_backward(o->dnorm + n * C, logits, x, w, rows, m->ctx);
        w->accumulate = 1;  // the next chunk adds to lm_head's gradient
    }
    loss_add(sum, m->losses, N, m->ctx);
}

void model_loss(Model* m, StepState* state, float dscale) {
    const int head = (int)m->config.L + 1;
    // The head's gradients begin here, not in model_backward.
    Weight* w = &unit_begin(m, head, -1)->w[LM_HEAD];
    if (dscale != 0) unit_grads_begin(m, head);
    output_loss(m, 0, w, &state->loss_sum, dscale);
    if (m->mtp) output_loss(m, 1, w, &state->mtp_sum, dscale * m->step.mtp_weight);
    unit_end(m, head);
}

// From the outputs' gradients, which model_loss wrote, to the embedding.
void model_backward(Model* m, float aux, int last) {
    const int64_t N = m->shapes.N, C = m->config.C;
    const int head = (int)m->config.L + 1;
    // The MTP module, which adds to the gradient of the main model's output.
    if (m->mtp) module_backward(m, aux, last);

    // The final norm.
    output_backward(m, 0, unit_begin(m, head, head - 1));  // lm_head's gradients are there since model_loss
    unit_grads_end(m, head, last);
    unit_end(m, head);

    // Blocks. The reduction of a unit over the ranks overlaps with the backward of the next.
    for (int unit = head - 1; unit > 0; unit--) {
        // The embedding's weights are for the next forward; after the last micro-step they change before it.
        Unit* u = unit_begin(m, unit, unit > 1 || !last ? unit - 1 : -1);
        unit_grads_begin(m, unit);
        block_backward(m, u, aux);
        unit_grads_end(m, unit, last);
        unit_end(m, unit);
    }

    // The embedding. The MTP module reads it too, so its gradient is added.
    real* dtable = m->units[0].buffer[DENSE_PARAMS].grad;
    unit_grads_begin(m, 0);
    embedding_backward(dtable, m->work.dx, m->tokens, N, m->config.V, C, m->ctx);
    if (m->mtp) embedding_backward(dtable, m->work.dembed, m->tokens, N, m->config.V, C, m->ctx);
    unit_grads_end(m, 0, last);
    if (last) sharding_follow(m->sharding, m->ctx, sharding_side(m->sharding));
}

void model_logits(Model* m, int64_t n, real* host_logits) {
    const int head = (int)m->config.L + 1;
    ASSERT(n < m->shapes.N);
    // One row of logits, as float32 for the host.
    const Unit* u = unit_begin(m, head, -1);
    linear_forward(m->work.logits, m->outputs[0].norm + n * m->config.C, &u->w[LM_HEAD], 1, m->ctx);
    unit_end(m, head);
    device_to_real(m->work.logits_row, m->work.logits, m->config.V, m->ctx);
    device_download(host_logits, m->work.logits_row, (size_t)m->config.V * sizeof(real), m->ctx);
}
