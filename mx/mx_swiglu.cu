// SwiGLU and the cast of its result in one kernel. Memory bounds it: 5.03 bytes an element of the activation (F a row),
// and 14.06 for backward, which writes dh and gate * A too. All of an input is read once, in 16-byte pieces of which a
// lane has 6 or 8 under way. Casts: mxfp8.cuh.
//
// Forward gives a warp a span of 1024 columns. Backward gives it a whole row, two pieces of gate, up and dA' at a time:
// <dA', A> is one warp's sum in a fixed order. A is rounded in registers as forward's cast rounds it, and the gradients
// of gate and up are cast where they are made, because the same lanes hold what shares a scale. Where F is no multiple
// of a chunk, one chunk holds the last of the gate and the first of up: such rows are cast when they are complete.
#include "mx/mx_swiglu.h"

#include "grouped/experts.cuh"
#include "mx/mxfp8.cuh"

// How many rows there are is read on the device, and the grid walks them.
template <int ALIGN>
static __global__ void __launch_bounds__(32 * ROW_WARPS, 4)
    swiglu_kernel(uint8_t* q, uint8_t* scale, const floatX* h, Ragged r, int64_t F, int64_t stride, uint32_t carry) {
    wait_for_previous();
    const uint32_t spans = (uint32_t)ceil_div(F, SPAN), end = (uint32_t)r.group_start[r.El] * spans;
    for (uint32_t span = warp_in_grid(); span < end; span += gridDim.x * ROW_WARPS) {
        const int64_t row = span / spans, c0 = span % spans * (int64_t)SPAN;
        const int64_t given = r.row_token[row] >= 0 ? F : 0;  // columns to read: none of a pad row
        // All loads go out first.
        uint4 gate[PIECES], up[PIECES];
        load_span(gate, h + row * 2 * F, c0, given);
        load_span(up, h + row * 2 * F + F, c0, given);

        // a = silu(g) u, rounded to bf16 before its cast.
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            float g[8], u[8];
            floats_of(g, gate[i]);
            floats_of(u, up[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) g[j] = swiglu(g[j], u[j], sigmoid_fast(g[j]));
            gate[i] = piece_of(g);
        }
        cast_span<ALIGN>(q + row * F, scale + row * stride, gate, c0, F, stride, carry);
    }
}

// x becomes what its cast stands for, in this lane's 8 columns.
template <int ALIGN>
static __device__ __forceinline__ void round_piece(float x[8], uint32_t carry) {
    // Rounded to bf16 first, as A is before its cast.
    const uint4 p = piece_of(x);
    const uint32_t s = scale_of(higher_half(largest_of_lanes<ALIGN / 8>(largest(p))), carry);
    const float value = mx_scale_value(s);
    values_of(x, cast8(p, mx_scale_inverse(s)), value);
}

// Casts a lane's pieces of gate and up, whose blocks and chunks the same lanes hold. q and scale: where those of the
// gate go; up's lie F columns further.
template <int ALIGN>
static __device__ __forceinline__ void cast_two(uint8_t* q, uint8_t* scale, const uint4& gate, const uint4& up,
                                                int64_t F, bool inside, uint32_t carry) {
    // One shuffle serves both: the largest of the gate in the lower half, of up in the upper.
    const uint32_t pair = largest_of_lanes<ALIGN / 8>(higher_half(largest(gate)) | higher_half(largest(up)) << 16);
    const uint32_t of_gate = scale_of(pair & 0xffff, carry), of_up = scale_of(pair >> 16, carry);

    // Bytes, and of each block of four lanes the scale.
    if (!inside) return;
    *(uint2*)q = cast8(gate, mx_scale_inverse(of_gate));
    *(uint2*)(q + F) = cast8(up, mx_scale_inverse(of_up));
    if (threadIdx.x % 4) return;
    scale[0] = (uint8_t)of_gate, scale[F / MX_BLOCK] = (uint8_t)of_up;
}

// ACROSS: a chunk holds the last of the gate and the first of up, in other lanes and pieces. The complete row is read
// once more for its cast, from the caches.
template <int ALIGN, bool ACROSS>
static __global__ void __launch_bounds__(32 * ROW_WARPS, 3)
    swiglu_backward_kernel(uint8_t* q, uint8_t* scale, floatX* dh, floatX* gated_a, float* drow_gate,
                           const floatX* da_ungated, const floatX* h, Ragged r, int64_t F, int64_t stride,
                           uint32_t carry) {
    wait_for_previous();
    const int64_t used = r.group_start[r.El];
    const int lane = threadIdx.x % 32;
    for (int64_t row = warp_in_grid(); row < used; row += gridDim.x * (int64_t)ROW_WARPS) {
        uint8_t *q_row = q + row * 2 * F, *s_row = scale + row * stride;
        swiglu_backward_row(
            dh, gated_a, drow_gate, da_ungated, h, r, row, F, [&](float a[8]) { round_piece<ALIGN>(a, carry); },
            [&](int64_t c, const uint4& gate, const uint4& up) {
                if (!ACROSS) cast_two<ALIGN>(q_row + c, s_row + c / MX_BLOCK, gate, up, F, c < F, carry);
            });

        // Bytes after the last scale are 0.
        if (!ACROSS && 2 * F / MX_BLOCK + lane < stride) s_row[2 * F / MX_BLOCK + lane] = 0;

        // The complete row, read again by the whole warp.
        if (!ACROSS) continue;
        __syncwarp();
        for (int64_t c0 = 0; c0 < 2 * F; c0 += SPAN) {
            uint4 p[PIECES];
            load_span(p, dh + row * 2 * F, c0, 2 * F);
            cast_span<ALIGN>(q_row, s_row, p, c0, 2 * F, stride, carry);
        }
    }
}

void mx_swiglu_quantize(uint8_t* q, uint8_t* scale, const floatX* h, Ragged r, int64_t F, MxCast cast, Ctx* ctx) {
    ASSERT(aligned(q, h));
    auto kernel = cast.align == 1 ? swiglu_kernel<MX_BLOCK> : swiglu_kernel<MX_CHUNK>;
    launch_early(kernel, walking_blocks(row_blocks(r.capacity, F), ctx), 32 * ROW_WARPS, 0, ctx, q, scale, h, r, F,
                 mx_stride(F), carry_of(cast.scale));
}

void mx_swiglu_backward_quantize(uint8_t* q, uint8_t* scale, floatX* dh, floatX* gated_a, real* drow_gate,
                                 const floatX* da_ungated, const floatX* h, Ragged r, int64_t F, MxCast cast,
                                 Ctx* ctx) {
    ASSERT(aligned(q, dh, gated_a, da_ungated, h) && F % MX_BLOCK == 0);
    auto kernel = cast.align == 1     ? swiglu_backward_kernel<MX_BLOCK, false>
                  : F % MX_CHUNK == 0 ? swiglu_backward_kernel<MX_CHUNK, false>
                                      : swiglu_backward_kernel<MX_CHUNK, true>;
    launch_early(kernel, walking_blocks(ceil_div(r.capacity, ROW_WARPS), ctx), 32 * ROW_WARPS, 0, ctx, q, scale, dh,
                 gated_a, drow_gate, da_ungated, h, r, F, mx_stride(2 * F), carry_of(cast.scale));
}
