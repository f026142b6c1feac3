#include "grouped/experts.h"

#include "device/cpu.h"
#include "layers/activation.h"
#include "layers/swiglu.h"

void experts_swiglu_forward(floatX* a, const floatX* h, Ragged r, int64_t F, Ctx* ctx) {
    swiglu_forward(a, h, r.group_start[r.El], F, ctx);  // the CPU has no pad rows
}

void experts_swiglu_backward(ExpertsBackward t, Ragged r, int64_t F, Ctx* ctx) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < r.group_start[r.El]; row++) {
        // Pointers: the row's gate and up, and their gradients.
        const floatX *g = t.h + row * 2 * F, *u = g + F;
        floatX *dg = t.dh + row * 2 * F, *du = dg + F;
        real gate = r.row_gate[row], dgate = 0;

        // dgate = <da', a>; da = gate da' gives the gradients of g and u.
#pragma omp simd reduction(+ : dgate)
        for (int64_t i = 0; i < F; i++) {
            real s = sigmoid(g[i]), a = swiglu(g[i], u[i], s), da = t.da_ungated[row * F + i];
            dgate += da * a;
            t.gated_a[row * F + i] = gate * a;
            du[i] = swiglu_du(gate * da, g[i], s);
            dg[i] = swiglu_dg(gate * da, g[i], u[i], s);
        }
        t.drow_gate[row] = dgate;
    }
}
