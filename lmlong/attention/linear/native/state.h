// The state of linear attention, and its update by a chunk.

#pragma once

#include "chunk_features.h"
#include "decay.h"

namespace {

constexpr float ONES[TILE] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// z is stored as an additional column of the state
Int state_size(const BatchHead& batch_head) { return state_size(batch_head, 1); }

// S += sum_t fk_t v_t^T and z += sum_t fk_t last_t, for fk and v in rows; `last` holds the last entry of each v, for
// which z is the last column of S
void add_to_state(const BatchHead& batch_head, const float* fk, const float* v, const float* last, float* state) {
    const Int F = batch_head.F, V = batch_head.V;
    add_matmul(state, F, V, {fk, 1, F}, v, TILE);
    float* z = state + F * V;
    for (Int f = 0; f < F; f += LANES) {
        FloatVec sum = {};
        UNROLL(t, TILE) sum += lanes(fk + t * F + f) * last[t];
        lanes(z + f) += sum;
    }
}

}  // namespace
