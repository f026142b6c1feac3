#include "mx/formats.h"

#include "mx/fp4.h"
#include "mx/mx_stats.h"

static MxRecipe recipe_of(const Format* f) {
    const MxRecipe recipe = {f->scale_rule, f->align};
    return recipe;
}

static void round_values(const Format* f, floatX* out, const floatX* x, Ragged groups, int64_t columns, int by_column,
                         Draw draw, Ctx* ctx) {
    if (by_column)
        mx_round_columns(out, x, groups, columns, recipe_of(f), ctx);
    else
        mx_round_rows(out, x, groups.capacity, columns, recipe_of(f), ctx);
}

static void round_weight(const Format* f, floatX* forward, floatX* back, const floatX* w, int64_t count, int64_t OC,
                         int64_t IC, Ctx* ctx) {
    mx_round_weight(forward, back, w, count, OC, IC, f->scale_rule, ctx);
}

static void measure(const Format* f, QuantizationStats* stats, const floatX* x, const Weight* w, int64_t rows,
                    int64_t columns, Ctx* ctx) {
    mx_stats(stats, x, w ? w->forward.packed.scale : NULL, w ? w->count : 1, rows, columns, recipe_of(f), ctx);
}

static void pack(const Format* f, Packed out, const floatX* x, int64_t rows, int64_t columns, Ctx* ctx) {
    mx_quantize(out, x, rows, columns, recipe_of(f), ctx);
}

// --- Four bits ---

// In wgrad both operands get the same transform, which their product does not show.
static void fp4_round_values(const Format* f, floatX* out, const floatX* x, Ragged groups, int64_t columns,
                             int by_column, Draw draw, Ctx* ctx) {
    const Fp4Blocks along = {f->scale_rule, 1, f->align, 0}, down = {f->scale_rule, f->align, 1, 1};
    const Fp4Work work = {out, NULL, x, groups, columns, by_column ? down : along, draw, NULL};
    fp4_round(work, ctx);
}

// Forward and dgrad read the same values. Rounded along with activations, a weight has square tiles, as blocks of dgrad
// run along OC; alone it has blocks along IC.
static Fp4Blocks fp4_of_weight(const Format* f) {
    const Fp4Blocks blocks = {f->scale_rule, f->round ? f->align : 1, f->align, 0};
    return blocks;
}

static void fp4_round_weight(const Format* f, floatX* forward, floatX* back, const floatX* w, int64_t count, int64_t OC,
                             int64_t IC, Ctx* ctx) {
    const Fp4Work work = {forward, back, w, ragged_matrices(count, OC), IC, fp4_of_weight(f), {NULL, 0}, NULL};
    fp4_round(work, ctx);
}

static void fp4_measure(const Format* f, QuantizationStats* stats, const floatX* x, const Weight* w, int64_t rows,
                        int64_t columns, Ctx* ctx) {
    const Fp4Blocks along = {f->scale_rule, 1, f->align, 0};
    const Ragged groups = ragged_matrices(w ? w->count : 1, rows);
    const Fp4Work work = {NULL, NULL, x, groups, columns, w ? fp4_of_weight(f) : along, {NULL, 0}, stats};
    fp4_round(work, ctx);
}

// --- The table ---

#define MXFP8(name, scale, align, gemms)                                                                               \
    { name, scale, align, 0, round_values, round_weight, measure, mx_stride, pack, mx_dequantize, gemms }
#define FP4(name, scale, align, bf16_blocks, round)                                                                    \
    { name, scale, align, bf16_blocks, round, fp4_round_weight, fp4_measure, NULL, NULL, NULL, NULL }
#define NVFP4(name, scale) FP4(name, scale, 16, 0.15, fp4_round_values)
// A format with both rules of rounding a scale.
#define ROW(FORMAT, name, ...)                                                                                         \
    { FORMAT(name, MX_RCEIL, __VA_ARGS__), FORMAT(name, MX_FLOOR, __VA_ARGS__) }
static const Format table[FORMATS - FORMAT_MXFP8][2] = {
    ROW(MXFP8, "mxfp8", MX_CHUNK, &mxfp8_gemms),
    {NVFP4("nvfp4", NVFP4_SIX), NVFP4("nvfp4", NVFP4_SIX)},
    {NVFP4("nvfp4-46", NVFP4_FOUR_SIX), NVFP4("nvfp4-46", NVFP4_FOUR_SIX)},
    ROW(FP4, "mxfp4", MX_BLOCK, 0, fp4_round_values),
    ROW(MXFP8, "mxfp8-exact", 1, NULL),
    ROW(FP4, "mxfp4-weights", MX_BLOCK, 0, NULL),
};

const Format* format_of_id(int64_t id, int64_t scale_rule) {
    return id == FORMAT_BF16 ? NULL : &table[id - FORMAT_MXFP8][scale_rule];
}
