// A model in memory, and what can be done with it: forward, loss, backward, update.
//
// A block (MLA attention, then dense or MoE MLP), with x the residual stream:
//
//   norm1 = rmsnorm(x)                                            model/forward.c reads top to bottom in this order,
//   q     = norm1 Wq            or  rmsnorm(norm1 Wqa) Wqb        model/backward.c bottom to top
//   kva   = norm1 Wkva          = [c_kv ; k_rope]
//   kv    = rmsnorm(c_kv) Wkvb  = per head [k_nope ; v]
//   q, k_rope turned by rope
//   x     = x + attention(q, kv, k_rope) Wo
//   norm2 = rmsnorm(x)
//   x     = x + mlp(norm2)
//
// With --mtp, training has modules k = 1, 2, ... after the blocks, each a block that predicts the token k + 1 places
// ahead. h^0 is what the main model's head reads, the blocks' output after the final norm:
//
//   x       = [rmsnorm(embedding of t_{i+k}) ; rmsnorm(h^{k-1}_i)] Weh
//   x       = block(x),   h^k = rmsnorm(x),   logits = h^k Wlm_head
//   loss    = loss^0 + weight / modules * sum_k loss^k,   loss^k = -1/T sum_i log p^k_i(t_{i+k+1})
//
// Embedding and lm_head are the main model's. Of a window's T positions the last k have no target: module k computes
// the first T - k alone, so that the others count nowhere, in no expert's load either. Token i + k of these is in the
// window, so its embedding is a row of what the first block read: the embedding is used once, and the gradients of
// these rows join that of the first block's below it. lm_head takes all outputs in one visit. That h^{k-1} comes from
// after the norm, and the order of the two halves, is as SGLang reads the published weights.
//
// Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1, DeepSeek-V3 (arXiv 2412.19437) sections 2.1 and 2.2.
#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H

#include "device/graph.h"
#include "layers/adamw.h"
#include "layers/attention.h"
#include "layers/muon.h"
#include "model/params.h"
#include "moe/moe.h"

BEGIN_C

// What a block keeps from forward to backward. N = B T tokens. With --recompute block only `residual` and the routing
// (in moe) are a block's own; backward rebuilds the rest, in memory that all blocks share.
typedef struct BlockSaved {
    floatX *residual, *norm1;                      // (N, C): x before attention, and normalised
    floatX *cq, *cq_norm;                          // (N, q_lora), only with q_lora
    floatX *q, *kva;                               // (N, H, nope + rope), (N, kv_lora + rope)
    floatX *ckv, *kv;                              // (N, kv_lora) normalised, (N, H, nope + v)
    floatX* att;                                   // (N, H, v)
    floatX *residual2, *norm2;                     // (N, C): x before the MLP, and normalised
    floatX* h;                                     // (N, 2 dense_ffn), dense blocks only
    real *rstd1, *rstd_q, *rstd_kv, *rstd2, *lse;  // (N) each, lse (B, H, T)
    MoeSaved moe;                                  // MoE blocks only; lies in the pool
} BlockSaved;

// What the head reads: the output of the main model (0) or of module k, N_k = B (T - k).
typedef struct Output {
    floatX *residual, *norm;  // (N_k, C): x after the last block, and normalised
    floatX* dnorm;            // (N_k, C): gradient of norm, from model_loss and the next module
    real* rstd;               // (N_k)
} Output;

// What lives only inside forward or backward; all blocks share it.
typedef struct Scratch {
    floatX* out;              // (N, C): output of attention or MLP, before it joins the residual stream
    floatX *act, *dact, *dh;  // (N, dense_ffn), (N, dense_ffn), (N, 2 dense_ffn)
    floatX *dx, *dnorm;       // (N, C): gradient of the residual stream; of a norm's output
    floatX *dq, *dcq, *dcq_norm, *dkva, *dckv, *dkv, *datt;
    floatX *joined, *djoined;    // (N, 2C): what a module projects, and its gradient
    floatX* dembed;              // (N, C): of the modules' embeddings, all together
    real *rstd_embed, *rstd_in;  // (N): of a module's two norms
    floatX* logits;              // (chunk, Vp)
    real* logits_row;            // (V), for model_logits
} Scratch;

