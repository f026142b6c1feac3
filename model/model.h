// A model in memory, and what can be done with it: forward, loss, backward, update.
//
// A block (MLA attention, then dense or MoE MLP), with x the residual stream:
//
//   norm1 = rmsnorm(x)                                            model/block_forward.c reads top to bottom,
//   q     = norm1 Wq            or  rmsnorm(norm1 Wqa) Wqb        model/block_backward.c bottom to top
//   kva   = norm1 Wkva          = [c_kv ; k_rope]
//   kv    = rmsnorm(c_kv) Wkvb  = per head [k_nope ; v]
//   q, k_rope turned by rope
//   x     = x + attention(q, kv, k_rope) Wo
//   norm2 = rmsnorm(x)
//   x     = x + mlp(norm2)
//
// Multi-token prediction (--mtp 1): an MTP module follows the blocks in training. The module is a block that predicts
// the token after the next token. h is the output of the last block after the final norm:
//
//   x       = [rmsnorm(embedding of t_{i+1}) ; rmsnorm(h_i)] Weh
//   x       = block(x),   h' = rmsnorm(x),   logits = h' Wlm_head
//   loss    = main loss + weight * module's loss,   module's loss = -1/T sum_i log p_i(t_{i+2})
//
// Embedding and lm_head are the main model's. The last of a window's T positions has no target, so the module computes
// the first T - 1 positions only. The last position counts in no loss and in no expert's load. The first block and the
// module read the same row for the embedding of token i + 1: the embedding runs once, and the two gradients of the row
// are added. lm_head runs once for main model and module. As in SGLang, h is taken after the final norm, and Weh's
// input is [embedding, hidden].
//
// Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1, DeepSeek-V3 (arXiv 2412.19437) sections 2.1 and 2.2.
#pragma once

#include "data/shards.h"
#include "device/graph.h"
#include "layers/adamw.h"
#include "layers/attention.h"
#include "layers/muon.h"
#include "layers/step.h"
#include "model/muon_groups.h"
#include "moe/moe.h"

// Activations of a block that backward needs; N = B T tokens. With activation checkpointing (--recompute block) each
// block keeps only `residual` and its routing (in moe). Backward computes the other activations again, in memory shared
// by all blocks.
typedef struct BlockSaved {
    floatX *residual, *norm1;                      // (N, C): x before attention, and normalised
    floatX *cq, *cq_norm;                          // (N, q_lora), only with q_lora
    floatX *q, *kva;                               // (N, H, nope + rope), (N, kv_lora + rope)
    floatX *ckv, *kv;                              // (N, kv_lora) normalised, (N, H, nope + v)
    floatX* att;                                   // (N, H, v)
    floatX *residual2, *norm2;                     // (N, C): x before the MLP, and normalised
    floatX* h;                                     // (N, 2 dense_ffn), dense blocks only
    real *rstd1, *rstd_q, *rstd_kv, *rstd2, *lse;  // (N) each, lse (B, H, T)
    MoeSaved moe;                                  // MoE blocks only; in the pool
} BlockSaved;

// Input of lm_head: the output of the main model (0) or of the MTP module (1). The module has N = B (T - 1).
typedef struct Output {
    floatX *residual, *norm;  // (N, C): x after the last block, and normalised
    floatX* dnorm;            // (N, C): gradient of norm, from model_loss and the module
    real* rstd;               // (N)
} Output;

// Workspace of one block at a time, shared by all blocks.
typedef struct Workspace {
    floatX* out;         // (N, C): output of attention or MLP, before the residual add
    MlpBuffers mlp;      // of a dense block; forward uses `a` too
    floatX *dx, *dnorm;  // (N, C): gradient of the residual stream; of a norm's output
    floatX *dq, *dcq, *dcq_norm, *dkva, *dckv, *dkv, *datt;
    floatX *joined, *djoined;    // (N, 2C): input of the MTP module's projection, and its gradient
    floatX* dembed;              // (N, C): gradient of the embeddings that the MTP module reads
    real *rstd_embed, *rstd_in;  // (N): rstd of the MTP module's two norms
    int64_t chunk;               // tokens per chunk of the classifier
    floatX* logits;              // (chunk, Vp)
    real* logits_row;            // (V), for model_logits
} Workspace;

// The number of quantization statistics of a block (--mx-stats): one for each operand of each parameter's GEMMs.
enum { BLOCK_STATS = PARAMS * WEIGHT_STATS };

// The arenas, memory by purpose: parameters and optimizer; activations kept for backward; workspace of one block at a
// time; the pool of the MoE blocks; batch, tables and counters.
enum { IN_PARAMS, IN_SAVED, IN_SCRATCH, IN_POOL, IN_STATE, ARENAS };

// Shapes of the current computation: B sequences of T tokens, N = B T. T is window, or window - 1 in the MTP module.
typedef struct Shapes {
    int64_t window, B, T, N;
    AttnShape attention;
    MoeShape moe;
} Shapes;

// Hyperparameters of a step, in device memory so that a captured CUDA graph reads new values.
typedef struct StepInputs {
    AdamW adamw;
    Muon muon[BUFFERS];  // experts have --muon-expert-steps times the learning rate
} StepInputs;

