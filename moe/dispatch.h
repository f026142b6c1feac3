// Expert parallelism: dispatch sends tokens to the ranks of their experts, combine sends the outputs back. Dispatch and
// combine are all-to-all exchanges. The MoE block knows whether there are several ranks, but neither the owner of an
// expert nor the rows that are sent. Source: GShard (arXiv 2006.16668).
//
//   rank 0  x (N, C) -> sent ---.   .---> received -> its experts -> sums ---.   .---> back -> y (N, C)
//                                \ /                                          \ /
//   rank 1  x (N, C) -> sent ----/ \----> received -> its experts -> sums ----/ \----> back -> y (N, C)
//           dispatch_pack   dispatch_start   dispatch_receive    combine_send       combine_receive
//
// Each rank of a group owns E / ep experts; rank i owns the experts from i E / ep on. Dispatch sends a token once to
// each rank that owns one of its experts, with the ids and gates of its choices on that rank. That rank sums the
// token's rows in float32. Combine sends the sum back as floatX, and the sums of the ranks are added.
//
// Forward makes the route once. Backward reuses it: dispatch sends dy, and combine returns dx and the gates' gradients.
// With one rank nothing is sent (moe/dispatch_one.c): `received` is x itself, and the rows are summed straight into y.
//
// The all-to-all runs on a stream of its own. Work that is queued on ctx between dispatch_start and dispatch_receive,
// or between combine_send and combine_receive, overlaps with the all-to-all.
//
// Dispatch is dropless: every token reaches its experts. The host waits for the counts and takes buffers of the exact
// size. Dispatch by windows does without the host: moe/dispatch_windows.h.
#pragma once

#include "device/pool.h"
#include "linear/rows.h"
#include "parallel/comm.h"

enum { DISPATCH_MAX_RANKS = 64 };
// This number times ep is a capacity factor at which all tokens of all ranks fit, even after rounding down.
#define DISPATCH_MOST_CAPACITY 1.01

typedef struct DispatchShape {
    int64_t N, C;            // tokens of this rank
    int32_t E, K;            // experts of all ranks, choices a token
    int32_t ep;              // ranks of expert parallelism; E % ep == 0
    const Format* dispatch;  // format of x and dy in dispatch; they are packed before sending
    const Format* received;  // format of received x and dy: that of dispatch, or quantized on arrival
    const Format* combine;   // format of outputs and dx in combine; they are packed before sending back
    double capacity;         // capacity factor: memory is planned for this many times the mean load
    int32_t windows;         // 1: dispatch by windows (moe/dispatch_windows.h)
} DispatchShape;

// The route of one block's tokens: forward makes the route, backward reuses it. The arrays are in the pool.
typedef struct Route {
    DispatchShape shape;
    int32_t* expert;            // (N, K): the router's choices; backward reads them and does not route again
    real* gate;                 // (N, K)
    int64_t received, choices;  // rows for received tokens; capacity for their token-expert pairs
    // With several ranks: `send` has the tokens sorted by the rank they go to, a ragged layout with El = K = ep.
    Ragged send;
    // The rows to send to each rank and to receive from it, as in ExchangeRows; set without windows.
    int64_t send_start[DISPATCH_MAX_RANKS], send_rows[DISPATCH_MAX_RANKS];
    int64_t recv_start[DISPATCH_MAX_RANKS], recv_rows[DISPATCH_MAX_RANKS];
    int64_t* by_windows;  // these rows for comm_exchange_windows; only with windows
} Route;

// Communication buffers of an all-to-all. Buffers that a route does not need are NULL.
typedef struct AllToAll {
    Rows own;              // (N, C): x or dy, quantized before it is sent
    Rows sent;             // (sent rows, C): rows to dispatch; in combine the rows that come back
    Rows received;         // (received, C): rows as they arrive; in combine the sums to send back
    Rows arrived, result;  // the received rows, or x itself; the memory for dispatch_receive's result
    // (sent rows, K), (received, K). In forward only: local expert numbers, -1 for choices owned by another rank.
    int32_t *sent_expert, *received_expert;
    real *sent_gate, *received_gate;  // gates, or their gradients
} AllToAll;

