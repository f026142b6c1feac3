#include "mx/mxfp8.h"

#include "mx/mxfp8_cpu.h"

// Row-wise. A thread takes one row at a time.
void mx_quantize(MxBytes out, const floatX* x, int64_t rows, int64_t columns, MxRecipe recipe, Ctx* ctx) {
    const int64_t chunk = chunk_of(recipe), stride = mx_stride(columns);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        // Rows of scales are padded to `stride` bytes, and the padding is zeros.
        memset(out.scale + r * stride, 0, stride);
        for (int64_t c = 0; c < columns; c += chunk) {
            // A block or chunk: find its scale, write the scale of each of its blocks, quantize.
            int64_t n = min_i64(chunk, columns - c), at = r * columns + c;
            int s = scale_of(x + at, columns, 1, n, recipe.scale);
            memset(out.scale + r * stride + c / MX_BLOCK, s, (size_t)n / MX_BLOCK);
            quantize_blocks(out.q + at, columns, 1, x + at, columns, 1, n, s);
        }
    }
}

void mx_quantize_tiles(uint8_t* q, uint8_t* q_transposed, uint8_t* scale, const floatX* w, int64_t count, int64_t rows,
                       int64_t columns, int32_t scale_mode, Ctx* ctx) {
    const int64_t tiles_r = mx_tiles(rows), tiles_c = mx_tiles(columns);
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < count * tiles_r * tiles_c; tile++) {
        // The tile's position, and its size within the matrix.
        int64_t m = tile / (tiles_r * tiles_c), r = tile / tiles_c % tiles_r * MX_CHUNK, c = tile % tiles_c * MX_CHUNK;
        int64_t nr = min_i64(MX_CHUNK, rows - r), nc = min_i64(MX_CHUNK, columns - c);
        int64_t at = (m * rows + r) * columns + c, at_transposed = (m * columns + c) * rows + r;

        // One scale; q and its transpose.
        int s = scale_of(w + at, columns, nr, nc, scale_mode);
        scale[tile] = s;
        quantize_blocks(q + at, columns, 1, w + at, columns, nr, nc, s);
        quantize_blocks(q_transposed + at_transposed, 1, rows, w + at, columns, nr, nc, s);
    }
}

void mx_dequantize(floatX* x, MxBytes from, int64_t rows, int64_t columns, int accumulate, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            const float factor = mx_scale_value(from.scale[r * mx_stride(columns) + c / MX_BLOCK]);
            const float value = e4m3_value(from.q[r * columns + c]) * factor;
            floatX* to = x + r * columns + c;
            *to = accumulate ? *to + value : value;  // no sum with 0, which would lose the sign of -0
        }
}

// Fake quantization of n elements, `step` apart, with one scale.
static void round_block(floatX* out, int64_t out_step, const floatX* x, int64_t step, int64_t n, int32_t scale_mode) {
    const int s = scale_of(x, step, n, 1, scale_mode);
    for (int64_t i = 0; i < n; i++) out[i * out_step] = value_of((float)x[i * step], s);
}

void mx_round_rows(floatX* out, const floatX* x, int64_t rows, int64_t columns, MxRecipe recipe, Ctx* ctx) {
    const int64_t chunk = chunk_of(recipe);
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < rows * columns; at += columns)
        for (int64_t c = 0; c < columns; c += chunk)
            round_block(out + at + c, 1, x + at + c, 1, min_i64(chunk, columns - c), recipe.scale);
}

void mx_round_columns(floatX* out, const floatX* x, Ragged ragged, int64_t columns, MxRecipe recipe, Ctx* ctx) {
    const int64_t chunk = chunk_of(recipe);
    for (int32_t e = 0; e < ragged.El; e++) {
        const int64_t start = ragged.group_start ? ragged.group_start[e] : 0;
        const int64_t rows = ragged.group_start ? ragged.group_rows[e] : ragged.capacity;
#pragma omp parallel for collapse(2) schedule(static)
        for (int64_t r = 0; r < rows; r += chunk)
            for (int64_t c = 0; c < columns; c++) {
                const int64_t at = (start + r) * columns + c;
                round_block(out + at, columns, x + at, columns, min_i64(chunk, rows - r), recipe.scale);
            }
    }
}

