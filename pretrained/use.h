// Uses a model that is there already: prints a sample of it (--sample), or measures it (--evaluate). Nothing is trained
// or written.
#pragma once

#include "model/settings.h"
#include "parallel/ranks.h"

// Prints the sample, or what --val and --eval give. All ranks together.
void use_model(Ranks* world, const Settings* settings);
