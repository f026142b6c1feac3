// The micro-steps of a training step (gradient accumulation), replayed as CUDA graphs if possible (device/graph.h).
#include "device/random.h"
#include "model/block.h"
#include "model/windows.h"

enum { KEY_STREAM = 0xFFFFFFFFu - 2 };  // apart from the streams of the weights (model/params.h)

void model_step_begin(Model* m, int64_t step) {
    const RunConfig* s = &m->run;
    const float muon_lr = (float)run_muon_lr(s, step);
    const StepInputs inputs = {
        {(float)run_lr(s, step), (float)s->beta1, (float)s->beta2, (float)s->weight_decay, (float)s->clip},
        {{muon_lr, (float)s->weight_decay}, {muon_lr * (float)s->muon_expert_steps, (float)s->weight_decay}}};
    const int64_t blocks = config_blocks(&m->config), experts = blocks * m->config.E;
    // Hyperparameters go to device memory, where a replayed graph reads them.
    device_upload(m->step.inputs, &inputs, sizeof(inputs), m->ctx);
    // Host state: it selects the graph.
    m->step.first = 1;
    m->step.waits[EXPERT_PARAMS] = step % s->muon_expert_steps != 0;
    // Multi-token prediction.
    const double weight = run_mtp_weight(s, step);
    m->step.late = weight != s->mtp_weight;
    m->step.mtp_weight = (float)weight;
    // Random numbers of the step. Each rank takes one batch after another.
    uint32_t word[4];
    philox(word, (uint64_t)s->seed, KEY_STREAM, (uint64_t)step);
    m->gemms.key = (uint64_t)word[1] << 32 | word[0];
    m->gemms.before = m->layout.rank;
    // Counters of the step.
    device_zero(m->step.load, (size_t)experts * sizeof(int64_t), m->ctx);
    if (m->step.margins) device_zero(m->step.margins, (size_t)(experts * MARGIN_BINS) * sizeof(int64_t), m->ctx);
    // Statistics, in some steps.
    m->gemms.stats = s->stats_every && step % s->stats_every == 0 ? m->step.stats : NULL;
    if (m->gemms.stats) device_zero(m->gemms.stats, (size_t)(blocks * BLOCK_STATS) * sizeof(QuantizationStats), m->ctx);
    step_begin(m->step.state, m->ctx);
}

// Gradients are of the mean loss over all tokens of the step, so micro-steps and ranks add up.
static void forward_and_backward(Model* m, int last) {
    double tokens = (double)m->run.tokens_per_step;
    model_forward(m, 1);
    if (last) windows_fetch(m);
    model_loss(m, m->step.state, (float)(1 / tokens));
    // The balance loss is a mean over the sequences of the step.
    model_backward(m, (float)(m->run.aux_loss * (double)m->run.seq_len / tokens), last);
}

static void micro_step(void* model) { forward_and_backward((Model*)model, 0); }
static void last_micro_step(void* model) { forward_and_backward((Model*)model, 1); }

void model_micro_step(Model* m, int last) {
    // Micro-steps of a kind give the device the same work. After a change of the weights it also quantizes them: all,
    // or the dense ones.
    int quantizes = 0;
    for (int b = 0; b < BUFFERS && m->shapes.moe.formats.any; b++) {
        int old = 0;  // A validation leaves the MTP module's copies as they were. Then all units quantize again.
        for (int u = 0; u < params_units(&m->config); u++)
            old |= m->units[u].version[b] != weights_version(m->sharding, b);
        for (int u = 0; u < params_units(&m->config) && old; u++) m->units[u].version[b] = 0;
        quantizes += old;
    }
    Graph* graph = m->gemms.stats ? NULL : m->graphs[m->step.first | last << 1 | m->step.late << 2 | quantizes << 3];
    graph_run(graph, last ? last_micro_step : micro_step, m, m->ctx);
    // Host state, which a replayed graph does not change.
    m->step.first = 0;
    m->gemms.before += m->layout.ranks;
    for (int u = 0; u < params_units(&m->config); u++) unit_quantized(m, &m->units[u]);
}

void model_gradient(Model* m, Loader* loader, int64_t step) {
    const RunConfig* s = &m->run;
    const int64_t micro_steps = s->tokens_per_step / run_micro_tokens(s);
    do {
        model_step_begin(m, step);
        for (int64_t i = 0; i < micro_steps; i++) {
            const int32_t *input, *target;
            loader_read(loader, (step - 1) * micro_steps + i, &input, &target);
            model_batch(m, input, target, s->batch, s->seq_len);
            model_micro_step(m, i == micro_steps - 1);
        }
    } while (windows_overflowed(m, step));
}
