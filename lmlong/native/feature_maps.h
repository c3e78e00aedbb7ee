// Elementwise feature maps, of one SIMD vector at a time.

#pragma once

#include "shared.h"
#include "simd.h"

namespace {

// x above 0 plus e^x below it, and its derivative; NaN stays NaN
inline FloatVec elu_plus_one(FloatVec x, FloatVec& derivative) {
    const FloatVec zero = {}, positive = x < zero ? zero : x, negative = x > zero ? zero : x;
    const FloatVec exponent = negative * LOG2_E;
    derivative = simd_exp2(exponent < -126.0f ? zero - 126.0f : exponent);
    return positive + derivative + ELU_FLOOR;
}

inline FloatVec relu(FloatVec x, FloatVec& derivative) {
    const FloatVec zero = {};
    derivative = x > zero ? zero + 1.0f : zero;
    return (x < zero ? zero : x) + RELU_FLOOR;
}

// The sigmoid at -|x|, from which the sigmoid at x is exact for either sign
inline FloatVec lesser_sigmoid(FloatVec x) {
    const FloatVec zero = {}, power = simd_exp(x < zero ? x : -x);
    return power / (1.0f + power);
}

// x / (1 + e^-x), and its derivative; NaN stays NaN
inline FloatVec silu(FloatVec x, FloatVec& derivative) {
    const FloatVec zero = {}, one = zero + 1.0f, small = lesser_sigmoid(x);
    const FloatVec sigmoid = x < zero ? small : one - small;
    derivative = sigmoid * (one + x * (one - sigmoid));
    return x * sigmoid;
}

}  // namespace
