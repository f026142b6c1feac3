// Dense GEMMs in MXFP8 (linear/linear.h) against float64 with its own quantization (tests/mx.h): first single GEMMs,
// then those of whole models, on the model's own buffers. Operands are the same numbers on both sides. So quantized
// values agree to the bit, and only sums differ:
//   double  1e-16 for each term of a sum: below 1e-15. Allowed: 1e-14
//   float   sums of up to 384 terms in float32: below 1e-6 of a row's norm. Allowed: 2e-6
//   CUDA    y is rounded to bf16, each element by 2^-8 at most (1.7e-3 of a norm is typical). Fast sums are off by
//           1.3e-4 of the norm. Allowed: 4e-4, and 4e-3 of a row, where sums may cancel
//           (tests/mx/test_cuda_grouped_gemm_mx.cu)
// On CUDA a gradient is float32. Exact GEMMs: 700 terms are some 90 additions of the tensor cores. Each cuts off less
// than 2^-23 of its sum, which makes 1.1e-5 if all sums were as large as the last. Allowed: 1e-5 of the norm. Fast
// GEMMs: 4e-4 and 4e-3 as above.
// A skipped quantization is 2.6e-2 of a GEMM's norm, a wrong scale more.
#include "linear/quantized.h"
#include "model/block.h"
#include "tests/model.h"
#include "tests/mx.h"
#include "tests/weight.h"

enum { CUDA = BACKEND == BACKEND_CUDA };
#ifdef F64
static const double SUMS = 1e-14;
#else
static const double SUMS = CUDA ? 0x1p-8 + 1e-5 : 2e-6;
#endif

typedef struct Way {
    int fast;
    MxScale mode;
} Way;

static const Format* format_of(Way way) { return format_of_id(way.fast ? FORMAT_MXFP8 : FORMAT_MXFP8_EXACT, way.mode); }

static double* numbers(int64_t n) { return (double*)host_alloc((size_t)n * sizeof(double)); }

// --- Expected results, in fresh memory; x and w are not changed ---

static double* copy_of(const double* x, int64_t n) {
    return (double*)memcpy(numbers(n), x, (size_t)n * sizeof(double));
}

// y (N, OC) = x (N, IC) w^T, w (OC, IC)
static double* times_transposed(const double* x, const double* w, int64_t N, int64_t IC, int64_t OC) {
    double* y = numbers(N * OC);
    for (int64_t n = 0; n < N; n++)
        for (int64_t o = 0; o < OC; o++)
            for (int64_t i = 0; i < IC; i++) y[n * OC + o] += x[n * IC + i] * w[o * IC + i];
    return y;
}

// dx (N, IC) = dy (N, OC) w
static double* times(const double* dy, const double* w, int64_t N, int64_t IC, int64_t OC) {
    double* dx = numbers(N * IC);
    for (int64_t n = 0; n < N; n++)
        for (int64_t o = 0; o < OC; o++)
            for (int64_t i = 0; i < IC; i++) dx[n * IC + i] += dy[n * OC + o] * w[o * IC + i];
    return dx;
}

static double* expected_forward(const double* x, const double* w, int64_t N, int64_t IC, int64_t OC, Way way) {
    const int64_t along = way.fast ? 128 : 32;
    double *xc = copy_of(x, N * IC), *wc = copy_of(w, OC * IC);
    fake_quantize(xc, N, IC, 1, along, way.mode);
    fake_quantize(wc, OC, IC, way.fast ? 128 : 1, along, way.mode);
    double* y = times_transposed(xc, wc, N, IC, OC);
    free(xc), free(wc);
    return y;
}

static double* expected_dgrad(const double* dy, const double* w, int64_t N, int64_t IC, int64_t OC, Way way) {
    const int64_t along = way.fast ? 128 : 32;
    double *dyc = copy_of(dy, N * OC), *wc = copy_of(w, OC * IC);
    fake_quantize(dyc, N, OC, 1, along, way.mode);
    fake_quantize(wc, OC, IC, along, way.fast ? 128 : 1, way.mode);
    double* dx = times(dyc, wc, N, IC, OC);
    free(dyc), free(wc);
    return dx;
}

