// The bookkeeping of expert parallelism: the ranks a token is sent to, the counts of the all-to-all, and the choices
// that are sent with each row. Rank j of P owns experts j El .. (j + 1) El - 1, so rank expert / El owns a choice. A
// token is sent once to each rank that owns one of its choices. `send` is the ragged layout (grouped/permute.h) of the
// rows to send: its "experts" are the P ranks, and token_row is (N, P).
#pragma once

#include "device/device.h"
#include "grouped/permute.h"
#include "layers/step.h"

// The ranks of each token, from which permute_plan makes `send`, and the counts for each rank.
void dispatch_ranks(int32_t* rank,          // (N, P): j where token n has a choice on rank j, else -1
                    int64_t* counts,        // (P, 2): tokens sent to rank j; their choices there
                    const int32_t* expert,  // (N, K)
                    int64_t N, int32_t K, int32_t P, int32_t El, Ctx* ctx);

// The numbers of this rank's all-to-all, from the counts of all ranks, without the host. counts (P, P, 2): of each
// rank, by the rank it sends to.
//
// Overflow: a rank would receive more than `received` tokens or `choices` choices. Then nothing is sent: all numbers of
// rows are 0. The first overflow sets state->overflow to needed capacity / capacity of the fullest rank. Later layers
// see garbage and do not count.
enum {
    SEND_START,     // of the rows sent to rank j, in the order of permute_plan
    SEND_ROWS,      //
    RECV_START,     // of the rows received from rank j, without gaps
    RECV_ROWS,      //
    THERE_START,    // of this rank's rows in the receive buffer of rank j
    COMBINE_START,  // in the send buffer of rank j, of the rows that this rank received: where combine returns them
    ROUTE_NUMBERS
};
void dispatch_numbers(int64_t* numbers,  // (ROUTE_NUMBERS, P)
                      StepState* state,
                      const int64_t* counts,  // (P, P, 2)
                      int32_t index, int32_t P, int64_t received, int64_t choices, Ctx* ctx);

// The numbers for rank j, the same code in both builds. Returns needed capacity / capacity of rank j.
static inline BOTH_SIDES double dispatch_numbers_of(int64_t* numbers, const int64_t* counts, int32_t index, int32_t P,
                                                    int32_t j, int64_t align, int64_t received, int64_t choices) {
    int64_t send = 0, recv = 0, there = 0, back = 0, tokens = 0, of_them = 0;
    for (int32_t i = 0; i < j; i++) {
        send += round_up(counts[(index * P + i) * 2], align);
        recv += counts[(i * P + index) * 2];
    }
    for (int32_t i = 0; i < index; i++) {
        there += counts[(i * P + j) * 2];
        back += round_up(counts[(j * P + i) * 2], align);
    }
    for (int32_t i = 0; i < P; i++) {
        tokens += counts[(i * P + j) * 2];
        of_them += counts[(i * P + j) * 2 + 1];
    }
    numbers[SEND_START * P + j] = send;
    numbers[SEND_ROWS * P + j] = counts[(index * P + j) * 2];
    numbers[RECV_START * P + j] = recv;
    numbers[RECV_ROWS * P + j] = counts[(j * P + index) * 2];
    numbers[THERE_START * P + j] = there;
    numbers[COMBINE_START * P + j] = back;
    const double of_received = (double)tokens / (double)received, of_choices = (double)of_them / (double)choices;
    return of_received > of_choices ? of_received : of_choices;
}

// The choices (capacity, K) of the sent rows, from those of the tokens (N, K), for the rank that receives a row: local
// expert numbers, or -1 and gate 0 where another rank owns the choice. Pad rows are not sent, and stay as they are.
void dispatch_choices(int32_t* row_expert, real* row_gate, const int32_t* expert, const real* gate, Ragged send,
                      int64_t N, int32_t K, int32_t El, Ctx* ctx);

// dgate[n][k] = drow_gate[r][k], where r is the row of token n that was sent to the rank of its k-th choice. Shapes as
// above.
void dispatch_choices_backward(real* dgate, const real* drow_gate, const int32_t* expert, Ragged send, int64_t N,
                               int32_t K, int32_t El, Ctx* ctx);
