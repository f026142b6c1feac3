// Pretraining of a mixture-of-experts model on one NVIDIA GPU, all of it in one file: CUDA and cuBLAS, nothing else.
//
//   nvcc -O3 -std=c++17 -arch=native learn/train_moe.cu -lcublas -o moe    any GPU since Ampere; make sheet-cuda
//   ./moe tiny TRAIN.bin VAL.bin
//   ./moe small --vocab 32000 --adamw 1 A.bin B.bin VAL.bin
//
// It is learn/train_moe.c for GPUs: the same ops, weights at the start and order of data. Read that sheet first: it has
// the formulas. Here is a GPU's way to compute them, and the bound of each kernel. Weights and activations are bf16,
// sums are float32. The optimizer has masters, moments and gradients in float32. The order of the parts:
//   sizes, parameters, activations; then what kernels share: vectors, tensor cores, asynchronous copies
//   ops as a token meets them: embedding, RMSNorm, RoPE, attention, SwiGLU, router, sort, grouped GEMM, cross-entropy
//   blocks and passes; random numbers; optimizers; data; sample; memory, options, the loop in main
// The host does not wait inside of a step: the numbers of tokens of experts stay on the GPU. A grid covers the largest
// case, and blocks beyond the end return. Gradients are summed in a fixed order, and atomics add integers alone, so two
// runs give the same bits. Comments such as (N, C) are shapes: N tokens, in B sequences of T.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <chrono>
// clang-format off
typedef __nv_bfloat16 bf16;
#define DEVICE static __device__ __forceinline__
// L blocks of width C, H heads. A head's query and key have nope + rope numbers, its value v. Only rope = 16, 32 or 64
// exists, with nope = v = 2 rope. Without a query latent, q_lora is 0. The first dense_layers blocks have a dense MLP.
// The others have E experts of hidden width F, K for each token, and a shared one of width shared * F.
static struct Config {
    int L, C, H, q_lora, kv_lora, nope, rope, v, dense_ffn, dense_layers, E, K, shared, F, V;
    int B, T, steps, warmup, seed, val_every, val_tokens, sample;
    int adamw, dump;  // 1: AdamW for all kinds, no Muon; 1: step 1 writes its gradients to the file `gradients`
    double lr, muon_lr, weight_decay, clip, aux;
    int QK, KV, KVA, Vp;  // query or key of a head; its nope and v, from the latent; latent and rope; V, padded
    int moe, capacity;    // blocks with experts; rows sorted by expert
    float scale, scale2;  // of attention: QK^-1/2; times log2(e), for exp as a power of two
} c;
static const struct { const char* name; double least, tiny, small; } OPTIONS[] = {  // in the order of Config
    {"layers", 1, 4, 8}, {"dim", 1, 128, 512}, {"heads", 1, 4, 8}, {"q-lora", 0, 0, 0}, {"kv-lora", 1, 64, 256},
    {"nope-dim", 1, 32, 64}, {"rope-dim", 1, 16, 32}, {"v-dim", 1, 32, 64}, {"dense-ffn", 1, 512, 2048},
    {"dense-layers", 0, 1, 1}, {"experts", 1, 8, 32}, {"top-k", 1, 2, 4}, {"shared-experts", 1, 1, 1},
    {"expert-ffn", 1, 128, 384}, {"vocab", 1, 257, 50257}, {"batch", 1, 8, 16}, {"seq-len", 1, 256, 1024},
    {"steps", 1, 750, 1000}, {"warmup", 0, 50, 50}, {"seed", 0, 1, 1}, {"val-every", 1, 250, 100},
    {"val-tokens", 1, 1000000, 65536}, {"sample-tokens", 0, 400, 0}, {"adamw", 0, 0, 0}, {"dump", 0, 0, 0},
    {"lr", 0, 3e-3, 1e-3}, {"muon-lr", 0, 12e-3, 2e-3}, {"weight-decay", 0, 0.1, 0.1}, {"clip", 0, 1, 1},
    {"aux-loss", 0, 1e-2, 1e-2}};
enum { WHOLE = 25, OPTION_COUNT = WHOLE + 5 };  // the first are whole numbers
static const float BETA1 = 0.9f, BETA2 = 0.95f, MOMENTUM = 0.95f, FINAL_LR = 0.1f, TEMPERATURE = 0.8f;
enum { END_OF_TEXT = 256, MOST_EXPERTS = 256, TILE = 128 };  // each expert's rows end at a multiple of TILE
// The kinds of matrices, by update rule. Those of a kind are one behind another, so Muon takes them at once.
enum Kind {
    WQA, WQ, WKVA, WKVB, WO, DENSE13, DENSE2, SHARED13, SHARED2, W13, W2,  // Muon
    EMBEDDING, LM_HEAD, ROUTER,                                            // AdamW
    NORM1, Q_NORM, KV_NORM, NORM2, FINAL_NORM, KINDS                       // AdamW without weight decay
};
static struct Parameter {
    int units, matrices, rows, columns;  // blocks that have it; matrices of a block: gate and up are two
    int64_t at = 0;                      // place of the first in all buffers
} parameter[KINDS];
static int64_t parameters;                            // their number
static float *master, *gradient, *moment1, *moment2;  // moment1: AdamW's first, or Muon's momentum
static bf16* weight;                                  // the masters, rounded
static int64_t place(int kind, int unit) {
    const Parameter& p = parameter[kind];
    return p.at + (int64_t)unit * p.matrices * p.rows * p.columns;
}
static void plan_parameters(void) {
    const int latent = c.q_lora ? c.L : 0, dense = c.dense_layers, moe = c.moe, sF = c.shared * c.F;
    const Parameter table[KINDS] = {  // units, matrices, rows, columns
        /* WQA */ {latent, 1, c.q_lora, c.C}, /* WQ */ {c.L, 1, c.H * c.QK, c.q_lora ? c.q_lora : c.C},
        /* WKVA */ {c.L, 1, c.KVA, c.C}, /* WKVB */ {c.L, 1, c.H * c.KV, c.kv_lora}, /* WO */ {c.L, 1, c.C, c.H * c.v},
        /* DENSE13 */ {dense, 2, c.dense_ffn, c.C}, /* DENSE2 */ {dense, 1, c.C, c.dense_ffn},
        /* SHARED13 */ {moe, 2, sF, c.C}, /* SHARED2 */ {moe, 1, c.C, sF}, /* W13 */ {moe, 2 * c.E, c.F, c.C},
        /* W2 */ {moe, c.E, c.C, c.F}, /* EMBEDDING */ {1, 1, c.Vp, c.C}, /* LM_HEAD */ {1, 1, c.Vp, c.C},
        /* ROUTER */ {moe, 1, c.E, c.C}, /* NORM1 */ {c.L, 1, 1, c.C}, /* Q_NORM */ {latent, 1, 1, c.q_lora},
        /* KV_NORM */ {c.L, 1, 1, c.kv_lora}, /* NORM2 */ {c.L, 1, 1, c.C}, /* FINAL_NORM */ {1, 1, 1, c.C}};
    for (int k = 0; k < KINDS; k++) {
        parameter[k] = table[k], parameter[k].at = parameters;
        parameters = place(k, table[k].units);
    }
}

// The activations that backward needs, of one block. Each choice of an expert by a token is a row, sorted by expert.
static struct Saved {
    bf16 *x, *norm1, *x2, *norm2;      // (N, C): the residual stream before attention and before the MLP, with norms
    bf16 *cq, *cq_norm, *q;            // (N, q_lora), (N, q_lora), (N, H, QK)
    bf16 *kva, *ckv, *kv, *attention;  // (N, KVA), (N, kv_lora), (N, H, KV), (N, H, v)
    bf16 *h, *expert_h;                // (N, 2 M): before SwiGLU, dense or shared; (capacity, 2F): of experts
    float *rstd1, *rstd_q, *rstd_kv, *rstd2, *lse, *scores, *gate;  // (N) x 4; (B, H, T): log2 of a sum; (N, E); (N, K)
    int *expert, *row;                 // (N, K) of a choice
    int *token, *choice;               // (capacity) of a row, -1 for a pad row
    int *tile_expert, *start;          // (capacity / TILE) of a tile, -1 behind the end; (E + 1) an expert's first row
} * saved;
// Buffers from one op to the next. A name with d is the gradient of that without, in the same shape. M is the largest
// hidden width of the dense MLP and the shared expert. `rows` are those of experts, (capacity, ...).
static struct Work {
    bf16 *x, *norm, *out, *dx, *dnorm;           // (N, C): x and norm before lm_head; out: a branch, which x gets
    bf16 *a, *da, *dh;                           // (N, M), (N, M), (N, 2M): of an MLP; backward turns da into a
    bf16 *rows_a, *rows_dh, *rows;               // (.., F): a, in backward da, then a; (.., 2F); (.., C): y, dx
    bf16 *dattention, *dq, *dkva, *dkv, *dckv, *dcq, *dcq_norm, *dlogits_router;
    bf16 *logits;                                // (N, Vp): cross_entropy_kernel overwrites them with their gradient
    bf16 *muon_x, *muon_next, *muon_a, *muon_b;  // all matrices of a kind: X, the next X; A, B: of the smaller side
    float *rstd, *logits_router, *losses;        // (N) of the final norm, (N, E), (N)
    float *dk_rope, *dgate;                      // (B, H, T, rope): each head's part; (N, K)
    float *dnorms, *bias;       // (NORM_BLOCKS, all norms): parts of gradients; (moe, E): the routers' selection biases
    double* squares;            // (SQUARE_BLOCKS)
    float2 *positions, *delta;  // (T, rope / 2): cosine and sine; (B, H, T): lse, delta
    int *counts, *tokens;       // (moe, counts_of_block): what routers count, see Counts; (4 N + 1): see send_batch
} w;
// Decisions of a step, on the GPU. With ok 0, loss or norm is not finite, and nothing is updated.
static struct Stats {
    double loss, norm; float clip; int ok, fullest;  // clip: factor on gradients; fullest: an expert's most tokens
} * stats;
// Every call of CUDA and cuBLAS is checked; 0 is success in both. The name holds for an error of CUDA.
#define CHECK(call) check((int)(call), #call, __LINE__)
static void check(int error, const char* call, int line) {
    const char* name = cudaGetErrorName((cudaError_t)error);
    if (error) fprintf(stderr, "train_moe.cu:%d: error %d (CUDA: %s): %s\n", line, error, name, call), exit(1);
}
[[noreturn]] static void die(int code, const char* what, const char* wrong) {
    fprintf(stderr, "%s: %s\n", what, wrong); exit(code);
}
// Buffers of `rows` rows, filled with 0: allocate(rows, &a, width of a, &b, width of b). None is empty, hence + 1.
template <typename Number, typename... Rest>
static void allocate(int64_t rows, Number** p, int64_t width, Rest... rest) {
    const size_t bytes = (size_t)(rows * width + 1) * sizeof(Number);
    CHECK(cudaMalloc((void**)p, bytes)); CHECK(cudaMemset(*p, 0, bytes));
    if constexpr (sizeof...(rest) > 0) allocate(rows, rest...);
}
// Launches a kernel, with each argument converted to its parameter's type. An empty grid launches nothing.
template <typename... P, typename... A>
static void launch(void (*kernel)(P...), dim3 grid, int threads, size_t shared, A... arguments) {
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;  // 48 KB, unless asked for more
    if (shared > 48 << 10) CHECK(cudaFuncSetAttribute(kernel, most, (int)shared));
    if (grid.x) kernel<<<grid, threads, shared>>>(P(arguments)...);
    CHECK(cudaGetLastError());
}
static int blocks(int64_t work, int64_t each) { return (int)((work + each - 1) / each); }

