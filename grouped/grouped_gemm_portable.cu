// Grouped GEMM on the tensor cores of any NVIDIA GPU since Ampere: one persistent kernel per pass over the ragged
// buffer, no transposed copies. The kernel's parts, from the smallest to the largest:
//
// mma.sync. The tensor cores multiply small matrices in the registers of a warp: d (16, 8) += a (16, 16) b (16, 8).
// Each lane holds a few elements of a, b and d, its fragments (all are listed in device/mma.cuh):
//
//             a: 16 x 16, four registers a lane     b: 16 x 8, two registers      d: 16 x 8, four floats
//     row     columns 0 1  2 3  4 5  6 7  8 9 ..    column      rows 0 1  2 3 ..  row   columns 0 1  2 3  4 5  6 7
//      0      lane     0    1    2    3    0        0      lane  0    1           0     lane     0    1    2    3
//      1               4    5    6    7    4        1            4    5           1              4    5    6    7
//      8               0    1    2    3    0        (two neighbours of a column   8              0    1    2    3
//             (register 1: rows 8 .., 2: columns 8 ..)  share a register)         (floats 2, 3: rows 8 ..)
//
// ldmatrix loads four matrices of 8 x 8 from shared memory at once. Each lane gives the address of 16 bytes, one row of
// one matrix. Each lane gets two neighbours of a row (transposed: of a column), as mma.sync needs them. So operands
// whose rows are the contraction (dgrad's W, both of wgrad) are multiplied without a transposed copy.
//
// A box is 64 rows or columns of an operand (M or N) times 32 of the contraction: 4 KB in shared memory. A box's rows
// have 64 bytes if the contraction runs along them, else 128. The swizzle XORs the index of a 16-byte vector with the
// row's number. So the eight rows of a matrix are in different banks, and ldmatrix has no bank conflicts.
//
//     contraction along rows: two rows a line         rows are the contraction: one row a line, eight vectors
//        row 0 | 0 1 2 3 | row 1 | 0 1 2 3 |              k 0 | 0 1 2 3 4 5 6 7 |
//        row 2 | 1 0 3 2 | row 3 | 1 0 3 2 |              k 1 | 1 0 3 2 5 4 7 6 |
//        row 4 | 2 3 0 1 | row 5 | 2 3 0 1 |  ..          k 2 | 2 3 0 1 6 7 4 5 |  ..
//
// A warp multiplies one box of A with one box of B: 64 x 64 sums, 128 registers a lane. Eight warps compute a tile of
// 128 x 256 (2 boxes of A, 4 of B). In the output's last column, if that is only 128 wide, a tile is 256 x 128.
//
// cp.async copies 16 bytes from global to shared memory asynchronously. The six boxes of a k block are a stage, and
// four stages are a ring: while one stage is multiplied, the next three are in flight.
//
//     k block       i - 1          i               i + 1          i + 2         i + 3
//     stage         free           multiplied      arrived        in flight     begins, where i - 1 was
//                                  step 0, step 1  step 0
//
// A k block is two steps of 16. Fragments are double buffered: while the tensor cores multiply one step's fragments,
// ldmatrix loads the next step's into other registers. Each k block has one __syncthreads(). After this barrier all
// warps see the copies, and have read the stage of the k block before. The ring continues from tile to tile: the next
// tile's first k blocks are prefetched during the last k blocks and the epilogue.
//
// Tiles come from the tile scheduler (grouped/tile_scheduler.cuh), which warp 0 runs one tile ahead. A block draws the
// halves of work tiles one by one; nothing is multicast here.
//
// Bound by the tensor cores, and nearly as much by shared memory, which gives 128 bytes a clock: per tile and k block
// ldmatrix takes 64 KB of it, cp.async 24 KB. The kernel takes slightly more than 96 KB of shared memory, so that it
// runs on GPUs with 99 KB a block.
#include "grouped/grouped_gemm_portable.cuh"

