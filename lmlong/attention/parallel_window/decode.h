// A decode step of a recurrence with a parallel window, over the same queries, keys and values.

#pragma once

#include "window/decode.h"

namespace {

template <typename Recurrence>
struct ParallelWindow {
    struct Weights {
        typename Recurrence::Weights recurrence;
        WindowAttention::Weights window;
        Gate share;  // weight of the window in the output
    };

    struct State {
        typename Recurrence::State recurrence;
        WindowAttention::State window;
    };

    const Layer& layer;
    const Weights& weights;
    const Int width, head_dim, value_dim;
    Recurrence recurrence;
    WindowAttention window;
    float *q, *k, *near;  // the window's query and key, and its output

    ParallelWindow(const DecodeJob& job, const Layer& layer, const Weights& weights, Scratch& scratch)
        : layer(layer), weights(weights), width(job.model->width), head_dim(layer.head_dim),
          value_dim(layer.value_dim), recurrence(job, layer, weights.recurrence, scratch),
          window(job, layer, weights.window, scratch), q(scratch.take(head_dim)), k(scratch.take(head_dim)),
          near(scratch.take(value_dim)) {}

    void step(const HeadInput& input, const State& before, const State& after, float* y) {
        HeadInput nearby = input;
        std::copy_n(input.q, padded(head_dim), q), std::copy_n(input.k, padded(head_dim), k);
        nearby.q = q, nearby.k = k;
        if (layer.rotated && !layer.uses_rope)
            rope(q, layer.rotated, input.cos_sin), rope(k, layer.rotated, input.cos_sin);
        window.step(nearby, before.window, after.window, near);
        recurrence.step(input, before.recurrence, after.recurrence, y);
        const float share = sigmoid(gate_logit(weights.share, input.head, input.x, width));
        for (Int i = 0; i < value_dim; i++) y[i] = share * near[i] + (1 - share) * y[i];
    }
};

}  // namespace
