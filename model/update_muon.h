// Muon's part of an update: the optimizer of layers/muon.h, which needs whole matrices, on buffers of which ranks may
// hold parts.
#pragma once

#include "model/model.h"

// Groups the matrices, and adds Muon's buffers to `arena`.
void model_plan_muon(Model* model, Arena* arena);
// After step_decide.
void model_update_muon(Model* model);
