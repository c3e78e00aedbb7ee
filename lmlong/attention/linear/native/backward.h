// The backward pass of a span. It first computes the state before each chunk, then goes from the last chunk to the
// first. dx is the gradient of x; n are the numerators and m the denominators of the outputs, as in chunk.py.

#pragma once

#include "chunk_decay.h"
#include "features.h"

namespace {

struct Backward {
    const BatchHead& batch_head;
    const ScanJob& job = batch_head.job;
    const Int F = batch_head.F, V = batch_head.V, size = state_size(batch_head), chunks = padded(job.time) / TILE;
    ChunkDecay decay;
    Features queries, keys;
    float *q = queries.rows, *k = keys.rows;  // dq and dk are their gradients
    float *v, *y, *dn, *qT, *kT, *vT, *dnT, *dqT, *dkT;
    float* key_features;                      // of the whole span, for FAVOR+: recomputing projections would cost more
    float *rows, *dstate, *states;            // `states`: before each chunk, and after the last
    const float *state_before, *state_after;  // of the chunk
    alignas(64) float weights[TILE * TILE], dweights[TILE * TILE], dweightsT[TILE * TILE], dm[TILE];

    Backward(const BatchHead& batch_head, Scratch& scratch)
        : batch_head(batch_head), decay(batch_head, scratch), queries(batch_head, false, true, scratch),
          keys(batch_head, true, true, scratch) {
        for (float** x : {&qT, &kT, &dqT, &dkT}) *x = scratch.take(TILE * F);
        for (float** x : {&v, &y, &dn, &vT, &dnT}) *x = scratch.take(TILE * V);
        rows = scratch.take(TILE * std::max(V, F));
        dstate = scratch.take(size);
        states = scratch.take((chunks + 1) * size);
        key_features = job.feature_map == FAVOR ? scratch.take(chunks * TILE * F) : nullptr;
    }

    void run() {
        DenormalsAreZero mode;
        compute_states();
        load_state(batch_head, job.dstate_after, dstate);
        for (Int begin = (chunks - 1) * TILE; begin >= 0; begin -= TILE) {
            state_before = states + begin / TILE * size, state_after = state_before + size;
            load(begin);
            backward_outputs(begin);
            attention_weights();
            backward_q();
            backward_k();
            if (job.dlog_decay.data) {
                transpose(k, TILE, F, kT);
                decay.backward_log_decay(begin, qT, dqT, kT, dkT, state_after, dstate);
            }
            queries.backward(begin, dqT, rows), keys.backward(begin, dkT, rows);
            decay.scale_queries(q), decay.scale_keys(k);
            backward_v(begin);
            decay.scale_state(dstate);
            add_to_state(batch_head, q, dn, dm, dstate);
        }
        store_state(batch_head, dstate, job.dstate_before);
        if (job.dscale) job.dscale[batch_head.index] = queries.dscale + keys.dscale;
    }

    void compute_states() {
        float* state = states;
        load_state(batch_head, job.state_before, state);
        for (Int begin = 0; begin < job.time; begin += TILE, state += size) {
            std::copy_n(state, size, state + size);
            decay.load(begin);
            keys.load(begin), batch_head.load(job.v, begin, job.value_dim, v);
            if (key_features) std::copy_n(k, TILE * F, key_features + begin * F);
            decay.scale_keys(k);
            decay.scale_state(state + size);
            add_to_state(batch_head, k, v, ONES, state + size);
        }
    }

    void load(Int begin) {
        decay.load(begin);
        queries.load(begin, -TILE), keys.load(begin, -TILE, key_features ? key_features + begin * F : nullptr);
        batch_head.load(job.v, begin, job.value_dim, v, -TILE), batch_head.load(job.y, begin, job.value_dim, y, -TILE);
        batch_head.load(job.dy, begin, job.value_dim, dn, -TILE);
    }

    // Replace dy by dn = dy / m, and compute dm = -dn . y, which is 0 if m was clamped
    void backward_outputs(Int begin) {
        alignas(64) float sums[TILE * TILE] = {}, sumsT[TILE * TILE], inverse[TILE] = {}, unclamped[TILE] = {};
        for (Int t = 0; t < batch_head.tokens(begin); t++) {
            const float denominator = *batch_head.pointer(job.denominators, begin + t);
            inverse[t] = 1 / denominator;
            unclamped[t] = denominator > MIN_DENOMINATOR ? 1 : 0;
        }
        scale_rows(dn, V, inverse);
        for (Int t = 0; t < TILE; t++)
            for (Int i = t * V; i < (t + 1) * V; i += TILE)
                for (Int j = 0; j < TILE; j++) sums[t * TILE + j] += dn[i + j] * y[i + j];
        transpose(sums, TILE, TILE, sumsT);
        std::fill_n(dm, TILE, 0.0f);
        for (Int j = 0; j < TILE; j++)
            for (Int t = 0; t < TILE; t++) dm[t] -= sumsT[j * TILE + t];
        for (Int t = 0; t < TILE; t++) dm[t] = unclamped[t] > 0 ? dm[t] : 0.0f;
    }

    // The weights within the chunk and their gradients, [s][t]
    void attention_weights() {
        transpose(q, TILE, F, qT), transpose(v, TILE, V, vT), transpose(dn, TILE, V, dnT);
        decay.attention_weights(qT, k, weights);
        for (Int s = 0; s < TILE; s++) std::copy_n(dm, TILE, dweights + s * TILE);
        add_matmul(dweights, TILE, TILE, {v, V, 1}, dnT, V);
        apply_mask(decay.masks, dweights);
        transpose(dweights, TILE, TILE, dweightsT);
    }

    void backward_q() {
        const float* z = state_before + F * V;
        for (Int f = 0; f < F; f++)
            for (Int t = 0; t < TILE; t++) dqT[f * TILE + t] = z[f] * dm[t];
        add_matmul(dqT, F, TILE, {state_before, V, 1}, dnT, V);
        decay.backward_queries(dweights, k, dqT);
    }

    void backward_k() {
        const float* dz = dstate + F * V;
        for (Int f = 0; f < F; f++) std::fill_n(dkT + f * TILE, TILE, dz[f]);
        add_matmul(dkT, F, TILE, {dstate, V, 1}, vT, V);
        decay.backward_keys(dweights, dweightsT, q, dkT);
    }

    void backward_v(Int begin) {
        std::fill_n(rows, TILE * V, 0.0f);
        add_matmul(rows, TILE, V, {k, F, 1}, dstate, F);
        add_matmul(rows, TILE, V, {weights, TILE, 1}, dn, TILE);
        batch_head.store(job.dv, begin, job.value_dim, rows);
    }
};

}  // namespace
