// The ladder of docs/cuda.md: one product, five kernels, from a thread an element to a ring that the copy engine fills.
// Each computes what grouped_gemm_forward does, y[r] = W_e x[r] for the rows r of every expert e, from the same ragged
// buffer; rows of y that are pad rows become zeros. IC and OC are multiples of 8. The kernels are there to be read,
// tested and measured; the program never calls them.
#ifndef LEARN_LEARN_H
#define LEARN_LEARN_H

#include "grouped/permute.h"

BEGIN_C

typedef void LearnStep(floatX* y,        // (capacity, OC)
                       const floatX* x,  // (capacity, IC)
                       const floatX* w,  // (El, OC, IC)
                       Ragged ragged, int64_t IC, int64_t OC, Ctx* ctx);

LearnStep learn_1;  // a thread an element
LearnStep learn_2;  // tiles in shared memory, a thread 64 elements
LearnStep learn_3;  // tensor cores, a warp at a time (mma.sync)
LearnStep learn_4;  // four warps at a time, from shared memory (wgmma); Hopper alone
LearnStep learn_5;  // a ring of stages that TMA fills; Hopper alone

END_C

#endif
