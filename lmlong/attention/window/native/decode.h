// A decode step of softmax attention over the last tokens.

#pragma once

#include "key_values.h"

namespace {

struct WindowAttention {
    struct Weights {
        Int window;
    };

    struct State {
        float *keys, *values;  // of the last window - 1 tokens
        bool* current;         // which of them are of the current document
    };

    const Int heads, head_dim, value_dim, past;
    const SoftmaxMean mean;

    WindowAttention(const DecodeJob& job, const Layer& layer, const Weights& weights, Scratch& scratch)
        : heads(job.model->heads), head_dim(layer.head_dim), value_dim(job.model->value_dim), past(weights.window - 1),
          mean(job, layer, weights.window, scratch) {}

    void step(const HeadInput& input, const State& before, const State& after, float* y) const {
        const Int row = input.row, line = row * heads + input.head;
        const bool* current = before.current + row * past;
        mean(input, {before.keys, before.values, current, line, past}, {}, y);
        if (!past) return;
        shift(before.keys, after.keys, line * past, input.k, head_dim);
        shift(before.values, after.values, line * past, input.v, value_dim);
        if (input.head) return;
        bool* current_after = after.current + row * past;
        const bool starts = input.token.starts_document;
        for (Int t = 0; t < past; t++) current_after[t] = t + 1 == past || (current[t + 1] && !starts);
    }

    // The cached keys or values without the oldest, and with the new one
    void shift(const float* from, float* into, Int first, const float* x, Int size) const {
        const float* cached = from + first * size;
        float* shifted = into + first * size;
        std::copy_n(cached + size, (past - 1) * size, shifted);
        std::copy_n(x, size, shifted + (past - 1) * size);
    }
};

}  // namespace
