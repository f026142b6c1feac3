// Tokens to the ranks of their experts, and their outputs home: the only code that knows expert parallelism (GShard,
// arXiv 2006.16668) and the formats in which tokens travel.
//
//   rank 0  x (N, C) -> sent ---.   .---> received -> its experts -> sums ---.   .---> back -> y (N, C)
//                                \ /                                          \ /
//   rank 1  x (N, C) -> sent ----/ \----> received -> its experts -> sums ----/ \----> back -> y (N, C)
//           dispatch_pack   dispatch_start   dispatch_receive    combine_send       combine_receive
//
// The ranks of a group hold E / ep experts each, rank i the experts i E / ep onwards. A token goes once to each rank
// that holds one of its experts, with the ids and gates of its choices there. It comes back as one sum of its rows
// there, taken in float32 and sent as floatX, and the ranks' sums are added. Backward sends dy the same way and gets dx
// and the gates' gradients back. Who sends what is settled once, in forward. With one rank nothing travels: `received`
// is x itself, and the rows are summed straight into y.
//
// A transfer runs on a stream of its own. What is queued on ctx between dispatch_start and dispatch_receive, or between
// combine_send and combine_receive, computes meanwhile.
#ifndef MOE_DISPATCH_H
#define MOE_DISPATCH_H

#include "device/pool.h"
#include "mx/rows.h"
#include "parallel/comm.h"

BEGIN_C

enum { DISPATCH_MAX_RANKS = 64 };
// Times ep: a capacity that has room for all tokens of all ranks, whatever is rounded down.
#define DISPATCH_MOST_CAPACITY 1.01

typedef struct DispatchShape {
    int64_t N, C;     // tokens of this rank
    int32_t E, K;     // experts of all ranks, choices a token
    int32_t ep;       // ranks that share the experts; E % ep == 0
    Format dispatch;  // x and dy are cast to it before they travel; values: they are not
    Format expert;    // else they are cast to it where they arrive
    Format combine;   // outputs and dx are cast to it before they travel back
    // 0: the host waits for the numbers, and there is always room. Else they stay on the device and the host waits for
    // nothing: there is room for what dispatch_expect gives, whatever arrives, and what is left of it has no choices
    // (received_expert -1). Where a rank would receive more, nothing travels, and the step's state says so. All ranks
    // have as many tokens then.
    double capacity;
} DispatchShape;

// What forward settles, and backward reads; in the pool.
typedef struct Route {
    DispatchShape shape;
    int32_t* expert;            // (N, K): the router's choices, made once; backward never chooses again
    real* gate;                 // (N, K)
    int64_t received, choices;  // tokens whose experts are here, and token-expert pairs among them
    // With several ranks: the tokens by the rank they go to (a ragged layout with El = K = ep), and for each rank which
    // rows of it go there and which of the received tokens come from there: on the host, or in device memory.
    Ragged send;
    int64_t* numbers;  // (ROUTE_NUMBERS, ep) (moe/dispatch_ops.h); NULL: those on the host count
    int64_t send_start[DISPATCH_MAX_RANKS], send_rows[DISPATCH_MAX_RANKS];
    int64_t recv_start[DISPATCH_MAX_RANKS], recv_rows[DISPATCH_MAX_RANKS];
} Route;

// Buffers of what is under way. Of those that a route does not need none has memory.
typedef struct Travel {
    Rows own;            // (N, C): x as it travels, where it is cast before
    Rows sent;           // (sent rows, C): before they leave, and what came back
    Rows received;       // (received, C): as they arrive; then their sums before they leave
    Rows arrived, room;  // what will have arrived, or x itself; memory for it as it is received
    // (sent rows, K), (received, K). In forward alone: experts by their numbers there, -1 for choices held elsewhere.
    int32_t *sent_expert, *received_expert;
    real *sent_gate, *received_gate;  // gates, or their gradients
} Travel;

// The rows of the received tokens with their experts, to be summed: y_n = sum_k gate_nk rows[row of (n, k)].
typedef struct Sums {
    const floatX* rows;  // (capacity, C)
    Ragged ragged;
    const real* gate;       // (received, K), NULL: 1
    const real* drow_gate;  // (capacity): gradients of the rows' gates, which travel with the sums; NULL: none
} Sums;

typedef struct StepState StepState;  // layers/adamw.h
typedef struct Dispatch Dispatch;
// comm: of ep ranks, NULL with one. state: where it is counted that a rank had no room; NULL if no shape has a
// capacity.
Dispatch* dispatch_create(Comm* comm, Pool* pool, StepState* state, Ctx* ctx);
void dispatch_destroy(Dispatch* dispatch);
size_t dispatch_workspace(DispatchShape shape);

// Names in `arena` what a route takes.
void dispatch_plan_choices(Arena* arena, Route* route, DispatchShape shape);
// x as it was received, for as long as it is needed: nothing where that is x itself.
void dispatch_plan_x(Arena* arena, Rows* x, const Route* route);
// Buffers of a pass: choices 1 in forward, 0 in backward; there x may be sent a second time (dispatch_plan_again).
void dispatch_plan_travel(Arena* arena, Travel* travel, const Route* route, int choices);
void dispatch_plan_again(Arena* arena, Travel* again, const Route* route);
// What evenly spread choices give, `capacity` times, but no more tokens than there are: to plan in the place of
// dispatch_counts, and the room that there is where a shape has a capacity.
void dispatch_expect(Route* route, double capacity, Backend backend);

// From route->expert: how many rows go where.
void dispatch_counts(Dispatch* d, Route* route, Ctx* ctx);

// What the next transfer carries: x, and the choices; then off it goes. x arrives in the memory of `kept`, and in that
// of `t` where `kept` has none or is NULL. *stats += what its cast does, if not NULL.
void dispatch_pack(Dispatch* d, const Route* route, Travel* t, const floatX* x, const Rows* kept, MxStats* stats,
                   Ctx* ctx);
// The same of tokens that are cast and in the order of route->send already.
void dispatch_pack_sorted(Dispatch* d, const Route* route, Travel* t, Rows sorted, const Rows* kept);
void dispatch_pack_choices(Dispatch* d, const Route* route, const Travel* t, Ctx* ctx);
void dispatch_start(Dispatch* d, const Route* route, Ctx* ctx);
// The tokens that arrived: cast, wherever that is, if the shape asks for it.
Rows dispatch_receive(Dispatch* d, const Route* route, const Travel* t, Ctx* ctx);

// The sums of the received tokens' rows on their way home; y (N, C) = or, with accumulate 1, += all ranks' sums, and
// dgate (N, K) if the rows' gates have gradients.
void combine_send(Dispatch* d, const Route* route, const Travel* t, Sums sums, Ctx* ctx);
void combine_receive(Dispatch* d, const Route* route, const Travel* t, Sums sums, floatX* y, int accumulate,
                     real* dgate, Ctx* ctx);

// What came back of several ranks, as values in the order of route->send: before the ranks' sums are added.
Rows combine_back(Dispatch* d, const Route* route, const Travel* t, Ctx* ctx);

static inline int32_t experts_held(DispatchShape s) { return s.E / s.ep; }
// The format of received tokens.
static inline Format received_format(DispatchShape s) { return s.dispatch.bytes ? s.dispatch : s.expert; }

END_C

#endif
