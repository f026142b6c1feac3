// Grouped products on the GPU beside transfers, which hold SMs: blocks that start late, because their SMs are held,
// leave their share to the others, and no bit changes. Times count here, so nothing else may run.
//
// With 16 of 132 SMs held the forward product should take 1.14 times as long, or 1.33 where each one held costs a
// cluster (8 rounds of work items, not 6); with a share for every block nearly twice as long, since the late ones begin
// when the others end (1.7 seen): 1.5 is allowed. (Of the portable kernels a block owns an SM too, and draws its
// tiles.)
#include "grouped/grouped_gemm.h"
#include "layers/matmul.h"
#include "mx/grouped_gemm_mx.h"
#include "mx/mxfp8.h"
#include "tests/hold.cuh"
#include "tests/ragged.cuh"

enum { IC = 1024, OC = 2048 };
static const Rows ROWS = {5000, 0, 1000, 5500, 1, 500};

// `timed` writes y; `others` writes more, and `got` gives the bits of all.
template <typename Timed, typename Others, typename Got>
static void check_late(X& y, Timed timed, Others others, Got got) {
    decltype(got()) free;
    float free_ms = 0;
    for (int sms : {0, 16, 112}) {
        // The time of one and the bits of all while some SMs are held.
        y.poison();
        float ms;
        {
            HeldSms held(sms);
            ms = least_ms(timed, ctx->stream);
            others();
            ctx_sync(ctx);
        }

        // As with none held.
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
            grouped_gemm_wgrad(dw.dev, dy.dev, x.dev, l.device(), IC, OC, 0, ctx);
        },
        [&] {
            std::vector<std::vector<double>> bits = {y.got(), dx.got(), dw.got()};
            dx.poison_dev(), dw.poison_dev();
            return bits;
        });
}

static void late_on_hopper(void) { late_in_bf16(); }

static void late_portable(void) {
    const int own = ctx->portable;
    ctx->portable = 1;
    late_in_bf16();
    ctx->portable = own;
}

// Bytes of any finite value; scales of 1.
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
            grouped_gemm_mx(y.dev, nullptr, {x.dev, x_scale.dev}, {w.dev, w_scale.dev, IC / 128, 1}, l.device(), IC, OC,
                            ctx);
        },
        [] {}, [&] { return std::vector<std::vector<double>>{y.got()}; });
}

int main(void) {
    if (device_available()) open_contexts(matmul_workspace());
    if (ctx && ctx->portable)
        SKIP(late_on_hopper, "these are not the kernels here");
    else
        RUN(late_on_hopper);
    RUN(late_portable);
    if (ctx && ctx->capability != 90)
        SKIP(late_on_bytes, "the kernel is Hopper's");
    else
        RUN(late_on_bytes);
    return test_summary();
}
