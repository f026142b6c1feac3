// What a MoE block takes from the pool, by name: the same tables are laid out to plan and taken from to run, so that
// they cannot drift apart. Between moe/moe.c and moe/moe_buffers.c only.
#ifndef MOE_MOE_BUFFERS_H
#define MOE_MOE_BUFFERS_H

#include "moe/moe.h"

BEGIN_C

// Buffers of one pass. "home": tokens in the order of m->send, before they leave and when they are back; "here": tokens
// received from the ranks. MxRows are there only where the precision asks for them.
typedef struct Forward {
    floatX *rows, *act;       // (rows, C): x, then the experts' outputs; (rows, F)
    MxRows rows_mx, act_mx;   // the same cast; the rows where products are fast
    floatX* shared_act;       // (N, shared_F)
    floatX *home, *here;      // (sent rows, C), (Nr, C)
    MxRows x_mx;              // (N, C)
    MxRows home_mx, here_mx;  // (sent rows, C), (Nr, C)
    int32_t* home_expert;     // (sent rows, K)
    real* home_gate;          // (sent rows, K)
} Forward;

// dact, act and dh serve the shared MLP first: (N, shared_F), (N, shared_F), (N, 2 shared_F).
typedef struct Backward {
    floatX* rows;             // (rows, C): x or dy
    floatX *dact, *act, *dh;  // (rows, max(C, F)): dA', then dx; (rows, F): gate * A; (rows, 2F)
    floatX* dh_cast;          // (rows, 2F): dh as its bytes say, for exact products
    MxRows rows_mx, dh_mx;
    real *drow_gate, *dgate;                   // (rows), (N, K)
    floatX *home, *home_x, *here;              // (sent rows, C), (sent rows, C), (Nr, C)
    MxRows x_mx, home_mx, home_x_mx, here_mx;  // x_mx: (N, C)
    real *home_dgate, *here_dgate;             // (sent rows, K), (Nr, K)
} Backward;

// Where tokens towards the experts are cast at all; how; and whether products read bytes.
static inline int moe_casts(MoeShape s) { return s.precision.expert || s.precision.dispatch; }
static inline int moe_fast(MoeShape s) { return s.precision.expert && s.precision.fast; }
static inline MxCast moe_cast(MoeShape s) {
    MxCast cast = {s.precision.scale, moe_fast(s) ? MX_CHUNK : 1};
    return cast;
}
static inline int32_t moe_held(MoeShape s) { return s.router.E / s.ep; }

void moe_name_choices(Arena* a, MoeSaved* m, MoeShape s);  // before the counts are known
void moe_name_routed(Arena* a, MoeSaved* m, MoeShape s);   // from here on m->received, m->choices, m->send.capacity
void moe_name_forward(Arena* a, Forward* t, MoeSaved* m, MoeShape s);
void moe_name_backward(Arena* a, Backward* t, MoeSaved* m, MoeShape s);

END_C

#endif
