// Memory of a model: plan, allocation, release.
#include "model/model.h"

#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "layers/embedding.h"
#include "layers/matmul.h"
#include "layers/rmsnorm.h"
#include "model/windows.h"
#include "mx/mx_check.h"

void model_shapes(Model* m, int module) {
    const ModelConfig* c = &m->config;
    const RunConfig* s = &m->run;
    const int64_t B = m->shapes.B, T = m->shapes.window - module, N = B * T;
    m->shapes.T = T;
    m->shapes.N = N;
    m->gemms.batch = module;

    // Attention, in the order of the struct.
    const AttnShape attn = {B, T, c->H, c->nope, c->rope, c->v, c->kv_lora + c->rope, (float)config_softmax_scale(c)};
    m->shapes.attention = attn;

    // Router and MoE block, in the order of their structs.
    const int32_t E = (int32_t)c->E, K = (int32_t)c->K, groups = (int32_t)c->groups, top = (int32_t)c->top_groups;
    const int32_t score = (int32_t)c->score, norm = (int32_t)c->route_norm, forced = (int32_t)s->force_balance;
    const RouterShape router = {N, T, c->C, E, K, groups, top, score, norm, (float)c->route_scale, forced};
    const int32_t ep = m->layout.ep, recompute = s->recompute != RECOMPUTE_NONE;
    const MoeShape* old = &m->shapes.moe;
    const MoeShape moe = {router, c->F, c->shared * c->F, ep, recompute, old->formats, old->capacity, old->windows};
    m->shapes.moe = moe;
}

// The weights of a unit as GEMMs take them, and memory for quantized copies.
static void plan_weights(Model* m, int unit) {
    Unit* u = &m->units[unit];
    const Formats* f = &m->shapes.moe.formats;
    Param list[PARAMS];
    const int count = params_list(list, &m->config, u->kind);
    for (int i = 0; i < count; i++) {
        const Param* p = &list[i];
        const int mlp = p->id == MLP13 || p->id == MLP2, expert = param_buffer(p->id) == EXPERT_PARAMS;
        Weight* w = &u->w[p->id];
        w->workspace = &m->gemms;
        w->format = format_in_block(f->gemm[p->quantized_by], u->layer, m->config.L);
        w->wgrad = format_in_block(f->wgrad[p->quantized_by], u->layer, m->config.L);
        // An expert's number follows in the lowest bits.
        w->stream = (uint32_t)(u->layer * PARAMS + (int)p->id) * 2 * WEIGHT_STREAMS;
        if (expert) w->stream += (uint32_t)(m->layout.rank % m->layout.ep * w->count);
        // The gradients of attention are computed together, and so are those of a dense or shared MLP.
        weight_plan(&m->arena[IN_PARAMS], w, expert ? 0 : 1 + 2 * unit + mlp);
    }
}

// Addresses of each weight and its gradient, whole or in a slot (parallel/sharding.h).
static void set_weights(Unit* u) {
    for (int i = 0; i < PARAMS; i++) {
        const ParamBuffer* buffer = &u->buffer[param_buffer((ParamId)i)];
        if (u->at[i] < 0) continue;
        u->w[i].w = buffer->weight + u->at[i];
        if (buffer->grad) u->w[i].grad = buffer->grad + u->at[i];
        if (buffer->rounded_grad) u->w[i].rounded_grad = buffer->rounded_grad + u->at[i];
    }
}

// The activations of a block, all but its input.
static void plan_block(Arena* a, BlockSaved* block, const Model* m, int dense_mlp) {
    const ModelConfig* c = &m->config;
    int64_t N = m->shapes.N;
    ARENA(a, "norm before attention", ELEMENT_X, N * c->C, 1, &block->norm1);
    // Queries, then keys and values.
    if (c->q_lora) {
        ARENA(a, "query latent", ELEMENT_X, N * c->q_lora, 1, &block->cq);
        ARENA(a, "query latent, normalised", ELEMENT_X, N * c->q_lora, 1, &block->cq_norm);
        ARENA(a, "rstd", ELEMENT_REAL, N, 1, &block->rstd_q);
    }
    ARENA(a, "queries", ELEMENT_X, N * c->H * (c->nope + c->rope), 1, &block->q);
    ARENA(a, "key-value latent and k_rope", ELEMENT_X, N * (c->kv_lora + c->rope), 1, &block->kva);
    ARENA(a, "key-value latent, normalised", ELEMENT_X, N * c->kv_lora, 1, &block->ckv);
    ARENA(a, "keys and values", ELEMENT_X, N * c->H * (c->nope + c->v), 1, &block->kv);
    ARENA(a, "attention output", ELEMENT_X, N * c->H * c->v, 1, &block->att);
    ARENA(a, "attention log-sum-exp", ELEMENT_REAL, N * c->H, 1, &block->lse);
    // The MLP's input. A MoE block keeps its other activations in the pool.
    ARENA(a, "residual before MLP", ELEMENT_X, N * c->C, 1, &block->residual2);
    ARENA(a, "norm before MLP", ELEMENT_X, N * c->C, 1, &block->norm2);
    // 1 / RMS of each token, for the backward of the norms.
    ARENA(a, "rstd", ELEMENT_REAL, N, 1, &block->rstd1);
    ARENA(a, "rstd", ELEMENT_REAL, N, 1, &block->rstd2);
    ARENA(a, "rstd", ELEMENT_REAL, N, 1, &block->rstd_kv);
    if (dense_mlp) ARENA(a, "dense MLP hidden", ELEMENT_X, N * 2 * c->dense_ffn, 1, &block->h);
}

