// Muon's memory: matrices that Muon orthogonalizes together, and buffers.
#pragma once

#include "model/params.h"

// Matrices of one shape that Muon orthogonalizes together: of one parameter in units first .. first + units - 1.
typedef struct MuonGroup {
    ParamId id;
    int first, units;
    int64_t count, rows, columns;  // number of matrices in these units; size of a matrix
    int64_t at_once;               // matrices that are orthogonalized in one call
} MuonGroup;

// The groups, and buffers that the update uses (model/update_muon.h).
typedef struct MuonMemory {
    MuonGroup* groups;  // NULL without Muon
    int group_count;
    int64_t wave_size;                 // elements of the largest unit that ranks hold in parts
    floatX *x, *waves, *parts, *work;  // a group; the units of two waves; own parts of a wave; workspace
} MuonMemory;

// Groups the matrices of `units`, and adds the buffers to `arena`.
void muon_plan(MuonMemory* muon, const Unit* units, const ModelConfig* config, Arena* arena);
