// The feature maps, of one query or key of one head.

#pragma once

#include <cmath>

#include "products.h"

namespace {

// What x is multiplied with to have a mean square of 1
float spread(const float* x, Int size) {
    Floats sums = {};
    Int i = 0;
    for (; i + LANES <= size; i += LANES) sums += lanes(x + i) * lanes(x + i);
    float sum = 0;
    EACH(j, LANES) sum += sums[j];
    for (; i < size; i++) sum += x[i] * x[i];
    return 1 / std::sqrt(sum / size + 1e-6f);
}

// x (padded) to e^(x - less)
void raise(float* x, Int size, float less) {
    for (Int i = 0; i < size; i += LANES) lanes(x + i) = exponential(lanes(x + i) - less);
}

float largest(const float* x, Int size) {
    float most = x[0];
    for (Int i = 1; i < size; i++) most = x[i] > most ? x[i] : most;
    return most;
}

float total(const float* x, Int size) {
    float sum = 0;
    for (Int i = 0; i < size; i++) sum += x[i];
    return sum;
}

void project(const float* rows, Int drawn, Int head, const float* x, Int width, float* y) {
    times({rows + head * drawn * width, nullptr, FLOATS, drawn, width}, {0, drawn}, x, 0, 1, y, 0, nullptr);
}

void expand_cosine(const float* x, Int width, float* y) {
    float square = COSINE_TINY;
    for (Int i = 0; i < width; i++) square += x[i] * x[i];
    const float factor = COSINE_SHRINK / std::sqrt(square);
    y[0] = 1;
    for (Int i = 0; i < width; i++) y[1 + i] = x[i] * factor;
}

// [1, u, products of two of u, squares] of a projection u of one length
void expand_taylor(const float* u, Int inner, float* y) {
    const float factor = spread(u, inner) * std::pow(float(inner), -0.25f);
    *y++ = 1;
    const float* linear = y;
    for (Int i = 0; i < inner; i++) *y++ = u[i] * factor;
    for (Int i = 0; i < inner; i++)
        for (Int j = i + 1; j < inner; j++) *y++ = linear[i] * linear[j];
    for (Int i = 0; i < inner; i++) *y++ = linear[i] * linear[i] * 0.70710678f;
}

// `constants` of a head: the length of keys over that of a mean square of 1, half its square, and what is too large
void expand_favor(const Attention& about, Int head, bool key, float* x, Int width, float* y) {
    const float* constants = about.constants + 3 * head;
    const float factor = spread(x, width) * constants[0];
    float square = 0;
    for (Int i = 0; i < width; i++) x[i] *= factor, square += x[i] * x[i];
    project(about.of_queries, about.drawn, head, x, width, y);
    for (Int i = about.drawn; i < about.features; i++) y[i] = -y[i - about.drawn];
    raise(y, about.features, key ? square / 2 - constants[1] + constants[2] : largest(y, about.features));
}

// x (padded, 0 beyond the width; not kept) to its features y (padded); `own` is room for a projection
void expand(const Attention& about, Int head, bool key, float* x, Int width, float* y, float* own) {
    switch (about.map) {
        case ELU:
        case RELU:
            for (Int i = 0; i < width; i += LANES) {
                const Floats all = lanes(x + i), zero = {};  // no number remains none
                const Floats above = all < zero ? zero : all, below = all > zero ? zero : all;
                lanes(y + i) = above + (about.map == ELU ? exponential(below) + ELU_FLOOR : zero + RELU_FLOOR);
            }
            break;
        case COSINE:
            expand_cosine(x, width, y);
            break;
        case SOFTMAX: {
            std::copy_n(x, padded(width), y);
            raise(y, width, largest(x, width));
            const float factor = 1 / total(y, width);
            for (Int i = 0; i < width; i++) y[i] = y[i] * factor + SOFTMAX_FLOOR;
            break;
        }
        case TAYLOR:
            project(key ? about.of_keys : about.of_queries, about.drawn, head, x, width, own);
            expand_taylor(own, about.drawn, y);
            break;
        case FAVOR:
            expand_favor(about, head, key, x, width, y);
            break;
    }
}

}  // namespace