// dw (OC, IC) = dy^T x, both quantized along tokens (way NULL: not quantized). Fast: chunks of 128 of dy, runs of 512
// of x.
static double* expected_wgrad(const double* dy, const double* x, int64_t N, int64_t IC, int64_t OC, const Way* way) {
    double *dyc = copy_of(dy, N * OC), *xc = copy_of(x, N * IC), *dw = numbers(OC * IC);
    if (way) fake_quantize(dyc, N, OC, way->fast ? 128 : 32, 1, way->mode);
    if (way) fake_quantize(xc, N, IC, way->fast ? 512 : 32, 1, way->mode);
    for (int64_t n = 0; n < N; n++)
        for (int64_t o = 0; o < OC; o++)
            for (int64_t i = 0; i < IC; i++) dw[o * IC + i] += dyc[n * OC + o] * xc[n * IC + i];
    free(dyc), free(xc);
    return dw;
}

// Compares the first `columns` of every `period` columns. Frees ref.
static void compare_part(const double* out, double* ref, int64_t N, int64_t width, int64_t period, int64_t columns,
                         int fast, const char* name) {
    double worst = 0, all_diff = 0, all_norm = 0;
    for (int64_t n = 0; n < N; n++) {
        double diff = 0, norm = 0;
        for (int64_t c = 0; c < width; c++) {
            if (c % period >= columns) continue;
            double r = ref[n * width + c], d = out[n * width + c] - r;
            diff += d * d, norm += r * r;
        }
        double e = diff > 0 || isnan(diff) ? sqrt(diff / norm) : 0;  // rows may be 0: d q of a first token
        if (!(e <= worst)) worst = isfinite(e) ? e : INFINITY;
        all_diff += diff, all_norm += norm;
    }
    double all = sqrt(all_diff / all_norm), more = CUDA && fast;
    if (getenv("TEST_ERRORS")) printf("    %s: rows %.2g, all %.2g\n", name, worst, all);
    CHECK(worst <= SUMS + more * 4e-3, "%s: a row is off by %.3g", name, worst);
    CHECK(all <= SUMS + more * 4e-4, "%s: off by %.3g", name, all);
    free(ref);
}

static void compare(const double* out, double* ref, int64_t N, int64_t width, int fast, const char* name) {
    compare_part(out, ref, N, width, width, width, fast, name);
}

// As compare, for a gradient, which is never rounded to bf16. Frees ref.
static void compare_gradient(const double* got, double* ref, int64_t OC, int64_t IC, int fast, const char* name) {
    const double sums = CUDA ? 1e-5 : SUMS;
    double worst = 0, all_diff = 0, all_norm = 0;
    for (int64_t o = 0; o < OC; o++) {
        double diff = 0, norm = 0;
        for (int64_t i = o * IC; i < (o + 1) * IC; i++)
            diff += (got[i] - ref[i]) * (got[i] - ref[i]), norm += ref[i] * ref[i];
        const double e = sqrt(diff / norm);
        if (!(e <= worst)) worst = isfinite(e) ? e : INFINITY;
        all_diff += diff, all_norm += norm;
    }
    const double all = sqrt(all_diff / all_norm), more = CUDA && fast;
    if (getenv("TEST_ERRORS")) printf("    %s: rows %.2g, all %.2g\n", name, worst, all);
    CHECK(worst <= sums + more * 4e-3, "%s: a row of the gradient is off by %.3g", name, worst);
    CHECK(all <= sums + more * 4e-4, "%s: the gradient is off by %.3g", name, all);
    free(ref);
}

// --- Single GEMMs ---

static Ctx* ctx;

// bf16 numbers in tiles of `tile` x 32. The tiles differ by a few binades, so that every chunk counts in bf16 sums too.
static double* random_input(int64_t rows, int64_t columns, int64_t tile, uint32_t stream) {
    double* x = numbers(rows * columns);
    real* normal = random_tensor(rows * columns, stream);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            double step = floor(random_uniform(1234, stream + 100, (uint64_t)(r / tile * 64 + c / 32)) * 4);  // 0..3
            x[r * columns + c] = ldexp(bf16((double)normal[r * columns + c]), -(int)step * (CUDA ? 1 : 4));
        }
    free(normal);
    return x;
}

