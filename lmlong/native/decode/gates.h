// Gates of one head at a token: factors between 0 and 1, projected from the token's vector.

#pragma once

#include "features.h"

namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

float gate_logit(const Gate& gate, Int head, const float* x, Int width) {
    float logit;
    project(gate.weight, 1, head, x, width, &logit);
    return logit + gate.bias[head];
}

// The log decay of a head: fixed, learned, or 0 if it does not decay
float log_decay(const Forgetting& forgetting, Int head, const float* x, Int width) {
    if (forgetting.log_decay) return forgetting.log_decay[head];
    if (!forgetting.gate.weight) return 0;
    const float logit = gate_logit(forgetting.gate, head, x, width);
    const float log_sigmoid = std::min(logit, 0.0f) - std::log1p(std::exp(-std::abs(logit)));
    return log_sigmoid < MIN_LOG_DECAY ? MIN_LOG_DECAY : log_sigmoid;
}

}  // namespace
