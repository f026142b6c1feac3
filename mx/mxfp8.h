// MXFP8 (OCP Microscaling Formats 1.0): e4m3 elements in blocks of 32 along the contraction, and for each block a scale
// byte s (E8M0) that stands for 2^(s - 127); 255 is NaN. A row of 160 elements:
//
//     columns    0 .. 31   32 .. 63   64 .. 95   96 .. 127  128 .. 159
//     q        | 32 bytes | 32 bytes | 32 bytes | 32 bytes | 32 bytes |   a byte: S EEEE MMM
//     scale         s0         s1         s2         s3         s4       0 0 ... 0: 16 bytes in all
//
//     align 1     Each s is that of the largest element of its own block.
//     align 128   s0 = s1 = s2 = s3, that of the largest element of the chunk 0 .. 127. s4 stands for the rest alone.
//
//   q = e4m3(x 2^(127 - s)), rounded to nearest even, saturating at 448;  value = q 2^(s - 127)
//   RCEIL: s such that 2^(s - 127) is the smallest power of two >= amax / 448 (NVIDIA's recipe), at least 2^-127. One
//          float32 amax, 0x1.c00002p-119, gets s = 0 instead of 1, as it does where the quotient is rounded to float32
//   FLOOR: s = floor(log2(amax)) - 8 + 127, at least 0 (the OCP sample)
//   a block of zeros: s = 0, q = 0; a block with NaN or Inf: s = 255, and every q is 0x7f (NaN)
//
// Casts are exact to the bit: the reference takes x as float32 (its double build rounds it first), the GPU as bf16, and
// subnormal numbers count in full. Zeros, and what is rounded to zero, keep their sign (q = 0x80).
//
// With align 128 the blocks of each chunk of 128 along the contraction share one s, that of their largest element
// (fewer than 128 at the end of a row stand alone), and x is rounded once, with that s: still MX, and what the fast
// products on Hopper read. Weights for those share one s in tiles of 128 x 128, so that one set of bytes serves both
// orientations.
//
// Scale bytes are row-major, mx_stride bytes a row: a multiple of 16, as TMA wants it; bytes after the last block are
// 0. Widths are multiples of 32, and all buffers lie on 16 bytes.
#ifndef MX_MXFP8_H
#define MX_MXFP8_H

#include "device/device.h"
#include "grouped/permute.h"

BEGIN_C

typedef enum { MX_RCEIL, MX_FLOOR } MxScale;
typedef struct MxCast {
    int32_t scale;  // MxScale
    int32_t align;  // 1 or 128; in casts by channel 128 or 512
} MxCast;

enum { MX_BLOCK = 32, MX_CHUNK = 128, MX_RUN = 512, MX_RUN_LEAST = 40, MX_NAN = 255 };

static inline int64_t mx_stride(int64_t columns) { return round_up(columns / MX_BLOCK, 16); }
static inline int64_t mx_tiles(int64_t n) { return ceil_div(n, MX_CHUNK); }  // of 128, along one axis

// Blocks along the rows (1x32): activations and gradients for the products that contract over the columns.
void mx_quantize(uint8_t* q,       // (rows, columns)
                 uint8_t* scale,   // (rows, mx_stride(columns))
                 const floatX* x,  // (rows, columns)
                 int64_t rows, int64_t columns, MxCast cast, Ctx* ctx);

// Blocks down the columns (32x1), written transposed, as products that contract over the rows read them. For every one
// of `count` matrices (experts) alike, in one launch. rows are a multiple of 32 too.
void mx_quantize_transposed(uint8_t* q,       // (count, columns, rows)
                            uint8_t* scale,   // (count, columns, mx_stride(rows))
                            const floatX* x,  // (count, rows, columns)
                            int64_t count, int64_t rows, int64_t columns, MxCast cast, Ctx* ctx);

// Weights in tiles of 128 x 128 (smaller at the edges) with one scale each, and the same bytes transposed. rows are a
// multiple of 32 too.
void mx_quantize_tiles(uint8_t* q,             // (count, rows, columns)
                       uint8_t* q_transposed,  // (count, columns, rows)
                       uint8_t* scale,         // (count, ceil(rows / 128), ceil(columns / 128))
                       const floatX* w,        // (count, rows, columns)
                       int64_t count, int64_t rows, int64_t columns, int32_t scale_mode, Ctx* ctx);

