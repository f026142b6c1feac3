#include "model/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/check.h"

// 15.71e9, 1.864e6: four digits, exponents in steps of three.
static char* big(double x) {
    int exponent = x >= 1e9 ? 9 : x >= 1e6 ? 6 : 3;
    return host_format("%#.4ge%d", x / pow(10, exponent), exponent);
}

void report_model(const Settings* s) {
    char* name = option_text(&settings_table[0], s);
    char *total = big((double)params_total(&s->model)), *active = big((double)params_active(&s->model));
    char* flops = big(flops_per_token(&s->model, s->seq_len));
    printf("model      %s: %s parameters (%s active a token), %s FLOPs a token at seq-len %lld\n", name, total, active,
           flops, (long long)s->seq_len);
    free(total);
    free(active);
    free(flops);
    free(name);
}

// Entries of one name are shown as one line: how many, their bytes, and per token where they grow with tokens.
static void report_arena(const Arena* arena, int64_t tokens) {
    printf("  %-48s %12.3f MiB\n", arena->purpose, (double)arena_bytes(arena) / 0x1p20);
    char* done = (char*)host_alloc((size_t)arena->count + 1);
    for (int i = 0; i < arena->count; i++) {
        if (done[i]) continue;
        const ArenaEntry* e = &arena->entries[i];
        double bytes = 0;
        int times = 0;
        for (int j = i; j < arena->count; j++) {
            const ArenaEntry* other = &arena->entries[j];
            if (strcmp(other->name, e->name) != 0) continue;
            done[j] = 1;
            times++;
            bytes += (double)other->count * (double)element_bytes(other->element, arena->backend);
        }
        printf("    %-36s x %-7d %12.3f MiB", e->name, times, bytes / 0x1p20);
        if (e->per_token) printf("  %12.1f bytes a token", bytes / (double)tokens);
        printf("\n");
    }
    free(done);
}

void report_dry_run(const Settings* s) {
    options_print(settings_table, settings_count, s);
    printf("\n");
    report_model(s);
    printf("           parameters %lld, active %lld, FLOPs a token %.6g\n", (long long)params_total(&s->model),
           (long long)params_active(&s->model), flops_per_token(&s->model, s->seq_len));
    for (int b = BACKEND_CPU; b <= BACKEND_CUDA; b++) {
        Model m;
        model_plan(&m, s, 0, (Backend)b);
        const Arena* arenas[5] = {&m.params_arena, &m.saved_arena, &m.scratch_arena, &m.pool_arena, &m.state_arena};
        size_t total = 0;
        printf("\nmemory of each of %d rank%s, %s build (weights and activations in %s), %lld tokens a micro-step\n",
               m.layout.ranks, m.layout.ranks == 1 ? "" : "s", b == BACKEND_CPU ? "CPU" : "CUDA",
               b == BACKEND_CPU ? "float32" : "bf16", (long long)(m.B * m.T));
        for (int i = 0; i < 5; i++) {
            report_arena(arenas[i], m.B * m.T);
            total += arena_bytes(arenas[i]);
        }
        if (b == (int)BACKEND) {
            printf("  %-48s %12.3f MiB\n", "workspace of the ops", (double)model_workspace(&m) / 0x1p20);
            total += model_workspace(&m);
        }
        printf("  %-48s %12.3f MiB = %.3f GiB\n", "total", (double)total / 0x1p20, (double)total / 0x1p30);
        model_plan_free(&m);
    }
}
