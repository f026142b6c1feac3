// The grouped GEMMs of MXFP8 for Blackwell (mx/grouped_gemm_blackwell.cu), tested on any GPU: the order of scales, to
// the byte, against the documentation; GEMMs against the reference. On GPUs without MXFP8 in cuBLASLt, as on Hopper, a
// plain kernel written from its documentation replaces that one call. Descriptors, pointers and the order of scales
// are those that Blackwell would get.
//
// Tolerances. Output in bf16, 8 significant bits: rounding moves an element by at most 2^-8 of itself. Output in
// float32: the replacement kernel adds up to 4096 products. Each addition is off by up to 2^-24 of a partial sum, in
// random directions: 64 * 2^-24 = 4e-6 of a row. Tensor cores may keep fewer bits: MX_CHECK_BOUND, 4e-3, is allowed. A
// wrong scale is off by half of a block: more than 1e-2.
#include <cuda_fp8.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "device/lt.cuh"
#include "layers/matmul.h"
#include "mx/grouped_gemm_blackwell.cuh"
#include "mx/grouped_gemm_mx.h"
#include "mx/mx_check.h"
#include "mx/mxfp8.h"
#include "tests/ragged.cuh"

// --- The replacement of cuBLASLt's MXFP8 GEMMs ---

static bool stand_in;     // replace the calls
static bool plain_order;  // read scales as if they were row-major: an error that the tests must notice

// D (m, n), column-major, of A (k, m) and B (k, n), k first: cuBLAS documentation 13, "16/32-Element 1D Block Scaling".
struct Scaled {
    const uint8_t *a, *b, *a_scale, *b_scale;
    void* d;
    int64_t m, n, k, lda, ldb, ldd;
    bool real_out, plain, accumulate;
};

// "1D Block Scaling Factors Layout": tiles of 128 x 4, row-major; `inner` along k.
static __host__ __device__ int64_t documented_offset(int64_t outer, int64_t inner, int64_t inner_dim) {
    int64_t sf_inner = inner / 4 * 4, sf_outer = outer / 128 * 128, o = outer % 128, i = inner % 4;
    return (sf_inner + sf_outer / 128 * inner_dim) * 128 + (o % 32) * 16 + (o / 32) * 4 + i;
}

static __global__ void scaled_product(Scaled p) {
    const int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x, row = i % p.m, column = i / p.m;
    if (column >= p.n) return;
    const int64_t inner_dim = (p.k / 32 + 3) / 4 * 4;
    float total = 0;
    for (int64_t block = 0; block < p.k / 32; block++) {
        float sum = 0;
        for (int64_t k = block * 32; k < block * 32 + 32; k++)
            sum += (float)*(const __nv_fp8_e4m3*)&p.a[row * p.lda + k] *
                   (float)*(const __nv_fp8_e4m3*)&p.b[column * p.ldb + k];
        int64_t at_a = documented_offset(row, block, inner_dim), at_b = documented_offset(column, block, inner_dim);
        if (p.plain) at_b = column * inner_dim + block;
        const int sa = p.a_scale[at_a], sb = p.b_scale[at_b];
        total += sa == 255 || sb == 255 ? NAN : ldexpf(sum, sa + sb - 2 * 127);
    }
    const int64_t at = column * p.ldd + row;
    if (p.real_out)
        ((float*)p.d)[at] = p.accumulate ? ((float*)p.d)[at] + total : total;
    else
        ((floatX*)p.d)[at] = (floatX)total;
}

template <typename T>
static T attribute(cublasLtMatmulDesc_t op, cublasLtMatmulDescAttributes_t which) {
    T value;
    CUBLAS_CHECK(cublasLtMatmulDescGetAttribute(op, which, &value, sizeof(value), NULL));
    return value;
}

template <typename T>
static T attribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t which) {
    T value;
    CUBLAS_CHECK(cublasLtMatrixLayoutGetAttribute(layout, which, &value, sizeof(value), NULL));
    return value;
}

