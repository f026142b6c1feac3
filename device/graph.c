// On the CPU work runs when it is queued: there is nothing to replay.
#include "device/graph.h"

#include "device/cpu.h"

const char* graph_refusal(int of_bytes, Ctx* ctx) { return "the CPU build has no CUDA graphs"; }

Graph* graph_create(void) { return NULL; }
void graph_destroy(Graph* graph) {}

void graph_run(Graph* graph, void (*work)(void* argument), void* argument, Ctx* ctx) { work(argument); }