// What --mx-stats measures of a block: of each parameter the casts of its products' operands.
enum { BLOCK_STATS = PARAMS * WEIGHT_STATS };

// What a model's memory is for: parameters and optimizer; activations kept for backward; buffers of one block at a
// time; the pool of the MoE blocks; batch, tables and counters.
enum { IN_PARAMS, IN_SAVED, IN_SCRATCH, IN_POOL, IN_STATE, ARENAS };

// Of a step, in device memory: a captured graph reads them there.
typedef struct StepInputs {
    AdamW adamw;
    Muon muon;
} StepInputs;

// Matrices of one shape that Muon takes together (model/update.c): those of a parameter in units first .. first +
// units - 1.
typedef struct MuonGroup {
    ParamId id;
    int first, units;
    int64_t count, rows, columns;  // matrices of all its units
    int64_t at_once;               // that are orthogonalized in one call
} MuonGroup;

// Captured graphs: 16 kinds of micro-steps (model/step.c), and the update.
enum { UPDATE_GRAPH = 16, GRAPHS };

typedef struct Model {
    Settings settings;
    ModelConfig config;
    Layout layout;
    Ctx* ctx;
    Comm *world, *ep, *expert_dp;  // all ranks; the expert-parallel group; ranks that own the same experts
    Arena arena[ARENAS];
    Unit* units;
    Sharding* sharding;
    ProductRoom products;  // what products in MXFP8 share
    double capacity;       // of training's dispatch (moe/dispatch.h), 0: the host waits
    char* no_windows;      // why, where --dispatch auto would have them
    BlockSaved* blocks;    // (L + mtp)
    BlockSaved rebuilt;    // the memory that blocks share with --recompute block
    Pool* pool;            // activations of the MoE blocks, a stack in forward order
    PoolMark pool_empty;
    Dispatch* dispatch;  // of the MoE blocks
    Output outputs[1 + MTP_MAX];
    Scratch t;
    int64_t chunk;  // tokens that the classifier takes at a time

    int64_t window;        // tokens of a sequence of the micro-batch in work
    int64_t B, T;          // of it, or of its positions that a module computes (model_shapes)
    AttnShape attn_shape;  // its shapes
    MoeShape moe_shape;
    int32_t *tokens, *targets;  // (N), (1 + mtp, N): module k's are (B, T - k)
    real *rope_table, *losses;  // (T, rope/2, 2), (N)
    real* bias;                 // (L + mtp, E): the routers' balance biases; rows of dense blocks stay 0
    int64_t* load;              // (L + mtp, E): tokens each expert got in this step
    int64_t* margins;           // (L + mtp, E, MARGIN_BINS): histograms of this step; only with --balance quantile
    int late;                   // 1: in this step modules weigh as in the end
    int first;                  // 1: the micro-step in work is the first of its step
    float mtp_weight;           // of the loss of each module in this step
    int mtp_modules;            // modules that the forward in work computed
    MxStats* mx_stats;          // (L + mtp, BLOCK_STATS): what the casts of this step did, with --mx-stats
    int measures;               // 1: this step makes mx_stats; set before model_step_begin, 0 again after model_update
    StepState *state, *val_state;
    StepInputs* inputs;
    floatX *muon_x, *muon_parts, *muon_work;  // model/update.c
    MuonGroup* muon_groups;                   // NULL without Muon
    int muon_group_count;
    Graph* graphs[GRAPHS];  // NULL: not replayed
} Model;

