// Grouped GEMMs on the GPU while communication holds SMs. Blocks start late if their SMs are held. They must leave
// their share to the others, and no bit may change. The test measures time, so nothing else may run.
//
// With 16 of 132 SMs held forward should take 1.14 times as long, or 1.33 if each held SM costs a cluster (8 rounds of
// work items, not 6). With a fixed share for every block it takes nearly twice as long (1.7 seen), because late blocks
// begin when the others end. Allowed: 1.5. (A block of the portable kernels owns an SM too, and gets its tiles from the
// tile scheduler.)
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"
#include "tests/hold.cuh"
#include "tests/ragged.cuh"

enum { IC = 1024, OC = 2048 };
static const Rows ROWS = {5000, 0, 1000, 5500, 1, 500};

// `timed` writes y and `others` write more; `got` returns the bits of all outputs.
template <typename Timed, typename Others, typename Got>
static void check_late(X& y, Timed timed, Others others, Got got) {
    decltype(got()) free;
    float free_ms = 0;
    for (int sms : {0, 16, 112}) {
        // The time of `timed` and the bits of all outputs while some SMs are held.
        y.poison();
        float ms;
        {
            HeldSms held(sms);
            ms = least_ms(timed, ctx->stream);
            others();
            ctx_sync(ctx);
        }

        // Compared with no SM held.
        auto now = got();
        if (getenv("TEST_ERRORS")) printf("    %d SMs held: %.3f ms\n", sms, ms);
        if (sms == 0) free = now, free_ms = ms;
        for (size_t i = 0; i < now.size(); i++)
            CHECK(!memcmp(free[i].data(), now[i].data(), now[i].size() * sizeof(double)),
                  "product %zu differs where %d SMs are held", i, sms);
        CHECK(ms <= 1.5f * free_ms || sms > 16, "%g ms where %d SMs are held, %g without", ms, sms, free_ms);
    }
}

static void late_in_bf16(void) {
    Layout l(ROWS);
    RowBuffer x(l, IC, 1), dy(l, OC, 2);
    X w(l.El() * OC * IC, 3), y(l.held * OC), dx(l.held * IC);
    R dw(l.El() * OC * IC);
    check_late(
        y, [&] { grouped_gemm_forward(y.dev, x.dev, w.dev, l.device(), IC, OC, ctx); },
        [&] {
            grouped_gemm_dgrad(dx.dev, dy.dev, w.dev, l.device(), IC, OC, ctx);
            grouped_gemm_wgrad(dw.dev, NULL, dy.dev, x.dev, ALL_BY_ROW, l.device(), IC, OC, 0, ctx);
        },
        [&] {
            std::vector<std::vector<double>> bits = {y.got(), dx.got(), dw.got()};
            dx.poison_dev(), dw.poison_dev();
            return bits;
        });
}

static void late_on_hopper(void) { late_in_bf16(); }

// With SwiGLU in the epilogue and rows gathered by token. Both kernels of dgrad, for a narrow and for a wide C.
static void late_fused(void) {
    const int64_t F = 1024, N = 3000;
    for (const int64_t C : {512, 2056}) {
        Layout l(ROWS);
        I32 token(l.held);
        R gate(l.held, 8), dgate(l.held * grouped_gemm_gate_parts(F)), dw13(l.El() * 2 * F * C), dw2(l.El() * C * F);
        for (int64_t i = 0; i < l.held; i++) {
            token.host[(size_t)i] = l.expert(i) < 0 ? -1 : (int32_t)draw_below(15, i, N);
            if (l.expert(i) < 0) gate.host[(size_t)i] = 0;
        }
        token.send(), gate.send();
        Ragged r = l.device();
        r.row_token = token.dev, r.row_gate = gate.dev;
        X x(N * C, 1), dy(N * C, 2), dy_rows(l.held * C), w13(l.El() * 2 * F * C, 3), w2(l.El() * C * F, 4);
        X h(l.held * 2 * F), a(l.held * F), dh(l.held * 2 * F), gated(l.held * F);
        permute_rows(dy_rows.dev, dy.dev, r, (size_t)C * sizeof(floatX), ctx);
        const ExpertsBackward backward = {dh.dev, gated.dev, dgate.dev, nullptr, h.dev};
        check_late(
            h, [&] { grouped_gemm_swiglu(h.dev, a.dev, x.dev, w13.dev, X_BY_TOKEN, r, C, F, ctx); },
            [&] {
                grouped_gemm_dgrad_swiglu(backward, dy_rows.dev, w2.dev, ALL_BY_ROW, r, C, F, ctx);
                grouped_gemm_wgrad(dw13.dev, NULL, dh.dev, x.dev, X_BY_TOKEN, r, C, 2 * F, 0, ctx);
                grouped_gemm_wgrad(dw2.dev, NULL, dy.dev, gated.dev, DY_BY_TOKEN, r, F, C, 0, ctx);
            },
            [&] {
                std::vector<std::vector<double>> bits = {h.got(),     a.got(),    dh.got(), gated.got(),
                                                         dgate.got(), dw13.got(), dw2.got()};
                a.poison_dev(), dh.poison_dev(), gated.poison_dev();
                dgate.poison_dev(), dw13.poison_dev(), dw2.poison_dev();
                return bits;
            });
        check_late(
            dh, [&] { grouped_gemm_dgrad_swiglu(backward, dy.dev, w2.dev, DY_BY_TOKEN, r, C, F, ctx); }, [] {},
            [&] {
                std::vector<std::vector<double>> bits = {dh.got(), gated.got(), dgate.got()};
                gated.poison_dev(), dgate.poison_dev();
                return bits;
            });
    }
}

static void late_portable(void) {
    const int own = ctx->portable;
    ctx->portable = 1;
    late_in_bf16();
    ctx->portable = own;
}

// Any finite MXFP8 values, with scales of 1.
static void late_on_bytes(void) {
    Layout l(ROWS);
    Bytes x(l.held * IC, 0), w(l.El() * OC * IC, 0), x_scale(l.held * mx_stride(IC), 127),
        w_scale(l.El() * (OC / 128) * (IC / 128), 127);
    for (Bytes* b : {&x, &w})
        for (size_t i = 0; i < b->host.size(); i++)
            b->host[i] = (uint8_t)(random_uniform(3, (uint32_t)(b == &w), i) * 0x7f) | (uint8_t)(i % 3 << 7);
    for (Bytes* b : {&x, &w, &x_scale, &w_scale}) b->send();
    X y(l.held * OC);
    check_late(
        y,
        [&] {
            grouped_gemm_mx(y.dev, {x.dev, x_scale.dev}, {w.dev, w_scale.dev, IC / 128, 1}, l.device(), IC, OC, ctx);
        },
        [] {}, [&] { return std::vector<std::vector<double>>{y.got()}; });
}

int main(void) {
    if (device_available()) open_contexts(matmul_workspace());
    if (ctx && ctx->portable) {
        SKIP(late_on_hopper, "these are not the kernels here");
        SKIP(late_fused, "these are not the kernels here");
    } else {
        RUN(late_on_hopper);
        RUN(late_fused);
    }
    RUN(late_portable);
    if (ctx && ctx->capability != 90)
        SKIP(late_on_bytes, "the kernel is Hopper's");
    else
        RUN(late_on_bytes);
    return test_summary();
}
