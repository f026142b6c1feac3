// Muon's part of an update. Muon (layers/muon.h) needs whole matrices, and ranks may hold parts of them.
#pragma once

#include "model/model.h"

// Updates all matrices that Muon trains. Call it after step_decide (layers/step.h).
void model_update_muon(Model* model);

// The two ways of model_update_muon. muon_update_whole: the buffers that this rank has whole. muon_update_waves: all
// buffers, if ranks hold some of them in parts (model/muon_waves.c).
void muon_update_whole(Model* model);
void muon_update_waves(Model* model);
// Helpers of both. muon_buffer: n owned elements of a buffer from `from` on, and their updates in x.
// muon_group_orthogonalize: orthogonalizes the matrices of a group, one after another in x.
MuonBuffer muon_buffer(const Model* model, const ParamBuffer* buffer, int64_t from, int64_t n, floatX* x);
void muon_group_orthogonalize(Model* model, const MuonGroup* group, floatX* x);