static floatX* send(const double* x, int64_t n) {
    real* host = (real*)host_alloc((size_t)n * sizeof(real));
    for (int64_t i = 0; i < n; i++) host[i] = (real)x[i];
    floatX* to = values_on_device(host, n, ctx);
    free(host);
    return to;
}

static double* fetch(const floatX* x, int64_t n, Ctx* of) {
    real* host = (real*)host_alloc((size_t)n * sizeof(real));
    real* wide = (real*)device_alloc((size_t)n * sizeof(real), "x");
    double* out = numbers(n);
    device_to_real(wide, x, n, of);
    device_download(host, wide, (size_t)n * sizeof(real), of);
    for (int64_t i = 0; i < n; i++) out[i] = (double)host[i];
    device_free(wide);
    free(host);
    return out;
}

enum { BEHIND = 64 };  // elements behind an output that must stay as they are

// One direction. It writes the rows of out and nothing behind them.
static void run(int dgrad, const double* x, double* ref, const Weight* w, int64_t N, int64_t width_x, int64_t width,
                const char* name) {
    floatX *in = send(x, N * width_x), *out = (floatX*)device_alloc((size_t)(N * width + BEHIND) * sizeof(floatX), "y");
    fill_with_nan(out, (size_t)(N * width + BEHIND) * sizeof(floatX), ctx);
    LinearGradient product = {w, in, NULL, 0};
    if (dgrad)
        linear_dgrad(out, &product, N, 0, ctx);
    else
        linear_forward(out, in, w, N, ctx);
    double* got = fetch(out, N * width + BEHIND, ctx);
    compare(got, ref, N, width, format_packed(w->format) != NULL, name);
    for (int64_t i = N * width; i < N * width + BEHIND; i++) CHECK(isnan(got[i]), "%s: wrote behind its output", name);
    free(got);
    device_free(in), device_free(out);
}

// Statistics of a tensor quantized in tiles, against sums over its elements and their dequantized values (float32:
// 1e-6).
static void compare_stats(const QuantizationStats* got, const double* x, int64_t rows, int64_t columns,
                          int64_t tile_rows, Way way, const char* name) {
    QuantizationStats want = {0, 0, 0, 0, 0, 0};
    double* c = copy_of(x, rows * columns);
    fake_quantize(c, rows, columns, tile_rows, way.fast ? 128 : 32, way.mode);
    for (int64_t i = 0; i < rows * columns; i++) {
        want.elements += x[i] != 0, want.flushed += x[i] != 0 && c[i] == 0;
        want.signal += x[i] * x[i], want.noise += (x[i] - c[i]) * (x[i] - c[i]);
    }
    CHECK(got->elements == want.elements && got->flushed == want.flushed, "%s: %g elements, %g flushed", name,
          got->elements, got->flushed);
    CHECK(fabs(got->signal / want.signal - 1) < 1e-6 && fabs(got->noise / want.noise - 1) < 1e-6, "%s: %g, %g", name,
          got->signal / want.signal, got->noise / want.noise);
    free(c);
}

