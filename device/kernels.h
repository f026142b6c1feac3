// Selects the kernels of a GPU: portable kernels for every NVIDIA GPU since Ampere, or kernels for Hopper. Plain
// functions of the compute capability (90 is 9.0) or the name, so that any machine can compute the answer for any GPU.
#pragma once

#include "device/types.h"

// Returns 1: portable kernels, 0: Hopper's kernels, -1: none, with the reason in *error (newly allocated). `asked` is
// the value of TRAIN_MOE_KERNELS, NULL if it is not set.
int kernels_choose(int capability, const char* asked, char** error);

// NULL, or the reason why a program built with `toolkit` cannot run with a driver for CUDA `driver` (13000 is 13.0),
// newly allocated. Within one major version any driver runs any program (minor version compatibility). Only PTX needs a
// driver as new as the toolkit.
char* kernels_old_driver(int driver, int toolkit);

// NULL, or the reason why the GPU has no MXFP8 GEMMs for --precision mxfp8 with these kernels (newly allocated).
char* kernels_without_fast(int capability, int portable);

// Dense bf16 peak of a GPU in FLOP/s by NVIDIA's data sheets; 0 for all but H100, H200 and GH200 at their full size.
double kernels_peak_flops(const char* name, int sms);
