// Every wait here is one stream's for the other, by an event that the other records. Slots are filled and emptied in
// the order of the calls, so three events a slot are enough: filled, free, and reduced.
#include "parallel/sharding.h"

#include <stdlib.h>
#include <string.h>

#include "device/check.h"

typedef struct Slot {
    floatX* weight;
    real* grad;
    int unit;         // whose weights are in it, or on their way
    int64_t version;  // of those weights
    Event* filled;    // the weights are there
    Event* free;      // nobody reads the weights any more
    Event* reduced;   // the gradients have been summed
} Slot;

struct Sharding {
    int count;
    ShardUnit* units;
    Comm *world, *holders;
    Ctx* side;            // the second stream: gathers and reductions, in the order given
    Event *given, *done;  // from the computing stream to this one and back
    Event** whole;        // (count): weights that are kept whole have been gathered again
    int64_t version;      // counts changes of the weights
    Slot slots[2];
};

// Parts start on 128 bytes of bf16, and all have the same size.
enum { ALIGN = 64 };

void sharding_cut(ParamBuffer* p, int64_t n, int64_t n_decay, int parts, int index, Shard shard) {
    p->parts = parts;
    p->part = (n + parts * ALIGN - 1) / (parts * ALIGN) * ALIGN;
    p->n = p->part * parts;
    p->n_decay = n_decay;
    p->first = index * p->part;
    p->shard = parts == 1 ? SHARD_NONE : shard;
    p->held = p->shard == SHARD_NONE ? p->n : p->part;
    p->held_from = p->shard == SHARD_NONE ? 0 : p->first;
}

// Whether weights and gradients are not kept whole, and so pass through the slots.
static int slotted_weight(const ParamBuffer* p) { return p->shard == SHARD_WEIGHTS; }
static int slotted_grad(const ParamBuffer* p) { return p->shard >= SHARD_GRADS; }

void sharding_plan(Arena* arena, ParamBuffer* p) {
    if (p->n == 0) return;
    // Working weights. Where floatX is as wide as real, whole ones are the masters themselves.
    int own_weight = arena->backend == BACKEND_CUDA || (p->shard != SHARD_NONE && !slotted_weight(p));
    if (own_weight) {
        if (slotted_weight(p))
            arena_add(arena, "weights (own part)", ELEMENT_X, p->part, 0, (void**)&p->held_weight);
        else
            arena_add(arena, "weights", ELEMENT_X, p->n, 0, (void**)&p->weight);
    }

    // Masters, gradients and moments.
    arena_add(arena, "master weights", ELEMENT_REAL, p->held, 0, (void**)&p->master);
    if (slotted_grad(p))
        arena_add(arena, "gradients (own part)", ELEMENT_REAL, p->part, 0, (void**)&p->own_grad);
    else
        arena_add(arena, "gradients", ELEMENT_REAL, p->n, 0, (void**)&p->grad);
    arena_add(arena, "AdamW first moments", ELEMENT_REAL, p->held, 0, (void**)&p->m);
    arena_add(arena, "AdamW second moments", ELEMENT_REAL, p->held, 0, (void**)&p->v);
}

// A unit's buffers by number: 0 dense, which all ranks share, 1 experts, which the holders share.
static ParamBuffer* buffer_of(const Sharding* s, int unit, int i) {
    return i ? s->units[unit].experts : s->units[unit].dense;
}
static Comm* comm_of(const Sharding* s, int i) { return i ? s->holders : s->world; }

Sharding* sharding_plan_slots(Arena* arena, const ShardUnit* units, int count) {
    Sharding* s = (Sharding*)host_alloc(sizeof(Sharding));
    s->count = count;
    s->units = (ShardUnit*)host_alloc((size_t)count * sizeof(ShardUnit));
    memcpy(s->units, units, (size_t)count * sizeof(ShardUnit));

    // Slot i has room for the largest of its units, 2k + i.
    for (int i = 0; i < 2; i++) {
        int64_t weights = 0, grads = 0;
        for (int u = i; u < count; u += 2) {
            const ParamBuffer *dense = buffer_of(s, u, 0), *experts = buffer_of(s, u, 1);
            weights = max_i64(weights, slotted_weight(dense) * dense->n + slotted_weight(experts) * experts->n);
            grads = max_i64(grads, slotted_grad(dense) * dense->n + slotted_grad(experts) * experts->n);
        }
        s->slots[i].unit = -1;
        if (weights) arena_add(arena, "weights gathered for use", ELEMENT_X, weights, 0, (void**)&s->slots[i].weight);
        if (grads) arena_add(arena, "gradients to be reduced", ELEMENT_REAL, grads, 0, (void**)&s->slots[i].grad);
    }
    return s;
}

void sharding_connect(Sharding* s, Comm* world, Comm* holders, Ctx* ctx) {
    // Pointers to what lies in another array: the held part of whole weights, the own part of whole gradients.
    for (int u = 0; u < s->count; u++)
        for (int b = 0; b < 2; b++) {
            ParamBuffer* p = buffer_of(s, u, b);
            if (p->n == 0) continue;
            if (slotted_weight(p)) {
                if (!p->held_weight) p->held_weight = (floatX*)p->master;
            } else {
                if (!p->weight) p->weight = (floatX*)p->master;
                p->held_weight = p->weight + p->held_from;
            }
            if (!slotted_grad(p)) p->own_grad = p->grad + p->first;
        }

    // Between ranks, and between the streams.
    s->world = world;
    s->holders = holders;
    s->side = ctx_side(ctx);
    s->given = event_create();
    s->done = event_create();
    s->whole = (Event**)host_alloc((size_t)s->count * sizeof(Event*));
    for (int u = 0; u < s->count; u++) s->whole[u] = event_create();
    for (int i = 0; i < 2; i++) {
        s->slots[i].filled = event_create();
        s->slots[i].free = event_create();
        s->slots[i].reduced = event_create();
    }
}

