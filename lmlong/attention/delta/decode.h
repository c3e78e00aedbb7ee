// A decode step of the delta rule, in two passes over S: read the value stored under the key, then update it and
// compute the output.

#pragma once

#include "mixer.h"

namespace {

struct DeltaAttention {
    struct Weights {
        FeatureMapWeights features;
        Forgetting forgetting;
        Gate beta;
        Int max_beta;
    };

    struct State {
        void* S;
        Int float64;  // whether S is
    };

    const Weights& weights;
    const FeatureMapWeights& features = weights.features;
    const Int width, head_dim, V;
    float *fq, *fk, *inner, *changes;  // changes: may be float64

    DeltaAttention(const DecodeJob& job, const Layer& layer, const Weights& weights, Scratch& scratch)
        : weights(weights), width(job.model->width), head_dim(layer.head_dim),
          V(layer.value_dim) {
        for (float** x : {&fq, &fk, &inner}) *x = scratch.take(features.size);
        changes = scratch.take(2 * V);
    }

    void step(const HeadInput& input, const State& before, const State& after, float* y) const {
        if (before.float64)
            step_in<double>(input, before, after, y);
        else
            step_in<float>(input, before, after, y);
    }

    template <typename Float>
    void step_in(const HeadInput& input, const State& before, const State& after, float* y) const {
        const Int F = features.size, head = input.head;
        const bool starts = input.token.starts_document;
        apply_feature_map(features, head, false, input.q, head_dim, fq, inner);
        apply_feature_map(features, head, true, input.k, head_dim, fk, inner);
        scale_to_unit(fq, F), scale_to_unit(fk, F);
        const Float* S = static_cast<const Float*>(before.S) + head * F * V;
        Float* S_after = static_cast<Float*>(after.S) + head * F * V;
        const Float decay = starts ? 0 : std::exp(Float(log_decay(weights.forgetting, head, input.x, width)));
        const Float beta = weights.max_beta * sigmoid(gate_logit(weights.beta, head, input.x, width));
        Float* change = reinterpret_cast<Float*>(changes);
        std::fill_n(change, V, Float(0));
        if (!starts)
            for (Int f = 0; f < F; f++) {
                const Float key = decay * fk[f];
#pragma GCC ivdep
                for (Int i = 0; i < V; i++) change[i] += key * S[f * V + i];
            }
        for (Int i = 0; i < V; i++) change[i] = beta * (input.v[i] - change[i]), y[i] = 0;
        for (Int f = 0; f < F; f++, S += V, S_after += V) {
            const Float query = fq[f], key = fk[f];
#pragma GCC ivdep
            for (Int i = 0; i < V; i++) {
                S_after[i] = (starts ? 0 : decay * S[i]) + key * change[i];
                y[i] += query * S_after[i];
            }
        }
    }
};

}  // namespace