void mx_round_weight(floatX* out, floatX* transposed, const floatX* w, int64_t count, int64_t rows, int64_t columns,
                     int32_t scale_mode, Ctx* ctx) {
    const MxRecipe recipe = {scale_mode, 1};
    mx_round_rows(out, w, count * rows, columns, recipe, ctx);
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t m = 0; m < count; m++)
        for (int64_t r = 0; r < rows; r += MX_BLOCK)
            for (int64_t c = 0; c < columns; c++)
                round_block(transposed + (m * columns + c) * rows + r, 1, w + (m * rows + r) * columns + c, columns,
                            MX_BLOCK, scale_mode);
}

// Column-wise quantization of a ragged buffer. The input is x, or MXFP8 `from` if x is NULL. It takes
// one chunk or 512-row scale group of a column at a time.
static void channels(MxBytes out, const floatX* x, const MxBytes* from, const int32_t* row_token, int64_t length,
                     Ragged r, int64_t columns, MxRecipe recipe) {
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < columns; c++)
        for (int32_t e = 0; e < r.El; e++) {
            const int64_t start = channel_start(r, e), rows = r.group_rows[e];
            for (int64_t first = 0; first < rows; first += recipe.align) {
                // Gather the elements, dequantized if the input is MXFP8.
                const int64_t given = min_i64(recipe.align, rows - first), n = round_up(given, MX_CHUNK);
                floatX value[MX_RUN] = {0};
                for (int64_t i = 0; i < given; i++) {
                    const int64_t row = r.group_start[e] + first + i, at = row_token ? row_token[row] : row;
                    value[i] = x ? x[at * columns + c]
                                 : e4m3_value(from->q[at * columns + c]) *
                                       mx_scale_value(from->scale[at * mx_stride(columns) + c / MX_BLOCK]);
                }

                // A 512-row scale group below MX_RUN_LEAST is flushed to zeros, which keep their signs.
                int s = scale_of(value, 1, n, 1, recipe.scale);
                if (recipe.align == MX_RUN && s < MX_RUN_LEAST) {
                    s = 0;
                    for (int64_t i = 0; i < given; i++) value[i] *= 0;
                }

                // Write the scale of each chunk, and q.
                for (int64_t k = 0; k < n; k += MX_CHUNK) out.scale[(start + first + k) / MX_CHUNK * columns + c] = s;
                quantize_blocks(out.q + c * length + start + first, 1, 1, value, 1, n, 1, s);
            }
        }
}

void mx_quantize_channels(MxBytes out, const floatX* x, int64_t length, Ragged r, int64_t columns, MxRecipe recipe,
                          Ctx* ctx) {
    channels(out, x, NULL, NULL, length, r, columns, recipe);
}

void mx_requantize_channels(MxBytes out, MxBytes from, int tokens, int64_t length, Ragged r, int64_t columns,
                            MxRecipe recipe, Ctx* ctx) {
    channels(out, NULL, &from, tokens ? r.row_token : NULL, length, r, columns, recipe);
}

void mx_quantize_both(MxBytes out, MxBytes channels, const floatX* x, int64_t length, int64_t rows, int64_t columns,
                      int32_t scale_mode, Ctx* ctx) {
    // All rows are one group of a ragged buffer.
    int64_t start[2] = {0, rows};
    int32_t count = (int32_t)rows;
    const Ragged all = {1, rows, start, &count, NULL, NULL, NULL};
    const MxRecipe recipe = {scale_mode, MX_CHUNK};
    mx_quantize(out, x, rows, columns, recipe, ctx);
    mx_quantize_channels(channels, x, length, all, columns, recipe, ctx);
}
