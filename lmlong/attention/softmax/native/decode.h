// A decode step of softmax attention over all tokens of the document.

#pragma once

#include "key_values.h"

namespace {

struct SoftmaxAttention {
    struct Weights {};

    struct State {
        float *keys, *values;  // of the recent tokens
        bool* current;         // which of them are of the current document
        Int recent;
        float *settled_keys, *settled_values;  // of those before, which are not written to
        bool* settled_current;
        Int settled;
    };

    const Layer& layer;
    const Int head_dim, value_dim, sharing;
    const SoftmaxMean mean;

    SoftmaxAttention(const DecodeJob& job, const Layer& layer, const Weights&, Scratch& scratch)
        : layer(layer), head_dim(layer.head_dim), value_dim(job.model->value_dim),
          sharing(job.model->heads / layer.kv_heads), mean(job, layer, most_tokens(job, layer), scratch) {}

    static Int most_tokens(const DecodeJob& job, const Layer& layer) {
        Int most = 0;
        for (Int row = 0; row < (job.separate ? job.rows : 1); row++) {
            const State& state = attention_state<State>(layer_state(job, job.states_before, row, layer));
            most = std::max(most, state.settled + state.recent + 1);
        }
        return most;
    }

    void step(const HeadInput& input, const State& before, const State& after, float* y) const {
        const Int settled = before.settled, recent = before.recent, row = input.row, head = input.head;
        const Int line = row * layer.kv_heads + input.kv_head;
        const bool *settled_current = before.settled_current + row * settled, *current = before.current + row * recent;
        mean(
            input,
            {before.settled_keys, before.settled_values, settled_current, line, settled},
            {before.keys, before.values, current, line, recent},
            y);
        if (head % sharing) return;  // another head of the same keys and values has appended them
        append(before.keys, after.keys, line, recent, input.k, head_dim);
        append(before.values, after.values, line, recent, input.v, value_dim);
        if (head) return;
        bool* current_after = after.current + row * (recent + 1);
        const bool starts = input.token.starts_document;
        for (Int t = 0; t <= recent; t++) current_after[t] = t == recent || (current[t] && !starts);
        if (starts) std::fill_n(after.settled_current + row * settled, settled, false);
    }

    // The cached keys or values with the new one
    static void append(const float* from, float* into, Int line, Int past, const float* x, Int size) {
        std::copy_n(from + line * past * size, past * size, into + line * (past + 1) * size);
        std::copy_n(x, size, into + (line * (past + 1) + past) * size);
    }
};

}  // namespace