// --- What kernels share ---
static const float LOG2E = 1.44269504f;
enum : unsigned { ALL = 0xffffffff };  // lanes of a warp
// 2^x on the special function unit.
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float sigmoid(float x) { return __fdividef(1, 1 + exp2_fast(-LOG2E * x)); }
template <typename Number> DEVICE Number warp_sum(Number x) {
    for (int lane = 16; lane; lane /= 2) x += __shfl_xor_sync(ALL, x, lane);
    return x;
}
// The sum over a block, in a fixed order, for every thread.
static __device__ double block_sum(double x) {
    __shared__ double part[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < (int)blockDim.x / 32; i++) sum += part[i];
    __syncthreads();
    return sum;
}
// Eight neighbours of a row, 16 bytes of bf16. All widths are multiples of 8. A bf16 is the upper half of a float.
struct Eight {
    float x[8];
    template <typename F> __device__ Eight map(F f) const {
        return {f(x[0]), f(x[1]), f(x[2]), f(x[3]), f(x[4]), f(x[5]), f(x[6]), f(x[7])};
    }
};
#define OPERATOR(op) \
    DEVICE Eight operator op(Eight a, Eight b) { for (int j = 0; j < 8; j++) a.x[j] = a.x[j] op b.x[j]; return a; }
OPERATOR(+) OPERATOR(-) OPERATOR(*)
DEVICE Eight operator-(const Eight& a, float b) { return a.map([=](float x) { return x - b; }); }
DEVICE Eight operator*(const Eight& a, float b) { return a.map([=](float x) { return x * b; }); }
DEVICE float sum_of(const Eight& a) { return a.x[0] + a.x[1] + a.x[2] + a.x[3] + a.x[4] + a.x[5] + a.x[6] + a.x[7]; }
DEVICE Eight load(const bf16* p) {
    const uint4 v = *(const uint4*)p;
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
    Eight a;
    for (int i = 0; i < 8; i++) a.x[i] = __uint_as_float(i % 2 ? pair[i / 2] & 0xffff0000u : pair[i / 2] << 16);
    return a;
}
DEVICE Eight load(const float* p) {
    const float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
// Two floats, rounded, in one register. The first is the lower half.
DEVICE uint32_t pack(float x, float y) { const __nv_bfloat162 v = __floats2bfloat162_rn(x, y); return *(uint32_t*)&v; }
DEVICE void store2(bf16* p, float x, float y) { *(uint32_t*)p = pack(x, y); }
DEVICE void store(bf16* p, const Eight& a) {
    *(uint4*)p = {pack(a.x[0], a.x[1]), pack(a.x[2], a.x[3]), pack(a.x[4], a.x[5]), pack(a.x[6], a.x[7])};
}
DEVICE void store(float* p, const Eight& a) {
    ((float4*)p)[0] = {a.x[0], a.x[1], a.x[2], a.x[3]}, ((float4*)p)[1] = {a.x[4], a.x[5], a.x[6], a.x[7]};
}

// Tensor cores. mma.sync: a warp computes d (16, 8) += a (16, 16) b (16, 8). Each lane holds some elements of each.
// With g = lane / 4 and i = lane % 4 * 2:
//   a[0] row g, columns i, i + 1    a[1] row g + 8    a[2], a[3] the same rows, columns + 8
//   b[0] column g, rows i, i + 1    b[1] rows + 8     d[0], d[1] row g, columns i, i + 1    d[2], d[3] row g + 8
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// ldmatrix: four matrices of 8 x 8 from shared memory. Lane l gives the address of row l % 8 of matrix l / 8. It
// receives of each row l / 4, columns l % 4 * 2 and the next; TRANSPOSED: column l / 4, rows l % 4 * 2 and the next.
template <bool TRANSPOSED> DEVICE void ldmatrix(uint32_t (&r)[4], const uint8_t* shared) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
#define LDMATRIX(trans) asm volatile("ldmatrix.sync.aligned.m8n8.x4" trans ".shared.b16 {%0,%1,%2,%3}, [%4];" \
    : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory")
    if (TRANSPOSED) LDMATRIX(".trans"); else LDMATRIX("");
}
// cp.async: 16 bytes from global to shared memory, without registers and without waiting; zeros if not `inside`.
DEVICE void copy_async(uint8_t* shared, const bf16* global, bool inside) {
    const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared), bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global), "r"(bytes) : "memory");
}
// Ends a group of copies. copy_wait waits until at most PENDING groups of this thread are in flight.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> DEVICE void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
// Dense products are cuBLAS's: out (m, n) = alpha a b + beta out, row-major, for `batch` matrices. transpose_a: a is
// stored as (k, m); transpose_b: b as (n, k). cuBLAS is column-major: it computes out^T = b^T a^T.
static cublasHandle_t cublas;
static void gemm(void* out, cudaDataType type, const bf16* a, int transpose_a, const bf16* b, int transpose_b, int m,
                 int n, int k, float alpha, float beta, int batch = 1) {
    CHECK(cublasGemmStridedBatchedEx(
        cublas, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &alpha, b,
        CUDA_R_16BF, transpose_b ? k : n, (int64_t)n * k, a, CUDA_R_16BF, transpose_a ? m : k, (int64_t)m * k, &beta,
        out, type, n, (int64_t)m * n, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}
// A linear layer: y (n, out) = x (n, in) W^T, with W (out, in), that of a kind and a unit
static void linear_forward(bf16* y, const bf16* x, int kind, int unit, int n) {
    const Parameter& p = parameter[kind];
    gemm(y, CUDA_R_16BF, x, 0, weight + place(kind, unit), 1, n, p.rows * p.matrices, p.columns, 1, 0);
}
// dx = dy W, or += with add;  dW = dy^T x
static void linear_backward(bf16* dx, const bf16* dy, const bf16* x, int kind, int unit, int n, int add) {
    const int in = parameter[kind].columns, out = parameter[kind].rows * parameter[kind].matrices;
    gemm(dx, CUDA_R_16BF, dy, 0, weight + place(kind, unit), 0, n, in, out, 1, (float)add);
    gemm(gradient + place(kind, unit), CUDA_R_32F, dy, 1, x, 0, out, in, n, 1, 0);
}

// --- Ops ---
// The gradient of a token's row in the embedding is the sum of dx over its places. The host sorted them (send_batch):
// order[start[d]] .. order[start[d + 1] - 1]. Block d owns the row. Bound by the most frequent token.
__global__ void embedding_backward_kernel(float* dtable, Work w, Config c) {
    const int *order = w.tokens + 2 * c.B * c.T, *start = order + c.B * c.T, first = start[blockIdx.x];
    for (int at = threadIdx.x * 8; at < c.C; at += blockDim.x * 8) {
        Eight sum = {};
#pragma unroll 4
        for (int i = first; i < start[blockIdx.x + 1]; i++) sum = sum + load(w.dx + (int64_t)order[i] * c.C + at);
        store(dtable + (int64_t)w.tokens[order[first]] * c.C + at, sum);
    }
}
// A token's rows of experts: y[row[i K + k]], times gate[i K + k] unless gate is NULL. A dense block has none: K is 0.
struct TokenRows { const bf16* y; const int* row; const float* gate; int K; };
DEVICE Eight sum_of_rows(const TokenRows& r, int64_t token, int at, int width) {
    Eight sum = {};
    for (int64_t i = token * r.K; i < (token + 1) * r.K; i++)
        sum = sum + load(r.y + (int64_t)r.row[i] * width + at) * (r.gate ? r.gate[i] : 1);
    return sum;
}

// RMSNorm: y (n, width) = scale x rstd, with the ops before it. With `token`, x is a table, the embedding. With
// `branch`, x becomes x + branch + the gated rows of a token's experts. `sum` gets x, rounded. A warp takes a row, and
// each lane the same columns in both loops: so it reads its own `sum`, without a barrier. Bound by memory.
__global__ void rmsnorm_forward_kernel(bf16* y, float* rstd, bf16* sum, const bf16* x, int x_row, const int* token,
                                       const bf16* branch, TokenRows rows, const bf16* scale, int n, int width) {
    const int64_t i = blockIdx.x * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (i >= n) return;
    float squares = 0;
    x += (token ? token[i] : i) * x_row;
    for (int at = lane * 8; at < width; at += 256) {
        Eight v = load(x + at);
        if (branch) v = v + load(branch + i * width + at) + sum_of_rows(rows, i, at, width);
        if (sum) store(sum + i * width + at, v);
        squares += sum_of(v * v);
    }
    const float r = rsqrtf(warp_sum(squares) / width + 1e-6f);
    if (lane == 0) rstd[i] = r;
    if (sum) x = sum + i * width;
    for (int at = lane * 8; at < width; at += 256) store(y + i * width + at, load(x + at) * load(scale + at) * r);
}
static void rmsnorm_forward(bf16* y, float* rstd, bf16* sum, const bf16* x, int x_row, int kind, int unit, int n,
                            const bf16* branch, TokenRows rows = {}, const int* token = NULL) {
    launch(rmsnorm_forward_kernel, blocks(n, 8), 256, 0, y, rstd, sum, x, x_row, token, branch, rows,
           weight + place(kind, unit), n, parameter[kind].columns);
}
// With g = dy scale:  dx = rstd (g - x rstd^2 mean(g x)), or += with add;  dscale = sum of dy x rstd. dy takes in rows
// of experts first. A lane sums its columns of dscale in shared memory, a block writes its part, and
// norms_backward_kernel adds the parts of all norms. Bound by memory.
enum { NORM_BLOCKS = 528, SQUARE_BLOCKS = 1056 };  // 4 and 8 for each of 132 SMs; fixed, as the order of sums is
__global__ void rmsnorm_backward_kernel(bf16* dx, float* part, int part_row, bf16* dy, TokenRows rows, const bf16* x,
                                        int x_row, const bf16* scale, const float* rstd, int n, int width, int add) {
    extern __shared__ __align__(128) uint8_t memory[];
    float *dscale = (float*)memory, *mine = dscale + threadIdx.x / 32 * width;  // (warps, width)
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int i = threadIdx.x; i < warps * width; i += blockDim.x) dscale[i] = 0;
    __syncthreads();
    for (int64_t i = blockIdx.x * warps + threadIdx.x / 32; i < n; i += gridDim.x * warps) {
        const float r = rstd[i];
        float dot = 0;
        for (int at = lane * 8; at < width; at += 256) {
            const Eight v = load(x + i * x_row + at), g = load(dy + i * width + at) + sum_of_rows(rows, i, at, width);
            if (rows.K) store(dy + i * width + at, g);
            store(mine + at, load(mine + at) + g * v * r);
            dot += sum_of(g * load(scale + at) * v);
        }
        dot = warp_sum(dot) / width * r * r;
        for (int at = lane * 8; at < width; at += 256) {
            Eight d = (load(dy + i * width + at) * load(scale + at) - load(x + i * x_row + at) * dot) * r;
            if (add) d = d + load(dx + i * x_row + at);
            store(dx + i * x_row + at, d);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        float sum = 0;
        for (int k = 0; k < warps; k++) sum += dscale[k * width + i];
        part[(int64_t)blockIdx.x * part_row + i] = sum;
    }
}
__global__ void norms_backward_kernel(float* dscale, const float* part, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
#pragma unroll 8
    for (int b = 0; b < NORM_BLOCKS && i < n; b++) sum += part[(int64_t)b * n + i];
    if (i < n) dscale[i] = sum;
}
static void rmsnorm_backward(bf16* dx, bf16* dy, TokenRows rows, const bf16* x, int x_row, int kind, int unit,
                             const float* rstd, int n, int add) {
    const int width = parameter[kind].columns, warps = width > 2048 ? 2 : 8;  // a row for each in shared memory
    const int64_t at = place(kind, unit), first = parameter[NORM1].at;
    launch(rmsnorm_backward_kernel, NORM_BLOCKS, warps * 32, warps * width * sizeof(float), dx, w.dnorms + (at - first),
           (int)(parameters - first), dy, rows, x, x_row, weight + at, rstd, n, width, add);
}

// RoPE, in place: pair i turns by the angle t 10000^(-2i / rope). Heads 0 .. H - 1 are queries, `head` H is the part of
// keys that all heads share. Backward turns back: there, head H is the sum of dk_rope over the heads. Bound by memory.
__global__ void rope_kernel(bf16* q, bf16* kva, Work w, Config c, int n, int direction) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x, vectors = c.rope / 8, token = i / vectors / (c.H + 1);
    const int at = i % vectors * 8, head = i / vectors % (c.H + 1), t = token % c.T;
    if (token >= n) return;
    bf16* p = head < c.H ? q + ((int64_t)token * c.H + head) * c.QK + c.nope + at
                         : kva + (int64_t)token * c.KVA + c.kv_lora + at;
    Eight x = {}, y;
    if (direction > 0 || head < c.H) x = load(p);
    for (int h = 0; direction < 0 && head == c.H && h < c.H; h++)
        x = x + load(w.dk_rope + ((token / c.T * c.H + h) * (int64_t)c.T + t) * c.rope + at);
    for (int j = 0; j < 8; j += 2) {
        const float2 turn = w.positions[t * (c.rope / 2) + (at + j) / 2];
        y.x[j] = x.x[j] * turn.x - x.x[j + 1] * turn.y * direction;
        y.x[j + 1] = x.x[j] * turn.y * direction + x.x[j + 1] * turn.x;
    }
    store(p, y);
}

// Flash attention (Dao 2023, arXiv 2307.08691), causal: S = q k^T / sqrt(QK), P = softmax(S), out = P v. P never exists
// whole: a block keeps its own rows in shared memory, and walks the others in tiles. While one tile is multiplied,
// cp.async fills the other buffer. D is rope: a row of q or k has 3 D numbers, one of v 2 D. Rows are 16 bytes longer,
// so that the eight that ldmatrix reads at once are in different banks. Bound by tensor cores and shared memory.
template <int D> struct Rows {  // STEP rows are a tile: two blocks then fit on an SM of Hopper; the others are bytes
    enum { STEP = D == 64 ? 32 : 64, LONG = 6 * D + 16, SHORT = 4 * D + 16, BYTES = STEP * (LONG + SHORT) };
};
enum { ATTENTION_THREADS = 128, QUERIES = 128, OWN = 64 };  // rows that a block owns: in forward, in backward
// Moves a block's own copies of s and w to its sequence and head. Returns H * (the sequence's first token) + head.
template <int D> DEVICE int64_t select_head(Saved& s, Work& w, const Config& c) {
    const int64_t first = blockIdx.x / c.H * (int64_t)c.T, at = first * c.H + blockIdx.x % c.H;
    s.q += at * 3 * D, s.kv += at * 4 * D, s.kva += first * c.KVA + c.kv_lora, w.dattention += at * 2 * D;
    return at;
}
// Begins to copy ROWS rows of WIDTH numbers from row `first` on. Rows from T on become zeros.
template <int WIDTH, int ROWS>
DEVICE void copy_rows(uint8_t* to, int pitch, const bf16* from, int64_t stride, int first, int T) {
    for (int i = threadIdx.x; i < ROWS * (WIDTH / 8); i += ATTENTION_THREADS) {
        const int row = i / (WIDTH / 8), vector = i % (WIDTH / 8);
        const bool inside = first + row < T;
        copy_async(to + row * pitch + vector * 16, from + (inside ? (first + row) * stride + vector * 8 : 0), inside);
    }
}
// Keys with values: a key is its head's part, then the part with position. Or queries with dout.
template <int D, int ROWS, bool KEYS>
DEVICE void copy_pair(uint8_t* a, uint8_t* b, const Saved& s, const Work& w, const Config& c, int first) {
    copy_rows<KEYS ? 2 * D : 3 * D, ROWS>(a, Rows<D>::LONG, KEYS ? s.kv : s.q, c.H * (KEYS ? 4 : 3) * D, first, c.T);
    if (KEYS) copy_rows<D, ROWS>(a + 4 * D, Rows<D>::LONG, s.kva, c.KVA, first, c.T);
    copy_rows<2 * D, ROWS>(b, Rows<D>::SHORT, KEYS ? s.kv + 2 * D : w.dattention, c.H * (KEYS ? 4 : 2) * D, first, c.T);
}
// s (16 M, 8 N) = a b^T over WIDTH numbers of rows in shared memory. y has b of two products, 8 rows each: m % 2.
template <int WIDTH, int M, int N>
DEVICE void multiply_rows(float (&s)[M][N][4], const uint8_t* a, const uint8_t* b, int pitch) {
    const int lane = threadIdx.x % 32;
    a += lane % 16 * pitch + lane / 16 * 16;
    b += (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 16;
    memset(s, 0, sizeof(s));
    for (int k = 0; k < WIDTH / 16; k++) {
        uint32_t x[M][4], y[4];
        for (int m = 0; m < M; m++) ldmatrix<false>(x[m], a + m * 16 * pitch + k * 32);
        for (int n = 0; n < N; n += 2) {
            ldmatrix<false>(y, b + n * 8 * pitch + k * 32);
            for (int m = 0; m < 2 * M; m++) mma(s[m / 2][n + m % 2], x[m / 2], y + m % 2 * 2);
        }
    }
}
// d (16 M, 8 N) += p b: p (16 M, 16 K) in registers, b's 16 K rows in shared memory
template <int M, int K, int N>
DEVICE void multiply_add(float (&d)[M][N][4], const uint32_t (&p)[M][K][4], const uint8_t* b, int pitch) {
    b += threadIdx.x % 16 * pitch + threadIdx.x % 32 / 16 * 16;
    for (int i = 0; i < K * N / 2; i++) {
        const int k = i / (N / 2), n = i % (N / 2) * 2;
        uint32_t y[4];
        ldmatrix<true>(y, b + k * 16 * pitch + n * 16);
        for (int m = 0; m < 2 * M; m++) mma(d[m / 2][n + m % 2], p[m / 2][k], y + m % 2 * 2);
    }
}
// Sums, rounded, as a left operand: two neighbouring d of mma.sync are an a, each with its rows g, then g + 8.
template <int M, int N> DEVICE void pack_tile(uint32_t (&p)[M][N / 2][4], const float (&s)[M][N][4]) {
    for (int i = 0; i < M * N * 2; i++) {
        const float* pair = &s[i / (2 * N)][i / 2 % N][i % 2 * 2];
        p[i / (2 * N)][i / 4 % (N / 2)][i % 4] = pack(pair[0], pair[1]);
    }
}
// Calls f(x, i, column) for each number x that a lane holds of s: in row 8 i + lane / 4.
template <int M, int N, typename F> DEVICE void for_each(float (&s)[M][N][4], F f) {
    for (int i = 0; i < M * N * 4; i++)
        f(s[i / 4 / N][i / 4 % N][i % 4], i / 4 / N * 2 + i % 4 / 2, i / 4 % N * 8 + threadIdx.x % 4 * 2 + i % 2);
}
// A block owns 128 queries, a warp 32 of them, and walks the keys up to the diagonal. Online softmax: when a row's
// largest number `top` rises, its sum and out shrink. The longest blocks come first.
template <int D>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2) attention_forward_kernel(Saved s, Work w, Config c) {
    extern __shared__ __align__(128) uint8_t memory[];
    enum { STEP = Rows<D>::STEP, LONG = Rows<D>::LONG, BYTES = Rows<D>::BYTES };
    uint8_t *own = memory, *keys = own + QUERIES * LONG, *values = keys + STEP * LONG;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = (gridDim.y - 1 - blockIdx.y) * QUERIES, row = first + warp * 32;  // of the block, of the warp
    const int tiles = (min(first + QUERIES, c.T) + STEP - 1) / STEP;
    const int64_t at = select_head<D>(s, w, c);
    float o[2][D / 4][4] = {}, top[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sum[4] = {};
    copy_rows<3 * D, QUERIES>(own, LONG, s.q, c.H * 3 * D, first, c.T);
    copy_pair<D, STEP, true>(keys, values, s, w, c, 0);
    copy_commit();
    for (int n = 0; n < tiles; n++) {
        // Tile n has arrived, and all warps are done with the other buffer.
        const int buffer = n % 2 * BYTES, other = BYTES - buffer;
        copy_wait<0>();
        __syncthreads();
        if (n + 1 < tiles) copy_pair<D, STEP, true>(keys + other, values + other, s, w, c, (n + 1) * STEP);
        copy_commit();
        if (n * STEP > row + 31) continue;  // all keys are after the warp's last query
        float z[2][STEP / 8][4], most[4], shrink[4];
        uint32_t p[2][STEP / 16][4];
        multiply_rows<3 * D>(z, own + warp * 32 * LONG, keys + buffer, LONG);
        if (n * STEP + STEP - 1 > row)  // some are after its first query
            for_each(z, [&](float& x, int i, int column) {
                if (n * STEP + column > row + 8 * i + lane / 4) x = -INFINITY;
            });
        for (int i = 0; i < 4; i++) most[i] = top[i];
        for_each(z, [&](float& x, int i, int) { most[i] = fmaxf(most[i], x); });
        for (int i = 0; i < 4; i++) {  // four neighbouring lanes share a row
            most[i] = fmaxf(most[i], __shfl_xor_sync(ALL, most[i], 1));
            most[i] = fmaxf(most[i], __shfl_xor_sync(ALL, most[i], 2));
            shrink[i] = exp2_fast((top[i] - most[i]) * c.scale2);
            sum[i] *= shrink[i], top[i] = most[i], most[i] *= c.scale2;
        }
        for_each(z, [&](float& x, int i, int) { x = exp2_fast(x * c.scale2 - most[i]), sum[i] += x; });  // P
        for_each(o, [&](float& x, int i, int) { x *= shrink[i]; });
        pack_tile(p, z);
        multiply_add(o, p, values + buffer, Rows<D>::SHORT);
    }
    for (int i = 0; i < 4; i++) {
        const int t = row + 8 * i + lane / 4;
        bf16* to = s.attention + (at + (int64_t)t * c.H) * 2 * D + lane % 4 * 2;
        sum[i] += __shfl_xor_sync(ALL, sum[i], 1);
        sum[i] += __shfl_xor_sync(ALL, sum[i], 2);
        if (t >= c.T) continue;
        if (lane % 4 == 0) s.lse[(int64_t)blockIdx.x * c.T + t] = top[i] * c.scale2 + log2f(sum[i]);
        for (int n = 0; n < D / 4; n++)
            store2(to + n * 8, o[i / 2][n][i % 2 * 2] / sum[i], o[i / 2][n][i % 2 * 2 + 1] / sum[i]);
    }
}
// Backward:  delta = <dout, out>,  dP = dout v^T,  dS = P (dP - delta) / sqrt(QK),
//   dq = dS k,  dk = dS^T q,  dv = P^T dout.  P = 2^(scale2 S - lse), because lse is log2 of the softmax's sum
// Two launches: blocks that own 64 queries compute dq, and leave lse and delta in w.delta. Then, with KEYS, blocks that
// own 64 keys compute dk and dv, with S and P transposed. Both compute S and dP, but each sum stays in one warp's
// registers, without atomics. A head leaves its gradient of k_rope in dk_rope.
template <int D, bool KEYS> __global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_backward_kernel(Saved s, Work w, Config c) {
    extern __shared__ __align__(128) uint8_t memory[];
    enum { STEP = Rows<D>::STEP, LONG = Rows<D>::LONG, SHORT = Rows<D>::SHORT, BYTES = Rows<D>::BYTES };
    __shared__ float2 of_query[2][STEP];  // KEYS: lse and delta of a tile's queries
    uint8_t *own = memory, *own2 = own + OWN * LONG, *tile = own2 + OWN * SHORT, *tile2 = tile + STEP * LONG;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = (KEYS ? blockIdx.y : gridDim.y - 1 - blockIdx.y) * OWN, row = first + warp * 16;
    const int begin = KEYS ? first / STEP : 0, end = ((KEYS ? c.T : min(first + OWN, c.T)) + STEP - 1) / STEP;
    const int64_t at = select_head<D>(s, w, c);
    float2 of_row[2], *of_head = w.delta + (int64_t)blockIdx.x * c.T;
    auto copy_next = [&](int n) {
        const int buffer = n % 2 * BYTES, i = threadIdx.x, t = n * STEP + i;
        copy_pair<D, STEP, !KEYS>(tile + buffer, tile2 + buffer, s, w, c, n * STEP);
        if (KEYS && i < STEP) of_query[n % 2][i] = t < c.T ? of_head[t] : make_float2(INFINITY, 0);  // 2^-inf: P is 0
        copy_commit();
    };
    for (int i = 0; i < 2 && !KEYS; i++) {  // four lanes share a row; those behind the end repeat row T - 1
        const int t = min(row + 8 * i + lane / 4, c.T - 1);
        const int64_t from = (int64_t)t * c.H * 2 * D + lane % 4 * (D / 2);
        float delta = 0;
        for (int j = 0; j < D / 2; j += 8)
            delta += sum_of(load(w.dattention + from + j) * load(s.attention + at * 2 * D + from + j));
        delta += __shfl_xor_sync(ALL, delta, 1);
        delta += __shfl_xor_sync(ALL, delta, 2);
        of_row[i] = make_float2(s.lse[(int64_t)blockIdx.x * c.T + t], delta);
        if (lane % 4 == 0) of_head[t] = of_row[i];
    }
    float d[1][D * 3 / 8][4] = {}, dv[1][KEYS ? D / 4 : 2][4] = {};
    copy_pair<D, OWN, KEYS>(own, own2, s, w, c, first);
    copy_next(begin);
    for (int n = begin; n < end; n++) {
        const int buffer = n % 2 * BYTES;
        copy_wait<0>();
        __syncthreads();
        if (n + 1 < end) copy_next(n + 1);
        if (KEYS ? n * STEP + STEP - 1 < row : n * STEP > row + 15) continue;
        float z[1][STEP / 8][4], dp[1][STEP / 8][4];
        uint32_t p[1][STEP / 16][4];
        multiply_rows<3 * D>(z, own + warp * 16 * LONG, tile + buffer, LONG);
        multiply_rows<2 * D>(dp, own2 + warp * 16 * SHORT, tile2 + buffer, SHORT);
        for_each(z, [&](float& x, int i, int column) {
            const int distance = n * STEP + column - (row + 8 * i + lane / 4);
            const float2 number = KEYS ? of_query[n % 2][column] : of_row[i];
            float& ds = dp[0][column / 8][i * 2 + column % 2];  // dP at the place of x
            x = (KEYS ? distance >= 0 : distance <= 0) ? exp2_fast(x * c.scale2 - number.x) : 0;
            ds = x * (ds - number.y);
        });
        pack_tile(p, z);
        if (KEYS) multiply_add(dv, p, tile2 + buffer, SHORT);  // dv += P^T dout
        pack_tile(p, dp);
        multiply_add(d, p, tile + buffer, LONG);  // dq += dS k, or dk += dS^T q
    }
    for (int i = 0; i < 2; i++) {
        const int t = row + 8 * i + lane / 4;
        bf16* to = (KEYS ? w.dkv : w.dq) + (at + (int64_t)t * c.H) * (KEYS ? 4 : 3) * D + lane % 4 * 2;
        float* part = w.dk_rope + ((int64_t)blockIdx.x * c.T + t) * D + lane % 4 * 2;
        for (int n = 0; n < D * 3 / 8 && t < c.T; n++) {
            const float x = d[0][n][i * 2] * c.scale, y = d[0][n][i * 2 + 1] * c.scale;
            if (KEYS && n >= D / 4) *(float2*)(part + n * 8 - 2 * D) = make_float2(x, y);
            if (!KEYS || n < D / 4) store2(to + n * 8, x, y);
            if (KEYS && n < D / 4) store2(to + 2 * D + n * 8, dv[0][n][i * 2], dv[0][n][i * 2 + 1]);
        }
    }
}
template <int D> static void attention_of(const Saved* s, int n, int backward) {
    const dim3 grid(n / c.T * c.H, blocks(c.T, backward ? OWN : QUERIES));
    const size_t own = backward ? OWN * (Rows<D>::LONG + Rows<D>::SHORT) : QUERIES * Rows<D>::LONG;
    const size_t shared = own + 2 * Rows<D>::BYTES;
    if (!backward) return launch(attention_forward_kernel<D>, grid, ATTENTION_THREADS, shared, *s, w, c);
    launch(attention_backward_kernel<D, false>, grid, ATTENTION_THREADS, shared, *s, w, c);
    launch(attention_backward_kernel<D, true>, grid, ATTENTION_THREADS, shared, *s, w, c);
}
static void attention(const Saved* s, int n, int backward) {
    (c.rope == 16 ? attention_of<16> : c.rope == 32 ? attention_of<32> : attention_of<64>)(s, n, backward);
}

// SwiGLU: a (n, f) = silu(g) u, for h (n, 2f) = g, then u. A warp takes a row. Bound by memory.
__global__ void swiglu_forward_kernel(bf16* a, const bf16* h, int n, int f) {
    const int64_t row = blockIdx.x * 8 + threadIdx.x / 32;
    for (int at = threadIdx.x % 32 * 8; at < f && row < n; at += 256) {
        const Eight g = load(h + row * 2 * f + at), u = load(h + row * 2 * f + f + at);
        store(a + row * f + at, g * g.map(sigmoid) * u);
    }
}
// With s = sigmoid(g):  du = da g s,  dg = da u s (1 + g (1 - s)). a overwrites da, because the next product needs it.
// Rows of experts have a gate: dgate = <dy, W2 a> = <W2^T dy, a>. So da comes as W2^T dy, without the gate, and a
// leaves with it, for dW2 = sum dy (gate a)^T. Pad rows are zeros. Bound by memory.
__global__ void swiglu_backward_kernel(bf16* dh, bf16* da, const bf16* h, Saved s, Work w, int routed, int n, int f) {
    const int64_t row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= n || (routed && s.tile_expert[row / TILE] < 0)) return;
    const int choice = routed ? s.choice[row] : -1;
    const float gate = choice >= 0 ? s.gate[choice] : 1;
    float dot = 0;
    for (int at = threadIdx.x % 32 * 8; at < f; at += 256) {
        const Eight g = load(h + row * 2 * f + at), u = load(h + row * 2 * f + f + at), d = load(da + row * f + at);
        const Eight sig = g.map(sigmoid), silu = g * sig;
        dot += sum_of(d * silu * u);
        store(da + row * f + at, silu * u * gate);
        store(dh + row * 2 * f + at, d * u * (sig + silu - silu * sig) * gate);
        store(dh + row * 2 * f + f + at, d * silu * gate);
    }
    dot = warp_sum(dot);
    if (choice >= 0 && threadIdx.x % 32 == 0) w.dgate[choice] = dot;
}

// Quantile balancing: 16 bins in each octave from 2^-19 to 2, on both sides of 0, and one in the middle. A float's bits
// have the float's order, and the upper four of its mantissa are the bins of an octave.
enum { SIDE = 20 * 16, BINS = 2 * SIDE + 1 };
DEVICE int margin_bin(float margin) {
    const int above = ((int)(__float_as_uint(margin) & 0x7fffffff) - (int)__float_as_uint(0x1p-19f)) >> 19;
    const int bin = min(max(above + 1, 0), (int)SIDE);
    return margin < 0 ? SIDE - bin : SIDE + bin;
}
DEVICE double margin_edge(int bin) {  // the lower one; the upper edge is that of the next bin
    const int step = bin <= SIDE ? SIDE - bin : bin - SIDE - 1;
    return (bin <= SIDE ? -1 : 1) * ldexp(1 + step % 16 / 16.0, step / 16 - 19);
}
// Index of the largest of E values, the first of equals, which becomes -inf. A warp searches: `order` maps the bits of
// floats to unsigned numbers of the same order, for which a warp has a maximum in one instruction.
DEVICE int take_best(float* value, int E) {
    unsigned top = 0, best = E;
    const auto order = [](unsigned bits) { return bits & 0x80000000 ? ~bits : bits | 0x80000000; };
    const auto key = [&](int e) { return order(__float_as_uint(value[e])); };
    for (int e = threadIdx.x % 32; e < E; e += 32) top = max(top, key(e));
    top = __reduce_max_sync(ALL, top);
    for (int e = threadIdx.x % 32; e < E; e += 32)
        if (key(e) == top) best = min(best, (unsigned)e);
    best = __reduce_min_sync(ALL, best);
    if (threadIdx.x % 32 == 0) value[best] = -INFINITY;
    __syncwarp();
    return (int)best;
}
// Counts of a router: tokens of each expert (E), its places among a token's K largest scores (B, E), margins (BINS, E).
struct Counts { int *load, *best, *margins; };
static __host__ __device__ int64_t counts_of_block(const Config& c) { return (1 + (int64_t)c.B + BINS) * c.E; }
static __host__ __device__ Counts counts_of(const Work& w, const Config& c, int unit) {
    int* load = w.counts + unit * counts_of_block(c);
    return {load, load + c.E, load + c.E + c.B * c.E};
}
// scores = sigmoid(logits). A token's experts are the K with the largest score + bias. Their gates are their scores,
// divided by the sum. An expert's margin is the largest score + bias that is not selected, minus its own. A warp takes
// a token. Bound by latency: 2 K + 1 searches, one after another.
__global__ void __launch_bounds__(256) router_forward_kernel(Saved s, Work w, Config c, int unit, int n) {
    __shared__ float of_warp[2][8][MOST_EXPERTS];  // score + bias, score; take_best changes both
    __shared__ int load[MOST_EXPERTS];             // the block's tokens of each expert
    const Counts counts = counts_of(w, c, unit);
    const int E = c.E, K = c.K, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float *biased = of_warp[0][warp], *plain = of_warp[1][warp], *bias = w.bias + unit * E;
    for (int e = threadIdx.x; e < E; e += 256) load[e] = 0;
    __syncthreads();
    for (int64_t token = blockIdx.x * 64 + warp; token < min(n, (int)(blockIdx.x + 1) * 64); token += 8) {
        float *score = s.scores + token * E, mine = 0, sum = 0;
        int chosen = 0;
        for (int e = lane; e < E; e += 32) {
            score[e] = plain[e] = 1 / (1 + expf(-w.logits_router[token * E + e]));
            biased[e] = plain[e] + bias[e];
        }
        __syncwarp();  // the lanes' scores are there for all of them
        for (int k = 0; k < K; k++) {
            const int best = take_best(biased, E), e = take_best(plain, E);
            sum += score[best];
            if (lane == k) mine = score[best], chosen = best;
            if (lane == 0) atomicAdd(&counts.best[token / c.T * E + e], 1), atomicAdd(&load[best], 1);
        }
        if (lane < K) s.expert[token * K + lane] = chosen, s.gate[token * K + lane] = mine / sum;
        const int next = take_best(biased, E);
        const float most = score[next] + bias[next];
        for (int e = lane; e < E; e += 32)
            atomicAdd(&counts.margins[margin_bin(most - (score[e] + bias[e])) * E + e], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 256) atomicAdd(&counts.load[e], load[e]);
}
// A score's gradient comes through its token's gates, and from the auxiliary loss of the sequence (DeepSeek-V3,
// equations 17 to 20). There f_e is E / (K T) times the count of `best`:
//   ds_k = (dgate_k - sum_j dgate_j gate_j) / sum_j s_j       of the selected experts
//   ds_e = AUX / N (f_e - sum_j f_j s_j / all) / all,   all = sum_j s_j
// A warp takes a token. Bound by latency: few numbers a token.
__global__ void router_backward_kernel(Saved s, Work w, Config c, int unit, int n) {
    const int64_t token = blockIdx.x * 8 + threadIdx.x / 32;
    const int E = c.E, K = c.K, lane = threadIdx.x % 32;
    if (token >= n) return;
    const int* count = counts_of(w, c, unit).best + token / c.T * E;
    const float *score = s.scores + token * E, f = (float)E / ((float)K * c.T);
    float all = 0, dot_f = 0;
    for (int e = lane; e < E; e += 32) all += score[e], dot_f += f * count[e] * score[e];
    all = warp_sum(all), dot_f = warp_sum(dot_f) / all;
    const int chosen = lane < K ? s.expert[token * K + lane] : -1;
    const float d = lane < K ? w.dgate[token * K + lane] : 0, selected = warp_sum(lane < K ? score[chosen] : 0);
    const float dot_gate = warp_sum(lane < K ? d * s.gate[token * K + lane] : 0);
    for (int e = lane; e - lane < E; e += 32) {  // shuffles need all lanes, those with e >= E too
        float ds = e < E ? (float)c.aux / n * (f * count[e] - dot_f) / all : 0;
        for (int k = 0; k < K; k++) {
            const float of_choice = (__shfl_sync(ALL, d, k) - dot_gate) / selected;
            ds += __shfl_sync(ALL, chosen, k) == e ? of_choice : 0;
        }
        if (e < E) w.dlogits_router[token * E + e] = __float2bfloat16(ds * score[e] * (1 - score[e]));
    }
}
// Once a step: each bias rises by the K/E quantile of its margins, interpolated inside its bin. The biases then get the
// mean 0. A block for each MoE block, a thread for each expert.
__global__ void balance_kernel(Work w, Config c, int n, Stats* stats) {
    const int E = c.E, *margins = counts_of(w, c, blockIdx.x).margins + threadIdx.x;  // of this expert, E apart
    const bool mine = threadIdx.x < E;
    const double wanted = (double)n * c.K / E;
    float* bias = w.bias + blockIdx.x * E + threadIdx.x;
    double raised = 0;
    if (mine) {
        int below = 0, bin = 0;
        for (; below + margins[bin * E] < wanted; bin++) below += margins[bin * E];
        const double low = margin_edge(bin), share = (wanted - below) / margins[bin * E];
        raised = *bias + (float)(low + share * (margin_edge(bin + 1) - low));
    }
    const double mean = block_sum(raised) / E;
    if (mine && stats->ok) *bias = (float)(raised - mean);
    if (mine) atomicMax(&stats->fullest, counts_of(w, c, blockIdx.x).load[threadIdx.x]);
}

// A counting sort. An expert's rows are in the order of tokens, and end at a multiple of TILE: all rows of a tile are
// one expert's. Pad rows have no token. They are read as zeros, and remain zeros in every product. A block for each
// expert reads all choices twice: its warps count those in their parts, then number them. Bound by latency.
__global__ void __launch_bounds__(1024, 1) sort_by_expert_kernel(Saved s, const int* load, Config c, int choices) {
    __shared__ int of_warp[32];
    const int mine = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int part = (choices + 1023) / 1024 * 32, from = warp * part, to = min(from + part, choices);
    int row = 0, count = 0;
    for (int e = 0; e < mine; e++) row += (load[e] + TILE - 1) / TILE * TILE;
    const int first = row, next = first + (load[mine] + TILE - 1) / TILE * TILE;  // of this expert, of the next one
    for (int i = from + lane; i < from + part; i += 32)
        count += __popc(__ballot_sync(ALL, i < to && s.expert[i] == mine));
    of_warp[warp] = count;
    __syncthreads();
    for (int i = 0; i < warp; i++) row += of_warp[i];
    for (int i = from + lane; i < from + part; i += 32) {
        const bool hit = i < to && s.expert[i] == mine;
        const unsigned hits = __ballot_sync(ALL, hit);
        const int at = row + __popc(hits & ((1u << lane) - 1));
        if (hit) s.row[i] = at, s.choice[at] = i, s.token[at] = i / c.K;
        row += __popc(hits);
    }
    for (int i = first + load[mine] + threadIdx.x; i < next; i += 1024) s.token[i] = s.choice[i] = -1;
    for (int i = first / TILE + threadIdx.x; i < next / TILE; i += 1024) s.tile_expert[i] = mine;
    for (int i = next / TILE + threadIdx.x; mine == c.E - 1 && i < c.capacity / TILE; i += 1024) s.tile_expert[i] = -1;
    if (threadIdx.x == 0) s.start[mine] = first, s.start[mine + 1] = next;
}

// Grouped GEMMs: the products of all experts' rows with their matrices, in one launch each.
//   UP        h = x W13^T, a = swiglu(h)    (rows, C) -> (rows, 2F), (rows, F)    DOWN_DW   dW2 = dy^T a: (C, F)
//   DOWN      y = a W2^T                    (rows, F) -> (rows, C)                UP_DW     dW13 = dh^T x: (2F, C)
//   DOWN_DX   da = dy W2                    (rows, C) -> (rows, F)                rows of x and dy: those of tokens
//   UP_DX     dx = dh W13                   (rows, 2F) -> (rows, C)
// A block computes 128 x 128 of the output, each of eight warps 64 x 32. Rows of tokens are not copied: cp.async reads
// them where they are. The contraction comes in steps of 64. One step is multiplied, and two more arrive in other
// stages of shared memory. A tile of an operand is 128 rows of 64 numbers, or 64 rows of 128 if rows are the
// contraction (ACROSS). Vector i of 16 bytes of row r is at place i ^ r % 8 (swizzle). So the eight vectors that
// ldmatrix reads below each other are in different banks. Bound by tensor cores: mma.sync has 2/3 of wgmma's rate.
enum Pass { UP, DOWN, DOWN_DX, UP_DX, DOWN_DW, UP_DW };
enum { DEPTH = 64, STAGES = 3, OPERAND = TILE * DEPTH * 2, GROUPED_SHARED = STAGES * 2 * OPERAND };  // bytes
// Begins to copy a tile: rows from mn and columns from k on; ACROSS: rows from k and columns from mn on. Zeros from
// mn_end and k_end on, and in pad rows. `token` names the rows, or is NULL. half > 0 is for UP: 8 rows of the gate,
// then the same 8 of up, `half` rows further. So a lane gets a gate and its up in neighbouring sums.
template <bool ACROSS>
DEVICE void copy_tile(uint8_t* to, const bf16* from, int ld, const int* token, int mn, int mn_end, int k, int k_end,
                      int half) {
    for (int j = 0; j < TILE * DEPTH / 8 / 256; j++) {
        const int i = j * 256 + threadIdx.x, row = ACROSS ? i / 16 : i / 8, vector = ACROSS ? i % 16 : i % 8;
        const int column = (ACROSS ? mn : k) + vector * 8;
        int source = half ? mn + row / 16 * 8 + row % 8 : (ACROSS ? k : mn) + row;
        bool inside = source < (ACROSS ? k_end : mn_end) && column < (ACROSS ? mn_end : k_end);
        if (half && row % 16 >= 8) source += half;
        if (token && inside) source = token[source];
        inside = inside && source >= 0;
        copy_async(to + row * (ACROSS ? 256 : 128) + (vector ^ row % 8) * 16,
                   from + (inside ? (int64_t)source * ld + column : 0), inside);
    }
}
// 16 of M or N, from `mn` on, by 16 of the contraction, number `step`: an a of mma.sync, or the b's of two.
template <bool ACROSS, bool IS_B> DEVICE void load_fragment(uint32_t (&r)[4], const uint8_t* tile, int mn, int step) {
    const int lane = threadIdx.x % 32, mn8 = IS_B ? lane / 16 : lane / 8 % 2, k8 = IS_B ? lane / 8 % 2 : lane / 16;
    const int row = ACROSS ? step * 16 + k8 * 8 + lane % 8 : mn + mn8 * 8 + lane % 8;
    const int vector = ACROSS ? mn / 8 + mn8 : step * 2 + k8;
    ldmatrix<ACROSS>(r, tile + row * (ACROSS ? 256 : 128) + (vector ^ row % 8) * 16);
}
// M: rows of dW. N: columns of the output; for UP, of a. K: the contraction, where it is not over rows.
template <Pass P> __global__ void __launch_bounds__(256, 2)
    grouped_gemm_kernel(void* out, bf16* act, const bf16* a, const bf16* b, Saved s, int M, int N, int K) {
    extern __shared__ __align__(128) uint8_t memory[];
    constexpr bool DW = P == DOWN_DW || P == UP_DW, ACROSS_B = P != UP && P != DOWN;
    constexpr int COLUMNS = P == UP ? TILE / 2 : TILE;
    const int *tokens_a = P == UP || P == DOWN_DX || P == DOWN_DW ? s.token : NULL;
    const int *tokens_b = P == UP_DW ? s.token : NULL;
    const int across = (N + COLUMNS - 1) / COLUMNS, tile = blockIdx.x / across, down = DW ? (M + TILE - 1) / TILE : 1;
    const int n = blockIdx.x % across * COLUMNS, m = (DW ? tile % down : tile) * TILE;
    const int e = DW ? tile / down : s.tile_expert[tile];
    if (e < 0) return;  // behind the last expert's rows
    const int first = DW ? s.start[e] : 0, end = DW ? s.start[e + 1] : K;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp / 4 * 64, warp_n = warp % 4 * 32;
    float d[4][4][4] = {};
    if (!DW) b += (int64_t)e * N * K * (P == UP ? 2 : 1);
    auto copy_stage = [&](int k, int stage) {
        uint8_t* to = memory + stage * 2 * OPERAND;
        if (k < end) copy_tile<DW>(to, a, DW ? M : K, tokens_a, m, DW ? M : INT32_MAX, k, end, 0);  // whole tiles
        to += OPERAND;
        if (k < end) copy_tile<ACROSS_B>(to, b, ACROSS_B ? N : K, tokens_b, n, N, k, end, P == UP ? N : 0);
        copy_commit();
    };
    for (int i = 0; i < STAGES - 1; i++) copy_stage(first + i * DEPTH, i);
    for (int k = first, stage = 0; k < end; k += DEPTH, stage = (stage + 1) % STAGES) {
        // This stage has arrived, and all warps are done with the one before, which is filled again.
        copy_wait<STAGES - 2>();
        __syncthreads();
        copy_stage(k + (STAGES - 1) * DEPTH, (stage + STAGES - 1) % STAGES);
        const uint8_t *tile_a = memory + stage * 2 * OPERAND, *tile_b = tile_a + OPERAND;
        for (int step = 0; step < DEPTH / 16; step++) {
            uint32_t x[4][4], y[2][4];
            for (int i = 0; i < 4; i++) load_fragment<DW, false>(x[i], tile_a, warp_m + i * 16, step);
            for (int j = 0; j < 2; j++) load_fragment<ACROSS_B, true>(y[j], tile_b, warp_n + j * 16, step);
            for (int i = 0; i < 16; i++) mma(d[i / 4][i % 4], x[i / 4], y[i % 4 / 2] + i % 2 * 2);
        }
    }
    // A lane stores pairs of neighbouring columns: pair i is in row-block i / 4 (8 rows) and column-block i % 4 (8
    // columns) of the warp. UP: column-blocks 0 and 1, and 2 and 3, are gate and up of the same columns.
    for (int i = 0; i < 32; i += P == UP ? 2 : 1) {
        const float *sum = &d[i / 8][i % 4][i / 4 % 2 * 2], x = sum[0], y = sum[1];
        const int row = m + warp_m + i / 4 * 8 + lane / 4;
        const int column = n + (P == UP ? warp_n / 2 + i % 4 * 4 : warp_n + i % 4 * 8) + lane % 4 * 2;
        if (column >= N || (DW && row >= M)) continue;
        const int64_t at = (int64_t)row * N + column;
        if (P == UP) {
            const float *up = sum + 4, up_x = up[0], up_y = up[1];
            bf16* h = (bf16*)out + at + (int64_t)row * N;
            store2(h, x, y), store2(h + N, up_x, up_y);
            store2(act + at, x * sigmoid(x) * up_x, y * sigmoid(y) * up_y);
        }
        if (DW) *(float2*)((float*)out + (int64_t)e * M * N + at) = make_float2(x, y);
        if (P != UP && !DW) store2((bf16*)out + at, x, y);
    }
}
template <Pass P>
static void grouped_gemm(void* out, bf16* act, const bf16* a, const bf16* b, const Saved* s, int M, int N, int K) {
    const int tiles = (P >= DOWN_DW ? c.E * blocks(M, TILE) : c.capacity / TILE) * blocks(N, P == UP ? TILE / 2 : TILE);
    launch(grouped_gemm_kernel<P>, tiles, 256, GROUPED_SHARED, out, act, a, b, *s, M, N, K);
}

// Cross-entropy: loss = -ln softmax(z)_target. The gradient of the mean overwrites the logits, unless scale is 0. A
// block reads a row twice: for the online softmax, then for the gradient, from the L2 cache. Columns from V on are
// padding. A thread without columns has top -1e30: with -inf, top - top would be NaN. Bound by memory.
__global__ void __launch_bounds__(512) cross_entropy_kernel(Work w, const int* target, int V, int Vp, float scale) {
    __shared__ float of_warp[2][16];
    bf16* z = w.logits + (int64_t)blockIdx.x * Vp;
    const int right = target[blockIdx.x];
    const float z_right = __bfloat162float(z[right]) * LOG2E;
    float top = -1e30f, sum = 0;
    for (int at = threadIdx.x * 8; at < V; at += 512 * 8) {
        Eight x = load(z + at) * LOG2E;
        float most = top;
        for (int j = 0; j < 8; j++) most = fmaxf(most, x.x[j] = at + j < V ? x.x[j] : -INFINITY);
        sum = sum * exp2_fast(top - most) + sum_of((x - most).map(exp2_fast)), top = most;
    }
    float most = top;
    for (int lane = 16; lane; lane /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, lane));
    sum = warp_sum(sum * exp2_fast(top - most));
    if (threadIdx.x % 32 == 0) of_warp[0][threadIdx.x / 32] = most, of_warp[1][threadIdx.x / 32] = sum;
    __syncthreads();  // from the warps' sums to that of the block, which comes for every thread
    top = -1e30f, sum = 0;
    for (int i = 0; i < 16; i++) top = fmaxf(top, of_warp[0][i]);
    for (int i = 0; i < 16; i++) sum += of_warp[1][i] * exp2_fast(of_warp[0][i] - top);
    if (threadIdx.x == 0) w.losses[blockIdx.x] = (log2f(sum) + top - z_right) / LOG2E;
    for (int at = threadIdx.x * 8; at < Vp && scale > 0; at += 512 * 8) {
        Eight x = (load(z + at) * LOG2E - top).map(exp2_fast) * (scale / sum);
        for (int j = 0; j < 8; j++) x.x[j] = (at + j < V ? x.x[j] : 0) - (at + j == right ? scale : 0);
        store(z + at, x);
    }
}

// --- Blocks and passes ---
// MLA, multi-head latent attention (DeepSeek-V2): keys and values come from a narrow latent. w.out (N, C) from norm1.
static void mla_forward(const Saved* s, int l, int n) {
    // Queries of all heads: from norm1, or through a normalised latent. Keys and values: the same.
    linear_forward(c.q_lora ? s->cq : s->q, s->norm1, c.q_lora ? WQA : WQ, l, n);  // (N, C) -> (N, q_lora or H QK)
    if (c.q_lora) {
        rmsnorm_forward(s->cq_norm, s->rstd_q, NULL, s->cq, c.q_lora, Q_NORM, l, n, NULL);
        linear_forward(s->q, s->cq_norm, WQ, l, n);  // (N, q_lora) -> (N, H QK)
    }
    linear_forward(s->kva, s->norm1, WKVA, l, n);  // (N, C) -> (N, kv_lora + rope)
    rmsnorm_forward(s->ckv, s->rstd_kv, NULL, s->kva, c.KVA, KV_NORM, l, n, NULL);
    linear_forward(s->kv, s->ckv, WKVB, l, n);  // (N, kv_lora) -> (N, H (nope + v))
    launch(rope_kernel, blocks((int64_t)n * (c.H + 1) * c.rope / 8, 256), 256, 0, s->q, s->kva, w, c, n, 1);
    attention(s, n, 0);
    linear_forward(w.out, s->attention, WO, l, n);  // (N, H v) -> (N, C)
}
// w.dnorm (N, C) from w.dx: the lines of forward from last to first
static void mla_backward(const Saved* s, int l, int n) {
    linear_backward(w.dattention, w.dx, s->attention, WO, l, n, 0);  // (N, C) -> (N, H v)
    attention(s, n, 1);  // -> w.dq, w.dkv, w.dk_rope
    launch(rope_kernel, blocks((int64_t)n * (c.H + 1) * c.rope / 8, 256), 256, 0, w.dq, w.dkva, w, c, n, -1);
    // The latent's part of dkva comes through the keys and values. norm1 was the input of two products: a sum.
    linear_backward(w.dckv, w.dkv, s->ckv, WKVB, l, n, 0);  // (N, H (nope + v)) -> (N, kv_lora)
    rmsnorm_backward(w.dkva, w.dckv, {}, s->kva, c.KVA, KV_NORM, l, s->rstd_kv, n, 0);
    linear_backward(w.dnorm, w.dkva, s->norm1, WKVA, l, n, 0);  // (N, kv_lora + rope) -> (N, C)
    if (c.q_lora) {
        linear_backward(w.dcq_norm, w.dq, s->cq_norm, WQ, l, n, 0);  // (N, H QK) -> (N, q_lora)
        rmsnorm_backward(w.dcq, w.dcq_norm, {}, s->cq, c.q_lora, Q_NORM, l, s->rstd_q, n, 0);
    }
    linear_backward(w.dnorm, c.q_lora ? w.dcq : w.dq, s->norm1, c.q_lora ? WQA : WQ, l, n, 1);
}
// An MLP: w.out (N, C) = W2 swiglu(W13 norm2), of hidden width f. The dense MLP, and the shared expert.
static void mlp_forward(const Saved* s, Kind kind13, Kind kind2, int unit, int n) {
    const int f = parameter[kind2].columns;
    linear_forward(s->h, s->norm2, kind13, unit, n);  // (N, C) -> (N, 2f)
    launch(swiglu_forward_kernel, blocks(n, 8), 256, 0, w.a, s->h, n, f);
    linear_forward(w.out, w.a, kind2, unit, n);  // (N, f) -> (N, C)
}
static void mlp_backward(const Saved* s, Kind kind13, Kind kind2, int unit, int n) {
    const int f = parameter[kind2].columns;
    gemm(w.da, CUDA_R_16BF, w.dx, 0, weight + place(kind2, unit), 0, n, f, c.C, 1, 0);   // (N, C) -> (N, f)
    launch(swiglu_backward_kernel, blocks(n, 8), 256, 0, w.dh, w.da, s->h, *s, w, 0, n, f);
    gemm(gradient + place(kind2, unit), CUDA_R_32F, w.dx, 1, w.da, 0, c.C, f, n, 1, 0);  // w.da is a now
    linear_backward(w.dnorm, w.dh, s->norm2, kind13, unit, n, 0);                        // (N, 2f) -> (N, C)
}

// y_n = shared(x_n) + sum_k gate_nk mlp_e(x_n), e = expert_nk: w.out and w.rows, which the next norm adds up.
static void moe_forward(const Saved* s, int l, int n) {
    const int unit = l - c.dense_layers;
    gemm(w.logits_router, CUDA_R_32F, s->norm2, 0, weight + place(ROUTER, unit), 1, n, c.E, c.C, 1, 0);  // (N, E)
    launch(router_forward_kernel, blocks(n, 64), 256, 0, *s, w, c, unit, n);
    launch(sort_by_expert_kernel, c.E, 1024, 0, *s, counts_of(w, c, unit).load, c, n * c.K);
    grouped_gemm<UP>(s->expert_h, w.rows_a, s->norm2, weight + place(W13, unit), s, 0, c.F, c.C);
    grouped_gemm<DOWN>(w.rows, NULL, w.rows_a, weight + place(W2, unit), s, 0, c.C, c.F);
    mlp_forward(s, SHARED13, SHARED2, unit, n);
}
// From w.dx, the gradient of y: w.dnorm, and w.rows from the experts. The backward of the norm adds them up.
static void moe_backward(const Saved* s, int l, int n) {
    const int unit = l - c.dense_layers;
    grouped_gemm<DOWN_DX>(w.rows_a, NULL, w.dx, weight + place(W2, unit), s, 0, c.F, c.C);
    launch(swiglu_backward_kernel, blocks(c.capacity, 8), 256, 0, w.rows_dh, w.rows_a, s->expert_h, *s, w, 1,
           c.capacity, c.F);
    grouped_gemm<DOWN_DW>(gradient + place(W2, unit), NULL, w.dx, w.rows_a, s, c.C, c.F, 0);
    grouped_gemm<UP_DX>(w.rows, NULL, w.rows_dh, weight + place(W13, unit), s, 0, c.C, 2 * c.F);
    grouped_gemm<UP_DW>(gradient + place(W13, unit), NULL, w.rows_dh, s->norm2, s, 2 * c.F, c.C, 0);
    mlp_backward(s, SHARED13, SHARED2, unit, n);
    launch(router_backward_kernel, blocks(n, 8), 256, 0, *s, w, c, unit, n);
    linear_backward(w.dnorm, w.dlogits_router, s->norm2, ROUTER, unit, n, 1);
}
// The rows of experts that block l adds to the residual stream: none where its MLP is dense.
static TokenRows rows_of(int l, int with_gate) {
    return {w.rows, saved[l].row, with_gate ? saved[l].gate : NULL, l < c.dense_layers ? 0 : c.K};
}
// From n tokens to their losses; with `train`, the logits become their gradients. x += branch is in the next norm.
static void forward(int n, int train) {
    CHECK(cudaMemsetAsync(w.counts, 0, (size_t)c.moe * counts_of_block(c) * sizeof(int)));
    for (int l = 0; l < c.L; l++) {
        const Saved* s = &saved[l];
        const bf16* table = weight + place(EMBEDDING, 0);
        if (l == 0) rmsnorm_forward(s->norm1, s->rstd1, s->x, table, c.C, NORM1, l, n, NULL, {}, w.tokens);
        if (l > 0) rmsnorm_forward(s->norm1, s->rstd1, s->x, s[-1].x2, c.C, NORM1, l, n, w.out, rows_of(l - 1, 1));
        mla_forward(s, l, n);
        rmsnorm_forward(s->norm2, s->rstd2, s->x2, s->x, c.C, NORM2, l, n, w.out);
        if (l < c.dense_layers) mlp_forward(s, DENSE13, DENSE2, l, n);
        if (l >= c.dense_layers) moe_forward(s, l, n);
    }
    rmsnorm_forward(w.norm, w.rstd, w.x, saved[c.L - 1].x2, c.C, FINAL_NORM, 0, n, w.out, rows_of(c.L - 1, 1));
    linear_forward(w.logits, w.norm, LM_HEAD, 0, n);  // (N, C) -> (N, Vp)
    launch(cross_entropy_kernel, n, 512, 0, w, w.tokens + c.B * c.T, c.V, c.Vp, train ? 1.0f / n : 0.0f);
}
// From the logits' gradients to all others. w.dx is that of x: each norm adds to it. `different`: see send_batch.
static void backward(int n, int different) {
    linear_backward(w.dnorm, w.logits, w.norm, LM_HEAD, 0, n, 0);  // (N, Vp) -> (N, C)
    rmsnorm_backward(w.dx, w.dnorm, {}, w.x, c.C, FINAL_NORM, 0, w.rstd, n, 0);
    for (int l = c.L - 1; l >= 0; l--) {
        const Saved* s = &saved[l];
        if (l < c.dense_layers) mlp_backward(s, DENSE13, DENSE2, l, n);
        if (l >= c.dense_layers) moe_backward(s, l, n);
        rmsnorm_backward(w.dx, w.dnorm, rows_of(l, 0), s->x2, c.C, NORM2, l, s->rstd2, n, 1);
        mla_backward(s, l, n);
        rmsnorm_backward(w.dx, w.dnorm, {}, s->x, c.C, NORM1, l, s->rstd1, n, 1);
    }
    const int norms = (int)(parameters - parameter[NORM1].at);
    launch(norms_backward_kernel, blocks(norms, 256), 256, 0, gradient + parameter[NORM1].at, w.dnorms, norms);
    CHECK(cudaMemsetAsync(gradient + place(EMBEDDING, 0), 0, (size_t)c.Vp * c.C * sizeof(float)));
    launch(embedding_backward_kernel, different, 64, 0, gradient + place(EMBEDDING, 0), w, c);
}

// --- Random numbers and first weights ---
// Philox 4x32-10 (Salmon et al. 2011): four numbers of 32 bits. They depend on their place alone.
static __host__ __device__ void philox(uint32_t (&r)[4], uint32_t seed, uint32_t stream, uint64_t four) {
    r[0] = (uint32_t)four, r[1] = (uint32_t)(four >> 32), r[2] = stream, r[3] = 0;
    for (uint32_t round = 0; round < 10; round++) {
        const uint64_t p = (uint64_t)0xD2511F53u * r[0], q = (uint64_t)0xCD9E8D57u * r[2];
        r[0] = (uint32_t)(q >> 32) ^ r[1] ^ (seed + round * 0x9E3779B9u), r[1] = (uint32_t)q;
        r[2] = (uint32_t)(p >> 32) ^ r[3] ^ (round * 0xBB67AE85u), r[3] = (uint32_t)p;
    }
}
static __host__ __device__ double uniform_of(uint32_t word) { return (word + 0.5) / 4294967296.0; }  // in (0, 1)
// Normal with standard deviation `std`, cut at -3 and 3, by the inverse of the distribution function; ones if std is 0.
__global__ void draw_kernel(float* master, bf16* weight, int64_t n, double std, int seed, uint32_t stream) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * 4;
    const double below = 0.0013498980316300946;  // Phi(-3)
    uint32_t word[4]; philox(word, (uint32_t)seed, stream, (uint64_t)i / 4);
    for (int k = 0; k < 4 && i + k < n; k++) {
        master[i + k] = std > 0 ? (float)(std * normcdfinv(below + (1 - 2 * below) * uniform_of(word[k]))) : 1;
        weight[i + k] = __float2bfloat16(master[i + k]);
    }
}
// Draws each matrix, or writes each gradient to the file `path`, in the order of train_moe.c. Unit u has random streams
// from u 2^20 on. Matrices that write into the residual stream start smaller: 2 L of them add up.
static void draw_or_dump(const char* path) {
    uint32_t stream = 0;
    FILE* file = path ? fopen(path, "wb") : NULL;
    if (path && !file) die(1, path, "cannot be opened");
    auto one = [&](int k, int unit, int matrix = 0) {
        const int64_t rows = k == EMBEDDING || k == LM_HEAD ? c.V : parameter[k].rows;  // without padding
        const int64_t n = rows * parameter[k].columns, at = place(k, unit) + matrix * n;
        const double smaller = k == WO || k == DENSE2 || k == SHARED2 || k == W2 ? sqrt(2.0 * c.L) : 1;
        if (parameter[k].units == 0) return;  // no query latent
        if (!file)
            return launch(draw_kernel, blocks(n, 4 * 256), 256, 0, master + at, weight + at, n,
                          k < NORM1 ? 0.02 / smaller : 0, c.seed, stream++);
        float* host = (float*)malloc((size_t)n * sizeof(float));
        CHECK(cudaMemcpy(host, gradient + at, (size_t)n * sizeof(float), cudaMemcpyDeviceToHost));
        if (fwrite(host, sizeof(float), (size_t)n, file) != (size_t)n) die(1, path, "cannot be written");
        free(host);
    };
    one(EMBEDDING, 0);
    for (int l = 0; l < c.L; l++) {
        const int routed = l >= c.dense_layers, unit = routed ? l - c.dense_layers : l;
        stream = (uint32_t)(l + 1) << 20;
        for (int k = WQA; k <= WO; k++) one(k, l);
        for (int matrix = 0; matrix < 2; matrix++) one(routed ? SHARED13 : DENSE13, unit, matrix);
        one(routed ? SHARED2 : DENSE2, unit);
        if (routed) one(ROUTER, unit);
        for (int k = NORM1; k <= NORM2; k++) one(k, l);
        for (int e = 0; routed && e < c.E; e++) one(W13, unit, 2 * e), one(W13, unit, 2 * e + 1), one(W2, unit, e);
    }
    stream = (uint32_t)(c.L + 1) << 20;
    one(LM_HEAD, 0), one(FINAL_NORM, 0);
    if (file && fclose(file)) die(1, path, "cannot be written");
}