// Plans memory for `room` tokens and multiplies N of them.
static void check_product(int64_t room, int64_t N, int64_t IC, int64_t OC, Way way) {
    double *x = random_input(N, IC, 1, 1), *dy = random_input(N, OC, 1, 2), *w = random_input(OC, IC, 32, 3);
    floatX* wx = send(w, OC * IC);
    GemmWorkspace gemms;
    memset(&gemms, 0, sizeof(gemms));
    Weight weight = plain_weight(wx, (real*)device_alloc((size_t)(OC * IC) * sizeof(real), "dW"), 1, OC, IC);
    weight.workspace = &gemms;
    weight.format = format_of(way);
    Arena arena;
    arena_init(&arena, "a test", BACKEND);
    weight_plan(&arena, &weight, 1);
    linear_plan(&arena, &gemms, room, 1);
    arena_allocate(&arena);
    fill_with_nan(arena.memory, arena_bytes(&arena), ctx);
    weight_quantize(&weight, ctx);
    linear_batch(&gemms, 0, N, ctx);
    QuantizationStats stats[WEIGHT_STATS];
    gemms.stats = (QuantizationStats*)device_alloc(sizeof(stats), "statistics");
    device_zero(gemms.stats, sizeof(stats), ctx);
    // Forward and dgrad.
    char name[120];
    for (int dgrad = 0; dgrad < 2; dgrad++) {
        snprintf(name, sizeof(name), "%s %s, %s, N %d, IC %d, OC %d", way.fast ? "fast" : "exact",
                 way.mode == MX_RCEIL ? "rceil" : "floor", dgrad ? "dgrad" : "forward", (int)N, (int)IC, (int)OC);
        if (dgrad)
            run(1, dy, expected_dgrad(dy, w, N, IC, OC, way), &weight, N, OC, IC, name);
        else
            run(0, x, expected_forward(x, w, N, IC, OC, way), &weight, N, IC, OC, name);
    }
    // Statistics.
    device_download(stats, gemms.stats, sizeof(stats), ctx);
    device_free(weight.grad);
    compare_stats(&stats[STATS_X], x, N, IC, 1, way, "statistics of x");
    compare_stats(&stats[STATS_DY], dy, N, OC, 1, way, "statistics of dy");
    compare_stats(&stats[STATS_W], w, OC, IC, way.fast ? 128 : 1, way, "statistics of W");
    device_free(gemms.stats);
    free(x), free(dy), free(w);
    device_free(wx);
    arena_free(&arena);
}

// The gradients of matrices of several sizes in one call; the third matrix is not quantized. The first call writes
// them, the second adds to them. Elements behind each gradient stay. N tokens, in memory planned for 700.
static void check_gradients(int64_t N, Way way) {
    static const int64_t sizes[5][2] = {{96, 32}, {160, 288}, {48, 80}, {384, 128}, {64, 416}};  // IC, OC
    // The matrices, and their memory.
    GemmWorkspace gemms;
    memset(&gemms, 0, sizeof(gemms));
    Arena arena;
    arena_init(&arena, "a test", BACKEND);
    Weight weights[5];
    LinearGradient list[5];
    double *x[5], *dy[5];
    for (int i = 0; i < 5; i++) {
        const int64_t IC = sizes[i][0], OC = sizes[i][1], n = OC * IC + BEHIND;
        x[i] = random_input(N, IC, 1, 10 + (uint32_t)i), dy[i] = random_input(N, OC, 1, 20 + (uint32_t)i);
        weights[i] = plain_weight(NULL, (real*)device_alloc((size_t)n * sizeof(real), "dW"), 1, OC, IC);
        fill_with_nan(weights[i].grad, (size_t)n * sizeof(real), ctx);
        weights[i].accumulate = 0, weights[i].workspace = &gemms;
        if (i != 2) {
            weights[i].format = weights[i].wgrad = format_of(way);
            gemms.of_dy += OC, gemms.of_x += IC;
        }
        weight_plan(&arena, &weights[i], 1);
        const LinearGradient gradient = {&weights[i], send(dy[i], N * OC), send(x[i], N * IC), 0};
        list[i] = gradient;
    }
    linear_plan(&arena, &gemms, 700, 2);
    arena_allocate(&arena);
    fill_with_nan(arena.memory, arena_bytes(&arena), ctx);
    gemms.batch = 1;
    linear_batch(&gemms, 1, N, ctx);
    // Both calls, against float64.
    for (int times = 1; times <= 2; times++) {
        linear_wgrads(list, 5, N, ctx);
        for (int i = 0; i < 5; i++) {
            const int64_t IC = sizes[i][0], OC = sizes[i][1], n = OC * IC;
            double *got = numbers(n), *ref = expected_wgrad(dy[i], x[i], N, IC, OC, i == 2 ? NULL : &way);
            real* host = (real*)host_alloc((size_t)(n + BEHIND) * sizeof(real));
            device_download(host, weights[i].grad, (size_t)(n + BEHIND) * sizeof(real), ctx);
            for (int64_t k = 0; k < n; k++) got[k] = (double)host[k] / times;
            for (int64_t k = n; k < n + BEHIND; k++) CHECK(isnan((double)host[k]), "wrote behind a gradient");
            char name[120];
            snprintf(name, sizeof(name), "%s %s, N %d, IC %d, OC %d, %s", way.fast ? "fast" : "exact",
                     way.mode == MX_RCEIL ? "rceil" : "floor", (int)N, (int)IC, (int)OC,
                     times == 1 ? "written" : "added to");
            compare_gradient(got, ref, OC, IC, i != 2 && way.fast, name);
            free(got), free(host);
            weights[i].accumulate = 1;
        }
    }
    for (int i = 0; i < 5; i++) {
        device_free((void*)list[i].dy), device_free((void*)list[i].x), device_free(weights[i].grad);
        free(x[i]), free(dy[i]);
    }
    arena_free(&arena);
}

