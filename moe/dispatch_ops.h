// Expert parallelism's bookkeeping: which ranks a token goes to, and what travels with it. Rank j of P holds experts
// j El .. (j + 1) El - 1, so a choice is held by rank expert / El. A token goes once to each rank that holds one of its
// choices; `send` is that layout (grouped/permute.h): its "experts" are the P ranks, and token_row is (N, P).
#ifndef MOE_DISPATCH_OPS_H
#define MOE_DISPATCH_OPS_H

#include "device/device.h"
#include "grouped/permute.h"
#include "layers/adamw.h"

BEGIN_C

// What permute_plan makes `send` from, and how many go where.
void dispatch_ranks(int32_t* rank,          // (N, P): j where token n has a choice on rank j, else -1
                    int64_t* counts,        // (P, 2): tokens that go to rank j; choices that they have there
                    const int32_t* expert,  // (N, K)
                    int64_t N, int32_t K, int32_t P, int32_t El, Ctx* ctx);

// The same of all ranks, from which each knows every transfer's numbers, without the host. counts (P, P, 2): those of
// each rank by the rank they go to. If a rank would receive more than `received` tokens or `choices` choices, nothing
// travels: all numbers of rows are 0, and state->overflows += 1. At the first time in a step state->needed is then at
// least the share of that room that the fullest rank would take; later ones choose by what did not arrive.
enum {
    SEND_START,   // of the rows that go to rank j, in the order of permute_plan
    SEND_ROWS,    //
    RECV_START,   // of those that come from rank j, without gaps
    RECV_ROWS,    //
    THERE_START,  // where rank j receives this rank's rows
    HOME_START,   // where rank j sent the rows from that this rank received
    ROUTE_NUMBERS
};
void dispatch_numbers(int64_t* numbers,  // (ROUTE_NUMBERS, P)
                      StepState* state,
                      const int64_t* counts,  // (P, P, 2)
                      int32_t index, int32_t P, int64_t received, int64_t choices, Ctx* ctx);

// Rank j's, as both builds find them. Returns the share of the room for what it receives that this takes.
static inline BOTH_SIDES double dispatch_numbers_of(int64_t* numbers, const int64_t* counts, int32_t index, int32_t P,
                                                    int32_t j, int64_t align, int64_t received, int64_t choices) {
    int64_t send = 0, recv = 0, there = 0, home = 0, tokens = 0, of_them = 0;
    for (int32_t i = 0; i < j; i++) {
        send += round_up(counts[(index * P + i) * 2], align);
        recv += counts[(i * P + index) * 2];
    }
    for (int32_t i = 0; i < index; i++) {
        there += counts[(i * P + j) * 2];
        home += round_up(counts[(j * P + i) * 2], align);
    }
    for (int32_t i = 0; i < P; i++) tokens += counts[(i * P + j) * 2], of_them += counts[(i * P + j) * 2 + 1];
    numbers[SEND_START * P + j] = send, numbers[SEND_ROWS * P + j] = counts[(index * P + j) * 2];
    numbers[RECV_START * P + j] = recv, numbers[RECV_ROWS * P + j] = counts[(j * P + index) * 2];
    numbers[THERE_START * P + j] = there, numbers[HOME_START * P + j] = home;
    const double of_received = (double)tokens / (double)received, of_choices = (double)of_them / (double)choices;
    return of_received > of_choices ? of_received : of_choices;
}

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
