// A decode step of softmax attention over all tokens of the document.

#pragma once

#include "key_values.h"

namespace {

struct SoftmaxAttention {
    struct Weights {};

    struct State {
        KeyValues settled, recent;  // `settled` is read-only, except `current`
        Int settled_size, recent_size;
    };

    const Int sharing;
    const SoftmaxMean mean;

    SoftmaxAttention(const DecodeJob& job, const Layer& layer, const Weights&, Scratch& scratch)
        : sharing(layer.heads / layer.kv_heads),
          mean(job, layer, most_tokens(job, layer), sharing, scratch) {}

    static Int most_tokens(const DecodeJob& job, const Layer& layer) {
        Int most = 0;
        for (Int row = 0; row < job.rows; row++) {
            const State& state = attention_state<State>(state_at<LayerState>(job, job.states_before, row, layer.state));
            most = std::max(most, state.settled_size + state.recent_size + 1);
        }
        return most;
    }

    void step(const HeadInput& input, const State& before, const State& after, float* y) const {
        const PastTokens recent{before.recent, input.kv_head, before.recent_size};
        mean(input, {before.settled, input.kv_head, before.settled_size}, recent, y);
        if (input.head % sharing) return;  // another thread has the first head of the group, which appends
        mean.append(input, recent, 0, after.recent);
        if (input.token.starts_document && !input.head)
            std::fill_n(after.settled.current, before.settled_size, false);
    }
};

}  // namespace