// Buffers of one block at a time. Only `out`, `dx` and `dembed` carry values to the next.
static void plan_scratch(Arena* a, Model* m) {
    const ModelConfig* c = &m->config;
    Workspace* work = &m->work;
    int64_t N = m->shapes.N;
    // Residual stream and dense MLP.
    ARENA(a, "block output", ELEMENT_X, N * c->C, 1, &work->out);
    ARENA(a, "d residual stream", ELEMENT_X, N * c->C, 1, &work->dx);
    ARENA(a, "d norm", ELEMENT_X, N * c->C, 1, &work->dnorm);
    if (c->dense_layers) {
        ARENA(a, "dense MLP activation", ELEMENT_X, N * c->dense_ffn, 1, &work->mlp.a);
        ARENA(a, "d dense MLP activation", ELEMENT_X, N * c->dense_ffn, 1, &work->mlp.da);
        ARENA(a, "d dense MLP hidden", ELEMENT_X, N * 2 * c->dense_ffn, 1, &work->mlp.dh);
    }
    // Attention.
    if (c->q_lora) {
        ARENA(a, "d query latent", ELEMENT_X, N * c->q_lora, 1, &work->dcq);
        ARENA(a, "d query latent, normalised", ELEMENT_X, N * c->q_lora, 1, &work->dcq_norm);
    }
    ARENA(a, "d queries", ELEMENT_X, N * c->H * (c->nope + c->rope), 1, &work->dq);
    ARENA(a, "d key-value latent and k_rope", ELEMENT_X, N * (c->kv_lora + c->rope), 1, &work->dkva);
    ARENA(a, "d key-value latent, normalised", ELEMENT_X, N * c->kv_lora, 1, &work->dckv);
    ARENA(a, "d keys and values", ELEMENT_X, N * c->H * (c->nope + c->v), 1, &work->dkv);
    ARENA(a, "d attention output", ELEMENT_X, N * c->H * c->v, 1, &work->datt);
    // The MTP module, and the classifier.
    if (c->mtp) {
        ARENA(a, "module's input", ELEMENT_X, N * 2 * c->C, 1, &work->joined);
        ARENA(a, "d module's input", ELEMENT_X, N * 2 * c->C, 1, &work->djoined);
        ARENA(a, "d embeddings of the module", ELEMENT_X, N * c->C, 1, &work->dembed);
        ARENA(a, "rstd", ELEMENT_REAL, N, 1, &work->rstd_embed);
        ARENA(a, "rstd", ELEMENT_REAL, N, 1, &work->rstd_in);
    }
    ARENA(a, "logits of a chunk", ELEMENT_X, work->chunk * config_vocab_padded(c), 0, &work->logits);
    ARENA(a, "logits of a token", ELEMENT_REAL, c->V, 0, &work->logits_row);
}

// Parameters, sharded over the ranks, and their quantized copies.
static void plan_params(Model* m) {
    Arena* params = &m->arena[IN_PARAMS];
    const int units = params_units(&m->config);
    m->units = (Unit*)host_alloc((size_t)units * sizeof(Unit));
    ParamBuffer** buffers = (ParamBuffer**)host_alloc((size_t)units * sizeof(ParamBuffer*));
    // The gradients of experts are rounded to floatX where they are written once in a step and never summed.
    const int once = m->run.tokens_per_step == run_micro_tokens(&m->run);
    // Parameters, gradients and moments, then the slots that units are gathered into.
    for (int u = 0; u < units; u++) {
        m->units[u] = params_unit(&m->config, &m->layout, u);
        buffers[u] = m->units[u].buffer;
        for (int b = 0; b < BUFFERS; b++) {
            ParamBuffer* p = &buffers[u][b];
            sharding_plan(params, p, m->layout.bf16_moments, b == EXPERT_PARAMS && once && p->parts == 1);
        }
    }
    m->sharding = sharding_plan_slots(params, buffers, units);
    // Quantized copies of the weights, and the optimizer's workspace.
    for (int u = 0; u < units; u++) plan_weights(m, u);
    if (m->layout.muon && !m->layout.frozen) muon_plan(&m->muon, m->units, &m->config, params);
}

