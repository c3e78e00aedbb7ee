// A decode step of layers that only convolve their values, which the mixer has done.

#pragma once

#include "mixer.h"

namespace {

struct ConvolutionMixer {
    struct Weights {};
    struct State {};

    const Int V;

    ConvolutionMixer(const DecodeJob&, const Layer& layer, const Weights&, Scratch&) : V(layer.value_dim) {}

    void step(const HeadInput& input, const State&, const State&, float* y) const { std::copy_n(input.v, V, y); }
};

}  // namespace
