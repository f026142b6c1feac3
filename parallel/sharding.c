// Every wait here is one stream's for the other, by an event that the other records. A stream works in the order of the
// calls. So one event a unit says that its weights are there, and two a slot say that it is free and that its gradients
// have been summed.
#include "parallel/sharding.h"

#include <stdlib.h>
#include <string.h>

#include "device/check.h"

enum { SLOTS = 3 };

typedef struct Slot {
    floatX* weight;
    real* grad;
    int unit;         // whose weights are in it, or on their way
    int64_t version;  // of those weights
    Event* free;      // nobody reads the weights any more
    Event* reduced;   // the gradients have been summed
} Slot;

struct Sharding {
    int count, held;
    ParamBuffer** units;  // (count) x (BUFFERS)
    Comm *world, *expert_dp;
    Ctx* side_stream;     // gathers and reductions, in the order given
    Event *given, *done;  // from the stream that computes to the side stream and back
    Event** gathered;     // (count): the unit's weights are there
    int64_t version;      // counts changes of the weights
    Slot slots[SLOTS];
};

// Parts start on 128 bytes of bf16, and all have the same size.
enum { ALIGN = 64 };

void sharding_cut(ParamBuffer* p, int64_t n, int64_t n_decay, int64_t n_muon, int parts, int index, Shard shard) {
    p->parts = parts;
    p->part = (n + parts * ALIGN - 1) / (parts * ALIGN) * ALIGN;
    p->n = p->part * parts;
    p->n_decay = n_decay;
    p->n_muon = n_muon;
    p->first = index * p->part;
    p->shard = parts == 1 ? SHARD_NONE : shard;
    p->held = p->shard == SHARD_NONE ? p->n : p->part;
    p->held_from = p->shard == SHARD_NONE ? 0 : p->first;
}

int64_t muon_part(const ParamBuffer* p, int index) { return min_i64(max_i64(p->n_muon - index * p->part, 0), p->part); }

int64_t muon_held(const ParamBuffer* p) { return min_i64(max_i64(p->n_muon - p->held_from, 0), p->held); }

void* moments_at(const ParamBuffer* p, int64_t at, int bf16_moments) {
    return (char*)p->m + at * (int64_t)(bf16_moments ? sizeof(uint16_t) : sizeof(real));
}

// Whether weights and gradients are not kept whole, and so pass through the slots.
static int slotted_weight(const ParamBuffer* p) { return p->shard == SHARD_WEIGHTS; }
static int slotted_grad(const ParamBuffer* p) { return p->shard >= SHARD_GRADS && !p->frozen; }

void sharding_plan(Arena* arena, ParamBuffer* p, int bf16_moments) {
    if (p->n == 0) return;
    // Working weights. Where floatX is as wide as real, whole ones are the masters themselves.
    int own_weight = arena->backend == BACKEND_CUDA || (p->shard != SHARD_NONE && !slotted_weight(p));
    if (own_weight && slotted_weight(p))
        arena_add(arena, "weights (own part)", ELEMENT_X, p->part, 0, (void**)&p->held_weight);
    else if (own_weight)
        arena_add(arena, "weights", ELEMENT_X, p->n, 0, (void**)&p->weight);

    // Masters, gradients and moments.
    arena_add(arena, "master weights", ELEMENT_REAL, p->held, 0, (void**)&p->master);
    if (p->frozen) return;
    if (slotted_grad(p))
        arena_add(arena, "gradients (own part)", ELEMENT_REAL, p->part, 0, (void**)&p->own_grad);
    else
        arena_add(arena, "gradients", ELEMENT_REAL, p->n, 0, (void**)&p->grad);
    const Element moment = bf16_moments ? ELEMENT_BF16 : ELEMENT_REAL;
    arena_add(arena, p->n_muon ? "first moments, Muon's momentum" : "AdamW first moments", moment, p->held, 0, &p->m);
    arena_add(arena, "AdamW second moments", moment, p->held - muon_held(p), 0, &p->v);
}

// Those that share a buffer: all ranks, or those that own the same experts.
static Comm* comm_of(const Sharding* s, int i) { return i == EXPERT_PARAMS ? s->expert_dp : s->world; }

// Those behind the held unit leave its slot alone.
static int slot_of(const Sharding* s, int unit) { return unit > s->held && (unit - s->held) % 2 == 0 ? 2 : unit % 2; }

Sharding* sharding_plan_slots(Arena* arena, ParamBuffer* const* units, int count, int held) {
    Sharding* s = (Sharding*)host_alloc(sizeof(Sharding));
    s->count = count;
    s->held = held;
    s->units = (ParamBuffer**)host_alloc((size_t)count * sizeof(ParamBuffer*));
    memcpy(s->units, units, (size_t)count * sizeof(ParamBuffer*));

    // A slot has room for the largest of its units.
    for (int i = 0; i < SLOTS; i++) {
        int64_t weights = 0, grads = 0;
        for (int u = 0; u < count; u++) {
            if (slot_of(s, u) != i) continue;
            const ParamBuffer *dense = &units[u][DENSE_PARAMS], *experts = &units[u][EXPERT_PARAMS];
            weights = max_i64(weights, slotted_weight(dense) * dense->n + slotted_weight(experts) * experts->n);
            grads = max_i64(grads, slotted_grad(dense) * dense->n + slotted_grad(experts) * experts->n);
        }
        s->slots[i].unit = -1;
        if (weights) arena_add(arena, "weights gathered for use", ELEMENT_X, weights, 0, (void**)&s->slots[i].weight);
        if (grads) arena_add(arena, "gradients to be reduced", ELEMENT_REAL, grads, 0, (void**)&s->slots[i].grad);
    }
    return s;
}

