// The parameters of the model: names, shapes, placement, initialization. One table (params.c) defines them; memory
// layout, tensor names, quantization, initialization and checkpoints follow from it.
//
// Parameters belong to units: 0 is the embedding, 1..L are the blocks, L + 1 is the head (lm_head and final norm). Unit
// L + 2 is the MTP module: block L, with a projection before and a norm after. A unit has two flat buffers: dense
// parameters, and experts (empty without). Matrices come before norms in a buffer, so that weight decay covers a prefix
// (n_decay), and so does Muon (n_muon). Fused matrices (gate over up) are laid out so that every tensor of a Hugging
// Face DeepSeek checkpoint is one contiguous slice. A rank owns E / ep experts. Sharding is in parallel/sharding.h.
#pragma once

#include "linear/quantized.h"
#include "model/config.h"
#include "parallel/sharding.h"

// In the order of the buffers.
typedef enum ParamId {
    EMBED,    // (Vp, C): V padded to a multiple of 128
    LM_HEAD,  // (Vp, C)
    EH_PROJ,  // (C, 2C), of the MTP module: from embedding and representation to its block's input
    WQA,      // (q_lora, C), with WQB where queries have a latent
    WQB,      // (H (nope + rope), q_lora)
    WQ,       // (H (nope + rope), C), where queries have no latent
    WKVA,     // (kv_lora + rope, C)
    WKVB,     // (H (nope + v), kv_lora)
    WO,       // (C, H v)
    MLP13,    // (2F', C): gate, then up, of the dense or the shared MLP
    MLP2,     // (C, F')
    ROUTER,   // (E, C)
    W13,      // (E / ep, 2F, C), in the buffer of experts
    W2,       // (E / ep, C, F), in the buffer of experts
    NORM1,    // (C)
    Q_NORM,   // (q_lora)
    KV_NORM,  // (kv_lora)
    NORM2,    // (C)
    ENORM,    // (C), of the embeddings that the MTP module reads
    HNORM,    // (C), of the representations that the MTP module reads
    FINAL_NORM,
    PARAMS
} ParamId;

typedef enum { UNIT_EMBED, UNIT_DENSE, UNIT_MOE, UNIT_HEAD, UNIT_MODULE } UnitKind;
typedef enum { NORMAL, RESIDUAL, ONE } ParamStart;  // params_init_unit

typedef struct Param {
    ParamId id;
    int kinds;              // the kinds of units that have the parameter: 1 << UnitKind each
    int64_t rows, columns;  // of one expert; a vector has 1 row. EMBED and LM_HEAD: without padding
    ParamStart start;
    Optimizer by;  // the optimizer with --optimizer muon
    QuantizedBy quantized_by;
    const char* stats[WEIGHT_STATS];  // names of its statistics in the log (--mx-stats)
    const char* name;                 // Hugging Face's; a block's without "model.layers.N.", an expert's with %d
    const char* second;               // name of the second half of the rows (up after gate), else NULL
} Param;

// Lists the parameters of a kind of unit, in the order of the unit's buffers. Returns their number.
int params_list(Param list[PARAMS], const ModelConfig* config, UnitKind kind);
static inline int param_buffer(ParamId id) { return id == W13 || id == W2 ? EXPERT_PARAMS : DENSE_PARAMS; }

typedef struct Unit {
    UnitKind kind;
    int layer;           // the unit's block, counted from 0; -1: the embedding or the head
    int64_t at[PARAMS];  // offsets into its buffer in elements, -1 where the unit has no such parameter
    ParamBuffer buffer[BUFFERS];
    Weight w[PARAMS];          // as ops take them, from unit_begin to unit_end (model/block.h)
    int64_t version[BUFFERS];  // of the weights that were quantized (parallel/sharding.h)
} Unit;

// A slice of a unit that carries a Hugging Face name.
typedef struct NamedTensor {
    char name[112];
    int buffer;
    int64_t offset, count;  // elements; offset -1: an expert of another rank
    int rank;
    int64_t shape[2];
    double mean, std;  // of its initial values: 0 and a deviation, or 1 and 0 (norms)
    int muon;          // 1: Muon trains it with --optimizer muon
} NamedTensor;

int params_units(const ModelConfig* config);  // L + 2 + mtp
int params_block_unit(const ModelConfig* config, int64_t layer);
// The unit's tensors in the order of its buffers, those of other ranks' experts too, in fresh memory; *count gets their
// number. The list is the same on every layout, except for the offsets.
NamedTensor* params_tensors(const ModelConfig* config, const Layout* layout, int unit, int* count);

// Consecutive elements of a tensor.
typedef struct Slice {
    int64_t first, count;
} Slice;
// The part of a tensor in elements from .. from + n - 1 of its buffer; count 0 if there is none.
Slice tensor_slice(const NamedTensor* tensor, int64_t from, int64_t n);

// Number of parameters: all, and those a token meets (K of E experts; embedding and lm_head included). The
// MTP module is included.
int64_t params_total(const ModelConfig* config);
int64_t params_active(const ModelConfig* config);
// The numerator of MFU: 6 * (active matmul parameters, lm_head in, embedding out) + 6 L H (nope + rope + v) T / 2 (the
// causal half). The MTP module has lm_head once more, and T - 1 of T positions.
double flops_per_token(const ModelConfig* config, int64_t T);

// A unit's kind, layout and sizes; no memory.
Unit params_unit(const ModelConfig* config, const Layout* layout, int index);

// Draws this rank's initial weights of unit `unit`: normal of std 0.02 cut at 3 sigma, residual outputs (Wo, down
// projections) times (2L)^-1/2, norms 1. Tensor i of unit u is stream (u << 20) + i of the seed. Any slice can be drawn
// alone, so the weights do not depend on the rank layout.
void params_init_unit(Unit* units, int unit, const ModelConfig* config, const Layout* layout, uint64_t seed, Ctx* ctx);
