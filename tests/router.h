// A router with random inputs, for tests of the router and of load balancing.
#ifndef TESTS_ROUTER_H
#define TESTS_ROUTER_H

#include "moe/router.h"
#include "tests/oracle.h"

typedef struct {
    RouterShape shape;
    float aux;
    real *x, *w, *bias, *dgate, *dx_before, *dw_before;
    real *scores, *gate, *dx, *dw;
    int32_t* expert;
    double *xd, *wd, *dgated;
} Router;

static void run_router(void* arg) {
    Router* r = arg;
    RouterShape s = r->shape;
    Ctx* ctx = ctx_create(router_workspace(s));
    r->scores = poisoned(s.N * s.E), r->gate = poisoned(s.N * s.K), r->expert = poisoned_ints(s.N * s.K);
    router_forward(r->scores, r->expert, r->gate, r->x, r->w, r->bias, s, ctx);
    r->dx = copied(r->dx_before, s.N * s.C), r->dw = copied(r->dw_before, s.E * s.C);
    router_backward(r->dx, r->dw, r->dgate, r->scores, r->expert, r->gate, r->x, r->w, r->aux, s, ctx);
    ctx_sync(ctx);
    ctx_destroy(ctx);
}

static Router make_router(RouterShape s) {
    Router r = {.shape = s};
    r.x = tensor(s.N * s.C, 1), r.w = tensor(s.E * s.C, 2), r.bias = tensor(s.E, 3), r.dgate = tensor(s.N * s.K, 4);
    r.dx_before = tensor(s.N * s.C, 5), r.dw_before = tensor(s.E * s.C, 6);
    for (int64_t i = 0; i < s.E * s.C; i++) r.w[i] /= (real)sqrt((double)s.C);  // logits of size 1
    for (int32_t e = 0; e < s.E; e++) r.bias[e] *= (real)0.1;
    return r;
}

#endif
