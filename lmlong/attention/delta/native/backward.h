// The backward pass of a span. It first computes the state before each chunk, then goes from the last chunk to the
// first. dx is the gradient of x.

#pragma once

#include "pass.h"

namespace {

struct Backward : DeltaPass {
    const Int size = state_size(batch_head), chunks = padded(job.time) / TILE;
    float *dy, *dR, *dyT, *dRT, *UT, *dqT, *dk_endT, *dk_beginT, *q_derivative, *k_derivative, *rows;
    float *dstate, *states, *all_E, *all_U;        // `states`: before each chunk, and after the last
    const float *state_before, *state_after, *E, *U;  // of the chunk
    alignas(64) float dP[TILE * TILE], dL[TILE * TILE], dM[TILE * TILE], transposed[TILE * TILE];

    Backward(const BatchHead& batch_head, Scratch& scratch) : DeltaPass(batch_head, scratch) {
        for (float** x : {&dqT, &dk_endT, &dk_beginT, &q_derivative, &k_derivative}) *x = scratch.take(TILE * F);
        for (float** x : {&dy, &dR, &dyT, &dRT, &UT}) *x = scratch.take(TILE * V);
        rows = scratch.take(TILE * F);
        dstate = scratch.take(size);
        states = scratch.take((chunks + 1) * size);
        all_E = scratch.take(chunks * TILE * V), all_U = scratch.take(chunks * TILE * V);
    }

    void run() {
        compute_states();
        load_state(batch_head, job.dstate_after, dstate);
        for (Int chunk = chunks - 1; chunk >= 0; chunk--) {
            const Int begin = chunk * TILE;
            state_before = states + chunk * size, state_after = state_before + size;
            E = all_E + begin * V, U = all_U + begin * V;
            load_keys(begin, -TILE, k_derivative), load_queries(begin, -TILE, q_derivative);
            batch_head.load(job.dy, begin, job.value_dim, dy, -TILE);
            key_weights(), query_weights();
            backward_changes();
            backward_weights(begin);
            backward_values(begin);
            backward_q(), backward_k();
            if (job.dlog_decay.data) backward_log_decay(begin);
            backward_state();
            for (Int i = 0; i < TILE * F; i++) dk_beginT[i] += dk_endT[i];
            backward_features(job.dq, begin, dqT, q, q_derivative, q_scale);
            backward_features(job.dk, begin, dk_beginT, k, k_derivative, k_scale);
        }
        store_state(batch_head, dstate, job.dstate_before);
    }

    void compute_states() {
        float* state = states;
        load_state(batch_head, job.state_before, state);
        for (Int begin = 0; begin < job.time; begin += TILE, state += size) {
            load_keys(begin), key_weights();
            changes(state, all_E + begin * V, all_U + begin * V);
            std::copy_n(state, size, state + size);
            update_state(all_U + begin * V, state + size);
        }
    }

    // Compute dU = P^T dY + e k dS', and dR, from the last token to the first
    void backward_changes() {
        std::fill_n(dR, TILE * V, 0.0f);
        add_matmul(dR, TILE, V, {k, F, 1}, dstate, F);
        if (!decay.none) scale_rows(dR, V, decay.to_end);
        add_matmul(dR, TILE, V, {P, TILE, 1}, dy, TILE);
        for (Int t = TILE - 2; t >= 0; t--)
            for (Int later = t + 1; later < TILE; later++)
                subtract(dR + t * V, beta[later] * M[t * TILE + later], dR + later * V);
        transpose(dR, TILE, V, dRT), transpose(dy, TILE, V, dyT), transpose(U, TILE, V, UT);
    }

