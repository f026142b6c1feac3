// Dispatch and combine, as every layout enters them. On one rank nothing is sent: the received tokens are the tokens,
// and the sum of a token's rows is its y. With several ranks an all-to-all comes between (several_, in moe/dispatch.c).
#include <string.h>

#include "moe/dispatch.h"
#include "mx/mxfp8.h"

void dispatch_plan_choices(Arena* a, Route* r, DispatchShape s) {
    memset(r, 0, sizeof(*r));
    r->shape = s;
    ARENA(a, "gates", ELEMENT_REAL, s.N * s.K, 1, &r->gate);
    ARENA(a, "expert ids", ELEMENT_I32, s.N * s.K, 1, &r->expert);
    if (s.ep > 1) several_plan_route(a, r);
}

void dispatch_plan_x(Arena* a, Rows* x, const Route* r) {
    const Format *format = r->shape.received, *packed = format_packed(format);
    rows_plan(a, "received x", x, !packed && (format || r->shape.ep > 1), packed, r->received, r->shape.C);
}

void dispatch_plan_buffers(Arena* a, AllToAll* t, AllToAll* again, const Route* r, int choices) {
    const DispatchShape s = r->shape;
    if (s.ep > 1) {
        several_plan_buffers(a, t, again, r, choices);
        return;
    }
    t->received_expert = r->expert;
    t->received_gate = r->gate;
    // Quantized: dy, while x is in dispatch_plan_x's memory; and the sums, as they would be sent.
    const Format *format = choices ? NULL : s.received, *packed = format_packed(format);
    rows_plan(a, "received rows", &t->received, s.combine || (format && !packed), s.combine ? s.combine : packed, s.N,
              s.C);
}

void dispatch_counts(Dispatch* d, Route* r, Ctx* ctx) {
    r->received = r->shape.N;
    r->choices = r->shape.N * r->shape.K;
    if (d) several_counts(d, r, ctx);
}

void dispatch_pack(Dispatch* d, const Route* r, AllToAll* t, const floatX* x, const Rows* kept, Ctx* ctx) {
    // The result is in kept's memory where it has any, so that backward finds it.
    t->result = t->received;
    if (kept && kept->value) t->result.value = kept->value;
    if (kept && kept->bytes.q) t->result.bytes = kept->bytes;
    t->result.count = r->received;
    t->result.columns = r->shape.C;
    t->arrived = rows_of_values(x, r->shape.N, r->shape.C);
    if (d) several_pack(d, r, t, ctx);
    t->arrived.form = rows_form(is_packed(t->arrived), 1);
}

Rows dispatch_receive(Dispatch* d, const Route* r, const AllToAll* t, Ctx* ctx) {
    if (d) several_wait(d, ctx);
    return rows_as(t->result, t->arrived, r->shape.received, ctx);
}

Rows combine_sums(const Route* r, const AllToAll* t, Sums sums, Ctx* ctx) {
    const DispatchShape s = r->shape;
    unpermute_rows(t->received.value, sums.rows, sums.gate, sums.ragged, r->received, s.K, s.C, 0, ctx);
    return rows_pack(t->received, rows_of_values(t->received.value, r->received, s.C), s.combine, ctx);
}

void combine_receive(Dispatch* d, const Route* r, const AllToAll* t, Sums sums, floatX* y, int accumulate, real* dgate,
                     Ctx* ctx) {
    const DispatchShape s = r->shape;
    if (d)
        several_combine(d, r, t, y, accumulate, dgate, ctx);
    else if (s.combine)
        mx_dequantize(y, combine_sums(r, t, sums, ctx).bytes, s.N, s.C, accumulate, ctx);
    else
        unpermute_rows(y, sums.rows, sums.gate, sums.ragged, s.N, s.K, s.C, accumulate, ctx);
    if (dgate && !d) unpermute_gates(dgate, sums.drow_gate, sums.gate_parts, sums.ragged, s.N, s.K, ctx);
}