// Activations kept by each block. With --recompute block only the residual is a block's own; the rest is shared.
static void plan_activations(Model* m) {
    const ModelConfig* c = &m->config;
    Arena* saved = &m->arena[IN_SAVED];
    const int64_t N = m->shapes.N, count = config_blocks(c);
    const int per_block = m->run.recompute != RECOMPUTE_BLOCK;
    // The blocks, the MTP module included.
    m->blocks = (BlockSaved*)host_alloc((size_t)count * sizeof(BlockSaved));
    for (int64_t l = 0; l < count; l++) {
        ARENA(saved, "residual before attention", ELEMENT_X, N * c->C, 1, &m->blocks[l].residual);
        if (per_block) plan_block(saved, &m->blocks[l], m, l < c->dense_layers);
    }
    // The outputs. The gradient of the last one is workspace (model_create).
    for (int64_t k = 0; k <= c->mtp; k++) {
        Output* o = &m->outputs[k];
        ARENA(saved, "final residual", ELEMENT_X, N * c->C, 1, &o->residual);
        ARENA(saved, "final norm", ELEMENT_X, N * c->C, 1, &o->norm);
        ARENA(saved, "rstd", ELEMENT_REAL, N, 1, &o->rstd);
        if (k < c->mtp) ARENA(saved, "d final norm", ELEMENT_X, N * c->C, 1, &o->dnorm);
    }
    if (!per_block) plan_block(&m->arena[IN_SCRATCH], &m->rebuilt, m, c->dense_layers > 0);
}

// Workspace of a block, and the pool of the MoE blocks. Logits are computed in chunks of whole tiles of 128 tokens: 16
// MiB on the CPU, which stay near the caches, 512 MiB on the GPU.
static void plan_workspace(Model* m, Backend backend) {
    const ModelConfig* c = &m->config;
    Arena* scratch = &m->arena[IN_SCRATCH];
    const int64_t N = m->shapes.N, moe_blocks = config_blocks(c) - c->dense_layers;
    const int64_t logits = backend == BACKEND_CUDA ? (int64_t)1 << 28 : (int64_t)1 << 22;
    m->work.chunk = min_i64(N, max_i64(logits / config_vocab_padded(c) / 128, 1) * 128);
    plan_scratch(scratch, m);
    if (m->shapes.moe.formats.any) linear_plan(scratch, &m->gemms, N, 1 + (int)c->mtp);
    if (moe_blocks > 0) moe_plan(&m->arena[IN_POOL], m->shapes.moe, moe_blocks);
}

// The batch, losses, counters, and the state of a step.
static void plan_state(Model* m) {
    const RunConfig* s = &m->run;
    const ModelConfig* c = &m->config;
    Arena* state = &m->arena[IN_STATE];
    const int64_t N = m->shapes.N, count = config_blocks(c);
    // Batch and tables.
    ARENA(state, "tokens", ELEMENT_I32, N, 1, &m->tokens);
    ARENA(state, "targets", ELEMENT_I32, (1 + c->mtp) * N, 1, &m->targets);
    ARENA(state, "losses", ELEMENT_REAL, N, 1, &m->losses);
    ARENA(state, "rope table", ELEMENT_REAL, m->shapes.T * c->rope, 0, &m->rope_table);
    ARENA(state, "selection biases", ELEMENT_REAL, count * c->E, 0, &m->bias);
    // Counters of a step. Loads and margins are integers, so their sums over the ranks are exact.
    ARENA(state, "expert loads", ELEMENT_I64, count * c->E, 0, &m->step.load);
    const int64_t bins = s->balance == BALANCE_QUANTILE && !s->force_balance ? count * c->E * MARGIN_BINS : 0;
    if (bins) ARENA(state, "router margins", ELEMENT_I64, bins, 0, &m->step.margins);
    const int64_t tensors = s->stats_every ? count * BLOCK_STATS : 0;
    ARENA(state, "quantization statistics", ELEMENT_BYTE, tensors * (int64_t)sizeof(QuantizationStats), 0,
          &m->step.stats);
    // Structs that kernels read and write. Validation has a state of its own.
    ARENA(state, "step state", ELEMENT_BYTE, sizeof(StepState), 0, &m->step.state);
    ARENA(state, "step state of validation", ELEMENT_BYTE, sizeof(StepState), 0, &m->val_state);
    ARENA(state, "inputs of a step", ELEMENT_BYTE, sizeof(StepInputs), 0, &m->step.inputs);
}

