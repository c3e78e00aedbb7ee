// A decode step of softmax attention over a window of the last tokens.

#pragma once

#include "key_values.h"

namespace {

struct WindowAttention {
    struct Weights {
        Int window;
        Gate sink;                // the logit of the sink; null in a window that has none
        const float* sink_value;  // (heads of keys and values, value_dim)
    };

    using State = KeyValues;  // of the last window - 1 tokens

    const Weights& weights;
    const Int width, value_dim, sharing, past;  // sharing: query heads that share keys and values
    const SoftmaxMean mean;
    float* logits;  // of the sink, for each head

    WindowAttention(const DecodeJob& job, const Layer& layer, const Weights& weights, Scratch& scratch)
        : weights(weights), width(job.model->width), value_dim(layer.value_dim),
          sharing(layer.grouped ? layer.heads / layer.kv_heads : 1), past(weights.window - 1), mean(job, layer, weights.window + 1, sharing, scratch),
          logits(scratch.take(sharing)) {}

    void step(const HeadInput& input, const State& before, const State& after, float* y) const {
        const Int kv_head = input.head / sharing;
        const PastTokens cached{before, kv_head, past};
        const float* sink = weights.sink_value ? weights.sink_value + kv_head * value_dim : nullptr;
        if (sink)
            for (Int i = 0; i < input.heads; i++) logits[i] = gate_logit(weights.sink, input.head + i, input.x, width);
        mean(input, {}, cached, y, {logits, sink});
        if (past && input.head % sharing == 0) mean.append(input, cached, 1, after);  // once for heads that share
    }
};

}  // namespace
