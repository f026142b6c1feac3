#include "model/params.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"
#include "device/random.h"

int params_units(const ModelConfig* c) { return (int)c->L + 2; }

UnitKind params_unit_kind(const ModelConfig* c, int unit) {
    if (unit == 0) return UNIT_EMBED;
    if (unit == c->L + 1) return UNIT_HEAD;
    return unit <= c->dense_layers ? UNIT_DENSE : UNIT_MOE;
}

// Gives `count` elements of a buffer away; parameters start on multiples of 64 elements (whole 128-byte lines of bf16).
static int64_t take(ParamBuffer* buffer, int64_t count) {
    int64_t at = buffer->n;
    buffer->n += (count + 63) / 64 * 64;
    return at;
}

static int64_t mlp_width(const ModelConfig* c, UnitKind kind) {
    return kind == UNIT_MOE ? c->shared * c->F : c->dense_ffn;
}

// Cuts a buffer whose elements have all been given away.
static void cut(ParamBuffer* p, int parts, int index, Shard shard) {
    if (p->n) sharding_cut(p, p->n, p->n_decay, parts, index, shard);
}

static Unit cut_unit(Unit u, const Layout* l) {
    cut(&u.dense, l->ranks, l->rank, l->shard);
    cut(&u.experts, l->ranks / l->ep, l->rank / l->ep, l->shard);
    return u;
}

Unit params_unit(const ModelConfig* c, const Layout* layout, int index) {
    Unit u;
    UnitKind kind = params_unit_kind(c, index);
    int64_t *offsets = (int64_t*)&u.at, El = c->E / layout->ep;
    memset(&u, 0, sizeof(u));
    for (size_t i = 0; i < sizeof(u.at) / sizeof(int64_t); i++) offsets[i] = -1;
    u.kind = kind;
    if (kind == UNIT_EMBED) {
        u.at.embed = take(&u.dense, config_vocab_padded(c) * c->C);
        u.dense.n_decay = u.dense.n;
        return cut_unit(u, layout);
    }
    if (kind == UNIT_HEAD) {
        u.at.lm_head = take(&u.dense, config_vocab_padded(c) * c->C);
        u.dense.n_decay = u.dense.n;
        u.at.final_norm = take(&u.dense, c->C);
        return cut_unit(u, layout);
    }
    int64_t q_rows = c->H * (c->nope + c->rope), width = mlp_width(c, kind);
    if (c->q_lora) {
        u.at.wqa = take(&u.dense, c->q_lora * c->C);
        u.at.wqb = take(&u.dense, q_rows * c->q_lora);
    } else {
        u.at.wq = take(&u.dense, q_rows * c->C);
    }
    u.at.wkva = take(&u.dense, (c->kv_lora + c->rope) * c->C);
    u.at.wkvb = take(&u.dense, c->H * (c->nope + c->v) * c->kv_lora);
    u.at.wo = take(&u.dense, c->C * c->H * c->v);
    if (width) {
        u.at.mlp13 = take(&u.dense, 2 * width * c->C);
        u.at.mlp2 = take(&u.dense, c->C * width);
    }
    if (kind == UNIT_MOE) {
        u.at.router = take(&u.dense, c->E * c->C);
        u.at.w13 = take(&u.experts, El * 2 * c->F * c->C);
        u.at.w2 = take(&u.experts, El * c->C * c->F);
        u.experts.n_decay = u.experts.n;
    }
    u.dense.n_decay = u.dense.n;
    u.at.norm1 = take(&u.dense, c->C);
    if (c->q_lora) u.at.q_norm = take(&u.dense, c->q_lora);
    u.at.kv_norm = take(&u.dense, c->kv_lora);
    u.at.norm2 = take(&u.dense, c->C);
    return cut_unit(u, layout);
}

// A list under construction.
typedef struct List {
    NamedTensor* tensors;
    int count;
    int layer;
} List;