// Lays out what rank `rank` holds for `backend` without memory or device (--dry-run reads the arenas).
void model_plan(Model* model, const Settings* settings, int rank, Backend backend);
void model_plan_free(Model* model);
// The same with memory, connected to the other ranks; world may be NULL with one. Weights are not set yet: model_init
// or a checkpoint does that.
Model* model_create(const Settings* settings, Ranks* world);
void model_init(Model* model, uint64_t seed);
// The masters were set from outside: the working weights follow from them.
void model_weights_set(Model* model);
void model_destroy(Model* model);
// Bytes that the ops share, on both streams. Of a plan for the other build an estimate from above.
size_t model_workspace(const Model* model);
// Names Muon's buffers in `arena`.
void model_plan_muon(Model* model, Arena* arena);

// Copies a micro-batch of B sequences of T tokens to the device; targets may be NULL (sampling).
// B * T and T must not exceed the settings' batch * seq_len and seq_len.
void model_batch(Model* model, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T);
// Up to the final norm. train 1 counts the experts' load, and goes on with the modules.
void model_forward(Model* model, int train);
// Adds the losses of the batch to state->loss_sum and mtp_sum. dscale != 0: also leaves the gradient of dscale *
// (their sum, the modules' by their weight) in the outputs' dnorm and in lm_head's.
void model_loss(Model* model, StepState* state, float dscale);
// From the outputs' dnorm down to the embedding; all parameters' gradients = in a step's first micro-step and += after
// it, and summed over the ranks by the last. aux: see router_backward; the same in all blocks, those of modules too.
void model_backward(Model* model, float aux, int last_micro_step);

// Training step `step`, from 1: begin, then per micro-batch model_batch and model_micro_step, then model_update.
void model_step_begin(Model* model, int64_t step);
void model_micro_step(Model* model, int last);
// Decides whether the step is good, updates weights and biases (model/update.c). stop: see StepState.
void model_update(Model* model, int stop);
// After a step that overflowed (StepState.retry): the capacity becomes `needed` times the one it had and an eighth
// more, at most that for all tokens of all ranks, and steps count again. All ranks of the run together.
void model_grow_capacity(Model* model, Ranks* world, double needed);
// Whether and why steps are not replayed as graphs (device/graph.h), for the reader; NULL: they are, but for those that
// make mx_stats.
const char* model_unreplayed(const Model* model);

// Logits of token n of the batch in work, (V) on the host, after model_forward.
void model_logits(Model* model, int64_t n, real* host_logits);

// Between them a unit's weights are there, as ops take them in unit->w: gathered, and cast if they have changed since
// they were. `next` is gathered meanwhile (out of range: none).
Unit* unit_begin(Model* model, int unit, int next);
void unit_end(Model* model, int unit);
// Between them ops write or add to a unit's gradients; from `end` on these are summed over the ranks: at once, or in
// the last micro-step, with which their squares join state->grad_sq.
void unit_grads_begin(Model* model, int unit);
void unit_grads_end(Model* model, int unit, int last_micro_step);

// The shapes of what is computed from here on: of the main model (0) or of module k.
void model_shapes(Model* model, int k);
// A block, to t.out; t.dx = the gradient of its residual, from t.dx = that of the residual stream after it. What the
// head reads, of the main model (0) or of module k; t.dx from its gradient. A module as a whole (model/mtp.c).
void block_forward(Model* model, const Unit* unit, int train);
void block_backward(Model* model, const Unit* unit, float aux);
void output_forward(Model* model, int k, const Unit* unit);
void output_backward(Model* model, int k, const Unit* unit);
void module_forward(Model* model, int k);
void module_backward(Model* model, int k, float aux, int last_micro_step);

MoeWeights model_moe_weights(const Model* model, const Unit* unit);
// The name in the log of one of a block's BLOCK_STATS; NULL: no cast of it is made.
const char* model_stats_name(const Model* model, int64_t layer, int cast);
void model_rope(Model* model, floatX* q, floatX* kva, int direction);
// Rebuilds what the block kept nothing of, from its residual.
void model_rebuild_block(Model* model, const Unit* unit);

END_C

#endif
