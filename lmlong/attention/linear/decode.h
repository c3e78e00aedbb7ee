// A decode step of linear attention, in one pass over S.

#pragma once

#include "mixer.h"

namespace {

struct LinearAttention {
    struct Weights {
        FeatureMapWeights features;
        Forgetting forgetting;
    };

    struct State {
        void *S, *z;
        Int float64;  // whether S and z are
    };

    const Weights& weights;
    const FeatureMapWeights& features = weights.features;
    const Int width, head_dim, V;
    float *fq, *fk, *inner;
    float *lowered, *forgotten;  // decay by channel: a row of the batch projected to the gates' rank, a head's gates
    Int lowered_row = -1;
    float* numerators;  // may be float64

    LinearAttention(const DecodeJob& job, const Layer& layer, const Weights& weights, Scratch& scratch)
        : weights(weights), width(job.model->width), head_dim(layer.head_dim),
          V(layer.value_dim) {
        for (float** x : {&fq, &fk, &inner, &forgotten}) *x = scratch.take(features.size);
        lowered = scratch.take(weights.forgetting.rank);
        numerators = scratch.take(2 * V);
    }

    void step(const HeadInput& input, const State& before, const State& after, float* y) {
        if (before.float64)
            step_in<double>(input, before, after, y);
        else
            step_in<float>(input, before, after, y);
    }

    template <typename Float>
    void step_in(const HeadInput& input, const State& before, const State& after, float* y) {
        const Int F = features.size, head = input.head;
        apply_feature_map(features, head, false, input.q, head_dim, fq, inner);
        apply_feature_map(features, head, true, input.k, head_dim, fk, inner);
        const Float* S = static_cast<const Float*>(before.S) + head * F * V;
        const Float* z = static_cast<const Float*>(before.z) + head * F;
        Float* S_after = static_cast<Float*>(after.S) + head * F * V;
        Float* z_after = static_cast<Float*>(after.z) + head * F;
        if (input.token.starts_document) {
            std::fill_n(S_after, F * V, Float(0)), std::fill_n(z_after, F, Float(0));
            S = S_after, z = z_after;
        }
        const bool by_channel = weights.forgetting.gate_down;
        Float decay = 0;
        if (by_channel)
            compute_gates(input);
        else
            decay = std::exp(Float(log_decay(weights.forgetting, head, input.x, width)));
        Float *numerator = reinterpret_cast<Float*>(numerators), denominator = 0;
        std::fill_n(numerator, V, Float(0));
        const float* v = input.v;
        for (Int f = 0; f < F; f++, S += V, S_after += V) {
            const Float query = fq[f], key = fk[f];
            if (by_channel) decay = channel_decay<Float>(forgotten[f]);
            z_after[f] = z[f] * decay + key;
            denominator += query * z_after[f];
#pragma GCC ivdep
            for (Int i = 0; i < V; i++) {
                S_after[i] = S[i] * decay + key * v[i];
                numerator[i] += query * S_after[i];
            }
        }
        denominator = denominator < MIN_DENOMINATOR ? Float(MIN_DENOMINATOR) : denominator;
        for (Int i = 0; i < V; i++) y[i] = numerator[i] / denominator;
    }

    // Compute the gates of a head's channels. A gate g is stored as g if it is below one half, else as -(1 - g): long
    // memories depend on digits of 1 - g that g would round away
    void compute_gates(const HeadInput& input) {
        const Int F = features.size, rank = weights.forgetting.rank;
        const Gate& gate = weights.forgetting.gate;
        if (input.token.row != lowered_row) project(weights.forgetting.gate_down, rank, 0, input.x, width, lowered);
        lowered_row = input.token.row;
        project(gate.weight, F, input.head, lowered, rank, forgotten);
        for (Int f = 0; f < F; f++) forgotten[f] += gate.bias[input.head * F + f];
        for (Int f = 0; f < F; f += LANES) {
            const FloatVec x = lanes(forgotten + f), zero = {}, least = simd_exp(zero + MIN_LOG_DECAY);
            const FloatVec small = lesser_sigmoid(x);
            lanes(forgotten + f) = x < zero ? (small < least ? least : small) : -small;
        }
    }

    template <typename Float>
    static Float channel_decay(float gate) {
        return std::signbit(gate) ? 1 + Float(gate) : Float(gate);
    }
};

}  // namespace
