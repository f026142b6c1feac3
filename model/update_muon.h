// Muon's part of an update. Muon (layers/muon.h) needs whole matrices, and ranks may hold parts of them.
#pragma once

#include "model/model.h"

// Groups the matrices, and adds Muon's buffers to `arena`.
void model_plan_muon(Model* model, Arena* arena);
// After step_decide.
void model_update_muon(Model* model);
