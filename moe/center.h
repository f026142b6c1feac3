// Rows of a router's Wg are kept orthogonal to the mean of its inputs, so that its logits have no part that all tokens
// share:
//
//   u = mean over a step's tokens of x, at length 1;   after the update  w_e -= (w_e . u) u
//
// Why: early in training x is nearly the same for all tokens (it carries the frequencies of the tokens), and that part
// moves at every step by more than the tokens differ. Without this, whole steps choose the same K experts. A router
// learns nothing from that part: it only says which experts are good for every token, which a balanced model never
// uses. The model stays an ordinary one: nothing but Wg changes.
//
// Sums are whole numbers in fixed point, exact in any order: the bits do not depend on how tokens and weights are
// spread over ranks and micro-steps.
#ifndef MOE_CENTER_H
#define MOE_CENTER_H

#include <math.h>

#include "device/device.h"

BEGIN_C

typedef struct StepState StepState;  // layers/adamw.h

// sum[c] += sum_n x[n, c] in units of 2^-15. Larger |x| count as 128, so that 2^40 tokens have room.
void center_add(int64_t* sum,     // (C)
                const floatX* x,  // (N, C)
                int64_t N, int64_t C, Ctx* ctx);

// u = sum / |sum|, or 0 where the sum is 0.
void center_direction(real* u,             // (C)
                      const int64_t* sum,  // (C)
                      int64_t C, Ctx* ctx);

// along[e] = what elements first .. first + n - 1 of Wg (E, C) add to w_e . u, in units of 2^-32; the ranks' parts add
// up. Larger products |w u| count as 1024.
void center_along(int64_t* along,   // (E)
                  const real* own,  // (n): those elements
                  const real* u, int64_t first, int64_t n, int64_t E, int64_t C, Ctx* ctx);

// w_e -= along_e u for elements first .. first + n - 1, weight = round(w). What is left of w_e . u is C 2^-33 and
// the rounding of w. Nothing is written if state->ok is 0.
void center_apply(floatX* weight,  // (n)
                  real* w,         // (n): masters; may be weight where floatX is real
                  const int64_t* along, const real* u, int64_t first, int64_t n, int64_t C, const StepState* state,
                  Ctx* ctx);

// Fixed point, in both builds alike; NaN counts as the lowest.
static inline BOTH_SIDES int64_t center_fixed(double x, double limit, double scale) {
    const double kept = x >= limit ? limit : x > -limit ? x : -limit;
    return (int64_t)rint(kept * scale);
}
static inline BOTH_SIDES int64_t center_input(double x) { return center_fixed(x, 128, 32768); }
static inline BOTH_SIDES int64_t center_product(double wu) { return center_fixed(wu, 1024, 4294967296.0); }

END_C

#endif
