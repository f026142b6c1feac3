// Four-bit numbers, as fake quantization: NVFP4 and MXFP4. Elements are e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
// negatives.
//
//   NVFP4   blocks of 16 share an e4m3 scale b, and a tensor has one float32 scale t
//   MXFP4   blocks of 32 share a power of two 2^(s - 127), as in MXFP8 (mx/mxfp8.h), with 6 in the place of 448
//
//   NVFP4:  e = 2688 / amax of the tensor, 2688 = 6 448, at most the largest float32;  t = 1 / e
//           b = e4m3(amax of the block / 6 * e)
//           value = e2m1(x / (t b)) b t, computed as x * (1 / (t b));  b = 0: value 0
//   MXFP4:  value = e2m1(x 2^(127 - s)) 2^(s - 127)
//
// The order of the float32 operations is that of fouroversix 1.0.5 (static_6). e2m1 saturates at 6. Nearest:
// ties go to the even code. Stochastic rounding: up with the probability of the distance from the lower neighbour, to
// 2^-17. So the mean is x where e2m1 does not saturate. A block's largest element saturates where e4m3 rounds b down.
//
// A block (MXFP4) or tensor (NVFP4) with NaN or Inf becomes NaN. With MX_RCEIL magnitudes from 3.5 2^126 on become Inf.
// Zeros keep their sign. x is read as float32. On the GPU the value is rounded to bf16. A value of MXFP4 is exact in
// bf16; a value of NVFP4 has up to six bits times t.
//
// A tensor of NVFP4 is one group of rows: the tokens of a micro-batch, an expert's rows, or one matrix of a weight.
//
// Sources: OCP Microscaling Formats 1.0; NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149),
// sections 2 and 4, appendix C.
#pragma once

#include "mx/format.h"

// The revision of these values, which checkpoints record. Every change of a value raises the revision: a resumed run
// must keep the rounding of its beginning.
enum { FP4_ROUNDING = 1 };

// Rows of the random Hadamard transform, and its signs: the diagonal S has -1 where FP4_SIGNS has a 1 bit. A tile of a
// weight is as high as it is wide.
enum { FP4_HADAMARD = 16, FP4_SIGNS = 0x9d2c };

// Blocks of high x wide elements in each group of (rows, columns): 1 x n, n x 1 or n x n. n = 16 means NVFP4, n = 32
// MXFP4. The last blocks of a group may have fewer rows.
typedef struct Fp4Blocks {
    int32_t high, wide;
    int32_t transform;  // 1, for n x 1: the transformed x is rounded
    int32_t scale;      // of MXFP4: MxScale (mx/mxfp8.h)
} Fp4Blocks;

static inline int fp4_is_nv(Fp4Blocks blocks) { return blocks.high == 16 || blocks.wide == 16; }

// The operands of fp4_round. columns is a multiple of 32.
typedef struct Fp4Work {
    floatX* out;      // (capacity, columns): the values of x, in place or not; NULL with stats
    floatX* back;     // NULL, or (El, columns, capacity), not for n x 1: the values, each group transposed
    const floatX* x;  // (capacity, columns)
    Ragged groups;    // without group_start each of the El groups has `capacity` rows
    int64_t columns;
    Fp4Blocks blocks;
    Draw draw;
    QuantizationStats* stats;  // NULL, or += statistics of values to nearest, instead of the values
} Fp4Work;

// Rows after the last group are not written. No element is `inexact`, because each block has a scale of its own.
// Workspace: El words, rounded up to a multiple of 4.
//
// transform: the values of H S x, for 16 rows of a group at a time. H is the Hadamard matrix of 16 over 4, S a diagonal
// of fixed random signs. H S is orthogonal, so dy^T x keeps its value if both are transformed. Fewer than 16 rows at
// the end of a group stay as they are. H S x is in float32.
void fp4_round(Fp4Work work, Ctx* ctx);