// --- Optimizers ---
// The norm of all gradients: each block sums the squares of its part, in double. Bound by memory.
__global__ void squares_kernel(double* squares, const float* g, int64_t n) {
    double sum = 0;
    for (int64_t i = (blockIdx.x * 256 + threadIdx.x) * 8; i < n; i += (int64_t)SQUARE_BLOCKS * 256 * 8)
        sum += sum_of(load(g + i) * load(g + i));
    sum = block_sum(sum);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}
// The mean loss. A norm above `most` is scaled down to it. A step whose loss or norm is not finite is left out.
__global__ void decide_kernel(Stats* stats, const float* losses, int n, const double* squares, float most) {
    double loss = 0, norm = 0;
    for (int i = threadIdx.x; i < n; i += 1024) loss += losses[i];
    for (int i = threadIdx.x; i < SQUARE_BLOCKS; i += 1024) norm += squares[i];
    loss = block_sum(loss) / n, norm = sqrt(block_sum(norm));
    if (threadIdx.x == 0) *stats = {loss, norm, (float)(norm > most ? most / norm : 1), isfinite(loss + norm), 0};
}
// AdamW. The moments begin at 0: fix1 and fix2 correct that. A thread takes 8 numbers. Bound by memory: 30 bytes each.
__global__ void adamw_kernel(float* master, bf16* weight, float* m1, float* m2, const float* gradient, int64_t n,
                             int64_t decay_end, float lr, float decay, float fix1, float fix2, const Stats* stats) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * 8;
    if (i >= n || !stats->ok) return;
    const Eight p = load(master + i), g = load(gradient + i) * stats->clip;
    const Eight a = load(m1 + i) * BETA1 + g * (1 - BETA1), b = load(m2 + i) * BETA2 + g * g * (1 - BETA2);
    const Eight per_size = b.map([=](float x) { return 1 / (sqrtf(x * fix2) + 1e-8f); });
    const Eight next = p - (a * per_size * fix1 + p * (i < decay_end ? decay : 0)) * lr;
    store(master + i, next), store(m1 + i, a), store(m2 + i, b), store(weight + i, next);
}
// Muon (K. Jordan 2024; Moonlight, arXiv 2502.16982): the momentum of a matrix is made orthogonal by five steps  A = X
// X^T,  X = a X + (b A + c A A) X. First m = momentum m + g, u = g + momentum m (Nesterov), X = u / |u|.
__global__ void __launch_bounds__(1024)
    muon_begin_kernel(bf16* x, float* m, const float* gradient, int64_t n, const Stats* stats) {
    const int64_t first = blockIdx.x * n + threadIdx.x * 8, end = (blockIdx.x + 1) * n;
    double squares = 0;
    if (!stats->ok) return;
    for (int64_t i = first; i < end; i += 1024 * 8) {
        const Eight g = load(gradient + i) * stats->clip, a = load(m + i) * MOMENTUM + g, u = a * MOMENTUM + g;
        squares += sum_of(u * u);
        store(m + i, a), store(x + i, u);
    }
    const float per_norm = (float)(1 / (sqrt(block_sum(squares)) + 1e-7));
    for (int64_t i = first; i < end; i += 1024 * 8) store(x + i, load(x + i) * per_norm);
}
__global__ void muon_update_kernel(float* master, bf16* weight, const bf16* x, int64_t n, float lr, float size,
                                   float decay, const Stats* stats) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * 8;
    if (i >= n || !stats->ok) return;
    const Eight p = load(master + i), next = p - (load(x + i) * size + p * decay) * lr;
    store(master + i, next), store(weight + i, next);
}
// All matrices of a kind at once. cuBLAS overwrites C, so A and X are copied first. Bound by the tensor cores.
static void muon(int k, float lr) {
    const Parameter& p = parameter[k];
    const int rows = p.rows, columns = p.columns, count = p.units * p.matrices;
    const int tall = rows > columns, small = tall ? columns : rows, large = tall ? rows : columns;
    const int64_t at = p.at, n = parameter[k + 1].at - at;
    bf16 *x = w.muon_x, *next = w.muon_next, *A = w.muon_a, *B = w.muon_b;
    launch(muon_begin_kernel, count, 1024, 0, x, moment1 + at, gradient + at, (int64_t)rows * columns, stats);
    for (int iteration = 0; iteration < 5 && count; iteration++) {
        gemm(A, CUDA_R_16BF, x, tall, x, !tall, small, small, large, 1, 0, count);
        CHECK(cudaMemcpyAsync(B, A, (size_t)count * small * small * sizeof(bf16), cudaMemcpyDeviceToDevice));
        gemm(B, CUDA_R_16BF, A, 0, A, 0, small, small, small, 2.0315f, -4.7750f, count);
        CHECK(cudaMemcpyAsync(next, x, (size_t)n * sizeof(bf16), cudaMemcpyDeviceToDevice));
        gemm(next, CUDA_R_16BF, tall ? x : B, 0, tall ? B : x, 0, rows, columns, small, 1, 3.4445f, count);
        bf16* other = x; x = next, next = other;
    }
    launch(muon_update_kernel, blocks(n, 2048), 256, 0, master + at, weight + at, x, n, lr, 0.2f * sqrtf((float)large),
           (float)c.weight_decay, stats);
}
// One update. The learning rates rise in a line to their peaks, then fall along half a cosine.
static void update(int step, int n) {
    const double left = c.steps > c.warmup ? (double)(c.steps - step) / (c.steps - c.warmup) : 0;
    const double fall = FINAL_LR + (1 - FINAL_LR) * (0.5 - 0.5 * cos(acos(-1) * left));
    const double part = step <= c.warmup ? (double)step / c.warmup : fall;  // of the peaks
    const double fix1 = 1 / (1 - pow(BETA1, step)), fix2 = 1 / (1 - pow(BETA2, step));
    const int64_t at = c.adamw ? 0 : parameter[EMBEDDING].at, count = parameters - at;
    launch(squares_kernel, SQUARE_BLOCKS, 256, 0, w.squares, gradient, parameters);
    launch(decide_kernel, 1, 1024, 0, stats, w.losses, n, w.squares, (float)(c.clip > 0 ? c.clip : INFINITY));
    for (int k = 0; k < EMBEDDING && !c.adamw; k++) muon(k, (float)(c.muon_lr * part));
    launch(adamw_kernel, blocks(count, 2048), 256, 0, master + at, weight + at, moment1 + at, moment2 + at,
           gradient + at, count, parameter[NORM1].at - at, (float)(c.lr * part), (float)c.weight_decay, (float)fix1,
           (float)fix2, stats);
    launch(balance_kernel, c.moe, MOST_EXPERTS, 0, w, c, n, stats);
}

