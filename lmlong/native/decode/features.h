// The feature map of one query or key of one head.

#pragma once

#include <cmath>

#include "feature_maps.h"
#include "matmul.h"

namespace {

// The factor that brings x to a mean square of 1
float rms_norm_scale(const float* x, Int size, float epsilon = RMS_EPS) {
    FloatVec sums = {};
    Int i = 0;
    for (; i + LANES <= size; i += LANES) sums += lanes(x + i) * lanes(x + i);
    float sum = 0;
    UNROLL(j, LANES) sum += sums[j];
    for (; i < size; i++) sum += x[i] * x[i];
    return 1 / std::sqrt(sum / size + epsilon);
}

// x = e^(x - shift), in place, for padded x
void exp_(float* x, Int size, float shift) {
    for (Int i = 0; i < size; i += LANES) lanes(x + i) = simd_exp(lanes(x + i) - shift);
}

float max_of(const float* x, Int size) {
    FloatVec most = FloatVec{} + x[0];
    Int i = 0;
    for (; i + LANES <= size; i += LANES) most = lanes(x + i) > most ? lanes(x + i) : most;
    float max = x[0];
    UNROLL(j, LANES) max = most[j] > max ? most[j] : max;
    for (; i < size; i++) max = x[i] > max ? x[i] : max;
    return max;
}

float sum_of(const float* x, Int size) {
    FloatVec sums = {};
    Int i = 0;
    for (; i + LANES <= size; i += LANES) sums += lanes(x + i);
    float sum = sum_of_lanes(sums);
    for (; i < size; i++) sum += x[i];
    return sum;
}

// y (rows) = weight[head] x, for weight (heads, rows, width)
void project(const float* weight, Int rows, Int head, const float* x, Int width, float* y) {
    matmul({weight + head * rows * width, FLOAT32, rows, width}, {0, rows}, {x, 0}, 1, y, 0, nullptr);
}

// x = x / |x|
void scale_to_unit(float* x, Int size) {
    float square = UNIT_TINY;
    for (Int i = 0; i < size; i++) square += x[i] * x[i];
    const float factor = 1 / std::sqrt(square);
    for (Int i = 0; i < size; i++) x[i] *= factor;
}

void cosine_features(const float* x, Int head_dim, float* y) {
    float square = COSINE_TINY;
    for (Int i = 0; i < head_dim; i++) square += x[i] * x[i];
    const float factor = COSINE_SHRINK / std::sqrt(square);
    y[0] = 1;
    for (Int i = 0; i < head_dim; i++) y[1 + i] = x[i] * factor;
}

// The softmax of y, in place, for padded y, plus a floor
void softmax_features(float* y, Int size) {
    exp_(y, size, max_of(y, size));
    const float factor = 1 / sum_of(y, size);
    for (Int i = 0; i < size; i++) y[i] = y[i] * factor + SOFTMAX_FLOOR;
}

// [1, u, u_i u_j for i < j, u_i^2 / sqrt 2] of a normalized projection u
void taylor_features(const float* u, Int inner, float* y) {
    const float factor = rms_norm_scale(u, inner) * std::pow(float(inner), -0.25f);
    *y++ = 1;
    const float* linear = y;
    for (Int i = 0; i < inner; i++) *y++ = u[i] * factor;
    for (Int i = 0; i < inner; i++)
        for (Int j = i + 1; j < inner; j++) *y++ = linear[i] * linear[j];
    for (Int i = 0; i < inner; i++) *y++ = linear[i] * linear[i] * 0.70710678f;
}

// As in attention/linear/native/features.h, for one query or key. The constants of a head are the scale of keys of mean
// square 1, half their squared length, and the bound subtracted from the exponents (`Favor.bounds`)
void favor_features(const FeatureMapWeights& features, Int head, bool is_key, float* x, Int head_dim, float* y) {
    const float* constants = features.constants + 3 * head;
    const float factor = rms_norm_scale(x, head_dim) * constants[0];
    float square = 0;
    for (Int i = 0; i < head_dim; i++) x[i] *= factor, square += x[i] * x[i];
    project(features.query_projection, features.inner, head, x, head_dim, y);
    for (Int i = features.inner; i < features.size; i++) y[i] = -y[i - features.inner];
    exp_(y, features.size, is_key ? square / 2 - constants[1] + constants[2] : max_of(y, features.size));
}

// Compute the features y (padded) of a query or key x (padded with zeros). Overwrites x; `inner` is scratch memory for
// its projection
void apply_feature_map(
    const FeatureMapWeights& features, Int head, bool is_key, float* x, Int head_dim, float* y, float* inner) {
    switch (features.map) {
        case IDENTITY:
            std::copy_n(x, padded(head_dim), y);
            break;
        case ELU:
        case RELU:
        case SILU:
            for (Int i = 0; i < head_dim; i += LANES) {
                FloatVec derivative;
                lanes(y + i) = features.map == ELU    ? elu_plus_one(lanes(x + i), derivative)
                               : features.map == RELU ? relu(lanes(x + i), derivative)
                                                               : silu(lanes(x + i), derivative);
            }
            break;
        case COSINE:
            cosine_features(x, head_dim, y);
            break;
        case SOFTMAX:
            std::copy_n(x, padded(head_dim), y);
            softmax_features(y, head_dim);
            break;
        case HEDGEHOG:
            project(is_key ? features.key_projection : features.query_projection, head_dim, head, x, head_dim, y);
            for (Int i = 0; i < head_dim; i++) y[head_dim + i] = -y[i];
            softmax_features(y, 2 * head_dim);
            break;
        case TAYLOR:
            if (const float* weight = is_key ? features.key_projection : features.query_projection) {
                project(weight, features.inner, head, x, head_dim, inner);
                x = inner;
            }
            taylor_features(x, features.inner, y);
            break;
        case FAVOR:
            favor_features(features, head, is_key, x, head_dim, y);
            break;
    }
}

}  // namespace
