// MXFP8 quantization and dequantization (OCP Microscaling Formats 1.0): e4m3 elements in blocks of 32. A block runs
// along the contraction of the GEMM, so its scale is one factor in front of a sum of 32 products. The three GEMMs of a
// linear layer contract over different axes. An operand of two GEMMs is quantized twice, or (W) once in square tiles:
//
//   forward  y  = x W^T    contracts over IC      x row-wise (1x32), W row-wise
//   dgrad    dx = dy W     contracts over OC      dy row-wise, W column-wise (32x1)
//   wgrad    dW = dy^T x   contracts over tokens  dy and x column-wise
//
// Each block has a scale byte s (E8M0), whose value is 2^(s - 127); 255 is NaN. A row of 160 elements:
//
//     columns    0 .. 31   32 .. 63   64 .. 95   96 .. 127  128 .. 159
//     q        | 32 bytes | 32 bytes | 32 bytes | 32 bytes | 32 bytes |   a byte: S EEEE MMM
//     scale         s0         s1         s2         s3         s4       0 0 ... 0: 16 bytes in all
//
//     align 1     Each s comes from the amax (largest magnitude) of its own block.
//     align 128   s0 = s1 = s2 = s3, from the amax of the chunk 0 .. 127. s4 comes from the remaining block alone.
//
//   quantize:    q = e4m3(x 2^(127 - s)), rounded to nearest even, saturating at 448
//   dequantize:  x = q 2^(s - 127)
//   RCEIL: s such that 2^(s - 127) is the smallest power of two >= amax / 448 (NVIDIA's recipe), at least 2^-127. One
//          float32 amax, 0x1.c00002p-119, gets s = 0 instead of 1, because amax / 448 rounded to float32 is 2^-127
//   FLOOR: s = floor(log2(amax)) - 8 + 127, at least 0 (the OCP sample)
//   a block of zeros: s = 0, q = 0; a block with NaN or Inf: s = 255, and every q is 0x7f (NaN)
//
// Quantization is exact to the bit. The reference reads x as float32 (its double build rounds it first), the GPU as
// bf16. Subnormal numbers are not flushed. Zeros, and elements that are rounded to zero, keep their sign (q = 0x80).
//
// Align 128: the blocks of each chunk of 128 along the contraction share one s, from the chunk's amax. A chunk at the
// end of a row may be shorter. x is rounded once, with this s. The result is still MX. The fast GEMMs on Hopper need
// align 128. Their weights have one s for each tile of 128 x 128: one quantization serves both orientations.
//
// Two layouts of a matrix (rows, columns) in MXFP8:
//
//   row-wise   q (rows, columns), scale (rows, mx_stride(columns))
//   channels   q (columns, length), scale (length / 128, columns): column-wise, drawn at mx_quantize_channels
//
// mx_stride, the scale bytes of a row, is a multiple of 16 for TMA. Bytes after the last block are 0. Widths are
// multiples of 32, and all buffers are aligned to 16 bytes.
#pragma once

#include "mx/format.h"

typedef enum { MX_RCEIL, MX_FLOOR } MxScale;
// scale: an MxScale. align: 1 or 128; mx_quantize_channels: 128 or 512.
typedef Recipe MxRecipe;

// Elements of a block, a chunk (align 128), a 512-row scale group; the least scale byte of such a group; NaN's scale
// byte.
enum { MX_BLOCK = 32, MX_CHUNK = 128, MX_RUN = 512, MX_RUN_LEAST = 40, MX_NAN = 255 };

// An MXFP8 tensor: its elements, and its scale bytes.
typedef Packed MxBytes;

static inline int64_t mx_stride(int64_t columns) { return round_up(columns / MX_BLOCK, 16); }
static inline int64_t mx_tiles(int64_t n) { return ceil_div(n, MX_CHUNK); }  // tiles of 128 along one axis

// Row-wise quantization of x (rows, columns) in blocks 1x32: activations and gradients for GEMMs that contract over the
// columns.
void mx_quantize(MxBytes out, const floatX* x, int64_t rows, int64_t columns, MxRecipe recipe, Ctx* ctx);

