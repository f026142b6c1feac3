#include "model/params.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/check.h"
#include "layers/draw.h"

int params_units(const ModelConfig* c) { return (int)config_blocks(c) + 2; }

// The head comes between the blocks and the MTP module.
int params_block_unit(const ModelConfig* c, int64_t layer) { return (int)layer + (layer < c->L ? 1 : 2); }

// Units in order: embedding, dense blocks, MoE blocks, head, MTP module.
static UnitKind kind_of(const ModelConfig* c, int unit) {
    if (unit == 0) return UNIT_EMBED;
    if (unit > c->L) return unit == c->L + 1 ? UNIT_HEAD : UNIT_MODULE;
    return unit <= c->dense_layers ? UNIT_DENSE : UNIT_MOE;
}

// The names of a dense weight's operands in the log (--mx-stats).
#define STATS(label)                                                                                                   \
    { label ".x", label ".dy", label ".w" }

int params_list(Param list[PARAMS], const ModelConfig* c, UnitKind kind) {
    // Kinds of units as bits: one row of the table may belong to several.
    enum {
        EMBEDS = 1 << UNIT_EMBED,
        HEAD = 1 << UNIT_HEAD,
        DENSE = 1 << UNIT_DENSE,
        MODULE = 1 << UNIT_MODULE,
        MOE = 1 << UNIT_MOE | MODULE
    };
    // Rows that only some models have, then sizes.
    const int blocks = DENSE | MOE, latent = c->q_lora ? blocks : 0, direct = c->q_lora ? 0 : blocks;
    const int shared = c->shared ? MOE : 0;
    const int64_t C = c->C, V = c->V, Q = c->H * (c->nope + c->rope), sF = c->shared * c->F;
    const int64_t KVA = c->kv_lora + c->rope, KV = c->H * (c->nope + c->v), O = c->H * c->v;
    // clang-format off
    const Param table[] = {
        // id           units   rows              columns       start     by     format  log names           name, and that of the second half
        {EMBED,        EMBEDS, V,                C,            NORMAL,   ADAMW, NEVER,  {NULL},             "model.embed_tokens.weight", NULL},
        {LM_HEAD,      HEAD,   V,                C,            NORMAL,   ADAMW, NEVER,  {NULL},             "lm_head.weight", NULL},
        {EH_PROJ,      MODULE, C,                2 * C,        NORMAL,   MUON,  NEVER,  {NULL},             "eh_proj.weight", NULL},
        {WQA,          latent, c->q_lora,        C,            NORMAL,   MUON,  LINEAR, STATS("wqa"),       "self_attn.q_a_proj.weight", NULL},
        {WQB,          latent, Q,                c->q_lora,    NORMAL,   MUON,  LINEAR, STATS("wqb"),       "self_attn.q_b_proj.weight", NULL},
        {WQ,           direct, Q,                C,            NORMAL,   MUON,  LINEAR, STATS("wq"),        "self_attn.q_proj.weight", NULL},
        {WKVA,         blocks, KVA,              C,            NORMAL,   MUON,  NEVER,  {NULL},             "self_attn.kv_a_proj_with_mqa.weight", NULL},
        {WKVB,         blocks, KV,               c->kv_lora,   NORMAL,   MUON,  LINEAR, STATS("wkvb"),      "self_attn.kv_b_proj.weight", NULL},
        {WO,           blocks, C,                O,            RESIDUAL, MUON,  LINEAR, STATS("wo"),        "self_attn.o_proj.weight", NULL},
        {MLP13,        DENSE,  2 * c->dense_ffn, C,            NORMAL,   MUON,  LINEAR, STATS("mlp13"),     "mlp.gate_proj.weight",
                                                                                          "mlp.up_proj.weight"},
        {MLP2,         DENSE,  C,                c->dense_ffn, RESIDUAL, MUON,  LINEAR, STATS("mlp2"),      "mlp.down_proj.weight", NULL},
        {MLP13,        shared, 2 * sF,           C,            NORMAL,   MUON,  LINEAR, STATS("mlp13"),     "mlp.shared_experts.gate_proj.weight",
                                                                                          "mlp.shared_experts.up_proj.weight"},
        {MLP2,         shared, C,                sF,           RESIDUAL, MUON,  LINEAR, STATS("mlp2"),      "mlp.shared_experts.down_proj.weight", NULL},
        {ROUTER,       MOE,    c->E,             C,            NORMAL,   ADAMW, NEVER,  {NULL},             "mlp.gate.weight", NULL},
        {W13,          MOE,    2 * c->F,         C,            NORMAL,   MUON,  EXPERT, {"x", "dh", "w13"}, "mlp.experts.%d.gate_proj.weight",
                                                                                          "mlp.experts.%d.up_proj.weight"},
        {W2,           MOE,    C,                c->F,         RESIDUAL, MUON,  EXPERT, {"act", "dy", "w2"},"mlp.experts.%d.down_proj.weight", NULL},
        {NORM1,        blocks, 1,                C,            ONE,      ADAMW, NEVER,  {NULL},             "input_layernorm.weight", NULL},
        {Q_NORM,       latent, 1,                c->q_lora,    ONE,      ADAMW, NEVER,  {NULL},             "self_attn.q_a_layernorm.weight", NULL},
        {KV_NORM,      blocks, 1,                c->kv_lora,   ONE,      ADAMW, NEVER,  {NULL},             "self_attn.kv_a_layernorm.weight", NULL},
        {NORM2,        blocks, 1,                C,            ONE,      ADAMW, NEVER,  {NULL},             "post_attention_layernorm.weight", NULL},
        {ENORM,        MODULE, 1,                C,            ONE,      ADAMW, NEVER,  {NULL},             "enorm.weight", NULL},
        {HNORM,        MODULE, 1,                C,            ONE,      ADAMW, NEVER,  {NULL},             "hnorm.weight", NULL},
        {FINAL_NORM,   MODULE, 1,                C,            ONE,      ADAMW, NEVER,  {NULL},             "shared_head.norm.weight", NULL},
        {FINAL_NORM,   HEAD,   1,                C,            ONE,      ADAMW, NEVER,  {NULL},             "model.norm.weight", NULL},
    };
    // clang-format on
    int count = 0;
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
        if (table[i].kinds & 1 << kind) list[count++] = table[i];
    return count;
}

