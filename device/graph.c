// On the CPU work runs when it is queued: there is nothing to replay.
#include "device/graph.h"

#include "device/cpu.h"

Graph* graph_create(void) { return NULL; }
void graph_destroy(Graph* graph) {}

void graph_run(Graph* graph, void (*work)(void* argument), void* argument, Ctx* ctx) { work(argument); }
