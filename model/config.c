#include "model/config.h"

#include <math.h>

// Columns of the logits: whole tiles of 128 in the GEMMs.
int64_t config_vocab_padded(const ModelConfig* c) { return (c->V + 127) / 128 * 128; }

RopeConfig config_rope(const ModelConfig* c) {
    const double length = (double)c->yarn_original_len;
    RopeConfig rope = {(int)c->rope, c->rope_theta, (int)c->yarn, c->yarn_factor, c->yarn_mscale, length};
    return rope;
}

double config_softmax_scale(const ModelConfig* c) {
    RopeConfig rope = config_rope(c);
    // YaRN scales queries and keys, so its factor is squared here.
    double mscale = rope_mscale(&rope);
    return mscale * mscale / sqrt((double)(c->nope + c->rope));
}

double run_mtp_weight(const RunConfig* r, int64_t step) {
    return (double)step <= MTP_SWITCH * (double)r->steps ? r->mtp_weight : MTP_WEIGHT_END;
}

// The learning rate over its peak.
static double schedule(const RunConfig* r, int64_t step) {
    // The way up, then how much of the rest is left.
    const double warmup = r->warmup_steps, steps = (double)r->steps;
    if ((double)step <= warmup) return (double)step / warmup;
    double left = steps > warmup ? fmax((steps - (double)step) / (steps - warmup), 0) : 0;

    // Then down, by the shape of --schedule. WSD stays at the peak until the last fifth.
    double share = 1;  // of the way from final_lr_frac to 1
    switch (r->schedule) {
        case SCHEDULE_COSINE: share = 0.5 - 0.5 * cos(3.14159265358979323846 * left); break;
        case SCHEDULE_WSD: share = left < 0.2 ? left / 0.2 : 1; break;
        case SCHEDULE_LINEAR: share = left; break;
    }
    return r->final_lr_frac + (1 - r->final_lr_frac) * share;
}

double run_lr(const RunConfig* r, int64_t step) { return r->lr * schedule(r, step); }
double run_muon_lr(const RunConfig* r, int64_t step) { return r->muon_lr * schedule(r, step); }