    // Compute dP, dL, dM and dbeta
    void backward_weights(Int begin) {
        for (float* x : {dP, dL}) std::fill_n(x, TILE * TILE, 0.0f);
        add_matmul(dP, TILE, TILE, {U, V, 1}, dyT, V);
        add_matmul(dL, TILE, TILE, {U, V, 1}, dRT, V);
        apply_mask(decay, dP), only_before(dL);
        float dbeta[TILE];
        for (Int t = 0; t < TILE; t++) dbeta[t] = dot(dR + t * V, E + t * V, V);
        for (Int s = 0; s < TILE; s++)
            for (Int t = 0; t < TILE; t++) {
                dbeta[t] -= dL[s * TILE + t] * M[s * TILE + t];
                dM[s * TILE + t] = -beta[t] * dL[s * TILE + t];
            }
        apply_mask(decay, dM);
        if (job.dbeta.data)
            for (Int t = 0; t < batch_head.tokens(begin); t++) *batch_head.pointer(job.dbeta, begin + t) = dbeta[t];
    }

    // Store dv = b dR, then replace dR by -a b dR
    void backward_values(Int begin) {
        scale_rows(dR, V, beta);
        batch_head.store(job.dv, begin, job.value_dim, dR);
        float factors[TILE];
        for (Int t = 0; t < TILE; t++) factors[t] = -decay.from_state[t];
        scale_rows(dR, V, factors);
        transpose(dR, TILE, V, dRT);
    }

    void backward_q() {
        std::fill_n(dqT, F * TILE, 0.0f);
        add_matmul(dqT, F, TILE, {state_before, V, 1}, dyT, V);
        if (!decay.none) scale_columns(dqT, F, decay.from_state);
        add_matmul(dqT, F, TILE, {k, 1, F}, dP, TILE);
    }

    // Compute the gradients of keys through weights that end at their token, and through weights that begin there
    void backward_k() {
        std::fill_n(dk_endT, F * TILE, 0.0f), std::fill_n(dk_beginT, F * TILE, 0.0f);
        add_matmul(dk_endT, F, TILE, {state_before, V, 1}, dRT, V);
        add_matmul(dk_endT, F, TILE, {k, 1, F}, dM, TILE);
        add_matmul(dk_beginT, F, TILE, {dstate, V, 1}, UT, V);
        if (!decay.none) scale_columns(dk_beginT, F, decay.to_end);
        transpose(dP, TILE, TILE, transposed);
        add_matmul(dk_beginT, F, TILE, {q, 1, F}, transposed, TILE);
        transpose(dM, TILE, TILE, transposed);
        add_matmul(dk_beginT, F, TILE, {k, 1, F}, transposed, TILE);
    }

    void backward_log_decay(Int begin) {
        float pairs[TILE] = {};
        for (Int i = 0; i < F * TILE; i += TILE)
            for (Int t = 0; t < TILE; t++)
                pairs[t] += qT[i + t] * dqT[i + t] + kT[i + t] * (dk_endT[i + t] - dk_beginT[i + t]);
        store_log_decay_grads(batch_head, begin, pairs, dot(state_after, dstate, size));
    }

    // dS = r dS' + (a q)^T dY - (a k)^T (b dR)
    void backward_state() {
        if (!decay.none) scale_rows(dy, V, decay.from_state);
        scale(dstate, size, decay.chunk);
        add_matmul(dstate, F, V, {q, 1, F}, dy, TILE);
        add_matmul(dstate, F, V, {k, 1, F}, dR, TILE);
    }

    // Store the gradients of queries or keys, given the gradients of their features x = f * factors of length one
    void backward_features(
        const StridedTensor& into, Int begin, const float* gradT, const float* x, const float* derivative,
        const float* factors) {
        transpose(gradT, F, TILE, rows);
        if (feature_map != IDENTITY)
            for (Int t = 0; t < TILE; t++) {
                float *row = rows + t * F, along = dot(row, x + t * F, F);
                for (Int i = 0; i < F; i++)
                    row[i] = (row[i] - along * x[t * F + i]) * factors[t] * derivative[t * F + i];
            }
        batch_head.store(into, begin, job.features, rows);
    }
};

}  // namespace
