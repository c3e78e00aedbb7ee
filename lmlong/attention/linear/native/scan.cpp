// The causal scan over a span of tokens and its gradient: the formulas of chunk.py, for one head of one row at a time,
// in chunks of TILE tokens that fit in the L1 cache.
//
// A matrix x of a chunk is stored with one row per token; xT is its transpose, with one row per feature. With both,
// every matrix product multiplies numbers by vectors (`add_matmul`). All widths are padded with zeros to multiples of
// TILE. Constants and enumerations that are not defined here come from native_kernel.py, through shared.h.

#include "backward.h"

namespace {

// The forward pass of a span: its outputs, their denominators and the state after it
struct Forward {
    const BatchHead& batch_head;
    const ScanJob& job = batch_head.job;
    const Int F = batch_head.F, V = batch_head.V;
    ChunkDecay decay;
    Features queries, keys;
    float *q = queries.rows, *k = keys.rows;
    float *v, *qT, *y, *state;
    alignas(64) float weights[TILE * TILE], denominators[TILE];

    Forward(const BatchHead& batch_head, Scratch& scratch)
        : batch_head(batch_head), decay(batch_head, scratch), queries(batch_head, false, false, scratch),
          keys(batch_head, true, false, scratch) {
        qT = scratch.take(TILE * F);
        for (float** x : {&v, &y}) *x = scratch.take(TILE * V);
        state = scratch.take(state_size(batch_head));
    }

    void run() {
        DenormalsAreZero mode;
        load_state(batch_head, job.state_before, state);
        for (Int begin = 0; begin < job.time; begin += TILE) {
            decay.load(begin);
            queries.load(begin), keys.load(begin);
            batch_head.load(job.v, begin, job.value_dim, v);
            attention_weights();
            outputs();
            store(begin);
        }
        store_state(batch_head, state, job.state_after);
    }

    // Compute the weights within the chunk, [s][t], and the denominators
    void attention_weights() {
        transpose(q, TILE, F, qT);
        decay.attention_weights(qT, k, weights);

        decay.scale_queries(q), decay.scale_keys(k);
        if (!decay.none()) transpose(q, TILE, F, qT);
        const float* z = state + F * V;
        std::fill_n(denominators, TILE, 0.0f);
        for (Int f = 0; f < F; f++)
            for (Int t = 0; t < TILE; t++) denominators[t] += z[f] * qT[f * TILE + t];
        for (Int s = 0; s < TILE; s++)
            for (Int t = 0; t < TILE; t++) denominators[t] += weights[s * TILE + t];
        for (float& x : denominators) x = x < MIN_DENOMINATOR ? MIN_DENOMINATOR : x;  // NaN stays NaN
    }

    // Compute the numerators of the outputs, and the state after the chunk
    void outputs() {
        std::fill_n(y, TILE * V, 0.0f);
        add_matmul(y, TILE, V, {q, F, 1}, state, F);
        add_matmul(y, TILE, V, {weights, 1, TILE}, v, TILE);
        decay.scale_state(state);
        add_to_state(batch_head, k, v, ONES, state);
    }

    void store(Int begin) {
        float inverse[TILE];
        for (Int t = 0; t < TILE; t++) inverse[t] = 1 / denominators[t];
        scale_rows(y, V, inverse);
        batch_head.store(job.y, begin, job.value_dim, y);
        for (Int t = 0; t < batch_head.tokens(begin); t++)
            *batch_head.pointer(job.denominators, begin + t) = denominators[t];
    }
};

}  // namespace

#include "scan_exports.h"