static bool is_mxfp8(cublasLtMatmulDesc_t op) {
    return attribute<int32_t>(op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
}

// The linker finds these two before the library's functions of the same names.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t lt, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference,
                                              int wanted, cublasLtMatmulHeuristicResult_t found[], int* count) {
    if (stand_in && is_mxfp8(op)) {
        *count = 1;
        return CUBLAS_STATUS_SUCCESS;
    }
    static auto library = (decltype(&cublasLtMatmulAlgoGetHeuristic))dlsym(RTLD_NEXT, "cublasLtMatmulAlgoGetHeuristic");
    return library(lt, op, a, b, c, d, preference, wanted, found, count);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t lt, cublasLtMatmulDesc_t op, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta,
                              const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t bytes, cudaStream_t stream) {
    if (!stand_in || !is_mxfp8(op)) {
        static auto library = (decltype(&cublasLtMatmul))dlsym(RTLD_NEXT, "cublasLtMatmul");
        return library(lt, op, alpha, A, a, B, b, beta, C, c, D, d, algo, workspace, bytes, stream);
    }
    Scaled p = {(const uint8_t*)A,
                (const uint8_t*)B,
                (const uint8_t*)attribute<void*>(op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER),
                (const uint8_t*)attribute<void*>(op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER),
                D,
                attribute<int64_t>(d, CUBLASLT_MATRIX_LAYOUT_ROWS),
                attribute<int64_t>(d, CUBLASLT_MATRIX_LAYOUT_COLS),
                attribute<int64_t>(a, CUBLASLT_MATRIX_LAYOUT_ROWS),
                attribute<int64_t>(a, CUBLASLT_MATRIX_LAYOUT_LD),
                attribute<int64_t>(b, CUBLASLT_MATRIX_LAYOUT_LD),
                attribute<int64_t>(d, CUBLASLT_MATRIX_LAYOUT_LD),
                attribute<uint32_t>(d, CUBLASLT_MATRIX_LAYOUT_TYPE) == CUDA_R_32F,
                plain_order,
                *(const float*)beta == 1};
    // The requirements of the documentation ("Narrow Precision Data Types Usage", cublasLtMatmul: FP8 kernels).
    CHECK(attribute<int32_t>(op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE) == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0,
          "B's scale mode");
    CHECK(attribute<int32_t>(op, CUBLASLT_MATMUL_DESC_TRANSA) == CUBLAS_OP_T &&
              attribute<int32_t>(op, CUBLASLT_MATMUL_DESC_TRANSB) == CUBLAS_OP_N,
          "not TN");
    CHECK(attribute<uint32_t>(a, CUBLASLT_MATRIX_LAYOUT_TYPE) == CUDA_R_8F_E4M3 &&
              attribute<uint32_t>(b, CUBLASLT_MATRIX_LAYOUT_TYPE) == CUDA_R_8F_E4M3,
          "not e4m3");
    CHECK(attribute<int64_t>(a, CUBLASLT_MATRIX_LAYOUT_COLS) == p.m &&
              attribute<int64_t>(b, CUBLASLT_MATRIX_LAYOUT_COLS) == p.n &&
              attribute<int64_t>(b, CUBLASLT_MATRIX_LAYOUT_ROWS) == p.k,
          "shapes do not meet");
    CHECK(p.m % 16 == 0 && p.k % 32 == 0 && p.lda % 16 == 0 && p.ldb % 16 == 0, "m %lld, k %lld", (long long)p.m,
          (long long)p.k);
    const uintptr_t all = (uintptr_t)A | (uintptr_t)B | (uintptr_t)D | (uintptr_t)p.a_scale | (uintptr_t)p.b_scale;
    CHECK(all % 16 == 0, "pointers are not on 16 bytes");
    CHECK(*(const float*)alpha == 1 && (*(const float*)beta == 0 || (p.accumulate && p.real_out)), "alpha, beta");
    scaled_product<<<(unsigned)ceil_div(p.m * p.n, 256), 256, 0, stream>>>(p);
    LAUNCH_CHECK();
    return CUBLAS_STATUS_SUCCESS;
}

// --- The order of scales ---

static int64_t draw(uint32_t stream, int64_t index, int64_t least, int64_t most) {
    return least + (int64_t)((double)(most - least + 1) * random_uniform(5, stream, (uint64_t)index));
}