static void test_gradients(void) {
    static const int64_t tokens[] = {1, 31, 127, 128, 129, 300, 513, 700};
    for (int bits = 0; bits < 4; bits++)
        for (int n = 0; n < 8; n++) {
            Way way = {bits & 1, bits & 2 ? MX_FLOOR : MX_RCEIL};
            if (!way.fast || has_fast(ctx)) check_gradients(tokens[n], way);
        }
}

static void test_linear(void) {
    static const int64_t tokens[] = {1, 127, 128, 129, 300}, widths[][2] = {{96, 32}, {32, 96}, {128, 160}, {288, 384}};
    for (int bits = 0; bits < 4; bits++)
        for (int n = 0; n < 5; n++)
            for (int i = 0; i < 4; i++) {
                Way way = {bits & 1, bits & 2 ? MX_FLOOR : MX_RCEIL};
                if (way.fast && !has_fast(ctx)) continue;
                check_product(n % 2 ? tokens[n] : 300, tokens[n], widths[i][0], widths[i][1], way);
            }
}

// --- GEMMs of whole models ---

// 133 tokens. Experts are selected in turns, so that noise cannot change the selection.
#define BASE                                                                                                           \
    "--layers 3 --dim 96 --heads 2 --kv-lora 32 --nope-dim 32 --rope-dim 16 --v-dim 32 --dense-ffn 160 --experts 6 "   \
    "--top-k 2 --expert-ffn 32 --shared-experts 2 --vocab 50 --seq-len 19 --batch 7 --force-balance --warmup 0 "
static const char* const models[] = {"", "--q-lora 64 ", "--dense-layers 3 "};
static const char* const precisions[] = {"--linear-precision mxfp8-exact --wgrad-precision mxfp8 ",
                                         "--linear-precision mxfp8 --wgrad-precision mxfp8 --mx-scale floor "};
static const Way ways[] = {{0, MX_RCEIL}, {1, MX_FLOOR}};

static Model* fresh(const char* model, const char* precision) {
    char* line = host_format(BASE "%s%s", model, precision);
    Model* m = model_of(settings_of(line), NULL);
    free(line);
    model_init(m, 3);
    return m;
}

// Forward and, with `backward`, gradients of a step. Returns the mean loss.
static double one_step(Model* m, int backward) {
    int64_t n = m->run.batch * m->run.seq_len;
    int32_t* ids = (int32_t*)host_alloc((size_t)(2 * n) * 4);
    for (int64_t i = 0; i < 2 * n; i++) ids[i] = (int32_t)(random_uniform(99, 7, (uint64_t)i) * (double)m->config.V);
    model_step_begin(m, 1);
    model_batch(m, ids, ids + n, m->run.batch, m->run.seq_len);
    if (backward) {
        model_micro_step(m, 1);
    } else {
        model_forward(m, 0);
        model_loss(m, m->step.state, 0);
    }
    free(ids);
    return state_of(m).loss_sum / (double)n;
}

static double* matrix_of(Model* m, int64_t layer, int64_t at, int64_t n) {
    return fetch(m->units[layer + 1].buffer[DENSE_PARAMS].weight + at, n, m->ctx);
}