// --- Data ---
// A hash of 64 bits: the end of SplitMix64.
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
// Element i of a random permutation of 0 .. n - 1, another one for each epoch: the order of windows. A Feistel network
// permutes 0 .. 4^half - 1. It is repeated until the result is below n.
static int permute(int epoch, int i, int n) {
    const uint64_t golden = 0x9e3779b97f4a7c15u, key = mix(mix(c.seed + golden) + ((uint64_t)epoch + 1) * golden);
    int half = 1; while ((uint64_t)1 << (2 * half) < (uint64_t)n) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    uint64_t x = (uint64_t)i;
    do {
        for (uint64_t round = 0; round < 8; round++)
            x = (x & mask) << half | (x >> half ^ (mix(key + (round << 32) + (x & mask) * golden) & mask));
    } while (x >= (uint64_t)n);
    return (int)x;
}
// Window i of set 0 (training) or 1 (validation) has T + 1 tokens: the last one is a target only.
static const uint16_t** window[2]; static int windows[2];
// Adds a file: 256 numbers of four bytes, the third is the count of tokens, then tokens of two bytes.
static void read_file(int set, const char* path) {
    int32_t header[256] = {0};
    FILE* file = fopen(path, "rb");
    int good = file && fread(header, sizeof(header), 1, file) == 1 && header[0] == 20240520 && header[2] > 0;
    const size_t count = good ? (size_t)header[2] : 0;
    uint16_t* from = (uint16_t*)malloc(count * sizeof(*from) + 1);
    good = good && from && fread(from, sizeof(*from), count, file) == count;
    for (size_t i = 0; good && i < count; i++) good = from[i] < c.V;
    if (!good) die(1, path, file ? "not a whole file of tokens below --vocab" : "cannot be opened");
    fclose(file);
    window[set] = (const uint16_t**)realloc(window[set], (windows[set] + count / c.T) * sizeof(*window[set]));
    for (size_t at = 0; at + c.T < count; at += c.T) window[set][windows[set]++] = from + at;
}
// The batch, in pinned memory, and its copy w.tokens on the GPU: inputs (N), targets (N), order (N), start (N + 1).
static int* batch;
static void read_window(const uint16_t* from, int i) {
    for (int j = 0; j < c.T; j++) batch[i * c.T + j] = from[j], batch[(c.B + i) * c.T + j] = from[j + 1];
}
// Sends a batch of n tokens, their places sorted by token, and where each token begins there. Returns how many differ.
static int send_batch(int n) {
    static int* next = (int*)malloc((size_t)(c.V + 1) * sizeof(int));  // (V + 1): a token's next place in `order`
    int *order = batch + 2 * c.B * c.T, *start = order + c.B * c.T, different = 0;
    memset(next, 0, (size_t)(c.V + 1) * sizeof(int));
    for (int i = 0; i < n; i++) next[batch[i] + 1]++;
    for (int v = 0; v < c.V; v++) {
        if (next[v + 1]) start[different++] = next[v];
        next[v + 1] += next[v];
    }
    start[different] = n;
    for (int i = 0; i < n; i++) order[next[batch[i]]++] = i;
    CHECK(cudaMemcpyAsync(w.tokens, batch, (size_t)(4 * c.B * c.T + 1) * sizeof(int), cudaMemcpyHostToDevice));
    return different;
}
// Mean loss over the windows, in whole batches.
static double validate(void) {
    const int most = c.val_tokens / c.T, batches = min(windows[1], most) / c.B;
    double loss = 0; Stats s;
    for (int k = 0; k < batches; k++) {
        for (int i = 0; i < c.B; i++) read_window(window[1][k * c.B + i], i);
        send_batch(c.B * c.T), forward(c.B * c.T, 0);
        launch(decide_kernel, 1, 1024, 0, stats, w.losses, c.B * c.T, w.squares, (float)c.clip);
        CHECK(cudaMemcpy(&s, stats, sizeof(s), cudaMemcpyDeviceToHost));
        loss += s.loss / batches;
    }
    return loss;
}
// Bytes, one after another, from an end of text on. Each computes its whole context again.
static void sample(void) {
    int *text = (int*)calloc((size_t)c.sample + 1, sizeof(int)), v = END_OF_TEXT;
    for (int n = 1; n <= c.sample; n++) {
        const int first = n < c.T ? 0 : n - c.T;  // of the context; no token sees the later ones
        bf16 logits[END_OF_TEXT + 1]; double p[END_OF_TEXT + 1], sum = 0; uint32_t word[4];
        text[n - 1] = v;
        for (int i = 0; i < c.T; i++) batch[i] = first + i < n ? text[first + i] : 0;
        send_batch(c.T), forward(c.T, 0);
        CHECK(cudaMemcpy(logits, w.logits + (int64_t)(n - 1 - first) * c.Vp, sizeof(logits), cudaMemcpyDeviceToHost));
        for (v = 0; v < c.V; v++) sum += p[v] = exp(__bfloat162float(logits[v]) / TEMPERATURE);
        philox(word, (uint32_t)c.seed, UINT32_MAX, (uint64_t)n / 4);
        sum *= uniform_of(word[n % 4]);
        for (v = 0; v < c.V - 1 && sum > p[v]; v++) sum -= p[v];
        if (v == END_OF_TEXT) break;
        putchar(v);
    }
    putchar('\n');
}

