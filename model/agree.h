// The ranks of a run must run the same program with the same options on the same data: checked before anything starts.
// Collective; what differs ends the run with a message that names the rank and the difference.
#pragma once

#include "model/settings.h"
#include "parallel/ranks.h"

// The program (CRC-32 of its file) and every option; the files of the data may have other paths (agree_on_data).
void agree_on_settings(Ranks* world, const Settings* settings);
// hash: of what `option` names.
void agree_on_data(Ranks* world, const char* option, uint32_t hash);