// Quantizes weights w (count, rows, columns) in tiles of 128 x 128 (smaller at the edges) with one scale each: scale
// (count, ceil(rows / 128), ceil(columns / 128)). Writes q (count, rows, columns) and its transpose (count, columns,
// rows). rows is a multiple of 32 too.
void mx_quantize_tiles(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t count, int64_t rows,
                       int64_t columns, int32_t scale_mode, Ctx* ctx);

// Dequantizes row-wise MXFP8: x (rows, columns) = q 2^(s - 127), or += with accumulate 1, the sum rounded once. Exact
// in bf16 except outside its range: rounded below 2^-133, Inf from 2^128.
void mx_dequantize(floatX* x, MxBytes from, int64_t rows, int64_t columns, int accumulate, Ctx* ctx);

// Fake quantization: out = the dequantized values of quantized x.
//
//   mx_round_rows     x (rows, columns) in blocks along the rows, in place or not
//   mx_round_columns  x (capacity, columns) in blocks down the columns of each group, in place or not: the operands of
//                     wgrad. All rows are one group if group_start is NULL. On the GPU pad rows (zeros) count as rows.
//                     The last block of a group may be shorter.
//   mx_round_weight   w (count, rows, columns) along the rows, and down the columns with each matrix transposed; align
//                     1, rows a multiple of 32
void mx_round_rows(floatX* out, const floatX* x, int64_t rows, int64_t columns, MxRecipe recipe, Ctx* ctx);
void mx_round_columns(floatX* out, const floatX* x, Ragged ragged, int64_t columns, MxRecipe recipe, Ctx* ctx);
void mx_round_weight(floatX* out, floatX* transposed, const floatX* w, int64_t count, int64_t rows, int64_t columns,
                     int32_t scale_mode, Ctx* ctx);

// Column-wise quantization of a ragged buffer x (capacity, columns) into channels: the operands of the MXFP8 wgrad
// (mx/grouped_gemm_mx.h), which contracts over a group's rows. The result is transposed: a channel, one row of q, is
// one column of x.
//
//   q:  | group 0's rows | zeros | group 1's rows | zeros | ..     each group starts at a multiple of 128
//
// On the GPU a group's start in q is group_start, because x already has the pad rows, which are zeros, up to `length`.
// On the CPU x has no pad rows, so zeros are inserted.
//
// Align 128: one scale for each channel and chunk of 128 rows. Align 512: four consecutive chunks of a group, counted
// from its start, share one scale, which is repeated four times. A 512-row scale group whose scale would be below
// MX_RUN_LEAST is flushed to zeros (its elements are at most 2^-78). The flush keeps the ratio of two scales of a
// channel inside float32 while values are below 2^49.
// The length of a channel: the rows of all groups, with the zeros after each group.
static inline int64_t mx_channel_length(int64_t capacity, int32_t El, Backend backend) {
    return backend == BACKEND_CUDA ? round_up(capacity, MX_CHUNK) : ragged_rows(capacity, El, BACKEND_CUDA);
}
// The channels from `first` on.
static inline MxBytes mx_from_channel(MxBytes channels, int64_t first, int64_t length) {
    channels.q += first * length;
    channels.scale += first * (length / MX_CHUNK);
    return channels;
}
void mx_quantize_channels(MxBytes out, const floatX* x, int64_t length, Ragged ragged, int64_t columns, MxRecipe recipe,
                          Ctx* ctx);
// mx_quantize_channels for row-wise MXFP8 input, which is dequantized and quantized column-wise. tokens 1: the input is
// (N, columns), by token, and is permuted to ragged rows; 0: the input is ragged rows (capacity, columns).
void mx_requantize_channels(MxBytes out, MxBytes from, int tokens, int64_t length, Ragged ragged, int64_t columns,
                            MxRecipe recipe, Ctx* ctx);

// mx_quantize and mx_quantize_channels of x (rows, columns), all rows as one group, both with align 128. x is read
// once.
void mx_quantize_both(MxBytes out, MxBytes channels, const floatX* x, int64_t length, int64_t rows, int64_t columns,
                      int32_t scale_mode, Ctx* ctx);

// Blackwell's scale layout: the offset of the scale of row r, block c, with C blocks a row. Tiles are 128 x 4; rows are
// padded to 128 and blocks to 4 (cuBLAS documentation, "1D block scaling factors layout").
static inline int64_t mx_blackwell_offset(int64_t r, int64_t c, int64_t C) {
    return ((r / 128) * ((C + 3) / 4) + c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4;
}