// Compares a GEMM of the model: y (N, OC) = x (N, IC) w^T, or y = x w with `dgrad`. w is at offset `at` of the buffer.
// Only the first `columns` of every `period` columns of y are compared.
static void check_made(Model* m, int64_t layer, const char* what, int dgrad, const floatX* y, const floatX* x,
                       int64_t at, int64_t IC, int64_t OC, int64_t period, int64_t columns, Way way) {
    const int64_t N = m->shapes.N, in = dgrad ? OC : IC, out = dgrad ? IC : OC;
    double *got = fetch(y, N * out, m->ctx), *from = fetch(x, N * in, m->ctx), *w = matrix_of(m, layer, at, OC * IC);
    double* ref = (dgrad ? expected_dgrad : expected_forward)(from, w, N, IC, OC, way);
    char name[120];
    snprintf(name, sizeof(name), "layer %d, %s %s", (int)layer, what, dgrad ? "backward" : "forward");
    compare_part(got, ref, N, out, period, columns, way.fast, name);
    free(got), free(from), free(w);
}

// The gradient of a weight of the first layer. Its operands are still in their buffers after a step.
static void check_gradient(Model* m, const char* what, const floatX* dy, const floatX* x, ParamId id, Way way) {
    const Unit* u = &m->units[1];
    const int64_t N = m->shapes.N, IC = u->w[id].IC, OC = u->w[id].OC, n = OC * IC;
    double *from_dy = fetch(dy, N * OC, m->ctx), *from_x = fetch(x, N * IC, m->ctx), *got = numbers(n);
    real* host = host_copy(m, u->buffer[DENSE_PARAMS].grad + u->at[id], n);
    for (int64_t i = 0; i < n; i++) got[i] = (double)host[i];
    compare_gradient(got, expected_wgrad(from_dy, from_x, N, IC, OC, &way), OC, IC, way.fast, what);
    free(from_dy), free(from_x), free(got), free(host);
}

// Every GEMM whose operands and result are still in their buffers after a step: forward of all layers, backward of the
// first layer, which comes last. For q only the part without RoPE is compared.
static void test_linear_of_models(void) {
    for (int i = 0; i < 3; i++)
        for (int p = 0; p < 1 + has_fast(ctx); p++) {
            Model* m = fresh(models[i], precisions[p]);
            const ModelConfig* c = &m->config;
            const Workspace* t = &m->work;
            const Way way = ways[p];
            const int64_t N = m->run.batch * m->run.seq_len, qk = c->nope + c->rope, C = c->C;
            const int64_t kva_rows = c->kv_lora + c->rope, kv_rows = c->H * (c->nope + c->v);
            one_step(m, 1);
            for (int64_t l = 0; l < c->L; l++) {
                const BlockSaved* s = &m->blocks[l];
                const Unit* u = &m->units[l + 1];
                if (c->q_lora) {
                    check_made(m, l, "Wqa", 0, s->cq, s->norm1, u->at[WQA], C, c->q_lora, c->q_lora, c->q_lora, way);
                    check_made(m, l, "Wqb", 0, s->q, s->cq_norm, u->at[WQB], c->q_lora, c->H * qk, qk, c->nope, way);
                } else {
                    check_made(m, l, "Wq", 0, s->q, s->norm1, u->at[WQ], C, c->H * qk, qk, c->nope, way);
                }
                check_made(m, l, "Wkvb", 0, s->kv, s->ckv, u->at[WKVB], c->kv_lora, kv_rows, kv_rows, kv_rows, way);
                const int64_t F2 = 2 * (u->kind == UNIT_MOE ? c->shared * c->F : c->dense_ffn);
                const floatX* h = u->kind == UNIT_MOE ? s->moe.shared_h : s->h;
                check_made(m, l, "MLP's W13", 0, h, s->norm2, u->at[MLP13], C, F2, F2, F2, way);

                // Wkva is not quantized.
                double *x = fetch(s->norm1, N * C, m->ctx), *w = matrix_of(m, l, u->at[WKVA], kva_rows * C);
                double* kva = fetch(s->kva, N * kva_rows, m->ctx);
                compare_part(kva, times_transposed(x, w, N, C, kva_rows), N, kva_rows, kva_rows, c->kv_lora, 0, "Wkva");
                free(x), free(w), free(kva);
            }
            // Backward of the first layer.
            const int64_t* at = m->units[1].at;
            check_made(m, 0, "Wkvb", 1, t->dckv, t->dkv, at[WKVB], c->kv_lora, kv_rows, c->kv_lora, c->kv_lora, way);
            int64_t rows = c->q_lora ? c->q_lora : c->H * qk;
            if (c->q_lora)
                check_made(m, 0, "Wqb", 1, t->dcq_norm, t->dq, at[WQB], c->q_lora, c->H * qk, c->q_lora, c->q_lora,
                           way);
            check_gradient(m, "Wkvb's gradient", t->dkv, m->blocks[0].ckv, WKVB, way);
            check_gradient(m, c->q_lora ? "Wqb's gradient" : "Wq's gradient", t->dq,
                           c->q_lora ? m->blocks[0].cq_norm : m->blocks[0].norm1, c->q_lora ? WQB : WQ, way);
            if (c->q_lora) check_gradient(m, "Wqa's gradient", t->dcq, m->blocks[0].norm1, WQA, way);

            // d norm1: dgrad of Wq or Wqa, rounded to bf16 on CUDA, then dgrad of Wkva added to it.
            double* dq = fetch(c->q_lora ? t->dcq : t->dq, N * rows, m->ctx);
            double* dkva = fetch(t->dkva, N * kva_rows, m->ctx);
            double* wq = matrix_of(m, 0, c->q_lora ? at[WQA] : at[WQ], rows * C);
            double *wkva = matrix_of(m, 0, at[WKVA], kva_rows * C), *got = fetch(t->dnorm, N * C, m->ctx);
            double *ref = expected_dgrad(dq, wq, N, C, rows, way), *more = times(dkva, wkva, N, C, kva_rows);
            for (int64_t j = 0; j < N * C; j++) ref[j] = (CUDA ? bf16(ref[j]) : ref[j]) + more[j];
            compare(got, ref, N, C, way.fast, "d norm1");
            free(dq), free(dkva), free(wq), free(wkva), free(got), free(more);
            model_destroy(m);
        }
}