// The experts' outputs (dx in backward), to be summed for each received token: y_n = sum_k gate_nk rows[row of (n, k)].
typedef struct Sums {
    const floatX* rows;  // (capacity, C)
    Ragged ragged;
    const real* gate;       // (received, K), NULL: 1
    const real* drow_gate;  // (capacity, gate_parts): gradients of the rows' gates, sent with the sums; NULL: none
    int32_t gate_parts;
} Sums;

typedef struct Dispatch Dispatch;
// Dispatch for the ep ranks of `comm`, more than one; dispatch_destroy frees it. With one rank a Dispatch is NULL.
// overflow: see route_on_device; NULL if no shape has windows.
Dispatch* dispatch_create(Comm* comm, Pool* pool, real* overflow, Ctx* ctx);
void dispatch_destroy(Dispatch* dispatch);
// Bytes of workspace for the sorts of tokens: by rank, and of received tokens by expert.
size_t dispatch_workspace(int64_t N, int32_t K, int32_t E, int32_t ep);

// Names the arrays of a route in `arena`.
void dispatch_plan_choices(Arena* arena, Route* route, DispatchShape shape);
// Names the memory for the received x, from forward to backward. If the received x is x itself, there is none.
void dispatch_plan_x(Arena* arena, Rows* x, const Route* route);
// Names the communication buffers of a pass, in a zeroed AllToAll: choices is 1 in forward, 0 in backward. `again`:
// with activation checkpointing backward sends x a second time; else NULL.
void dispatch_plan_buffers(Arena* arena, AllToAll* exchange, AllToAll* again, const Route* route, int choices);
// Sets `received` and `choices` to the capacity factor times their means with evenly spread choices. `received` is at
// most the tokens of all ranks. Planning calls dispatch_expect in place of dispatch_counts.
void dispatch_expect(Route* route, Backend backend);

// Computes from route->expert the rows to send to each rank and to receive from it, `received` and `choices`.
void dispatch_counts(Dispatch* d, Route* route, Ctx* ctx);

// Packs x for the next all-to-all. The received x is in the memory of `kept`, or in that of `t` where `kept` has none
// or is NULL.
void dispatch_pack(Dispatch* d, const Route* route, AllToAll* t, const floatX* x, const Rows* kept, Ctx* ctx);
// Starts the all-to-all. In forward the choices are sent too.
void dispatch_start(Dispatch* d, const Route* route, const AllToAll* t, Ctx* ctx);
// Waits for the all-to-all. Returns the received tokens in format shape.received: quantized before sending, or here.
Rows dispatch_receive(Dispatch* d, const Route* route, const AllToAll* t, Ctx* ctx);

// combine_send sums the rows of each received token and starts the all-to-all back. combine_receive adds the sums of
// all ranks: y (N, C) =, or += with accumulate 1. combine_receive also writes dgate (N, K), if the rows' gates have
// gradients.
void combine_send(Dispatch* d, const Route* route, const AllToAll* t, Sums sums, Ctx* ctx);
void combine_receive(Dispatch* d, const Route* route, const AllToAll* t, Sums sums, floatX* y, int accumulate,
                     real* dgate, Ctx* ctx);

static inline int32_t local_experts(DispatchShape s) { return s.E / s.ep; }

// --- For moe/dispatch_one.c, from moe/dispatch.c: the part of several ranks ---

void several_plan_route(Arena* arena, Route* route);
void several_plan_buffers(Arena* arena, AllToAll* exchange, AllToAll* again, const Route* route, int choices);
void several_counts(Dispatch* d, Route* route, Ctx* ctx);
void several_pack(Dispatch* d, const Route* route, AllToAll* t, Ctx* ctx);  // t->arrived: the tokens, then their place
void several_wait(Dispatch* d, Ctx* ctx);
void several_combine(Dispatch* d, const Route* route, const AllToAll* t, floatX* y, int accumulate, real* dgate,
                     Ctx* ctx);
// For moe/dispatch.c: the sums of the received tokens' rows, quantized if combine sends quantized rows.
Rows combine_sums(const Route* route, const AllToAll* t, Sums sums, Ctx* ctx);