void model_plan(Model* m, const ModelConfig* c, const RunConfig* s, int rank, Backend backend) {
    memset(m, 0, sizeof(*m));
    m->config = *c;
    m->run = *s;
    // The layout over the ranks. A model that is only used has frozen parameters.
    const Layout layout = {.ranks = (int)s->ranks,
                           .rank = rank,
                           .ep = (int)s->ep,
                           .shard = (Shard)s->shard,
                           .frozen = (int)s->frozen,
                           .bf16_moments = (int)s->moments,
                           .muon = s->optimizer == MUON};
    m->layout = layout;
    // Formats and shapes.
    m->shapes.moe.formats = formats_of(s->linear_precision, s->expert_precision, s->dispatch_precision,
                                       s->combine_precision, s->wgrad_precision, s->scale_rule);
    m->shapes.moe.capacity = s->capacity;
    m->shapes.moe.windows = s->ep > 1 && s->dispatch != DISPATCH_NCCL && c->dense_layers < config_blocks(c);
    m->shapes.B = s->batch;
    m->shapes.window = s->seq_len;
    model_shapes(m, 0);

    // The tables of buffers. No memory is allocated here.
    static const char* const purposes[ARENAS] = {"parameters and optimizer", "activations kept for backward",
                                                 "buffers of one block at a time", "pool of the MoE blocks",
                                                 "batch, tables and counters"};
    for (int i = 0; i < ARENAS; i++) arena_init(&m->arena[i], purposes[i], backend);
    plan_params(m);
    plan_activations(m);
    plan_workspace(m, backend);
    plan_state(m);
}

// The workspace of the side stream: unit_grads_end needs it.
static size_t side_workspace(const Model* m) {
    size_t bytes = 0;
    for (int u = 0; u < params_units(&m->config); u++)
        for (int b = 0; b < BUFFERS; b++) bytes = max_size(bytes, step_workspace(m->units[u].buffer[b].part));
    return bytes;
}

size_t model_workspace(const Model* m) {
    const ModelConfig* c = &m->config;
    int64_t N = m->shapes.N;
    // The ops of a stream run in order, so the largest need of all is enough.
    size_t bytes = max_size(attention_workspace(m->shapes.attention), rmsnorm_workspace(N, c->C));
    bytes = max_size(bytes, max_size(matmul_workspace(), embedding_workspace(N, c->V)));
    bytes = max_size(bytes, rmsnorm_workspace(N, max_i64(c->q_lora, c->kv_lora)));
    if (c->dense_layers < config_blocks(c)) bytes = max_size(bytes, moe_workspace(m->shapes.moe));
    // The side stream runs at the same time, so its part is added.
    bytes = max_size(bytes, step_workspace(N)) + side_workspace(m);
    // The largest part of a large workspace, attention's for dk_rope, is the same in both builds. The GPU's has up to
    // an eighth more, and 32 MiB for matrix products at least, the CPU's some scratch for each thread.
    return m->arena[IN_PARAMS].backend == BACKEND ? bytes : bytes + bytes / 8 + ((size_t)32 << 20);
}

void model_plan_free(Model* m) {
    for (int i = 0; i < ARENAS; i++) arena_free(&m->arena[i]);
    sharding_destroy(m->sharding);
    free(m->muon.groups);
    free(m->units);
    free(m->blocks);
}

// The communicator of the ranks of a color. That of all ranks is the run's, since NCCL takes 2 s and memory for each.
static Comm* connect(const Model* m, int color, const char* name) {
    Ranks* group = ranks_split(m->ranks, color);
    Comm* comm = ranks_count(group) == m->layout.ranks ? m->world : comm_create(group, name, m->ctx);
    ranks_free(group);
    return comm;
}

