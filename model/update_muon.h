// Muon's part of an update. Muon (layers/muon.h) needs whole matrices, and ranks may hold parts of them.
#pragma once

#include "model/model.h"

// After step_decide.
void model_update_muon(Model* model);

// Its parts: buffers that this rank has whole; all buffers, where ranks hold parts of some (model/muon_waves.c).
void muon_update_whole(Model* model);
void muon_update_waves(Model* model);
// For both: n owned elements of a buffer from `from` on, and their place in x; the matrices of a group, one after
// another in x.
MuonBuffer muon_buffer(const Model* model, const ParamBuffer* buffer, int64_t from, int64_t n, floatX* x);
void muon_group_orthogonalize(Model* model, const MuonGroup* group, floatX* x);
