// Dispatch and combine over several ranks: an all-to-all, and the rows that it sends and receives.
#include "moe/dispatch.h"

#include <stdlib.h>

#include "device/check.h"
#include "moe/dispatch_ops.h"
#include "moe/dispatch_windows.h"
#include "mx/mxfp8.h"

struct Dispatch {
    Pool* pool;
    Comm* comm;
    real* overflow;
    Ctx* side_stream;
    Event *ready, *there;  // the inputs of an all-to-all are ready; the all-to-all is done
    Fetch* counts;
    ExchangeBuffer buffers[EXCHANGE_BUFFERS];  // packed for the next all-to-all
    int buffer_count;
};

Dispatch* dispatch_create(Comm* comm, Pool* pool, real* overflow, Ctx* ctx) {
    if (!comm) return NULL;
    // A stream for the all-to-all, its events, and host memory for the counts.
    Dispatch* d = (Dispatch*)host_alloc(sizeof(Dispatch));
    ASSERT(comm_count(comm) <= DISPATCH_MAX_RANKS);
    d->pool = pool;
    d->overflow = overflow;
    d->comm = comm;
    d->side_stream = ctx_side(ctx, 0);
    d->ready = event_create();
    d->there = event_create();
    d->counts = fetch_create((size_t)(2 * comm_count(comm) * comm_count(comm)) * sizeof(int64_t));
    return d;
}

void dispatch_destroy(Dispatch* d) {
    if (!d) return;
    ctx_destroy(d->side_stream);
    event_destroy(d->ready);
    event_destroy(d->there);
    fetch_destroy(d->counts);
    free(d);
}

// In the worst case a rank receives every token of the group.
size_t dispatch_workspace(int64_t N, int32_t K, int32_t E, int32_t ep) {
    return max_size(permute_workspace(ep * N, K, E / ep), permute_workspace(N, ep, ep));
}

// --- Memory ---

void several_plan_route(Arena* a, Route* r) {
    // The tokens sorted by rank. A token has at most one row for each rank.
    const DispatchShape s = r->shape;
    r->send.El = s.ep;
    r->send.capacity = ragged_capacity(s.N, s.K, s.ep, a->backend);
    ARENA(a, "rank starts", ELEMENT_I64, s.ep + 1, 0, &r->send.group_start);
    ARENA(a, "rank rows", ELEMENT_I32, s.ep, 0, &r->send.group_rows);
    ARENA(a, "sent row -> token", ELEMENT_I32, r->send.capacity, 1, &r->send.row_token);
    ARENA(a, "token -> sent row", ELEMENT_I32, s.N * s.ep, 1, &r->send.token_row);
    if (s.windows) ARENA(a, "rows by rank", ELEMENT_I64, 2 * WINDOW_NUMBERS * s.ep, 0, &r->by_windows);
}

// Rows before the all-to-all: packed in token order (N, C), then sorted by rank (send.capacity, C).
static void plan_sent(Arena* a, AllToAll* t, const Route* r, int values, const Format* packed) {
    const DispatchShape s = r->shape;
    rows_plan(a, "x or dy, quantized", &t->own, 0, s.dispatch, s.N, s.C);
    rows_plan(a, "sent rows", &t->sent, values, packed, r->send.capacity, s.C);
}

void several_plan_buffers(Arena* a, AllToAll* t, AllToAll* again, const Route* r, int choices) {
    const DispatchShape s = r->shape;
    // The received rows: values that combine sums, in backward values of dy. Packed: rows that combine sends, dy, and
    // in forward an x that becomes values. x is else in dispatch_plan_x's memory.
    const Format* packed = format_packed(s.received);
    const Format* arrives = !packed ? s.dispatch : choices ? NULL : packed;
    rows_plan(a, "received rows", &t->received, 1, s.combine ? s.combine : arrives, r->received, s.C);
    // Combined rows are unpacked in `sent`, so it needs values as well as the bytes.
    plan_sent(a, t, r, 1, s.combine ? s.combine : s.dispatch);
    ARENA(a, "sent gates", ELEMENT_REAL, r->send.capacity * s.K, 1, &t->sent_gate);
    ARENA(a, "received gates", ELEMENT_REAL, r->received * s.K, 1, &t->received_gate);
    // Backward reuses forward's expert ids.
    if (choices) ARENA(a, "sent expert ids", ELEMENT_I32, r->send.capacity * s.K, 1, &t->sent_expert);
    if (choices) ARENA(a, "received expert ids", ELEMENT_I32, r->received * s.K, 1, &t->received_expert);
    if (!again) return;
    // dispatch_plan_x's memory has one form. Rows that arrive in the other one need their own.
    plan_sent(a, again, r, !s.dispatch, s.dispatch);
    rows_plan(a, "received rows", &again->received, packed && !s.dispatch, packed ? NULL : s.dispatch, r->received,
              s.C);
}