#include "device/mma.cuh"
#include "grouped/tile_scheduler.cuh"

namespace {

enum { WARPS = 8, THREADS = 32 * WARPS };
enum { K_BLOCK = 32 };
enum { BOX = 64, BOX_BYTES = BOX * K_BLOCK * (int)sizeof(floatX) };
enum { BOXES = 6, STAGES = 4, STAGE_BYTES = BOXES * BOX_BYTES };
enum { ITEMS = 8 };  // slots; the loads are at most STAGES tiles ahead of the mainloop, and the scheduler one more

struct Shared {
    uint8_t stages[STAGES][STAGE_BYTES];
    WorkItem items[ITEMS];  // a ring of this block's tiles
};

// The three GEMMs.
struct Forward : Pass {
    static constexpr int BLOCK_K = K_BLOCK;
};
struct Dgrad : Forward {
    static constexpr bool K_ROWS_B = true;
};
struct Wgrad : Dgrad {
    static constexpr bool OVER_ROWS = true, ZERO_EMPTY = true, K_ROWS_A = true;
};

__device__ __forceinline__ int boxes_of_a(const WorkItem& item) { return item.shape == TALL ? 4 : 2; }

// --- Loads ---

// The 16-byte vector that a thread copies of every box of an operand. mn, k: its position in the box. place: its offset
// in shared memory. box_bytes, step_bytes: the strides in global memory to the next box and the next k block.
template <bool K_ROWS>
struct BoxThread {
    int mn, k, place, box_bytes, step_bytes;
    __device__ __forceinline__ explicit BoxThread(int ld) {
        const int i = threadIdx.x, row = K_ROWS ? i / 8 : i / 4, vector = K_ROWS ? i % 8 : i % 4;
        mn = K_ROWS ? vector * 8 : row;
        k = K_ROWS ? row : vector * 8;
        place = row * (K_ROWS ? 128 : 64) + (vector ^ (K_ROWS ? row % 8 : row / 2 % 4)) * 16;
        box_bytes = (int)sizeof(floatX) * BOX * (K_ROWS ? 1 : ld);
        step_bytes = (int)sizeof(floatX) * K_BLOCK * (K_ROWS ? ld : 1);
    }
    // The vector's address in the box whose first row or column is mn0.
    __device__ __forceinline__ const uint8_t* at(const floatX* p, int mn0, int64_t ld) const {
        return (const uint8_t*)(p + (K_ROWS ? k * ld + mn0 + mn : (mn0 + mn) * ld + k));
    }
};

// The state of the loads. The six boxes of a stage are three pairs: A, then A or B, then B.
template <typename P>
struct Loader {
    Shared& s;
    const Groups& g;
    const floatX *a, *b;
    BoxThread<P::K_ROWS_A> piece_a;
    BoxThread<P::K_ROWS_B> piece_b;
    const uint8_t* from[3];  // this thread's vector of each pair's first box
    uint32_t inside;         // a bit for each box: the vector is inside of M or N
    int k_left_a, k_left_b;  // the rest of the contraction, from this vector on
    bool tall;               // the second pair is of A
    int left, turn;          // k blocks left in the tile; the tile's index
    uint32_t drawn;          // thread 0: the number in flight

    __device__ __forceinline__ Loader(Shared& s, const Groups& g, const floatX* a, const floatX* b)
        : s(s), g(g), a(a), b(b), piece_a(P::K_ROWS_A ? g.M : g.K), piece_b(P::K_ROWS_B ? g.N : g.K), turn(0) {
        if (threadIdx.x == 0) drawn = draw_number(g.counter);
        sort_experts<P>(g);
        __syncthreads();
        schedule(0);
        __syncthreads();
        begin();
    }

