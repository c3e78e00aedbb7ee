// The part that the forward and the backward pass of the delta rule share: the tokens of a chunk, and their changes of
// the state. The letters are those of delta/chunk.py.

#pragma once

#include <cmath>

#include "chunk.h"

namespace {

void scale(float* x, Int size, float factor) {
    if (factor != 1.0f)
        for (Int i = 0; i < size; i++) x[i] *= factor;
}

// Zero all weights [s][t] except those with s < t
void only_before(float* weights) {
    for (Int s = 0; s < TILE; s++) std::fill_n(weights + s * TILE, s + 1, 0.0f);
}

// Scale each row of features to length one, and write the scaling `factors` (TILE)
void scale_to_unit(Int width, float* rows, float* factors) {
    for (Int t = 0; t < TILE; t++) {
        float* row = rows + t * padded(width);
        factors[t] = 1 / std::sqrt(dot(row, row, padded(width)) + UNIT_TINY);
    }
    scale_rows(rows, padded(width), factors);
}

struct DeltaPass {
    const BatchHead& batch_head;
    const ScanJob& job = batch_head.job;
    const FeatureMap feature_map = FeatureMap(batch_head.job.feature_map);
    const Int F = batch_head.F, V = batch_head.V;
    Decay decay;
    float *q, *k, *v, *qT, *kT;  // q and k are features as soon as they are loaded
    alignas(64) float P[TILE * TILE], M[TILE * TILE];  // [s][t]
    alignas(64) float beta[TILE], q_scale[TILE], k_scale[TILE];

    DeltaPass(const BatchHead& batch_head, Scratch& scratch) : batch_head(batch_head) {
        for (float** x : {&q, &k, &qT, &kT}) *x = scratch.take(TILE * F);
        v = scratch.take(TILE * V);
    }

    void load_queries(Int begin, Int ahead = TILE, float* derivative = nullptr) {
        batch_head.load(job.q, begin, job.features, q, ahead);
        features(begin, q, derivative, q_scale);
        transpose(q, TILE, F, qT);
    }

    void load_keys(Int begin, Int ahead = TILE, float* derivative = nullptr) {
        decay_masks(batch_head, begin, decay);
        batch_head.load(job.k, begin, job.features, k, ahead), batch_head.load(job.v, begin, job.value_dim, v, ahead);
        features(begin, k, derivative, k_scale);
        transpose(k, TILE, F, kT);
        for (Int t = 0; t < TILE; t++)
            beta[t] = t < batch_head.tokens(begin) ? *batch_head.pointer(job.beta, begin + t) : 0.0f;
    }

    void features(Int begin, float* rows, float* derivative, float* factors) {
        if (feature_map == IDENTITY) return;
        apply_feature_map(feature_map, batch_head.tokens(begin), job.features, rows, derivative);
        scale_to_unit(job.features, rows, factors);
    }

    // Compute the weights between keys
    void key_weights() {
        std::fill_n(M, TILE * TILE, 0.0f);
        add_matmul(M, TILE, TILE, {k, F, 1}, kT, F);
        apply_mask(decay, M), only_before(M);
    }

    void query_weights() {
        std::fill_n(P, TILE * TILE, 0.0f);
        add_matmul(P, TILE, TILE, {k, F, 1}, qT, F);
        apply_mask(decay, P);
    }

    // Compute E = v - a S^T k, the difference from the value stored under each key, and the changes U, token by token
    void changes(const float* state, float* E, float* U) {
        std::fill_n(E, TILE * V, 0.0f);
        add_matmul(E, TILE, V, {k, F, 1}, state, F);
        if (!decay.none) scale_rows(E, V, decay.from_state);
        for (Int i = 0; i < TILE * V; i++) E[i] = v[i] - E[i];
        for (Int t = 0; t < TILE; t++) {
            float* u = U + t * V;
            for (Int i = 0; i < V; i++) u[i] = E[t * V + i];
            for (Int s = 0; s < t; s++) subtract(u, M[s * TILE + t], U + s * V);
            for (Int i = 0; i < V; i++) u[i] *= beta[t];
        }
    }

    // S = r S + sum_s e_s k_s u_s^T; changes k
    void update_state(const float* U, float* state) {
        if (!decay.none) scale_rows(k, F, decay.to_end);
        scale(state, state_size(batch_head), decay.chunk);
        add_matmul(state, F, V, {k, 1, F}, U, TILE);
    }

    void subtract(float* from, float factor, const float* x) const {
        for (Int i = 0; i < V; i += LANES) lanes(from + i) -= factor * lanes(x + i);
    }
};

}  // namespace
