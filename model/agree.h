// Checks that all ranks of a run have the same program, options and data, before anything starts. Both functions are
// collective. A difference ends the run (EXIT_USAGE); the message names the rank and the difference.
#pragma once

#include "model/settings.h"
#include "parallel/ranks.h"

// Compares the program (CRC-32 of its file) and every option. Paths of data may differ; agree_on_data compares data.
void agree_on_settings(Ranks* world, const Settings* settings);
// Compares `hash`, the hash of the data that `option` names.
void agree_on_data(Ranks* world, const char* option, uint32_t hash);
