// The parameter buffers: this rank's part of a buffer, and its memory. With one rank the part is the whole buffer.
#include "device/check.h"
#include "parallel/sharding.h"

// Parts start on 128 bytes of bf16, and have equal size.
enum { ALIGN = 64 };

void sharding_cut(ParamBuffer* p, int64_t n, int64_t n_decay, int64_t n_muon, int parts, int index, Shard shard) {
    p->parts = parts;
    p->part = (n + parts * ALIGN - 1) / (parts * ALIGN) * ALIGN;
    p->n = p->part * parts;
    p->n_decay = n_decay;
    p->n_muon = n_muon;
    p->first = index * p->part;
    p->shard = parts == 1 ? SHARD_NONE : shard;
    p->owned = p->shard == SHARD_NONE ? p->n : p->part;
    p->owned_from = p->shard == SHARD_NONE ? 0 : p->first;
}

int64_t muon_part(const ParamBuffer* p, int index) { return min_i64(max_i64(p->n_muon - index * p->part, 0), p->part); }

int64_t muon_owned(const ParamBuffer* p) { return min_i64(max_i64(p->n_muon - p->owned_from, 0), p->owned); }

void* moments_at(const ParamBuffer* p, int64_t at, int bf16_moments) {
    return (char*)p->m + at * (int64_t)(bf16_moments ? sizeof(uint16_t) : sizeof(real));
}

const real* grad_at(const ParamBuffer* p, int64_t at) {
    return p->own_grad ? p->own_grad - (p->first - p->owned_from) + at : NULL;
}

const floatX* rounded_grad_at(const ParamBuffer* p, int64_t at) {
    return p->rounded_grad ? p->rounded_grad + at : NULL;
}

void sharding_plan(Arena* arena, ParamBuffer* p, int bf16_moments, int rounded) {
    if (p->n == 0) return;
    // Working weights. Where floatX is real, masters of the same elements serve as the weights.
    int own_weight = arena->backend == BACKEND_CUDA || (p->shard != SHARD_NONE && !slotted_weight(p));
    if (own_weight && slotted_weight(p))
        ARENA(arena, "weights (own part)", ELEMENT_X, p->part, 0, &p->owned_weight);
    else if (own_weight)
        ARENA(arena, "weights", ELEMENT_X, p->n, 0, &p->weight);

    // Masters (as wide as floatX in both builds), gradients and moments.
    ARENA(arena, "master weights", ELEMENT_X, p->owned, 0, &p->master);
    if (p->frozen) return;
    ASSERT(!rounded || p->parts == 1);
    if (rounded)
        ARENA(arena, "gradients", ELEMENT_X, p->n, 0, &p->rounded_grad);
    else if (slotted_grad(p))
        ARENA(arena, "gradients (own part)", ELEMENT_REAL, p->part, 0, &p->own_grad);
    else
        ARENA(arena, "gradients", ELEMENT_REAL, p->n, 0, &p->grad);
    const Element moment = bf16_moments ? ELEMENT_BF16 : ELEMENT_REAL;
    arena_add(arena, p->n_muon ? "first moments, Muon's momentum" : "AdamW first moments", moment, p->owned, 0, &p->m);
    arena_add(arena, "AdamW second moments", moment, p->owned - muon_owned(p), 0, &p->v);
}