void dispatch_expect(Route* r, Backend backend) {
    const DispatchShape s = r->shape;
    const double capacity = s.ep == 1 ? 1 : s.capacity;
    // The mean share of ranks that own none of a token's K distinct experts: C(E - El, K) / C(E, K).
    double none = 1;
    for (int32_t k = 0; k < s.K; k++) none *= (double)max_i64(s.E - local_experts(s) - k, 0) / (double)(s.E - k);
    // A rank receives a token once, even if it owns several of its experts. `choices` counts each of them.
    r->received = min_i64((int64_t)(capacity * (double)s.N * (s.ep * (1 - none))), s.ep * s.N);
    r->choices = (int64_t)(capacity * (double)(s.N * s.K));
    // With windows `send` keeps its largest size, so sorting cannot overflow.
    if (!s.windows) r->send.capacity = min_i64(r->send.capacity, ragged_rows(r->received, s.ep, backend));
}

// --- All-to-all ---

// Queues the all-to-all of the packed buffers on the side stream, after ctx's work so far, and records `there`. With
// `back` it is combine's, which is the reverse: received rows go back to their senders.
static void exchange(Dispatch* d, const Route* r, int back, Ctx* ctx) {
    const ExchangeRows out = {r->send_start, r->send_rows, r->recv_start, r->recv_rows},
                       reverse = {r->recv_start, r->recv_rows, r->send_start, r->send_rows};
    event_record(d->ready, ctx);
    event_wait(d->ready, d->side_stream);
    if (r->shape.windows)
        comm_exchange_windows(d->comm, d->buffers, d->buffer_count, r->by_windows, back, d->side_stream);
    else
        comm_exchange(d->comm, d->buffers, d->buffer_count, back ? reverse : out, d->side_stream);
    event_record(d->there, d->side_stream);
    d->buffer_count = 0;
}

// Adds a buffer to the next all-to-all.
static void pack(Dispatch* d, void* recv, const void* send, size_t row_bytes) {
    const ExchangeBuffer buffer = {recv, send, row_bytes};
    ASSERT(d->buffer_count < EXCHANGE_BUFFERS);
    d->buffers[d->buffer_count++] = buffer;
}

// The buffers of rows: values, or elements and scales.
static void pack_rows(Dispatch* d, Rows recv, Rows send) {
    const int64_t C = send.columns;
    if (is_packed(send)) {
        pack(d, recv.bytes.q, send.bytes.q, (size_t)C);
        pack(d, recv.bytes.scale, send.bytes.scale, (size_t)mx_stride(C));
    } else {
        pack(d, recv.value, send.value, (size_t)C * sizeof(floatX));
    }
}

// Waits for the counts of all ranks, and computes this rank's numbers from them.
static void route_on_host(Dispatch* d, Route* r) {
    const int32_t P = r->shape.ep, own = comm_index(d->comm);
    const int64_t* counts = (const int64_t*)fetch_end(d->counts);
    r->received = r->choices = 0;
    r->send.capacity = 0;
    for (int32_t j = 0; j < P; j++) {
        const int64_t *to = counts + (own * P + j) * 2, *from = counts + (j * P + own) * 2;  // tokens, choices
        r->send_start[j] = r->send.capacity;
        r->send_rows[j] = to[0];
        r->recv_start[j] = r->received;
        r->recv_rows[j] = from[0];
        r->send.capacity += round_up(to[0], row_align(BACKEND));
        r->received += from[0];
        r->choices += from[1];
    }
}