static NamedTensor* add(List* list, const char* name, int in_experts, int64_t offset, int64_t rows, int64_t cols,
                        double std) {
    NamedTensor* t = &list->tensors[list->count++];
    if (list->layer >= 0)
        snprintf(t->name, sizeof(t->name), "model.layers.%d.%s", list->layer, name);
    else
        snprintf(t->name, sizeof(t->name), "%s", name);
    t->in_experts = in_experts;
    t->offset = offset;
    t->rank = rows ? 2 : 1;
    t->shape[0] = rows ? rows : cols;
    t->shape[1] = cols;
    t->count = rows ? rows * cols : cols;
    t->std = std;
    return t;
}

NamedTensor* params_tensors(const ModelConfig* c, const Layout* layout, int index, int* count) {
    Unit u = params_unit(c, layout, index);
    const UnitLayout* at = &u.at;
    const double std = 0.02, residual_std = 0.02 / sqrt(2.0 * (double)c->L);
    List list;
    list.tensors = (NamedTensor*)host_alloc((size_t)(32 + (u.kind == UNIT_MOE ? 3 * c->E : 0)) * sizeof(NamedTensor));
    list.count = 0;
    list.layer = -1;
    if (u.kind == UNIT_EMBED) {
        add(&list, "model.embed_tokens.weight", 0, at->embed, c->V, c->C, std);
    } else if (u.kind == UNIT_HEAD) {
        add(&list, "lm_head.weight", 0, at->lm_head, c->V, c->C, std);
        add(&list, "model.norm.weight", 0, at->final_norm, 0, c->C, 0);
    } else {
        int64_t q_rows = c->H * (c->nope + c->rope), width = mlp_width(c, u.kind);
        const char* mlp = u.kind == UNIT_MOE ? "mlp.shared_experts." : "mlp.";
        char name[64];
        list.layer = index - 1;
        if (c->q_lora) {
            add(&list, "self_attn.q_a_proj.weight", 0, at->wqa, c->q_lora, c->C, std);
            add(&list, "self_attn.q_b_proj.weight", 0, at->wqb, q_rows, c->q_lora, std);
        } else {
            add(&list, "self_attn.q_proj.weight", 0, at->wq, q_rows, c->C, std);
        }
        add(&list, "self_attn.kv_a_proj_with_mqa.weight", 0, at->wkva, c->kv_lora + c->rope, c->C, std);
        add(&list, "self_attn.kv_b_proj.weight", 0, at->wkvb, c->H * (c->nope + c->v), c->kv_lora, std);
        add(&list, "self_attn.o_proj.weight", 0, at->wo, c->C, c->H * c->v, residual_std);
        if (width) {
            snprintf(name, sizeof(name), "%sgate_proj.weight", mlp);
            add(&list, name, 0, at->mlp13, width, c->C, std);
            snprintf(name, sizeof(name), "%sup_proj.weight", mlp);
            add(&list, name, 0, at->mlp13 + width * c->C, width, c->C, std);
            snprintf(name, sizeof(name), "%sdown_proj.weight", mlp);
            add(&list, name, 0, at->mlp2, c->C, width, residual_std);
        }
        if (u.kind == UNIT_MOE) add(&list, "mlp.gate.weight", 0, at->router, c->E, c->C, std);
        add(&list, "input_layernorm.weight", 0, at->norm1, 0, c->C, 0);
        if (c->q_lora) add(&list, "self_attn.q_a_layernorm.weight", 0, at->q_norm, 0, c->q_lora, 0);
        add(&list, "self_attn.kv_a_layernorm.weight", 0, at->kv_norm, 0, c->kv_lora, 0);
        add(&list, "post_attention_layernorm.weight", 0, at->norm2, 0, c->C, 0);
        int64_t El = c->E / layout->ep, first = layout->rank % layout->ep * El;
        for (int64_t e = 0; u.kind == UNIT_MOE && e < c->E; e++) {
            int here = e >= first && e < first + El;
            int64_t w13 = at->w13 + (e - first) * 2 * c->F * c->C, w2 = at->w2 + (e - first) * c->C * c->F;
            snprintf(name, sizeof(name), "mlp.experts.%d.gate_proj.weight", (int)e);
            add(&list, name, 1, here ? w13 : -1, c->F, c->C, std);
            snprintf(name, sizeof(name), "mlp.experts.%d.up_proj.weight", (int)e);
            add(&list, name, 1, here ? w13 + c->F * c->C : -1, c->F, c->C, std);
            snprintf(name, sizeof(name), "mlp.experts.%d.down_proj.weight", (int)e);
            add(&list, name, 1, here ? w2 : -1, c->C, c->F, residual_std);
        }
    }
    *count = list.count;
    return list.tensors;
}