// x = q 2^(s - 127): exact in bf16 but for values outside its range (what is below 2^-133 is rounded, beyond 2^128
// Inf).
void mx_dequantize(floatX* x,             // (rows, columns)
                   const uint8_t* q,      // (rows, columns)
                   const uint8_t* scale,  // (rows, mx_stride(columns))
                   int64_t rows, int64_t columns, Ctx* ctx);

// rows[r] = what the bytes of token row_token[r] stand for, zeros in pad rows: mx_dequantize and permute_rows at once.
void mx_dequantize_rows(floatX* rows,          // (capacity, columns)
                        const uint8_t* q,      // (N, columns)
                        const uint8_t* scale,  // (N, mx_stride(columns))
                        Ragged ragged, int64_t columns, Ctx* ctx);

// x += q 2^(s - 127), the sum rounded once.
void mx_dequantize_add(floatX* x, const uint8_t* q, const uint8_t* scale, int64_t rows, int64_t columns, Ctx* ctx);

// x = what its cast along the rows' direction (blocks down the columns of each group) stands for, in place: the
// operands of weights' gradients, whose contraction runs over a group's rows. On the GPU pad rows, which are zeros,
// count as rows. Chunks at the end of a group are cast on their own.
void mx_round_columns(floatX* x,  // (capacity, columns)
                      Ragged ragged, int64_t columns, MxCast cast, Ctx* ctx);

// The operands of weights' gradients on bytes (mx/grouped_gemm_mx.h), whose contraction runs over a group's rows: cast
// down the columns of each group and written transposed, a row for each column (channel). In q a group's rows begin at
// a multiple of 128 and go on to the next; pad rows are zeros. On the GPU that is group_start; on the CPU, where rows
// lie without gaps, the gaps are made here.
//
// Align 128: a scale for each chunk of 128 rows and channel. Align 512: each four chunks of a group, counted from its
// start, have one, which stands at each of them; and what would have a scale below MX_RUN_LEAST is zeros (2^-78 at
// most), so that the quotient of two scales of a channel stays inside of float32 while values are below 2^49.
static inline int64_t mx_channel_length(int64_t capacity, int32_t El, Backend backend) {
    return backend == BACKEND_CUDA ? round_up(capacity, MX_CHUNK) : ragged_rows(capacity, El, BACKEND_CUDA);
}
void mx_quantize_channels(uint8_t* q,       // (columns, length)
                          uint8_t* scale,   // (length / 128, columns)
                          const floatX* x,  // (capacity, columns), pad rows are zeros (also those after capacity)
                          int64_t length, Ragged ragged, int64_t columns, MxCast cast, Ctx* ctx);
// The same of what bytes stand for, cast anew. tokens 1: they are those of tokens, which go to their rows; 0: of rows.
void mx_requantize_channels(uint8_t* q, uint8_t* scale,
                            const uint8_t* from,        // (N or capacity, columns)
                            const uint8_t* from_scale,  // (the same, mx_stride(columns))
                            int tokens, int64_t length, Ragged ragged, int64_t columns, MxCast cast, Ctx* ctx);

// x both along its rows and by channel, in chunks of 128 each: mx_quantize (align 128) and mx_quantize_channels (align
// 128) of all rows as one group, in one reading.
void mx_quantize_both(uint8_t* q,               // (rows, columns)
                      uint8_t* scale,           // (rows, mx_stride(columns))
                      uint8_t* q_channels,      // (columns, length)
                      uint8_t* scale_channels,  // (length / 128, columns)
                      const floatX* x,          // (rows, columns)
                      int64_t length, int64_t rows, int64_t columns, int32_t scale_mode, Ctx* ctx);

// Where Blackwell's tensor cores look for the scale of block c of row r (of C blocks a row): tiles of 128 x 4, rows
// padded to 128 and blocks to 4 (cuBLAS documentation, "1D block scaling factors layout").
static inline int64_t mx_blackwell_offset(int64_t r, int64_t c, int64_t C) {
    return ((r / 128) * ((C + 3) / 4) + c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4;
}

END_C

#endif
