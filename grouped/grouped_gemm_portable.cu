// Grouped products on the tensor cores of any NVIDIA GPU since Ampere: one persistent kernel per pass over the ragged
// buffer, no transposed copies. What it is made of, from the smallest on:
//
// mma.sync. The tensor cores multiply small matrices that lie in the registers of a warp: d (16, 8) += a (16, 16)
// b (16, 8). Each lane holds a few elements of each, its fragment (device/mma.cuh lists all):
//
//             a: 16 x 16, four registers a lane     b: 16 x 8, two registers      d: 16 x 8, four floats
//     row     columns 0 1  2 3  4 5  6 7  8 9 ..    column      rows 0 1  2 3 ..  row   columns 0 1  2 3  4 5  6 7
//      0      lane     0    1    2    3    0        0      lane  0    1           0     lane     0    1    2    3
//      1               4    5    6    7    4        1            4    5           1              4    5    6    7
//      8               0    1    2    3    0        (two neighbours of a column   8              0    1    2    3
//             (register 1: rows 8 .., 2: columns 8 ..)  share a register)         (floats 2, 3: rows 8 ..)
//
// ldmatrix. Both operands come from shared memory, four matrices of 8 x 8 at once: each lane names 16 bytes, one row of
// one of them, and each gets the two neighbours in a row (or, transposed, in a column) that mma.sync wants of it. So
// operands whose rows are the contraction (dgrad's W, both of wgrad) are multiplied as they lie.
//
// A box is 64 rows or columns of an operand, M or N, times 32 of the contraction, 4 KB in shared memory. Where the
// contraction runs along its rows, these have 64 bytes, else 128. The 16-byte pieces of a row are swapped (an XOR with
// the row's number), so that the eight rows of a matrix lie in different banks: ldmatrix reads them at once.
//
//     contraction along rows: two rows a line         rows are the contraction: one row a line, eight pieces
//        row 0 | 0 1 2 3 | row 1 | 0 1 2 3 |              k 0 | 0 1 2 3 4 5 6 7 |
//        row 2 | 1 0 3 2 | row 3 | 1 0 3 2 |              k 1 | 1 0 3 2 5 4 7 6 |
//        row 4 | 2 3 0 1 | row 5 | 2 3 0 1 |  ..          k 2 | 2 3 0 1 6 7 4 5 |  ..
//
// A warp multiplies one box of A with one of B: 64 x 64 sums, 128 registers a lane. Eight warps make a tile of 128 x
// 256 (2 boxes of A, 4 of B), or 256 x 128 in the output's last column, if that is one square of 128 wide.
//
// cp.async copies 16 bytes from global to shared memory in the background. The six boxes of a k block are a stage, and
// four stages a ring: while a stage is multiplied, the next three are on their way.
//
//     k block       i - 1          i               i + 1          i + 2         i + 3
//     stage         free           multiplied      arrived        on its way    begins, where i - 1 was
//                                  step 0, step 1  step 0
//
// A k block is two steps of 16. While the tensor cores multiply the fragments of one step, those of the next come from
// shared memory into other registers. One __syncthreads() a k block: what was copied is there for all, and the stage of
// the block before has been read by all. The ring runs on from tile to tile: what a tile's last k blocks leave free the
// next tile's first ones fill, while its sums go to memory.
//
// Bound by the tensor cores, and nearly as much by shared memory: of 128 bytes a clock ldmatrix takes 64 KB a tile and
// k block, cp.async 24 KB. 96 KB and a little of shared memory, so that it runs on GPUs with 99 KB a block.
#include "grouped/grouped_gemm_portable.cuh"

#include "device/mma.cuh"
#include "grouped/portable_tiles.cuh"