Slice tensor_slice(const NamedTensor* t, int64_t from, int64_t n) {
    Slice none = {0, 0}, s;
    if (t->offset < 0) return none;
    int64_t end = t->offset + t->count < from + n ? t->offset + t->count : from + n;
    s.first = t->offset > from ? 0 : from - t->offset;
    s.count = end - (t->offset + s.first);
    return s.count > 0 ? s : none;
}

// Parameters of the routed experts of one block.
static int64_t expert_params(const ModelConfig* c) { return 3 * c->E * c->F * c->C; }

int64_t params_total(const ModelConfig* c) {
    const Layout one_rank = {1, 0, 1, SHARD_NONE};
    int64_t total = 0;
    for (int unit = 0; unit < params_units(c); unit++) {
        // Blocks of a kind are alike; enumerating one of each is enough.
        int alike = unit == 1 && c->dense_layers > 1 ? (int)c->dense_layers : 1;
        if (unit == c->dense_layers + 1 && unit <= c->L) alike = (int)(c->L - c->dense_layers);
        int count;
        NamedTensor* tensors = params_tensors(c, &one_rank, unit, &count);
        for (int i = 0; i < count; i++) total += tensors[i].count * alike;
        free(tensors);
        unit += alike - 1;
    }
    return total;
}

int64_t params_active(const ModelConfig* c) {
    return params_total(c) - (c->L - c->dense_layers) * (expert_params(c) / c->E) * (c->E - c->K);
}

double flops_per_token(const ModelConfig* c, int64_t T) {
    int64_t norms = c->L * (2 * c->C + c->q_lora + c->kv_lora) + c->C;
    double matmul = (double)(params_active(c) - c->V * c->C - norms);
    return 6 * matmul + 6.0 * (double)(c->L * c->H * (c->nope + c->rope + c->v)) * (double)T / 2;
}

void params_plan(Arena* arena, Unit* units, const ModelConfig* c, const Layout* layout) {
    for (int unit = 0; unit < params_units(c); unit++) {
        units[unit] = params_unit(c, layout, unit);
        sharding_plan(arena, &units[unit].dense);
        sharding_plan(arena, &units[unit].experts);
    }
}

void params_publish(Unit* unit, Ctx* ctx) {
    ParamBuffer* buffers[2] = {&unit->dense, &unit->experts};
    for (int b = 0; b < 2; b++)
        if (buffers[b]->n) device_to_floatX(buffers[b]->held_weight, buffers[b]->master, buffers[b]->held, ctx);
}

void params_init(Unit* units, const ModelConfig* c, const Layout* layout, uint64_t seed, Ctx* ctx) {
    const int64_t piece = 1 << 20;
    float* drawn = (float*)host_alloc((size_t)piece * sizeof(float));
    real* host = (real*)host_alloc((size_t)piece * sizeof(real));
    for (int unit = 0; unit < params_units(c); unit++) {
        int count;
        NamedTensor* tensors = params_tensors(c, layout, unit, &count);
        for (int i = 0; i < count; i++) {
            const NamedTensor* t = &tensors[i];
            const ParamBuffer* p = t->in_experts ? &units[unit].experts : &units[unit].dense;
            Slice mine = tensor_slice(t, p->held_from, p->held);
            for (int64_t first = mine.first; first < mine.first + mine.count; first += piece) {
                int64_t left = mine.first + mine.count - first, n = left < piece ? left : piece;
                if (t->std > 0)
                    random_normal(drawn, n, seed, (uint32_t)unit << 20 | (uint32_t)i, (uint64_t)first, t->std);
                for (int64_t j = 0; j < n; j++) host[j] = t->std > 0 ? drawn[j] : 1;
                device_upload(p->master + (t->offset + first - p->held_from), host, (size_t)n * sizeof(real), ctx);
            }
        }
        free(tensors);
    }
    free(drawn);
    free(host);
}
