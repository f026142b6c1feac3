#include "moe/dispatch_ops.h"

#include "device/cpu.h"

void dispatch_ranks(int32_t* rank, int64_t* counts, const int32_t* expert, int64_t N, int32_t K, int32_t P, int32_t El,
                    Ctx* ctx) {
    for (int32_t j = 0; j < P; j++) counts[2 * j] = counts[2 * j + 1] = 0;
    for (int64_t n = 0; n < N; n++) {
        // A token is sent once to a rank, with all of its choices there.
        for (int32_t j = 0; j < P; j++) rank[n * P + j] = -1;
        for (int32_t k = 0; k < K; k++) {
            int32_t j = expert[n * K + k] / El;
            counts[2 * j] += rank[n * P + j] < 0;
            counts[2 * j + 1]++;
            rank[n * P + j] = j;
        }
    }
}

void dispatch_choices(int32_t* row_expert, real* row_gate, const int32_t* expert, const real* gate, Ragged send,
                      int64_t N, int32_t K, int32_t El, Ctx* ctx) {
    for (int64_t n = 0; n < N; n++)
        for (int32_t j = 0; j < send.El; j++) {
            // The row of token n that is sent to rank j; -1: there is none.
            int64_t row = send.token_row[n * send.El + j];
            for (int32_t k = 0; k < K && row >= 0; k++) {
                int32_t e = expert[n * K + k], here = e / El == j;
                row_expert[row * K + k] = here ? e - j * El : -1;
                row_gate[row * K + k] = here ? gate[n * K + k] : 0;
            }
        }
}

void dispatch_choices_backward(real* dgate, const real* drow_gate, const int32_t* expert, Ragged send, int64_t N,
                               int32_t K, int32_t El, Ctx* ctx) {
    for (int64_t i = 0; i < N * K; i++) {
        // The row that was sent to the rank that owns this choice.
        int64_t row = send.token_row[i / K * send.El + expert[i] / El];
        dgate[i] = drow_gate[row * K + i % K];
    }
}
