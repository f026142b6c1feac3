// The number types of the two builds, and integer helpers. This file has the #ifdef of the backend.
//
//   floatX  type of activations and working weights: bf16 on CUDA, `real` on the CPU
//   real    type of values that must not be rounded to bf16: statistics, gates, router scores, losses, gradients that
//           are summed, master weights, and moments except with --moments bf16. float32; double in the reference build
//           with F64=1 (the oracle of finite differences).
//   Master  the part of a master weight that its working weight lacks (masters_upload, device/device.h): 16 bits on
//           CUDA; on the CPU the whole master weight
//
// The program is for 64-bit Linux, where int64_t is long: printf takes it as %ld.
//
// Host code is compiled as C11 by gcc (CPU build) and as C++20 by nvcc (CUDA build). Host code passes floatX* on and
// never reads the elements.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "files are little-endian and are read as they are: this needs a little-endian machine"
#endif

#ifdef __CUDACC__
#include <cuda_bf16.h>
typedef __nv_bfloat16 floatX;
typedef float real;
typedef uint16_t Master;
#define BACKEND BACKEND_CUDA
#define BOTH_SIDES __host__ __device__
#define UNROLL _Pragma("unroll")  // in code of both sides: arrays in registers need constant indices
#else
#ifdef F64
typedef double real;
#else
typedef float real;
#endif
typedef real floatX;
typedef real Master;
#define BACKEND BACKEND_CPU
#define BOTH_SIDES
#define UNROLL
#endif

// BACKEND is the backend of this build. Code that only computes sizes (memory of --dry-run) takes either.
typedef enum Backend { BACKEND_CPU, BACKEND_CUDA } Backend;

static inline BOTH_SIDES int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline BOTH_SIDES int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline BOTH_SIDES int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline BOTH_SIDES int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }  // to a multiple of b
static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
