// FSDP-style sharding of flat parameter buffers: each rank owns a part of the weights, gradients and optimizer state.
// Source: ZeRO (arXiv 1910.02054), FSDP (arXiv 2304.11277).
//
// An FSDP unit is a block, the embedding or the head. It has two buffers. The dense parameters are sharded over all
// ranks of the run. The experts are sharded over the ranks that own the same experts (expert data parallelism). A
// buffer of n elements is cut into P parts, one for each rank of that group. --shard sets the elements on each rank:
//
//               weights        gradients      masters and moments
//   none        n              n              n         (all-reduce of the gradients; every rank updates all)
//   optimizer   n              n              n / P     (reduce-scatter; all-gather after the update)
//   grads       n              n / P          n / P     (reduce-scatter in every micro-step)
//   weights     n / P          n / P          n / P     (all-gather before each use)
//
// Parts have equal length, and the last ones end in padding. Dense parameters on 4 ranks:
//
//   | part 0 | part 1 | part 2 | part 3 .. |     P = 4, padding is ..
//     rank 0   rank 1   rank 2   rank 3
//
// Experts on the same ranks with --ep 2: ranks 0 and 1 are one expert-parallel group, 2 and 3 the other. Each group has
// every expert once. The first rank of each group owns the lower half of the experts, the second the upper half:
//
//   lower half  | part 0 | part 1 .. |           upper half  | part 0 | part 1 .. |     P = ranks / ep = 2
//                 rank 0   rank 2  (expert_dp)                 rank 1   rank 3  (expert_dp)
//
// masters are the master weights. Sharded weights and gradients are in slots (double buffering): unit u uses slot u
// % 2. While one unit computes, the next one is prefetched: its all-gather runs on the side stream. In forward with
// --shard weights, time from left to right:
//
//   stream         | unit 1            | unit 2            | unit 3            |
//   side stream    | gather 2 |        | gather 3 |        | gather 4 |        |
//   slot 0         | 2 arrives, is there, and is in use    ) 4 arrives, is there, and is in use ...
//   slot 1           1 is in use       ) 3 arrives, is there, and is in use    ) 5 ...
//
//   )  released: the stream has used the weights, and the slot may be overwritten
//
// Backward goes the other way. While unit u computes, the weights of u - 1 are prefetched, and the gradients of u + 1,
// also in slots, are reduce-scattered. Gradients are summed in real. With P = 1 every level is the same, and there is
// no communication.
//
// One unit is used twice: the head, before and after the MTP module. The module is the last unit, and uses the other
// slot. So the head stays in its slot, and is gathered and reduced once, like the others.
#pragma once

#include "device/arena.h"
#include "parallel/comm.h"

typedef enum { SHARD_NONE, SHARD_OPTIMIZER, SHARD_GRADS, SHARD_WEIGHTS } Shard;

// The rank layout of a run: rank r is number r % ep of its expert-parallel group.
typedef struct Layout {
    int ranks, rank, ep;
    Shard shard;
    int frozen;        // 1: nothing is trained, so there are no gradients and no moments
    int bf16_moments;  // 1: moments are bf16, 0: real
    int muon;          // 1: Muon trains matrices (layers/muon.h), 0: AdamW trains all
} Layout;

// A flat buffer of a unit. Counts and offsets are in elements; the arrays are device memory.
typedef struct ParamBuffer {
    int64_t n, n_decay;         // the whole buffer as the ops see it, padding included; weight decay covers a prefix
    int64_t n_muon;             // Muon trains this prefix, AdamW the rest
    int64_t parts, part;        // ranks of the group that shards it; elements of a part (n / parts)
    int64_t first;              // of this rank's own part
    int64_t owned, owned_from;  // owned by this rank: elements owned_from .. owned_from + owned - 1 of master, m and v
    Shard shard;                // SHARD_NONE where parts is 1
    int frozen;                 // as in Layout: m, v, grad and own_grad are NULL
    int fresh;                  // set by grads_get. 1: backward overwrites grad, 0: it accumulates
    floatX* weight;             // (n): valid from weights_get to weights_release
    floatX* owned_weight;       // (owned): the owned weights, written by the update
    Master* master;             // (owned)
    void *m, *v;                // (owned), (owned - muon_owned): real or bf16, by the layout; Muon has no v
    real* grad;                 // (n): the output of backward, from grads_get to grads_reduce
    real* own_grad;             // (part): this rank's part of the sum over the ranks
    floatX* rounded_grad;       // (n): instead of grad and own_grad if backward writes once, and no sum follows
} ParamBuffer;