    // Starts the copies of a pair of boxes; zeros past the end of the operand.
    __device__ __forceinline__ void copy(int stage, int pair) {
        const bool of_a = pair == 0 || (pair == 1 && tall);
        const bool k_inside = (of_a ? k_left_a : k_left_b) > 0;
        const int box_bytes = of_a ? piece_a.box_bytes : piece_b.box_bytes;
        uint8_t* to = s.stages[stage] + 2 * pair * BOX_BYTES + (of_a ? piece_a.place : piece_b.place);
        copy_async_16(to, from[pair], k_inside && (inside >> 2 * pair & 1) ? 16 : 0);
        copy_async_16(to + BOX_BYTES, from[pair] + box_bytes, k_inside && (inside >> 2 * pair & 2) ? 16 : 0);
        from[pair] += of_a ? piece_a.step_bytes : piece_b.step_bytes;
    }

    // Commits the three pairs; after a tile's last k block it moves to the next tile. All threads must synchronize
    // before each call, the first one too: the next tile is then visible.
    __device__ __forceinline__ void advance() {
        copy_async_commit();
        k_left_a -= K_BLOCK;
        k_left_b -= K_BLOCK;
        if (--left == 0) {
            turn++;
            begin();
        }
    }

   private:
    // Warp 0 finds this block's tile number `index` and publishes it. A drawn number is half a work tile. The last of
    // all numbers resets the counter.
    __device__ __forceinline__ void schedule(int index) {
        if (threadIdx.x >= 32) return;
        TileScheduler<P> scheduler(g);
        WorkItem item;
        do {
            const int number = broadcast((int)drawn, 0), half = number % CLUSTER;
            item = scheduler.find(number / CLUSTER, half);
            if (threadIdx.x > 0) continue;
            if (item.k_blocks)
                drawn = draw_number(g.counter);
            else if (CLUSTER * item.past + half == (int)gridDim.x - 1)
                *g.counter = 0;
        } while (item.k_blocks && !item.store);
        if (threadIdx.x == 0) s.items[index % ITEMS] = item;
    }

    // Begins a tile, while warp 0 finds the next one.
    __device__ __forceinline__ void begin() {
        // The tile, and its expert's operands.
        const WorkItem item = s.items[turn % ITEMS];
        const int ld_a = P::K_ROWS_A ? g.M : g.K, ld_b = P::K_ROWS_B ? g.N : g.K;
        const floatX* of_a = a + item.k * (int64_t)ld_a;
        const floatX* of_b = b + (P::OVER_ROWS ? item.k * (int64_t)g.N : item.expert * (int64_t)g.N * g.K);
        if (item.k_blocks) schedule(turn + 1);

        // The boxes. Without work zeros are copied until the kernel ends.
        tall = boxes_of_a(item) == 4;
        left = item.k_blocks ? item.k_blocks : INT32_MAX;
        const int k_left = item.k_blocks ? g.K - item.k : 0;
        k_left_a = k_left - piece_a.k;
        k_left_b = k_left - piece_b.k;
        inside = 0;
#pragma unroll
        for (int pair = 0; pair < 3; pair++) {
            const bool is_a = pair == 0 || (pair == 1 && tall);
            const int box = 2 * pair - (is_a ? 0 : boxes_of_a(item)), mn = (is_a ? item.m : item.n) + box * BOX;
            from[pair] = is_a ? piece_a.at(of_a, mn, ld_a) : piece_b.at(of_b, mn, ld_b);
            const int rest = is_a ? item.valid - box * BOX - piece_a.mn : g.N - mn - piece_b.mn;
            inside |= ((rest > 0 ? 1u : 0) | (rest > BOX ? 2u : 0)) << 2 * pair;
        }
    }
};

// --- Mainloop ---

// A lane's ldmatrix address. A fragment is 16 of M or N by 16 of the contraction: four matrices, in the order of its
// registers. The lane gives one row of one of them. The second matrix is 8 further along M for A, and 8 further along
// the contraction for B.
template <bool K_ROWS, bool IS_B>
struct Fragments {
    int offset;
    __device__ __forceinline__ Fragments() {
        const int lane = threadIdx.x % 32, row = lane % 8, second = lane / 8 % 2, third = lane / 16;
        const int mn8 = IS_B ? third : second, k8 = IS_B ? second : third;
        offset = K_ROWS ? (k8 * 8 + row) * 128 + (mn8 ^ row) * 16 : (mn8 * 8 + row) * 64 + (k8 ^ row / 2) * 16;
    }

