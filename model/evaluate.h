// Measuring a model on text that it does not learn from.
#ifndef MODEL_EVALUATE_H
#define MODEL_EVALUATE_H

#include "data/shards.h"
#include "model/model.h"

BEGIN_C

// Mean loss over the first --val-tokens of the shards, in nats a token. All ranks together; all get it.
double evaluate_loss(Model* model, Shards* shards);

END_C

#endif