// `rows` x `blocks` scales, each for r rows and b blocks, with the strides of either order.
static void compare_scales(int64_t rows, int64_t blocks, int64_t r, int64_t b, bool turned) {
    const int64_t high = ceil_div(rows, r), wide = ceil_div(blocks, b), gap = draw(2, rows, 0, 9);
    const int64_t stride = turned ? 1 : wide + gap, step = turned ? high : 1;
    const int64_t size = ceil_div(rows, 128) * ceil_div(blocks, 4) * 512;
    Bytes scales((high - 1) * stride + (wide - 1) * step + 1, 0), out(size + 64, 0xff);
    for (size_t i = 0; i < scales.host.size(); i++) scales.host[i] = (uint8_t)draw(3, (int64_t)i + rows, 1, 255);
    scales.send(), out.send();
    mx_blackwell_scales(out.dev, {scales.dev, r, stride, b, step}, rows, blocks, ctx);
    std::vector<uint8_t> got = out.got(), expected((size_t)size + 64, 0xff);
    std::fill_n(expected.begin(), size, (uint8_t)0);
    int64_t unlike = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t at = mx_blackwell_offset(row, block, blocks);
            unlike += at != documented_offset(row, block, ceil_div(blocks, 4) * 4);
            expected[(size_t)at] = scales.host[(size_t)(row / r * stride + block / b * step)];
        }
    CHECK(unlike == 0, "mx_blackwell_offset differs from the documentation's");
    CHECK(got == expected, "%lld rows of %lld blocks, scales of %lld x %lld", (long long)rows, (long long)blocks,
          (long long)r, (long long)b);
}

static void test_scale_order(void) {
    for (int64_t rows : {1, 31, 32, 127, 128, 129, 300})
        for (int64_t blocks : {1, 3, 4, 5, 11, 64}) {
            compare_scales(rows, blocks, 1, 1, false);    // of rows
            compare_scales(rows, blocks, 128, 4, false);  // of tiles
            compare_scales(rows, blocks, 128, 4, true);   // of tiles, of W transposed
        }
    for (int64_t i = 0; i < 40; i++) {
        compare_scales(draw(6, i, 1, 700), draw(7, i, 1, 230), 1, 1, false);
        compare_scales(draw(8, i, 1, 700), draw(9, i, 1, 230), 128, 4, i % 2 == 1);
    }
}

// --- MXFP8 ---

static uint8_t random_byte(uint32_t stream, int64_t i) {
    const uint8_t q = (uint8_t)draw(stream, i, 0, 255);
    return (q & 127) == 127 ? (uint8_t)(q ^ 1) : q;
}

// Random values and scales; NaN in pad rows.
struct Operands {
    int64_t IC, OC, chunks, columns, stride_o, stride_c;
    Bytes x, x_scale, w, w_scale;

    Operands(const Layout& l, int64_t IC, int64_t OC, bool turned)
        : IC(IC),
          OC(OC),
          chunks(ceil_div(IC, 128)),
          columns(ceil_div(OC, 128)),
          x(l.held * IC, 0x7f),
          x_scale(l.held * mx_stride(IC), MX_NAN),
          w(l.El() * OC * IC, 0),
          w_scale(l.El() * columns * chunks, 0) {
        stride_o = turned ? 1 : chunks, stride_c = turned ? columns : 1;
        for (int64_t r = 0; r < l.held; r++)
            for (int64_t k = 0; (l.expert(r) >= 0 || r >= l.end) && k < IC; k++) {
                x.host[(size_t)(r * IC + k)] = random_byte(11, r * IC + k);
                const uint8_t scale = (uint8_t)draw(12, r * chunks + k / 128, 125, 129);
                x_scale.host[(size_t)(r * mx_stride(IC) + k / 32)] = scale;
            }
        for (int64_t i = 0; i < (int64_t)w.host.size(); i++) w.host[(size_t)i] = random_byte(13, i);
        for (int64_t i = 0; i < (int64_t)w_scale.host.size(); i++)
            w_scale.host[(size_t)i] = (uint8_t)draw(14, i, 125, 129);
        x.send(), x_scale.send(), w.send(), w_scale.send();
    }
};

