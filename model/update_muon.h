// Muon's part of an update. Muon (layers/muon.h) needs whole matrices, and ranks may hold parts of them.
#pragma once

#include "model/model.h"

// After step_decide.
void model_update_muon(Model* model);