// Pointers to what lies in another array. A unit's buffers lie one after the other in its slot, always at the same
// place; the held part of whole weights and the own part of whole gradients lie in these.
static void set_pointers(const Sharding* s, int unit) {
    const Slot* slot = &s->slots[slot_of(s, unit)];
    floatX* weight = slot->weight;
    real* grad = slot->grad;
    for (int i = 0; i < BUFFERS; i++) {
        ParamBuffer* p = &s->units[unit][i];
        if (p->n == 0) continue;
        if (slotted_weight(p)) {
            p->weight = weight;
            weight += p->n;
            if (!p->held_weight) p->held_weight = (floatX*)p->master;
        } else {
            if (!p->weight) p->weight = (floatX*)p->master;
            p->held_weight = p->weight + p->held_from;
        }
        if (slotted_grad(p)) {
            p->grad = grad;
            grad += p->n;
        } else if (p->grad) {
            p->own_grad = p->grad + p->first;
        }
    }
}

void sharding_connect(Sharding* s, Comm* world, Comm* expert_dp, size_t workspace, Ctx* ctx) {
    s->world = world;
    s->expert_dp = expert_dp;
    s->side_stream = ctx_side(ctx, workspace);
    s->given = event_create();
    s->done = event_create();
    s->gathered = (Event**)host_alloc((size_t)s->count * sizeof(Event*));
    for (int u = 0; u < s->count; u++) {
        set_pointers(s, u);
        s->gathered[u] = event_create();
    }
    for (int i = 0; i < SLOTS; i++) {
        s->slots[i].free = event_create();
        s->slots[i].reduced = event_create();
    }
}

void sharding_destroy(Sharding* s) {
    if (s->side_stream) {
        ctx_destroy(s->side_stream);
        event_destroy(s->given);
        event_destroy(s->done);
        for (int u = 0; u < s->count; u++) event_destroy(s->gathered[u]);
        for (int i = 0; i < SLOTS; i++) {
            event_destroy(s->slots[i].free);
            event_destroy(s->slots[i].reduced);
        }
        free(s->gathered);
    }
    free(s->units);
    free(s);
}

// With one rank nothing travels and nothing lies in a slot: there is nothing to wait for.
static int travels(const Sharding* s) { return s->world != NULL; }

// The side stream goes on after all that ctx has been given so far.
static void side_follows(Sharding* s, Ctx* ctx) {
    event_record(s->given, ctx);
    event_wait(s->given, s->side_stream);
}

// Gathers those of a unit's weights that pass through a slot, or those that are kept whole.
static void gather(Sharding* s, int unit, int slotted) {
    for (int i = 0; i < BUFFERS; i++) {
        const ParamBuffer* p = &s->units[unit][i];
        if (p->shard == SHARD_NONE || slotted_weight(p) != slotted) continue;
        comm_all_gather(comm_of(s, i), p->weight, p->held_weight, (size_t)p->part * sizeof(floatX), s->side_stream);
    }
    event_record(s->gathered[unit], s->side_stream);
}

void weights_start(Sharding* s, int unit) {
    if (unit < 0 || unit >= s->count || !travels(s)) return;
    Slot* slot = &s->slots[slot_of(s, unit)];
    if (slot->unit == unit && slot->version == s->version) return;

    // When nobody reads the slot any more.
    event_wait(slot->free, s->side_stream);
    gather(s, unit, 1);
    slot->unit = unit;
    slot->version = s->version;
}

void weights_get(Sharding* s, int unit, Ctx* ctx) {
    weights_start(s, unit);
    if (travels(s)) event_wait(s->gathered[unit], ctx);
}

void weights_release(Sharding* s, int unit, Ctx* ctx) {
    if (travels(s)) event_record(s->slots[slot_of(s, unit)].free, ctx);
}

// Weights that are kept whole (--shard optimizer and grads) are gathered at once; the others when they are wanted.
void weights_changed(Sharding* s, Ctx* ctx) {
    s->version++;
    if (!travels(s)) return;
    side_follows(s, ctx);
    for (int u = 0; u < s->count; u++) gather(s, u, 0);
}

int64_t weights_version(const Sharding* s) { return s->version; }

// What lies in a slot is of another unit: it is written over as soon as that has been summed.
void grads_get(Sharding* s, int unit, int first, Ctx* ctx) {
    if (travels(s)) event_wait(s->slots[slot_of(s, unit)].reduced, ctx);
    for (int i = 0; i < BUFFERS; i++) s->units[unit][i].fresh = first || slotted_grad(&s->units[unit][i]);
}

Ctx* grads_reduce(Sharding* s, int unit, int first, int last, Ctx* ctx) {
    if (travels(s) || last) side_follows(s, ctx);
    for (int i = 0; i < BUFFERS; i++) {
        ParamBuffer* p = &s->units[unit][i];
        if (p->n == 0 || p->parts == 1) continue;
        if (slotted_grad(p)) {
            // own_grad adds up the micro-steps; after the first the part's sum over the ranks takes the place of this
            // rank's own.
            real* sum = first ? p->own_grad : p->grad + p->first;
            comm_reduce_scatter(comm_of(s, i), sum, p->grad, p->part, s->side_stream);
            if (!first) device_add(p->own_grad, sum, p->part, s->side_stream);
        } else if (last && p->shard == SHARD_OPTIMIZER) {
            comm_reduce_scatter(comm_of(s, i), p->own_grad, p->grad, p->part, s->side_stream);
        } else if (last) {
            comm_sum(comm_of(s, i), p->grad, p->n, s->side_stream);
        }
    }
    if (travels(s)) event_record(s->slots[slot_of(s, unit)].reduced, s->side_stream);
    return s->side_stream;
}

void grads_wait(Sharding* s, Ctx* ctx) {
    event_record(s->done, s->side_stream);
    event_wait(s->done, ctx);
}
