#include "mx/formats.h"

#include "mx/mx_stats.h"

static MxRecipe recipe_of(const Format* f) {
    const MxRecipe recipe = {f->scale_rule, f->align};
    return recipe;
}

static void round_rows(const Format* f, floatX* out, const floatX* x, int64_t rows, int64_t columns, Ctx* ctx) {
    mx_round_rows(out, x, rows, columns, recipe_of(f), ctx);
}

static void round_columns(const Format* f, floatX* out, const floatX* x, Ragged groups, int64_t columns, Ctx* ctx) {
    mx_round_columns(out, x, groups, columns, recipe_of(f), ctx);
}

static void round_weight(const Format* f, floatX* forward, floatX* back, const floatX* w, int64_t count, int64_t OC,
                         int64_t IC, Ctx* ctx) {
    mx_round_weight(forward, back, w, count, OC, IC, f->scale_rule, ctx);
}

static void measure(const Format* f, QuantizationStats* stats, const floatX* x, const uint8_t* scale, int64_t count,
                    int64_t rows, int64_t columns, Ctx* ctx) {
    mx_stats(stats, x, scale, count, rows, columns, recipe_of(f), ctx);
}

static void pack(const Format* f, Packed out, const floatX* x, int64_t rows, int64_t columns, Ctx* ctx) {
    mx_quantize(out, x, rows, columns, recipe_of(f), ctx);
}

#define MXFP8(name, scale, align, gemms)                                                                               \
    { name, scale, align, round_rows, round_columns, round_weight, measure, mx_stride, pack, mx_dequantize, gemms }
static const Format table[FORMATS][2] = {
    {MXFP8("mxfp8", MX_RCEIL, MX_CHUNK, &mxfp8_gemms), MXFP8("mxfp8", MX_FLOOR, MX_CHUNK, &mxfp8_gemms)},
    {MXFP8("mxfp8-exact", MX_RCEIL, 1, NULL), MXFP8("mxfp8-exact", MX_FLOOR, 1, NULL)},
};

const Format* format_of_id(FormatId id, MxScale scale) { return &table[id][scale]; }
