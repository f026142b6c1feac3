// Which kernels a GPU runs: those for every NVIDIA GPU since Ampere, or those for Hopper. Plain functions of the
// compute capability (90 is 9.0): any machine can answer for any GPU.
#ifndef DEVICE_KERNELS_H
#define DEVICE_KERNELS_H

#include "device/types.h"

BEGIN_C

// 1: the portable kernels, 0: Hopper's, -1: *error, in fresh memory, says why there are none. `asked` is what
// TRAIN_MOE_KERNELS says, NULL where it is not set.
int kernels_choose(int capability, const char* asked, char** error);

// NULL, or why the GPU has no MXFP8 products of --mx-gemm fast with these kernels, in fresh memory.
char* kernels_without_fast(int capability, int portable);

END_C

#endif
