// A decode step of softmax attention over a window of the last tokens.

#pragma once

#include "key_values.h"

namespace {

struct WindowAttention {
    struct Weights {
        Int window;
    };

    using State = KeyValues;  // of the last window - 1 tokens

    const Int heads, past;
    const SoftmaxMean mean;

    WindowAttention(const DecodeJob& job, const Layer& layer, const Weights& weights, Scratch& scratch)
        : heads(job.model->heads), past(weights.window - 1), mean(job, layer, weights.window, 1, scratch) {}

    void step(const HeadInput& input, const State& before, const State& after, float* y) const {
        const PastTokens cached{before, input.row * heads + input.head, past};
        mean(input, {}, cached, y);
        if (past) mean.append(input, cached, 1, after);
    }
};

}  // namespace
