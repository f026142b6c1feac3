// The CUDA kernels of the embedding against the double reference. Tolerances: tests/cuda.cuh.
#include "layers/embedding.h"
#include "tests/cuda.cuh"

static void embedding_case(int64_t N, int64_t V, int64_t C, int skew) {
    X table(V * C, 1), out(N * C), dout(N * C, 2);
    R dtable(V * C, 3);
    I32 token(N);
    for (int64_t n = 0; n < N; n++) {
        double u = random_uniform(7, 1, (uint64_t)n);
        token.host[(size_t)n] = (int32_t)((skew ? pow(u, 6) : u) * (double)V);
    }
    token.send();
    settle();
    embedding_forward(out.dev, token.dev, table.dev, N, C, ctx);
    REFERENCE(embedding_forward)(out.ref(), token.ref(), table.ref(), N, C, reference_ctx);
    CHECK_SAME(out);
    auto before = dtable.host;
    auto run = [&] { embedding_backward(dtable.dev, dout.dev, token.dev, N, V, C, ctx); };
    run();
    REFERENCE(embedding_backward)(dtable.ref(), dout.ref(), token.ref(), N, V, C, reference_ctx);
    CHECK_CLOSE(dtable, FLOAT);
    CHECK_REPEATS(dtable, (restore(dtable, before), run()));
}

static void test_embedding(void) {
    embedding_case(1, 5, 8, 0);
    embedding_case(3, 1, 40, 0);
    embedding_case(129, 7, 24, 0);
    embedding_case(1000, 257, 128, 1);
    embedding_case(1000, 600, 2048, 1);
    embedding_case(5000, 100000, 40, 1);  // two passes
    embedding_case(3000, 300000, 8, 0);   // three passes
    embedding_case(5000, 100000, 1000, 1);
    embedding_case(9000, 3, 264, 1);  // long runs
}

int main(void) {
    open_contexts((size_t)256 << 20);
    RUN(test_embedding);
    return test_summary();
}