namespace {

enum { WARPS = 8, THREADS = 32 * WARPS };
enum { BOX = 64, BOX_BYTES = BOX * BLOCK_K * (int)sizeof(floatX) };
enum { BOXES = 6, STAGES = 4, STAGE_BYTES = BOXES * BOX_BYTES };
enum { TILES = 8 };  // the loads are at most STAGES tiles ahead of the products

struct Shared {
    uint8_t stages[STAGES][STAGE_BYTES];
    Tile tiles[TILES];  // of this block, in turn
    int next[2];        // the number of the tile after the one that is being loaded, in turn
};

// --- Loads ---

// Of every box of an operand a thread copies one 16-byte piece: where that lies in the box and in shared memory, and
// how far the next box and the next k block are in memory.
template <bool K_ROWS>
struct Piece {
    int mn, k, place, box_bytes, step_bytes;
    __device__ __forceinline__ explicit Piece(int ld) {
        const int i = threadIdx.x, row = K_ROWS ? i / 8 : i / 4, piece = K_ROWS ? i % 8 : i % 4;
        mn = K_ROWS ? piece * 8 : row, k = K_ROWS ? row : piece * 8;
        place = row * (K_ROWS ? 128 : 64) + (piece ^ (K_ROWS ? row % 8 : row / 2 % 4)) * 16;
        box_bytes = (int)sizeof(floatX) * BOX * (K_ROWS ? 1 : ld);
        step_bytes = (int)sizeof(floatX) * BLOCK_K * (K_ROWS ? ld : 1);
    }
    // Of the box whose first row or column is mn0.
    __device__ __forceinline__ const uint8_t* at(const floatX* p, int mn0, int64_t ld) const {
        return (const uint8_t*)(p + (K_ROWS ? k * ld + mn0 + mn : (mn0 + mn) * ld + k));
    }
};

// Where the loads stand. The six boxes are three pairs: of A, of A or B, of B.
template <Pass P>
struct Loader {
    Shared& s;
    const Groups& g;
    const floatX *a, *b;
    Piece<K_ROWS_A<P>> piece_a;
    Piece<K_ROWS_B<P>> piece_b;
    const uint8_t* from[3];  // this thread's piece of each pair's first box
    uint32_t inside;         // a bit a box: this piece is inside of M or N
    int k_left_a, k_left_b;  // of the contraction, from this piece on
    bool tall;               // the second pair is of A
    int left, turn, drawn;   // k blocks of the tile; tiles; thread 0: a number to come

    __device__ __forceinline__ Loader(Shared& s, const Groups& g, const floatX* a, const floatX* b)
        : s(s), g(g), a(a), b(b), piece_a(P == WGRAD ? g.M : g.K), piece_b(P == FORWARD ? g.K : g.N), turn(0) {
        if (threadIdx.x == 0) s.next[0] = atomicAdd(&g.plan->drawn, 1), drawn = atomicAdd(&g.plan->drawn, 1);
        __syncthreads();
        begin(s.next[0]);
    }

    // Begins the copies of a pair of boxes; zeros where the operand ends.
    __device__ __forceinline__ void copy(int stage, int pair) {
        const bool of_a = pair == 0 || (pair == 1 && tall);
        const bool k_inside = (of_a ? k_left_a : k_left_b) > 0;
        const int box_bytes = of_a ? piece_a.box_bytes : piece_b.box_bytes;
        uint8_t* to = s.stages[stage] + 2 * pair * BOX_BYTES + (of_a ? piece_a.place : piece_b.place);
        copy_async_16(to, from[pair], k_inside && (inside >> 2 * pair & 1) ? 16 : 0);
        copy_async_16(to + BOX_BYTES, from[pair] + box_bytes, k_inside && (inside >> 2 * pair & 2) ? 16 : 0);
        from[pair] += of_a ? piece_a.step_bytes : piece_b.step_bytes;
    }

    // The three pairs were copied; where a tile ends, the next begins. All threads meet before the next call (and
    // before the first): the number of that tile is there.
    __device__ __forceinline__ void advance() {
        copy_async_commit();
        k_left_a -= BLOCK_K, k_left_b -= BLOCK_K;
        if (--left == 0) begin(s.next[++turn % 2]);
    }

