#include "grouped/permute.h"

#include <string.h>

#include "device/cpu.h"

size_t permute_workspace(int64_t N, int32_t K, int32_t El) { return (size_t)El * sizeof(int64_t); }

void permute_plan(Ragged r, const int32_t* expert, const real* gate, int64_t N, int32_t K, Ctx* ctx) {
    ASSERT(permute_workspace(N, K, r.El) <= ctx->workspace_bytes);
    int64_t* next = (int64_t*)ctx->workspace;

    // Count the rows of each expert.
    for (int32_t e = 0; e < r.El; e++) r.group_rows[e] = 0;
    for (int64_t i = 0; i < N * K; i++)
        if (expert[i] >= 0) r.group_rows[expert[i]]++;

    // Prefix sum: the start of each expert. `next` is an expert's next free row.
    r.group_start[0] = 0;
    for (int32_t e = 0; e < r.El; e++) {
        next[e] = r.group_start[e];
        r.group_start[e + 1] = r.group_start[e] + r.group_rows[e];  // no pad rows on the CPU
    }
    ASSERT(r.group_start[r.El] <= r.capacity && r.capacity <= INT32_MAX);

    // Place the choices in order, each in its expert's next row.
    for (int64_t i = 0; i < N * K; i++) {
        // A choice whose expert is not local has no row.
        r.token_row[i] = -1;
        if (expert[i] < 0) continue;
        int64_t row = next[expert[i]]++;
        r.token_row[i] = (int32_t)row;
        r.row_token[row] = (int32_t)(i / K);
        if (gate) r.row_gate[row] = gate[i];
    }
}

void permute_rows(void* rows, const void* tokens, Ragged r, size_t row_bytes, Ctx* ctx) {
    // Every row has a token, because the CPU has no pad rows.
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < r.group_start[r.El]; i++)
        memcpy((char*)rows + (size_t)i * row_bytes, (const char*)tokens + (size_t)r.row_token[i] * row_bytes,
               row_bytes);
}

void unpermute_rows(floatX* tokens, const floatX* rows, const real* gate, Ragged r, int64_t N, int32_t K, int64_t C,
                    int accumulate, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        floatX* out = tokens + n * C;
        if (!accumulate) memset(out, 0, (size_t)C * sizeof(floatX));
        for (int32_t k = 0; k < K; k++) {
            // A choice whose expert is not local adds nothing.
            int32_t row = r.token_row[n * K + k];
            if (row < 0) continue;
            real g = gate ? gate[n * K + k] : 1;
            for (int64_t c = 0; c < C; c++) out[c] += g * rows[row * C + c];
        }
    }
}

void unpermute_gates(real* dgate, const real* drow_gate, int32_t parts, Ragged r, int64_t N, int32_t K, Ctx* ctx) {
    // Choices without a row get gradient 0.
    for (int64_t i = 0; i < N * K; i++) {
        dgate[i] = 0;
        for (int64_t p = 0; p < parts && r.token_row[i] >= 0; p++) dgate[i] += drow_gate[r.token_row[i] * parts + p];
    }
}