Model* model_create(const ModelConfig* c, const RunConfig* s, Ranks* world) {
    Model* m = (Model*)host_alloc(sizeof(Model));
    ASSERT(s->ranks == (world ? ranks_count(world) : 1));
    // Memory, all but the pool. With activation checkpointing blocks share one set of activations.
    model_plan(m, c, s, world ? ranks_index(world) : 0, BACKEND);
    m->ranks = world;
    m->ctx = ctx_create(model_workspace(m));
    if (m->shapes.moe.formats.packed) mx_check(m->ctx);
    for (int i = 0; i < ARENAS; i++)
        if (i != IN_POOL) arena_allocate(&m->arena[i]);
    for (int64_t l = 0; l < config_blocks(&m->config) && s->recompute == RECOMPUTE_BLOCK; l++) {
        floatX* residual = m->blocks[l].residual;
        m->blocks[l] = m->rebuilt;
        m->blocks[l].residual = residual;
    }
    m->outputs[m->config.mtp].dnorm = m->work.dnorm;  // that of the last one is used at once

    // Communicators. A set of experts is on neighbouring ranks: the first set on ranks 0 to ep - 1.
    if (m->layout.ranks > 1) {
        m->world = comm_create(world, "all ranks", m->ctx);
        m->ep = connect(m, m->layout.rank / m->layout.ep, "expert parallel");
        m->expert_dp = connect(m, m->layout.rank % m->layout.ep, "expert data parallel");
    }
    // Shards, and the pool, which may be symmetric memory.
    sharding_connect(m->sharding, m->world, m->expert_dp, side_workspace(m), m->ctx);
    for (int u = 0; u < params_units(&m->config); u++) set_weights(&m->units[u]);
    const Arena* pool = &m->arena[IN_POOL];
    const int64_t moe_blocks = config_blocks(&m->config) - m->config.dense_layers;
    m->pool = pool_create(pool->purpose, windows_pool(m), arena_bytes(pool),
                          moe_bytes(m->shapes.moe, moe_blocks, INFINITY, BACKEND));
    if (m->layout.ep > 1) m->dispatch = dispatch_create(m->ep, m->pool, m->overflow, m->ctx);

    // The table of rotary positions, and the CUDA graphs.
    real* table = (real*)host_alloc((size_t)(m->shapes.T * m->config.rope) * sizeof(real));
    RopeConfig rope = config_rope(&m->config);
    rope_table(table, m->shapes.T, &rope);
    device_upload(m->rope_table, table, (size_t)(m->shapes.T * m->config.rope) * sizeof(real), m->ctx);
    free(table);
    for (int i = 0; i < GRAPHS && !model_unreplayed(m); i++) m->graphs[i] = graph_create();
    return m;
}

void model_init(Model* m, uint64_t seed) {
    for (int u = 0; u < params_units(&m->config); u++)
        params_init_unit(m->units, u, &m->config, &m->layout, seed, m->ctx);
    weights_changed(m->sharding, 1, m->ctx);
}

void model_destroy(Model* m) {
    ctx_sync(m->ctx);
    for (int i = 0; i < GRAPHS; i++) graph_destroy(m->graphs[i]);
    dispatch_destroy(m->dispatch);
    pool_destroy(m->pool);
    model_plan_free(m);
    free(m->no_windows);
    // Symmetric memory is freed after its users and before its communicator.
    windows_close(m);
    if (m->world) {
        if (m->expert_dp != m->world) comm_destroy(m->expert_dp);
        if (m->ep != m->world) comm_destroy(m->ep);
        comm_destroy(m->world);
    }
    ctx_destroy(m->ctx);
    free(m);
}

void model_batch(Model* m, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T) {
    ASSERT(B * T <= m->run.batch * m->run.seq_len && T <= m->run.seq_len);
    // Shapes. The MTP module has a token fewer in each sequence.
    m->shapes.B = B;
    m->shapes.window = T;
    model_shapes(m, 0);
    for (int k = 0; k <= m->config.mtp; k++) linear_batch(&m->gemms, k, B * (T - k), m->ctx);
    device_upload(m->tokens, tokens, (size_t)(B * T) * sizeof(int32_t), m->ctx);
    if (targets) device_upload(m->targets, targets, (size_t)(B * T) * sizeof(int32_t), m->ctx);

    // Targets of the MTP module: those one place further in each sequence, one fewer.
    const size_t id = sizeof(int32_t), row = (size_t)(T - 1) * id;
    if (targets && m->config.mtp && T > 1)
        device_copy_rows(m->targets + B * T, row, m->targets + 1, row + id, row, B, m->ctx);
}

const char* model_unreplayed(const Model* m) {
    const RunConfig* s = &m->run;
    if (s->graph == GRAPH_OFF) return "--graph off";
    if (m->layout.ranks > 1) return "with several ranks every transfer is watched";
    if (BACKEND == BACKEND_CPU) return "the CPU build has no CUDA graphs";
    return m->shapes.moe.formats.packed ? grouped_gemm_mx_unreplayed(m->ctx) : NULL;
}