// The buffers of a unit. The expert buffer may have 0 elements.
enum { DENSE_PARAMS, EXPERT_PARAMS, BUFFERS };

typedef struct Sharding Sharding;

// Cuts a buffer of `n` elements without padding, and sets the fields n .. shard. Weight decay applies to the first
// n_decay elements, and Muon trains the first n_muon.
void sharding_cut(ParamBuffer* buffer, int64_t n, int64_t n_decay, int64_t n_muon, int parts, int index, Shard shard);
// The number of elements that Muon trains: in part `index`, and among the owned elements. Muon's elements come first.
int64_t muon_part(const ParamBuffer* buffer, int index);
int64_t muon_owned(const ParamBuffer* buffer);
// The moments m from owned element `at` on.
void* moments_at(const ParamBuffer* buffer, int64_t at, int bf16_moments);
// The gradients of the owned elements from `at` on. One of the two functions returns NULL.
const real* grad_at(const ParamBuffer* buffer, int64_t at);
const floatX* rounded_grad_at(const ParamBuffer* buffer, int64_t at);
// Names the buffer's arrays in `arena`. rounded 1: the gradient is rounded to floatX, only for buffers that one rank
// owns alone, in steps of one micro-step.
void sharding_plan(Arena* arena, ParamBuffer* buffer, int bf16_moments, int rounded);
// Whether weights or gradients are sharded, and so are gathered or reduced in slots.
static inline int slotted_weight(const ParamBuffer* p) { return p->shard == SHARD_WEIGHTS; }
static inline int slotted_grad(const ParamBuffer* p) { return p->shard >= SHARD_GRADS && !p->frozen; }
// Names the slots, which all units share. units: (count) x (BUFFERS); sharding_destroy frees the outer array.
Sharding* sharding_plan_slots(Arena* arena, ParamBuffer** units, int count);

// Sets pointers, streams and events after the arena is allocated. world and expert_dp (expert data parallelism: the
// ranks that own the same experts) are NULL with one rank. workspace: bytes of the side stream's workspace, for work
// that the caller queues there (grads_reduce).
void sharding_connect(Sharding* sharding, Comm* world, Comm* expert_dp, size_t workspace, Ctx* ctx);
void sharding_destroy(Sharding* sharding);

// Prefetch: weights_start starts the all-gather of a unit's weights, unless they are in the slot or in flight. Use:
// weights_get also starts the all-gather, and makes ctx wait for the weights; the host does not wait. Then
// weights_release frees the slot for the next unit. Between get and release of a unit, only its neighbours may be
// started. The pointers `weight` and `grad` do not change after sharding_connect, only the contents do.
void weights_start(Sharding* sharding, int unit);
void weights_get(Sharding* sharding, int unit, Ctx* ctx);
void weights_release(Sharding* sharding, int unit, Ctx* ctx);
// The owned weights have changed (start, resume, update): gathered copies are out of date. experts 0: the experts'
// weights have not changed, because Muon updated only their momentum (Step.waits).
void weights_changed(Sharding* sharding, int experts, Ctx* ctx);
int64_t weights_version(const Sharding* sharding, int buffer);  // the number of weights_changed calls for it, from 1

// grads_get makes ctx wait until the unit's gradient buffers are free, and sets `fresh`. All buffers are fresh in a
// step's first micro-step, buffers in a slot always. Otherwise gradients accumulate (gradient accumulation).
//
// grads_reduce sums the unit's gradients over the ranks, on the side stream, and returns that stream. Sharded gradients
// are reduce-scattered in every micro-step, and own_grad accumulates. Replicated gradients are reduced only in the last
// micro-step. In the last micro-step, queue work that needs the sums on the returned stream.
void grads_get(Sharding* sharding, int unit, int first_micro_step, Ctx* ctx);
Ctx* grads_reduce(Sharding* sharding, int unit, int first_micro_step, int last_micro_step, Ctx* ctx);

// The side stream, for transfers of the update and to wait for the reductions. sharding_follow: `next` waits for all
// work of `before` so far.
Ctx* sharding_side(const Sharding* sharding);
void sharding_follow(Sharding* sharding, Ctx* next, Ctx* before);