   private:
    // Thread 0 tells the products of the tile, and all of the next number. That was asked for one tile earlier.
    __device__ __forceinline__ void begin(int number) {
        const Tile tile = find_tile<P>(g, number);
        const int64_t start = g.start[tile.expert], weights = tile.expert * (int64_t)g.N * g.K;
        const int ld_a = P == WGRAD ? g.M : g.K, ld_b = P == FORWARD ? g.K : g.N;
        const floatX *of_a = a + start * ld_a, *of_b = b + (P == WGRAD ? start * g.N : weights);
        if (threadIdx.x == 0) {
            s.tiles[turn % TILES] = tile;
            s.next[(turn + 1) % 2] = drawn;
            drawn = atomicAdd(&g.plan->drawn, 1);
        }

        // The boxes. Without work K is 0: zeros are copied to the end.
        tall = tile.boxes_a == 4;
        left = tile.k_blocks ? tile.k_blocks : INT32_MAX;
        k_left_a = tile.K - piece_a.k, k_left_b = tile.K - piece_b.k;
        inside = 0;
#pragma unroll
        for (int pair = 0; pair < 3; pair++) {
            const bool is_a = pair == 0 || (pair == 1 && tall);
            const int box = 2 * pair - (is_a ? 0 : tile.boxes_a), mn0 = (is_a ? tile.m : tile.n) + box * BOX;
            from[pair] = is_a ? piece_a.at(of_a, mn0, ld_a) : piece_b.at(of_b, mn0, ld_b);
            const int room = is_a ? tile.M - mn0 - piece_a.mn : g.N - mn0 - piece_b.mn;
            inside |= ((room > 0 ? 1u : 0) | (room > BOX ? 2u : 0)) << 2 * pair;
        }
    }
};

// --- Products ---

// What a lane reads for ldmatrix: of each 16 of M or N by 16 of the contraction one row of one of four matrices, which
// are in the order of the fragment's registers. Of A the second one is 8 rows further, of B 8 of the contraction.
template <bool K_ROWS, bool IS_B>
struct Fragments {
    int offset;
    __device__ __forceinline__ Fragments() {
        const int lane = threadIdx.x % 32, row = lane % 8, second = lane / 8 % 2, third = lane / 16;
        const int mn8 = IS_B ? third : second, k8 = IS_B ? second : third;
        offset = K_ROWS ? (k8 * 8 + row) * 128 + (mn8 ^ row) * 16 : (mn8 * 8 + row) * 64 + (k8 ^ row / 2) * 16;
    }

    // The i-th 16 of a box's 64, for one step of 16.
    __device__ __forceinline__ void load(uint32_t (&f)[4], const uint8_t* box, int step, int i) const {
        if (K_ROWS)
            ldmatrix_x4_transposed(f, box + (offset ^ i * 32) + step * 16 * 128);
        else
            ldmatrix_x4(f, box + (offset ^ step * 32) + i * 16 * 64);
    }
};

// d += a b of one step. beside(i) is issued between the quarters: what the tensor cores need not wait for.
template <typename Beside>
__device__ __forceinline__ void multiply(float (&d)[4][8][4], const uint32_t (&a)[4][4], const uint32_t (&b)[4][4],
                                         Beside beside) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        beside(i);
#pragma unroll
        for (int j = 0; j < 8; j++) mma_bf16(d[i][j], a[i], b[j / 2] + j % 2 * 2);
    }
}

// --- Results ---

__device__ __forceinline__ void store4(floatX* to, const float (&x)[4]) {
    const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
    *(uint2*)to = *(const uint2*)pair;
}
__device__ __forceinline__ void store4(float* to, const float (&x)[4]) { *(float4*)to = *(const float4*)x; }

// The warp's 64 x 64 sums, from row m and column n of the expert's output on. Rows from M on: of y and dx zeros, of dW
// none. Neighbours exchange two floats: each then has four columns, of the first or second of two matrices.
template <Pass P, typename Out>
__device__ __forceinline__ void store(Out* out, const float (&d)[4][8][4], int m, int n, int M, int N, int add) {
    const int lane = threadIdx.x % 32, odd = lane % 2;
    const int column = n + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // Half a row of matrices: rows of 8, whose sums are two of each four.
        const int row = m + i * 8 + lane / 4, half = i % 2 * 2;
        Out* to = out + row * (int64_t)N + column;
        float4 was[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (P == WGRAD && add && row < M && column + j * 16 < N) was[j] = *(const float4*)(to + j * 16);

#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *first = d[i / 2][2 * j] + half, *second = d[i / 2][2 * j + 1] + half;
            const float x = __shfl_xor_sync(0xffffffffu, odd ? first[0] : second[0], 1);
            const float y = __shfl_xor_sync(0xffffffffu, odd ? first[1] : second[1], 1);
            float four[4] = {odd ? x : first[0], odd ? y : first[1], odd ? second[0] : x, odd ? second[1] : y};
            if (P == WGRAD) four[0] += was[j].x, four[1] += was[j].y, four[2] += was[j].z, four[3] += was[j].w;
            if (P != WGRAD && row >= M) four[0] = four[1] = four[2] = four[3] = 0;
            if ((P != WGRAD || row < M) && column + j * 16 < N) store4(to + j * 16, four);
        }
    }
}

