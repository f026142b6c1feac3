// Ranks keep only parts of the model: FSDP-style sharding (ZeRO, arXiv 1910.02054; FSDP, arXiv 2304.11277) of
// flat parameter buffers.
//
// A unit (a block, the embedding, the head) has two buffers: dense parameters, the same on all ranks of the run, and
// experts, the same on the ranks that hold the same experts. A buffer is cut into one part a rank of that group. How
// far this goes is --shard; what a rank keeps of n elements in P parts:
//
//               weights        gradients      masters and moments
//   none        n              n              n         (gradients are summed over the ranks, all ranks update all)
//   optimizer   n              n              n / P     (weights are gathered after the update)
//   grads       n              n / P          n / P
//   weights     n / P          n / P          n / P     (weights are gathered for use)
//
// How a buffer is cut. Parts are equally long; the last ones end in padding. Dense parameters on 4 ranks:
//
//   | part 0 | part 1 | part 2 | part 3 .. |     P = 4, padding is ..
//     rank 0   rank 1   rank 2   rank 3
//
// Experts on the same ranks with --ep 2: ranks 0 and 1 are one expert-parallel group, 2 and 3 the other, and each
// group has every expert once. The first rank of both holds the lower half of the experts, the second the upper half:
//
//   lower half  | part 0 | part 1 .. |           upper half  | part 0 | part 1 .. |     P = ranks / ep = 2
//                 rank 0   rank 2  (expert_dp)                 rank 1   rank 3  (expert_dp)
//
// What is not kept whole passes through slots: unit u uses slot u % 2. While one unit computes, the next one is
// gathered on the side stream. In forward with --shard weights, time from left to right:
//
//   stream         | unit 1            | unit 2            | unit 3            |
//   side stream    | gather 2 |        | gather 3 |        | gather 4 |        |
//   slot 0         | 2 arrives, is there, and is in use    ) 4 arrives, is there, and is in use ...
//   slot 1           1 is in use       ) 3 arrives, is there, and is in use    ) 5 ...
//
//   )  released: the stream has used the weights, and the slot may be written
//
// Backward goes the other way: while unit u computes, u - 1 is gathered, and the gradients of u + 1, which lie in the
// slots likewise, are reduced. Gradients are sums in real. With P = 1 every level is the same and nothing travels.
//
// One unit is used twice: the head, before and after the MTP modules that follow it. Its weights and gradients stay
// pinned in their slot meanwhile, so it is gathered and reduced once, like the others. The unit after it has the other
// slot. Later units that would need the pinned slot have a third one, as large as the largest of them. (Without
// pinning, the head, which may be the largest unit of all, would be gathered twice.)
//
//   unit   1  2  3  head = 4  5  6  7  8
//   slot   1  0  1  0         1  2  1  2
#ifndef PARALLEL_SHARDING_H
#define PARALLEL_SHARDING_H

#include "device/arena.h"
#include "parallel/comm.h"

BEGIN_C

typedef enum { SHARD_NONE, SHARD_OPTIMIZER, SHARD_GRADS, SHARD_WEIGHTS } Shard;

// How a run lies on its ranks: rank r is number r % ep of its expert-parallel group.
typedef struct Layout {
    int ranks, rank, ep;
    Shard shard;
    int frozen;        // 1: nothing is trained, so there are no gradients and no moments
    int bf16_moments;  // 1: moments are bf16, 0: real
    int muon;          // 1: Muon trains matrices (layers/muon.h), 0: AdamW trains all
} Layout;

typedef struct ParamBuffer {
    int64_t n, n_decay;       // elements on this rank as the ops see them, padding in; weight decay covers a prefix
    int64_t n_muon;           // Muon trains this prefix, AdamW the rest
    int64_t parts, part;      // ranks that share it; elements of a part (n / parts)
    int64_t first;            // of this rank's own part
    int64_t held, held_from;  // of master, m and v: elements held_from .. held_from + held - 1
    Shard shard;              // SHARD_NONE where parts is 1
    int frozen;               // of the layout: m, v, grad and own_grad are NULL
    int fresh;                // from grads_get on, 1: what is in grad is old, and is to be written over
    floatX* weight;           // (n): valid from weights_get to weights_release
    floatX* held_weight;      // (held): what the update writes
    real* master;             // (held)
    void *m, *v;              // (held), (held - muon_held): real or bf16, by the layout; Muon has no v
    real* grad;               // (n): what backward writes or adds to, from grads_get to grads_reduce
    real* own_grad;           // (part): this rank's part of the sum
} ParamBuffer;

// The buffers of a unit. That of the experts may have 0 elements.
enum { DENSE_PARAMS, EXPERT_PARAMS, BUFFERS };

typedef struct Sharding Sharding;

// Cuts a buffer of `n` elements in use, of which the first n_decay decay and Muon trains the first n_muon: sets the
// fields that say how.
void sharding_cut(ParamBuffer* buffer, int64_t n, int64_t n_decay, int64_t n_muon, int parts, int index, Shard shard);
// The elements at the start of part `index` that Muon trains, and of the held elements.
int64_t muon_part(const ParamBuffer* buffer, int index);
int64_t muon_held(const ParamBuffer* buffer);
// m from held element `at` on.
void* moments_at(const ParamBuffer* buffer, int64_t at, int bf16_moments);
// Names the buffer's arrays, and the slots that all units of a run pass through.
void sharding_plan(Arena* arena, ParamBuffer* buffer, int bf16_moments);
// units: (count) x (BUFFERS); `held` is the one that is visited again after those that follow it.
Sharding* sharding_plan_slots(Arena* arena, ParamBuffer* const* units, int count, int held);

// After the arena is allocated: connects. world and expert_dp (the ranks that own the same experts) are NULL with one
// rank. workspace: bytes for what else is given to the side stream (grads_reduce).
void sharding_connect(Sharding* sharding, Comm* world, Comm* expert_dp, size_t workspace, Ctx* ctx);
void sharding_destroy(Sharding* sharding);

// weights_start gathers a unit's weights unless they are there or on their way. weights_get makes ctx wait for them;
// the host does not wait. weights_release lets the next unit have the slot. Between get and release of a unit only its
// neighbours may be started, or the held unit. `weight` and `grad` are where they are from sharding_connect on,
// whatever lies there.
void weights_start(Sharding* sharding, int unit);
void weights_get(Sharding* sharding, int unit, Ctx* ctx);
void weights_release(Sharding* sharding, int unit, Ctx* ctx);
// The held weights have changed (start, resume, update): whatever was gathered is old.
void weights_changed(Sharding* sharding, Ctx* ctx);
int64_t weights_version(const Sharding* sharding);  // counts these changes, from 1

// grads_get readies the unit's gradient buffers and says which are fresh: all of them in a step's first micro-step, and
// those in a slot always. grads_reduce sums them over the ranks into own_grad: at once where they are not kept whole,
// else in the last micro-step, on the side stream, which it returns: it takes what follows the sums, in the last
// micro-step. grads_wait: ctx waits for all that the side stream was given.
void grads_get(Sharding* sharding, int unit, int first_micro_step, Ctx* ctx);
Ctx* grads_reduce(Sharding* sharding, int unit, int first_micro_step, int last_micro_step, Ctx* ctx);
void grads_wait(Sharding* sharding, Ctx* ctx);

END_C

#endif