// --- Memory, options, main ---
static void allocate_everything(void) {
    const int64_t N = (int64_t)c.B * c.T, C = c.C, H = c.H, rows = c.capacity, F = c.F, E = c.E, sF = c.shared * F;
    const int64_t M = c.dense_layers && c.dense_ffn > sF ? c.dense_ffn : sF, latent = c.q_lora;
    allocate(parameters, &master, 1, &gradient, 1, &moment1, 1, &moment2, 1, &weight, 1);
    saved = (Saved*)calloc((size_t)c.L, sizeof(Saved));
    for (int l = 0; l < c.L; l++) {
        Saved* s = &saved[l];
        allocate(N, &s->x, C, &s->norm1, C, &s->x2, C, &s->norm2, C, &s->cq, latent, &s->cq_norm, latent, &s->q,
                 H * c.QK, &s->kva, c.KVA, &s->ckv, c.kv_lora, &s->kv, H * c.KV, &s->attention, H * c.v, &s->lse, H,
                 &s->rstd1, 1, &s->rstd_q, 1, &s->rstd_kv, 1, &s->rstd2, 1);
        allocate(N, &s->h, 2 * (l < c.dense_layers ? c.dense_ffn : sF));
        if (l < c.dense_layers) continue;  // no router and experts
        allocate(N, &s->scores, E, &s->gate, c.K, &s->expert, c.K, &s->row, c.K);
        allocate(rows, &s->expert_h, 2 * F, &s->token, 1, &s->choice, 1, &s->tile_expert, 1);
        allocate(1, &s->start, E + 1);
    }
    allocate(N, &w.x, C, &w.norm, C, &w.out, C, &w.dx, C, &w.dnorm, C, &w.a, M, &w.da, M, &w.dh, 2 * M, &w.dattention,
             H * c.v, &w.dq, H * c.QK, &w.dkva, c.KVA, &w.dkv, H * c.KV, &w.dckv, c.kv_lora, &w.dcq, latent,
             &w.dcq_norm, latent, &w.dlogits_router, E, &w.logits_router, E, &w.dk_rope, H * c.rope, &w.delta, H,
             &w.dgate, c.K, &w.logits, c.Vp, &w.losses, 1, &w.rstd, 1, &w.tokens, 5);
    allocate(rows, &w.rows_a, F, &w.rows_dh, 2 * F, &w.rows, C);
    allocate(NORM_BLOCKS, &w.dnorms, parameters - parameter[NORM1].at);  // NORM1 to FINAL_NORM
    allocate(c.moe, &w.bias, E, &w.counts, counts_of_block(c));
    allocate(1, &stats, 1, &w.squares, SQUARE_BLOCKS, &w.positions, c.T * c.rope / 2);
    int64_t x = 0; for (int k = 0; k < EMBEDDING && !c.adamw; k++) x = max(x, parameter[k + 1].at - parameter[k].at);
    allocate(1, &w.muon_x, x, &w.muon_next, x, &w.muon_a, x, &w.muon_b, x);  // x: the largest kind; A, B are not larger
    float2* turn = (float2*)malloc((size_t)c.T * c.rope / 2 * sizeof(float2));
    for (int i = 0; i < c.T * c.rope / 2; i++) {
        const double angle = i / (c.rope / 2) * pow(10000, -2.0 * (i % (c.rope / 2)) / c.rope);
        turn[i] = make_float2((float)cos(angle), (float)sin(angle));
    }
    CHECK(cudaMemcpy(w.positions, turn, (size_t)c.T * c.rope / 2 * sizeof(float2), cudaMemcpyHostToDevice));
    free(turn);
    CHECK(cublasCreate(&cublas));
    CHECK(cudaMallocHost((void**)&batch, (size_t)(4 * N + 1) * sizeof(int)));
}
// tiny|small [--OPTION NUMBER ...] TRAIN ... VAL. Returns the place of the first TRAIN.
static int read_options(int argc, char** argv) {
    const int small = argc > 1 && strcmp(argv[1], "small") == 0, tiny = argc > 1 && strcmp(argv[1], "tiny") == 0;
    const auto set = [](int k, double x) { if (k < WHOLE) (&c.L)[k] = (int)x; else (&c.lr)[k - WHOLE] = x; };
    int i = 2;
    for (int k = 0; k < OPTION_COUNT; k++) set(k, small ? OPTIONS[k].small : OPTIONS[k].tiny);
    for (; i + 1 < argc && strncmp(argv[i], "--", 2) == 0; i += 2) {
        char* end; const double number = strtod(argv[i + 1], &end);
        int k = 0; while (k < OPTION_COUNT && strcmp(argv[i] + 2, OPTIONS[k].name)) k++;
        if (k == OPTION_COUNT) die(2, argv[i], "no such option; without arguments, the program names all");
        const int is_number = end > argv[i + 1] && *end == 0, is_whole = number == floor(number);
        if (!is_number || (k < WHOLE && !is_whole) || !(number >= OPTIONS[k].least && number <= INT32_MAX))
            fprintf(stderr, "%s: needs a %s from %g to %d\n", argv[i], k < WHOLE ? "whole number" : "number",
                    OPTIONS[k].least, INT32_MAX), exit(2);
        set(k, number);
    }
    if ((!small && !tiny) || argc - i < 2) {
        for (const auto& option : OPTIONS) fprintf(stderr, "--%s ", option.name);
        die(2, "\nusage", "tiny|small [--OPTION NUMBER ...] TRAIN.bin ... VAL.bin");
    }
    if (c.nope != 2 * c.rope || c.v != c.nope || (c.rope != 16 && c.rope != 32 && c.rope != 64))
        die(2, "--rope-dim", "must be 16, 32 or 64, and --nope-dim and --v-dim twice that");
    if ((c.C | c.q_lora | c.kv_lora | c.dense_ffn | c.F | c.E) % 8)
        die(2, "--dim, --q-lora, --kv-lora, --dense-ffn, --expert-ffn, --experts", "must be multiples of 8");
    if (c.E > MOST_EXPERTS) die(2, "--experts", "must be at most 256");
    if (c.K > 32 || c.K >= c.E) die(2, "--top-k", "must be below --experts, and at most 32");
    if (c.dense_layers > c.L) die(2, "--dense-layers", "must be at most --layers");
    if (c.val_tokens / c.T < c.B) die(2, "--val-tokens", "must be at least a batch: --batch times --seq-len");
    c.QK = c.nope + c.rope, c.KV = c.nope + c.v, c.KVA = c.kv_lora + c.rope, c.Vp = (c.V + 127) / 128 * 128;
    c.moe = c.L - c.dense_layers, c.capacity = (c.B * c.T * c.K + TILE - 1) / TILE * TILE + c.E * TILE;
    c.scale = 1 / sqrtf((float)c.QK), c.scale2 = c.scale * LOG2E;
    return i;
}
int main(int argc, char** argv) {
    const int first = read_options(argc, argv), N = c.B * c.T;
    for (int i = first; i < argc; i++) read_file(i + 1 == argc, argv[i]);
    if (windows[0] < 1) die(2, argv[first], "needs more than --seq-len tokens");
    if (windows[1] < c.B) die(2, argv[argc - 1], "needs more than --batch times --seq-len tokens");
    plan_parameters(), allocate_everything(), draw_or_dump(NULL);
    printf("%.1f million parameters, %d windows, %d for validation\n", parameters * 1e-6, windows[0], windows[1]);
    for (int step = 1; step <= c.steps; step++) {
        const auto began = std::chrono::steady_clock::now();
        for (int i = 0; i < c.B; i++) {
            const int64_t k = (int64_t)(step - 1) * c.B + i;  // counts windows over all epochs
            read_window(window[0][permute((int)(k / windows[0]), (int)(k % windows[0]), windows[0])], i);
        }
        const int different = send_batch(N);
        forward(N, 1), backward(N, different);
        if (c.dump && step == 1) draw_or_dump("gradients");
        update(step, N);
        Stats s;  // the host waits here alone
        CHECK(cudaMemcpy(&s, stats, sizeof(s), cudaMemcpyDeviceToHost));
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        printf("step %d/%d  loss %.6f  norm %.6f  load %.2f  %.2f ms  %.0f tokens/s", step, c.steps, s.loss, s.norm,
               (double)s.fullest * c.E / ((double)N * c.K), 1e3 * seconds, N / seconds);
        if (step % c.val_every == 0 || step == c.steps) printf("  validation %.4f", validate());
        printf(s.ok ? "\n" : "  not finite: left out\n");
        fflush(stdout);
    }
    if (c.V == END_OF_TEXT + 1) sample();
    return 0;
}
