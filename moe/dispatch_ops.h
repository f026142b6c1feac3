// The bookkeeping of expert parallelism: the ranks a token is sent to, the counts of the all-to-all, and the choices
// that are sent with each row. Rank j of P owns experts j El .. (j + 1) El - 1, so rank expert / El owns a choice. A
// token is sent once to each rank that owns one of its choices. `send` is the ragged layout (grouped/permute.h) of the
// rows to send: its "experts" are the P ranks, and token_row is (N, P).
#pragma once

#include "device/device.h"
#include "grouped/permute.h"

// The ranks of each token, from which permute_plan makes `send`, and the counts for each rank.
void dispatch_ranks(int32_t* rank,          // (N, P): j where token n has a choice on rank j, else -1
                    int64_t* counts,        // (P, 2): tokens sent to rank j; their choices there
                    const int32_t* expert,  // (N, K)
                    int64_t N, int32_t K, int32_t P, int32_t El, Ctx* ctx);

// The choices (capacity, K) of the sent rows, from those of the tokens (N, K), for the rank that receives a row: local
// expert numbers, or -1 and gate 0 where another rank owns the choice. Pad rows are not sent, and stay as they are.
void dispatch_choices(int32_t* row_expert, real* row_gate, const int32_t* expert, const real* gate, Ragged send,
                      int64_t N, int32_t K, int32_t El, Ctx* ctx);

// dgate[n][k] = drow_gate[r][k], where r is the row of token n that was sent to the rank of its k-th choice. Shapes as
// above.
void dispatch_choices_backward(real* dgate, const real* drow_gate, const int32_t* expert, Ragged send, int64_t N,
                               int32_t K, int32_t El, Ctx* ctx);
