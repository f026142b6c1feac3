#include "mx/formats.h"

#include "mx/fp4.h"
#include "mx/mx_stats.h"

static void round_values(const Format* f, floatX* out, const floatX* x, Ragged groups, int64_t columns, int by_column,
                         Draw draw, QuantizationStats* stats, Ctx* ctx) {
    if (stats)
        mx_stats(stats, x, NULL, 1, groups.capacity, columns, f->recipe, ctx);
    else if (by_column)
        mx_round_columns(out, x, groups, columns, f->recipe, ctx);
    else
        mx_round_rows(out, x, groups.capacity, columns, f->recipe, ctx);
}

static void round_weight(const Format* f, floatX* forward, floatX* back, const floatX* w, int64_t count, int64_t OC,
                         int64_t IC, QuantizationStats* stats, Ctx* ctx) {
    if (stats)
        mx_stats(stats, w, NULL, count, OC, IC, f->recipe, ctx);
    else
        mx_round_weight(forward, back, w, count, OC, IC, f->recipe.scale, ctx);
}

// --- Four bits ---

// Blocks along the rows. Forward and dgrad read the same values of a weight: rounded along with activations, it has
// square tiles, as blocks of dgrad run along OC; alone it has blocks along IC.
static Fp4Blocks fp4_blocks(const Format* f, int weight) {
    const Fp4Blocks blocks = {weight && f->round ? f->recipe.align : 1, f->recipe.align, 0, f->recipe.scale};
    return blocks;
}

// In wgrad both operands get the same transform, which their product does not show.
static void fp4_round_values(const Format* f, floatX* out, const floatX* x, Ragged groups, int64_t columns,
                             int by_column, Draw draw, QuantizationStats* stats, Ctx* ctx) {
    const Fp4Blocks down = {f->recipe.align, 1, 1, f->recipe.scale};
    const Fp4Work work = {out, NULL, x, groups, columns, by_column ? down : fp4_blocks(f, 0), draw, stats};
    fp4_round(work, ctx);
}

static void fp4_round_weight(const Format* f, floatX* forward, floatX* back, const floatX* w, int64_t count, int64_t OC,
                             int64_t IC, QuantizationStats* stats, Ctx* ctx) {
    const Fp4Work work = {forward, back, w, ragged_matrices(count, OC), IC, fp4_blocks(f, 1), {NULL, 0}, stats};
    fp4_round(work, ctx);
}

// --- The table ---

#define MXFP8(scale, align, packing)                                                                                   \
    { {scale, align}, 0, packing, round_values, round_weight }
#define FP4(scale, align, bf16_blocks, round)                                                                          \
    { {scale, align}, bf16_blocks, NOT_PACKED, round, fp4_round_weight }
// A format with both rules of rounding a scale.
#define ROW(FORMAT, ...)                                                                                               \
    { FORMAT(MX_RCEIL, __VA_ARGS__), FORMAT(MX_FLOOR, __VA_ARGS__) }
static const Format table[FORMATS - FORMAT_MXFP8][2] = {
    ROW(MXFP8, MX_CHUNK, PACKED_GEMMS),       // mxfp8
    ROW(FP4, 16, 0.15, fp4_round_values),     // nvfp4
    ROW(FP4, MX_BLOCK, 0, fp4_round_values),  // mxfp4
    ROW(MXFP8, 1, PACKED_ROWS),               // mxfp8-exact
    ROW(FP4, MX_BLOCK, 0, NULL),              // mxfp4-weights
};

const Format* format_of_id(int64_t id, int64_t scale_rule) {
    return id == FORMAT_BF16 ? NULL : &table[id - FORMAT_MXFP8][scale_rule];
}
