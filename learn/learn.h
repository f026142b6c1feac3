// The ladder of docs/cuda.md: one grouped GEMM, five kernels, from one thread per element to a ring of stages that TMA
// fills. Each computes the same as grouped_gemm_forward, from the same ragged buffer:
//
//   y[r] = W_e x[r]   for the rows r of every expert e; zeros in pad rows
//
// IC and OC are multiples of 8. The kernels are for reading, tests and measurements; the program never calls them.
#pragma once

#include "grouped/permute.h"

typedef void LearnStep(floatX* y,        // (capacity, OC)
                       const floatX* x,  // (capacity, IC)
                       const floatX* w,  // (El, OC, IC)
                       Ragged ragged, int64_t IC, int64_t OC, Ctx* ctx);

LearnStep learn_1;  // one thread per element
LearnStep learn_2;  // tiles in shared memory, 64 elements per thread
LearnStep learn_3;  // tensor cores, one warp per instruction (mma.sync)
LearnStep learn_4;  // a warpgroup per instruction, operands in shared memory (wgmma); Hopper only
LearnStep learn_5;  // warp specialization, a ring of stages filled by TMA; Hopper only