// All gradients of the model, one after the other.
static real* gradients(Model* m, int64_t* n) {
    *n = 0;
    for (int u = 0; u < params_units(&m->config); u++)
        *n += m->units[u].buffer[DENSE_PARAMS].n + m->units[u].buffer[EXPERT_PARAMS].n;
    real* all = (real*)host_alloc((size_t)*n * sizeof(real));
    int64_t at = 0;
    for (int u = 0; u < params_units(&m->config); u++) {
        const ParamBuffer* p[2] = {&m->units[u].buffer[0], &m->units[u].buffer[1]};
        for (int b = 0; b < 2; b++) {
            real* part = host_gradient(m, p[b], 0, p[b]->n);
            memcpy(all + at, part, (size_t)p[b]->n * sizeof(real));
            at += p[b]->n;
            free(part);
        }
    }
    return all;
}

// GEMMs read only the quantized copies of a weight, which stay until the weights change. With NaN in place of the
// weights a step gives the same bits.
static void test_casts_are_read(void) {
    for (int i = 0; i < 3; i++)
        for (int p = 0; p < 1 + has_fast(ctx); p++) {
            Model* m = fresh(models[i], precisions[p]);
            double loss = one_step(m, 1);
            int64_t n;
            real* want = gradients(m, &n);
            for (int64_t l = 0; l < m->config.L; l++) {
                const Unit* u = unit_begin(m, (int)l + 1, -1);
                for (int k = 0; k < PARAMS; k++)
                    if (u->w[k].format)
                        fill_with_nan((void*)u->w[k].w, (size_t)(u->w[k].OC * u->w[k].IC) * sizeof(floatX), m->ctx);
                unit_end(m, (int)l + 1);
            }
            CHECK(one_step(m, 1) == loss, "%s%s: another loss without the weights", models[i], precisions[p]);
            real* got = gradients(m, &n);
            CHECK(!memcmp(got, want, (size_t)n * sizeof(real)), "%s%s: other gradients without the weights", models[i],
                  precisions[p]);
            free(want), free(got);
            model_destroy(m);
        }
}