Unit params_unit(const ModelConfig* c, const Layout* layout, int index) {
    Unit u = {.kind = kind_of(c, index)};
    Param list[PARAMS];
    for (int i = 0; i < PARAMS; i++) u.at[i] = -1;
    u.layer = u.kind == UNIT_EMBED || u.kind == UNIT_HEAD ? -1 : index - (u.kind == UNIT_MODULE ? 2 : 1);
    // The size of each parameter and its place in its buffer.
    const int count = params_list(list, c, u.kind);
    for (int i = 0; i < count; i++) {
        const Param* p = &list[i];
        ParamBuffer* buffer = &u.buffer[param_buffer(p->id)];
        Weight* w = &u.w[p->id];
        w->count = param_buffer(p->id) == EXPERT_PARAMS ? c->E / layout->ep : 1;
        w->OC = p->id == EMBED || p->id == LM_HEAD ? config_vocab_padded(c) : p->rows;
        w->IC = p->columns;
        // Parameters start on multiples of 64 elements (whole 128-byte lines of bf16).
        u.at[p->id] = buffer->n;
        buffer->n += round_up(w->count * w->OC * w->IC, 64);
        if (p->start != ONE) buffer->n_decay = buffer->n;
        if (p->by == MUON && layout->muon) {
            ASSERT(buffer->n_muon == u.at[p->id]);  // a prefix
            buffer->n_muon = buffer->n;
        }
    }
    // The parts of the buffers that this rank holds.
    for (int b = 0; b < BUFFERS; b++) {
        ParamBuffer* p = &u.buffer[b];
        const int sets = b == EXPERT_PARAMS ? layout->ep : 1;  // of experts, which ranks hold in turns
        p->frozen = layout->frozen;
        if (p->n)
            sharding_cut(p, p->n, p->n_decay, p->n_muon, layout->ranks / sets, layout->rank / sets, layout->shard);
    }
    return u;
}

