// The state of linear attention, to which the features of a chunk are added.

#pragma once

#include "chunk_features.h"
#include "decay.h"

namespace {

constexpr float ONES[TILE] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

Int state_size(const Line& line) { return line.F * (line.V + 1); }  // S (F, V), then z (F,)

void load_state(const Line& line, const float* from, float* state) {  // (F, V + 1), z last
    const Int features = line.job.features, value_dim = line.job.value_dim;
    std::fill_n(state, state_size(line), 0.0f);
    from += line.index * features * (value_dim + 1);
    for (Int f = 0; f < features; f++, from += value_dim + 1) {
        std::copy_n(from, value_dim, state + f * line.V);
        state[line.F * line.V + f] = from[value_dim];
    }
}

void store_state(const Line& line, const float* state, float* into) {
    const Int features = line.job.features, value_dim = line.job.value_dim;
    into += line.index * features * (value_dim + 1);
    for (Int f = 0; f < features; f++, into += value_dim + 1) {
        std::copy_n(state + f * line.V, value_dim, into);
        into[value_dim] = state[line.F * line.V + f];
    }
}

// S += sum_t fk_t v_t^T and z += sum_t fk_t last_t, for fk and v in rows; `last` holds the last number of each v, the one
// that makes z the last column of S
void add_to_state(const Line& line, const float* fk, const float* v, const float* last, float* state) {
    const Int F = line.F, V = line.V;
    add_matmul(state, F, V, {fk, 1, F}, v, TILE);
    float* z = state + F * V;
    for (Int f = 0; f < F; f += LANES) {
        FloatVec sum = {};
        UNROLL(t, TILE) sum += lanes(fk + t * F + f) * last[t];
        lanes(z + f) += sum;
    }
}

}  // namespace