// --- The kernel ---

template <Pass P, typename Out>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_gemm_kernel(Out* out, const floatX* a, const floatX* b, const Groups g) {
    // The first stages are on their way.
    extern __shared__ __align__(128) uint8_t memory[];
    Shared& s = *(Shared*)memory;
    Loader<P> loader(s, g, a, b);
    for (int stage = 0; stage < STAGES - 1; stage++) {
        __syncthreads();
        for (int pair = 0; pair < 3; pair++) loader.copy(stage, pair);
        loader.advance();
    }
    copy_async_wait<STAGES - 2>();
    __syncthreads();

    const Fragments<K_ROWS_A<P>, false> of_a;
    const Fragments<K_ROWS_B<P>, true> of_b;
    const int warp = threadIdx.x / 32;
    int stage = 0;
    for (int turn = 0;; turn++) {
        // The tile, and this warp's box of each operand. Where the tile is one square, warps 4..7
        // multiply zeros and store nothing: their columns lie beyond N.
        const Tile& tile = s.tiles[turn % TILES];
        const int k_blocks = tile.k_blocks;
        if (k_blocks == 0) break;
        const int box_a = warp % tile.boxes_a, box_b = warp / tile.boxes_a;
        const int at_a = box_a * BOX_BYTES, at_b = (tile.boxes_a + box_b) * BOX_BYTES;

        // The fragments of two steps; of the first one now.
        float d[4][8][4] = {};
        uint32_t fa[2][4][4], fb[2][4][4];
        auto load = [&](int step, int i) {
            of_a.load(fa[step][i], s.stages[stage] + at_a, step, i);
            of_b.load(fb[step][i], s.stages[stage] + at_b, step, i);
        };
#pragma unroll
        for (int i = 0; i < 4; i++) load(0, i);
        for (int k_block = 0; k_block < k_blocks; k_block++) {
            // Step 0; meanwhile the fragments of step 1, and the copies of three k blocks further.
            multiply(d, fa[0], fb[0], [&](int i) {
                if (i < 2) load(1, 2 * i), load(1, 2 * i + 1);
                if (i > 0) loader.copy((stage + STAGES - 1) % STAGES, i - 1);
            });
            loader.advance();

            // The next k block is there. Step 1; meanwhile the first fragments of that block (after the last in vain).
            stage = (stage + 1) % STAGES;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            multiply(d, fa[1], fb[1], [&](int i) {
                if (i < 2) load(0, 2 * i), load(0, 2 * i + 1);
            });
        }

        // The sums.
        Out* of_expert = out + (P == WGRAD ? tile.expert * (int64_t)g.M : g.start[tile.expert]) * g.N;
        store<P>(of_expert, d, tile.m + box_a * BOX, tile.n + box_b * BOX, tile.M, g.N, g.add);
    }
    copy_async_wait<0>();
}

template <Pass P, typename Out>
void multiply_groups(Out* out, const floatX* a, const floatX* b, const Ragged& r, int64_t M, int64_t N, int64_t K,
                     int add, Ctx* ctx) {
    ASSERT(M <= INT32_MAX && N <= INT32_MAX && K <= INT32_MAX && r.El <= MAX_EXPERTS);
    ASSERT(((uintptr_t)out | (uintptr_t)a | (uintptr_t)b) % 16 == 0);
    Groups g = {r.group_start, r.group_rows, r.El, (int)M, (int)N, (int)K, add, ctx_workspace<Plan>(ctx, 1)};
    launch(plan_kernel<P>, 1, MAX_EXPERTS, 0, ctx, g);
    launch(grouped_gemm_kernel<P, Out>, (unsigned)ctx->sms, THREADS, sizeof(Shared), ctx, out, a, b, g);
}

}  // namespace

void grouped_gemm_portable_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC,
                                   Ctx* ctx) {
    multiply_groups<FORWARD>(y, x, w, r, 0, OC, IC, 0, ctx);
}

void grouped_gemm_portable_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC,
                                 Ctx* ctx) {
    multiply_groups<DGRAD>(dx, dy, w, r, 0, IC, OC, 0, ctx);
}

void grouped_gemm_portable_wgrad(real* dw, const floatX* dy, const floatX* x, Ragged r, int64_t IC, int64_t OC,
                                 int accumulate, Ctx* ctx) {
    multiply_groups<WGRAD>(dw, dy, x, r, OC, IC, 0, accumulate, ctx);
}
