// Muon's memory: the matrices that it takes together, and its buffers.
#pragma once

#include "model/params.h"

// Matrices of one shape that Muon takes together: those of a parameter in units first .. first + units - 1.
typedef struct MuonGroup {
    ParamId id;
    int first, units;
    int64_t count, rows, columns;  // matrices of all its units
    int64_t at_once;               // that are orthogonalized in one call
} MuonGroup;

// The groups, and buffers that the update uses (model/update_muon.h).
typedef struct MuonMemory {
    MuonGroup* groups;  // NULL without Muon
    int group_count;
    int64_t wave_size;                 // elements of the largest unit that came in parts
    floatX *x, *waves, *parts, *work;  // a group; the units of two waves; own parts of a wave; workspace
} MuonMemory;

// Groups the matrices of `units`, and adds the buffers to `arena`.
void muon_plan(MuonMemory* muon, const Unit* units, const ModelConfig* config, Arena* arena);
