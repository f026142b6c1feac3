#include "layers/rope.h"

#include "device/cpu.h"

static void turn_tensor(floatX* x, const real* table, RopeShape shape, int direction) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < shape.N; n++) {
        // The angles of this position are the same for every head.
        const real* turn = table + n % shape.T * shape.D;
        for (int64_t h = 0; h < shape.heads; h++) {
            floatX* v = x + n * shape.stride + h * shape.head_stride;
            for (int64_t i = 0; i < shape.D; i += 2) {
                // A pair is rotated by its angle.
                real c = turn[i], s = direction * turn[i + 1], even = v[i], odd = v[i + 1];
                v[i] = even * c - odd * s;
                v[i + 1] = even * s + odd * c;
            }
        }
    }
}

void rope_apply(floatX* x, RopeShape of_x, floatX* y, RopeShape of_y, const real* table, int direction, Ctx* ctx) {
    turn_tensor(x, table, of_x, direction);
    turn_tensor(y, table, of_y, direction);
}
