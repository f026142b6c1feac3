// Uses a model that is there already: prints a sample of it (--sample), or measures it (--evaluate). Nothing is trained
// or written.
#ifndef PRETRAINED_USE_H
#define PRETRAINED_USE_H

#include "model/settings.h"
#include "parallel/ranks.h"

BEGIN_C

// Prints the sample, or what --val and --eval give. All ranks together.
void use_model(Ranks* world, const Settings* settings);

END_C

#endif
