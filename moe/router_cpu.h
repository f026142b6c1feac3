// The router's selection of groups on the CPU, which load balancing repeats.
#pragma once

#include "device/cpu.h"
#include "moe/router.h"

// The groups of one token from compared = s + bias (E): score (groups), and selected (groups), 1 for the top_groups
// best ones.
void best_groups(char* selected, real* score, const real* compared, RouterShape shape);
