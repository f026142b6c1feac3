// Expert parallelism's bookkeeping: which ranks a token goes to, and what travels with it. Rank j of P holds experts
// j El .. (j + 1) El - 1, so a choice is held by rank expert / El. A token goes once to each rank that holds one of its
// choices; `send` is that layout (grouped/permute.h): its "experts" are the P ranks, and token_row is (N, P).
#ifndef MOE_DISPATCH_PLAN_H
#define MOE_DISPATCH_PLAN_H

#include "device/device.h"
#include "grouped/permute.h"

BEGIN_C

// What permute_plan makes `send` from, and how many go where.
void dispatch_ranks(int32_t* rank,          // (N, P): j where token n has a choice on rank j, else -1
                    int64_t* counts,        // (P, 2): tokens that go to rank j; choices that they have there
                    const int32_t* expert,  // (N, K)
                    int64_t N, int32_t K, int32_t P, int32_t El, Ctx* ctx);

// The same of all ranks, from which each knows every transfer's numbers, without the host. counts (P, P, 2): those of
// each rank by the rank they go to. If a rank would receive more than `received` tokens or `choices` choices, all
// numbers are 0, and *overflows += 1: nothing travels.
enum { SEND_START, SEND_ROWS, RECV_START, RECV_ROWS, ROUTE_NUMBERS };
void dispatch_numbers(int64_t* numbers,       // (ROUTE_NUMBERS, P): as in comm_exchange (parallel/comm.h)
                      double* overflows,      //
                      const int64_t* counts,  // (P, P, 2)
                      int32_t index, int32_t P, int64_t received, int64_t choices, Ctx* ctx);

// The choices of each sent row as its rank knows them: numbers of its own experts, -1 and gate 0 where another rank
// holds the choice. Pad rows are left as they are: they are not sent.
void dispatch_choices(int32_t* row_expert,    // (capacity, K)
                      real* row_gate,         // (capacity, K)
                      const int32_t* expert,  // (N, K)
                      const real* gate,       // (N, K)
                      Ragged send, int64_t N, int32_t K, int32_t El, Ctx* ctx);

// dgate[n][k] = drow_gate[r][k], r being the row of token n that went to the rank of its k-th choice.
void dispatch_choices_backward(real* dgate,            // (N, K)
                               const real* drow_gate,  // (capacity, K)
                               const int32_t* expert,  // (N, K)
                               Ragged send, int64_t N, int32_t K, int32_t El, Ctx* ctx);

END_C

#endif