static void compare_mx(const Rows& rows, int64_t IC, int64_t OC, bool turned, int64_t short_by = 0, Ctx* with = ctx) {
    const int before = test_failures_here;
    Layout l(rows, short_by);
    Operands p(l, IC, OC, turned);
    X y(l.held * OC);
    grouped_gemm_lt_mx(y.dev, {p.x.dev, p.x_scale.dev}, {p.w.dev, p.w_scale.dev, p.stride_o, p.stride_c}, l.device(),
                       IC, OC, with);
    ctx_sync(with);
    REFERENCE(grouped_gemm_mx)
    (y.ref(), {p.x.host.data(), p.x_scale.host.data()},
     {p.w.host.data(), p.w_scale.host.data(), p.stride_o, p.stride_c}, l.reference(), IC, OC, reference_ctx);
    check_rows("y", y, l, OC, (has_block_scales(ctx) ? MX_CHECK_BOUND : 4e-6) + 0x1p-8);
    if (test_failures_here > before)
        printf("    with IC %lld, OC %lld, %d experts, %lld rows\n", (long long)IC, (long long)OC, l.El(),
               (long long)l.end);
}

static void test_mx_sizes(void) {
    stand_in = !has_block_scales(ctx);
    for (int64_t IC : {32, 96, 128, 352, 480})  // trailing chunks of every depth
        for (int64_t OC : {16, 112, 128, 144, 400}) compare_mx({129, 0, 1, 130}, IC, OC, OC == 144);
    for (int32_t n : {0, 1, 127, 128, 129, 400}) compare_mx({1, n, 128}, 160, 272, n > 127);
    compare_mx({129, 0, 300, 1}, 1408, 2048, true);
    compare_mx({77, 1, 140}, 4096, 272, false);
}

static void test_mx_short_buffer(void) {
    stand_in = !has_block_scales(ctx);
    for (int32_t n : {1, 127, 129, 200}) compare_mx({n}, 352, 144, false, ceil_div(n, 128) * 128 - n);
}

// A workspace for the scales of 256 rows at a time.
static void test_mx_in_pieces(void) {
    stand_in = !has_block_scales(ctx);
    const int64_t IC = 352, OC = 144, w_bytes = 2 * 3 * 512, tile = 3 * 512;
    Ctx* small = ctx_create((size_t)(LT_WORKSPACE + w_bytes + 2 * tile));
    compare_mx({129, 257, 0, 1000}, IC, OC, true, 0, small);
    ctx_destroy(small);
}

// One operand of wgrad, column-wise (along tokens): random values and scales, zeros in pad rows, NaN after the last
// group.
struct Channels {
    int64_t length;
    Bytes q, scale;

    Channels(const Layout& l, int64_t C, uint32_t stream)
        : length(round_up(l.capacity, 128)), q(C * length, 0x7f), scale(length / 128 * C, MX_NAN) {
        for (int64_t c = 0; c < C; c++)
            for (int64_t r = 0; r < l.start.back(); r++)
                q.host[(size_t)(c * length + r)] = l.expert(r) < 0 ? 0 : random_byte(stream, c * length + r);
        for (int64_t i = 0; i < l.start.back() / 128 * C; i++)
            scale.host[(size_t)i] = (uint8_t)draw(stream + 1, i, 125, 129);
        q.send(), scale.send();
    }
};

static void compare_wgrad(const Rows& rows, int64_t IC, int64_t OC, int64_t short_by = 0, Ctx* with = ctx) {
    stand_in = !has_block_scales(ctx);
    Layout l(rows, short_by);
    Channels dy(l, OC, 15), x(l, IC, 17);
    for (int accumulate : {0, 1}) {
        R dw(l.El() * OC * IC, 19, 1e5);
        grouped_gemm_lt_mx_wgrad(dw.dev, {dy.q.dev, dy.scale.dev}, {x.q.dev, x.scale.dev}, dy.length, l.device(), IC,
                                 OC, accumulate, with);
        ctx_sync(with);
        REFERENCE(grouped_gemm_mx_wgrad)
        ((real*)dw.ref(), NULL, {dy.q.host.data(), dy.scale.host.data()}, {x.q.host.data(), x.scale.host.data()},
         dy.length, l.reference(), IC, OC, accumulate, reference_ctx);
        CHECK_CLOSE(dw, has_block_scales(ctx) ? MX_CHECK_BOUND : 4e-6);
    }
}

