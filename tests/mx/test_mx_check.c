// The check of MXFP8 GEMMs at start (mx/mx_check.h). The build's own GEMMs pass, and every wrong use of scales that is
// tested here fails. Runs in all builds.
#include "mx/mx_check.h"

#include "tests/test.h"

static Ctx* ctx;

// The error in the GEMMs below.
static enum { W_ORDER, W_NEXT, X_NEXT, X_ONE, PADS } fault;
static int64_t fault_row, fault_chunk;

// A copy of `bytes` scales, rotated by `by`.
static uint8_t* rotated(const uint8_t* scale, int64_t bytes, int64_t by) {
    uint8_t* copy = (uint8_t*)device_alloc((size_t)bytes, "a test");
    device_copy(copy, scale + by, (size_t)(bytes - by), ctx);
    device_copy(copy + bytes - by, scale, (size_t)by, ctx);
    return copy;
}

static void faulty(floatX* y, MxBytes x, MxTiles w, Ragged r, int64_t IC, int64_t OC, Ctx* at) {
    uint8_t* copy = NULL;
    if (fault == W_ORDER) {
        const int64_t stride_o = w.stride_o;
        w.stride_o = w.stride_c;
        w.stride_c = stride_o;
    } else if (fault == W_NEXT) {
        w.scale = copy = rotated(w.scale, r.El * mx_tiles(OC) * mx_tiles(IC), 1);
    } else if (fault == X_NEXT) {
        x.scale = copy = rotated(x.scale, r.capacity * mx_stride(IC), mx_stride(IC));
    } else if (fault == X_ONE) {  // one chunk's scale is a binade too high
        x.scale = copy = rotated(x.scale, r.capacity * mx_stride(IC), 0);
        uint8_t four[4];
        int64_t from = fault_row * mx_stride(IC) + fault_chunk * 4;
        device_download(four, copy + from, sizeof(four), at);
        for (int i = 0; i < 4; i++) four[i]++;
        device_upload(copy + from, four, sizeof(four), at);
    }
    grouped_gemm_mx(y, x, w, r, IC, OC, at);
    if (fault == PADS) device_copy(y + r.capacity * OC - 1, y, sizeof(floatX), at);  // y[0] is not 0
    ctx_sync(at);
    device_free(copy);
}

static void test_right(void) {
    double error = mx_check_error(grouped_gemm_mx, ctx);
    if (getenv("TEST_ERRORS")) printf("    %.3g of %.3g\n", error, MX_CHECK_BOUND);
    // Half of the bound: a correct GEMM must not be near it.
    CHECK(error <= MX_CHECK_BOUND / 2, "right products are off by %g", error);
    mx_check(ctx);
}

static void test_wrong_order(void) {
    for (int i = W_ORDER; i <= X_NEXT; i++) {
        fault = i == W_ORDER ? W_ORDER : i == W_NEXT ? W_NEXT : X_NEXT;
        double error = mx_check_error(faulty, ctx);
        CHECK(error > 10 * MX_CHECK_BOUND, "fault %d gives %g only", i, error);
    }
}

static void test_one_scale(void) {
    fault = X_ONE;
    double least = INFINITY;
    for (fault_row = 0; fault_row < 129; fault_row += 8)
        for (fault_chunk = 0; fault_chunk < 3; fault_chunk++) {
            double error = mx_check_error(faulty, ctx);
            least = error < least ? error : least;
        }
    if (getenv("TEST_ERRORS")) printf("    %.3g, more than %.3g\n", least, MX_CHECK_BOUND);
    CHECK(least > MX_CHECK_BOUND, "one wrong scale gives %g only", least);
}

static void test_pads(void) {
    fault = PADS;
    CHECK(isinf(mx_check_error(faulty, ctx)), "a pad row that is not zero is not noticed");
}

int main(void) {
    if (device_available()) ctx = ctx_create((size_t)64 << 20);
    if (ctx && grouped_gemm_mx_missing(ctx)) {
        SKIP(mx_check, grouped_gemm_mx_missing(ctx));
        return test_summary();
    }
    RUN(test_right);
    RUN(test_wrong_order);
    RUN(test_one_scale);
    if (row_align(BACKEND) > 1)
        RUN(test_pads);
    else
        SKIP(test_pads, "this build has no pad rows");
    return test_summary();
}
