// Features of a chunk, and the state that they are added to.

#pragma once

#include "reach.h"

namespace {

constexpr float ONES[CHUNK] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Rows of queries or keys to their features, and to the slope of these, if it is wanted
void apply(Map map, Int tokens, Int width, float* rows, float* slope = nullptr) {
    if (map == GIVEN) return;
    for (Int t = 0; t < CHUNK; t++, rows += padded(width), slope += slope ? padded(width) : 0) {
        for (Int i = 0; i < padded(width); i += LANES) {
            const Floats x = lanes(rows + i), zero = {};
            const Floats above = x < zero ? zero : x, below = x > zero ? zero : x;  // no number remains none
            if (map == ELU) {
                const Floats exponent = below * PER_LN2;
                const Floats power = power_of_2(exponent < -126.0f ? zero - 126.0f : exponent);
                lanes(rows + i) = above + power + ELU_FLOOR;
                if (slope) lanes(slope + i) = power;
            } else {
                lanes(rows + i) = above + RELU_FLOOR;
                if (slope) lanes(slope + i) = x > zero ? zero + 1.0f : zero;
            }
        }
        std::fill(rows + (t < tokens ? width : 0), rows + padded(width), 0.0f);
    }
}

Int state_size(const Line& line) { return line.F * (line.E + 1); }  // S in rows of E, then z

void load_state(const Line& line, const float* from, float* state) {
    const Int features = line.job.features, values = line.job.values;
    std::fill_n(state, state_size(line), 0.0f);
    from += line.number * features * (values + 1);
    for (Int f = 0; f < features; f++, from += values + 1) {
        std::copy_n(from, values, state + f * line.E);
        state[line.F * line.E + f] = from[values];
    }
}

void store_state(const Line& line, const float* state, float* into) {
    const Int features = line.job.features, values = line.job.values;
    into += line.number * features * (values + 1);
    for (Int f = 0; f < features; f++, into += values + 1) {
        std::copy_n(state + f * line.E, values, into);
        into[values] = state[line.F * line.E + f];
    }
}

// r times the state, plus features (rows) times values (rows), and times a last value of each token
void advance(const Line& line, float kept, const float* features, const float* values, const float* last, float* state) {
    const Int F = line.F, E = line.E;
    if (kept != 1.0f)
        for (Int i = 0; i < state_size(line); i++) state[i] *= kept;
    add_product(state, F, E, {features, 1, F}, values, CHUNK);
    float* z = state + F * E;
    for (Int f = 0; f < F; f += LANES) {
        Floats sum = {};
        EACH(t, CHUNK) sum += lanes(features + t * F + f) * last[t];
        lanes(z + f) += sum;
    }
}

}  // namespace