NamedTensor* params_tensors(const ModelConfig* c, const Layout* layout, int index, int* count) {
    Param list[PARAMS];
    const Unit u = params_unit(c, layout, index);
    const int params = params_list(list, c, u.kind);
    const int64_t El = c->E / layout->ep, first = layout->rank % layout->ep * El, E = u.at[ROUTER] < 0 ? 0 : c->E;
    NamedTensor* tensors = (NamedTensor*)host_alloc((size_t)(2 * PARAMS + 3 * c->E) * sizeof(NamedTensor));
    // Matrices that write into the residual stream begin smaller, because 2 L of them add up.
    const double residual = sqrt(2.0 * (double)c->L), std = 0.02;
    *count = 0;
    // Dense parameters first (e = -1), then the experts one after another. A parameter is one tensor, or two: each half
    // of its rows has a name.
    for (int64_t e = -1; e < E; e++)
        for (int i = 0; i < 2 * params; i++) {
            const Param* p = &list[i / 2];
            const int half = i % 2, halves = p->second ? 2 : 1;
            if (half == halves || (param_buffer(p->id) == EXPERT_PARAMS) != (e >= 0)) continue;

            NamedTensor* tensor = &tensors[(*count)++];
            const size_t bytes = sizeof(tensor->name);
            const int prefix = u.layer < 0 ? 0 : snprintf(tensor->name, bytes, "model.layers.%d.", u.layer);
            snprintf(tensor->name + prefix, bytes - (size_t)prefix, half ? p->second : p->name, (int)e);
            tensor->buffer = param_buffer(p->id);
            tensor->rank = p->start == ONE ? 1 : 2;
            tensor->shape[0] = tensor->rank == 1 ? p->columns : p->rows / halves;
            tensor->shape[1] = p->columns;
            tensor->count = p->rows / halves * p->columns;
            tensor->muon = p->by == MUON;
            tensor->mean = p->start == ONE;
            tensor->std = p->start == ONE ? 0 : p->start == RESIDUAL ? std / residual : std;

            // Those of an expert of another rank have no offset.
            const int here = e < 0 || (e >= first && e < first + El);
            const int64_t before = (e < 0 ? 0 : e - first) * halves + half;  // tensors of this size
            tensor->offset = here ? u.at[p->id] + before * tensor->count : -1;
        }
    return tensors;
}

Slice tensor_slice(const NamedTensor* tensor, int64_t from, int64_t n) {
    // The overlap of the tensor with elements from .. from + n - 1 of its buffer.
    const int64_t begin = max_i64(tensor->offset, from), end = min_i64(tensor->offset + tensor->count, from + n);
    const Slice none = {0, 0}, overlap = {begin - tensor->offset, end - begin};
    return tensor->offset < 0 || end <= begin ? none : overlap;
}

// Elements of units first .. end - 1, of E experts or of the K of a token. only_gemms: without norms and embedding.
static int64_t count_elements(const ModelConfig* c, int first, int end, int64_t experts, bool only_gemms) {
    int64_t elements = 0;
    for (int unit = first; unit < end; unit++) {
        Param list[PARAMS];
        const int count = params_list(list, c, kind_of(c, unit));
        for (int i = 0; i < count; i++)
            if (!only_gemms || (list[i].start != ONE && list[i].id != EMBED))
                elements += list[i].rows * list[i].columns * (param_buffer(list[i].id) == EXPERT_PARAMS ? experts : 1);
    }
    return elements;
}

int64_t params_total(const ModelConfig* c) { return count_elements(c, 0, params_units(c), c->E, false); }
int64_t params_active(const ModelConfig* c) { return count_elements(c, 0, params_units(c), c->K, false); }

double flops_per_token(const ModelConfig* c, int64_t T) {
    const int head = (int)c->L + 1;
    // Attention is causal: a query sees T / 2 keys on average.
    const double attention = 6.0 * (double)(c->H * (c->nope + c->rope + c->v)) * (double)T / 2;
    double flops = 0;
    for (int unit = 1; unit < params_units(c); unit++) {
        // A weight takes 6 FLOPs a token: 2 in forward, 4 in backward. The module uses lm_head too.
        const int module = unit > head;
        const double matmul = 6 * (double)(count_elements(c, unit, unit + 1, c->K, true) + module * c->V * c->C);
        const double share = (double)(T - module) / (double)T;
        flops += share * (matmul + (unit == head ? 0 : share * attention));
    }
    return flops;
}

// A number depends on the seed, its tensor and its index alone, so every layout begins with the same weights.
void params_init_unit(Unit* units, int unit, const ModelConfig* c, const Layout* layout, uint64_t seed, Ctx* ctx) {
    int count;
    NamedTensor* tensors = params_tensors(c, layout, unit, &count);
    for (int i = 0; i < count; i++) {
        const NamedTensor* tensor = &tensors[i];
        const ParamBuffer* p = &units[unit].buffer[tensor->buffer];
        const Slice mine = tensor_slice(tensor, p->owned_from, p->owned);  // of this rank
        const int64_t at = tensor->offset + mine.first - p->owned_from;
        if (mine.count)
            masters_draw(p->master + at, p->owned_weight + at, mine.count, tensor->mean, tensor->std, seed,
                         (uint32_t)unit << 20 | (uint32_t)i, mine.first, ctx);
    }
    free(tensors);
}
