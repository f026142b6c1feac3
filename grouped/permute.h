// The ragged buffer: token rows permuted by expert, so that the grouped GEMM runs over contiguous rows.
//
// Example: 5 tokens a .. e choose 2 of 4 experts each: a 0 2, b 2 3, c 0 3, d 3 0, e 2 3. (Starts are multiples of 4 in
// this figure, to keep it short.)
//
//                        row   the row's token      row_token
//     group_start[0] ->   0    a                     0           expert 0: 3 rows, in the order of the tokens
//                         1    c                     2
//                         2    d                     3
//                         3    none: zeros          -1           a pad row
//     group_start[1] ->   4                                      expert 1: 0 rows, the next start is the same
//     group_start[2] ->   4    a                     0           expert 2: 3 rows
//                         5    b                     1
//                         6    e                     4
//                         7    none: zeros          -1
//     group_start[3] ->   8    b                     1           expert 3: 4 rows, no pad row
//                         9    c                     2
//                        10    d                     3
//                        11    e                     4
//     group_start[4] ->  12                                      the rows in use; buffers have `capacity` rows
//
//     token_row: a {0, 4}, b {5, 8}, c {1, 9}, d {10, 2}, e {6, 11}: the rows of a token's first and second choice
//
// Expert e owns rows group_start[e] .. group_start[e] + group_rows[e] - 1. Starts are multiples of row_align: 128 in
// the CUDA build, so that a GEMM tile has rows of one expert; 1 on the CPU, which has no pad rows. A function that
// writes a row buffer also writes its pad rows, as zeros. The layout is in device memory, and the host never reads it.
#pragma once

#include "device/device.h"

enum { MAX_EXPERTS = 1024 };  // on one GPU

typedef struct Ragged {
    int32_t El;            // local experts: those that this rank owns
    int64_t capacity;      // rows of a row buffer
    int64_t* group_start;  // (El + 1); group_start[El] is the number of rows in use, with pad rows
    int32_t* group_rows;   // (El): rows without pad rows; 0 for an expert without tokens
    int32_t* row_token;    // (capacity): the token of a row, -1 in a pad row
    int32_t* token_row;    // (N, K): the row of a token's k-th choice, -1 if that expert is not local
    real* row_gate;        // (capacity): the gate of a row, 0 in a pad row
} Ragged;

// Alignment of the experts' first rows, on the given backend.
static inline int64_t row_align(Backend backend) { return backend == BACKEND_CUDA ? 128 : 1; }

// Upper bound of the rows for `choices` distributed over El experts in any way.
static inline int64_t ragged_rows(int64_t choices, int32_t El, Backend backend) {
    int64_t align = row_align(backend);
    return round_up(choices + El * (align - 1), align);
}

// Upper bound of the rows for any routing of N tokens to K of El experts: a token's experts are distinct.
static inline int64_t ragged_capacity(int64_t N, int32_t K, int32_t El, Backend backend) {
    return ragged_rows(N * (K < El ? K : El), El, backend);
}

// Groups without starts: `count` matrices of `rows` rows each.
static inline Ragged ragged_matrices(int64_t count, int64_t rows) {
    const Ragged groups = {(int32_t)count, rows, NULL, NULL, NULL, NULL, NULL};
    return groups;
}

// Computes the permutation: sorts the choices by expert (a stable counting sort) and fills all of `ragged`. expert (N,
// K): local experts are 0..El-1, others are negative. gate (N, K); NULL: row_gate is left as it is.
void permute_plan(Ragged ragged, const int32_t* expert, const real* gate, int64_t N, int32_t K, Ctx* ctx);

// rows[r] = tokens[row_token[r]] for `capacity` rows and N tokens, zeros in pad rows. Rows are copied as bytes, of any
// type. On the GPU a row's length is a multiple of 16 bytes, and rows are aligned to 16 bytes.
void permute_rows(void* rows, const void* tokens, Ragged ragged, size_t row_bytes, Ctx* ctx);

//   tokens[n] = sum_k gate[n][k] * rows[token_row[n][k]]        tokens (N, C), rows (capacity, C), gate (N, K)
//
// The sum is in `real`, over the choices of local experts; gate NULL means 1. += with accumulate 1. unpermute_rows is
// combine in the forward, and without gates the backward of permute_rows. On the GPU C is a multiple of 8.
void unpermute_rows(floatX* tokens, const floatX* rows, const real* gate, Ragged ragged, int64_t N, int32_t K,
                    int64_t C, int accumulate, Ctx* ctx);

//   dgate[n][k] = sum_part drow_gate[token_row[n][k]][part]        dgate (N, K), drow_gate (capacity, parts)
//
// dgate is 0 where the choice's expert is not local. A row's gradient comes in parts if each tile of a GEMM's epilogue
// writes its own part (grouped_gemm_gate_parts).
void unpermute_gates(real* dgate, const real* drow_gate, int32_t parts, Ragged ragged, int64_t N, int32_t K, Ctx* ctx);

// Bytes of workspace that permute_plan needs (counts of the sort).
size_t permute_workspace(int64_t N, int32_t K, int32_t El);