// Whether the quantized copies of all blocks count as those of their weights now.
static void blocks_quantized(Model* m, int now) {
    for (int64_t l = 0; l < m->config.L; l++)
        for (int b = 0; b < BUFFERS; b++) m->units[l + 1].version[b] = now ? weights_version(m->sharding, b) : 0;
}

// Quantized weights follow an update: the loss after it is that of weights quantized just now, not that of the old
// copies.
static void test_casts_follow_the_weights(void) {
    for (int p = 0; p < 1 + has_fast(ctx); p++) {
        Model* m = fresh("--lr 0.02 ", precisions[p]);
        one_step(m, 1);
        model_update(m, 0);
        double followed = one_step(m, 0);
        blocks_quantized(m, 0);
        double cast_now = one_step(m, 0);
        one_step(m, 1);
        model_update(m, 0);
        blocks_quantized(m, 1);
        double old = one_step(m, 0);
        blocks_quantized(m, 0);
        CHECK(followed == cast_now, "after an update the loss is %.9g, cast again %.9g", followed, cast_now);
        CHECK(one_step(m, 0) != old, "old casts give the same loss, %.9g", old);
        model_destroy(m);
    }
}

// Quantization adds q = 6.9e-4 of the power, so a GEMM gets 2 q (tests/mx/test_mx_block.c). An MLP adds 6.1 q to its
// output and passes on the noise of its input. Attention's values pass Wkvb and Wo, 4 q. Its scores, which are small
// here, add less. A residual stream has no more noise than its noisiest part. Each part has the noise of its input and
// its own: below 10 q for each block, forward and, on the same grounds, backward.
//
// A weight's gradient has the noise of x and of dy: below 2 x 3 x 10 q for 3 blocks, 13.8 dB. The GEMM of another
// weight would leave 0 dB.
//
// The loss: an error of 4.1e-2 of the power is 0.2 of the logits. Their spread is 0.2 at the start, so this is 0.04
// along the gradient of a token's loss. That gradient is shorter than 1.5: 0.06 for a token. The mean over 133 tokens
// is off by 5e-3 if the tokens' errors are random. Allowed: three times that.
static void test_noise(void) {
    for (int i = 0; i < 3; i++) {
        Model* plain = fresh(models[i], "");
        double loss = one_step(plain, 1);
        for (int p = 0; p < 1 + has_fast(ctx); p++) {
            Model* m = fresh(models[i], precisions[p]);
            double other = one_step(m, 1);
            CHECK(other != loss && fabs(other - loss) < 1.5e-2, "%s%s: loss %.9g, in bf16 %.9g", models[i],
                  precisions[p], other, loss);
            if (getenv("TEST_ERRORS")) printf("    loss %.9g, in bf16 %.9g\n", other, loss);
            for (int u = 0; u < params_units(&m->config); u++) {
                int count;
                NamedTensor* tensors = params_tensors(&m->config, &m->layout, u, &count);
                for (int k = 0; k < count; k++) {
                    int64_t at = tensors[k].offset, n = tensors[k].count;
                    real* got = host_gradient(m, buffer_of(m, u, &tensors[k]), at, n);
                    real* want = host_gradient(plain, buffer_of(plain, u, &tensors[k]), at, n);
                    double sqnr = -20 * log10(relative_error(got, want, n));
                    if (getenv("TEST_ERRORS")) printf("    %s: %.1f dB\n", tensors[k].name, sqnr);
                    CHECK(sqnr > 13.8 && sqnr < 60, "%s%s: the gradient of %s has %.1f dB", models[i], precisions[p],
                          tensors[k].name, sqnr);
                    free(got), free(want);
                }
                free(tensors);
            }
            model_destroy(m);
        }
        model_destroy(plain);
    }
}

int main(void) {
    if (device_available()) ctx = ctx_create((size_t)64 << 20);
    RUN(test_linear);
    RUN(test_gradients);
    RUN(test_linear_of_models);
    RUN(test_casts_are_read);
    RUN(test_casts_follow_the_weights);
    RUN(test_noise);
    if (ctx) ctx_destroy(ctx);
    return test_summary();
}
