#include "layers/embedding.h"

#include <string.h>

#include "device/cpu.h"

// out[n] = table[token[n]]
void embedding_forward(floatX* out, const int32_t* token, const floatX* table, int64_t N, int64_t C, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) memcpy(out + n * C, table + token[n] * C, (size_t)C * sizeof(floatX));
}

size_t embedding_workspace(int64_t N, int64_t V) { return 0; }

void embedding_backward(real* dtable, const floatX* dout, const int32_t* token, int64_t N, int64_t V, int64_t C,
                        Ctx* ctx) {
    // Tokens repeat, so threads must not share a row. Each thread owns a stripe of columns and walks all tokens.
    const int64_t stripe = 32;
#pragma omp parallel for schedule(dynamic)
    for (int64_t c0 = 0; c0 < C; c0 += stripe) {
        int64_t c1 = min_i64(c0 + stripe, C);
        for (int64_t n = 0; n < N; n++) {
            real* d = dtable + token[n] * C;
            for (int64_t c = c0; c < c1; c++) d[c] += dout[n * C + c];
        }
    }
}