void several_counts(Dispatch* d, Route* r, Ctx* ctx) {
    const DispatchShape s = r->shape;
    const int64_t N = s.N, P = s.ep;
    // rank (N, P): the ranks of each token. own (P, 2): tokens and choices for each rank. all (P, P, 2): of all ranks.
    const size_t mark = pool_mark(d->pool);
    int32_t* rank = (int32_t*)pool_take(d->pool, (size_t)(N * P) * sizeof(int32_t));
    int64_t* own = (int64_t*)pool_take(d->pool, (size_t)(2 * P) * sizeof(int64_t));
    int64_t* all = (int64_t*)pool_take(d->pool, (size_t)(2 * P * P) * sizeof(int64_t));
    dispatch_ranks(rank, own, r->expert, N, s.K, s.ep, local_experts(s), ctx);
    comm_all_gather(d->comm, all, own, (size_t)(2 * P) * sizeof(int64_t), ctx);

    // The host fetches the counts, and the sort of the tokens by rank runs while it waits.
    if (!s.windows) fetch_begin(d->counts, all, ctx);
    permute_plan(r->send, rank, NULL, N, s.ep, ctx);
    if (s.windows) {
        dispatch_expect(r, BACKEND);
        route_on_device(r, d->overflow, all, comm_index(d->comm), ctx);
    } else {
        route_on_host(d, r);
    }
    pool_release(d->pool, mark);
}

void several_pack(Dispatch* d, const Route* r, AllToAll* t, Ctx* ctx) {
    // Pack before the sort: a token that goes to several ranks is quantized once. Rows arrive in the sender's format.
    const Rows sorted = rows_permute(t->sent, rows_pack(t->own, t->arrived, r->shape.dispatch, ctx), r->send, ctx);
    t->arrived = t->result;
    t->arrived.format = sorted.format;
    t->arrived.form = sorted.form;
    pack_rows(d, t->arrived, sorted);
}

void dispatch_start(Dispatch* d, const Route* r, const AllToAll* t, Ctx* ctx) {
    const DispatchShape s = r->shape;
    if (!d) return;
    // Forward: the choices.
    if (t->sent_expert) {
        dispatch_choices(t->sent_expert, t->sent_gate, r->expert, r->gate, r->send, s.N, s.K, local_experts(s), ctx);
        // Rows of windows that receive nothing have no expert (-1).
        if (s.windows) device_fill(t->received_expert, 0xff, (size_t)(r->received * s.K) * sizeof(int32_t), ctx);
        pack(d, t->received_expert, t->sent_expert, (size_t)s.K * sizeof(int32_t));
        pack(d, t->received_gate, t->sent_gate, (size_t)s.K * sizeof(real));
    }
    exchange(d, r, 0, ctx);
}

void several_wait(Dispatch* d, Ctx* ctx) { event_wait(d->there, ctx); }

void combine_send(Dispatch* d, const Route* r, const AllToAll* t, Sums sums, Ctx* ctx) {
    const DispatchShape s = r->shape;
    if (!d) return;
    pack_rows(d, t->sent, combine_sums(r, t, sums, ctx));
    // Backward: gradients of gates go back in the buffers of the gates.
    if (sums.drow_gate) {
        unpermute_gates(t->received_gate, sums.drow_gate, sums.gate_parts, sums.ragged, r->received, s.K, ctx);
        pack(d, t->sent_gate, t->received_gate, (size_t)s.K * sizeof(real));
    }
    exchange(d, r, 1, ctx);
}

void several_combine(Dispatch* d, const Route* r, const AllToAll* t, floatX* y, int accumulate, real* dgate, Ctx* ctx) {
    const DispatchShape s = r->shape;
    several_wait(d, ctx);
    // Row i of `sent` now has the partial sum of the rank that received row i. y adds them up.
    const Rows back = rows_as(t->sent, s.combine ? rows_packed(t->sent, s.combine) : t->sent, NULL, ctx);
    unpermute_rows(y, back.value, NULL, r->send, s.N, s.ep, s.C, accumulate, ctx);
    if (dgate) dispatch_choices_backward(dgate, t->sent_gate, r->expert, r->send, s.N, s.K, local_experts(s), ctx);
}
