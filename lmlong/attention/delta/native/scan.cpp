// The delta rule over a span of tokens and its gradient: the formulas of delta/chunk.py, for one head of one row at a
// time, in chunks of TILE tokens that fit in the L1 cache. The triangular systems are solved token by token.
//
// As in linear/native/scan.cpp, a matrix x of a chunk is stored with one row per token, and xT is its transpose.

#include "backward.h"

namespace {

// The forward pass of a span: its outputs and the state after it
struct Forward : DeltaPass {
    float *E, *U, *y, *state;

    Forward(const BatchHead& batch_head, Scratch& scratch) : DeltaPass(batch_head, scratch) {
        for (float** x : {&E, &U, &y}) *x = scratch.take(TILE * V);
        state = scratch.take(state_size(batch_head));
    }

    void run() {
        load_state(batch_head, job.state_before, state);
        for (Int begin = 0; begin < job.time; begin += TILE) {
            load_keys(begin), load_queries(begin);
            key_weights(), query_weights();
            changes(state, E, U);
            outputs();
            batch_head.store(job.y, begin, job.value_dim, y);
            update_state(U, state);
        }
        store_state(batch_head, state, job.state_after);
    }

    void outputs() {
        std::fill_n(y, TILE * V, 0.0f);
        add_matmul(y, TILE, V, {q, F, 1}, state, F);
        if (!decay.none) scale_rows(y, V, decay.from_state);
        add_matmul(y, TILE, V, {P, 1, TILE}, U, TILE);
    }
};

}  // namespace

#include "scan_exports.h"