    // Loads the i-th fragment of a box (16 of its 64 rows or columns), for one step of 16.
    __device__ __forceinline__ void load(uint32_t (&f)[4], const uint8_t* box, int step, int i) const {
        if (K_ROWS)
            ldmatrix_x4_transposed(f, box + (offset ^ i * 32) + step * 16 * 128);
        else
            ldmatrix_x4(f, box + (offset ^ step * 32) + i * 16 * 64);
    }
};

// d += a b of one step. The callback issues loads before each quarter, so that they overlap with the tensor cores.
template <typename Overlap>
__device__ __forceinline__ void multiply(float (&d)[4][8][4], const uint32_t (&a)[4][4], const uint32_t (&b)[4][4],
                                         Overlap overlap) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        overlap(i);
#pragma unroll
        for (int j = 0; j < 8; j++) mma_bf16(d[i][j], a[i], b[j / 2] + j % 2 * 2);
    }
}

// --- Epilogue ---

__device__ __forceinline__ void store4(floatX* to, const float (&x)[4]) {
    const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
    *(uint2*)to = *(const uint2*)pair;
}
__device__ __forceinline__ void store4(float* to, const float (&x)[4]) { *(float4*)to = *(const float4*)x; }

// Stores the warp's 64 x 64 sums, from row m and column n of the expert's output on. Rows from M on are zeros in y and
// dx, and are not stored in dW. Neighbouring lanes exchange two floats: each then has four contiguous columns, of the
// first or second of two matrices.
template <typename P, typename Out>
__device__ __forceinline__ void store(Out* out, const float (&d)[4][8][4], int m, int n, int M, int N, int add) {
    const int lane = threadIdx.x % 32, odd = lane % 2;
    const int column = n + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // Eight rows, which are half of each 16 x 8 matrix: two of a lane's four sums. dW is loaded first if it is
        // added to.
        const int row = m + i * 8 + lane / 4, half = i % 2 * 2;
        Out* to = out + row * (int64_t)N + column;
        float4 was[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (P::OVER_ROWS && add && row < M && column + j * 16 < N) was[j] = *(const float4*)(to + j * 16);

#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Exchange with the neighbour, then store four columns.
            const float *first = d[i / 2][2 * j] + half, *second = d[i / 2][2 * j + 1] + half;
            const float x = __shfl_xor_sync(0xffffffffu, odd ? first[0] : second[0], 1);
            const float y = __shfl_xor_sync(0xffffffffu, odd ? first[1] : second[1], 1);
            float four[4] = {odd ? x : first[0], odd ? y : first[1], odd ? second[0] : x, odd ? second[1] : y};
            if (P::OVER_ROWS) {
                four[0] += was[j].x;
                four[1] += was[j].y;
                four[2] += was[j].z;
                four[3] += was[j].w;
            }
            if (!P::OVER_ROWS && row >= M) four[0] = four[1] = four[2] = four[3] = 0;
            if ((!P::OVER_ROWS || row < M) && column + j * 16 < N) store4(to + j * 16, four);
        }
    }
}

// --- The kernel ---

