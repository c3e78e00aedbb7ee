// The decay of a chunk, by head or by channel, and what it does to queries, keys, pairs of both and the state.
//
// By channel, what is left of a token at a later one of the chunk is a product of gates, each of which is at most 1: it
// is made by multiplying from token to token, so that no logarithm is ever subtracted, and what shrinks below all normal
// numbers becomes 0 at once. What is left of the state is made from sums of logarithms: roundings of single gates would
// add up over the thousands of tokens that it may keep. Letters are those of chunk.py.

#pragma once

#include "state.h"

namespace {

// While one lives, its thread takes denormal numbers, which are slow and negligible, for 0
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
    const Line& line;
    const Int F = line.F;
    const bool by_channel = line.job.channel_decay;
    Decay masks;                              // of documents alone, where decay is by channel
    float *gates, *from_state, *to_end, *rows;  // (TILE, F), of the channels; `rows` is for intermediate results

    static Int scratch_size(Int F) { return 4 * TILE * F; }

    ChunkDecay(const Line& line, Scratch& scratch) : line(line) {
        for (float** x : {&gates, &from_state, &to_end, &rows}) *x = scratch.take(TILE * F);
    }

    bool none() const { return !by_channel && masks.none; }

    void load(Int begin) {
        decay_masks(line, begin, masks);
        if (!by_channel) return;
        line.load(line.job.log_decay, begin, line.job.features, gates);
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

    // Queries (in rows) times a
    void scale_queries(float* q) const { scale(q, from_state, masks.from_state); }

    // Keys times u
    void scale_keys(float* k) const { scale(k, to_end, masks.to_end); }

    // The state times r
    void scale_state(float* state) const {
        const Int V = line.V;
        if (by_channel) {
            const float* left = from_state + (TILE - 1) * F;
            for (Int f = 0; f < F; f++) {
                for (Int i = f * V; i < (f + 1) * V; i++) state[i] *= left[f];
                state[F * V + f] *= left[f];
            }
        } else if (masks.chunk != 1.0f) {
            for (Int i = 0; i < state_size(line); i++) state[i] *= masks.chunk;
        }
    }

    // P, [s][t], of queries (F, TILE) and keys in rows
    void attention_weights(const float* qT, const float* k, float* weights) const {
        std::fill_n(weights, TILE * TILE, 0.0f);
        if (by_channel)
            add_pairs(qT, k, weights);
        else
            add_matmul(weights, TILE, TILE, {k, F, 1}, qT, F);
        apply_mask(masks, weights);
    }

    // What S and dn make the gradient of queries, (F, TILE), becomes all of it, with A, [s][t]
    void backward_queries(const float* A, const float* k, float* dqT) {
        if (!by_channel) return backward_by_head(A, k, masks.from_state, dqT);
        transpose(dqT, F, TILE, rows);
        multiply(rows, from_state);
        for (Int f = 0; f < F; f += LANES) {
            FloatVec left[TILE];  // of each key at token t
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

    // The same of keys
    void backward_keys(const float* A, const float* AT, const float* q, float* dkT) {
        if (!by_channel) return backward_by_head(AT, q, masks.to_end, dkT);
        transpose(dkT, F, TILE, rows);
        multiply(rows, to_end);
        for (Int f = 0; f < F; f += LANES) {
            FloatVec left[TILE];  // of each query, seen from token s
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

    // The gradients of the log decays, of everything (F, TILE)
    void backward_log_decay(
        Int begin, const float* qT, const float* dqT, const float* kT, const float* dkT, const float* state,
        const float* dstate) {
        const ScanJob& job = line.job;
        if (by_channel) {
            const Int V = line.V;
            for (Int f = 0; f < F; f++) {
                float sum = state[F * V + f] * dstate[F * V + f];
                for (Int i = f * V; i < (f + 1) * V; i++) sum += state[i] * dstate[i];
                for (Int t = TILE - 1, i = f * TILE + t; t >= 0; t--, i--)
                    rows[t * F + f] = sum += qT[i] * dqT[i] - kT[i] * dkT[i];
            }
            line.store(job.dlog_decay, begin, job.features, rows);
            return;
        }
        float pairs[TILE] = {};
        for (Int i = 0; i < F * TILE; i += TILE)
            for (Int t = 0; t < TILE; t++) pairs[t] += qT[i + t] * dqT[i + t] - kT[i + t] * dkT[i + t];
        store_log_decay_grads(line, begin, pairs, dot(state, dstate, state_size(line)));
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

    // The queries lie in a vector, each as it is left of by the gates between it and a key
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
