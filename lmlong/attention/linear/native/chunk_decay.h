// The state of linear attention and its update by a chunk, and the decay within a chunk, by head or by channel, applied
// to queries, keys, their products and the state.
//
// By channel, the decay between two tokens of a chunk is a product of gates, each at most 1. It is computed by
// multiplying from token to token: no logarithms are subtracted, and denormal products become 0. The decay of the state
// is computed from sums of logarithms, because rounding errors of single gates would add up over thousands of tokens.
// Letters are those of chunk.py.

#pragma once

#include "chunk.h"

namespace {

constexpr float ONES[TILE] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

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

// While an object of this class exists, its thread treats denormal numbers, which are slow and negligible, as 0
class DenormalsAreZero {
#if defined(__SSE2__)
    static constexpr unsigned BITS = 0x8040;
    const unsigned before = __builtin_ia32_stmxcsr();

public:
    DenormalsAreZero() { __builtin_ia32_ldmxcsr(before | BITS); }
    ~DenormalsAreZero() { __builtin_ia32_ldmxcsr(before); }
#endif
};

struct ChunkDecay {
    const BatchHead& batch_head;
    const Int F = batch_head.F;
    const bool by_channel = batch_head.job.channel_decay;
    Decay masks;                              // by channel: of documents only
    float *gates, *from_state, *to_end, *rows;  // (TILE, F), by channel; `rows` holds intermediate results

    ChunkDecay(const BatchHead& batch_head, Scratch& scratch) : batch_head(batch_head) {
        for (float** x : {&gates, &from_state, &to_end, &rows}) *x = scratch.take(TILE * F);
    }

    bool none() const { return !by_channel && masks.none; }

    void load(Int begin) {
        decay_masks(batch_head, begin, masks);
        if (!by_channel) return;
        batch_head.load(batch_head.job.log_decay, begin, batch_head.job.features, gates);
        for (Int f = 0; f < F; f += LANES) {
            FloatVec before = {}, after = {};
            for (Int t = 0, s = TILE - 1; t < TILE; t++, s--) {
                before += lanes(gates + t * F + f);
                lanes(from_state + t * F + f) = simd_exp(before) * masks.from_state[t];
                lanes(to_end + s * F + f) = simd_exp(after) * masks.to_end[s];
                after += lanes(gates + s * F + f);
            }
        }
        for (Int i = 0; i < TILE * F; i += LANES) lanes(gates + i) = simd_exp(lanes(gates + i));
    }

    // Multiply queries, in rows, by a
    void scale_queries(float* q) const { scale(q, from_state, masks.from_state); }

    // Multiply keys by u
    void scale_keys(float* k) const { scale(k, to_end, masks.to_end); }

    // Multiply the state by r
    void scale_state(float* state) const {
        const Int V = batch_head.V;
        if (by_channel) {
            const float* left = from_state + (TILE - 1) * F;
            for (Int f = 0; f < F; f++) {
                for (Int i = f * V; i < (f + 1) * V; i++) state[i] *= left[f];
                state[F * V + f] *= left[f];
            }
        } else if (masks.chunk != 1.0f) {
            for (Int i = 0; i < state_size(batch_head); i++) state[i] *= masks.chunk;
        }
    }

    // Compute P, [s][t], from queries (F, TILE) and keys in rows
    void attention_weights(const float* qT, const float* k, float* weights) const {
        std::fill_n(weights, TILE * TILE, 0.0f);
        if (by_channel)
            add_pairs(qT, k, weights);
        else
            add_matmul(weights, TILE, TILE, {k, F, 1}, qT, F);
        apply_mask(masks, weights);
    }

    // Complete the gradient of queries: dqT (F, TILE) holds S dn; scale it by a and add the sum over A, [s][t]
    void backward_queries(const float* A, const float* k, float* dqT) {
        if (!by_channel) return backward_by_head(A, k, masks.from_state, dqT);
        transpose(dqT, F, TILE, rows);
        multiply(rows, from_state);
        for (Int f = 0; f < F; f += LANES) {
            FloatVec left[TILE];  // each key times its decay at token t
            UNROLL(t, TILE) {
                const FloatVec gate = lanes(gates + t * F + f);
                FloatVec sum = lanes(rows + t * F + f);
                UNROLL(s, t) {
                    left[s] = left[s] * gate;
                    sum += A[s * TILE + t] * left[s];
                }
                left[t] = lanes(k + t * F + f);
                lanes(rows + t * F + f) = sum + A[t * TILE + t] * left[t];
            }
        }
        transpose(rows, TILE, F, dqT);
    }