void sharding_destroy(Sharding* s) {
    if (s->side) {
        ctx_destroy(s->side);
        event_destroy(s->given);
        event_destroy(s->done);
        for (int u = 0; u < s->count; u++) event_destroy(s->whole[u]);
        for (int i = 0; i < 2; i++) {
            event_destroy(s->slots[i].filled);
            event_destroy(s->slots[i].free);
            event_destroy(s->slots[i].reduced);
        }
        free(s->whole);
    }
    free(s->units);
    free(s);
}

// The second stream goes on after all that ctx has been given so far.
static void side_follows(Sharding* s, Ctx* ctx) {
    event_record(s->given, ctx);
    event_wait(s->given, s->side);
}

void weights_start(Sharding* s, int unit) {
    if (unit < 0 || unit >= s->count) return;
    Slot* slot = &s->slots[unit % 2];
    if (slot->unit == unit && slot->version == s->version) return;

    // When nobody reads the slot any more: the unit's buffers, one after the other.
    floatX* to = slot->weight;
    event_wait(slot->free, s->side);
    for (int i = 0; i < 2; i++) {
        const ParamBuffer* p = buffer_of(s, unit, i);
        if (!slotted_weight(p)) continue;
        comm_all_gather(comm_of(s, i), to, p->held_weight, (size_t)p->part * sizeof(floatX), s->side);
        to += p->n;
    }
    event_record(slot->filled, s->side);
    slot->unit = unit;
    slot->version = s->version;
}

void weights_get(Sharding* s, int unit, Ctx* ctx) {
    Slot* slot = &s->slots[unit % 2];
    weights_start(s, unit);
    event_wait(slot->filled, ctx);
    event_wait(s->whole[unit], ctx);

    // The buffers lie in the slot as weights_start has put them.
    floatX* from = slot->weight;
    for (int i = 0; i < 2; i++) {
        ParamBuffer* p = buffer_of(s, unit, i);
        if (!slotted_weight(p)) continue;
        p->weight = from;
        from += p->n;
    }
}

void weights_release(Sharding* s, int unit, Ctx* ctx) { event_record(s->slots[unit % 2].free, ctx); }

// Weights that are kept whole (--shard optimizer and grads) are gathered at once; the others when they are wanted.
void weights_changed(Sharding* s, Ctx* ctx) {
    s->version++;
    side_follows(s, ctx);
    for (int u = 0; u < s->count; u++) {
        for (int i = 0; i < 2; i++) {
            const ParamBuffer* p = buffer_of(s, u, i);
            if (p->n && p->shard != SHARD_NONE && !slotted_weight(p))
                comm_all_gather(comm_of(s, i), p->weight, p->held_weight, (size_t)p->part * sizeof(floatX), s->side);
        }
        event_record(s->whole[u], s->side);
    }
}

int64_t weights_version(const Sharding* s) { return s->version; }

void grads_zero(Sharding* s, Ctx* ctx) {
    for (int u = 0; u < s->count; u++)
        for (int i = 0; i < 2; i++) {
            const ParamBuffer* p = buffer_of(s, u, i);
            int own = slotted_grad(p);
            if (p->n) device_zero(own ? p->own_grad : p->grad, (size_t)(own ? p->part : p->n) * sizeof(real), ctx);
        }
}

void grads_get(Sharding* s, int unit, Ctx* ctx) {
    Slot* slot = &s->slots[unit % 2];
    real* from = slot->grad;
    event_wait(slot->reduced, ctx);
    for (int i = 0; i < 2; i++) {
        ParamBuffer* p = buffer_of(s, unit, i);
        if (!slotted_grad(p)) continue;
        p->grad = from;
        device_zero(from, (size_t)p->n * sizeof(real), ctx);
        from += p->n;
    }
}

void grads_reduce(Sharding* s, int unit, int last, Ctx* ctx) {
    side_follows(s, ctx);
    for (int i = 0; i < 2; i++) {
        ParamBuffer* p = buffer_of(s, unit, i);
        if (p->n == 0 || p->parts == 1) continue;
        if (slotted_grad(p)) {
            // The part's sum over the ranks takes the place of this rank's own; own_grad adds up the micro-steps.
            comm_reduce_scatter(comm_of(s, i), p->grad + p->first, p->grad, p->part, s->side);
            device_add(p->own_grad, p->grad + p->first, p->part, s->side);
        } else if (last && p->shard == SHARD_OPTIMIZER) {
            comm_reduce_scatter(comm_of(s, i), p->own_grad, p->grad, p->part, s->side);
        } else if (last) {
            comm_sum(comm_of(s, i), p->grad, p->n, s->side);
        }
    }
    event_record(s->slots[unit % 2].reduced, s->side);
}

void grads_wait(Sharding* s, Ctx* ctx) {
    event_record(s->done, s->side);
    event_wait(s->done, ctx);
}