// A training step: hyperparameters, results and counters in device memory, then the host's own numbers.
typedef struct Step {
    StepInputs* inputs;
    StepState* state;
    int64_t* load;             // (L + mtp, E): tokens each expert got
    int64_t* margins;          // (L + mtp, MARGIN_BINS, E): histograms; only with --balance quantile
    QuantizationStats* stats;  // (L + mtp, BLOCK_STATS): quantization statistics, with --mx-stats
    int first;                 // 1: this micro-step is the step's first
    int waits[BUFFERS];        // 1: Muon updates only this buffer's momentum (experts)
    int late;                  // 1: the MTP loss weight is already MTP_WEIGHT_END
    float mtp_weight;          // weight of the MTP loss
} Step;

// Captured graphs: 24 kinds of micro-steps (model/step.c), and two of updates (model/update.c).
enum { UPDATE_GRAPH = 24, GRAPHS = 26 };

typedef struct Model {
    ModelConfig config;
    RunConfig run;
    Layout layout;
    Ctx* ctx;
    Ranks* ranks;  // all ranks of the run; NULL with one rank
    // All ranks; the expert-parallel group; ranks that own the same experts. A group of all ranks is `world` itself.
    Comm *world, *ep, *expert_dp;
    Arena arena[ARENAS];
    Unit* units;
    Sharding* sharding;
    real* bias;  // (L + mtp, E): the routers' selection biases; rows of dense blocks stay 0

    // A micro-batch.
    Shapes shapes;
    int32_t *tokens, *targets;  // (N), (1 + mtp, N): the module's are (B, T - 1)
    real *rope_table, *losses;  // (T, rope/2, 2), (N)
    int mtp;                    // 1: this forward computes the MTP module
    BlockSaved* blocks;         // (L + mtp)
    BlockSaved rebuilt;         // the memory that blocks share with --recompute block
    Output outputs[2];
    Workspace work;
    GemmWorkspace gemms;  // workspace shared by quantized GEMMs; stats is NULL in steps without --mx-stats

    // MoE blocks.
    Pool* pool;  // activations of the MoE blocks, a stack in forward order
    Dispatch* dispatch;
    int windows;        // 1: training dispatches by windows (model/windows.c)
    char* no_windows;   // the reason why --dispatch auto uses no windows, or NULL
    real* overflow;     // of the windows, in device memory (moe/dispatch_windows.h); NULL without
    Fetch* overflowed;  // the copy of `overflow` on the host

    // A step.
    Step step;
    StepState* val_state;  // the losses of a validation
    MuonMemory muon;
    Graph* graphs[GRAPHS];  // NULL: not replayed
} Model;

// Plans the memory of rank `rank` for `backend` without allocating it (--dry-run reads the arenas).
void model_plan(Model* model, const ModelConfig* config, const RunConfig* run, int rank, Backend backend);
void model_plan_free(Model* model);
// Plans a model, allocates its memory and connects the ranks; world may be NULL with one rank. model_init or a
// checkpoint sets the weights. model_destroy frees the model.
Model* model_create(const ModelConfig* config, const RunConfig* run, Ranks* world);
void model_init(Model* model, uint64_t seed);
void model_destroy(Model* model);
// Bytes of workspace for the ops of both streams. For a plan of the other build: an upper bound.
size_t model_workspace(const Model* model);
// Sets the shapes for the main model (0) or the MTP module (1).
void model_shapes(Model* model, int module);

// Copies a micro-batch of B sequences of T tokens to the device; targets may be NULL (sampling).
// B * T and T must not exceed the run's batch * seq_len and seq_len.
void model_batch(Model* model, const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T);
// Forward up to the final norm. train 1: counts the loads of the experts, and runs the MTP module.
void model_forward(Model* model, int train);
// Adds the losses of the batch to state->loss_sum and mtp_sum. dscale != 0: also computes the gradient of dscale *
// (loss + weighted MTP loss) with respect to the outputs' norm (dnorm) and lm_head.
void model_loss(Model* model, StepState* state, float dscale);
// Backward from the outputs' dnorm to the embedding. Gradient accumulation: the first micro-step overwrites the
// gradients, and later micro-steps add to them. After the last micro-step the gradients are sums over the ranks. aux:
// the weight of the balance loss (router_backward), the same in all blocks and in the MTP module.
void model_backward(Model* model, float aux, int last_micro_step);

// Training step `step`, from 1: model_gradient, then model_update. model_gradient computes the gradient of all
// micro-batches of the step: model_step_begin, then model_batch and model_micro_step for each micro-batch.
void model_gradient(Model* model, Loader* loader, int64_t step);
void model_step_begin(Model* model, int64_t step);
void model_micro_step(Model* model, int last);
// Decides whether the step is good. A good step updates weights and selection biases (model/update.c). stop: see
// StepState.
void model_update(Model* model, int stop);
// The reason why steps do not run as CUDA graphs (device/graph.h). NULL: all steps do, except steps with quantization
// statistics.
const char* model_unreplayed(const Model* model);

// Logits (V) of token n of the current batch, copied to the host; after model_forward.
void model_logits(Model* model, int64_t n, real* host_logits);