    // Complete the gradient of keys in the same way
    void backward_keys(const float* A, const float* AT, const float* q, float* dkT) {
        if (!by_channel) return backward_by_head(AT, q, masks.to_end, dkT);
        transpose(dkT, F, TILE, rows);
        multiply(rows, to_end);
        for (Int f = 0; f < F; f += LANES) {
            FloatVec left[TILE];  // each query times its decay since token s
            UNROLL(i, TILE) {
                const Int s = TILE - 1 - i;
                const FloatVec gate = lanes(gates + (i ? s + 1 : s) * F + f);
                FloatVec sum = lanes(rows + s * F + f);
                UNROLL(j, i) {
                    const Int t = s + 1 + j;
                    left[t] = left[t] * gate;
                    sum += A[s * TILE + t] * left[t];
                }
                left[s] = lanes(q + s * F + f);
                lanes(rows + s * F + f) = sum + A[s * TILE + s] * left[s];
            }
        }
        transpose(rows, TILE, F, dkT);
    }

    // Store the gradients of the log decays, given queries, keys and their gradients (F, TILE)
    void backward_log_decay(
        Int begin, const float* qT, const float* dqT, const float* kT, const float* dkT, const float* state,
        const float* dstate) {
        const ScanJob& job = batch_head.job;
        if (by_channel) {
            const Int V = batch_head.V;
            for (Int f = 0; f < F; f++) {
                float sum = state[F * V + f] * dstate[F * V + f];
                for (Int i = f * V; i < (f + 1) * V; i++) sum += state[i] * dstate[i];
                for (Int t = TILE - 1, i = f * TILE + t; t >= 0; t--, i--)
                    rows[t * F + f] = sum += qT[i] * dqT[i] - kT[i] * dkT[i];
            }
            batch_head.store(job.dlog_decay, begin, job.features, rows);
            return;
        }
        float pairs[TILE] = {};
        for (Int i = 0; i < F * TILE; i += TILE)
            for (Int t = 0; t < TILE; t++) pairs[t] += qT[i + t] * dqT[i + t] - kT[i + t] * dkT[i + t];
        store_log_decay_grads(batch_head, begin, pairs, dot(state, dstate, state_size(batch_head)));
    }

private:
    void scale(float* x, const float* by_number, const float* by_row) const {
        if (by_channel)
            multiply(x, by_number);
        else if (!masks.none)
            scale_rows(x, F, by_row);
    }

    void backward_by_head(const float* A, const float* x, const float* factors, float* gradT) const {
        if (!masks.none) scale_columns(gradT, F, factors);
        add_matmul(gradT, F, TILE, {x, 1, F}, A, TILE);
    }

    void multiply(float* x, const float* by) const {
        for (Int i = 0; i < TILE * F; i += LANES) lanes(x + i) *= lanes(by + i);
    }

    // A vector holds the queries of all tokens, each multiplied by the gates between the key and the query
    void add_pairs(const float* qT, const float* k, float* weights) const {
        constexpr Int VECTORS = TILE / LANES;
        FloatVec sums[TILE][VECTORS] = {}, token[VECTORS];
        UNROLL(v, VECTORS) UNROLL(j, LANES) token[v][j] = v * LANES + j;
        for (Int f = 0; f < F; f++) {
            FloatVec left[VECTORS];
            UNROLL(v, VECTORS) left[v] = lanes(qT + f * TILE + v * LANES);
            UNROLL(i, TILE) {
                const Int s = TILE - 1 - i;
                UNROLL(v, VECTORS) {
                    if (i) left[v] = token[v] > float(s) ? left[v] * gates[(s + 1) * F + f] : left[v];
                    sums[s][v] += k[s * F + f] * left[v];
                }
            }
        }
        UNROLL(s, TILE) UNROLL(v, VECTORS) lanes(weights + s * TILE + v * LANES) += sums[s][v];
    }
};

}  // namespace