// Also with a capacity that ends inside the pad rows of the last group: the contraction includes these rows.
static void test_wgrad(void) {
    compare_wgrad({129, 0, 1, 130}, 96, 160);
    compare_wgrad({200}, 352, 96, 56);
    Ctx* small = ctx_create((size_t)(LT_WORKSPACE + 2 * 2 * 512));  // the scales of 256 rows at a time
    compare_wgrad({1000, 0, 300}, 96, 128, 0, small);
    ctx_destroy(small);
}

// The check at start, of both kernels. It must find the error of the replacement that reads scales row by row.
static void test_check(void) {
    stand_in = !has_block_scales(ctx);
    const bool own = !grouped_gemm_mx_missing(ctx);
    double error = own ? mx_check_error(grouped_gemm_mx, ctx) : 0, by_lt = mx_check_error(grouped_gemm_lt_mx, ctx);
    if (getenv("TEST_ERRORS")) printf("    %.3g, %.3g of %.3g\n", error, by_lt, MX_CHECK_BOUND);
    CHECK(error <= MX_CHECK_BOUND && by_lt <= MX_CHECK_BOUND, "%g, %g", error, by_lt);
    stand_in = plain_order = true;
    double wrong = mx_check_error(grouped_gemm_lt_mx, ctx);
    CHECK(wrong > MX_CHECK_BOUND, "scales in the wrong order give %g only", wrong);
    stand_in = plain_order = false;
}

// Runs this program with `what` as its argument in a process of its own. Returns its exit code and its output.
static int run_self(const char* what, std::string* said) {
    char self[4096], command[4200], line[512];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[length < 0 ? 0 : length] = 0;
    snprintf(command, sizeof(command), "'%s' %s 2>&1", self, what);
    fflush(stdout);
    FILE* pipe = popen(command, "r");
    while (pipe && fgets(line, sizeof(line), pipe)) *said += line;
    const int status = pipe ? pclose(pipe) : -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void refuse(int64_t OC) {
    Layout l({130});
    Operands p(l, 128, OC, false);
    X y(l.held * OC);
    grouped_gemm_lt_mx(y.dev, {p.x.dev, p.x_scale.dev}, {p.w.dev, p.w_scale.dev, p.stride_o, p.stride_c}, l.device(),
                       128, OC, ctx);
}

static void test_refusals(void) {
    std::string said;
    int code = run_self("refuse-size", &said);
    CHECK(code == EXIT_FAILED && said.find("OC % 16 == 0") != std::string::npos, "%d: %s", code, said.c_str());
    if (has_block_scales(ctx)) return;
    said.clear();
    code = run_self("refuse-gpu", &said);
    CHECK(code == EXIT_FAILED && said.find("cuBLASLt refuses an MXFP8 GEMM") != std::string::npos, "%d: %s", code,
          said.c_str());
}

int main(int argc, char** argv) {
    const char* what = argc > 1 ? argv[1] : "";
    if (device_available()) open_contexts(matmul_workspace());
    if (!strncmp(what, "refuse", 6)) {
        refuse(!strcmp(what, "refuse-size") ? 24 : 32);
        return 0;
    }
    if (!strcmp(what, "small")) {  // for compute-sanitizer
        stand_in = !has_block_scales(ctx);
        compare_scales(129, 11, 1, 1, false);
        compare_mx({129, 0, 1, 130}, 96, 144, true);
        compare_mx({127}, 352, 32, false, 1);
        compare_wgrad({200}, 96, 32, 56);
        return test_failures_here != 0;
    }
    RUN(test_scale_order);
    RUN(test_mx_sizes);
    RUN(test_mx_short_buffer);
    RUN(test_mx_in_pieces);
    RUN(test_wgrad);
    RUN(test_check);
    RUN(test_refusals);
    return test_summary();
}