template <typename P, typename Out>
__global__ void __launch_bounds__(THREADS, 1)
    grouped_gemm_kernel(Out* out, const floatX* a, const floatX* b, const Groups g) {
    // Prologue: fill the first three stages.
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

    const Fragments<P::K_ROWS_A, false> of_a;
    const Fragments<P::K_ROWS_B, true> of_b;
    const int warp = threadIdx.x / 32;
    int stage = 0;
    for (int turn = 0;; turn++) {
        // The tile, and this warp's box of each operand. In a 128 x 128 tile warps 4..7 multiply zeros and store
        // nothing: their columns are past N.
        const WorkItem& item = s.items[turn % ITEMS];
        const int k_blocks = item.k_blocks, boxes_a = boxes_of_a(item);
        if (k_blocks == 0) break;
        const int box_a = warp % boxes_a, box_b = warp / boxes_a;
        const int at_a = box_a * BOX_BYTES, at_b = (boxes_a + box_b) * BOX_BYTES;

        // Fragments of two steps (double buffering); load those of step 0.
        float d[4][8][4] = {};
        uint32_t fa[2][4][4], fb[2][4][4];
        auto load = [&](int step, int i) {
            of_a.load(fa[step][i], s.stages[stage] + at_a, step, i);
            of_b.load(fb[step][i], s.stages[stage] + at_b, step, i);
        };
#pragma unroll
        for (int i = 0; i < 4; i++) load(0, i);
        for (int k_block = 0; k_block < k_blocks; k_block++) {
            // Step 0. It overlaps with the fragments of step 1 and the copies for three k blocks ahead.
            multiply(d, fa[0], fb[0], [&](int i) {
                if (i < 2) load(1, 2 * i), load(1, 2 * i + 1);
                if (i > 0) loader.copy((stage + STAGES - 1) % STAGES, i - 1);
            });
            loader.advance();

            // The next k block has arrived. Step 1 overlaps with its step 0 fragments (after the tile's last k block
            // these are not used).
            stage = (stage + 1) % STAGES;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            multiply(d, fa[1], fb[1], [&](int i) {
                if (i < 2) load(0, 2 * i), load(0, 2 * i + 1);
            });
        }

        // Epilogue.
        Out* of_expert = out + (P::OVER_ROWS ? item.expert * (int64_t)g.M * g.N : 0);
        store<P>(of_expert, d, item.m + box_a * BOX, item.n + box_b * BOX, item.m + item.valid, g.N, g.add);
    }
    copy_async_wait<0>();
}

template <typename P, typename Out>
void multiply_groups(Out* out, const floatX* a, const floatX* b, const Groups& g, Ctx* ctx) {
    ASSERT(((uintptr_t)out | (uintptr_t)a | (uintptr_t)b) % 16 == 0);
    launch(grouped_gemm_kernel<P, Out>, (unsigned)ctx->sms, THREADS, sizeof(Shared), ctx, out, a, b, g);
}

}  // namespace

void grouped_gemm_portable_forward(floatX* y, const floatX* x, const floatX* w, Ragged r, int64_t IC, int64_t OC,
                                   Ctx* ctx) {
    multiply_groups<Forward>(y, x, w, groups_of(r, 0, OC, IC, ctx), ctx);
}

void grouped_gemm_portable_dgrad(floatX* dx, const floatX* dy, const floatX* w, Ragged r, int64_t IC, int64_t OC,
                                 Ctx* ctx) {
    multiply_groups<Dgrad>(dx, dy, w, groups_of(r, 0, IC, OC, ctx), ctx);
}

template <typename Out>
void grouped_gemm_portable_wgrad(Out* dw, const floatX* dy, const floatX* x, Ragged r, int64_t IC, int64_t OC,
                                 int accumulate, Ctx* ctx) {
    Groups g = groups_of(r, OC, IC, r.capacity, ctx);
    g.add = accumulate;
    multiply_groups<Wgrad>(dw, dy, x, g, ctx);
}
template void grouped_gemm_portable_wgrad(real*, const floatX*, const floatX*, Ragged, int64_t, int64_t, int, Ctx*);
template void grouped_gemm_portable_wgrad(floatX*, const floatX*, const floatX*, Ragged, int64_t, int64_t, int, Ctx*);
