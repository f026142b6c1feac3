// The embedding: forward exact, backward against sums in float64. tests/oracle.h has the method of these tests.
#include "layers/embedding.h"
#include "tests/oracle.h"

typedef struct {
    int64_t N, V, C;
    int32_t* token;
    real *table, *dout, *before, *out, *dtable;
} Embedding;

static void run_embedding(void* arg) {
    Embedding* e = arg;
    Ctx* ctx = ctx_create(0);
    e->out = poisoned(e->N * e->C);
    embedding_forward(e->out, e->token, e->table, e->N, e->C, ctx);
    e->dtable = copied(e->before, e->V * e->C);
    embedding_backward(e->dtable, e->dout, e->token, e->N, e->V, e->C, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static void test_embedding(void) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {3, 5, 24}, {127, 7, 33}, {129, 300, 40}, {300, 3, 129}};
    for (int s = 0; s < COUNT(shapes); s++) {
        Embedding e = {.N = shapes[s][0], .V = shapes[s][1], .C = shapes[s][2]};
        e.token = random_ints(e.N, (int32_t)e.V, 1);
        e.table = tensor(e.V * e.C, 2);
        e.dout = tensor(e.N * e.C, 3);
        e.before = tensor(e.V * e.C, 4);
        check_threads(run_embedding, &e);
        double* ref = doubles(e.before, e.V * e.C);
        for (int64_t n = 0; n < e.N; n++) {
            CHECK_BITS(e.out + n * e.C, e.table + e.token[n] * e.C, e.C * sizeof(real));
            for (int64_t c = 0; c < e.C; c++) ref[e.token[n] * e.C + c] += e.dout[n * e.C + c];
        }
        // Up to 100 additions of random signs: sqrt(100) u = 6e-7; in double 1e-15.
        CHECK_CLOSE(e.dtable, ref, e.V * e.C, TOL(1e-6, 1e-14));
        release_all();
    }
}

int main(void) {
    RUN(test_embedding);
    return test_summary();
}
