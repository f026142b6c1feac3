#include "mx/mx_stats.h"

#include "mx/mxfp8_cpu.h"

// Adds the statistics of a block that is quantized with scale s.
static void add_block(QuantizationStats* stats, const floatX* block, int s, int32_t scale_mode) {
    // The block's own scale (align 1), for `inexact`.
    const int s_alone = scale_of(block, MX_BLOCK, 1, MX_BLOCK, scale_mode);
    for (int64_t i = 0; i < MX_BLOCK && s != MX_NAN; i++) {
        const float x = (float)block[i], value = value_of(x, s);
        stats_add(stats, x, x * mx_scale_inverse(s), 448, value);
        stats->inexact += value != value_of(x, s_alone);
    }
}

void mx_stats(QuantizationStats* stats, const floatX* x, const uint8_t* tiles, int64_t count, int64_t rows,
              int64_t columns, MxRecipe recipe, Ctx* ctx) {
    const int64_t chunk = chunk_of(recipe), tiles_r = mx_tiles(rows), tiles_c = mx_tiles(columns);
    for (int64_t r = 0; r < count * rows; r++)
        for (int64_t c = 0; c < columns; c += MX_BLOCK) {
            // The scale is that of the block's tile, or comes from the block's chunk.
            const int64_t tile = (r / rows * tiles_r + r % rows / MX_CHUNK) * tiles_c + c / MX_CHUNK;
            const int64_t c0 = c / chunk * chunk, n = min_i64(chunk, columns - c0);
            const floatX* row = x + r * columns;
            const int s = tiles ? tiles[tile] : scale_of(row + c0, columns, 1, n, recipe.scale);
            add_block(stats, row + c, s, recipe.scale);
        }
}
